//! How long the callers of requests wait, also those that other daemons have forwarded. See docs/decisions/0057.

use std::sync::Arc;

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName};
use muster_control::app::App;
use muster_control::auth::RequestDeadline;

use crate::connection::ClientConnection;

/// The Unix time at which the caller of a request gives up. The request is not started afterwards.
const DEADLINE: HeaderName = HeaderName::from_static(muster_control::peer::DEADLINE);
/// The id of a forwarded request, whose deadline probes with the same id extend.
const FORWARD_ID: HeaderName = HeaderName::from_static(muster_control::peer::FORWARD_ID);
/// The path of probes, which are not forwarded requests themselves.
const LIVENESS_PATH: &str = "/livez";

/// Returns how long the caller of a request waits.
pub(crate) fn request_deadline(app: &App, request: &Parts) -> RequestDeadline {
    let expires = deadline_of(&request.headers);
    let connection = request.extensions.get::<ClientConnection>().cloned();
    let is_connected = connection
        .map(|connection| Arc::new(move || connection.is_open()) as Arc<dyn Fn() -> bool + Send + Sync>);
    let deadline = RequestDeadline::new(expires, is_connected);
    let id = request.headers.get(FORWARD_ID).and_then(|value| value.to_str().ok());
    match (id, expires) {
        (Some(id), Some(expires)) if request.uri.path() != LIVENESS_PATH => {
            deadline.forwarded(app.forwarded_requests.begin(id, expires))
        }
        _ => deadline,
    }
}

/// Returns the Unix time at which the caller of a request gives up, if it has set one.
fn deadline_of(headers: &HeaderMap) -> Option<f64> {
    let expires: Option<f64> = headers.get(DEADLINE).and_then(|value| value.to_str().ok()?.parse().ok());
    expires.filter(|expires| expires.is_finite())
}

/// Extends the deadline of the forwarded request that a probe names, if it names one.
pub(crate) fn extend_deadline(app: &App, probe: &HeaderMap) {
    let id = probe.get(FORWARD_ID).and_then(|value| value.to_str().ok());
    if let (Some(id), Some(expires)) = (id, deadline_of(probe)) {
        app.forwarded_requests.extend(id, expires);
    }
}
