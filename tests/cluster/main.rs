//! Real daemons as processes: settings, crashes, hostile clients, several nodes.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod agent;
#[path = "../host/backdoor.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod backdoor;
mod command_line;
mod daemon;
mod database;
mod federated_login;
mod federation;
mod hostile;
mod images;
mod instances;
mod kill;
#[path = "../host/machine.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod machine;
mod multi_node;
mod released_client;
#[path = "../web.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod web;
#[path = "../vm/world.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod world;

use std::path::Path;
use std::time::Duration;

use muster_testing::Setup;

/// The timeout for conditions that must hold eventually.
const TIMEOUT: Duration = Duration::from_secs(240);
/// The name by which the shared modules import it.
const PATIENCE: Duration = TIMEOUT;

/// Returns the setup of a daemon with simulated nodes and its data in `directory`.
fn setup(directory: &Path) -> Setup {
    Setup::new(env!("CARGO_BIN_EXE_muster"), &directory.join("data"))
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
