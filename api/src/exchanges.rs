//! `POST /auth/federated`: a token of a trusted issuer for a key.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::request::Incoming;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::exchange::{self, ExchangeRequest, Origin};

/// Where exchanges are asked for.
pub(crate) const PATH: &str = "/auth/federated";

#[derive(Deserialize, ToSchema)]
pub(crate) struct NewExchange {
    /// The identity token of a trusted issuer.
    #[schema(value_type = String)]
    token: Option<Value>,
    /// The namespace that the key is wanted for.
    #[schema(value_type = String)]
    namespace: Option<Value>,
    /// Name of the mapping rule in that namespace.
    #[schema(value_type = String)]
    rule: Option<Value>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct MintedKey {
    namespace: String,
    key_name: String,
    /// Shown only here.
    key: String,
}

/// Exchange an identity token for a key. Each token is good for one key of a rule.
#[utoipa::path(post, path = "/auth/federated", tag = "auth", request_body = NewExchange, responses(
    (status = 200, description = "a key that expires", body = MintedKey),
    (status = 400, description = "a field is missing or malformed"),
    (status = 401, description = "refused; the text names the step, not the reason"),
    (status = 411, description = "the request does not say its length"),
    (status = 413, description = "the request is too large"),
    (status = 429, description = "too many attempts of this address in this minute"),
    (status = 503, description = "the database or something else that is needed does not answer")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Args(new): Args<NewExchange>,
) -> ApiResult {
    let request = ExchangeRequest { token: new.token, namespace: new.namespace, rule: new.rule };
    let origin = Origin { source: &incoming.remote, request_id: &incoming.id };
    let minted = exchange::create(&app, &request, origin).await?;
    let key = minted.key.expose().to_owned();
    Ok(ok(&MintedKey { namespace: minted.namespace, key_name: minted.key_name, key }))
}
