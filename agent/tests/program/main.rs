//! The agent as a program, with a host at the other end of its port.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod commands;
mod files;
mod host;
mod port;
