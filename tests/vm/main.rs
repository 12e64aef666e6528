//! Real guests in emulated VMs: the small guest of `image/` alone, and instances of it on one or several hosts.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod agent;
#[path = "../host/backdoor.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod backdoor;
mod console;
mod daemon_restart;
mod guest;
mod guest_image;
mod instance;
mod lifecycle;
#[path = "../host/machine.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod machine;
mod multi_host;
mod network;
mod screenshot;
mod world;

use std::time::Duration;

/// The timeout for emulated guests on a busy host.
const TIMEOUT: Duration = Duration::from_secs(240);
/// The name by which the shared modules import it.
const PATIENCE: Duration = TIMEOUT;
