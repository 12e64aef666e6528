//! Fixtures that do not depend on the daemon's crates. Everything started here ends with the test process, however that
//! ends.

mod arp;
mod committed;
mod daemon;
mod documents;
mod galera;
pub mod issuer;
mod leaks;
mod mariadb;
mod network_namespace;
mod port;
mod process_namespace;
mod requirements;
pub mod web_server;

pub use arp::{ArpAnswer, ArpObserver, Mac, mac_address};
pub use committed::assert_committed;
pub use daemon::{Daemon, DaemonSetup, daemon_program};
pub use documents::shell_commands;
pub use galera::Galera;
pub use issuer::Issuer;
pub use leaks::job_directories;
pub use mariadb::{MariaDb, database_url, socket_url, wait};
pub use network_namespace::{NetworkNamespace, enter_namespaces, wait_for};
pub use port::free_port;
pub use process_namespace::ProcessNamespace;
pub use requirements::skipped;
