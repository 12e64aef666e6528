//! `/label`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::artifact::ArtifactRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::artifacts::max_versions;
use crate::error::ApiResult;
use crate::fields::Text;
use crate::guard::Authenticated;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::label;

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LabelUpdate {
    #[schema(value_type = String)]
    blob_uuid: Option<Text>,
    /// How many versions are kept; 0 and absent are the default.
    #[schema(value_type = Option<i64>)]
    max_versions: Option<Value>,
}

/// Make a label point at a blob: a new label, or its next version. `path` is `<label>` or `<namespace>/<label>`.
#[utoipa::path(post, path = "/label/{*path}", tag = "labels", params(("path" = String, Path)),
    request_body = LabelUpdate, responses((status = 200, body = ArtifactRecord),
    (status = 400, description = "not a label, or no blob"), (status = 404, description = "no such namespace or blob")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(path): Path<String>,
    Args(update): Args<LabelUpdate>,
) -> ApiResult {
    let blob = update.blob_uuid.map(|text| text.0);
    let most = update.max_versions.as_ref().map_or(Ok(0), max_versions)?;
    Ok(ok(&label::update(&app, &caller, &path, blob.as_deref(), most, false).await?))
}

/// One label.
#[utoipa::path(get, path = "/label/{*path}", tag = "labels", params(("path" = String, Path)), responses(
    (status = 200, body = ArtifactRecord), (status = 404, description = "no such label")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(path): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&label::get(&app, &caller, &path).await?))
}

/// Delete a label.
#[utoipa::path(delete, path = "/label/{*path}", tag = "labels", params(("path" = String, Path)), responses(
    (status = 200, body = ArtifactRecord), (status = 404, description = "no such label")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(path): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&label::delete(&app, &caller, &path).await?))
}
