//! The sockets in a machine's folder. The kernel takes only short paths for them, and a folder may be deep: they are
//! reached by way of the open folder.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

/// Where QEMU is told what to do.
pub(super) const CONTROL: &str = "qmp";

/// Where the agent in the guest is spoken with.
pub(crate) const AGENT: &str = "sc-sf-agent";

fn short(folder: &File, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()).into()
}

/// Makes a socket on which QEMU will listen, in place of one that is there.
pub(super) fn listen(folder: &Path, name: &str) -> io::Result<UnixListener> {
    match fs::remove_file(folder.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(short(&File::open(folder)?, name))
}

/// Connects to a socket on which nobody answers yet.
pub(super) fn connect_ahead(folder: &Path, name: &str) -> io::Result<std::os::unix::net::UnixStream> {
    std::os::unix::net::UnixStream::connect(short(&File::open(folder)?, name))
}

/// Connects to a socket.
pub(crate) async fn connect(folder: &Path, name: &str) -> io::Result<UnixStream> {
    let folder = File::open(folder)?;
    UnixStream::connect(short(&folder, name)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_deep_folder_has_sockets_too() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("x".repeat(200));
        fs::create_dir(&folder).unwrap();
        let first = listen(&folder, CONTROL).unwrap();
        connect(&folder, CONTROL).await.unwrap();
        drop(first);
        assert!(connect(&folder, CONTROL).await.is_err());
        let _again = listen(&folder, CONTROL).unwrap();
        connect(&folder, CONTROL).await.unwrap();
    }
}
