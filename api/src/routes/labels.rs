//! `/label`: labels, which are names of blobs.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::artifact::ArtifactRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::Json;
use crate::routes::artifacts::max_versions;
use muster_control::app::App;
use muster_control::objects::label;

/// The next version of a label.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"blob_uuid": "0b4c5e9e-6f5b-4a58-9c27-6f0f5b1d8a11"}))]
pub(crate) struct LabelUpdate {
    /// UUID of the blob that the label points at.
    #[schema(value_type = String)]
    blob_uuid: Option<String>,
    /// The maximum number of versions to keep; 0 or absent: ARTIFACT_MAX_VERSIONS_DEFAULT.
    #[schema(value_type = Option<i64>)]
    max_versions: Option<Value>,
}

/// Points a label at a blob, as the first or the next version of the label. `path` is `<label>` or
/// `<namespace>/<label>`.
#[utoipa::path(post, path = "/label/{*path}", tag = "labels", params(("path" = String, Path)),
    request_body = LabelUpdate, responses((status = 400, description = "The label is invalid, or the blob is missing."), (status = 404, description = "No such namespace or blob.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(path): Path<String>,
    Args(update): Args<LabelUpdate>,
) -> ApiResult<Json<ArtifactRecord>> {
    let max_versions = max_versions(update.max_versions.as_ref())?;
    let blob = update.blob_uuid.as_deref();
    Ok(Json(label::update(&app, &caller, &path, blob, max_versions, false).await?))
}

/// Returns a label.
#[utoipa::path(get, path = "/label/{*path}", tag = "labels", params(("path" = String, Path)), responses((status = 404, description = "No such label.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(path): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<ArtifactRecord>> {
    Ok(Json(label::get(&app, &caller, &path).await?))
}

/// Deletes a label.
#[utoipa::path(delete, path = "/label/{*path}", tag = "labels", params(("path" = String, Path)), responses((status = 404, description = "No such label.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(path): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<ArtifactRecord>> {
    Ok(Json(label::delete(&app, &caller, &path).await?))
}
