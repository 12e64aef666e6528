//! `/auth/session` and `/auth/login-tickets`: the sessions of browsers.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use muster_types::Error;
use muster_types::key::Secret;
use muster_types::session::{LoginTicketRecord, SessionRecord};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs, required};
use crate::browser_session::{NoForeignOrigin, Transport, WithCookie};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::incoming::Incoming;
use crate::response::{Json, Null, named_bodies};
use muster_control::app::App;
use muster_control::objects::session;

named_bodies!(LoginTicketRecord, SessionRecord);

/// A ticket, or the credentials of a namespace.
#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"ticket": "mUd2pLr0Xc7TqWk5Zs9eVbHn3Ja1GfYo"}))]
pub(crate) struct NewSession {
    /// A ticket of `POST /auth/login-tickets`.
    ticket: Option<String>,
    /// The namespace of the key, without a ticket.
    namespace: Option<String>,
    /// The secret of the key, without a ticket.
    key: Option<String>,
}

/// Creates a ticket with which a browser opens a session of the caller.
///
/// The ticket is valid for 60 seconds, and for one use. It may be passed to a browser in the fragment of a URL,
/// `/ui/#ticket=…`, which browsers do not send to servers.
#[utoipa::path(post, path = "/auth/login-tickets", tag = "auth", responses((status = 200, description = "A ticket."),
    (status = 429, description = "The key has too many unused tickets; retry after the given time.")))]
pub(crate) async fn create_ticket(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<NoArgs>,
) -> ApiResult<Json<LoginTicketRecord>> {
    Ok(Json(session::create_ticket(&app, &caller).await?))
}

/// Opens the session of a browser.
///
/// The response sets the cookie `muster_session`, which authenticates later requests without the header `Authorization`.
/// Such a request needs a header `Origin` with the host of the server, unless it only reads. A session ends after 12 hours,
/// with its key, and with the session whose ticket has opened it.
#[utoipa::path(post, path = "/auth/session", tag = "auth", request_body = NewSession, responses(
    (status = 200, description = "The session."),
    (status = 400, description = "A field is missing or malformed, or is in the URL."),
    (status = 401, description = "The ticket is not valid, or no key of the namespace has this secret."),
    (status = 403, description = "The header `Origin` is that of another server."),
    (status = 404, description = "No such namespace."),
    (status = 409, description = "The key has too many scopes for a cookie."),
    (status = 429, description = "Too many logins of this address or namespace are waiting; retry after the given time."),
    (status = 503, description = "The database or another dependency is unavailable.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    _: NoForeignOrigin,
    headers: HeaderMap,
    uri: Uri,
    Args(new): Args<NewSession>,
) -> ApiResult<WithCookie<Json<SessionRecord>>> {
    if uri.query().is_some() {
        return Err(Error::Invalid("credentials must be in the body, not in the URL".into()).into());
    }
    let origin = incoming.origin();
    let session = match new.ticket {
        Some(ticket) => session::redeem(&app, &Secret::new(ticket), origin).await?,
        None => {
            let namespace = required("namespace", new.namespace.filter(|name| !name.is_empty()))?;
            let secret = Secret::new(required("key", new.key)?);
            session::log_in(&app, &namespace, &secret, origin).await?
        }
    };
    let transport = Transport::of(&app.settings, &headers);
    Ok(WithCookie::set(transport, &session.token, session.lifetime, Json(session.record)))
}

/// Returns the credentials of the caller: those of its session, or of its token.
#[utoipa::path(get, path = "/auth/session", tag = "auth", responses((status = 200, description = "The credentials of the caller.")))]
pub(crate) async fn get(
    Authenticated(caller): Authenticated,
    _: Args<NoArgs>,
) -> ApiResult<Json<SessionRecord>> {
    Ok(Json(session::get(&caller)?))
}

/// Makes the browser forget its session.
#[utoipa::path(delete, path = "/auth/session", tag = "auth", responses((status = 200, description = "`null`"),
    (status = 400, description = "An argument is not declared."),
    (status = 403, description = "The header `Origin` is that of another server."),
    (status = 503, description = "This daemon is not a member of the cluster.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    _: NoForeignOrigin,
    headers: HeaderMap,
    _: Args<NoArgs>,
) -> ApiResult<WithCookie<Null>> {
    Ok(WithCookie::clear(Transport::of(&app.settings, &headers), Null))
}
