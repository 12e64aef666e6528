//! What the serial console showed. QEMU appends to a file for as long as the machine runs, with or without us; before
//! that grows too large, its end is moved beside it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use muster_types::Result;

use crate::storage::failed;

/// A file that has grown to this is cut. A guest cannot write much more until the next look.
const TOO_LARGE: u64 = 8 << 20;

/// How much of its end is kept.
const KEPT: u64 = 4 << 20;

/// The last bytes, at most `most`, of what was kept and what came since.
pub(super) fn read(log: &Path, most: Option<u64>) -> Result<Bytes> {
    // The file belongs to QEMU, which may have made it look larger than any guest could.
    let most = most.map_or(TOO_LARGE + KEPT, |most| most.min(TOO_LARGE + KEPT));
    let read = || -> io::Result<Vec<u8>> {
        let new = tail(log, most)?;
        let left = most.saturating_sub(new.len() as u64);
        let mut all = tail(&old(log), left)?;
        all.extend(new);
        Ok(all)
    };
    read().map(Bytes::from).map_err(failed("the console cannot be read"))
}

/// Forgets everything.
pub(super) fn clear(log: &Path) -> Result<()> {
    let cleared = absent_is_fine(fs::remove_file(old(log))).and_then(|()| {
        absent_is_fine(OpenOptions::new().write(true).open(log).and_then(|file| file.set_len(0)))
    });
    cleared.map_err(failed("the console cannot be cleared"))
}

/// Keeps a file small to which somebody else appends.
pub(super) fn trim(log: &Path) -> io::Result<()> {
    let Ok(found) = fs::symlink_metadata(log) else { return Ok(()) };
    if found.len() < TOO_LARGE {
        return Ok(());
    }
    let kept = tail(log, KEPT)?;
    let new = log.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&kept)?;
    fs::rename(&new, old(log))?;
    OpenOptions::new().write(true).open(log)?.set_len(0)
}

fn old(log: &Path) -> std::path::PathBuf {
    log.with_extension("old")
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn tail(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    let size = file.metadata()?.len();
    let wanted = size.min(most);
    file.seek(SeekFrom::Start(size - wanted))?;
    let mut data = Vec::new();
    file.take(wanted).read_to_end(&mut data)?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_what_was_shown_is_read_across_a_cut() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("console.log");
        assert!(read(&log, None).unwrap().is_empty());
        clear(&log).unwrap();
        let mut file = OpenOptions::new().append(true).create(true).open(&log).unwrap();
        file.write_all(b"early").unwrap();
        trim(&log).unwrap();
        assert_eq!(read(&log, Some(3)).unwrap(), "rly");
        file.write_all(&vec![b'x'; usize::try_from(TOO_LARGE).unwrap()]).unwrap();
        file.write_all(b"late").unwrap();
        trim(&log).unwrap();
        assert_eq!(fs::metadata(&log).unwrap().len(), 0);
        // Whoever appends goes on at the new beginning.
        file.write_all(b"st").unwrap();
        assert_eq!(read(&log, Some(7)).unwrap(), "xlatest");
        assert_eq!(read(&log, None).unwrap().len() as u64, KEPT + 2);
        clear(&log).unwrap();
        assert!(read(&log, None).unwrap().is_empty());
    }
}
