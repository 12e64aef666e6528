//! `…/explain`: why an object is in its state.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::explanation::Explanation;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::explanation::{explain_instance, explain_network, explain_operation};

/// Explains the state of an instance: since when and why, what it waits for, what to do, and what the scheduler decided
/// about each node.
#[utoipa::path(get, path = "/instances/{instance_ref}/explain", tag = "instances", params(("instance_ref" = String, Path)),
    responses((status = 404, description = "No such instance.")))]
pub(crate) async fn instance(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Explanation>> {
    Ok(Json(explain_instance(&app, &caller, &reference).await?))
}

/// Explains the state of a network: since when and why, what it waits for, and what to do.
#[utoipa::path(get, path = "/networks/{network_ref}/explain", tag = "networks", params(("network_ref" = String, Path)),
    responses((status = 404, description = "No such network.")))]
pub(crate) async fn network(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Explanation>> {
    Ok(Json(explain_network(&app, &caller, &reference).await?))
}

/// Explains the state of an operation: since when and why, what it waits for, and what to do.
#[utoipa::path(get, path = "/clusteroperations/{operation_type}/{operation_uuid}/explain", tag = "clusteroperations",
    params(("operation_type" = String, Path), ("operation_uuid" = String, Path)), responses(
    (status = 403, description = "The caller does not own the operation."), (status = 404, description = "No such operation.")))]
pub(crate) async fn operation(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((operation_type, id)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Explanation>> {
    Ok(Json(explain_operation(&app, &caller, &operation_type, &id).await?))
}
