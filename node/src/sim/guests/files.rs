//! The in-memory files of a simulated guest.

use std::collections::BTreeMap;

use bytes::Bytes;
use muster_types::guest::GuestFileInfo;
use muster_types::time::now;

/// The maximum total size of a guest's files, in bytes.
pub(super) const MAX_TOTAL_SIZE: u64 = 64 << 20;

/// The file type bits of a regular file.
const REGULAR_FILE: u32 = 0o100_000;
const PERMISSION_BITS: u32 = 0o7777;

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
        let bits = match u32::from_str_radix(mode, 8) {
            Ok(bits) => bits,
            Err(_) => apply_symbolic_mode(before, mode).ok_or_else(|| format!("invalid mode: {mode}"))?,
        };
        self.change_mode(path, bits)
    }
}

fn missing(path: &str) -> String {
    format!("No such file or directory: {path}")
}

/// Applies a symbolic mode such as `ugo+r`, `u=rw,go=` or `g=u`. Returns `None` if it is invalid.
fn apply_symbolic_mode(mut mode: u32, symbolic: &str) -> Option<u32> {
    for clause in symbolic.split(',') {
        let at = clause.find(['+', '-', '='])?;
        let (who, mut rest) = clause.split_at(at);
        let mut affected = if who.is_empty() { PERMISSION_BITS } else { 0 };
        for letter in who.chars() {
            affected |= match letter {
                'u' => 0o4700,
                'g' => 0o2070,
                'o' => 0o1007,
                'a' => PERMISSION_BITS,
                _ => return None,
            };
        }
        while let Some(sign) = rest.chars().next() {
            let end = rest[1..].find(['+', '-', '=']).map_or(rest.len(), |end| end + 1);
            let bits = permission_bits(mode, &rest[1..end])? & affected;
            mode = match sign {
                '+' => mode | bits,
                '-' => mode & !bits,
                _ => (mode & !affected) | bits,
            };
            rest = &rest[end..];
        }
    }
    Some(mode)
}

/// Returns the bits of permission letters for user, group and others.
fn permission_bits(mode: u32, letters: &str) -> Option<u32> {
    let mut bits = 0;
    for letter in letters.chars() {
        bits |= match letter {
            'r' => 0o444,
            'w' => 0o222,
            'x' => 0o111,
            'X' if mode & 0o111 != 0 => 0o111,
            'X' => 0,
            's' => 0o6000,
            't' => 0o1000,
            'u' => (mode >> 6 & 7) * 0o111,
            'g' => (mode >> 3 & 7) * 0o111,
            'o' => (mode & 7) * 0o111,
            _ => return None,
        };
    }
    Some(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applies_symbolic_modes() {
        for (before, symbolic, after) in [
            (0o600, "ugo+r", Some(0o644)),
            (0o777, "go-w", Some(0o755)),
            (0o000, "u=rw,go=r", Some(0o644)),
            (0o644, "+x", Some(0o755)),
            (0o644, "a+X", Some(0o644)),
            (0o755, "u+s,o-rx", Some(0o4750)),
            (0o640, "o=g,u+x-w", Some(0o544)),
            (0o644, "z+r", None),
            (0o644, "u+q", None),
            (0o644, "", None),
        ] {
            assert_eq!(apply_symbolic_mode(before, symbolic), after, "{symbolic}");
        }
    }

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
