//! VmApi on a real node: QEMU with the small guest, emulated, started and found again by the node.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod agent;
mod ends;
mod hardware;
mod kill;
mod life;
mod snapshot;
mod world;
