//! The log of the serial console. QEMU appends to it as long as the VM runs, with or without the daemon. When it grows
//! too large, its end is moved to a second file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use muster_types::Result;

use crate::files::io_error;

/// The size at which a log is trimmed. A guest cannot write much more between two checks.
const MAX_LOG_SIZE: u64 = 8 << 20;

/// The size of the end that remains when a log is trimmed.
const TRIMMED_SIZE: u64 = 4 << 20;

/// Returns the last bytes of both files, at most `max_bytes`.
pub(super) fn read(log: &Path, max_bytes: Option<u64>) -> Result<Bytes> {
    // QEMU owns the file, and a compromised one could make it arbitrarily large.
    let max_bytes = max_bytes.map_or(MAX_LOG_SIZE + TRIMMED_SIZE, |max| max.min(MAX_LOG_SIZE + TRIMMED_SIZE));
    let read = || -> io::Result<Vec<u8>> {
        let new = tail(log, max_bytes)?;
        let remaining = max_bytes.saturating_sub(new.len() as u64);
        let mut all = tail(&old_log(log), remaining)?;
        all.extend(new);
        Ok(all)
    };
    read().map(Bytes::from).map_err(io_error("failed to read console log"))
}

/// Removes the content of both files.
pub(super) fn clear(log: &Path) -> Result<()> {
    let cleared = ignore_not_found(fs::remove_file(old_log(log))).and_then(|()| {
        ignore_not_found(OpenOptions::new().write(true).open(log).and_then(|file| file.set_len(0)))
    });
    cleared.map_err(io_error("failed to clear console log"))
}

/// Trims a log to which QEMU appends.
pub(super) fn trim(log: &Path) -> io::Result<()> {
    let size = match fs::symlink_metadata(log) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        metadata => metadata?.len(),
    };
    if size < MAX_LOG_SIZE {
        return Ok(());
    }
    let kept = tail(log, TRIMMED_SIZE)?;
    let new = log.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&kept)?;
    fs::rename(&new, old_log(log))?;
    OpenOptions::new().write(true).open(log)?.set_len(0)
}

fn old_log(log: &Path) -> std::path::PathBuf {
    log.with_extension("old")
}

fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn tail(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    let size = file.metadata()?.len();
    let len = size.min(max_bytes);
    file.seek(SeekFrom::Start(size - len))?;
    let mut data = Vec::new();
    file.take(len).read_to_end(&mut data)?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_end_across_a_trim() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        assert!(read(&log, None).unwrap().is_empty());
        clear(&log).unwrap();
        let mut file = OpenOptions::new().append(true).create(true).open(&log).unwrap();
        file.write_all(b"early").unwrap();
        trim(&log).unwrap();
        assert_eq!(read(&log, Some(3)).unwrap(), "rly");
        file.write_all(&vec![b'x'; usize::try_from(MAX_LOG_SIZE).unwrap()]).unwrap();
        file.write_all(b"late").unwrap();
        trim(&log).unwrap();
        assert_eq!(fs::metadata(&log).unwrap().len(), 0);
        // The writer appends at the new beginning.
        file.write_all(b"st").unwrap();
        assert_eq!(read(&log, Some(7)).unwrap(), "xlatest");
        assert_eq!(read(&log, None).unwrap().len() as u64, TRIMMED_SIZE + 2);
        clear(&log).unwrap();
        assert!(read(&log, None).unwrap().is_empty());
    }
}
