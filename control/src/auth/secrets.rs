//! Storage and verification of key secrets. See docs/decisions/0003.
//!
//! - A generated secret has full entropy: a salted SHA-256 is enough.
//! - A supplied secret may be weak: it is hashed with argon2id. Few hashes run at a time, so that a flood of logins leaves
//!   CPU time for other requests, and they use the same few buffers, so that its memory does not grow.
//! - A login does not try every key of a namespace. Each row has a keyed tag of its secret, and the tag of the
//!   presented secret finds the candidates. For supplied secrets the tag has only 16 bits, so that even with the seed
//!   it reveals little about the secret.
//! - A secret that matches no candidate takes as long as one that does.

use std::sync::Arc;

use argon2::{Algorithm, Argon2, Block, Params, Version};
use aws_lc_rs::{constant_time, digest, hmac};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use muster_types::key::{Secret, random_alphanumeric};
use muster_types::{Error, Result};
use parking_lot::Mutex;

use super::hash_queue::HashQueue;
pub use super::hash_queue::HashRequester;
use muster_store::keys::{KeyCandidate, StoredSecret};

/// The argon2id parameters that are stored with a hash: memory in KiB, rounds, lanes.
type Cost = [u32; 3];
/// The cost of new hashes.
const COST: Cost = [19 * 1024, 2, 1];
/// The maximum cost. A stored hash with a higher one is damaged.
const MAX_COST: Cost = [256 * 1024, 16, 4];
/// The maximum number of hashes that run at a time. Each keeps a buffer of 19 MiB.
const MAX_CONCURRENT_HASHES: usize = 3;

/// The result of searching the key of a presented secret.
#[derive(Debug)]
pub struct KeySearch {
    pub key: Option<KeyCandidate>,
    /// The names of keys whose stored hash is damaged.
    pub damaged: Vec<String>,
}

/// How a presented secret compares to a stored hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HashMatch {
    Equal,
    Different,
    /// The stored hash is malformed.
    Damaged,
}

/// Hashes and verifies secrets.
#[derive(Debug)]
pub struct Secrets {
    tag_key: hmac::Key,
    queue: Arc<HashQueue>,
    /// The buffers that are not in use, at most one for each slot of the queue.
    buffers: Arc<Mutex<Vec<Vec<Block>>>>,
}

impl Secrets {
    /// `seed` is the cluster's secret seed; it never reaches the database.
    #[must_use]
    pub fn new(seed: &Secret) -> Self {
        let master = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
        let tag_key = hmac::sign(&master, b"muster key lookup tag 1");
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            tag_key: hmac::Key::new(hmac::HMAC_SHA256, tag_key.as_ref()),
            // At most half of the CPUs: the others serve other requests.
            queue: HashQueue::new((cores / 2).clamp(1, MAX_CONCURRENT_HASHES)),
            buffers: Arc::default(),
        }
    }

    /// Returns what to store for a secret of the requester's namespace.
    pub async fn seal(&self, requester: HashRequester<'_>, secret: &Secret) -> Result<StoredSecret> {
        let salt = random_alphanumeric(22);
        let hash = if secret.is_generated() {
            format!("sha256${salt}${}", BASE64.encode(fast_hash(&salt, secret.expose())))
        } else {
            let hash = self.slow_hash(requester, secret, &salt, COST).await?;
            let [memory, rounds, lanes] = COST;
            format!("argon2id${memory}${rounds}${lanes}${salt}${}", BASE64.encode(hash))
        };
        Ok(StoredSecret { tag: self.tag(requester.namespace, secret), hash, nonce: random_alphanumeric(16) })
    }

    /// Returns the tag by which the keys are found that a secret may belong to.
    #[must_use]
    pub fn tag(&self, namespace: &str, secret: &Secret) -> i64 {
        let mut context = hmac::Context::with_key(&self.tag_key);
        context.update(&(namespace.len() as u64).to_be_bytes());
        context.update(namespace.as_bytes());
        context.update(secret.expose().as_bytes());
        let tag = context.sign();
        let bytes = tag.as_ref();
        if secret.is_generated() {
            bytes[..8].iter().fold(0i64, |n, byte| n << 8 | i64::from(*byte)) & i64::MAX
        } else {
            i64::from(u16::from_be_bytes([bytes[0], bytes[1]]))
        }
    }

    /// Finds the candidate that the secret belongs to. Takes as long if no candidate matches.
    pub async fn find(
        &self,
        requester: HashRequester<'_>,
        secret: &Secret,
        candidates: Vec<KeyCandidate>,
    ) -> Result<KeySearch> {
        let mut found = None;
        let mut damaged = Vec::new();
        let mut tried = false;
        for candidate in candidates {
            match self.compare(requester, secret, &candidate.hash).await? {
                HashMatch::Equal => {
                    tried = true;
                    found = Some(candidate);
                    break;
                }
                HashMatch::Different => tried = true,
                HashMatch::Damaged => damaged.push(candidate.name),
            }
        }
        if !tried && !secret.is_generated() {
            self.slow_hash(requester, secret, "no such key, same work", COST).await?;
        }
        Ok(KeySearch { key: found, damaged })
    }

    /// Compares a secret to a stored hash.
    async fn compare(
        &self,
        requester: HashRequester<'_>,
        secret: &Secret,
        stored: &str,
    ) -> Result<HashMatch> {
        let parts: Vec<&str> = stored.split('$').collect();
        let (hash, presented) = match parts.as_slice() {
            ["sha256", salt, hash] if secret.is_generated() => {
                (*hash, fast_hash(salt, secret.expose()).as_ref().to_vec())
            }
            ["argon2id", memory, rounds, lanes, salt, hash] if !secret.is_generated() => {
                let (Ok(memory), Ok(rounds), Ok(lanes)) = (memory.parse(), rounds.parse(), lanes.parse())
                else {
                    return Ok(HashMatch::Damaged);
                };
                let cost: Cost = [memory, rounds, lanes];
                let too_high = cost.iter().zip(MAX_COST).any(|(cost, max)| *cost > max);
                if too_high || salt.len() < 8 || params(cost).is_err() {
                    return Ok(HashMatch::Damaged);
                }
                (*hash, self.slow_hash(requester, secret, salt, cost).await?)
            }
            // A hash of a secret of the other kind.
            ["sha256", _, _] | ["argon2id", _, _, _, _, _] => return Ok(HashMatch::Different),
            _ => return Ok(HashMatch::Damaged),
        };
        let Ok(hash) = BASE64.decode(hash) else { return Ok(HashMatch::Damaged) };
        let equal = constant_time::verify_slices_are_equal(&hash, &presented).is_ok();
        Ok(if equal { HashMatch::Equal } else { HashMatch::Different })
    }

    async fn slow_hash(
        &self,
        requester: HashRequester<'_>,
        secret: &Secret,
        salt: &str,
        cost: Cost,
    ) -> Result<Vec<u8>> {
        let slot = self.queue.acquire(requester).await?;
        let (secret, salt, buffers) = (secret.clone(), salt.to_owned(), Arc::clone(&self.buffers));
        tokio::task::spawn_blocking(move || {
            let _slot = slot;
            let buffer = buffers.lock().pop().unwrap_or_default();
            let (hash, buffer) = hash_in(buffer, &secret, &salt, cost)?;
            // A larger one, for a hash of an unusual cost, is not worth keeping.
            if cost[0] <= COST[0] {
                buffers.lock().push(buffer);
            }
            Ok(hash)
        })
        .await
        .map_err(|e| Error::Internal(format!("failed to hash a secret: {e}")))?
        .map_err(|e: String| Error::Internal(format!("failed to hash a secret: {e}")))
    }
}

/// Computes a hash in a buffer, which grows if necessary, and returns both.
fn hash_in(
    mut buffer: Vec<Block>,
    secret: &Secret,
    salt: &str,
    cost: Cost,
) -> std::result::Result<(Vec<u8>, Vec<Block>), String> {
    let params = params(cost).map_err(|e| e.to_string())?;
    let blocks = params.block_count();
    if buffer.len() < blocks {
        buffer.resize(blocks, Block::default());
    }
    let mut hash = vec![0u8; 32];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into_with_memory(
            secret.expose().as_bytes(),
            salt.as_bytes(),
            &mut hash,
            &mut buffer[..blocks],
        )
        .map_err(|e| e.to_string())?;
    Ok((hash, buffer))
}

fn params([memory, rounds, lanes]: Cost) -> argon2::Result<Params> {
    Params::new(memory, rounds, lanes, Some(32))
}

fn fast_hash(salt: &str, secret: &str) -> digest::Digest {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(salt.as_bytes());
    context.update(secret.as_bytes());
    context.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets() -> Secrets {
        Secrets::new(&Secret::new("a seed that only tests use"))
    }

    const REQUESTER: HashRequester<'_> = HashRequester { source: "192.0.2.1", namespace: "ns" };

    fn candidate(name: &str, stored: StoredSecret) -> KeyCandidate {
        KeyCandidate { name: name.into(), hash: stored.hash, nonce: stored.nonce, scopes: None }
    }

    #[tokio::test]
    async fn finds_key_of_matching_secret_only() {
        let secrets = secrets();
        for secret in [Secret::generate(), Secret::new("hunter2"), Secret::new("")] {
            let stored = secrets.seal(REQUESTER, &secret).await.unwrap();
            assert!(!stored.hash.contains(secret.expose()) || secret.expose().is_empty());
            assert_eq!(stored.tag, secrets.tag("ns", &secret));
            let found =
                secrets.find(REQUESTER, &secret, vec![candidate("mine", stored.clone())]).await.unwrap();
            assert_eq!(found.key.map(|c| c.name).as_deref(), Some("mine"));
            let other = secrets
                .find(REQUESTER, &Secret::new("hunter3"), vec![candidate("mine", stored)])
                .await
                .unwrap();
            assert!(other.key.is_none());
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn concurrent_logins_share_few_buffers() {
        let secrets = Arc::new(secrets());
        let logins: Vec<_> = (0..20)
            .map(|_| {
                let secrets = Arc::clone(&secrets);
                tokio::spawn(async move { secrets.find(REQUESTER, &Secret::new("wrong"), vec![]).await })
            })
            .collect();
        for login in logins {
            assert!(login.await.unwrap().unwrap().key.is_none());
        }
        let buffers = secrets.buffers.lock();
        assert!((1..=MAX_CONCURRENT_HASHES).contains(&buffers.len()));
        assert!(buffers.iter().all(|buffer| buffer.len() == params(COST).unwrap().block_count()));
    }

    #[tokio::test]
    async fn keys_with_the_same_secret_are_stored_differently() {
        let secrets = secrets();
        let secret = Secret::new("hunter2");
        let (a, b) = (
            secrets.seal(REQUESTER, &secret).await.unwrap(),
            secrets.seal(REQUESTER, &secret).await.unwrap(),
        );
        assert_ne!(a.hash, b.hash);
        assert_ne!(a.nonce, b.nonce);
        assert_ne!(secrets.tag("ns", &Secret::generate()), secrets.tag("ns", &Secret::generate()));
    }

    #[test]
    fn tag_of_supplied_secret_has_at_most_16_bits() {
        let secrets = secrets();
        for n in 0..200 {
            assert!((0..65536).contains(&secrets.tag("ns", &Secret::new(format!("secret {n}")))));
        }
    }

    #[tokio::test]
    async fn damaged_hash_matches_no_secret() {
        let secrets = secrets();
        for hash in [
            "",
            "argon2id",
            "argon2id$x$2$1$saltsaltsalt$AAAA",
            "argon2id$0$0$0$saltsaltsalt$AAAA",
            "argon2id$19456$2$1$x$AAAA",
            "argon2id$19456$2$1$saltsaltsalt$not base64",
            "argon2id$99999999$2$1$saltsaltsalt$AAAA",
            "md5$x$y",
        ] {
            let stored = StoredSecret { tag: 0, hash: hash.into(), nonce: "n".into() };
            let found =
                secrets.find(REQUESTER, &Secret::new("x"), vec![candidate("k", stored)]).await.unwrap();
            assert!(found.key.is_none());
            assert_eq!(found.damaged, ["k"], "{hash}");
        }
    }
}
