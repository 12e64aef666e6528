//! Real daemons as processes: settings, crashes, hostile clients, several nodes.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod agent;
mod apply;
mod backup;
mod command_line;
mod command_output;
mod console;
mod credentials;
mod daemon;
mod database;
mod doctor;
mod federated_login;
mod federation;
mod galera;
mod generated_client;
mod hostile;
mod idle;
mod images;
mod instances;
mod integrations;
mod kill;
mod monitoring;
mod multi_node;
mod readme;
mod released_client;
mod traces;
mod up;

use std::path::Path;
use std::time::Duration;

use muster_testing::DaemonSetup;

/// The timeout for conditions that must hold eventually.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Returns the setup of a daemon with simulated nodes and its data in `directory`.
fn setup(directory: &Path) -> DaemonSetup {
    DaemonSetup::new(env!("CARGO_BIN_EXE_muster"), &directory.join("data"))
}

/// Polls until there is a value, for at most a minute.
async fn wait_for<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let started = std::time::Instant::now();
    loop {
        if let Some(value) = poll().await {
            return value;
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "timed out waiting for {what}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
