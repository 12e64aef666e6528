//! The root page: the capabilities of the cluster, for people and for clients that search the text.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;

use crate::response::{content, see_other};
use muster_control::app::App;

/// Capabilities by family. Clients detect a feature by its word on the page.
const CAPABILITIES: &[(&str, &[&str])] = &[
    ("admin", &["cluster-cacert", "cluster-resources", "vdi-token-pubkey"]),
    (
        "agent-operations",
        &[
            "agentoperations-crud",
            "instance-agentoperations",
            "instance-agentoperations-all",
            "agentoperations-put-with-mode",
        ],
    ),
    ("artifacts", &["artifact-metadata", "artifact-upload-types", "artifact-clusteroperations"]),
    (
        "auth",
        &[
            "trusted-issuers",
            "generated-key-secrets",
            "scope-enforcement",
            "mapping-rules",
            "federated-exchange",
            "namespace-claims",
            "namespace-quotas",
            "browser-sessions",
            "webhooks",
        ],
    ),
    (
        "blobs",
        &[
            "blob-metadata",
            "blob-search-by-hash",
            "blob-data-limit",
            "blob-hash-sha1",
            "blob-hash-sha256",
            "blob-hash-xxh128",
            "blob-events",
            "blob-checksums",
            "blob-single-checksum",
        ],
    ),
    (
        "cluster-operations",
        &["get-cluster-operations", "cluster-operation-chain", "cluster-operations-by-target"],
    ),
    ("events", &["events-by-type", "event-stream"]),
    (
        "instances",
        &[
            "pure-affinity",
            "spice-vdi-console",
            "vdi-console-helper",
            "instance-put-blob",
            "instance-execute",
            "instance-get",
            "instance-screenshot",
            "get-instance-namespace",
            "hot-plug-interface",
            "include-queued-agent-operations",
            "instance-clusteroperations",
            "agentoperation-deadlines",
            "console-tickets",
        ],
    ),
    (
        "networks",
        &[
            "list-addresses",
            "route-addresses",
            "get-network-namespace",
            "provide-dns",
            "extra-dns-entries",
            "network-clusteroperations",
            "network-delete-async",
            "reserve-addresses",
        ],
    ),
    ("networkinterfaces", &["interface-metadata"]),
    ("nodes", &["node-get", "node-metadata", "node-process-metrics"]),
];

/// Lists the capabilities of the cluster. Redirects browsers to the web UI.
#[utoipa::path(get, path = "/", tag = "root", responses((status = 200, description = "HTML page.", content_type = "text/html", body = String),
    (status = 303, description = "The header `Accept` names `text/html`: the web UI is at `/ui/`.", content_type = "text/html", body = String)))]
pub(crate) async fn root(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let mut response = if is_browser(&headers) { see_other("ui/") } else { capabilities(&app) };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    response
}

/// Returns whether a request is a navigation of a browser. API clients accept any type.
fn is_browser(headers: &HeaderMap) -> bool {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.any(|value| value.contains("text/html"))
}

fn capabilities(app: &App) -> Response {
    let proxied = !app.settings.kerbside_url.is_empty();
    let line = |(family, words): &(&str, &[&str])| {
        // Clients that find this capability use the proxy exclusively.
        let proxy = if proxied && *family == "instances" { ", vdi-console-proxy" } else { "" };
        format!("<li>{family}: {}{proxy}</li>\n", words.join(", "))
    };
    let list: String = CAPABILITIES.iter().map(line).collect();
    content(
        "text/html; charset=utf-8",
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Muster</title></head><body>\n\
             <h1>Muster {}</h1>\n<p>A private cloud in one program. The API is described at \
             <a href=\"apidocs/\">apidocs</a> and, for programs, in <a href=\"openapi.json\">openapi.json</a>. The web UI is \
             at <a href=\"ui/\">ui</a>, the documentation at <a href=\"docs/\">docs</a>.</p>\n\
             <p>Machine searchable API capabilities:</p>\n<ul>\n{list}</ul>\n</body></html>\n",
            env!("CARGO_PKG_VERSION")
        ),
    )
}
