//! The port: a virtio-serial device, or a socket where there is none. One thread reads it, another one writes.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use muster_agent::frame::{Frames, USUAL};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::agent::Agent;

/// How often it is looked for a port that is not there, or for a host that is not.
const LOOK: Duration = Duration::from_millis(200);
/// The same for a port that has not been there for long.
const LOOK_LESS: Duration = Duration::from_secs(2);
/// How long it is waited for bytes before looking around.
const IDLE: u16 = 10_000;

/// An open port.
pub(crate) struct Line {
    fd: OwnedFd,
    /// A socket ends with its connection, a device stays.
    is_socket: bool,
}

/// Does nothing for a while.
pub(crate) fn pause(time: Duration) {
    let timeout = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    _ = poll(&mut [], timeout);
}

impl Line {
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

    /// Waits until the port can be opened.
    fn wait_for(path: &Path) -> Self {
        let mut told = None;
        let mut time = LOOK;
        loop {
            match Self::open(path) {
                Ok(line) => return line,
                Err(error) => {
                    if told != Some(error.kind()) {
                        eprintln!("waiting for {}: {error}", path.display());
                        told = Some(error.kind());
                    }
                    pause(time);
                    time = (time * 2).min(LOOK_LESS);
                }
            }
        }
    }

    /// Waits for a moment to read or write, and says what the port is like.
    fn poll(&self, wanted: PollFlags, milliseconds: u16) -> PollFlags {
        let mut fds = [PollFd::new(self.fd.as_fd(), wanted)];
        match poll(&mut fds, milliseconds) {
            Ok(0) | Err(_) => PollFlags::empty(),
            Ok(_) => fds[0].revents().unwrap_or(PollFlags::empty()),
        }
    }

    /// Writes all of it, so much at once, while the host is still the one it is for. False if it did not.
    pub(crate) fn write(&self, bytes: &[u8], width: usize, is_wanted: impl Fn() -> bool) -> bool {
        let mut rest = bytes;
        while !rest.is_empty() {
            match nix::unistd::write(&self.fd, &rest[..rest.len().min(width)]) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    if !is_wanted() {
                        return false;
                    }
                    if self.poll(PollFlags::POLLOUT, 500).contains(PollFlags::POLLHUP) {
                        pause(LOOK);
                    }
                }
                // The reader sees that, too, and does what is to be done.
                Err(_) => return false,
            }
        }
        true
    }
}

/// Reads what hosts say and lets the agent do it, for ever.
pub(crate) fn run(path: &Path, agent: &Agent) -> ! {
    loop {
        let line = Arc::new(Line::wait_for(path));
        let error = serve(&line, agent);
        if !line.is_socket {
            eprintln!("{} is gone: {error}", path.display());
        }
        drop(line);
        pause(LOOK);
    }
}

/// Serves a port until it is gone.
fn serve(line: &Arc<Line>, agent: &Agent) -> Errno {
    let mut frames = Frames::new(USUAL);
    let mut buffer = vec![0; 64 << 10];
    let mut is_here = false;
    loop {
        let flags = line.poll(PollFlags::POLLIN, if is_here { IDLE } else { 0 });
        if !is_here && !flags.contains(PollFlags::POLLHUP) {
            is_here = true;
            agent.connect(line);
        }
        match nix::unistd::read(&line.fd, &mut buffer) {
            Ok(0) => {
                if is_here {
                    is_here = false;
                    frames = Frames::new(USUAL);
                    agent.hang_up();
                }
                if line.is_socket {
                    return Errno::EPIPE;
                }
                pause(LOOK);
            }
            Ok(count) => {
                if !is_here {
                    is_here = true;
                    agent.connect(line);
                }
                frames.feed(&buffer[..count]);
                while let Some(body) = frames.next_frame() {
                    agent.handle(&body);
                }
            }
            Err(Errno::EAGAIN) => {
                // Not there is told by end of file; a device that tells neither is looked at again.
                if !is_here {
                    pause(LOOK);
                }
            }
            Err(Errno::EINTR) => {}
            Err(error) => {
                agent.hang_up();
                return error;
            }
        }
    }
}
