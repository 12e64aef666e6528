//! `/nodes`: the hosts of the cluster.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::event::EventRecord;
use muster_types::node::NodeRecord;
use muster_types::object::{ObjectRef, ObjectType};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::IntoParams;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::Json;
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::node;

/// Lists every node that has joined the cluster.
#[utoipa::path(get, path = "/nodes", tag = "nodes")]
pub(crate) async fn list(State(app): State<Arc<App>>, _: Args<NoArgs>) -> ApiResult<Json<Vec<NodeRecord>>> {
    Ok(Json(node::list(&app).await?))
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
    /// Whether to delete a node that is alive or has instances. Its VMs are stopped and its instances end in `error`; the
    /// disks stay on the host. Also accepted in the body.
    force: Option<bool>,
}

/// Deletes a node. Its daemon cannot register it again.
#[utoipa::path(delete, path = "/nodes/{node}", tag = "nodes", params(("node" = String, Path), DeleteQuery),
    responses((status = 404, description = "No such node."),
    (status = 409, description = "The node is alive or has instances; `error` lists them.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(query): Args<DeleteQuery>,
) -> ApiResult<Json<NodeRecord>> {
    Ok(Json(node::delete(&app, &caller, &name, query.force.unwrap_or(false)).await?))
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
) -> ApiResult<Json<Vec<EventRecord>>> {
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
    "node",
    "nodes",
    super::metadata_object,
    super::metadata_object
);
