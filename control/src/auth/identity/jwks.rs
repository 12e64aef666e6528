//! A cache of the keys of every issuer.
//!
//! Keys are cached for `FEDERATION_JWKS_CACHE_SECONDS` and no longer, even if the issuer is unreachable. One fetch at a
//! time runs for an issuer, and concurrent requests wait for it. A token with an unknown key triggers a fetch, because
//! issuers rotate their keys. Since anyone can invent key IDs, such fetches are rate limited. A failed fetch is not
//! repeated immediately.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::ids::IssuerId;
use muster_types::issuer::{KEY_FETCH_FAILED, KEYS_FETCHED};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::settings::Settings;
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use super::ca_bundle::{CaBundle, TrustedRoots};
use super::download::KeyDownload;
use super::key_set::{KeySet, Verdict};
use super::token::Token;
use crate::events::Events;
use crate::fetch::address::AddressFilter;
use muster_store::issuers::IssuerRow;

/// The maximum number of consecutive fetches for unknown keys.
const REFRESH_BURST: u32 = 5;
/// The time after which another such fetch is allowed.
const REFRESH_INTERVAL: Duration = Duration::from_secs(3);
/// The time after a failed fetch in which no other is made.
const FAILURE_BACKOFF: Duration = Duration::from_secs(2);
/// The minimum time for which an unused issuer stays in the cache.
const MIN_IDLE_TIME: Duration = Duration::from_secs(60);

/// Returns the total time that a fetch may take.
pub(super) fn fetch_timeout(settings: &Settings) -> Duration {
    Duration::from_secs(settings.federation_jwks_fetch_timeout_seconds.max(1))
}

/// The keys of an issuer as of one fetch.
struct CachedKeys {
    keys: KeySet,
    /// When the fetch began: keys that were published later may be missing.
    fetched_at: Instant,
    /// The generation of the certificates that authenticated the server.
    roots: u64,
}

/// State of the fetches from one issuer.
struct RefreshState {
    last_failure: Option<FetchFailure>,
    /// Whether the last recorded event is about a success; `None` without one.
    recorded_success: Option<bool>,
    limiter: RefreshLimiter,
}

/// A failed fetch, which is not repeated before `retry_at` with the same certificates.
struct FetchFailure {
    retry_at: Instant,
    roots: u64,
    reason: String,
}

/// The cache entry of one issuer.
struct IssuerEntry {
    id: IssuerId,
    name: String,
    uri: String,
    cached: RwLock<Option<Arc<CachedKeys>>>,
    /// Locked during a fetch.
    refresh: tokio::sync::Mutex<RefreshState>,
    last_used: Mutex<Instant>,
}

impl IssuerEntry {
    fn new(issuer: &IssuerRow, now: Instant) -> Self {
        let refresh =
            RefreshState { last_failure: None, recorded_success: None, limiter: RefreshLimiter::new(now) };
        Self {
            id: issuer.id,
            name: issuer.name.clone(),
            uri: issuer.terms.jwks_uri.clone(),
            cached: RwLock::new(None),
            refresh: tokio::sync::Mutex::new(refresh),
            last_used: Mutex::new(now),
        }
    }

    /// Returns the cached keys if they satisfy a request.
    fn cached(&self, request: &KeyRequest, ttl: Duration) -> Option<Arc<CachedKeys>> {
        let cached = self.cached.read().clone()?;
        let is_fresh = cached.fetched_at >= request.arrived || cached.fetched_at.elapsed() < ttl;
        let is_newer = request.newer_than.is_none_or(|time| cached.fetched_at > time);
        (is_fresh && is_newer && cached.roots == request.roots.generation).then_some(cached)
    }

    fn store(&self, keys: CachedKeys) -> Arc<CachedKeys> {
        let keys = Arc::new(keys);
        *self.cached.write() = Some(Arc::clone(&keys));
        keys
    }
}

/// Which keys a verification needs.
#[derive(Clone)]
struct KeyRequest {
    arrived: Instant,
    roots: Arc<TrustedRoots>,
    /// The time of the keys that lacked the token's key.
    newer_than: Option<Instant>,
}

pub(super) struct JwksCache(Arc<Inner>);

struct Inner {
    ttl: Duration,
    ca_bundle: Arc<CaBundle>,
    download: KeyDownload,
    events: Events,
    issuers: Mutex<HashMap<IssuerId, Arc<IssuerEntry>>>,
}

impl JwksCache {
    pub(super) fn new(
        settings: &Settings,
        ca_bundle: Arc<CaBundle>,
        filter: AddressFilter,
        events: Events,
    ) -> Self {
        let download = KeyDownload {
            filter,
            is_proxied: !settings.http_proxy_server.is_empty(),
            timeout: fetch_timeout(settings),
        };
        let ttl = Duration::from_secs(settings.federation_jwks_cache_seconds);
        Self(Arc::new(Inner { ttl, ca_bundle, download, events, issuers: Mutex::default() }))
    }

    /// Verifies that a key of the issuer signed a token. Returns the reason if not.
    pub(super) async fn verify(
        &self,
        issuer: &IssuerRow,
        token: &Token<'_>,
        roots: Arc<TrustedRoots>,
    ) -> Result<(), String> {
        let entry = self.0.entry(issuer, Instant::now());
        let mut request = KeyRequest { arrived: Instant::now(), roots, newer_than: None };
        loop {
            let cached = self.0.keys(&entry, &request).await?;
            match cached.keys.verify(token) {
                Verdict::Signed => return Ok(()),
                Verdict::Rejected(why) => return Err(why.into()),
                Verdict::UnknownKey if cached.fetched_at >= request.arrived => {
                    return Err("issuer has no such key".into());
                }
                Verdict::UnknownKey => request.newer_than = Some(cached.fetched_at),
            }
        }
    }
}

impl Inner {
    /// Returns the cache entry of an issuer. A changed `jwks_uri` replaces it.
    fn entry(&self, issuer: &IssuerRow, now: Instant) -> Arc<IssuerEntry> {
        let mut issuers = self.issuers.lock();
        if let Some(entry) = issuers.get(&issuer.id).filter(|entry| entry.uri == issuer.terms.jwks_uri) {
            *entry.last_used.lock() = now;
            return Arc::clone(entry);
        }
        let max_idle = self.ttl.max(MIN_IDLE_TIME);
        issuers.retain(|_, entry| {
            Arc::strong_count(entry) > 1 || now.duration_since(*entry.last_used.lock()) < max_idle
        });
        let entry = Arc::new(IssuerEntry::new(issuer, now));
        issuers.insert(issuer.id, Arc::clone(&entry));
        entry
    }

    /// Returns keys that satisfy a request, from the cache or the issuer.
    async fn keys(
        self: &Arc<Self>,
        entry: &Arc<IssuerEntry>,
        request: &KeyRequest,
    ) -> Result<Arc<CachedKeys>, String> {
        if let Some(cached) = entry.cached(request, self.ttl) {
            return Ok(cached);
        }
        // A task, so that the fetch continues for other waiters if this caller disconnects.
        let (inner, entry, request) = (Arc::clone(self), Arc::clone(entry), request.clone());
        let refresh = tokio::spawn(async move { inner.refresh(&entry, &request).await });
        refresh.await.unwrap_or_else(|error| Err(format!("failed to fetch the issuer's keys: {error}")))
    }

    /// Fetches keys, unless another task did while this one waited for the lock.
    async fn refresh(&self, entry: &IssuerEntry, request: &KeyRequest) -> Result<Arc<CachedKeys>, String> {
        let mut state = entry.refresh.lock().await;
        if let Some(cached) = entry.cached(request, self.ttl) {
            return Ok(cached);
        }
        let (fetched_at, roots) = (Instant::now(), request.roots.generation);
        if let Some(failure) = &state.last_failure
            && fetched_at < failure.retry_at
            && failure.roots == roots
        {
            return Err(format!("failed to fetch the issuer's keys: {}", failure.reason));
        }
        if request.newer_than.is_some() && !state.limiter.try_acquire(fetched_at) {
            return Err("issuer has no such key, and its keys were refreshed too often".into());
        }
        let fetched = match self.ca_bundle.clients(&request.roots).await {
            Ok(clients) => self.download.fetch(&clients, &entry.uri).await,
            Err(why) => Err(why),
        };
        match fetched {
            Ok(keys) => {
                tracing::info!(issuer = entry.name, keys = keys.count(), "fetched the issuer's keys");
                state.last_failure = None;
                // Fetches repeat all the time: only a change is recorded.
                if state.recorded_success.replace(true) != Some(true) {
                    self.events.record_if_room(key_event(entry, KEYS_FETCHED));
                }
                Ok(entry.store(CachedKeys { keys, fetched_at, roots }))
            }
            Err(reason) => {
                tracing::warn!(issuer = entry.name, reason, "failed to fetch the issuer's keys");
                state.recorded_success = Some(false);
                let event = key_event(entry, KEY_FETCH_FAILED).with("reason", reason.clone());
                self.events.record_if_room(event);
                let error = format!("failed to fetch the issuer's keys: {reason}");
                let retry_at = Instant::now() + FAILURE_BACKOFF;
                state.last_failure = Some(FetchFailure { retry_at, roots, reason });
                Err(error)
            }
        }
    }
}

/// Returns an event of an issuer.
fn key_event(entry: &IssuerEntry, message: &str) -> Event {
    Event::new(EventType::Status, ObjectRef::new(ObjectType::Issuer, entry.id), message)
        .with("jwks_uri", entry.uri.clone())
}

/// A token bucket that limits fetches for unknown keys.
#[derive(Debug, Clone, Copy)]
struct RefreshLimiter {
    available: u32,
    refilled_at: Instant,
}

impl RefreshLimiter {
    fn new(now: Instant) -> Self {
        Self { available: REFRESH_BURST, refilled_at: now }
    }

    fn try_acquire(&mut self, now: Instant) -> bool {
        while self.available < REFRESH_BURST && now.duration_since(self.refilled_at) >= REFRESH_INTERVAL {
            self.available += 1;
            self.refilled_at += REFRESH_INTERVAL;
        }
        if self.available == REFRESH_BURST {
            self.refilled_at = now;
        }
        let is_allowed = self.available > 0;
        self.available = self.available.saturating_sub(1);
        is_allowed
    }
}

#[cfg(test)]
mod tests {
    use muster_types::issuer::{IssuerState, IssuerTerms};

    use super::*;

    #[test]
    fn removes_unused_issuers() {
        let settings = Settings::defaults();
        let filter = AddressFilter::new("ALLOWED_NETWORKS", "", "");
        let bundle = Arc::new(CaBundle::new(&settings, filter.clone()));
        let directory = tempfile::tempdir().unwrap();
        let events = Events::open(directory.path(), "node", &settings).unwrap();
        let jwks = JwksCache::new(&settings, bundle, filter, events).0;
        let issuer = || IssuerRow {
            id: IssuerId::new(),
            name: "ci".into(),
            state: IssuerState::Created,
            terms: IssuerTerms { issuer_url: "x".into(), jwks_uri: "x".into(), audience: "x".into() },
        };
        let now = Instant::now();
        let count = || jwks.issuers.lock().len();
        let (used, referenced) = (issuer(), issuer());
        let reference = jwks.entry(&referenced, now);
        for _ in 0..20 {
            jwks.entry(&issuer(), now);
        }
        jwks.entry(&used, now + Duration::from_secs(299));
        assert_eq!(count(), 22);
        let entry = jwks.entry(&used, now + Duration::from_secs(301));
        jwks.entry(&issuer(), now + Duration::from_secs(301));
        assert_eq!(count(), 3);
        assert!(Arc::ptr_eq(&reference, &jwks.entry(&referenced, now + Duration::from_secs(900))));
        assert!(Arc::ptr_eq(&entry, &jwks.entry(&used, now + Duration::from_secs(900))));
    }

    #[test]
    fn limits_refreshes_to_a_burst_and_then_one_per_interval() {
        let mut now = Instant::now();
        let mut limiter = RefreshLimiter::new(now);
        assert_eq!((0..100).filter(|_| limiter.try_acquire(now)).count(), REFRESH_BURST as usize);
        now += REFRESH_INTERVAL - Duration::from_millis(1);
        assert!(!limiter.try_acquire(now));
        now += Duration::from_millis(1);
        assert!(limiter.try_acquire(now) && !limiter.try_acquire(now));
        // The bucket never holds more than the burst.
        now += REFRESH_INTERVAL * 1000;
        assert_eq!((0..100).filter(|_| limiter.try_acquire(now)).count(), REFRESH_BURST as usize);
    }
}
