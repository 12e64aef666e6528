//! `/upload`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, Method, Uri};
use futures_util::StreamExt as _;
use muster_types::Error;
use muster_types::storage::ByteStream;
use muster_types::upload::UploadRecord;

use crate::arguments::{Args, Nothing, form_pairs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::peer::{self, Handed};
use crate::response::{nothing, ok};
use muster_control::app::App;
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::upload;

/// Begin an upload. Send its bytes in pieces, then make it an artifact.
#[utoipa::path(post, path = "/upload", tag = "uploads", responses((status = 200, body = UploadRecord)))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&upload::create(&app, &caller).await?))
}

/// One upload, with how much of it has arrived.
#[utoipa::path(get, path = "/upload/{upload_uuid}", tag = "uploads", params(("upload_uuid" = String, Path)),
    responses((status = 200, body = UploadRecord), (status = 404, description = "no such upload")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    uri: Uri,
    headers: HeaderMap,
    _: Args<Nothing>,
) -> ApiResult {
    let row = upload::find(&app, &caller, &id).await?;
    match upload::locate(&app, &row).await? {
        NodeLocation::Local(node) => Ok(ok(&upload::get(&node, &row).await?)),
        NodeLocation::Remote(node) => peer::ask(&app, &node, &caller, Handed::read(&uri, &headers)).await,
    }
}

/// Add bytes to the end of an upload. The answer is how long it is then.
///
/// With `offset` the bytes are only added if the upload is that long: so a piece that is sent again is not added
/// again, and what arrived before a connection broke stays. Without it a piece is added whole or not at all.
#[utoipa::path(post, path = "/upload/{upload_uuid}", tag = "uploads",
    params(("upload_uuid" = String, Path), ("offset" = Option<u64>, Query)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, description = "the new size", body = u64), (status = 404, description = "no such upload"),
    (status = 409, description = "the upload is not as long as `offset` says, or was truncated meanwhile"),
    (status = 413, description = "the upload would be larger than MAX_IMAGE_SIZE_GB"),
    (status = 507, description = "the disk is full; the upload is as it was")))]
pub(crate) async fn append(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    request: Request,
) -> ApiResult {
    let (parts, body) = request.into_parts();
    let mut at = None;
    for (name, value) in form_pairs(parts.uri.query().unwrap_or_default()) {
        if name != "offset" {
            return Err(Error::Invalid(format!("{name}: not declared by this endpoint")).into());
        }
        let number =
            value.parse::<u64>().map_err(|_| Error::Invalid("offset: Not a valid integer.".into()))?;
        at = Some(number);
    }
    let row = upload::find(&app, &caller, &id).await?;
    let patience = Duration::from_secs(app.settings.api_timeout);
    match upload::locate(&app, &row).await? {
        NodeLocation::Local(node) => {
            Ok(ok(&upload::append(&app, &node, &row, at, arriving(body, patience)).await?))
        }
        NodeLocation::Remote(node) => {
            let body = reqwest::Body::wrap_stream(arriving(body, patience));
            let handed = Handed { method: Method::POST, uri: &parts.uri, headers: &parts.headers, body };
            peer::ask(&app, &node, &caller, handed).await
        }
    }
}

/// The bytes of a request; one who sends none for too long is given up.
fn arriving(body: Body, patience: Duration) -> ByteStream {
    Box::pin(futures_util::stream::unfold(Some(body.into_data_stream()), move |body| async move {
        let mut body = body?;
        let next: Result<Option<Result<Bytes, _>>, _> = tokio::time::timeout(patience, body.next()).await;
        match next {
            Ok(None) => None,
            Ok(Some(Ok(bytes))) => Some((Ok(bytes), Some(body))),
            Ok(Some(Err(_))) => Some((Err(Error::Invalid("the request body ended early".into())), None)),
            Err(_) => Some((Err(Error::Timeout("the request body did not arrive in time".into())), None)),
        }
    }))
}

/// Cut an upload, so that what follows can be sent again.
#[utoipa::path(post, path = "/upload/{upload_uuid}/truncate/{offset}", tag = "uploads",
    params(("upload_uuid" = String, Path), ("offset" = u64, Path)), responses(
    (status = 200, description = "`null`"), (status = 400, description = "the offset is beyond the end"),
    (status = 404, description = "no such upload, or it has no data")))]
pub(crate) async fn truncate(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((id, offset)): Path<(String, String)>,
    uri: Uri,
    headers: HeaderMap,
    _: Args<Nothing>,
) -> ApiResult {
    let digits = !offset.is_empty() && offset.bytes().all(|byte| byte.is_ascii_digit());
    let size = offset.parse::<u64>().ok().filter(|_| digits).ok_or_else(|| Error::not_found("route"))?;
    let row = upload::find(&app, &caller, &id).await?;
    match upload::locate(&app, &row).await? {
        NodeLocation::Local(node) => {
            upload::truncate(&node, &row, size).await?;
            Ok(nothing())
        }
        NodeLocation::Remote(node) => {
            let body = reqwest::Body::default();
            let handed = Handed { method: Method::POST, uri: &uri, headers: &headers, body };
            peer::ask(&app, &node, &caller, handed).await
        }
    }
}
