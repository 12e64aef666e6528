//! Ports of this host.

use std::net::TcpListener;

/// Returns a loopback port that is free at the moment.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("an address").port()
}
