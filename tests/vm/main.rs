//! The small guest of `image/` on the machines that QEMU emulates, without Muster around it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod guest;
mod tiny;
