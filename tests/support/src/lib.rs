//! What the tests share. Everything started here ends with the test process, however that ends.

mod daemon;
pub mod issuer;
mod mariadb;
mod place;

pub use daemon::{Daemon, Setup};
pub use issuer::Issuer;
pub use mariadb::{MariaDb, database_url, socket_url, wait};
pub use place::{Place, enter, wait_for};

use std::net::TcpListener;

/// Says that a test cannot run here. With `MUSTER_TEST_REQUIRE_ALL=1` that is a failure.
///
/// # Panics
/// When every test is required to run.
pub fn skipped(needs: &str) {
    assert!(
        std::env::var("MUSTER_TEST_REQUIRE_ALL").as_deref() != Ok("1"),
        "skipped: needs {needs}, and MUSTER_TEST_REQUIRE_ALL=1"
    );
    eprintln!("skipped: needs {needs}");
}

/// A loopback port that was free a moment ago.
///
/// # Panics
/// When the machine has none.
#[must_use]
pub fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("an address").port()
}
