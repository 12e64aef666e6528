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
    let fingerprint = fingerprint(seed);
    transaction!(store, |tx| {
        if let Some(stored) = cluster_values::get(&mut *tx, NAME).await? {
            return Ok(stored == fingerprint);
        }
        // If two daemons start a new cluster, the one that does not insert retries and compares.
        cluster_values::insert(tx, NAME, &fingerprint).await.map_err(StoreError::retry_duplicate)?;
        Ok(true)
    })
}

/// Returns whether `seed` is that of a cluster that exists.
pub async fn is_that_of_cluster(store: &Store, seed: &Secret) -> Result<bool, StoreError> {
    Ok(cluster_values::get(store, NAME).await?.is_some_and(|stored| stored == fingerprint(seed)))
}

fn fingerprint(seed: &Secret) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
    // 64 bits distinguish seeds but do not help to find one.
    BASE64.encode(&hmac::sign(&key, b"muster seed fingerprint 1").as_ref()[..8])
}
