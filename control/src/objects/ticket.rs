//! One-time tickets: short-lived secrets that stand for the key of their creator. See docs/decisions/0080.

use muster_types::key::{Secret, random_alphanumeric};
use muster_types::namespace::NamespaceState;
use muster_types::session::TicketPurpose;
use muster_types::time::now;
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::app::App;
use muster_store::keys::{self, CredentialKey};
use muster_store::tickets::TicketRow;
use muster_store::{tickets, transaction};

const TICKET_LENGTH: usize = 32;
/// The maximum number of tickets of one key that are valid at a time.
const MAX_TICKETS: i64 = 100;
/// Seconds after which a caller with too many tickets should retry.
const RETRY_AFTER: u64 = 30;

/// The key that a ticket stands for. The ticket is invalid once the key is deleted or replaced.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TicketKey {
    #[serde(skip)]
    pub(crate) namespace: String,
    #[serde(skip)]
    pub(crate) name: String,
    pub(crate) nonce: String,
    pub(crate) scopes: Option<Vec<String>>,
}

#[derive(Serialize, Deserialize)]
struct TicketDocument {
    key: TicketKey,
    grant: Value,
}

/// A ticket that was exchanged.
#[derive(Debug)]
pub(crate) struct RedeemedTicket {
    pub(crate) key: TicketKey,
    /// What the creator of the ticket has passed.
    pub(crate) grant: Value,
    /// When the key expires, if ever.
    pub(crate) key_expiry: Option<f64>,
}

/// Creates a ticket that is valid for `lifetime` seconds. Returns it and when it expires.
pub(crate) async fn create(
    app: &App,
    purpose: TicketPurpose,
    key: TicketKey,
    grant: Value,
    lifetime: f64,
) -> Result<(Secret, f64)> {
    app.store.membership.require_clock()?;
    let (ticket, expires) = (random_alphanumeric(TICKET_LENGTH), now() + lifetime);
    let (namespace, key_name) = (key.namespace.clone(), key.name.clone());
    let document = serde_json::to_value(TicketDocument { key, grant })
        .map_err(|error| Error::Internal(format!("failed to serialize a ticket: {error}")))?;
    let row = TicketRow { purpose, namespace, key_name, document, expires };
    transaction!(app.store, |tx| {
        if tickets::count(&mut *tx, &row.namespace, &row.key_name).await? >= MAX_TICKETS {
            let text =
                format!("this key has {MAX_TICKETS} unused tickets, please retry when some have expired");
            return Err(Error::TooManyRequests { text, retry_after: RETRY_AFTER }.into());
        }
        Ok(tickets::insert(tx, &ticket, &row).await?)
    })?;
    Ok((Secret::new(ticket), expires))
}

/// Consumes a ticket, which must not have been used before.
pub(crate) async fn redeem(app: &App, purpose: TicketPurpose, ticket: &Secret) -> Result<RedeemedTicket> {
    let invalid = || Error::Unauthenticated("the ticket does not exist, was used, or has expired".into());
    let text = ticket.expose();
    if text.len() != TICKET_LENGTH || !text.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(invalid());
    }
    app.store.membership.require_clock()?;
    let row = transaction!(app.store, |tx| { Ok(tickets::take(tx, text, purpose).await?) })?;
    let row = row.ok_or_else(invalid)?;
    let TicketDocument { key, grant } = serde_json::from_value(row.document)
        .map_err(|error| Error::Internal(format!("a stored ticket is malformed: {error}")))?;
    let key = TicketKey { namespace: row.namespace, name: row.key_name, ..key };
    let found = find_key(app, &key.namespace, &key.name).await?;
    let found = found.filter(|found| found.nonce == key.nonce).ok_or_else(invalid)?;
    Ok(RedeemedTicket { key, grant, key_expiry: found.expiry })
}

/// Returns a key that may be used, if it exists.
pub(crate) async fn find_key(app: &App, namespace: &str, name: &str) -> Result<Option<CredentialKey>> {
    let found = keys::credential(&app.store, namespace, name).await?;
    let found = found.filter(|found| found.namespace_state == NamespaceState::Created);
    Ok(found.and_then(|found| found.key).filter(|key| key.expiry.is_none_or(|expiry| expiry > now())))
}
