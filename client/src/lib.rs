//! The client's side of a cluster: a small library over the REST API, and the commands of the command
//! line. It knows the API only through the wire and the shared records; nothing of the server lives here.

pub mod api;
pub mod commands;
pub mod credentials;
#[cfg(test)]
mod fake;
mod output;
mod progress;
mod telnet;
mod terminal;
mod time;
mod transfer;

pub use api::{Client, Error};
pub use commands::{Command, Options, run};
pub use credentials::{Credentials, default_data_dir, write_private};
