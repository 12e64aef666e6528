//! `/upload`: data that is sent in chunks and then becomes an artifact.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::{Path, State};
use futures_util::StreamExt as _;
use muster_types::Error;
use muster_types::storage::ByteStream;
use muster_types::upload::UploadRecord;

use crate::arguments::{Args, NoArgs, form_pairs};
use crate::error::ApiResult;
use crate::forward::{MaybeForwarded, OriginalRequest};
use crate::guard::Authenticated;
use crate::response::{Json, Null};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::upload;

/// Creates an upload. Send its data in chunks, then create an artifact from it.
///
/// An upload that is not used expires.
#[utoipa::path(post, path = "/upload", tag = "uploads", responses((status = 403, description = "A quota of the namespace would be exceeded, or the token lacks the required scope.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<NoArgs>,
) -> ApiResult<Json<UploadRecord>> {
    Ok(Json(upload::create(&app, &caller).await?))
}

/// Returns an upload, with the number of bytes received.
#[utoipa::path(get, path = "/upload/{upload_uuid}", tag = "uploads", params(("upload_uuid" = String, Path)),
    responses((status = 404, description = "No such upload.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Json<UploadRecord>>> {
    let row = upload::find(&app, &caller, &id).await?;
    match upload::locate(&app, &row).await? {
        NodeLocation::Local(node) => Ok(MaybeForwarded::Local(Json(upload::get(&app, &node, &row).await?))),
        NodeLocation::Remote(node) => {
            request.forward(&app, &node, &caller, &row.namespace).await.map(MaybeForwarded::Forwarded)
        }
    }
}

/// Appends data to an upload and returns its new size.
///
/// With `offset` the data is appended only if the upload has exactly this size: a repeated chunk is not appended
/// twice, and data received before a connection broke is kept. Without it a chunk is appended completely or not at
/// all.
#[utoipa::path(post, path = "/upload/{upload_uuid}", tag = "uploads",
    params(("upload_uuid" = String, Path), ("offset" = Option<u64>, Query, description = "The expected current size.")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, description = "The new size."), (status = 404, description = "No such upload."),
    (status = 409, description = "The size of the upload differs from `offset`, or the upload was truncated concurrently."),
    (status = 403, description = "The uploads of the namespace would exceed its quota `upload_bytes`."),
    (status = 413, description = "The upload would exceed MAX_IMAGE_SIZE_GB."),
    (status = 507, description = "The disk is full; the upload has not changed.")))]
pub(crate) async fn append(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    request: OriginalRequest,
    body: Body,
) -> ApiResult<MaybeForwarded<Json<u64>>> {
    let mut offset = None;
    for (name, value) in form_pairs(request.uri().query().unwrap_or_default()) {
        if name != "offset" {
            return Err(Error::Invalid(format!("{name}: not declared by this endpoint")).into());
        }
        let number =
            value.parse::<u64>().map_err(|_| Error::Invalid("offset: Not a valid integer.".into()))?;
        offset = Some(number);
    }
    let row = upload::find(&app, &caller, &id).await?;
    let length = body.size_hint().exact();
    let data = with_timeout(body, Duration::from_secs(app.settings.api_timeout));
    match upload::locate(&app, &row).await? {
        NodeLocation::Local(node) => {
            let size = upload::append(&app, &caller, &node, &row, offset, length, data).await?;
            Ok(MaybeForwarded::Local(Json(size)))
        }
        NodeLocation::Remote(node) => {
            let body = reqwest::Body::wrap_stream(data);
            request
                .forward_with(&app, &node, &caller, &row.namespace, body)
                .await
                .map(MaybeForwarded::Forwarded)
        }
    }
}

/// Returns the data of a request body, which fails if no data arrives within the timeout.
fn with_timeout(body: Body, timeout: Duration) -> ByteStream {
    Box::pin(futures_util::stream::unfold(Some(body.into_data_stream()), move |body| async move {
        let mut body = body?;
        let next: Result<Option<Result<Bytes, _>>, _> = tokio::time::timeout(timeout, body.next()).await;
        match next {
            Ok(None) => None,
            Ok(Some(Ok(bytes))) => Some((Ok(bytes), Some(body))),
            Ok(Some(Err(_))) => Some((Err(Error::Invalid("the request body ended early".into())), None)),
            Err(_) => Some((Err(Error::Timeout("the request body did not arrive in time".into())), None)),
        }
    }))
}

/// Truncates an upload, so that the data that follows can be sent again.
#[utoipa::path(post, path = "/upload/{upload_uuid}/truncate/{offset}", tag = "uploads",
    params(("upload_uuid" = String, Path), ("offset" = u64, Path, description = "The new size.")), responses(
    (status = 400, description = "The offset is beyond the end."),
    (status = 404, description = "No such upload, or it has no data.")))]
pub(crate) async fn truncate(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((id, offset)): Path<(String, String)>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Null>> {
    let digits = !offset.is_empty() && offset.bytes().all(|byte| byte.is_ascii_digit());
    let size = offset.parse::<u64>().ok().filter(|_| digits).ok_or_else(|| Error::not_found("route"))?;
    let row = upload::find(&app, &caller, &id).await?;
    match upload::locate(&app, &row).await? {
        NodeLocation::Local(node) => {
            upload::truncate(&app, &caller, &node, &row, size).await?;
            Ok(MaybeForwarded::Local(Null))
        }
        NodeLocation::Remote(node) => {
            request.forward(&app, &node, &caller, &row.namespace).await.map(MaybeForwarded::Forwarded)
        }
    }
}

metadata_routes!(
    "/upload/{upload_uuid}/metadata",
    "/upload/{upload_uuid}/metadata/{key}",
    ("upload_uuid" => upload_uuid: String),
    "uploads",
    super::upload::subject,
    super::upload::subject
);
