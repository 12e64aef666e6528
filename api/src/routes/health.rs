//! Liveness and readiness.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;

use crate::deadline::extend_deadline;
use crate::response::{content, respond};
use muster_control::app::App;

const PLAIN: &str = "text/plain; charset=utf-8";

/// Reports whether the process is alive.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, description = "`ok`", content_type = "text/plain", body = String)))]
pub(crate) async fn livez(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    // Another daemon waits for the request that it has forwarded.
    extend_deadline(&app, &headers);
    content(PLAIN, "ok")
}

/// Reports whether the API can serve requests.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, description = "`ready`", content_type = "text/plain", body = String),
    (status = 503, description = "`not ready`, with the reason if events cannot be stored or the daemon was fenced", content_type = "text/plain", body = String)))]
pub(crate) async fn readyz(State(app): State<Arc<App>>) -> Response {
    readiness(&app)
}

/// Alias of `/readyz`.
#[utoipa::path(get, path = "/healthz", tag = "health", responses((status = 200, description = "`ready`", content_type = "text/plain", body = String),
    (status = 503, description = "`not ready`, with the reason if events cannot be stored or the daemon was fenced", content_type = "text/plain", body = String)))]
pub(crate) async fn healthz(State(app): State<Arc<App>>) -> Response {
    readiness(&app)
}

fn readiness(app: &App) -> Response {
    match app.readiness() {
        Ok(()) => content(PLAIN, "ready"),
        Err(reason) => {
            respond(StatusCode::SERVICE_UNAVAILABLE, HeaderValue::from_static(PLAIN), Body::from(reason))
        }
    }
}
