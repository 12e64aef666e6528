//! `POST /auth`: a key for a token.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use muster_types::Error;
use muster_types::key::Secret;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::fields::Text;
use crate::request::Incoming;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::key;

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Login {
    #[schema(value_type = String)]
    namespace: Option<Text>,
    /// The key's secret.
    #[schema(value_type = String)]
    key: Option<Value>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Token {
    access_token: String,
    token_type: &'static str,
    /// Seconds.
    expires_in: u64,
}

/// Log in.
#[utoipa::path(post, path = "/auth", tag = "auth", request_body = Login, responses(
    (status = 200, description = "a token", body = Token),
    (status = 400, description = "a field is missing or malformed"),
    (status = 401, description = "no key has this secret"),
    (status = 404, description = "no such namespace")))]
pub(crate) async fn log_in(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Args(login): Args<Login>,
) -> ApiResult {
    let Some(Text(namespace)) = login.namespace.filter(|text| !text.0.is_empty()) else {
        return Err(Error::Invalid("missing namespace in request".into()).into());
    };
    let secret = match login.key {
        None => return Err(Error::Invalid("missing key in request".into()).into()),
        Some(Value::String(text)) => Secret::new(text),
        Some(_) => return Err(Error::Invalid("key is not a string".into()).into()),
    };
    let access_token = key::log_in(&app, &namespace, &secret, &incoming.id).await?;
    Ok::<Response, _>(ok(&Token { access_token, token_type: "Bearer", expires_in: app.tokens.lifetime() }))
}
