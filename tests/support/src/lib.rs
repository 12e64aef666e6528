//! Fixtures that do not depend on the daemon's crates. Everything started here ends with the test process, however that
//! ends.

mod arp;
mod daemon;
mod galera;
pub mod issuer;
mod leaks;
mod mariadb;
mod network_namespace;
mod process_namespace;
pub mod web_server;

pub use arp::{ArpAnswer, ArpObserver, Mac, mac_address};
pub use daemon::{Daemon, DaemonSetup, daemon_program};
pub use galera::Galera;
pub use issuer::Issuer;
pub use leaks::job_directories;
pub use mariadb::{MariaDb, database_url, socket_url, wait};
pub use network_namespace::{NetworkNamespace, enter_namespaces, wait_for};
pub use process_namespace::ProcessNamespace;

use std::net::TcpListener;

/// Reports that a test cannot run here.
///
/// # Panics
/// With `MUSTER_TEST_REQUIRE_ALL=1`.
pub fn skipped(needs: &str) {
    assert!(
        std::env::var("MUSTER_TEST_REQUIRE_ALL").as_deref() != Ok("1"),
        "skipped: needs {needs}, and MUSTER_TEST_REQUIRE_ALL=1"
    );
    eprintln!("skipped: needs {needs}");
}

/// Returns a loopback port that is free at the moment.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("an address").port()
}
