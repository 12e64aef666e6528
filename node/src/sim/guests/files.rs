//! The files of a simulated guest, which are in memory.

use std::collections::BTreeMap;

use bytes::Bytes;
use muster_types::guest::GuestFileInfo;
use muster_types::time::now;

/// How many bytes the files of a guest have at most.
pub(super) const MOST: u64 = 64 << 20;

/// What says that something is an ordinary file.
const ORDINARY: u32 = 0o100_000;
const PERMISSIONS: u32 = 0o7777;

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
        file.facts.mode = ORDINARY | (mode & PERMISSIONS);
        file.facts.ctime = now();
        Ok(())
    }

    /// Changes permissions by what `chmod` takes: an octal number, or words such as `u=rw,go+r`.
    pub(super) fn change_mode_by(&mut self, path: &str, words: &str) -> Result<(), String> {
        let before = self.0.get(path).ok_or_else(|| missing(path))?.facts.mode & PERMISSIONS;
        let mode = match u32::from_str_radix(words, 8) {
            Ok(number) => number,
            Err(_) => changed(before, words).ok_or_else(|| format!("invalid mode: {words}"))?,
        };
        self.change_mode(path, mode)
    }
}

fn missing(path: &str) -> String {
    format!("No such file or directory: {path}")
}

/// Permissions after words such as `ugo+r`, `u=rw,go=` or `g=u`; nothing if they are none.
fn changed(mut mode: u32, words: &str) -> Option<u32> {
    for clause in words.split(',') {
        let at = clause.find(['+', '-', '='])?;
        let (who, mut rest) = clause.split_at(at);
        let mut whose = if who.is_empty() { PERMISSIONS } else { 0 };
        for letter in who.chars() {
            whose |= match letter {
                'u' => 0o4700,
                'g' => 0o2070,
                'o' => 0o1007,
                'a' => PERMISSIONS,
                _ => return None,
            };
        }
        while let Some(sign) = rest.chars().next() {
            let end = rest[1..].find(['+', '-', '=']).map_or(rest.len(), |end| end + 1);
            let bits = permissions(mode, &rest[1..end])? & whose;
            mode = match sign {
                '+' => mode | bits,
                '-' => mode & !bits,
                _ => (mode & !whose) | bits,
            };
            rest = &rest[end..];
        }
    }
    Some(mode)
}

/// The permissions that letters stand for, for everybody.
fn permissions(mode: u32, letters: &str) -> Option<u32> {
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
    fn words_change_permissions() {
        for (before, words, after) in [
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
            assert_eq!(changed(before, words), after, "{words}");
        }
    }

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
        assert_eq!(files.read("/other").unwrap_err(), "No such file or directory: /other");
    }
}
