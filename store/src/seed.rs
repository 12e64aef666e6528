//! Which secret seed the cluster was made with, as a fingerprint.

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use muster_types::Result;
use muster_types::key::Secret;

use super::{Store, StoreError, transaction, values};

const NAME: &str = "AUTH_SECRET_SEED_FINGERPRINT";

/// Whether `seed` is the cluster's. The first daemon of a new cluster decides.
pub async fn is_ours(store: &Store, seed: &Secret) -> Result<bool> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
    // 64 bits tell seeds apart and are of no use for finding one.
    let mine = BASE64.encode(&hmac::sign(&key, b"muster seed fingerprint 1").as_ref()[..8]);
    transaction!(store, |tx| {
        match values::get(&mut *tx, NAME).await? {
            Some(known) => Ok(known == mine),
            // Of two first daemons one inserts; the other tries again and compares.
            None => match values::insert(tx, NAME, &mine).await {
                Err(StoreError::Duplicate(why)) => Err(StoreError::Conflict(why).into()),
                inserted => Ok(inserted.map(|()| true)?),
            },
        }
    })
}
