//! Waiting for asynchronous work of the server by polling with growing intervals.

use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, sleep};

use crate::output;

const MIN_POLL_INTERVAL: Duration = Duration::from_millis(200);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Whether and how long to wait.
#[derive(Debug, Clone, Copy, Args)]
pub struct WaitOptions {
    /// Wait for completion, which is the default
    #[arg(id = "wait", long = "wait", overrides_with = "no_wait")]
    _wait: bool,
    /// Do not wait for completion
    #[arg(long, overrides_with = "wait")]
    no_wait: bool,
    /// Maximum time to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60, conflicts_with = "no_wait")]
    pub(super) timeout: u32,
}

impl WaitOptions {
    /// Starts the timer, unless the user does not want to wait.
    pub(super) fn timer(self) -> Option<PollTimer> {
        (!self.no_wait).then(|| PollTimer::new(self.timeout))
    }
}

#[cfg(test)]
impl WaitOptions {
    pub(super) fn with_timeout(seconds: u32) -> Self {
        Self { _wait: false, no_wait: false, timeout: seconds }
    }
}

/// Whether and how long to wait for work of unpredictable duration.
#[derive(Debug, Clone, Copy, Args)]
pub struct LongWaitOptions {
    /// Wait for completion, which is the default
    #[arg(id = "wait", long = "wait", overrides_with = "no_wait")]
    _wait: bool,
    /// Do not wait for completion
    #[arg(long, overrides_with = "wait")]
    no_wait: bool,
    /// Maximum time to wait; unlimited if not given
    #[arg(long, value_name = "SECONDS", conflicts_with = "no_wait")]
    timeout: Option<u32>,
}

impl LongWaitOptions {
    /// Starts the timer, unless the user does not want to wait.
    pub(super) fn timer(self) -> Option<PollTimer> {
        let deadline = self.timeout.map(|time| Instant::now() + Duration::from_secs(time.into()));
        (!self.no_wait).then_some(PollTimer { deadline, ..PollTimer::unlimited() })
    }
}

/// Paces polling until a deadline.
#[derive(Debug, Clone)]
pub(super) struct PollTimer {
    /// `None` polls without limit.
    deadline: Option<Instant>,
    interval: Duration,
    /// The last condition that was printed.
    announced: String,
}

impl PollTimer {
    /// Creates a timer that expires after some seconds.
    pub(super) fn new(seconds: u32) -> Self {
        let deadline = Instant::now() + Duration::from_secs(seconds.into());
        Self { deadline: Some(deadline), ..Self::unlimited() }
    }

    /// Creates a timer that does not expire.
    pub(super) fn unlimited() -> Self {
        Self { deadline: None, interval: MIN_POLL_INTERVAL, announced: String::new() }
    }

    /// Prints once what the command waits for, and waits before the next poll. Returns false if the deadline has passed.
    pub(super) async fn wait_for(&mut self, condition: &str) -> bool {
        let expired = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        if !expired && self.announced != condition {
            output::status(&format!("waiting for {condition}"));
            condition.clone_into(&mut self.announced);
        }
        self.tick().await
    }

    /// Waits before the next poll, for commands that show their progress otherwise. Returns false if the deadline has passed.
    pub(super) async fn tick(&mut self) -> bool {
        let remaining = self
            .deadline
            .map_or(MAX_POLL_INTERVAL, |deadline| deadline.saturating_duration_since(Instant::now()));
        if remaining.is_zero() {
            return false;
        }
        sleep(self.interval.min(remaining)).await;
        self.interval = (self.interval * 3 / 2).min(MAX_POLL_INTERVAL);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn timer_expires_and_its_interval_grows() {
        assert!(WaitOptions { _wait: false, no_wait: true, timeout: 60 }.timer().is_none());
        let mut timer = WaitOptions { _wait: false, no_wait: false, timeout: 0 }.timer().unwrap();
        assert!(!timer.tick().await);
        let deadline = Instant::now() + Duration::from_millis(2);
        let mut timer =
            PollTimer { deadline: Some(deadline), interval: Duration::from_millis(1), ..PollTimer::new(0) };
        assert!(timer.tick().await);
        assert_eq!(timer.interval, Duration::from_micros(1500));
        while timer.tick().await {}
        assert!(Instant::now() >= deadline && timer.interval <= MAX_POLL_INTERVAL);
    }

    #[tokio::test]
    async fn announces_a_condition_until_it_changes() {
        let mut timer = PollTimer::new(5);
        for condition in ["a", "a", "b"] {
            assert!(timer.wait_for(condition).await);
            assert_eq!(timer.announced, condition);
        }
        let mut expired = PollTimer::new(0);
        assert!(!expired.wait_for("c").await);
        assert!(expired.announced.is_empty(), "a command that does not wait says nothing");
    }

    #[tokio::test]
    async fn long_wait_expires_only_with_a_timeout() {
        assert!(LongWaitOptions { _wait: false, no_wait: true, timeout: None }.timer().is_none());
        let mut timer = LongWaitOptions { _wait: false, no_wait: false, timeout: Some(0) }.timer().unwrap();
        assert!(!timer.tick().await);
        let timer = LongWaitOptions { _wait: false, no_wait: false, timeout: None }.timer().unwrap();
        assert!(timer.deadline.is_none());
        assert!(PollTimer { interval: Duration::from_millis(1), ..timer }.tick().await);
    }
}
