//! `/events/stream`: events as they happen.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use futures_util::stream;
use serde::Deserialize;
use tokio::time::Instant;
use utoipa::IntoParams;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::respond;
use muster_control::app::App;
use muster_control::objects::event_stream::{self, EventStream, StreamRequest};
use muster_control::objects::key::unix_seconds;

/// The time after which a comment shows that the connection works.
const HEARTBEAT: Duration = Duration::from_secs(15);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct StreamQuery {
    /// Send only messages about one object of this type, such as `instance`; with `object_uuid`.
    object_type: Option<String>,
    /// UUID of the object; the name of a namespace.
    object_uuid: Option<String>,
    /// Send only messages about the objects of this namespace. By default, the namespace of the caller; for `system`, all.
    namespace: Option<String>,
    /// Continue after the message with this `id`, for clients that cannot set the header `Last-Event-ID`.
    last_event_id: Option<String>,
}

/// Sends events as they happen, as server-sent events.
///
/// The first message is `started`: the client receives everything that happens later. Then each message `event` has in its data
/// the fields of the event, and `object_type`, `object_uuid` and `namespace` of the object; an event of several objects
/// is sent for each. A message `change` has `object_type` and `uuid` of an object that has changed without an event, such as an
/// operation that makes progress, or the namespace of the caller, whose events only administrators may see.
///
/// The `id` of a message is a position. A client that sends it as `Last-Event-ID` receives the events since then,
/// as far as they are stored, and some of the last seconds before it again; `event_uuid` identifies them. If the server does
/// not know the position, or has stored more than 5000 events since, it sends the message `reset` before `started`: the client
/// reads its objects again. Without messages, a comment is sent every 15 seconds. The stream
/// ends with the token of the caller, when the daemon stops, and when the client does not read fast enough.
///
/// A stream contains what the lists of events contain for the caller: each message needs the scope for reading its object.
#[utoipa::path(get, path = "/events/stream", tag = "events", params(StreamQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "Continue after the message with this `id`.")),
    responses((status = 200, description = "A stream of messages.", content_type = "text/event-stream", body = String),
    (status = 404, description = "No such object or namespace."),
    (status = 429, description = "The key has 20 streams, or the daemon too many; retry after the given time.")))]
pub(crate) async fn open(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    headers: HeaderMap,
    Args(query): Args<StreamQuery>,
) -> ApiResult<Response> {
    let header = headers.get(LAST_EVENT_ID).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let StreamQuery { object_type, object_uuid, namespace, last_event_id } = query;
    let last_event_id = header.or(last_event_id).filter(|last| !last.is_empty());
    let request = StreamRequest { object_type, object_uuid, namespace, last_event_id };
    let stream = event_stream::open(&app, &caller, &request).await?;
    let mut response = respond(StatusCode::OK, EVENT_STREAM, body(app, stream));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Makes proxies pass messages on immediately.
    response.headers_mut().insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    Ok(response)
}

const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

fn body(app: Arc<App>, stream: EventStream) -> Body {
    let lifetime = Duration::from_secs(stream.expires.saturating_sub(unix_seconds()));
    let ends = Instant::now() + lifetime;
    Body::from_stream(stream::unfold((app, stream), move |(app, mut stream)| async move {
        let bytes = next(&app, &mut stream, ends).await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), (app, stream)))
    }))
}

/// Returns the next bytes of a stream, or `None` at its end.
async fn next(app: &App, stream: &mut EventStream, ends: Instant) -> Option<Bytes> {
    let heartbeat = Instant::now() + HEARTBEAT;
    loop {
        tokio::select! {
            messages = stream.next(app) => {
                let messages = messages?.concat();
                if !messages.is_empty() {
                    return Some(messages.into());
                }
            }
            () = tokio::time::sleep_until(heartbeat) => return Some(Bytes::from_static(b": \n\n")),
            () = tokio::time::sleep_until(ends) => return None,
        }
    }
}
