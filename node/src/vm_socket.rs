//! Unix sockets in the directory of a VM. They are addressed through a file descriptor of the directory, because the
//! kernel limits the length of socket paths.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

/// The socket of QMP.
pub(crate) const QMP: &str = "qmp";

/// The socket of the serial console.
pub(crate) const CONSOLE: &str = "console";

/// The socket over which a VM receives the disks of a migration.
pub(crate) const NBD: &str = "nbd";

/// The socket of the agent in the guest.
pub(crate) const AGENT: &str = "sc-sf-agent";

fn short_path(dir: &File, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()).into()
}

/// Creates a socket on which QEMU will listen, replacing an existing one.
pub(crate) fn listen(dir: &Path, name: &str) -> io::Result<UnixListener> {
    match fs::remove_file(dir.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(short_path(&File::open(dir)?, name))
}

/// Connects to a socket from which no process accepts yet.
pub(crate) fn connect_early(dir: &Path, name: &str) -> io::Result<std::os::unix::net::UnixStream> {
    std::os::unix::net::UnixStream::connect(short_path(&File::open(dir)?, name))
}

/// Connects to a socket.
pub(crate) async fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let dir = File::open(dir)?;
    UnixStream::connect(short_path(&dir, name)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn supports_long_directory_paths() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("x".repeat(200));
        fs::create_dir(&dir).unwrap();
        let first = listen(&dir, QMP).unwrap();
        connect(&dir, QMP).await.unwrap();
        drop(first);
        assert!(connect(&dir, QMP).await.is_err());
        let _again = listen(&dir, QMP).unwrap();
        connect(&dir, QMP).await.unwrap();
    }
}
