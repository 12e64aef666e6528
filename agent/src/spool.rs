//! The spool: what is remembered of commands, in files, so that an agent that was ended still knows of them. It is of
//! one boot of the guest.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use muster_agent::packet::Stream;
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};

use crate::process::{self, Family, Process};

/// The most that is kept of what a command writes to one stream.
const KEPT: u64 = 256 << 20;
/// How much is written between two looks at how much room there is.
const LOOK: u64 = 1 << 20;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Done {
        code: i32,
        stdout: Kept,
        stderr: Kept,
    },
    /// It ran when the agent was ended.
    Lost,
}

/// What is there of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Kept {
    pub(crate) size: u64,
    pub(crate) cut: bool,
}

pub(crate) struct Spool {
    folder: PathBuf,
    counter: AtomicU64,
    /// Held while this agent lives, because another one would end its commands.
    _lock: Flock<File>,
}

impl Spool {
    /// Takes the folder for this boot and says what is remembered, the oldest first.
    pub(crate) fn open(folder: &Path, boot: &str) -> io::Result<(Self, Vec<(String, Ending)>)> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(folder.join("lock"))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|_| io::Error::other("another agent uses it"))?;
        let spool = Self { folder: folder.to_owned(), counter: AtomicU64::new(0), _lock: lock };
        let is_same = fs::read_to_string(folder.join("boot")).is_ok_and(|text| text == boot);
        if !is_same {
            remove_folder(&spool.commands())?;
            remove_folder(&spool.leftovers())?;
            fs::write(folder.join("boot"), boot)?;
        }
        for folder in [spool.commands(), spool.leftovers()] {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        spool.clear_leftovers()?;
        let remembered = spool.load()?;
        Ok((spool, remembered))
    }

    fn commands(&self) -> PathBuf {
        self.folder.join("commands")
    }

    fn leftovers(&self) -> PathBuf {
        self.folder.join("leftovers")
    }

    fn load(&self) -> io::Result<Vec<(String, Ending)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.commands())? {
            let entry = entry?;
            let Ok(key) = entry.file_name().into_string() else { continue };
            let ending = match self.ending(&key) {
                Some(ending) => ending,
                None => {
                    if let Some(family) = self.family(&key)
                        && let Err(error) = process::start(move || family.end())
                    {
                        eprintln!("processes of command {key} are left: {error}");
                    }
                    if let Err(error) = self.end(&key, Ending::Lost) {
                        eprintln!("end of command {key} is not noted: {error}");
                    }
                    Ending::Lost
                }
            };
            let time = fs::metadata(entry.path().join("ending")).and_then(|facts| facts.modified()).ok();
            found.push((time, key, ending));
        }
        found.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        Ok(found.into_iter().map(|(_, key, ending)| (key, ending)).collect())
    }

    fn ending(&self, key: &str) -> Option<Ending> {
        let text = fs::read(self.commands().join(key).join("ending")).ok()?;
        let ending: Value = serde_json::from_slice(&text).ok()?;
        if ending["lost"] == true {
            return Some(Ending::Lost);
        }
        let kept = |name: &str| {
            let size = ending[format!("{name}-size")].as_u64()?;
            Some(Kept { size, cut: ending[format!("{name}-cut")] == true })
        };
        Some(Ending::Done {
            code: i32::try_from(ending["return-code"].as_i64()?).ok()?,
            stdout: kept("stdout")?,
            stderr: kept("stderr")?,
        })
    }

    fn family(&self, key: &str) -> Option<Family> {
        let folder = self.commands().join(key);
        let mark = fs::read_to_string(folder.join("mark")).ok().filter(|mark| !mark.is_empty())?;
        let shell = fs::read_to_string(folder.join("process")).ok().and_then(|text| {
            let (pid, start) = text.split_once(' ')?;
            Some(Process { pid: pid.parse().ok()?, start: start.parse().ok()? })
        });
        Some(Family { mark, shell })
    }

    /// A command is about to be started: from now on it has been.
    pub(crate) fn begin(&self, key: &str, family: &Family) -> io::Result<[Sink; 2]> {
        let folder = self.commands().join(key);
        DirBuilder::new().mode(0o700).create(&folder)?;
        create(&folder.join("mark"))?.write_all(family.mark.as_bytes())?;
        let sink = |stream: Stream| {
            create(&folder.join(stream.name())).map(|file| Sink::new(file, KEPT, &self.folder))
        };
        Ok([sink(Stream::Stdout)?, sink(Stream::Stderr)?])
    }

    /// Files without a name for what a command writes that nobody can ask for again.
    pub(crate) fn nameless(&self, most: u64) -> io::Result<[Sink; 2]> {
        let sink = || -> io::Result<Sink> {
            let path = self.leftovers().join(self.number());
            let file = create(&path)?;
            fs::remove_file(&path)?;
            Ok(Sink::new(file, most, &self.folder))
        };
        Ok([sink()?, sink()?])
    }

    /// A command has been started.
    pub(crate) fn started(&self, key: &str, process: Process) -> io::Result<()> {
        let path = self.commands().join(key).join("process");
        create(&path)?.write_all(format!("{} {}", process.pid, process.start).as_bytes())
    }

    /// A command has ended.
    pub(crate) fn end(&self, key: &str, ending: Ending) -> io::Result<()> {
        let text = match ending {
            Ending::Lost => json!({ "lost": true }),
            Ending::Done { code, stdout, stderr } => json!({
                "return-code": code,
                "stdout-size": stdout.size, "stdout-cut": stdout.cut,
                "stderr-size": stderr.size, "stderr-cut": stderr.cut,
            }),
        };
        let folder = self.commands().join(key);
        let path = folder.join("ending.new");
        _ = fs::remove_file(&path);
        create(&path)?.write_all(text.to_string().as_bytes())?;
        fs::rename(path, folder.join("ending"))
    }

    pub(crate) fn forget(&self, key: &str) {
        if let Err(error) = remove_folder(&self.commands().join(key)) {
            eprintln!("command {key} is not forgotten: {error}");
        }
    }

    /// Some bytes of what a command wrote, none at its end.
    pub(crate) fn read(&self, key: &str, stream: Stream, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let file = File::open(self.commands().join(key).join(stream.name()))?;
        let mut bytes = vec![0; length];
        let count = file.read_at(&mut bytes, offset)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Notes a file that is to be removed if the agent ends before it says that it is not.
    pub(crate) fn note(&self, path: &Path) -> io::Result<Note> {
        let note = self.leftovers().join(self.number());
        let mut file = create(&note)?;
        file.write_all(path.as_os_str().as_encoded_bytes())?;
        Ok(Note(note))
    }

    fn clear_leftovers(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.leftovers())? {
            let note = entry?.path();
            // Our own names of temporary files have only characters that are text.
            if let Ok(path) = fs::read_to_string(&note)
                && path.contains(crate::put::MARK)
            {
                _ = fs::remove_file(path);
            }
            _ = fs::remove_file(note);
        }
        Ok(())
    }

    fn number(&self) -> String {
        self.counter.fetch_add(1, Ordering::Relaxed).to_string()
    }
}

/// A file that would be left over.
pub(crate) struct Note(PathBuf);

impl Drop for Note {
    fn drop(&mut self) {
        _ = fs::remove_file(&self.0);
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

fn remove_folder(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Takes what a command writes, as much as is kept.
pub(crate) struct Sink {
    pub(crate) file: File,
    pub(crate) kept: Kept,
    most: u64,
    folder: PathBuf,
    /// Up to where it is known that there is room.
    room: u64,
}

impl Sink {
    fn new(file: File, most: u64, folder: &Path) -> Self {
        Self { file, kept: Kept::default(), most, folder: folder.to_owned(), room: 0 }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        if self.kept.cut {
            return;
        }
        let size = self.kept.size;
        let length = bytes.len() as u64;
        if size + length > self.room {
            // As much as is still free may be taken: half of what was.
            let free = nix::sys::statvfs::statvfs(&self.folder)
                .map_or(0, |facts| facts.blocks_available().saturating_mul(facts.fragment_size()));
            let may_grow = free.saturating_sub(size) / 2;
            self.room = (size + may_grow.min(LOOK)).min(self.most);
        }
        let fits = usize::try_from(self.room.saturating_sub(size)).unwrap_or(0).min(bytes.len());
        match self.file.write_all(&bytes[..fits]) {
            Ok(()) => {
                self.kept.size += fits as u64;
                self.kept.cut = fits < bytes.len();
            }
            Err(error) => {
                eprintln!("output of a command is cut: {error}");
                self.kept.cut = true;
                // Whatever the last write left is no part of it.
                _ = self.file.set_len(size);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use tempfile::TempDir;

    use super::*;

    #[test]
    fn output_is_cut_where_no_more_is_kept() {
        let folder = TempDir::new().unwrap();
        let mut sink = Sink::new(create(&folder.path().join("stdout")).unwrap(), 10, folder.path());
        sink.write(b"1234567");
        assert_eq!(sink.kept, Kept { size: 7, cut: false });
        sink.write(b"89abcdef");
        sink.write(b"more");
        assert_eq!(sink.kept, Kept { size: 10, cut: true });
        let mut text = String::new();
        sink.file.rewind().unwrap();
        sink.file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "123456789a");
    }

    #[test]
    fn what_is_remembered_is_of_one_boot_and_one_agent() {
        let folder = TempDir::new().unwrap();
        let (spool, remembered) = Spool::open(folder.path(), "first").unwrap();
        assert_eq!(remembered, []);
        assert!(Spool::open(folder.path(), "first").is_err(), "two agents");
        let kept = Kept { size: 3, cut: true };
        let done = Ending::Done { code: -1, stdout: kept, stderr: Kept::default() };
        let _sinks = spool.begin("done", &Family { mark: "no-such-mark".into(), shell: None }).unwrap();
        spool.end("done", done).unwrap();
        fs::create_dir(folder.path().join("commands/lost")).unwrap();
        drop(spool);
        let (spool, mut remembered) = Spool::open(folder.path(), "first").unwrap();
        remembered.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(remembered, [("done".into(), done), ("lost".into(), Ending::Lost)]);
        drop(spool);
        assert_eq!(Spool::open(folder.path(), "second").unwrap().1, []);
    }
}
