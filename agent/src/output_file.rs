//! Files for the output of commands, one per stream, with a maximum size.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// How many bytes are written between two checks of the free disk space.
const SPACE_CHECK_INTERVAL: u64 = 1 << 20;

/// How much of a stream is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StreamSummary {
    pub(crate) size: u64,
    pub(crate) truncated: bool,
}

/// The stored output of one stream.
pub(crate) struct OutputFile {
    pub(crate) file: File,
    pub(crate) summary: StreamSummary,
    max_size: u64,
    directory: PathBuf,
    /// The size up to which the disk is known to have space.
    checked_size: u64,
}

impl OutputFile {
    /// Creates the file. `directory` is on the file system whose free space bounds it.
    pub(crate) fn create(path: &Path, max_size: u64, directory: &Path) -> io::Result<Self> {
        let file = create_private(path)?;
        let summary = StreamSummary::default();
        Ok(Self { file, summary, max_size, directory: directory.to_owned(), checked_size: 0 })
    }

    /// Appends output, and truncates it where it exceeds the limit or the disk.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        if self.summary.truncated {
            return;
        }
        let size = self.summary.size;
        if size + bytes.len() as u64 > self.checked_size {
            // Output may use at most half of the space that was free before it.
            let may_grow = self.free_space().saturating_sub(size) / 2;
            self.checked_size = (size + may_grow.min(SPACE_CHECK_INTERVAL)).min(self.max_size);
        }
        let fits = self.checked_size.saturating_sub(size).min(bytes.len() as u64) as usize;
        match self.file.write_all(&bytes[..fits]) {
            Ok(()) => {
                self.summary.size += fits as u64;
                self.summary.truncated = fits < bytes.len();
            }
            Err(error) => {
                eprintln!("failed to write output of a command: {error}");
                self.summary.truncated = true;
                // Remove a partial write.
                _ = self.file.set_len(size);
            }
        }
    }

    fn free_space(&self) -> u64 {
        match nix::sys::statvfs::statvfs(&self.directory) {
            Ok(stat) => stat.blocks_available().saturating_mul(stat.fragment_size()),
            Err(error) => {
                eprintln!("failed to determine free space of {}: {error}", self.directory.display());
                0
            }
        }
    }
}

/// Creates a file that only its owner can read.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use tempfile::TempDir;

    use super::*;

    #[test]
    fn truncates_output_at_the_limit() {
        let directory = TempDir::new().unwrap();
        let mut output = OutputFile::create(&directory.path().join("stdout"), 10, directory.path()).unwrap();
        output.write(b"1234567");
        assert_eq!(output.summary, StreamSummary { size: 7, truncated: false });
        output.write(b"89abcdef");
        output.write(b"more");
        assert_eq!(output.summary, StreamSummary { size: 10, truncated: true });
        let mut text = String::new();
        output.file.rewind().unwrap();
        output.file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "123456789a");
    }
}
