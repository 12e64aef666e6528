//! Authenticates and authorizes requests, and then reads their bodies, before they reach a handler.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use muster_types::event::Event;
use muster_types::namespace::NamespaceState;
use muster_types::object::ObjectRef;
use muster_types::settings::Settings;
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::access::Access;
use crate::body::{BodyLimit, BodyMemory, BodySender, MAX_SMALL_BODY};
use crate::browser_session;
use crate::compression::{self, Compressible};
use crate::conditional;
use crate::connection::ClientConnection;
use crate::error::{ApiError, panicked};
use crate::forward::DEADLINE;
use crate::idempotency::{self, Execution, RequestedExecution};
use crate::incoming::{Incoming, is_change, is_upload_chunk};
use crate::request_events::{MAX_RECORDED_URL, RequestEvents, shortened};
use muster_control::app::App;
use muster_control::auth::access::{MintedKeyInfo, TokenLifetime};
use muster_control::auth::tokens::{Claims, OriginalCaller, TokenError};
use muster_control::auth::{Caller, RequestDeadline, scopes};
use muster_control::events::RefusalKind;
use muster_control::objects::audit::with_request;
use muster_control::objects::key::unix_seconds;
use muster_control::traces;
use muster_store::keys::{self, CredentialKey};
use muster_store::run_keyed_change;

/// The path of token exchanges, which have their own body limit.
const EXCHANGE_PATH: &str = "/auth/federated";

/// The requirements that a request must meet.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    pub(crate) app: Arc<App>,
    pub(crate) access: Access,
    pub(crate) family: &'static str,
    /// The verb of the required scope, if it does not follow from the method.
    pub(crate) verb: Option<&'static str>,
    /// Whether the route returns a record, which has a tag.
    pub(crate) is_record: bool,
    pub(crate) bodies: Arc<BodyMemory>,
}

/// Passes a request on with its caller and its body attached, or responds with the reason why not. The token is checked
/// first: callers without one cannot make the daemon read a large body.
pub(crate) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match admit(&guard, request).await {
        Ok(request) => respond(&guard, request, next).await,
        Err(error) => ApiError(error).into_response(),
    }
}

/// Responds to a request that was admitted.
async fn respond(guard: &Guard, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    // Routes with a verb of their own open consoles or return secrets.
    let compressible =
        guard.verb.is_none() && compression::is_allowed(&parts.method, parts.extensions.get::<Caller>());
    let headers = guard.is_record.then(|| parts.headers.clone());
    let mut response = run(Arc::clone(&guard.app), Request::from_parts(parts, body), next).await;
    if let Some(headers) = headers {
        response = conditional::add_tag(&headers, response);
    }
    if compressible {
        response.extensions_mut().insert(Compressible);
    }
    response
}

async fn admit(guard: &Guard, request: Request) -> Result<Request> {
    let (mut parts, mut body) = request.into_parts();
    parts.extensions.insert(deadline(&parts));
    let authenticated = guard.access != Access::Public;
    // The health of this daemon and the description of the API need no membership.
    if authenticated || !parts.method.is_safe() {
        guard.app.store.membership.require()?;
    }
    let mut namespace = None;
    if authenticated {
        let caller = authorize(guard, &parts).await?;
        caller.deadline.require_waiting()?;
        namespace = Some(caller.namespace.clone());
        parts.extensions.insert(caller);
    }
    let mut bytes = Bytes::new();
    // Upload chunks are streamed to disk; all other bodies are small documents.
    if !is_upload_chunk(&parts.method, &parts.uri) {
        let source = parts.extensions.get::<Incoming>().map(|incoming| incoming.source.as_str());
        let sender = match &namespace {
            Some(namespace) => BodySender::Namespace(namespace),
            None => BodySender::Source(source.unwrap_or_default()),
        };
        let limit = body_limit(&guard.app.settings, namespace.is_some(), &parts.method, &parts.uri);
        bytes = guard.bodies.read(sender, limit, &parts.headers, body).await?;
        body = Body::empty();
    }
    if let Some(events) = parts.extensions.get::<Arc<RequestEvents>>() {
        events.received(&bytes);
    }
    if let Some(incoming) = parts.extensions.get_mut::<Incoming>() {
        incoming.body = bytes;
    }
    Ok(Request::from_parts(parts, body))
}

/// Returns the limit of a request body. Calls that read or delete only select objects. Exchanges are not authenticated and
/// have their own limit; they need a length.
fn body_limit(settings: &Settings, authenticated: bool, method: &Method, uri: &Uri) -> BodyLimit {
    let max = settings.api_max_request_body_bytes;
    let is_small = method.is_safe() || *method == Method::DELETE;
    if authenticated && !is_small {
        return BodyLimit { max, length_required: false };
    }
    if is_small || uri.path() != EXCHANGE_PATH {
        return BodyLimit { max: max.min(MAX_SMALL_BODY), length_required: false };
    }
    // Arguments may be in the query as well.
    let query = uri.query().map_or(0, |query| query.len() as u64);
    let max_exchange = settings.federation_max_token_bytes.saturating_sub(query);
    BodyLimit { max: max.min(max_exchange), length_required: true }
}

/// Returns how long the caller of a request waits.
fn deadline(request: &Parts) -> RequestDeadline {
    let expires = request.headers.get(DEADLINE).and_then(|value| value.to_str().ok()?.parse().ok());
    let connection = request.extensions.get::<ClientConnection>().cloned();
    let is_connected = connection
        .map(|connection| Arc::new(move || connection.is_open()) as Arc<dyn Fn() -> bool + Send + Sync>);
    RequestDeadline::new(expires.filter(|expires: &f64| expires.is_finite()), is_connected)
}

/// Calls the handler, unless the caller has given up. Changes run to completion even if the caller disconnects.
async fn run(app: Arc<App>, request: Request, next: Next) -> Response {
    let deadline = request.extensions().get::<RequestDeadline>().cloned().unwrap_or_default();
    let change =
        if is_change(request.method(), request.uri()) { Some(app.begin_change().await) } else { None };
    if let Err(error) = deadline.require_waiting() {
        return ApiError(error).into_response();
    }
    let Some(change) = change else { return next.run(request).await };
    let requested = match RequestedExecution::of(&request) {
        Ok(requested) => requested,
        Err(error) => return ApiError(error).into_response(),
    };
    let response = tokio::spawn(traces::within(traces::current(), async move {
        let _change = change;
        let execution = requested.begin(&app).await;
        let lease = execution.lease().cloned();
        let change = run_keyed_change(move || deadline.require_waiting(), lease, execute(request, next));
        match execution {
            Execution::Once | Execution::Forwarded(_) => change.await,
            Execution::Keyed(lease) => idempotency::execute(app, lease, change).await,
            Execution::Respond(response) => response,
        }
    }));
    response.await.unwrap_or_else(|_| panicked())
}

/// Calls the handler of a change if its preconditions are met.
async fn execute(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let _lock = match conditional::check(&parts).await {
        Ok(lock) => lock,
        Err(response) => return response,
    };
    next.run(Request::from_parts(parts, body)).await
}

async fn authorize(guard: &Guard, request: &Parts) -> Result<Caller> {
    let app = &guard.app;
    let claims = verify(app, request)?;
    let incoming = request.extensions.get::<Incoming>();
    let (namespace, key_name) = claims.sub;
    let mut caller = Caller {
        namespace,
        key_name,
        scopes: claims.scopes.filter(|scopes| !scopes.iter().any(|scope| scope == "*")),
        minted: None,
        request_id: incoming.map(|incoming| incoming.id.clone()).unwrap_or_default(),
        method: request.method.to_string(),
        path: shortened(request.uri.path().to_owned(), MAX_RECORDED_URL),
        remote: incoming.map(|incoming| incoming.remote.clone()).unwrap_or_default(),
        deadline: request.extensions.get::<RequestDeadline>().cloned().unwrap_or_default(),
        nonce: claims.nonce,
        token: Some(TokenLifetime { expires: claims.exp, is_session: claims.session }),
        trusting: None,
    };
    let source = incoming.map(|incoming| incoming.source.as_str()).unwrap_or_default();
    let (key, trusting) = check_key(app, &caller, source).await?;
    if let Some(events) = request.extensions.get::<Arc<RequestEvents>>() {
        events.authenticated();
    }
    caller.minted = minted(key);
    caller.trusting = Some(trusting);
    if let Some(original) = claims.caller {
        act_for(app, &mut caller, original).await?;
    }
    let needed = crate::access::required_scope(guard.family, guard.verb, &request.method);
    if !needed.is_empty() && !scopes::grants(caller.scopes.as_deref(), &needed) {
        return Err(Error::Forbidden("token is not scoped for this operation".into()));
    }
    if guard.access == Access::Admin {
        if !caller.is_system() {
            return Err(Error::Unauthenticated("unauthorized".into()));
        }
        if !scopes::grants(caller.scopes.as_deref(), scopes::CLUSTER_ADMIN) {
            return Err(Error::Forbidden("token is not scoped for administrative operations".into()));
        }
    }
    let change = !request.method.is_safe() && !is_upload_chunk(&request.method, &request.uri);
    if change || app.settings.api_request_events_for_reads {
        let object = ObjectRef::namespace(&caller.namespace);
        app.record(
            &caller,
            with_request(&caller, Event::audit(object, "token used to authenticate request")),
        );
    }
    Ok(caller)
}

/// Makes the caller the one whose request another daemon has forwarded, if its key still exists and was not replaced.
async fn act_for(app: &App, caller: &mut Caller, original: OriginalCaller) -> Result<()> {
    let refuse = || Error::Unauthenticated(String::new());
    let found = keys::credential(&app.store, &original.namespace, &original.key_name).await?;
    let found = found.filter(|found| found.namespace_state == NamespaceState::Created).ok_or_else(refuse)?;
    let key = found.key.filter(is_live).ok_or_else(refuse)?;
    if original.nonce.as_ref().is_some_and(|nonce| !is_same_nonce(nonce, &key)) {
        return Err(refuse());
    }
    if caller.act_for(original, minted(key), Some(found.trusting)) { Ok(()) } else { Err(refuse()) }
}

fn is_same_nonce(nonce: &str, key: &CredentialKey) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(nonce.as_bytes(), key.nonce.as_bytes()).is_ok()
}

fn is_live(key: &CredentialKey) -> bool {
    key.expiry.is_none_or(|expiry| expiry > now())
}

/// Returns the origin of a key that an exchange created.
fn minted(key: CredentialKey) -> Option<MintedKeyInfo> {
    key.provenance.map(|provenance| MintedKeyInfo { provenance, expiry: key.expiry })
}

/// Verifies the token in the header `Authorization`, or else the one in the cookie of a browser session.
fn verify(app: &App, request: &Parts) -> Result<Claims> {
    let refuse = |text: &str| Err(Error::Unauthenticated(text.to_owned()));
    let (token, invalid) =
        match (request.headers.get(AUTHORIZATION), browser_session::token(&request.headers)) {
            (Some(header), _) => (bearer_token(header)?, "invalid JWT in Authorization header"),
            (None, Some(token)) => {
                browser_session::require_own_origin(request)?;
                (token, "invalid browser session")
            }
            (None, None) => return refuse("Missing Authorization Header"),
        };
    match app.tokens.verify(unix_seconds(), token) {
        Ok(claims) => Ok(claims),
        Err(TokenError::Invalid) => refuse(invalid),
        Err(TokenError::Expired) => refuse("Signature has expired"),
    }
}

fn bearer_token(header: &HeaderValue) -> Result<&str> {
    let refuse = |text: &str| Err(Error::Unauthenticated(text.to_owned()));
    let Ok(header) = header.to_str() else {
        return refuse("Bad Authorization header. Expected 'Authorization: Bearer <JWT>'");
    };
    let mut words = header.split_whitespace();
    if words.next() != Some("Bearer") {
        return refuse(
            "Missing 'Bearer' type in 'Authorization' header. Expected 'Authorization: Bearer <JWT>'",
        );
    }
    match (words.next(), words.next()) {
        (Some(token), None) => Ok(token),
        _ => refuse("Bad Authorization header. Expected 'Authorization: Bearer <JWT>'"),
    }
}

/// Checks that the namespace and the key of a token still exist and that the key has not changed. Returns the key and the
/// namespaces that trust the namespace.
async fn check_key(app: &App, caller: &Caller, source: &str) -> Result<(CredentialKey, Vec<String>)> {
    let refuse = |reason: &str, namespace_exists: bool| {
        if namespace_exists {
            let event = Event::audit(ObjectRef::namespace(&caller.namespace), reason)
                .with("namespace", caller.namespace.clone());
            let mut event = with_request(caller, event);
            event.request_id = Some(caller.request_id.clone());
            app.events.record_refusal(RefusalKind::Token, source, event);
        }
        Err(Error::Unauthenticated(String::new()))
    };
    let found = keys::credential(&app.store, &caller.namespace, &caller.key_name).await?;
    let Some(found) = found else { return refuse("no such namespace", false) };
    if found.namespace_state != NamespaceState::Created {
        return refuse("JWT token is for deleted namespace", true);
    }
    let Some(key) = found.key.filter(is_live) else {
        return refuse("JWT token uses non-existent key", true);
    };
    let Some(nonce) = &caller.nonce else { return refuse("JWT token lacks nonce", true) };
    if !is_same_nonce(nonce, &key) {
        return refuse("JWT token has incorrect nonce", true);
    }
    Ok((key, found.trusting))
}

/// Extracts the caller that [`check`] has authenticated.
#[derive(Debug)]
pub(crate) struct Authenticated(pub(crate) Caller);

impl FromRequestParts<Arc<App>> for Authenticated {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Response> {
        let unguarded = || ApiError(Error::Internal("a route that needs a caller is public".into()));
        parts.extensions.remove().map(Self).ok_or_else(|| unguarded().into_response())
    }
}
