//! The fingerprint of the secret seed that the cluster was created with.

#[cfg(test)]
mod tests;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use muster_types::Result;
use muster_types::key::Secret;

use super::{Store, StoreError, cluster_values, transaction};

const NAME: &str = "AUTH_SECRET_SEED_FINGERPRINT";

/// Returns whether `seed` is the cluster's. The first daemon of a new cluster sets it.
pub async fn matches_cluster(store: &Store, seed: &Secret) -> Result<bool> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
    // 64 bits distinguish seeds but do not help to find one.
    let fingerprint = BASE64.encode(&hmac::sign(&key, b"muster seed fingerprint 1").as_ref()[..8]);
    transaction!(store, |tx| {
        if let Some(stored) = cluster_values::get(&mut *tx, NAME).await? {
            return Ok(stored == fingerprint);
        }
        // If two daemons start a new cluster, the one that does not insert retries and compares.
        cluster_values::insert(tx, NAME, &fingerprint).await.map_err(StoreError::retry_duplicate)?;
        Ok(true)
    })
}
