//! Authenticates and authorizes requests, and then reads their bodies, before they reach a handler.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{Method, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use muster_types::event::Event;
use muster_types::namespace::NamespaceState;
use muster_types::object::ObjectRef;
use muster_types::settings::Settings;
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::body::{BodyLimit, BodyMemory, MAX_UNAUTHENTICATED_BODY};
use crate::error::ApiError;
use crate::request::{Incoming, is_change, is_upload_chunk, panicked};
use crate::request_events::{MAX_RECORDED_URL, RequestEvents, shortened};
use crate::table::Access;
use muster_control::app::App;
use muster_control::auth::access::MintedKeyInfo;
use muster_control::auth::tokens::{Claims, TokenError};
use muster_control::auth::{Caller, scopes};
use muster_control::events::Refusal;
use muster_control::objects::audit::with_request;
use muster_control::objects::key::unix_seconds;
use muster_store::keys::{self, CredentialKey};

/// The path of token exchanges, which have their own body limit.
const EXCHANGE_PATH: &str = "/auth/federated";

/// What a request needs to pass.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    pub(crate) app: Arc<App>,
    pub(crate) access: Access,
    pub(crate) family: &'static str,
    /// The verb of the required scope, if it does not follow from the method.
    pub(crate) verb: Option<&'static str>,
    pub(crate) bodies: Arc<BodyMemory>,
}

/// Passes a request on with its caller and its body attached, or responds with the reason why not. The token is checked
/// first: callers without one cannot make the daemon read a large body.
pub(crate) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match admit(&guard, request).await {
        Ok(request) => run(&guard.app, request, next).await,
        Err(error) => ApiError(error).into_response(),
    }
}

async fn admit(guard: &Guard, request: Request) -> Result<Request> {
    let (mut parts, mut body) = request.into_parts();
    let authenticated = guard.access != Access::Public;
    if authenticated {
        let caller = authorize(guard, &parts).await?;
        parts.extensions.insert(caller);
    }
    let mut bytes = Bytes::new();
    // Upload chunks are streamed to disk; all other bodies are small documents.
    if !is_upload_chunk(&parts.method, &parts.uri) {
        let limit = body_limit(&guard.app.settings, authenticated, &parts.method, &parts.uri);
        bytes = guard.bodies.read(limit, &parts.headers, body).await?;
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

/// Returns the limit of a request body. Exchanges are not authenticated and have their own limit; they need a length.
fn body_limit(settings: &Settings, authenticated: bool, method: &Method, uri: &Uri) -> BodyLimit {
    let max = settings.api_max_request_body_bytes;
    if authenticated {
        return BodyLimit { max, length_required: false, authenticated };
    }
    if method.is_safe() || uri.path() != EXCHANGE_PATH {
        let max = max.min(MAX_UNAUTHENTICATED_BODY);
        return BodyLimit { max, length_required: false, authenticated };
    }
    // Arguments may be in the query as well.
    let query = uri.query().map_or(0, |query| query.len() as u64);
    let max_exchange = settings.federation_max_token_bytes.saturating_sub(query);
    BodyLimit { max: max.min(max_exchange), length_required: true, authenticated }
}

/// Calls the handler. Changes run to completion even if the caller disconnects.
async fn run(app: &App, request: Request, next: Next) -> Response {
    if !is_change(request.method(), request.uri()) {
        return next.run(request).await;
    }
    let change = app.begin_change().await;
    let response = tokio::spawn(async move {
        let _change = change;
        next.run(request).await
    });
    response.await.unwrap_or_else(|_| panicked())
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
    };
    let source = incoming.map(|incoming| incoming.source.as_str()).unwrap_or_default();
    let key = check_key(app, &caller, source, claims.nonce.as_deref()).await?;
    if let Some(events) = request.extensions.get::<Arc<RequestEvents>>() {
        events.authenticated();
    }
    caller.minted = key.provenance.map(|provenance| MintedKeyInfo { provenance, expiry: key.expiry });
    let needed = crate::table::required_scope(guard.family, guard.verb, &request.method);
    if !scopes::grants(caller.scopes.as_deref(), &needed) {
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

fn verify(app: &App, request: &Parts) -> Result<Claims> {
    let refuse = |text: &str| Err(Error::Unauthenticated(text.to_owned()));
    let Some(header) = request.headers.get(AUTHORIZATION) else {
        return refuse("Missing Authorization Header");
    };
    let Ok(header) = header.to_str() else {
        return refuse("Bad Authorization header. Expected 'Authorization: Bearer <JWT>'");
    };
    let mut words = header.split_whitespace();
    if words.next() != Some("Bearer") {
        return refuse(
            "Missing 'Bearer' type in 'Authorization' header. Expected 'Authorization: Bearer <JWT>'",
        );
    }
    let (Some(token), None) = (words.next(), words.next()) else {
        return refuse("Bad Authorization header. Expected 'Authorization: Bearer <JWT>'");
    };
    match app.tokens.verify(unix_seconds(), token) {
        Ok(claims) => Ok(claims),
        Err(TokenError::Invalid) => refuse("invalid JWT in Authorization header"),
        Err(TokenError::Expired) => refuse("Signature has expired"),
    }
}

/// Checks that the namespace and the key of a token still exist and that the key has not changed.
async fn check_key(app: &App, caller: &Caller, source: &str, nonce: Option<&str>) -> Result<CredentialKey> {
    let refuse = |reason: &str, namespace_exists: bool| {
        if namespace_exists && app.events.sample_refusal(Refusal::Token, source).is_some() {
            let event = Event::audit(ObjectRef::namespace(&caller.namespace), reason)
                .with("namespace", caller.namespace.clone());
            let mut event = with_request(caller, event);
            event.request_id = Some(caller.request_id.clone());
            app.events.record_if_room(event);
        }
        Err(Error::Unauthenticated(String::new()))
    };
    let found = keys::credential(&app.store, &caller.namespace, &caller.key_name).await?;
    let Some(found) = found else { return refuse("no such namespace", false) };
    if found.namespace_state != NamespaceState::Created {
        return refuse("JWT token is for deleted namespace", true);
    }
    let Some(key) = found.key.filter(|key| key.expiry.is_none_or(|expiry| expiry > now())) else {
        return refuse("JWT token uses non-existent key", true);
    };
    let Some(nonce) = nonce else { return refuse("JWT token lacks nonce", true) };
    if aws_lc_rs::constant_time::verify_slices_are_equal(nonce.as_bytes(), key.nonce.as_bytes()).is_err() {
        return refuse("JWT token has incorrect nonce", true);
    }
    Ok(key)
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
