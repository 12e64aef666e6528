//! `/nodes`: the hosts of the cluster.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::event::EventRecord;
use muster_types::node::{EvacuationRecord, NodeRecord};
use muster_types::object::{ObjectRef, ObjectType};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::Json;
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::evacuate;
use muster_control::objects::node;

/// Lists every node that has joined the cluster.
#[utoipa::path(get, path = "/nodes", tag = "nodes")]
pub(crate) async fn list(State(app): State<Arc<App>>, _: Args<NoArgs>) -> ApiResult<Pages<NodeRecord>> {
    Pages::of(node::list(&app).await?)
}

/// Returns a node.
#[utoipa::path(get, path = "/nodes/{node}", tag = "nodes", params(("node" = String, Path)), responses((status = 404, description = "No such node.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<NodeRecord>> {
    Ok(Json(node::get(&app, &name).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct DeleteQuery {
    /// Declares that the host of a node that does not check in is dead. Its instances end in `error` and keep their
    /// addresses; the disks stay on the host. Also accepted in the body.
    dead: Option<bool>,
    /// Alias of `dead`.
    force: Option<bool>,
}

/// Deletes a node. Its daemon cannot register it again.
///
/// A node that is alive must be drained, or in maintenance without instances. A node that does not check in requires `dead`: its VMs may still be
/// running. If its host returns, the daemon stops them and moves their files to `lost+found`.
#[utoipa::path(delete, path = "/nodes/{node}", tag = "nodes", params(("node" = String, Path), DeleteQuery),
    responses((status = 404, description = "No such node."),
    (status = 409, description = "The node is alive and not drained, or does not check in; `error` says what to do.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(query): Args<DeleteQuery>,
) -> ApiResult<Json<NodeRecord>> {
    let dead = query.dead.or(query.force).unwrap_or(false);
    Ok(Json(node::delete(&app, &caller, &name, dead).await?))
}

/// Declares that the host of a node is dead.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"dead": true}))]
pub(crate) struct NodeEvacuation {
    /// Must be true: confirms that the host does not run. If it runs, its VMs run twice until it returns.
    dead: Option<bool>,
}

/// Restarts the instances of a dead node on other nodes.
///
/// Each instance keeps its uuid, name, MAC addresses and addresses. Disks on shared storage are used as they are, by a node that
/// has mounted it. Others are created again from the latest snapshot of each disk or, if the instance is `disposable`, from its
/// images; otherwise it ends in `error`. An instance for which no node has capacity stays on the node: repeat the request. If the host returns, it stops its VMs before it does anything else.
#[utoipa::path(post, path = "/nodes/{node}/evacuate", tag = "nodes", params(("node" = String, Path)), request_body = NodeEvacuation,
    responses((status = 404, description = "No such node."),
    (status = 409, description = "The node is alive, or `dead` is not true.")))]
pub(crate) async fn evacuate(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(request): Args<NodeEvacuation>,
) -> ApiResult<Json<Vec<EvacuationRecord>>> {
    let row = node::find(&app, &name).await?;
    Ok(Json(evacuate::evacuate(&app, &caller, &row, request.dead.unwrap_or(false)).await?))
}

/// Returns the CPU usage of the daemon of a node.
#[utoipa::path(get, path = "/nodes/{node}/processmetrics", tag = "nodes", params(("node" = String, Path)), responses((status = 200, description = "Metrics by name."), (status = 404, description = "No such node.")))]
pub(crate) async fn process_metrics(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Map<String, Value>>> {
    Ok(Json(node::find(&app, &name).await?.report.process_metrics))
}

/// Lists the events of a node, newest first.
#[utoipa::path(get, path = "/nodes/{node}/events", tag = "nodes", params(("node" = String, Path), EventQuery),
    responses((status = 404, description = "No such node.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    let row = node::find(&app, &name).await?;
    events_of(&app, &ObjectRef::new(ObjectType::Node, row.identity.id), &query).await
}

/// Finds the node whose metadata a request accesses.
async fn metadata_object(app: &App, _: &Caller, name: &str) -> Result<ObjectRef, Error> {
    Ok(ObjectRef::new(ObjectType::Node, node::find(app, name).await?.identity.id))
}

metadata_routes!(
    "/nodes/{node}/metadata",
    "/nodes/{node}/metadata/{key}",
    ("node" => node: String),
    "nodes",
    super::metadata_object,
    super::metadata_object
);
