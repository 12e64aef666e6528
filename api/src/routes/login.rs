//! `POST /auth`: creates a token with a key.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use muster_types::Error;
use muster_types::key::Secret;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::incoming::Incoming;
use crate::response::{Json, named_bodies};
use muster_control::app::App;
use muster_control::objects::key;

/// The credentials of a namespace.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"namespace": "ci", "key": "correct horse battery staple"}))]
pub(crate) struct Login {
    /// The namespace of the key.
    #[schema(value_type = String)]
    namespace: Option<String>,
    /// The secret of the key.
    #[schema(value_type = String)]
    key: Option<Value>,
}

/// A token of the API.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Token {
    /// The token, for the header `Authorization: Bearer …`.
    access_token: String,
    /// Always `Bearer`.
    token_type: &'static str,
    /// Lifetime in seconds.
    expires_in: u64,
}

named_bodies!(Token);

/// Creates a token.
///
/// Tokens expire after `expires_in` seconds, and become invalid when their key is deleted or replaced.
#[utoipa::path(post, path = "/auth", tag = "auth", request_body = Login, responses((status = 200, description = "A token."),
    (status = 400, description = "A field is missing or malformed."),
    (status = 401, description = "No key of the namespace has this secret."),
    (status = 404, description = "No such namespace."),
    (status = 413, description = "The request is too large."),
    (status = 429, description = "Too many logins of this address or namespace are waiting; retry after the given time."),
    (status = 503, description = "The database or another dependency is unavailable.")))]
pub(crate) async fn log_in(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Args(login): Args<Login>,
) -> ApiResult<Json<Token>> {
    let Some(namespace) = login.namespace.filter(|name| !name.is_empty()) else {
        return Err(Error::Invalid("missing namespace in request".into()).into());
    };
    let secret = match login.key {
        None => return Err(Error::Invalid("missing key in request".into()).into()),
        Some(Value::String(text)) => Secret::new(text),
        Some(_) => return Err(Error::Invalid("key is not a string".into()).into()),
    };
    let origin = incoming.origin();
    let access_token = key::log_in(&app, &namespace, &secret, origin).await?;
    Ok(Json(Token { access_token, token_type: "Bearer", expires_in: app.tokens.lifetime() }))
}
