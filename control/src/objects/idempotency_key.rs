//! Requests that their callers may repeat: which of them is executed, and which get the response of another. See
//! docs/decisions/0088.

use std::time::Duration;

use muster_store::idempotency_keys::{self, IdempotencyLease, IdempotencyRow, NewIdempotencyKey};
use muster_store::{Tx, TxError, sha256, transaction};
use muster_types::idempotency::IdempotencyState;
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::auth::Caller;

/// The maximum length of a key.
pub const MAX_KEY_LENGTH: usize = 255;
/// How long a key is kept, in seconds.
const LIFETIME: f64 = 86_400.0;
/// How long an execution counts as running after its daemon has last renewed it, in seconds.
const LEASE: f64 = 30.0;
const RENEW_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of keys of a namespace.
const MAX_KEYS: i64 = 10_000;
/// The maximum number of seconds that a caller is asked to wait.
const MAX_RETRY_AFTER: f64 = 3600.0;

/// A response that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredResponse {
    pub status: u16,
    pub content_type: String,
    pub body: String,
}

/// What to do with a request that has a key.
#[derive(Debug)]
pub enum KeyedRequest {
    Execute(IdempotencyLease),
    /// It was executed before.
    Replay(StoredResponse),
}

/// Checks the syntax of a key.
pub fn check_key(key: &str) -> Result<()> {
    let is_printable = key.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if key.is_empty() || key.len() > MAX_KEY_LENGTH || !is_printable {
        let text = format!("Idempotency-Key: must have 1 to {MAX_KEY_LENGTH} printable ASCII characters");
        return Err(Error::Invalid(text));
    }
    Ok(())
}

/// Begins a request with a key. The nonce of the caller's key is part of the identity: a namespace or key that was created
/// again under the same name does not get the responses of the former one.
pub async fn begin(app: &App, caller: &Caller, key: &str, request_hash: &str) -> Result<KeyedRequest> {
    check_key(key)?;
    let identity = [&caller.namespace, &caller.key_name, caller.nonce.as_deref().unwrap_or_default(), key];
    // As JSON, so that the parts cannot be mistaken for each other.
    let hash = sha256(&serde_json::json!(identity).to_string());
    let lease = IdempotencyLease { hash, owner: uuid::Uuid::new_v4().to_string() };
    let row = transaction!(app.store, |tx| { claim_or_get(tx, caller, &lease, request_hash).await })?;
    let Some(row) = row else { return Ok(KeyedRequest::Execute(lease)) };
    if row.request_hash != request_hash {
        return Err(Error::Mismatch(
            "Idempotency-Key: was used for another request; use a new key for each request".into(),
        ));
    }
    if row.state == IdempotencyState::Finished {
        let response = app.response_cipher.open(&lease.hash, &row.response);
        let response = response.and_then(|text| serde_json::from_str(&text).ok());
        return response.map(KeyedRequest::Replay).ok_or_else(|| unknown_outcome(&row));
    }
    if row.leased_for <= 0.0 {
        return Err(unknown_outcome(&row));
    }
    let text = format!("the same request is running (request id {}), please retry", row.request_id);
    Err(Error::Busy { text, retry_after: retry_after(row.leased_for.min(RENEW_INTERVAL.as_secs_f64())) })
}

/// Makes the lease the one that executes a request. Returns the row of the key if it does not.
async fn claim_or_get(
    tx: &mut Tx,
    caller: &Caller,
    lease: &IdempotencyLease,
    request_hash: &str,
) -> Result<Option<IdempotencyRow>, TxError> {
    let found = idempotency_keys::get(&mut *tx, &lease.hash).await?;
    if let Some(row) = found.filter(|row| row.expires_in > 0.0) {
        let is_same = row.request_hash == request_hash;
        let taken = is_same && idempotency_keys::take_over(tx, lease, &caller.request_id, LEASE).await?;
        return Ok(Some(row).filter(|_| !taken));
    }
    let (count, first_expires) = idempotency_keys::count(&mut *tx, &caller.namespace).await?;
    if count >= MAX_KEYS {
        let text = format!(
            "Idempotency-Key: the namespace has used {MAX_KEYS} keys within a day; retry later or omit the header"
        );
        return Err(Error::TooManyRequests { text, retry_after: retry_after(first_expires) }.into());
    }
    let new = NewIdempotencyKey {
        namespace: &caller.namespace,
        request_hash,
        request_id: &caller.request_id,
        lease: LEASE,
        lifetime: LIFETIME,
    };
    idempotency_keys::insert(tx, lease, &new).await?;
    Ok(None)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
fn retry_after(seconds: f64) -> u64 {
    seconds.ceil().clamp(1.0, MAX_RETRY_AFTER) as u64
}

/// Returns the error for a request that was executed and whose response is lost.
fn unknown_outcome(row: &IdempotencyRow) -> Error {
    Error::Conflict(format!(
        "the request was executed (request id {}), but its response was lost: read the objects that it changes, and use a \
         new Idempotency-Key if it must be repeated",
        row.request_id
    ))
}

/// Waits for the execution of a request, during which others know that it is running.
pub async fn while_leased<T>(app: &App, lease: &IdempotencyLease, execution: impl Future<Output = T>) -> T {
    let renewing = async {
        loop {
            tokio::time::sleep(RENEW_INTERVAL).await;
            if let Err(error) = idempotency_keys::renew(&app.store, lease, LEASE).await {
                tracing::warn!(%error, "failed to renew the lease of a request");
            }
        }
    };
    tokio::select! {
        outcome = execution => outcome,
        () = renewing => unreachable!("renewing does not end"),
    }
}

/// Keeps the response of a request.
pub async fn finish(app: &App, lease: &IdempotencyLease, response: &StoredResponse) -> Result<()> {
    let text = serde_json::to_string(response).map_err(|error| Error::Internal(error.to_string()))?;
    let sealed = app.response_cipher.seal(&lease.hash, &text)?;
    idempotency_keys::finish(&app.store, lease, &sealed).await
}

/// Ends a request that has failed. If it has changed nothing, its key can be used again; returns whether it can.
pub async fn abandon(app: &App, lease: &IdempotencyLease) -> Result<bool> {
    idempotency_keys::abandon(&app.store, lease).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_printable_keys() {
        for key in ["a", "6f1c 42", "~!\"{}", &"x".repeat(255)] {
            check_key(key).unwrap();
        }
        for key in ["", "a\tb", "ä", "a\u{7f}", &"x".repeat(256)] {
            assert!(check_key(key).unwrap_err().to_string().starts_with("Idempotency-Key: "), "{key:?}");
        }
    }
}
