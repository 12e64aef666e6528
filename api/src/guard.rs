//! Authenticates and authorizes requests before they reach a handler.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use muster_types::event::Event;
use muster_types::namespace::NamespaceState;
use muster_types::object::ObjectRef;
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::error::ApiError;
use crate::request::{Incoming, is_upload_chunk};
use crate::table::Access;
use muster_control::app::App;
use muster_control::auth::access::MintedKeyInfo;
use muster_control::auth::tokens::{Claims, TokenError};
use muster_control::auth::{Caller, scopes};
use muster_control::objects::audit::with_request;
use muster_control::objects::key::unix_seconds;
use muster_store::keys::{self, CredentialKey};

/// What a request needs to pass.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    pub(crate) app: Arc<App>,
    pub(crate) access: Access,
    pub(crate) family: &'static str,
    /// The verb of the required scope, if it does not follow from the method.
    pub(crate) verb: Option<&'static str>,
}

/// Passes a request on with its caller attached, or responds with the reason why not.
pub(crate) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match authorize(&guard, &parts).await {
        Ok(caller) => {
            parts.extensions.insert(caller);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(error) => ApiError(error).into_response(),
    }
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
        path: request.uri.path().to_owned(),
        remote: incoming.map(|incoming| incoming.remote.clone()).unwrap_or_default(),
    };
    let key = check_key(app, &caller, claims.nonce.as_deref()).await?;
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
async fn check_key(app: &App, caller: &Caller, nonce: Option<&str>) -> Result<CredentialKey> {
    let refuse = |reason: &str, namespace_exists: bool| {
        if namespace_exists {
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
