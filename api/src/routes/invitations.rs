//! `/admin/invitations`: invitations of new hosts.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use muster_types::invitation::{InvitationRecord, RedeemedInvitation};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, required};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::incoming::Incoming;
use crate::response::{Json, named_bodies};
use muster_control::app::App;
use muster_control::objects::node_invitation;

/// The lifetime of an invitation, in seconds.
const DEFAULT_LIFETIME: u64 = 3600;

named_bodies!(InvitationRecord, RedeemedInvitation);

/// An invitation to create.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"expires_in": 3600}))]
pub(crate) struct NewInvitation {
    /// The lifetime in seconds; one hour by default, at most a week.
    expires_in: Option<u64>,
}

/// Invites a new host. The token contains what `muster node join` needs, and can be used once.
#[utoipa::path(post, path = "/admin/invitations", tag = "admin", request_body = NewInvitation, responses(
    (status = 409, description = "Another host could not reach the database or the API of this daemon; `error` says why.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewInvitation>,
) -> ApiResult<Json<InvitationRecord>> {
    let lifetime = new.expires_in.unwrap_or(DEFAULT_LIFETIME);
    Ok(Json(node_invitation::create(&app, &caller, lifetime).await?))
}

/// The use of an invitation.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"invitation": "0d9b6f1e6f5a4c0c8f0f3d0f4a1f2b3c", "proof": "q83vEjRWeJASNFZ4kBI0VniQEjRWeJASNFZ4kBI0Vng"}))]
pub(crate) struct InvitationUse {
    /// The id of the invitation.
    #[schema(value_type = String)]
    invitation: Option<String>,
    /// Shows that the host has the token of the invitation.
    #[schema(value_type = String)]
    proof: Option<String>,
}

/// Returns the settings of the cluster to an invited host, encrypted with the secret of its token.
#[utoipa::path(post, path = "/admin/invitations/redeem", tag = "admin", request_body = InvitationUse, responses(
    (status = 400, description = "A field is missing."),
    (status = 404, description = "The invitation does not exist, was used, or has expired."),
    (status = 503, description = "The database is unavailable.")))]
pub(crate) async fn redeem(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Args(used): Args<InvitationUse>,
) -> ApiResult<Json<RedeemedInvitation>> {
    let (id, proof) = (required("invitation", used.invitation)?, required("proof", used.proof)?);
    Ok(Json(node_invitation::redeem(&app, &id, &proof, &incoming.remote).await?))
}
