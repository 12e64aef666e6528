//! `/clusteroperations`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::operation::OperationRecord;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::fields::Text;
use crate::guard::Authenticated;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::operation;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Target {
    /// Kind of the object. Also taken from the body.
    #[param(value_type = String)]
    target_object_type: Option<Text>,
    /// The object's id; for a namespace its name. Also taken from the body.
    #[param(value_type = String)]
    target_uuid: Option<Text>,
}

/// The operations on an object, newest first.
#[utoipa::path(get, path = "/clusteroperations", tag = "clusteroperations", params(Target), responses(
    (status = 200, body = Vec<OperationRecord>), (status = 400, description = "a parameter is missing or unknown"),
    (status = 403, description = "the object is not yours"), (status = 404, description = "no such object")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(target): Args<Target>,
) -> ApiResult {
    let (kind, id) = (target.target_object_type.map(|t| t.0), target.target_uuid.map(|t| t.0));
    Ok(ok(&operation::of_target(&app, &caller, kind.as_deref(), id.as_deref()).await?))
}

/// One operation.
#[utoipa::path(get, path = "/clusteroperations/{operation_type}/{operation_uuid}", tag = "clusteroperations",
    params(("operation_type" = String, Path), ("operation_uuid" = String, Path)), responses(
    (status = 200, body = OperationRecord), (status = 403, description = "the operation is not yours"),
    (status = 404, description = "no such operation")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((kind, id)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&operation::get(&app, &caller, &kind, &id).await?))
}

/// An operation and all that it depends on, newest first.
#[utoipa::path(get, path = "/clusteroperations/{operation_uuid}/chain", tag = "clusteroperations",
    params(("operation_uuid" = String, Path)), responses(
    (status = 200, body = Vec<OperationRecord>), (status = 400, description = "the chain is too long"),
    (status = 403, description = "part of the chain is not yours"),
    (status = 404, description = "no such operation")))]
pub(crate) async fn chain(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&operation::chain(&app, &caller, &id).await?))
}
