//! The spool: results of commands on disk, so that they survive a restart of the agent. It is valid for one boot of the
//! guest.
//!
//! ```text
//!  lock                    locked by the running agent
//!  boot                    the boot ID
//!  commands/KEY/mark       see `ProcessTree::mark`
//!              /process    PID and start time of the shell
//!              /stdout     output
//!              /stderr
//!              /ending     the outcome, once the command has ended
//!  leftovers/NUMBER        the path of a temporary file to delete at the next start
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use muster_agent::packet::Stream;
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};

use crate::os::spawn_thread;
use crate::output_file::{OutputFile, StreamSummary, create_private};
use crate::process::{ProcessId, ProcessTree};

/// The maximum size of each stored stream of a command.
const MAX_STREAM_SIZE: u64 = 256 << 20;
/// Part of the name of every temporary file of a transfer.
pub(crate) const TEMPORARY_FILE_MARK: &str = ".muster-";

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Exited {
        code: i32,
        stdout: StreamSummary,
        stderr: StreamSummary,
    },
    /// The agent was stopped while the command ran.
    Lost,
}

pub(crate) struct Spool {
    directory: PathBuf,
    counter: AtomicU64,
    /// Held as long as the agent runs: a second agent would terminate the commands of this one.
    _lock: Flock<File>,
}

impl Spool {
    /// Opens the spool for this boot and returns the outcomes of earlier commands by key, the oldest first.
    pub(crate) fn open(directory: &Path, boot_id: &str) -> io::Result<(Self, Vec<(String, Outcome)>)> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(0o700))?;
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(directory.join("lock"))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|_| io::Error::other("another agent is using this directory"))?;
        let spool = Self { directory: directory.to_owned(), counter: AtomicU64::new(0), _lock: lock };
        let is_same_boot = fs::read_to_string(directory.join("boot")).is_ok_and(|text| text == boot_id);
        if !is_same_boot {
            remove_directory(&spool.commands_directory())?;
            remove_directory(&spool.leftovers_directory())?;
            fs::write(directory.join("boot"), boot_id)?;
        }
        for directory in [spool.commands_directory(), spool.leftovers_directory()] {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        spool.remove_orphaned_files()?;
        let remembered = spool.load()?;
        Ok((spool, remembered))
    }

    fn commands_directory(&self) -> PathBuf {
        self.directory.join("commands")
    }

    fn leftovers_directory(&self) -> PathBuf {
        self.directory.join("leftovers")
    }

    /// Reads all outcomes. Commands without one were running when the agent stopped: their processes are terminated.
    fn load(&self) -> io::Result<Vec<(String, Outcome)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.commands_directory())? {
            let entry = entry?;
            let Ok(key) = entry.file_name().into_string() else { continue };
            let outcome = match self.read_outcome(&key) {
                Some(outcome) => outcome,
                None => {
                    if let Some(processes) = self.read_processes(&key)
                        && let Err(error) = spawn_thread(move || processes.terminate())
                    {
                        eprintln!("failed to terminate processes of command {key}: {error}");
                    }
                    if let Err(error) = self.store_outcome(&key, Outcome::Lost) {
                        eprintln!("failed to store outcome of command {key}: {error}");
                    }
                    Outcome::Lost
                }
            };
            let time = fs::metadata(entry.path().join("ending")).and_then(|facts| facts.modified()).ok();
            found.push((time, key, outcome));
        }
        found.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        Ok(found.into_iter().map(|(_, key, outcome)| (key, outcome)).collect())
    }

    fn read_outcome(&self, key: &str) -> Option<Outcome> {
        let text = fs::read(self.commands_directory().join(key).join("ending")).ok()?;
        let ending: Value = serde_json::from_slice(&text).ok()?;
        if ending["lost"] == true {
            return Some(Outcome::Lost);
        }
        let summary = |name: &str| {
            let size = ending[format!("{name}-size")].as_u64()?;
            Some(StreamSummary { size, truncated: ending[format!("{name}-cut")] == true })
        };
        Some(Outcome::Exited {
            code: i32::try_from(ending["return-code"].as_i64()?).ok()?,
            stdout: summary("stdout")?,
            stderr: summary("stderr")?,
        })
    }

    fn read_processes(&self, key: &str) -> Option<ProcessTree> {
        let directory = self.commands_directory().join(key);
        let mark = fs::read_to_string(directory.join("mark")).ok().filter(|mark| !mark.is_empty())?;
        let shell = fs::read_to_string(directory.join("process")).ok().and_then(|text| {
            let (pid, start) = text.split_once(' ')?;
            Some(ProcessId { pid: pid.parse().ok()?, start: start.parse().ok()? })
        });
        Some(ProcessTree { mark, shell })
    }

    /// Records that a command is about to start, and creates its output files.
    pub(crate) fn begin(&self, key: &str, processes: &ProcessTree) -> io::Result<[OutputFile; 2]> {
        let directory = self.commands_directory().join(key);
        DirBuilder::new().mode(0o700).create(&directory)?;
        create_private(&directory.join("mark"))?.write_all(processes.mark.as_bytes())?;
        let output = |stream: Stream| {
            OutputFile::create(&directory.join(stream.name()), MAX_STREAM_SIZE, &self.directory)
        };
        Ok([output(Stream::Stdout)?, output(Stream::Stderr)?])
    }

    /// Creates unlinked output files for a command without a key.
    pub(crate) fn anonymous_outputs(&self, max_size: u64) -> io::Result<[OutputFile; 2]> {
        let output = || -> io::Result<OutputFile> {
            let path = self.leftovers_directory().join(self.next_name());
            let output = OutputFile::create(&path, max_size, &self.directory)?;
            fs::remove_file(&path)?;
            Ok(output)
        };
        Ok([output()?, output()?])
    }

    /// Records the shell of a command.
    pub(crate) fn store_shell(&self, key: &str, shell: ProcessId) -> io::Result<()> {
        let path = self.commands_directory().join(key).join("process");
        create_private(&path)?.write_all(format!("{} {}", shell.pid, shell.start).as_bytes())
    }

    /// Records the outcome of a command.
    pub(crate) fn store_outcome(&self, key: &str, outcome: Outcome) -> io::Result<()> {
        let text = match outcome {
            Outcome::Lost => json!({ "lost": true }),
            Outcome::Exited { code, stdout, stderr } => json!({
                "return-code": code,
                "stdout-size": stdout.size, "stdout-cut": stdout.truncated,
                "stderr-size": stderr.size, "stderr-cut": stderr.truncated,
            }),
        };
        let directory = self.commands_directory().join(key);
        let path = directory.join("ending.new");
        _ = fs::remove_file(&path);
        create_private(&path)?.write_all(text.to_string().as_bytes())?;
        fs::rename(path, directory.join("ending"))
    }

    /// Deletes everything about a command.
    pub(crate) fn remove(&self, key: &str) {
        if let Err(error) = remove_directory(&self.commands_directory().join(key)) {
            eprintln!("failed to remove result of command {key}: {error}");
        }
    }

    /// Reads up to `length` bytes of a command's output; none at its end.
    pub(crate) fn read_output(
        &self,
        key: &str,
        stream: Stream,
        offset: u64,
        length: usize,
    ) -> io::Result<Vec<u8>> {
        let file = File::open(self.commands_directory().join(key).join(stream.name()))?;
        let mut bytes = vec![0; length];
        let count = file.read_at(&mut bytes, offset)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Records a temporary file. It is deleted at the next start unless the returned value is dropped before.
    pub(crate) fn record_temporary(&self, path: &Path) -> io::Result<TemporaryRecord> {
        let record = self.leftovers_directory().join(self.next_name());
        let mut file = create_private(&record)?;
        file.write_all(path.as_os_str().as_encoded_bytes())?;
        // Otherwise the record may be empty after a reset.
        file.sync_data()?;
        Ok(TemporaryRecord(record))
    }

    fn remove_orphaned_files(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.leftovers_directory())? {
            let record = entry?.path();
            if let Ok(path) = fs::read_to_string(&record)
                && path.contains(TEMPORARY_FILE_MARK)
            {
                _ = fs::remove_file(path);
            }
            _ = fs::remove_file(record);
        }
        Ok(())
    }

    fn next_name(&self) -> String {
        self.counter.fetch_add(1, Ordering::Relaxed).to_string()
    }
}

/// The record of a temporary file, which is deleted on drop.
pub(crate) struct TemporaryRecord(PathBuf);

impl Drop for TemporaryRecord {
    fn drop(&mut self) {
        _ = fs::remove_file(&self.0);
    }
}

fn remove_directory(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn keeps_outcomes_for_one_boot_and_one_agent() {
        let directory = TempDir::new().unwrap();
        let (spool, remembered) = Spool::open(directory.path(), "first").unwrap();
        assert_eq!(remembered, []);
        assert!(Spool::open(directory.path(), "first").is_err(), "the spool is locked");
        let stdout = StreamSummary { size: 3, truncated: true };
        let exited = Outcome::Exited { code: -1, stdout, stderr: StreamSummary::default() };
        let processes = ProcessTree { mark: "no-such-mark".into(), shell: None };
        let _outputs = spool.begin("exited", &processes).unwrap();
        spool.store_outcome("exited", exited).unwrap();
        fs::create_dir(directory.path().join("commands/lost")).unwrap();
        drop(spool);
        let (spool, mut remembered) = Spool::open(directory.path(), "first").unwrap();
        remembered.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(remembered, [("exited".into(), exited), ("lost".into(), Outcome::Lost)]);
        drop(spool);
        assert_eq!(Spool::open(directory.path(), "second").unwrap().1, []);
    }
}
