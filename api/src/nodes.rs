//! `/nodes`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::node::NodeRecord;
use muster_types::object::{ObjectRef, ObjectType};

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::response::ok;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::node;

/// Every node that ever joined.
#[utoipa::path(get, path = "/nodes", tag = "nodes", responses((status = 200, body = Vec<NodeRecord>)))]
pub(crate) async fn list(State(app): State<Arc<App>>, _: Args<Nothing>) -> ApiResult {
    Ok(ok(&node::list(&app).await?))
}

/// One node, by name or id.
#[utoipa::path(get, path = "/nodes/{node}", tag = "nodes", params(("node" = String, Path)), responses(
    (status = 200, body = NodeRecord), (status = 404, description = "no such node")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&node::get(&app, &name).await?))
}

/// Delete a node. It does not come back by checking in.
#[utoipa::path(delete, path = "/nodes/{node}", tag = "nodes", params(("node" = String, Path)), responses(
    (status = 200, body = NodeRecord), (status = 404, description = "no such node")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&node::delete(&app, &caller, &name).await?))
}

/// Processor use of a node's daemon.
#[utoipa::path(get, path = "/nodes/{node}/processmetrics", tag = "nodes", params(("node" = String, Path)), responses(
    (status = 200, description = "numbers by name", body = Object), (status = 404, description = "no such node")))]
pub(crate) async fn process_metrics(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&node::find(&app, &name).await?.report.process_metrics))
}

/// Events of a node, newest first.
#[utoipa::path(get, path = "/nodes/{node}/events", tag = "nodes", params(("node" = String, Path), EventQuery),
    responses((status = 200, body = Vec<muster_types::event::EventRecord>), (status = 404, description = "no such node")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let row = node::find(&app, &name).await?;
    answer(&app, &ObjectRef::new(ObjectType::Node, row.identity.id), &query).await
}

/// The node whose metadata a call is about.
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
