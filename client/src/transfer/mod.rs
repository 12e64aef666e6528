//! Moving content to and from a cluster: much data over connections that break. What has arrived is not sent again,
//! and what has arrived is checked.

mod download;
mod remembered;
#[cfg(test)]
mod tests;
mod upload;

use std::future::Future;
use std::time::Duration;

use anyhow::bail;
use aws_lc_rs::digest::{Context, SHA512};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

pub(crate) use self::download::{PrivatePart, Target, download, pour};
pub(crate) use self::remembered::Remembered;
pub(crate) use self::upload::{LocalFile, Uploaded, send_file, send_once, send_stdin};
use crate::api::Error;
use crate::progress::Meter;

/// Bytes handed on at once.
const CHUNK: usize = 1 << 20;
/// Chunks between the disk and the network.
const CHUNKS: usize = 8;

/// How often and after which pauses something is tried again, and when a connection stands still.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Tries in a row without a single byte more.
    tries: u32,
    shortest_pause: Duration,
    longest_pause: Duration,
    pub(crate) patience: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            tries: 8,
            shortest_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(15),
            patience: Duration::from_secs(120),
        }
    }
}

/// Counts tries that brought nothing.
#[derive(Debug)]
pub(crate) struct Tries {
    policy: Policy,
    fruitless: u32,
}

impl Tries {
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, fruitless: 0 }
    }

    /// Something was moved.
    pub(crate) fn succeeded(&mut self) {
        self.fruitless = 0;
    }

    /// Pauses before the next try; after too many, and for what another try does not change, the error stands.
    pub(crate) async fn again(&mut self, error: Error, meter: Option<&Meter>) -> Result<(), Error> {
        if !may_pass(&error) || self.fruitless >= self.policy.tries {
            return Err(error);
        }
        let pause = self.policy.shortest_pause * 2_u32.saturating_pow(self.fruitless);
        let pause = pause.min(self.policy.longest_pause);
        self.fruitless += 1;
        if let Some(meter) = meter {
            meter.wait_for(&format!("{error}; next try in {:.0} s", pause.as_secs_f64().ceil()));
        }
        sleep(pause).await;
        if let Some(meter) = meter {
            meter.wait_for("");
        }
        Ok(())
    }
}

/// The pause between two questions how far the server has come.
pub(crate) async fn pause() {
    sleep(Duration::from_millis(300)).await;
}

/// Whether another try may go better.
pub(crate) fn may_pass(error: &Error) -> bool {
    match error {
        Error::Unreachable { .. } => true,
        Error::Unusable(_) | Error::Unreadable { .. } | Error::NotPlaced { .. } => false,
        Error::LoginRefused { .. } | Error::NotAllowed { .. } | Error::Refused { .. } => {
            matches!(error.status(), Some(408 | 429 | 500 | 502..=504))
        }
    }
}

/// The sha512 of a content that is read from its beginning, where some of it may be seen again.
struct Tally {
    context: Context,
    /// How much is counted in.
    at: u64,
}

impl Tally {
    fn new() -> Self {
        Self { context: Context::new(&SHA512), at: 0 }
    }

    /// Counts in what is new of some bytes.
    fn take(&mut self, offset: u64, bytes: &[u8]) {
        let known = usize::try_from(self.at.saturating_sub(offset)).unwrap_or(usize::MAX);
        if let Some(new) = bytes.get(known..) {
            self.context.update(new);
            self.at += new.len() as u64;
        }
    }

    fn finish(&self) -> String {
        hex(self.context.clone().finish().as_ref())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Does something unless the user or the system ends it; then `left` says what becomes of it.
pub(crate) async fn unless_interrupted<T>(
    work: impl Future<Output = anyhow::Result<T>>,
    left: impl FnOnce() -> String,
) -> anyhow::Result<T> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = work => return result,
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    bail!("interrupted; {}", left())
}
