//! Runs the agent as a program, with the test as its host at the other end of the port.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod commands;
mod files;
mod host;
mod port;
mod terminal;
