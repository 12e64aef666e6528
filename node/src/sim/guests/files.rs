//! The files of a simulated guest, which are in memory.

use std::collections::BTreeMap;

use bytes::Bytes;
use muster_agent::mode::{FileMode, PERMISSION_BITS, Radix};
use muster_types::guest::GuestFileInfo;
use muster_types::time::now;

/// How many bytes the files of a guest have at most.
pub(super) const MOST: u64 = 64 << 20;

/// What says that something is an ordinary file.
const ORDINARY: u32 = 0o100_000;

#[derive(Debug, Default)]
pub(super) struct Files(BTreeMap<String, File>);

#[derive(Debug)]
struct File {
    data: Bytes,
    facts: GuestFileInfo,
}

impl Files {
    /// What a guest has from the beginning.
    pub(super) fn new(name: &str) -> Self {
        let mut files = Self::default();
        let release = "ID=simulated\nNAME=\"Muster simulated guest\"\nVERSION_ID=\"1\"\n";
        for (path, text) in [("/etc/hostname", format!("{name}\n")), ("/etc/os-release", release.to_owned())]
        {
            // They are small.
            let _ = files.write(path, text.into());
        }
        files
    }

    pub(super) fn read(&self, path: &str) -> Result<(GuestFileInfo, Bytes), String> {
        let file = self.0.get(path).ok_or_else(|| missing(path))?;
        Ok((file.facts, file.data.clone()))
    }

    pub(super) fn write(&mut self, path: &str, data: Bytes) -> Result<(), String> {
        if path.ends_with('/') {
            return Err(format!("Is a directory: {path}"));
        }
        let others = self.0.iter().filter(|(known, _)| *known != path);
        let used: u64 = others.map(|(_, file)| file.facts.size).sum();
        let size = data.len() as u64;
        if used + size > MOST {
            return Err(format!("No space left on device: {path}"));
        }
        let mode = self.0.get(path).map_or(ORDINARY | 0o644, |file| file.facts.mode);
        let time = now();
        let facts =
            GuestFileInfo { mode, size, atime: time, mtime: time, ctime: time, ..GuestFileInfo::default() };
        self.0.insert(path.to_owned(), File { data, facts });
        Ok(())
    }

    pub(super) fn change_mode(&mut self, path: &str, mode: u32) -> Result<(), String> {
        let file = self.0.get_mut(path).ok_or_else(|| missing(path))?;
        file.facts.mode = ORDINARY | (mode & PERMISSION_BITS);
        file.facts.ctime = now();
        Ok(())
    }

    /// Changes the mode by an argument of `chmod`: an octal number, or a symbolic mode such as `u=rw,go+r`.
    pub(super) fn change_mode_by(&mut self, path: &str, text: &str) -> Result<(), String> {
        let before = self.0.get(path).ok_or_else(|| missing(path))?.facts.mode;
        let mode = FileMode::parse(text, Radix::Octal).ok_or_else(|| format!("invalid mode: {text}"))?;
        self.change_mode(path, mode.apply(before, false))
    }
}

fn missing(path: &str) -> String {
    format!("No such file or directory: {path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_does_not_hold_more_than_it_may() {
        let mut files = Files::default();
        let half = Bytes::from(vec![0; 33 << 20]);
        files.write("/one", half.clone()).unwrap();
        assert_eq!(files.write("/other", half.clone()), Err("No space left on device: /other".into()));
        // What is replaced does not count.
        files.write("/one", half).unwrap();
        files.change_mode_by("/one", "751").unwrap();
        assert_eq!(files.read("/one").unwrap().0.mode, 0o100_751);
        files.change_mode_by("/one", "o=g,u+x-w").unwrap();
        assert_eq!(files.read("/one").unwrap().0.mode, 0o100_555);
        assert_eq!(files.change_mode_by("/one", "z+r"), Err("invalid mode: z+r".into()));
        assert_eq!(files.read("/other").unwrap_err(), "No such file or directory: /other");
    }
}
