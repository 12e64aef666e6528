//! `/auth/namespaces/{namespace}/keys`.

use std::sync::Arc;

use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::fields::Text;
use crate::guard::Authenticated;
use crate::response::{nothing, ok};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::key::{self, KeyRequest};

/// Names of a namespace's keys.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 200, body = Vec<String>), (status = 404, description = "no such namespace")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&key::list(&app, &caller, &namespace).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewKey {
    #[schema(value_type = String)]
    key_name: Option<Text>,
    /// The secret; absent or empty: one is generated and answered.
    #[schema(value_type = Option<String>)]
    key: Option<Value>,
    /// Unix time after which the key does not work.
    #[schema(value_type = Option<f64>)]
    expiry: Option<Value>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GeneratedKey {
    key_name: String,
    /// Shown only here.
    key: String,
}

/// What adding a key answers.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum AddedKey {
    Generated(GeneratedKey),
    /// The key's name.
    Supplied(String),
}

/// Add a key, or replace the one of that name.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewKey, responses(
    (status = 200, description = "the generated secret, or with `key` the key's name", body = AddedKey),
    (status = 400, description = "a field is missing or malformed"), (status = 403, description = "reserved name"),
    (status = 404, description = "no such namespace"), (status = 422, description = "the secret is too long")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewKey>,
) -> ApiResult {
    let request = KeyRequest::from(new);
    let generated = key::put(&app, &caller, &namespace, &request).await?;
    let name = request.name.unwrap_or_default();
    Ok(ok(&match generated {
        Some(secret) => AddedKey::Generated(GeneratedKey { key_name: name, key: secret.expose().to_owned() }),
        None => AddedKey::Supplied(name),
    }))
}

impl From<NewKey> for KeyRequest {
    fn from(new: NewKey) -> Self {
        Self { name: new.key_name.map(|text| text.0), secret: new.key, expiry: new.expiry }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewSecret {
    /// The new secret.
    #[schema(value_type = String)]
    key: Option<Value>,
    /// Unix time after which the key does not work; absent: never.
    #[schema(value_type = Option<f64>)]
    expiry: Option<Value>,
}

/// Replace a key's secret. Tokens made from the old one stop working.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/keys/{key_name}", tag = "auth",
    params(("namespace" = String, Path), ("key_name" = String, Path)), request_body = NewSecret,
    responses((status = 200, description = "the key's name", body = String), (status = 404, description = "no such key"),
    (status = 422, description = "the secret is too long")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    Args(new): Args<NewSecret>,
) -> ApiResult {
    let request = KeyRequest { name: Some(name), secret: new.key, expiry: new.expiry };
    replace(&app, &caller, &namespace, &request).await
}

/// Replace a key's secret, in the form that released clients send.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewKey,
    responses((status = 200, description = "the key's name", body = String), (status = 404, description = "no such key"),
    (status = 422, description = "the secret is too long")))]
pub(crate) async fn update_named_in_body(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewKey>,
) -> ApiResult {
    replace(&app, &caller, &namespace, &new.into()).await
}

async fn replace(app: &App, caller: &Caller, namespace: &str, request: &KeyRequest) -> ApiResult {
    key::update(app, caller, namespace, request).await?;
    Ok(ok(&request.name))
}

/// Delete a key. It and its tokens stop working at once.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/keys/{key_name}", tag = "auth",
    params(("namespace" = String, Path), ("key_name" = String, Path)),
    responses((status = 200, description = "`null`"), (status = 404, description = "no such key")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    key::delete(&app, &caller, &namespace, &name).await?;
    Ok(nothing())
}
