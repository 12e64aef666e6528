//! Real daemons on the real kernel: machines, guests and the outside, each in namespaces of their own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod guest;
mod kill;
mod many;
mod mesh;
mod privileges;
mod repair;
mod senders;
mod usage;

use std::sync::RwLock;
use std::time::Duration;

/// How soon what was damaged is whole again, and what was asked for is there.
const SOON: Duration = Duration::from_secs(10);
/// How long anyone would wait for something that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

static MACHINE: RwLock<()> = RwLock::new(());

/// Runs a test in a world of its own, next to others.
fn enter(test: &str) -> bool {
    let _others = MACHINE.read();
    enter_world(test)
}

/// Runs a test in a world of its own that needs the whole machine.
fn enter_alone(test: &str) -> bool {
    let _alone = MACHINE.write();
    enter_world(test)
}

fn enter_world(test: &str) -> bool {
    const PROGRAMS: [&str; 8] = ["ip", "bridge", "nft", "dnsmasq", "ping", "busybox", "unshare", "setpriv"];
    muster_testing::enter_namespaces(test, &PROGRAMS)
}
