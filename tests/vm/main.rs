//! Real guests in emulated VMs: the small guest of `image/` alone, and instances of it on one or several hosts.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod agent;
mod backup;
mod console;
mod daemon_restart;
mod full_disk;
mod guest;
mod guest_image;
mod instance;
mod lifecycle;
mod lost_host;
mod migration;
mod migration_power_loss;
mod multi_host;
mod network;
mod replicas;
mod rootless;
mod screenshot;
mod shared_storage;
mod tutorial;
mod upgrade;

use std::time::Duration;

/// The timeout for emulated guests on a busy host.
const TIMEOUT: Duration = Duration::from_secs(240);
