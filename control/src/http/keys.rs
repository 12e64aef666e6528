//! `/auth/namespaces/{namespace}/keys`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::key::Secret;
use muster_types::time::now;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::arguments::{Args, Nothing};
use super::error::{ApiError, ApiResult};
use super::fields::Text;
use super::namespaces::secret;
use super::response::{nothing, ok};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::key;

/// Names of a namespace's keys.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 200, body = Vec<String>), (status = 404, description = "no such namespace")))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(namespace): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&key::list(&app, &caller, &namespace).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct NewKey {
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
pub(super) struct GeneratedKey {
    key_name: String,
    /// Shown only here.
    key: String,
}

/// Add a key, or replace the one of that name.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewKey, responses(
    (status = 200, description = "the generated secret, or with `key` the key's name", body = GeneratedKey),
    (status = 400, description = "a field is missing or malformed"), (status = 403, description = "reserved name"),
    (status = 404, description = "no such namespace"), (status = 422, description = "the secret is too long")))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(namespace): Path<String>,
    Args(new): Args<NewKey>,
) -> ApiResult {
    let Some(Text(name)) = new.key_name else {
        return Err(Error::Invalid("no key name specified".into()).into());
    };
    let secret = match new.key {
        None => None,
        Some(Value::String(text)) => Some(Secret::new(text)).filter(|secret| !secret.expose().is_empty()),
        Some(_) => return Err(Error::Invalid("key is not a string".into()).into()),
    };
    let expiry = expiry(new.expiry.as_ref())?;
    let generated = key::put(&app, &caller, &namespace, &name, secret, expiry).await?;
    Ok(match generated {
        Some(secret) => ok(&GeneratedKey { key_name: name, key: secret.expose().to_owned() }),
        None => ok(&name),
    })
}

/// A time that must be in the future.
fn expiry(value: Option<&Value>) -> Result<Option<f64>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    let time = value.as_f64().ok_or_else(|| Error::Invalid("expiry is not a number".into()))?;
    if time <= now() {
        return Err(Error::Invalid("expiry must be in the future".into()).into());
    }
    Ok(Some(time))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct NewSecret {
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
    responses((status = 200, description = "the key's name", body = String), (status = 404, description = "no such key")))]
pub(super) async fn update(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path((namespace, name)): Path<(String, String)>,
    Args(new): Args<NewSecret>,
) -> ApiResult {
    replace(&app, &caller, &namespace, name, new.key, new.expiry.as_ref()).await
}

/// Replace a key's secret, in the form that released clients send.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/keys", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewKey,
    responses((status = 200, description = "the key's name", body = String), (status = 404, description = "no such key")))]
pub(super) async fn update_named_in_body(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(namespace): Path<String>,
    Args(new): Args<NewKey>,
) -> ApiResult {
    let Some(Text(name)) = new.key_name else {
        return Err(Error::Invalid("no key name specified".into()).into());
    };
    replace(&app, &caller, &namespace, name, new.key, new.expiry.as_ref()).await
}

async fn replace(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: String,
    key: Option<Value>,
    expires: Option<&Value>,
) -> ApiResult {
    let secret = secret(key)?;
    key::update(app, caller, namespace, &name, &secret, expiry(expires)?).await?;
    Ok(ok(&name))
}

/// Delete a key. It and its tokens stop working at once.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/keys/{key_name}", tag = "auth",
    params(("namespace" = String, Path), ("key_name" = String, Path)),
    responses((status = 200, description = "`null`"), (status = 404, description = "no such key")))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path((namespace, name)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    key::delete(&app, &caller, &namespace, &name).await?;
    Ok(nothing())
}
