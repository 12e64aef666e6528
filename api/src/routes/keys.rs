//! `/auth/namespaces/{namespace}/keys`: the keys that tokens are created with.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::key::KeyRecord;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::{Json, Null, named_bodies};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::key::{self, KeyRequest};
use muster_store::run_or_check;

/// Lists the names of the keys of a namespace.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<String>> {
    Pages::of(key::list(&app, &caller, &namespace).await?)
}

/// Returns when a key expires and which scopes it has.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/keys/{key_name}", tag = "auth",
    params(("namespace" = String, Path), ("key_name" = String, Path)),
    responses((status = 404, description = "No such key.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<KeyRecord>> {
    Ok(Json(key::get(&app, &caller, &namespace, &name).await?))
}

/// A key with a generated secret.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GeneratedKey {
    /// The name of the key.
    key_name: String,
    /// The generated secret. It cannot be retrieved later.
    key: String,
}

/// The response to a new key.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum AddedKey {
    Generated(GeneratedKey),
    /// The key's name.
    Supplied(String),
}

named_bodies!(AddedKey);

/// Creates a key, or replaces the one of that name.
///
/// Prefer generated secrets: they are long, recognizable by secret scanners, and faster to verify than supplied ones.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    request_body = KeyRequest, responses((status = 200, description = "The generated secret, or the name of the key if the request has a secret or is a dry run."),
    (status = 400, description = "A field is missing or malformed."), (status = 403, description = "The name is reserved, the quota `keys` would be exceeded, or the token lacks the required scope."),
    (status = 404, description = "No such namespace."), (status = 422, description = "The secret is too long.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(request): Args<KeyRequest>,
) -> ApiResult<Json<AddedKey>> {
    let generated = run_or_check(request.dry_run, key::put(&app, &caller, &namespace, &request)).await?;
    let name = name_of(&request)?;
    // A secret of a key that does not exist would only mislead.
    let generated = generated.filter(|_| !request.dry_run.unwrap_or(false));
    Ok(Json(match generated {
        Some(secret) => AddedKey::Generated(GeneratedKey { key_name: name, key: secret.expose().to_owned() }),
        None => AddedKey::Supplied(name),
    }))
}

/// The new secret of a key.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"key": "correct horse battery staple"}))]
pub(crate) struct NewSecret {
    /// The new secret.
    #[schema(value_type = String)]
    key: Option<Value>,
    /// Unix time at which the key expires; never by default.
    #[schema(value_type = Option<f64>)]
    expiry: Option<Value>,
}

/// Replaces the secret of a key. Tokens created with the old one are no longer valid.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/keys/{key_name}", tag = "auth",
    params(("namespace" = String, Path), ("key_name" = String, Path)), request_body = NewSecret,
    responses((status = 200, description = "The name of the key."), (status = 404, description = "No such key."),
    (status = 422, description = "The secret is too long.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    Args(new): Args<NewSecret>,
) -> ApiResult<Json<String>> {
    let request = KeyRequest { name: Some(name), secret: new.key, expiry: new.expiry, dry_run: None };
    replace(&app, &caller, &namespace, &request).await
}

/// Replaces the secret of a key that the body names, as released clients send it.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    request_body = KeyRequest,
    responses((status = 200, description = "The name of the key."), (status = 404, description = "No such key."),
    (status = 422, description = "The secret is too long.")))]
pub(crate) async fn update_named_in_body(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(request): Args<KeyRequest>,
) -> ApiResult<Json<String>> {
    replace(&app, &caller, &namespace, &request).await
}

async fn replace(
    app: &App,
    caller: &Caller,
    namespace: &str,
    request: &KeyRequest,
) -> ApiResult<Json<String>> {
    run_or_check(request.dry_run, key::update(app, caller, namespace, request)).await?;
    Ok(Json(name_of(request)?))
}

/// Returns the name in a request that was accepted.
fn name_of(request: &KeyRequest) -> Result<String, Error> {
    Ok(request.check()?.0.to_owned())
}

/// Deletes a key. The key and its tokens are invalid immediately.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/keys/{key_name}", tag = "auth",
    params(("namespace" = String, Path), ("key_name" = String, Path)),
    responses((status = 404, description = "No such key.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    key::delete(&app, &caller, &namespace, &name).await?;
    Ok(Null)
}

metadata_routes!(
    "/auth/namespaces/{namespace}/keys/{key_name}/metadata",
    "/auth/namespaces/{namespace}/keys/{key_name}/metadata/{key}",
    ("namespace" => namespace: String, "key_name" => key_name: String),
    "auth",
    super::key::subject,
    super::key::subject
);
