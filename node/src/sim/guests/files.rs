//! The in-memory files of a simulated guest.

use std::collections::BTreeMap;

use bytes::Bytes;
use muster_agent::mode::{FileMode, PERMISSION_BITS, Radix};
use muster_types::guest::GuestFileInfo;
use muster_types::time::now;

/// The maximum total size of a guest's files, in bytes.
pub(super) const MAX_TOTAL_SIZE: u64 = 64 << 20;

/// The file type bits of a regular file.
const REGULAR_FILE: u32 = 0o100_000;

#[derive(Debug, Default)]
pub(super) struct GuestFiles(BTreeMap<String, GuestFile>);

#[derive(Debug)]
struct GuestFile {
    data: Bytes,
    info: GuestFileInfo,
}

impl GuestFiles {
    /// Creates the initial files of a guest.
    pub(super) fn new(name: &str) -> Self {
        let mut files = Self::default();
        let release = "ID=simulated\nNAME=\"Muster simulated guest\"\nVERSION_ID=\"1\"\n";
        for (path, text) in [("/etc/hostname", format!("{name}\n")), ("/etc/os-release", release.to_owned())]
        {
            files.write(path, text.into()).expect("the initial files are small");
        }
        files
    }

    pub(super) fn read(&self, path: &str) -> Result<(GuestFileInfo, Bytes), String> {
        let file = self.0.get(path).ok_or_else(|| missing(path))?;
        Ok((file.info, file.data.clone()))
    }

    pub(super) fn write(&mut self, path: &str, data: Bytes) -> Result<(), String> {
        if path.ends_with('/') {
            return Err(format!("Is a directory: {path}"));
        }
        let others = self.0.iter().filter(|(other, _)| *other != path);
        let used: u64 = others.map(|(_, file)| file.info.size).sum();
        let size = data.len() as u64;
        if used + size > MAX_TOTAL_SIZE {
            return Err(format!("No space left on device: {path}"));
        }
        let mode = self.0.get(path).map_or(REGULAR_FILE | 0o644, |file| file.info.mode);
        let time = now();
        let info =
            GuestFileInfo { mode, size, atime: time, mtime: time, ctime: time, ..GuestFileInfo::default() };
        self.0.insert(path.to_owned(), GuestFile { data, info });
        Ok(())
    }

    pub(super) fn change_mode(&mut self, path: &str, mode: u32) -> Result<(), String> {
        let file = self.0.get_mut(path).ok_or_else(|| missing(path))?;
        file.info.mode = REGULAR_FILE | (mode & PERMISSION_BITS);
        file.info.ctime = now();
        Ok(())
    }

    /// Changes permissions to a mode as `chmod` takes it: an octal number or symbolic, such as `u=rw,go+r`.
    pub(super) fn chmod(&mut self, path: &str, mode: &str) -> Result<(), String> {
        let before = self.0.get(path).ok_or_else(|| missing(path))?.info.mode & PERMISSION_BITS;
        let change = FileMode::parse(mode, Radix::Octal).ok_or_else(|| format!("invalid mode: {mode}"))?;
        self.change_mode(path, change.apply(before, false))
    }
}

fn missing(path: &str) -> String {
    format!("No such file or directory: {path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_total_size() {
        let mut files = GuestFiles::default();
        let half = Bytes::from(vec![0; 33 << 20]);
        files.write("/one", half.clone()).unwrap();
        assert_eq!(files.write("/other", half.clone()), Err("No space left on device: /other".into()));
        // The replaced file does not count.
        files.write("/one", half).unwrap();
        files.chmod("/one", "751").unwrap();
        assert_eq!(files.read("/one").unwrap().0.mode, 0o100_751);
        assert_eq!(files.read("/other").unwrap_err(), "No such file or directory: /other");
    }
}
