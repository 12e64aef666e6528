//! Real daemons in processes of their own: killed, cut off, abused.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod agent;
mod clients;
mod command_line;
mod daemon;
mod database;
mod federated_login;
mod federation;
mod hostile;
mod images;
mod instances;
mod kill;
mod several;

use std::path::Path;
use std::time::Duration;

use muster_testing::DaemonSetup;

/// How long anyone would wait for something that has to happen.
const PATIENCE: Duration = Duration::from_secs(240);

/// A daemon of simulated nodes whose data is in `folder`.
fn setup(folder: &Path) -> DaemonSetup {
    DaemonSetup::new(env!("CARGO_BIN_EXE_muster"), &folder.join("data"))
}

/// Looks again and again until there is something, for as long as anyone would wait.
async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let started = std::time::Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "waited in vain for {what}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
