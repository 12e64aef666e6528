//! The keys of every issuer, kept for a while.
//!
//! A copy is good for `FEDERATION_JWKS_CACHE_SECONDS` and no longer, whatever happens to the issuer. One fetch at a time
//! is under way for an issuer; who comes meanwhile waits for it. A token with an unknown key makes a copy be fetched at
//! once, since issuers change their keys; but anybody can make up key ids, so that only some such fetches are made in a
//! row and then one every few seconds. A fetch that failed is not tried again for a moment.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use muster_types::ids::IssuerId;
use muster_types::settings::Settings;
use tokio::time::Instant;

use super::Refused;
use super::authorities::{Authorities, Trust};
use super::download::Download;
use super::signature::{KeySet, Verdict};
use super::token::Token;
use crate::fetch::address::Guard;
use muster_store::issuers::IssuerRow;

/// Fetches for unknown keys that are made in a row.
const BURST: u32 = 5;
/// Time after which one more is made.
const REFILL: Duration = Duration::from_secs(3);
/// Time after a failed fetch in which none is made.
const PAUSE: Duration = Duration::from_secs(2);
/// Time after which an issuer that nobody used is forgotten, at the least.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Keys as they were published at some time.
struct KeyCopy {
    keys: KeySet,
    /// When fetching it began: what was published later may be missing.
    began: Instant,
    /// The authorities under which it was fetched.
    trust: u64,
}

/// What only the one who fetches touches.
struct Turn {
    /// The last fetch, if it failed: until when that holds, under which authorities, and why.
    failed: Option<(Instant, u64, String)>,
    allowance: Allowance,
}

/// What is known of one issuer.
struct Place {
    name: String,
    uri: String,
    copy: RwLock<Option<Arc<KeyCopy>>>,
    turn: tokio::sync::Mutex<Turn>,
    used: Mutex<Instant>,
}

impl Place {
    fn new(issuer: &IssuerRow, now: Instant) -> Self {
        Self {
            name: issuer.name.clone(),
            uri: issuer.terms.jwks_uri.clone(),
            copy: RwLock::new(None),
            turn: tokio::sync::Mutex::new(Turn { failed: None, allowance: Allowance::full(now) }),
            used: Mutex::new(now),
        }
    }

    /// The copy, if it serves this need.
    fn copy(&self, need: &Need, life: Duration) -> Option<Arc<KeyCopy>> {
        let copy = self.copy.read().unwrap_or_else(PoisonError::into_inner).clone()?;
        let is_fresh = copy.began >= need.arrived || copy.began.elapsed() < life;
        let is_newer = need.seen.is_none_or(|seen| copy.began > seen);
        (is_fresh && is_newer && copy.trust == need.trust.number).then_some(copy)
    }

    fn put(&self, copy: KeyCopy) -> Arc<KeyCopy> {
        let copy = Arc::new(copy);
        *self.copy.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&copy));
        copy
    }

    fn used(&self) -> std::sync::MutexGuard<'_, Instant> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What somebody wants of an issuer's keys.
#[derive(Clone)]
struct Need {
    arrived: Instant,
    trust: Arc<Trust>,
    /// When the copy began that did not have the key.
    seen: Option<Instant>,
}

pub(super) struct Jwks(Arc<Inner>);

struct Inner {
    life: Duration,
    authorities: Arc<Authorities>,
    download: Download,
    places: Mutex<HashMap<IssuerId, Arc<Place>>>,
}

impl Jwks {
    pub(super) fn new(settings: &Settings, authorities: Arc<Authorities>, guard: Guard) -> Self {
        let download = Download {
            guard,
            is_proxied: !settings.http_proxy_server.is_empty(),
            time: Duration::from_secs(settings.federation_jwks_fetch_timeout_seconds.max(1)),
        };
        let life = Duration::from_secs(settings.federation_jwks_cache_seconds);
        Self(Arc::new(Inner { life, authorities, download, places: Mutex::default() }))
    }

    /// Whether a key of the issuer signed a token.
    pub(super) async fn verify(
        &self,
        issuer: &IssuerRow,
        token: &Token<'_>,
        trust: Arc<Trust>,
    ) -> Result<(), Refused> {
        let place = self.0.place(issuer, Instant::now());
        let mut need = Need { arrived: Instant::now(), trust, seen: None };
        loop {
            let copy = self.0.copy(&place, &need).await.map_err(Refused::Token)?;
            match copy.keys.verify(token) {
                Verdict::Signed => return Ok(()),
                Verdict::Refused(why) => return Err(Refused::Token(why.into())),
                Verdict::Unknown if copy.began >= need.arrived => {
                    return Err(Refused::Token("the issuer has no such key".into()));
                }
                Verdict::Unknown => need.seen = Some(copy.began),
            }
        }
    }
}

impl Inner {
    /// What is known of an issuer. Where its keys are may have changed: then nothing is.
    fn place(&self, issuer: &IssuerRow, now: Instant) -> Arc<Place> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.get(&issuer.id).filter(|place| place.uri == issuer.terms.jwks_uri) {
            *place.used() = now;
            return Arc::clone(place);
        }
        let kept = self.life.max(FORGOTTEN);
        places.retain(|_, place| Arc::strong_count(place) > 1 || now.duration_since(*place.used()) < kept);
        let place = Arc::new(Place::new(issuer, now));
        places.insert(issuer.id, Arc::clone(&place));
        place
    }

    /// A copy that serves a need.
    async fn copy(self: &Arc<Self>, place: &Arc<Place>, need: &Need) -> Result<Arc<KeyCopy>, String> {
        if let Some(copy) = place.copy(need, self.life) {
            return Ok(copy);
        }
        // Others wait for it, too: it goes on when this caller does not.
        let (inner, place, need) = (Arc::clone(self), Arc::clone(place), need.clone());
        let refresh = tokio::spawn(async move { inner.refresh(&place, &need).await });
        refresh.await.unwrap_or_else(|_| Err("the fetch of its issuer's keys ended".into()))
    }

    /// Fetches, unless somebody did while we waited for our turn.
    async fn refresh(&self, place: &Place, need: &Need) -> Result<Arc<KeyCopy>, String> {
        let mut turn = place.turn.lock().await;
        if let Some(copy) = place.copy(need, self.life) {
            return Ok(copy);
        }
        let (began, trust) = (Instant::now(), need.trust.number);
        if let Some((until, under, why)) = &turn.failed
            && began < *until
            && *under == trust
        {
            return Err(format!("its issuer's keys could not be fetched: {why}"));
        }
        if need.seen.is_some() && !turn.allowance.take(began) {
            return Err("the issuer has no such key, and was asked often enough".into());
        }
        let fetched = match self.authorities.client(&need.trust).await {
            Ok(client) => self.download.keys(&client, &place.uri).await,
            Err(why) => Err(why),
        };
        match fetched {
            Ok(keys) => {
                tracing::info!(issuer = place.name, keys = keys.count(), "fetched the keys of an issuer");
                turn.failed = None;
                Ok(place.put(KeyCopy { keys, began, trust }))
            }
            Err(why) => {
                tracing::warn!(issuer = place.name, why, "the keys of an issuer could not be fetched");
                turn.failed = Some((Instant::now() + PAUSE, trust, why.clone()));
                Err(format!("its issuer's keys could not be fetched: {why}"))
            }
        }
    }
}

/// How many more fetches for unknown keys may be made.
#[derive(Debug, Clone, Copy)]
struct Allowance {
    left: u32,
    /// When the last one was added.
    added: Instant,
}

impl Allowance {
    fn full(now: Instant) -> Self {
        Self { left: BURST, added: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        while self.left < BURST && now.duration_since(self.added) >= REFILL {
            self.left += 1;
            self.added += REFILL;
        }
        if self.left == BURST {
            self.added = now;
        }
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }
}

#[cfg(test)]
mod tests {
    use muster_types::issuer::{IssuerState, IssuerTerms};

    use super::*;

    #[test]
    fn issuers_that_nobody_uses_are_forgotten() {
        let settings = Settings::defaults();
        let guard = Guard::new("ALLOWED_NETWORKS", "", "");
        let jwks = Jwks::new(&settings, Arc::new(Authorities::new(&settings, guard.clone())), guard).0;
        let issuer = || IssuerRow {
            id: IssuerId::new(),
            name: "ci".into(),
            state: IssuerState::Created,
            terms: IssuerTerms { issuer_url: "x".into(), jwks_uri: "x".into(), audience: "x".into() },
        };
        let now = Instant::now();
        let count = || jwks.places.lock().unwrap().len();
        let (used, held) = (issuer(), issuer());
        let holding = jwks.place(&held, now);
        for _ in 0..20 {
            jwks.place(&issuer(), now);
        }
        jwks.place(&used, now + Duration::from_secs(299));
        assert_eq!(count(), 22);
        let place = jwks.place(&used, now + Duration::from_secs(301));
        jwks.place(&issuer(), now + Duration::from_secs(301));
        assert_eq!(count(), 3);
        assert!(Arc::ptr_eq(&holding, &jwks.place(&held, now + Duration::from_secs(900))));
        assert!(Arc::ptr_eq(&place, &jwks.place(&used, now + Duration::from_secs(900))));
    }

    #[test]
    fn some_fetches_are_made_in_a_row_and_then_one_from_time_to_time() {
        let mut now = Instant::now();
        let mut allowance = Allowance::full(now);
        assert_eq!((0..100).filter(|_| allowance.take(now)).count(), BURST as usize);
        now += REFILL - Duration::from_millis(1);
        assert!(!allowance.take(now));
        now += Duration::from_millis(1);
        assert!(allowance.take(now) && !allowance.take(now));
        // However long nothing happens, there are no more than at first.
        now += REFILL * 1000;
        assert_eq!((0..100).filter(|_| allowance.take(now)).count(), BURST as usize);
    }
}
