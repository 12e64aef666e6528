//! `/blobs` and `/blob_checksums`.

use std::ops::Range;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
use futures_util::StreamExt as _;
use muster_types::Error;
use muster_types::blob::BlobRecord;
use muster_types::ids::BlobId;
use muster_types::object::ObjectRef;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::arguments::{Args, Nothing};
use crate::error::{ApiError, ApiResult};
use crate::events::{EventQuery, answer};
use crate::fields::{Integer, Text};
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::pages::in_pages;
use crate::peer::{self, Handed};
use crate::response::{json_response, ok, respond};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::blob::{self, NodeRef};
use muster_control::objects::node;
use muster_control::objects::node_location::NodeLocation;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Only blobs of which this node has a copy; a name or an id. Also taken from the body.
    #[param(value_type = Option<String>)]
    node: Option<Text>,
}

/// All blobs.
#[utoipa::path(get, path = "/blobs", tag = "blobs", params(ListQuery), responses(
    (status = 200, body = Vec<BlobRecord>), (status = 404, description = "no such node")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Args(query): Args<ListQuery>,
) -> ApiResult {
    let node = match query.node.filter(|name| !name.0.is_empty()) {
        Some(name) => Some(node::find(&app, &name.0).await?.identity.id),
        None => None,
    };
    in_pages(move |after: Option<BlobId>| {
        let app = Arc::clone(&app);
        async move { blob::list_page(&app, node, after).await }
    })
    .await
}

/// One blob.
#[utoipa::path(get, path = "/blobs/{blob_uuid}", tag = "blobs", params(("blob_uuid" = String, Path)), responses(
    (status = 200, body = BlobRecord), (status = 404, description = "no such blob")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&blob::get(&app, &caller, &id).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Part {
    /// Where to begin; 0 when absent.
    #[param(value_type = Option<i64>)]
    offset: Option<Integer>,
    /// How many bytes at most; 0 and absent are all.
    #[param(value_type = Option<i64>)]
    limit: Option<Integer>,
}

/// The bytes of a blob, or a part of them: by `offset` and `limit`, or by the header `Range`.
#[utoipa::path(get, path = "/blobs/{blob_uuid}/data", tag = "blobs", params(("blob_uuid" = String, Path), Part),
    responses((status = 200, description = "the bytes", content_type = "text/plain", body = Vec<u8>),
    (status = 206, description = "the part that `Range` asked for", content_type = "text/plain", body = Vec<u8>),
    (status = 400, description = "offset or limit is negative"),
    (status = 404, description = "no such blob, or no node has it whole"),
    (status = 416, description = "the blob has no such part")))]
pub(crate) async fn data(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    uri: Uri,
    headers: HeaderMap,
    Args(part): Args<Part>,
) -> ApiResult {
    let number = |field: Option<Integer>, name: &str| {
        let number = field.map_or(0, |number| number.0);
        u64::try_from(number).map_err(|_| Error::Invalid(format!("{name} cannot be negative")))
    };
    let (offset, limit) = (number(part.offset, "offset")?, number(part.limit, "limit")?);
    let (row, place) = blob::locate(&app, &id).await?;
    let node = match place {
        NodeLocation::Local(node) => node,
        NodeLocation::Remote(node) => {
            return peer::ask(&app, &node, &caller, Handed::read(&uri, &headers)).await;
        }
    };
    let room = app.begin_transfer()?;
    blob::record_use(&app, &row).await;
    let size = row.content().size;
    let tag = format!("\"{}\"", row.id);
    let asked =
        if part.offset.is_none() && part.limit.is_none() { wanted_range(&headers, &tag, size) } else { None };
    let (status, range) = match asked {
        Some(Some(range)) => (StatusCode::PARTIAL_CONTENT, range),
        Some(None) => return Ok(unsatisfiable(size)),
        None => {
            let end = if limit == 0 { size } else { offset.saturating_add(limit).min(size) };
            (StatusCode::OK, offset.min(end)..end)
        }
    };
    let stream = node.storage().read(row.id, range.clone()).await;
    let stream = match stream {
        Ok(stream) => stream,
        Err(error) => return Err(unreadable(&app, row.id, &NodeRef::of(&node), error).await.into()),
    };
    let (keeper, holder) = (Arc::clone(&app), NodeRef::of(&node));
    let stream = stream.then(move |piece| {
        // Kept for as long as the answer is on its way.
        let _room = &room;
        let (app, holder) = (Arc::clone(&keeper), holder.clone());
        async move {
            match piece {
                Ok(bytes) => Ok(bytes),
                Err(error) => Err(unreadable(&app, row.id, &holder, error).await),
            }
        }
    });
    let mut response = respond(status, HeaderValue::from_static("text/plain"), Body::from_stream(stream));
    let head = response.headers_mut();
    head.insert(header::CONTENT_LENGTH, (range.end - range.start).into());
    head.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    head.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    insert(head, header::ETAG, &tag);
    if status == StatusCode::PARTIAL_CONTENT {
        let last = range.end.saturating_sub(1);
        insert(head, header::CONTENT_RANGE, &format!("bytes {}-{last}/{size}", range.start));
    }
    Ok(response)
}

fn insert(headers: &mut HeaderMap, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// A copy that is damaged or gone is never served again; the caller is told in general terms.
async fn unreadable(app: &App, blob: BlobId, node: &NodeRef, error: Error) -> Error {
    let why = match &error {
        Error::Internal(why) => why.clone(),
        Error::NotFound(_) => "its file is gone".to_owned(),
        _ => return error,
    };
    if let Err(error) = blob::set_damaged(app, blob, node, &why).await {
        tracing::error!(%blob, %error, "that a copy is damaged was not written down");
    }
    Error::NotFound("blob missing".into())
}

/// The part that a request's `Range` asks for: nothing if it asks for none that we serve, and `Some(None)` for one
/// that is not there.
fn wanted_range(headers: &HeaderMap, tag: &str, size: u64) -> Option<Option<Range<u64>>> {
    let text = headers.get(header::RANGE)?.to_str().ok()?.trim();
    // Another version than the caller has a part of: it gets all of this one.
    if headers.get(header::IF_RANGE).is_some_and(|known| known.as_bytes() != tag.as_bytes()) {
        return None;
    }
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (first.trim(), last.trim()) {
        ("", last) => size.saturating_sub(last.parse().ok()?)..size,
        (first, "") => first.parse().ok()?..size,
        (first, last) => {
            let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
            if last < first {
                return None;
            }
            first..last.saturating_add(1).min(size)
        }
    };
    Some(Some(range).filter(|range| range.start < range.end))
}

fn unsatisfiable(size: u64) -> Response {
    let status = StatusCode::RANGE_NOT_SATISFIABLE;
    let body = serde_json::json!({ "error": "the blob has no such part", "status": status.as_u16() });
    let mut response = json_response(status, &body);
    insert(response.headers_mut(), header::CONTENT_RANGE, &format!("bytes */{size}"));
    response
}

/// Events of a blob, newest first.
#[utoipa::path(get, path = "/blobs/{blob_uuid}/events", tag = "blobs",
    params(("blob_uuid" = String, Path), EventQuery), responses(
    (status = 200, body = Vec<muster_types::event::EventRecord>), (status = 404, description = "no such blob")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    answer(&app, &object(&app, &caller, &id).await?, &query).await
}

/// One checksum of a blob; `null` while it is not known.
#[utoipa::path(get, path = "/blobs/{blob_uuid}/checksum/{algorithm}", tag = "blobs",
    params(("blob_uuid" = String, Path), ("algorithm" = String, Path, description = "sha1, sha256, sha512 or xxh128")),
    responses((status = 200, body = Option<String>), (status = 400, description = "unknown hash algorithm"),
    (status = 404, description = "no such blob")))]
pub(crate) async fn checksum(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Path((id, algorithm)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&blob::checksum(&app, &id, &algorithm).await?))
}

/// The blob of a checksum, among those that the caller can already read through an artifact; `null` if there is none.
#[utoipa::path(get, path = "/blob_checksums/{algorithm}/{hash}", tag = "blobs",
    params(("algorithm" = String, Path, description = "sha1, sha256, sha512 or xxh128"), ("hash" = String, Path)),
    responses((status = 200, body = Option<BlobRecord>), (status = 400, description = "unknown hash algorithm")))]
pub(crate) async fn search(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((algorithm, hash)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&blob::search(&app, &caller, &algorithm, &hash).await?))
}

/// A search without a checksum.
#[utoipa::path(get, path = "/blob_checksums/{algorithm}", tag = "blobs", params(("algorithm" = String, Path)),
    responses((status = 400, description = "no hash was given")))]
pub(crate) async fn search_nothing(
    _: Authenticated,
    Path(_algorithm): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Err(Error::Invalid("you must specify a hash".into()).into())
}

/// The blob that a call is about: whoever knows it may.
async fn object(app: &App, _: &Caller, id: &str) -> Result<ObjectRef, ApiError> {
    Ok(blob::object(blob::find(app, id).await?.id))
}

metadata_routes!(
    "/blobs/{blob_uuid}/metadata",
    "/blobs/{blob_uuid}/metadata/{key}",
    "blob_uuid",
    "blobs",
    super::object,
    super::object
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_the_standard_says() {
        let asked = |range: &str, known: Option<&str>| {
            let mut headers = HeaderMap::new();
            insert(&mut headers, header::RANGE, range);
            if let Some(known) = known {
                insert(&mut headers, header::IF_RANGE, known);
            }
            wanted_range(&headers, "\"x\"", 10)
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
            assert_eq!(asked(text, None), Some(range), "{text}");
        }
        for text in ["bytes=5-3", "lines=1-2", "bytes=a-b", "bytes=0-1,3-4", "bytes"] {
            assert_eq!(asked(text, None), None, "{text}");
        }
        assert_eq!(asked("bytes=3-5", Some("\"x\"")), Some(Some(3..6)));
        assert_eq!(asked("bytes=3-5", Some("\"y\"")), None);
    }
}
