//! The address of a guest's agent.

use std::io;
use std::os::fd::AsRawFd;
#[cfg(test)]
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The vsock port on which agents listen.
const AGENT_PORT: u32 = 1025;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(in crate::guest) enum AgentAddress {
    /// The vsock context ID of the guest.
    Vsock(u32),
    #[cfg(test)]
    Unix(PathBuf),
}

impl AgentAddress {
    pub(super) async fn connect(&self) -> io::Result<UnixStream> {
        let connected = timeout(CONNECT_TIMEOUT, async {
            match self {
                Self::Vsock(cid) => connect_vsock(*cid).await,
                #[cfg(test)]
                Self::Unix(path) => UnixStream::connect(path).await,
            }
        });
        connected.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Returns a vsock connection as a [`UnixStream`]: once connected, both are read and written in the same way.
async fn connect_vsock(cid: u32) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    match connect(socket.as_raw_fd(), &VsockAddr::new(cid, AGENT_PORT)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = UnixStream::from_std(std::os::unix::net::UnixStream::from(socket))?;
    stream.writable().await?;
    match stream.take_error()? {
        None => Ok(stream),
        Some(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connecting_to_an_invalid_context_id_fails() {
        assert!(AgentAddress::Vsock(u32::MAX).connect().await.is_err());
    }
}
