//! `/nodes`: draining. See docs/decisions/0071.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::node::{DrainRecord, NodeRecord};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::node_drain;

/// How a node is drained.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"dry_run": true}))]
pub(crate) struct NodeDrain {
    /// Only return the forecast; absent: false.
    dry_run: Option<bool>,
    /// Whether instances that cannot be migrated while they run are powered off, and started on their new nodes; absent: false.
    stop: Option<bool>,
}

/// Drains a node: it gets no new instances, and its instances are migrated to other nodes, two at a time.
///
/// The response forecasts what happens to each instance. The operation ends in `error` with the reasons if instances remain that
/// cannot be migrated; the node still gets no new ones. Repeat the request to try again.
#[utoipa::path(post, path = "/nodes/{node}/drain", tag = "nodes", params(("node" = String, Path)), request_body = NodeDrain,
    responses((status = 404, description = "No such node."),
    (status = 409, description = "The node does not check in; `error` says what to do.")))]
pub(crate) async fn drain(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(request): Args<NodeDrain>,
) -> ApiResult<Json<DrainRecord>> {
    let (stop, dry_run) = (request.stop.unwrap_or(false), request.dry_run.unwrap_or(false));
    Ok(Json(node_drain::drain(&app, &caller, &name, stop, dry_run).await?))
}

/// Lets a node get new instances again. If it is being drained, this cancels it: running migrations are cancelled, and
/// instances that have moved stay on their new nodes.
#[utoipa::path(post, path = "/nodes/{node}/undrain", tag = "nodes", params(("node" = String, Path)),
    responses((status = 404, description = "No such node."), (status = 409, description = "The node is deleted.")))]
pub(crate) async fn undrain(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<NodeRecord>> {
    Ok(Json(node_drain::undrain(&app, &caller, &name).await?))
}

/// Keeps new instances from a node until it is undrained. Its instances stay. If it is being drained, this cancels it.
#[utoipa::path(post, path = "/nodes/{node}/maintenance", tag = "nodes", params(("node" = String, Path)),
    responses((status = 404, description = "No such node."), (status = 409, description = "The node is deleted.")))]
pub(crate) async fn start_maintenance(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<NodeRecord>> {
    Ok(Json(node_drain::start_maintenance(&app, &caller, &name).await?))
}
