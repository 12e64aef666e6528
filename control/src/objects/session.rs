//! Browser sessions: tokens that a cookie carries, and the tickets that they are exchanged for. See docs/decisions/0080.

use muster_types::event::Event;
use muster_types::key::Secret;
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::ObjectRef;
use muster_types::session::{LoginTicketRecord, SessionRecord, TicketPurpose};
use muster_types::{Error, Result};
use serde_json::json;

use super::key::{self, FIRST_KEY_NAME, unix_seconds};
use super::ticket::{self, TicketKey};
use crate::app::App;
use crate::auth::tokens::TokenSubject;
use crate::auth::{Caller, Origin};
use crate::objects::audit::with_caller;
use muster_store::keys;

/// The lifetime of a ticket, in seconds.
const TICKET_LIFETIME: f64 = 60.0;
/// The maximum lifetime of a session, in seconds.
const SESSION_LIFETIME: u64 = 12 * 3600;
/// The maximum length of a session token. Browsers ignore larger cookies.
const MAX_TOKEN_BYTES: usize = 3800;

/// A new session.
#[derive(Debug)]
pub struct Session {
    pub record: SessionRecord,
    pub token: Secret,
    /// The number of seconds until it expires.
    pub lifetime: u64,
}

/// Creates a ticket for a session of the caller. A session that is opened from another one ends with it.
pub async fn create_ticket(app: &App, caller: &Caller) -> Result<LoginTicketRecord> {
    let refuse = || Error::Forbidden("only the key of a namespace can open a session".into());
    let nonce = caller.nonce.clone().ok_or_else(refuse)?;
    let token = caller.token.ok_or_else(refuse)?;
    let key = TicketKey {
        namespace: caller.namespace.clone(),
        name: caller.key_name.clone(),
        nonce,
        scopes: caller.scopes.clone(),
    };
    let session_end = token.is_session.then_some(token.expires);
    let record = create_ticket_of(app, key, session_end).await?;
    let event = Event::audit(ObjectRef::namespace(&caller.namespace), "login ticket created");
    app.record(caller, with_caller(caller, event));
    Ok(record)
}

/// Creates a ticket for a session with the first key of the cluster, if the key exists. Only the operator of the daemon
/// may see it.
pub async fn create_first_ticket(app: &App) -> Result<Option<LoginTicketRecord>> {
    let (namespace, name) = (SYSTEM_NAMESPACE.to_owned(), FIRST_KEY_NAME.to_owned());
    let Some(found) = ticket::find_key(app, &namespace, &name).await? else { return Ok(None) };
    let scopes = keys::scopes(&*app.store, &namespace, &name).await?.flatten();
    let key = TicketKey { namespace, name, nonce: found.nonce, scopes };
    create_ticket_of(app, key, None).await.map(Some)
}

async fn create_ticket_of(app: &App, key: TicketKey, session_end: Option<u64>) -> Result<LoginTicketRecord> {
    let grant = json!({"session_end": session_end});
    let (ticket, expires) = ticket::create(app, TicketPurpose::Login, key, grant, TICKET_LIFETIME).await?;
    Ok(LoginTicketRecord { ticket: ticket.expose().to_owned(), expires })
}

/// Opens a session with a ticket, which can be used once.
pub async fn redeem(app: &App, ticket: &Secret, origin: Origin<'_>) -> Result<Session> {
    let redeemed = ticket::redeem(app, TicketPurpose::Login, ticket).await?;
    let end = redeemed.grant["session_end"].as_u64();
    let session = open(app, &redeemed.key, end, redeemed.key_expiry)?;
    let object = ObjectRef::namespace(&redeemed.key.namespace);
    let mut event = Event::audit(object, "token created from login ticket");
    event = event.with("keyname", redeemed.key.name).with("remote-address", origin.remote);
    event.request_id = Some(origin.request_id.to_owned());
    app.events.record(event);
    Ok(session)
}

/// Opens a session with the secret of a key.
pub async fn log_in(app: &App, namespace: &str, secret: &Secret, origin: Origin<'_>) -> Result<Session> {
    let found = key::authenticate(app, namespace, secret, origin).await?;
    let expiry = ticket::find_key(app, namespace, &found.name).await?.and_then(|key| key.expiry);
    let key = TicketKey {
        namespace: namespace.to_owned(),
        name: found.name,
        nonce: found.nonce,
        scopes: found.scopes,
    };
    open(app, &key, None, expiry)
}

/// Creates a session that ends at `end` at the latest, and with its key.
fn open(app: &App, key: &TicketKey, end: Option<u64>, key_expiry: Option<f64>) -> Result<Session> {
    let now = unix_seconds();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the key has not expired")]
    let key_end = key_expiry.map_or(u64::MAX, |expiry| expiry as u64);
    let end = (now + SESSION_LIFETIME).min(end.unwrap_or(u64::MAX)).min(key_end);
    let TicketKey { namespace, name, nonce, scopes } = key;
    let subject = TokenSubject { namespace, key: name, nonce, scopes: scopes.as_deref() };
    let token = app.tokens.create_session(now, end, subject);
    if token.len() > MAX_TOKEN_BYTES {
        return Err(Error::Conflict("the key has too many scopes for a browser session".into()));
    }
    let record = SessionRecord {
        namespace: namespace.clone(),
        key_name: name.clone(),
        scopes: scopes.clone(),
        expires: seconds(end),
    };
    Ok(Session { record, token: Secret::new(token), lifetime: end.saturating_sub(now) })
}

/// Returns the credentials of a caller.
pub fn get(caller: &Caller) -> Result<SessionRecord> {
    let token = caller.token.ok_or_else(|| Error::Internal("a caller without a token".into()))?;
    Ok(SessionRecord {
        namespace: caller.namespace.clone(),
        key_name: caller.key_name.clone(),
        scopes: caller.scopes.clone(),
        expires: seconds(token.expires),
    })
}

#[expect(clippy::cast_precision_loss, reason = "Unix time is small")]
fn seconds(time: u64) -> f64 {
    time as f64
}
