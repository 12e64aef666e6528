//! `/metrics`, served on separate ports.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use axum::body::Body;
use axum::http::header::{ACCEPT, AUTHORIZATION, HeaderName, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Request, StatusCode};
use axum::response::Response;
use hyper::body::Incoming;
use muster_control::app::App;
use muster_control::exposition::ExpositionFormat;
use muster_control::objects::metrics::{cluster_metrics, daemon_metrics, node_metrics};

use crate::response::{content, respond};

/// The metrics that a port serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsKind {
    /// This daemon: its events, requests, database and periodic tasks.
    Daemon,
    /// The nodes of this daemon.
    Nodes,
    /// The objects of the whole cluster.
    Cluster,
}

/// Handles a request on a metrics port.
pub async fn metrics(app: &App, kind: MetricsKind, request: &Request<Incoming>) -> Response {
    let header = |name: HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
    if !is_authorized(app.settings.metrics_token.expose(), header(AUTHORIZATION)) {
        let mut response = text(StatusCode::UNAUTHORIZED, "the bearer token is not METRICS_TOKEN\n");
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        return response;
    }
    if !matches!(request.uri().path(), "/" | "/metrics") {
        return text(StatusCode::NOT_FOUND, "not found\n");
    }
    let (format, content_type) = if header(ACCEPT).unwrap_or_default().contains("openmetrics") {
        (ExpositionFormat::OpenMetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    } else {
        (ExpositionFormat::Prometheus, "text/plain; version=0.0.4; charset=utf-8")
    };
    let metrics = match kind {
        MetricsKind::Daemon => Ok(daemon_metrics(app, format)),
        MetricsKind::Nodes => node_metrics(app, format).await,
        MetricsKind::Cluster => cluster_metrics(app, format).await,
    };
    match metrics {
        Ok(metrics) => content(content_type, metrics),
        Err(error) => {
            tracing::warn!(%error, ?kind, "failed to read metrics");
            text(StatusCode::SERVICE_UNAVAILABLE, "the metrics are not available\n")
        }
    }
}

/// Returns whether a request may read metrics. An empty token allows every request.
fn is_authorized(token: &str, authorization: Option<&str>) -> bool {
    let given = authorization.and_then(|value| value.split_once(' '));
    token.is_empty()
        || given.is_some_and(|(scheme, given)| {
            scheme.eq_ignore_ascii_case("bearer")
                && verify_slices_are_equal(given.trim().as_bytes(), token.as_bytes()).is_ok()
        })
}

fn text(status: StatusCode, text: &'static str) -> Response {
    respond(status, HeaderValue::from_static("text/plain"), Body::from(text))
}

#[cfg(test)]
mod tests {
    use super::is_authorized;

    #[test]
    fn requires_the_configured_token() {
        assert!(is_authorized("", None));
        assert!(is_authorized("t0ken", Some("Bearer t0ken")));
        for wrong in [None, Some("t0ken"), Some("Bearer t0ke"), Some("Bearer "), Some("Basic t0ken")] {
            assert!(!is_authorized("t0ken", wrong), "{wrong:?}");
        }
    }
}
