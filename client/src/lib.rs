//! API client library and the commands of the command line. It knows the API only through the wire format and the
//! shared record types; it contains no server code.

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
mod terminal;
mod time;
mod transfer;

pub use api::{Client, Error};
pub use commands::{Command, Options, run, with_examples};
pub use credentials::{Credentials, default_data_dir, write_private};
pub use exit_code::{Outcome, error_with_outcome};
pub use output::Format;
