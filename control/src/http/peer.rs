//! Asks the daemon of another node to answer a request that only it can.
//!
//! The caller's own token goes along: every daemon of the cluster accepts it, and the other one checks it anew.

use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, Uri, header};
use axum::response::Response;
use muster_types::Error;

use super::error::ApiResult;
use super::response::respond;
use crate::app::App;
use crate::auth::Caller;
use crate::store::nodes::NodeRow;

/// Marks a request that was handed on once: it is not handed on again.
const HANDED_ON: HeaderName = HeaderName::from_static("x-muster-handed-on");
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A ping of an address that does not answer takes its time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Hands a reading request on to the daemon of `node`.
pub(super) async fn ask(
    app: &App,
    node: &NodeRow,
    caller: &Caller,
    uri: &Uri,
    headers: &HeaderMap,
) -> ApiResult {
    let name = &node.identity.name;
    let silent =
        || Error::Unavailable(format!("peer node {name} did not answer the proxied request, please retry"));
    if node.report.api_url.is_empty() || headers.contains_key(&HANDED_ON) {
        return Err(silent().into());
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = client(app)
        .map_err(Error::Internal)?
        .get(format!("{}{path}", node.report.api_url))
        .header(HANDED_ON, "1")
        .header("x-request-id", &caller.request_id);
    if let Some(token) = headers.get(header::AUTHORIZATION) {
        request = request.header(header::AUTHORIZATION, token);
    }
    let answer = request.send().await.map_err(|error| {
        tracing::warn!(node = name, %error, "a peer does not answer");
        silent()
    })?;
    let status = answer.status();
    let kind = answer.headers().get(header::CONTENT_TYPE).cloned();
    let body = answer.bytes().await.map_err(|_| silent())?;
    let kind = kind.unwrap_or(header::HeaderValue::from_static("application/json"));
    let answer: Response = respond(status, kind, Body::from(body));
    Ok(answer)
}

/// One client for all peers, which also trusts the cluster's own certificate.
fn client(app: &App) -> Result<&'static reqwest::Client, String> {
    static CLIENT: OnceLock<Result<reqwest::Client, String>> = OnceLock::new();
    let made = CLIENT.get_or_init(|| {
        let mut builder =
            reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).timeout(ANSWER_TIMEOUT).no_proxy();
        if !app.settings.tls_certificate.is_empty() {
            let pem = std::fs::read(&app.settings.tls_certificate).map_err(|e| e.to_string())?;
            for certificate in reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| e.to_string())? {
                builder = builder.add_root_certificate(certificate);
            }
        }
        builder.build().map_err(|error| error.to_string())
    });
    made.as_ref().map_err(Clone::clone)
}
