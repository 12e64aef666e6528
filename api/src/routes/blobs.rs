//! `/blobs` and `/blob_checksums`: immutable content and its checksums.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use futures_util::StreamExt as _;
use muster_types::Error;
use muster_types::blob::BlobRecord;
use muster_types::event::EventRecord;
use muster_types::ids::BlobId;
use muster_types::node::NodeApi;
use muster_types::object::ObjectRef;
use muster_types::storage::ByteStream;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::arguments::{Args, NoArgs};
use crate::error::{ApiError, ApiResult, error_response};
use crate::forward::OriginalRequest;
use crate::guard::Authenticated;
use crate::pages::{Pages, in_pages};
use crate::response::{Json, Null, respond};
use crate::routes::events::{EventQuery, own_events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::blob::{self, NodeRef};
use muster_control::objects::blob_copy;
use muster_control::objects::node;
use muster_control::objects::node_location::NodeLocation;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct BlobQuery {
    /// Return only blobs that this node has a replica of; a UUID or a name. Also accepted in the body.
    node: Option<String>,
}

/// Lists the blobs.
#[utoipa::path(get, path = "/blobs", tag = "blobs", params(BlobQuery), responses((status = 404, description = "No such node.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Args(query): Args<BlobQuery>,
) -> ApiResult<Pages<BlobRecord>> {
    let node = match query.node.filter(|name| !name.is_empty()) {
        Some(name) => Some(node::find(&app, &name).await?.identity.id),
        None => None,
    };
    in_pages(move |after: Option<BlobId>| {
        let app = Arc::clone(&app);
        async move { blob::list_page(&app, node, after).await }
    })
    .await
}

/// Returns a blob.
#[utoipa::path(get, path = "/blobs/{blob_uuid}", tag = "blobs", params(("blob_uuid" = String, Path)), responses((status = 404, description = "No such blob.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<BlobRecord>> {
    Ok(Json(blob::get(&app, &caller, &id).await?))
}

/// Deletes a blob that the caller's namespace has sent, instead of after BLOB_DELETION_DELAY. Does nothing while the blob is
/// in use.
#[utoipa::path(delete, path = "/blobs/{blob_uuid}", tag = "blobs", params(("blob_uuid" = String, Path)),
    responses((status = 404, description = "No such blob, or the namespace has not sent it.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    blob::delete(&app, &caller, &id).await?;
    Ok(Null)
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct DataQuery {
    /// The first byte; 0 by default.
    offset: Option<i64>,
    /// The maximum number of bytes; 0 or absent: all.
    limit: Option<i64>,
}

/// Returns the content of a blob, or a part of it: by `offset` and `limit`, or by the header `Range`.
#[utoipa::path(get, path = "/blobs/{blob_uuid}/data", tag = "blobs", params(("blob_uuid" = String, Path), DataQuery),
    responses((status = 200, description = "The content.", content_type = "text/plain", body = Vec<u8>),
    (status = 206, description = "The requested range.", content_type = "text/plain", body = Vec<u8>),
    (status = 400, description = "Offset or limit is negative."),
    (status = 404, description = "No such blob, or no node has a complete replica."),
    (status = 416, description = "The range is beyond the end of the blob.")))]
pub(crate) async fn data(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    request: OriginalRequest,
    Args(query): Args<DataQuery>,
) -> ApiResult<Response> {
    let number = |field: Option<i64>, name: &str| {
        u64::try_from(field.unwrap_or(0)).map_err(|_| Error::Invalid(format!("{name} cannot be negative")))
    };
    let (offset, limit) = (number(query.offset, "offset")?, number(query.limit, "limit")?);
    let (row, location) = blob::locate(&app, &id).await?;
    if matches!(location, NodeLocation::Remote(_)) && request.is_forwarded() {
        return Err(Error::NotFound("blob missing".into()).into());
    }
    let transfer = app.begin_transfer()?;
    blob::record_use(&app, &caller, &row).await;
    let size = row.content().size;
    let tag = format!("\"{}\"", row.id);
    let requested = match (query.offset, query.limit) {
        (None, None) => requested_range(request.headers(), &tag, size),
        _ => RequestedRange::Ignored,
    };
    let (status, range) = match requested {
        RequestedRange::Satisfiable(range) => (StatusCode::PARTIAL_CONTENT, range),
        RequestedRange::Unsatisfiable => return unsatisfiable(size),
        RequestedRange::Ignored => {
            let end = if limit == 0 { size } else { offset.saturating_add(limit).min(size) };
            (StatusCode::OK, offset.min(end)..end)
        }
    };
    let stream = match location {
        NodeLocation::Local(node) => local_stream(&app, &node, row.id, range.clone()).await?,
        NodeLocation::Remote(_) => {
            let holders = blob_copy::live_holders(&app, row.id).await?;
            blob_copy::read_remote(&app, &row, range.clone(), holders).await?
        }
    };
    let stream = stream.inspect(move |_| {
        // Held until the response is sent.
        let _transfer = &transfer;
    });
    let mut response = respond(status, HeaderValue::from_static("text/plain"), Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, (range.end - range.start).into());
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::ETAG, header_value(&tag)?);
    if status == StatusCode::PARTIAL_CONTENT {
        let last = range.end.saturating_sub(1);
        headers.insert(header::CONTENT_RANGE, header_value(&format!("bytes {}-{last}/{size}", range.start))?);
    }
    Ok(response)
}

/// Reads a part of a blob from a node of this daemon, and marks its copy as damaged if that fails.
async fn local_stream(
    app: &Arc<App>,
    node: &Arc<dyn NodeApi>,
    blob: BlobId,
    range: Range<u64>,
) -> Result<ByteStream, Error> {
    let source = NodeRef::of(node);
    let stream = match node.storage().read(blob, range).await {
        Ok(stream) => stream,
        Err(error) => return Err(unreadable(app, blob, &source, error).await),
    };
    let app = Arc::clone(app);
    Ok(Box::pin(stream.then(move |chunk| {
        let (app, source) = (Arc::clone(&app), source.clone());
        async move {
            match chunk {
                Ok(bytes) => Ok(bytes),
                Err(error) => Err(unreadable(&app, blob, &source, error).await),
            }
        }
    })))
}

fn header_value(text: &str) -> Result<HeaderValue, Error> {
    HeaderValue::from_str(text).map_err(|error| Error::Internal(error.to_string()))
}

/// Marks an unreadable replica as damaged, so that it is not served again, and returns the error for the caller.
async fn unreadable(app: &App, blob: BlobId, node: &NodeRef, error: Error) -> Error {
    let reason = match &error {
        Error::Internal(reason) => reason.clone(),
        Error::NotFound(_) => "its file is missing".to_owned(),
        _ => return error,
    };
    if let Err(error) = blob::set_damaged(app, blob, node, &reason).await {
        tracing::error!(%blob, %error, "failed to mark replica as damaged");
    }
    Error::NotFound("blob missing".into())
}

/// The part of a blob that the header `Range` requests.
#[derive(Debug, PartialEq, Eq)]
enum RequestedRange {
    Satisfiable(Range<u64>),
    /// The range is beyond the end of the blob.
    Unsatisfiable,
    /// There is no range, or one in a form that is not supported: the whole blob is sent.
    Ignored,
}

fn requested_range(headers: &HeaderMap, tag: &str, size: u64) -> RequestedRange {
    match parse_range(headers, tag, size) {
        None => RequestedRange::Ignored,
        Some(range) if range.start < range.end => RequestedRange::Satisfiable(range),
        Some(_) => RequestedRange::Unsatisfiable,
    }
}

fn parse_range(headers: &HeaderMap, tag: &str, size: u64) -> Option<Range<u64>> {
    let text = headers.get(header::RANGE)?.to_str().ok()?.trim();
    // The caller has a part of another version, so it needs all of this one.
    if headers.get(header::IF_RANGE).is_some_and(|known| known.as_bytes() != tag.as_bytes()) {
        return None;
    }
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    match (first.trim(), last.trim()) {
        ("", last) => Some(size.saturating_sub(last.parse().ok()?)..size),
        (first, "") => Some(first.parse().ok()?..size),
        (first, last) => {
            let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then(|| first..last.saturating_add(1).min(size))
        }
    }
}

fn unsatisfiable(size: u64) -> ApiResult<Response> {
    let mut response = error_response(StatusCode::RANGE_NOT_SATISFIABLE, "the blob has no such part");
    response.headers_mut().insert(header::CONTENT_RANGE, header_value(&format!("bytes */{size}"))?);
    Ok(response)
}

/// Lists the events of a blob that the caller's namespace caused, newest first; all for `system`.
#[utoipa::path(get, path = "/blobs/{blob_uuid}/events", tag = "blobs",
    params(("blob_uuid" = String, Path), EventQuery), responses((status = 404, description = "No such blob.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    own_events_of(&app, &caller, &object(&app, &caller, &id).await?, &query).await
}

/// Returns a checksum of a blob, or `null` if it is not computed yet.
#[utoipa::path(get, path = "/blobs/{blob_uuid}/checksum/{algorithm}", tag = "blobs",
    params(("blob_uuid" = String, Path), ("algorithm" = String, Path)),
    responses((status = 400, description = "Unknown hash algorithm."),
    (status = 404, description = "No such blob.")))]
pub(crate) async fn checksum(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Path((id, algorithm)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Option<String>>> {
    Ok(Json(blob::checksum(&app, &id, &algorithm).await?))
}

/// Searches the blobs that the caller can read through an artifact for a checksum. Returns `null` if none matches.
#[utoipa::path(get, path = "/blob_checksums/{algorithm}/{hash}", tag = "blobs",
    params(("algorithm" = String, Path), ("hash" = String, Path)),
    responses((status = 400, description = "Unknown hash algorithm.")))]
pub(crate) async fn search(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((algorithm, hash)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Option<BlobRecord>>> {
    Ok(Json(blob::search(&app, &caller, &algorithm, &hash).await?))
}

/// Rejects a search without a checksum.
#[utoipa::path(get, path = "/blob_checksums/{algorithm}", tag = "blobs", params(("algorithm" = String, Path)),
    responses((status = 400, description = "The hash is missing.")))]
pub(crate) async fn search_without_hash(
    _: Authenticated,
    Path(_algorithm): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Infallible> {
    Err(Error::Invalid("you must specify a hash".into()).into())
}

/// Finds the blob of a request. Its UUID is sufficient authorization: metadata and events are those of the caller's
/// namespace.
async fn object(app: &App, _: &Caller, id: &str) -> Result<ObjectRef, ApiError> {
    Ok(blob::object(blob::find(app, id).await?.id))
}

metadata_routes!(
    "/blobs/{blob_uuid}/metadata",
    "/blobs/{blob_uuid}/metadata/{key}",
    ("blob_uuid" => blob_uuid: String),
    "blobs",
    super::object,
    super::object
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_ranges_as_rfc_9110_defines_them() {
        let requested = |range: &str, known: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::RANGE, range.parse().unwrap());
            if let Some(known) = known {
                headers.insert(header::IF_RANGE, known.parse().unwrap());
            }
            requested_range(&headers, "\"x\"", 10)
        };
        for (text, range) in [
            ("bytes=0-", Some(0..10)),
            ("bytes=3-5", Some(3..6)),
            ("bytes=3-99", Some(3..10)),
            ("bytes=-4", Some(6..10)),
            ("bytes=-99", Some(0..10)),
            ("bytes=10-", None),
            ("bytes=-0", None),
        ] {
            let expected = range.map_or(RequestedRange::Unsatisfiable, RequestedRange::Satisfiable);
            assert_eq!(requested(text, None), expected, "{text}");
        }
        for text in ["bytes=5-3", "lines=1-2", "bytes=a-b", "bytes=0-1,3-4", "bytes"] {
            assert_eq!(requested(text, None), RequestedRange::Ignored, "{text}");
        }
        assert_eq!(requested("bytes=3-5", Some("\"x\"")), RequestedRange::Satisfiable(3..6));
        assert_eq!(requested("bytes=3-5", Some("\"y\"")), RequestedRange::Ignored);
    }
}
