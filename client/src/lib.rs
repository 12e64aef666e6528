//! API client library and the commands of the command line. It knows the API only through the wire format and the
//! shared record types; it contains no server code.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod api;
pub mod commands;
pub mod credentials;
mod error_text;
mod exit_code;
#[cfg(test)]
mod fake_server;
mod output;
pub mod profiles;
mod progress;
mod similar_name;
mod terminal;
mod time;
mod transfer;

pub use api::{Client, Error};
pub use commands::{Command, Options, run, with_examples};
pub use credentials::{Credentials, default_data_dir, write_private};
pub use exit_code::{Outcome, error_with_outcome, interrupted, timed_out};
pub use output::{Format, set_quiet, write_message};
pub use progress::ProgressMeter;
