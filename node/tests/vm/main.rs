//! VMs on a real node: an emulated QEMU with the small guest, across restarts of the daemon.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod agent;
mod consoles;
mod failures;
mod fixture;
mod hardware;
mod lifecycle;
mod recovery;
mod snapshot;
