//! The way to a guest's agent.

use std::io;
use std::os::fd::AsRawFd;
#[cfg(test)]
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Where agents listen.
const PORT: u32 = 1025;

/// How long a guest may take to accept a connection.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(in crate::guest) enum Way {
    /// The guest with this number of a virtual socket.
    Vsock(u32),
    #[cfg(test)]
    Socket(PathBuf),
}

impl Way {
    pub(super) async fn connect(&self) -> io::Result<UnixStream> {
        let connected = timeout(PATIENCE, async {
            match self {
                Self::Vsock(number) => vsock(*number).await,
                #[cfg(test)]
                Self::Socket(path) => UnixStream::connect(path).await,
            }
        });
        connected.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Connected, all sockets that carry a stream are read and written in the same way.
async fn vsock(number: u32) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    match connect(socket.as_raw_fd(), &VsockAddr::new(number, PORT)) {
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
    async fn a_guest_that_cannot_be_there_is_not_reached() {
        // A number that no guest can have.
        assert!(Way::Vsock(u32::MAX).connect().await.is_err());
    }
}
