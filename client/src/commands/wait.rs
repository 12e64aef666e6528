//! Waiting for what the server does on its own: it is asked again, less and less often, until time is up.

use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, sleep};

const SHORTEST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Whether and how long to wait.
#[derive(Debug, Clone, Copy, Args)]
pub struct Waiting {
    /// Do not wait for the end of it
    #[arg(long)]
    no_wait: bool,
    /// How long to wait at most
    #[arg(long, value_name = "SECONDS", default_value_t = 60, conflicts_with = "no_wait")]
    pub(super) timeout: u32,
}

impl Waiting {
    /// The time that there is, unless nobody wants to wait.
    pub(super) fn patience(self) -> Option<Patience> {
        (!self.no_wait).then(|| Patience::of(self.timeout))
    }
}

#[cfg(test)]
impl Waiting {
    pub(super) fn of(seconds: u32) -> Self {
        Self { no_wait: false, timeout: seconds }
    }
}

/// Whether and how long to wait for what may take very long.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct LongWaiting {
    /// Do not wait for the end of it
    #[arg(long)]
    no_wait: bool,
    /// How long to wait at most, if not for ever
    #[arg(long, value_name = "SECONDS", conflicts_with = "no_wait")]
    timeout: Option<u32>,
}

impl LongWaiting {
    /// The time that there is, unless nobody wants to wait.
    pub(super) fn patience(self) -> Option<Patience> {
        let end = self.timeout.map(|time| Instant::now() + Duration::from_secs(time.into()));
        (!self.no_wait).then_some(Patience { end, pause: SHORTEST_PAUSE })
    }
}

/// What is left of the time to wait.
#[derive(Debug)]
pub(super) struct Patience {
    /// Nothing: there is no end of it.
    end: Option<Instant>,
    pause: Duration,
}

impl Patience {
    /// So many seconds from now.
    pub(super) fn of(seconds: u32) -> Self {
        Self { end: Some(Instant::now() + Duration::from_secs(seconds.into())), pause: SHORTEST_PAUSE }
    }

    /// Pauses before the next question. False when there is no time for one.
    pub(super) async fn lasts(&mut self) -> bool {
        let left = self.end.map_or(LONGEST_PAUSE, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return false;
        }
        sleep(self.pause.min(left)).await;
        self.pause = (self.pause * 3 / 2).min(LONGEST_PAUSE);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn patience_ends_and_pauses_grow() {
        assert!(Waiting { no_wait: true, timeout: 60 }.patience().is_none());
        let mut patience = Waiting { no_wait: false, timeout: 0 }.patience().unwrap();
        assert!(!patience.lasts().await);
        let end = Instant::now() + Duration::from_millis(2);
        let mut patience = Patience { end: Some(end), pause: Duration::from_millis(1) };
        assert!(patience.lasts().await);
        assert_eq!(patience.pause, Duration::from_micros(1500));
        while patience.lasts().await {}
        assert!(Instant::now() >= end && patience.pause <= LONGEST_PAUSE);
    }

    #[tokio::test]
    async fn long_patience_ends_only_if_that_is_wanted() {
        assert!(LongWaiting { no_wait: true, timeout: None }.patience().is_none());
        let mut patience = LongWaiting { no_wait: false, timeout: Some(0) }.patience().unwrap();
        assert!(!patience.lasts().await);
        let patience = LongWaiting { no_wait: false, timeout: None }.patience().unwrap();
        assert!(patience.end.is_none());
        assert!(Patience { pause: Duration::from_millis(1), ..patience }.lasts().await);
    }
}
