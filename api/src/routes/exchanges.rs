//! `POST /auth/federated`: exchanges the token of a trusted issuer for a key.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::incoming::Incoming;
use crate::response::{Json, named_bodies};
use muster_control::app::App;
use muster_control::objects::exchange::{self, ExchangeRequest};

/// A key that an exchange has created.
#[derive(Serialize, ToSchema)]
pub(crate) struct MintedKey {
    /// The namespace of the key.
    namespace: String,
    /// The name of the key.
    key_name: String,
    /// The secret. It cannot be retrieved later.
    key: String,
}

/// Exchanges an identity token for a key. A token can be exchanged once per rule.
#[utoipa::path(post, path = "/auth/federated", tag = "auth", request_body = ExchangeRequest, responses((status = 200, description = "A key that expires."),
    (status = 400, description = "A field is missing or malformed."),
    (status = 401, description = "The exchange was rejected; the text names the step, not the reason."),
    (status = 411, description = "The request has no content-length."),
    (status = 413, description = "The request is too large."),
    (status = 429, description = "Too many attempts from this address within a minute."),
    (status = 503, description = "The database or another dependency is unavailable.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Args(request): Args<ExchangeRequest>,
) -> ApiResult<Json<MintedKey>> {
    let origin = incoming.origin();
    let minted = exchange::create(&app, &request, origin).await?;
    let key = minted.key.expose().to_owned();
    Ok(Json(MintedKey { namespace: minted.namespace, key_name: minted.key_name, key }))
}

named_bodies!(MintedKey);
