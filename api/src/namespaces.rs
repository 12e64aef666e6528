//! `/auth/namespaces`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::namespace::NamespaceRecord;
use muster_types::object::ObjectRef;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::fields::Text;
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::pages::in_pages;
use crate::response::{nothing, ok};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::auth::access::require_namespace;
use muster_control::objects::key::KeyRequest;
use muster_control::objects::namespace;

/// The namespaces that the caller can reach, by name.
#[utoipa::path(get, path = "/auth/namespaces", tag = "auth", responses((status = 200, body = Vec<NamespaceRecord>)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<Nothing>,
) -> ApiResult {
    in_pages(move |after: Option<String>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { namespace::list_page(&app, &caller, after.as_deref()).await }
    })
    .await
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewNamespace {
    #[schema(value_type = String)]
    namespace: Option<Text>,
    /// Name of a first key.
    #[schema(value_type = Option<String>)]
    key_name: Option<Text>,
    /// Secret of that key.
    #[schema(value_type = Option<String>)]
    key: Option<Value>,
}

/// Create a namespace.
#[utoipa::path(post, path = "/auth/namespaces", tag = "auth", request_body = NewNamespace, responses(
    (status = 200, body = NamespaceRecord),
    (status = 400, description = "a field is missing or malformed"),
    (status = 403, description = "the name is taken, or the key name is reserved")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewNamespace>,
) -> ApiResult {
    let Some(Text(name)) = new.namespace else {
        return Err(Error::Invalid("no namespace specified".into()).into());
    };
    let first_key = KeyRequest { name: new.key_name.map(|text| text.0), secret: new.key, expiry: None };
    Ok(ok(&namespace::create(&app, &caller, &name, &first_key).await?))
}

/// One namespace.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}", tag = "auth", params(("namespace" = String, Path)), responses(
    (status = 200, body = NamespaceRecord), (status = 404, description = "no such namespace")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&namespace::get(&app, &caller, &name).await?))
}

/// Delete a namespace. Its name stays taken until the cleaner has been.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}", tag = "auth", params(("namespace" = String, Path)), responses(
    (status = 200, description = "`null`"), (status = 403, description = "it is `system`"),
    (status = 404, description = "no such namespace")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    namespace::delete(&app, &caller, &name).await?;
    Ok(nothing())
}

/// Events of a namespace, newest first.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/events", tag = "auth",
    params(("namespace" = String, Path), EventQuery),
    responses((status = 200, body = Vec<muster_types::event::EventRecord>)))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    require_namespace(&*app.store, &caller, &name).await?;
    answer(&app, &ObjectRef::namespace(&name), &query).await
}

/// The namespace whose metadata a call is about.
async fn metadata_object(app: &App, caller: &Caller, name: &str) -> Result<ObjectRef, Error> {
    require_namespace(&*app.store, caller, name).await?;
    Ok(ObjectRef::namespace(name))
}

metadata_routes!(
    "/auth/namespaces/{namespace}/metadata",
    "/auth/namespaces/{namespace}/metadata/{key}",
    "namespace",
    "auth",
    super::metadata_object,
    super::metadata_object
);
