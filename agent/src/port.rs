//! The port: a virtio-serial device, or a Unix socket in tests. One thread reads it, another one writes.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, poll};

use crate::os::sleep;

/// How often a missing port or host is checked for.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The maximum interval after backoff, for a port that stays missing.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long one wait for buffer space lasts, in milliseconds.
const WRITE_POLL_TIMEOUT: u16 = 500;

/// An open port.
pub(crate) struct Port {
    fd: OwnedFd,
    /// A socket ends with its connection; a device survives it.
    is_socket: bool,
}

impl Port {
    fn open(path: &Path) -> io::Result<Self> {
        let is_socket = std::fs::metadata(path)?.file_type().is_socket();
        let fd = if is_socket {
            let stream = UnixStream::connect(path)?;
            stream.set_nonblocking(true)?;
            stream.into()
        } else {
            let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?.into()
        };
        Ok(Self { fd, is_socket })
    }

    /// Opens the port, retrying until it succeeds.
    pub(crate) fn wait_until_open(path: &Path) -> Self {
        let mut logged = None;
        let mut interval = POLL_INTERVAL;
        loop {
            match Self::open(path) {
                Ok(port) => return port,
                Err(error) => {
                    if logged != Some(error.kind()) {
                        eprintln!("waiting for port {}: {error}", path.display());
                        logged = Some(error.kind());
                    }
                    sleep(interval);
                    interval = (interval * 2).min(MAX_POLL_INTERVAL);
                }
            }
        }
    }

    pub(crate) fn is_socket(&self) -> bool {
        self.is_socket
    }

    /// Waits for events on the port and returns those that occurred, none after the timeout.
    pub(crate) fn poll(&self, events: PollFlags, milliseconds: u16) -> PollFlags {
        let mut fds = [PollFd::new(self.fd.as_fd(), events)];
        match poll(&mut fds, milliseconds) {
            Ok(0) | Err(_) => PollFlags::empty(),
            Ok(_) => fds[0].revents().unwrap_or(PollFlags::empty()),
        }
    }

    pub(crate) fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        nix::unistd::read(&self.fd, buffer)
    }

    /// Writes all bytes in writes of at most `write_size`. Returns false on an error, or if `is_current` returns false
    /// while it waits for the host.
    pub(crate) fn write(&self, bytes: &[u8], write_size: usize, is_current: impl Fn() -> bool) -> bool {
        let mut remaining = bytes;
        while !remaining.is_empty() {
            match nix::unistd::write(&self.fd, &remaining[..remaining.len().min(write_size)]) {
                Ok(count) => remaining = &remaining[count..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    if !is_current() {
                        return false;
                    }
                    if self.poll(PollFlags::POLLOUT, WRITE_POLL_TIMEOUT).contains(PollFlags::POLLHUP) {
                        sleep(POLL_INTERVAL);
                    }
                }
                // The reader gets the same error and handles it.
                Err(_) => return false,
            }
        }
        true
    }
}
