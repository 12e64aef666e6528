//! Reads the port and passes packets to the agent.

use std::path::Path;
use std::sync::Arc;

use muster_agent::frame::{DEFAULT_MAX_LENGTH, FrameDecoder};
use nix::errno::Errno;
use nix::poll::PollFlags;

use crate::agent::Agent;
use crate::os::sleep;
use crate::port::{POLL_INTERVAL, Port};

/// How long one wait for data lasts, in milliseconds.
const READ_POLL_TIMEOUT: u16 = 10_000;

/// Serves the port, and opens it again whenever it disappears.
pub(crate) fn run(path: &Path, agent: &Agent) -> ! {
    loop {
        let port = Arc::new(Port::wait_until_open(path));
        let error = serve(&port, agent);
        if !port.is_socket() {
            eprintln!("lost port {}: {error}", path.display());
        }
        drop(port);
        sleep(POLL_INTERVAL);
    }
}

/// Serves an open port until it fails.
fn serve(port: &Arc<Port>, agent: &Agent) -> Errno {
    let mut decoder = FrameDecoder::new(DEFAULT_MAX_LENGTH);
    let mut buffer = vec![0; 64 << 10];
    let mut is_connected = false;
    loop {
        let flags = port.poll(PollFlags::POLLIN, if is_connected { READ_POLL_TIMEOUT } else { 0 });
        if !is_connected && !flags.contains(PollFlags::POLLHUP) {
            is_connected = true;
            agent.connect(port);
        }
        match port.read(&mut buffer) {
            Ok(0) => {
                if is_connected {
                    is_connected = false;
                    decoder = FrameDecoder::new(DEFAULT_MAX_LENGTH);
                    agent.disconnect();
                }
                if port.is_socket() {
                    return Errno::EPIPE;
                }
                sleep(POLL_INTERVAL);
            }
            Ok(count) => {
                if !is_connected {
                    is_connected = true;
                    agent.connect(port);
                }
                decoder.feed(&buffer[..count]);
                while let Some(body) = decoder.next_frame() {
                    agent.handle(&body);
                }
            }
            Err(Errno::EAGAIN) => {
                // A device without a host reads as end of file. One that reports neither data nor end of file is
                // polled.
                if !is_connected {
                    sleep(POLL_INTERVAL);
                }
            }
            Err(Errno::EINTR) => {}
            Err(error) => {
                agent.disconnect();
                return error;
            }
        }
    }
}
