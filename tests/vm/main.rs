//! Real guests on machines that QEMU emulates: the small guest of `image/` by itself, and instances of it in daemons
//! that each have a machine of their own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod across;
mod agent;
#[path = "../host/backdoor.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod backdoor;
mod console;
mod guest;
mod instance;
mod life;
#[path = "../host/machine.rs"]
#[allow(dead_code, reason = "not every test needs all that it can do")]
mod machine;
mod network;
mod outlive;
mod picture;
mod tiny;
mod world;

use std::time::Duration;

/// How long anyone would wait for a guest that is emulated on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);
