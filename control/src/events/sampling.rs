//! Samples the events that callers without a valid token cause, with a rate limit for each source.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The number of events that a source can cause in a row.
const BURST: u32 = 30;
/// The interval after which a source can cause another event.
const REFILL_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum number of sources with a limit of their own. Further ones share one.
const MAX_SOURCES: usize = 4096;

/// A kind of refusal. Each kind has its own limit for each source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// A request that failed without a valid token.
    Request,
    /// A login with a wrong secret.
    Login,
    /// A token whose key has been changed or deleted.
    Token,
    /// A token exchange that a rule does not allow.
    Exchange,
}

impl RefusalKind {
    /// Returns the label of the metrics.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Login => "login",
            Self::Token => "token",
            Self::Exchange => "exchange",
        }
    }
}

/// Decides which refusals become events.
#[derive(Debug, Default)]
pub(super) struct RefusalSampler {
    buckets: Mutex<Buckets>,
}

#[derive(Debug, Default)]
struct Buckets {
    of_sources: HashMap<(RefusalKind, String), Bucket>,
    /// When unused buckets were last removed.
    swept: Option<Instant>,
}

impl Buckets {
    /// Returns whether another source can have its own bucket. Removes unused ones if necessary, but at most once per
    /// interval, in which at most one event of each becomes possible.
    fn has_room(&mut self, now: Instant) -> bool {
        if self.of_sources.len() >= MAX_SOURCES
            && self.swept.is_none_or(|swept| now.duration_since(swept) >= REFILL_INTERVAL)
        {
            self.swept = Some(now);
            self.of_sources.retain(|_, bucket| !bucket.is_full(now));
        }
        self.of_sources.len() < MAX_SOURCES
    }
}

#[derive(Debug)]
struct Bucket {
    /// The number of events that are left.
    tokens: u32,
    /// The time up to which `tokens` is computed.
    refilled: Instant,
    /// The number of refusals since the last event.
    suppressed: u64,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST, refilled: now, suppressed: 0 }
    }

    fn refill(&mut self, now: Instant) {
        while self.tokens < BURST && now.duration_since(self.refilled) >= REFILL_INTERVAL {
            self.tokens += 1;
            self.refilled += REFILL_INTERVAL;
        }
        if self.tokens == BURST {
            self.refilled = now;
        }
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.tokens == BURST
    }
}

impl RefusalSampler {
    /// Returns whether a refusal becomes an event: the number of refusals of the source since its last event, or
    /// `None`.
    pub(super) fn sample(&self, kind: RefusalKind, source: &str, now: Instant) -> Option<u64> {
        let mut buckets = self.buckets.lock();
        let mut key = (kind, source.to_owned());
        if !buckets.of_sources.contains_key(&key) && !buckets.has_room(now) {
            key.1.clear();
        }
        let bucket = buckets.of_sources.entry(key).or_insert_with(|| Bucket::new(now));
        bucket.refill(now);
        if bucket.tokens == 0 {
            bucket.suppressed += 1;
            return None;
        }
        bucket.tokens -= 1;
        Some(std::mem::take(&mut bucket.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_each_source_and_counts_what_it_suppresses() {
        let (sampler, start) = (RefusalSampler::default(), Instant::now());
        let sample = |source: &str, at| sampler.sample(RefusalKind::Request, source, at);
        let sampled = (0..1000).filter(|_| sample("a", start).is_some()).count();
        assert_eq!(sampled, BURST as usize);
        assert_eq!(sample("b", start), Some(0), "other sources are not affected");
        assert!(sampler.sample(RefusalKind::Login, "a", start).is_some(), "neither are other kinds");
        assert_eq!(sample("a", start + REFILL_INTERVAL), Some(1000 - u64::from(BURST)));
        assert_eq!(sample("a", start + REFILL_INTERVAL), None);
    }

    #[test]
    fn number_of_sources_is_bounded() {
        let (sampler, start) = (RefusalSampler::default(), Instant::now());
        let sampled = (0..3 * MAX_SOURCES)
            .filter(|n| sampler.sample(RefusalKind::Request, &n.to_string(), start).is_some())
            .count();
        assert_eq!(sampled, MAX_SOURCES + BURST as usize);
        assert_eq!(sampler.buckets.lock().of_sources.len(), MAX_SOURCES + 1);
        assert_eq!(sampler.buckets.lock().swept, Some(start), "not once for each refusal");
        assert!(sampler.sample(RefusalKind::Request, "late", start + REFILL_INTERVAL).is_some());
        assert!(sampler.buckets.lock().of_sources.len() < 3);
    }
}
