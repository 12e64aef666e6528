//! `/auth/namespaces`: namespaces, and their events and metadata.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::event::EventRecord;
use muster_types::namespace::NamespaceRecord;
use muster_types::object::ObjectRef;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::{Pages, in_pages};
use crate::response::{Json, Null};
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::auth::access::require_namespace;
use muster_control::objects::key::KeyRequest;
use muster_control::objects::namespace;
use muster_store::run_or_check;

/// Lists the namespaces that the caller has access to, ordered by name.
#[utoipa::path(get, path = "/auth/namespaces", tag = "auth")]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<NoArgs>,
) -> ApiResult<Pages<NamespaceRecord>> {
    in_pages(move |after: Option<String>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { namespace::list_page(&app, &caller, after.as_deref()).await }
    })
    .await
}

/// A new namespace.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"namespace": "ci", "key_name": "robot"}))]
pub(crate) struct NewNamespace {
    /// The name of the namespace.
    #[schema(value_type = String)]
    namespace: Option<String>,
    /// Name of an initial key.
    key_name: Option<String>,
    /// Secret of the initial key.
    #[schema(value_type = Option<String>)]
    key: Option<Value>,
    /// Whether to only check the request, without creating anything; false by default. The response is the record that would
    /// be created.
    dry_run: Option<bool>,
}

/// Creates a namespace.
///
/// All other objects belong to a namespace, and can be seen by its keys, by namespaces that it trusts, and by `system`.
#[utoipa::path(post, path = "/auth/namespaces", tag = "auth", request_body = NewNamespace, responses((status = 400, description = "A field is missing or malformed."),
    (status = 403, description = "The name is in use, or the key name is reserved."), (status = 422, description = "The secret is too long.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewNamespace>,
) -> ApiResult<Json<NamespaceRecord>> {
    let Some(name) = new.namespace else {
        return Err(Error::Invalid("no namespace specified".into()).into());
    };
    let first_key = KeyRequest { name: new.key_name, secret: new.key, ..KeyRequest::default() };
    let creation = namespace::create(&app, &caller, &name, &first_key);
    Ok(Json(run_or_check(new.dry_run, creation).await?))
}

/// Returns a namespace.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}", tag = "auth", params(("namespace" = String, Path)), responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<NamespaceRecord>> {
    Ok(Json(namespace::get(&app, &caller, &name).await?))
}

/// Deletes a namespace. Its name stays in use until the namespace is purged.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}", tag = "auth", params(("namespace" = String, Path)), responses((status = 403, description = "The namespace `system` cannot be deleted."),
    (status = 404, description = "No such namespace.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    namespace::delete(&app, &caller, &name).await?;
    Ok(Null)
}

/// Lists the events of a namespace, newest first.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/events", tag = "auth",
    params(("namespace" = String, Path), EventQuery), responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    require_namespace(&*app.store, &caller, &name).await?;
    events_of(&app, &ObjectRef::namespace(&name), &query).await
}

/// Finds the namespace whose metadata a request accesses.
async fn metadata_object(app: &App, caller: &Caller, name: &str) -> Result<ObjectRef, Error> {
    require_namespace(&*app.store, caller, name).await?;
    Ok(ObjectRef::namespace(name))
}

metadata_routes!(
    "/auth/namespaces/{namespace}/metadata",
    "/auth/namespaces/{namespace}/metadata/{key}",
    ("namespace" => namespace: String),
    "auth",
    super::metadata_object,
    super::metadata_object
);
