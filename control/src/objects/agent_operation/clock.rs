//! How long nothing of a transfer has moved.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use muster_types::storage::ByteStream;
use muster_types::time::now;

/// Runs while it is the guest's turn.
#[derive(Debug, Default)]
pub(crate) struct Clock(Mutex<Moved>);

#[derive(Debug, Default, Clone, Copy)]
struct Moved {
    /// Since when it is the guest's turn.
    since: Option<Instant>,
    /// Unix time at which something last moved.
    time: Option<f64>,
}

impl Clock {
    fn moved(&self) -> MutexGuard<'_, Moved> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something moved: the time begins anew.
    pub(super) fn touch(&self) {
        *self.moved() = Moved { since: Some(Instant::now()), time: Some(now()) };
    }

    /// Nothing more is expected of the guest.
    pub(super) fn stop(&self) {
        self.moved().since = None;
    }

    /// When it is a stall, unless something moves; nothing if it is not the guest's turn.
    pub(crate) fn stalls_at(&self, timeout: f64) -> Option<Instant> {
        let timeout = Duration::try_from_secs_f64(timeout).ok().filter(|timeout| !timeout.is_zero())?;
        self.moved().since.and_then(|since| since.checked_add(timeout))
    }

    /// Unix time at which something last moved.
    pub(crate) fn time(&self) -> Option<f64> {
        self.moved().time
    }
}

/// A stream that tells the clock of each piece.
pub(super) fn watched(clock: &Arc<Clock>, data: ByteStream) -> ByteStream {
    let clock = Arc::clone(clock);
    Box::pin(data.inspect(move |piece| {
        if piece.is_ok() {
            clock.touch();
        }
    }))
}

/// The same, which stops the clock at the end: then it is our own disk's turn.
pub(super) fn watched_to_the_end(clock: &Arc<Clock>, data: ByteStream) -> ByteStream {
    let last = Arc::clone(clock);
    let end = stream::once(async move { last.stop() }).filter_map(|()| async { None });
    Box::pin(watched(clock, data).chain(end))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn it_runs_only_while_it_is_the_guests_turn() {
        let clock = Clock::default();
        assert_eq!((clock.stalls_at(1.0), clock.time()), (None, None));
        clock.touch();
        let first = clock.stalls_at(1.0).unwrap();
        assert!(first > Instant::now() && first <= Instant::now() + Duration::from_secs(1));
        assert_eq!(clock.stalls_at(0.0), None, "no budget, no stall");
        clock.touch();
        assert!(clock.stalls_at(1.0).unwrap() >= first);
        clock.stop();
        assert!(clock.stalls_at(1.0).is_none() && clock.time().is_some());
    }

    #[tokio::test]
    async fn each_piece_counts_and_after_the_last_it_is_our_turn() {
        let clock = Arc::new(Clock::default());
        let pieces =
            || -> ByteStream { Box::pin(stream::iter([Ok(Bytes::from("a")), Ok(Bytes::from("b"))])) };
        let mut data = watched(&clock, pieces());
        assert!(clock.time().is_none());
        while data.next().await.is_some() {
            assert!(clock.stalls_at(1.0).is_some());
        }
        assert!(clock.stalls_at(1.0).is_some(), "the guest has yet to say that it has all");
        let all: Vec<_> = watched_to_the_end(&clock, pieces()).collect().await;
        assert_eq!((all.len(), clock.stalls_at(1.0)), (2, None));
    }
}
