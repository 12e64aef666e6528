//! `Idempotency-Key`: a request that its caller repeats is executed once. See docs/decisions/0088.

use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use muster_types::{Error, Result};

use crate::error::ApiError;
use crate::forward::IDEMPOTENCY_LEASE;
use crate::incoming::{Incoming, is_upload_chunk};
use crate::response::{RecordedBody, respond};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::idempotency_key::{self, KeyedRequest, StoredResponse};
use muster_store::idempotency_keys::IdempotencyLease;

pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// The maximum size of a response that is kept, in bytes.
const MAX_STORED_BODY: usize = 1 << 20;

/// What a request says about its execution.
pub(crate) enum RequestedExecution {
    /// It has no key.
    Once,
    /// It was forwarded by a daemon that keeps the response.
    Forwarded(IdempotencyLease),
    Keyed {
        caller: Box<Caller>,
        key: String,
        hash: String,
    },
}

/// How to execute a request.
pub(crate) enum Execution {
    Once,
    Forwarded(IdempotencyLease),
    Keyed(IdempotencyLease),
    /// It is not executed.
    Respond(Response),
}

impl RequestedExecution {
    /// Reads the headers of a request that changes something.
    pub(crate) fn of(request: &Request) -> Result<Self> {
        if *request.method() != Method::POST {
            return Ok(Self::Once);
        }
        if let Some(lease) = forwarded_lease(request.headers()) {
            return Ok(Self::Forwarded(lease));
        }
        let mut keys = request.headers().get_all(IDEMPOTENCY_KEY).iter();
        let Some(key) = keys.next() else { return Ok(Self::Once) };
        let refuse = |text: &str| Err(Error::Invalid(format!("Idempotency-Key: {text}")));
        if keys.next().is_some() {
            return refuse("given more than once");
        }
        let Some(caller) = request.extensions().get::<Caller>() else {
            return refuse("not supported for requests without a token");
        };
        if is_upload_chunk(request.method(), request.uri()) {
            return refuse(
                "not supported for the chunks of an upload, which `offset` protects from being repeated",
            );
        }
        if request.headers().contains_key(header::UPGRADE) {
            return refuse("not supported for connections that change their protocol");
        }
        let key = key.to_str().unwrap_or_default().to_owned();
        Ok(Self::Keyed { caller: Box::new(caller.clone()), key, hash: request_hash(request) })
    }

    /// Decides how to execute the request.
    pub(crate) async fn begin(self, app: &App) -> Execution {
        let (caller, key, hash) = match self {
            Self::Once => return Execution::Once,
            Self::Forwarded(lease) => return Execution::Forwarded(lease),
            Self::Keyed { caller, key, hash } => (caller, key, hash),
        };
        match idempotency_key::begin(app, &caller, &key, &hash).await {
            Ok(KeyedRequest::Execute(lease)) => Execution::Keyed(lease),
            Ok(KeyedRequest::Replay(stored)) => Execution::Respond(replay(stored)),
            Err(error) => Execution::Respond(ApiError(error).into_response()),
        }
    }
}

impl Execution {
    /// Returns the lease that the transactions of the request need.
    pub(crate) fn lease(&self) -> Option<&IdempotencyLease> {
        match self {
            Self::Forwarded(lease) | Self::Keyed(lease) => Some(lease),
            Self::Once | Self::Respond(_) => None,
        }
    }
}

/// Returns the lease of a request that another daemon has forwarded. Its parts cannot be guessed.
fn forwarded_lease(headers: &HeaderMap) -> Option<IdempotencyLease> {
    let (hash, owner) = headers.get(IDEMPOTENCY_LEASE)?.to_str().ok()?.split_once(':')?;
    Some(IdempotencyLease { hash: hash.to_owned(), owner: owner.to_owned() })
}

/// Returns a hash of everything that the request consists of, besides its headers.
fn request_hash(request: &Request) -> String {
    let target = request.uri().path_and_query().map_or("", |target| target.as_str());
    let mut hash = Context::new(&SHA256);
    hash.update(request.method().as_str().as_bytes());
    hash.update(b"\n");
    hash.update(target.as_bytes());
    hash.update(b"\n");
    if let Some(incoming) = request.extensions().get::<Incoming>() {
        hash.update(&incoming.body);
    }
    hex::encode(hash.finish())
}

fn replay(stored: StoredResponse) -> Response {
    let status = StatusCode::from_u16(stored.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let content_type = HeaderValue::try_from(stored.content_type);
    let content_type = content_type.unwrap_or(HeaderValue::from_static("application/json"));
    let body = bytes::Bytes::from(stored.body);
    let mut response = respond(status, content_type, Body::from(body.clone()));
    response.extensions_mut().insert(RecordedBody(body));
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

/// Executes a request with a key, and keeps its response.
pub(crate) async fn execute(
    app: Arc<App>,
    lease: IdempotencyLease,
    execution: impl Future<Output = Response>,
) -> Response {
    let response = idempotency_key::while_leased(&app, &lease, execution).await;
    match keep(&app, &lease, response).await {
        Ok(response) => response,
        Err(error) => ApiError(error).into_response(),
    }
}

/// Keeps the response of a request that has succeeded, or that has failed after it has changed something. Otherwise the
/// request can be repeated.
async fn keep(app: &App, lease: &IdempotencyLease, response: Response) -> Result<Response> {
    let status = response.status();
    if !status.is_success() {
        let outcome = idempotency_key::abandon(app, lease).await;
        // After an internal error the outcome is not known.
        let is_final = !status.is_server_error() || status == StatusCode::INSUFFICIENT_STORAGE;
        match outcome {
            Ok(false) if is_final => {}
            Ok(_) => return Ok(response),
            Err(error) => {
                tracing::warn!(%error, "failed to release the idempotency key of a failed request");
                return Ok(response);
            }
        }
    }
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, MAX_STORED_BODY).await.map_err(|error| {
        tracing::warn!(%error, "failed to read the response of a request with an idempotency key");
        Error::Unavailable("the request was executed, but its response could not be read".into())
    })?;
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let stored = StoredResponse {
        status: status.as_u16(),
        content_type: content_type.unwrap_or("application/json").to_owned(),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    // The caller gets its response anyway. A repeated request will be told that it was executed.
    if let Err(error) = idempotency_key::finish(app, lease, &stored).await {
        tracing::warn!(%error, "failed to store the response of a request with an idempotency key");
    }
    Ok(Response::from_parts(parts, Body::from(body)))
}
