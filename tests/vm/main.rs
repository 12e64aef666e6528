//! Real guests on machines that QEMU emulates: the small guest of `image/` by itself, and instances of it in daemons
//! that each have a machine of their own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod across;
mod agent;
mod console;
mod guest;
mod instance;
mod life;
mod network;
mod outlive;
mod picture;
mod tiny;

use std::time::Duration;

/// How long anyone would wait for a guest that is emulated on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);
