//! Measures how long a transfer has made no progress.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use muster_types::storage::ByteStream;
use muster_types::time::now;
use parking_lot::{Mutex, MutexGuard};

/// Runs while a transfer waits for the guest.
#[derive(Debug, Default)]
pub(crate) struct ProgressClock(Mutex<Progress>);

#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    /// Since when the transfer has been waiting for the guest.
    since: Option<Instant>,
    /// The Unix time of the last progress.
    time: Option<f64>,
}

impl ProgressClock {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock()
    }

    /// Records progress and restarts the clock.
    pub(super) fn record_progress(&self) {
        *self.progress() = Progress { since: Some(Instant::now()), time: Some(now()) };
    }

    /// Stops the clock when nothing more is expected from the guest.
    pub(super) fn stop(&self) {
        self.progress().since = None;
    }

    /// Returns when the transfer counts as stalled, `None` while it does not wait for the guest.
    pub(crate) fn stalls_at(&self, timeout: f64) -> Option<Instant> {
        let timeout = Duration::try_from_secs_f64(timeout).ok().filter(|timeout| !timeout.is_zero())?;
        self.progress().since.and_then(|since| since.checked_add(timeout))
    }

    /// Returns the Unix time of the last progress.
    pub(crate) fn last_progress(&self) -> Option<f64> {
        self.progress().time
    }
}

/// Returns a stream that records progress with each chunk.
pub(super) fn with_progress(clock: &Arc<ProgressClock>, data: ByteStream) -> ByteStream {
    let clock = Arc::clone(clock);
    Box::pin(data.inspect(move |chunk| {
        if chunk.is_ok() {
            clock.record_progress();
        }
    }))
}

/// Like [`with_progress`], but stops the clock at the end, when only the disk is awaited.
pub(super) fn with_progress_until_end(clock: &Arc<ProgressClock>, data: ByteStream) -> ByteStream {
    let last = Arc::clone(clock);
    let end = stream::once(async move { last.stop() }).filter_map(|()| async { None });
    Box::pin(with_progress(clock, data).chain(end))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn clock_runs_only_while_waiting_for_the_guest() {
        let clock = ProgressClock::default();
        assert_eq!((clock.stalls_at(1.0), clock.last_progress()), (None, None));
        clock.record_progress();
        let first = clock.stalls_at(1.0).unwrap();
        assert!(first > Instant::now() && first <= Instant::now() + Duration::from_secs(1));
        assert_eq!(clock.stalls_at(0.0), None, "no timeout, no stall");
        clock.record_progress();
        assert!(clock.stalls_at(1.0).unwrap() >= first);
        clock.stop();
        assert!(clock.stalls_at(1.0).is_none() && clock.last_progress().is_some());
    }

    #[tokio::test]
    async fn stream_records_progress_and_stops_clock_at_its_end() {
        let clock = Arc::new(ProgressClock::default());
        let chunks =
            || -> ByteStream { Box::pin(stream::iter([Ok(Bytes::from("a")), Ok(Bytes::from("b"))])) };
        let mut data = with_progress(&clock, chunks());
        assert!(clock.last_progress().is_none());
        while data.next().await.is_some() {
            assert!(clock.stalls_at(1.0).is_some());
        }
        assert!(clock.stalls_at(1.0).is_some(), "the guest has not confirmed yet");
        let all: Vec<_> = with_progress_until_end(&clock, chunks()).collect().await;
        assert_eq!((all.len(), clock.stalls_at(1.0)), (2, None));
    }
}
