//! Real daemons with real networks: hosts, guests and an external peer, each in its own namespaces.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod failover;
mod guest;
mod kill;
mod mesh;
mod network_churn;
mod privileges;
mod repair;
mod spoofing;
mod usage;

use std::sync::RwLock;
use std::time::Duration;

/// The timeout for requested changes and repairs.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout for conditions that must hold eventually.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Locked exclusively by tests that need the whole host.
static HOST_LOCK: RwLock<()> = RwLock::new(());

/// Runs a test in its own namespaces, concurrently with others.
fn enter(test: &str) -> bool {
    let _shared = HOST_LOCK.read();
    enter_namespaces(test)
}

/// Runs a test in its own namespaces, but not concurrently with others.
fn enter_exclusively(test: &str) -> bool {
    let _exclusive = HOST_LOCK.write();
    enter_namespaces(test)
}

fn enter_namespaces(test: &str) -> bool {
    const PROGRAMS: [&str; 8] = ["ip", "bridge", "nft", "dnsmasq", "ping", "busybox", "unshare", "setpriv"];
    muster_testing::enter_namespaces(test, &PROGRAMS)
}
