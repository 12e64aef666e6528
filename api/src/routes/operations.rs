//! `/clusteroperations`: operations and their dependencies.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::operation::OperationRecord;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::Json;
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::objects::operation;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct TargetQuery {
    /// Type of the object, such as `instance`. Also accepted in the body.
    #[param(value_type = String)]
    target_object_type: Option<String>,
    /// UUID of the object, or the name of a namespace. Also accepted in the body.
    #[param(value_type = String)]
    target_uuid: Option<String>,
}

/// Lists the operations on an object, newest first.
#[utoipa::path(get, path = "/clusteroperations", tag = "clusteroperations", params(TargetQuery), responses((status = 400, description = "An argument is missing or unknown."),
    (status = 403, description = "The caller does not own the object."), (status = 404, description = "No such object.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(target): Args<TargetQuery>,
) -> ApiResult<Pages<OperationRecord>> {
    let (object_type, id) = (target.target_object_type.as_deref(), target.target_uuid.as_deref());
    Pages::of(operation::of_target(&app, &caller, object_type, id).await?)
}

/// Returns an operation.
#[utoipa::path(get, path = "/clusteroperations/{operation_type}/{operation_uuid}", tag = "clusteroperations",
    params(("operation_type" = String, Path), ("operation_uuid" = String, Path)), responses((status = 403, description = "The caller does not own the operation."),
    (status = 404, description = "No such operation.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((operation_type, id)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<OperationRecord>> {
    Ok(Json(operation::get(&app, &caller, &operation_type, &id).await?))
}

/// Lists an operation and its transitive dependencies, newest first.
#[utoipa::path(get, path = "/clusteroperations/{operation_uuid}/chain", tag = "clusteroperations",
    params(("operation_uuid" = String, Path)), responses((status = 400, description = "The chain is too long."),
    (status = 403, description = "The caller does not own every operation of the chain."),
    (status = 404, description = "No such operation.")))]
pub(crate) async fn chain(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<OperationRecord>> {
    Pages::of(operation::chain(&app, &caller, &id).await?)
}

metadata_routes!(
    "/clusteroperations/{operation_type}/{operation_uuid}/metadata",
    "/clusteroperations/{operation_type}/{operation_uuid}/metadata/{key}",
    ("operation_type" => operation_type: String, "operation_uuid" => operation_uuid: String),
    "clusteroperations",
    super::operation::subject,
    super::operation::subject
);
