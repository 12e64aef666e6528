//! The folder of a machine: its disks, and what the next daemon must know of it.
//!
//! ```text
//! <disk>.qcow2  <disk>.base  <disk>.iso  nvram.fd  config.iso     what it is made of
//! machine.json  pid  started  end.json  reboot                    what became of it
//! qmp  sc-sf-agent                                                ways in
//! console.log  console.old  qemu.log                              what it and QEMU said
//! ```
//!
//! The folder is ours, and QEMU may only pass: it has its own files and can make none, not even a link.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown, lchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use muster_types::instance::SideChannel;
use muster_types::vm::{ConsolePorts, VmPower};
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::storage::failed;

const RECORD: &str = "machine.json";
const PID: &str = "pid";
const STARTED: &str = "started";
const END: &str = "end.json";
const REBOOT: &str = "reboot";
pub(super) const LOG: &str = "qemu.log";

/// How long a guest may take to switch itself off when it shall restart. Later it must have meant something else.
const REBOOT_WISH: Duration = Duration::from_secs(600);

/// How much of what QEMU said is repeated.
const LONGEST_WORDS: usize = 400;

/// What a machine was started as.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Which start of the host it belongs to.
    pub(super) boot: String,
    pub(super) cpus: u32,
    pub(super) memory_mb: u64,
    pub(super) ports: ConsolePorts,
    /// Its user, if that is not ours.
    pub(super) uid: Option<u32>,
    /// Whether interfaces that come later need a port.
    pub(super) has_ports: bool,
    /// The disks that it writes to.
    pub(super) disks: Vec<String>,
    /// The devices of its interfaces, by their hardware addresses.
    pub(super) nics: BTreeMap<String, String>,
    /// The ways for an agent.
    #[serde(default)]
    pub(super) side_channels: Vec<SideChannel>,
    /// The number of its virtual socket, if it has one.
    #[serde(default)]
    pub(super) vsock: Option<u32>,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ended {
    /// Whether nobody wanted that.
    pub(super) crashed: bool,
    pub(super) reason: String,
}

impl Ended {
    pub(super) fn off(reason: &str) -> Self {
        Self { crashed: false, reason: reason.into() }
    }

    pub(super) fn power(self) -> VmPower {
        match self.crashed {
            true => VmPower::Crashed { reason: self.reason },
            false => VmPower::Off { reason: self.reason },
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Folder {
    path: PathBuf,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn make(&self) -> Result<()> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.map_err(failed("the folder of a machine cannot be made"))
    }

    /// Lets a group pass, but see nothing.
    pub(super) fn open_to(&self, group: u32) -> Result<()> {
        let opened = chown(&self.path, None, Some(group))
            .and_then(|()| fs::set_permissions(&self.path, Permissions::from_mode(0o710)));
        opened.map_err(failed("the folder of a machine cannot be opened to its user"))
    }

    /// Makes a file that only its user reads and writes.
    pub(super) fn give(&self, name: &str, user: Option<u32>) -> Result<()> {
        let path = self.file(name);
        let given = lchown(&path, user, user)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o600)));
        given.map_err(failed("a file of a machine cannot be given to its user"))
    }

    /// Makes an empty file for a user, unless it is there.
    pub(super) fn ensure(&self, name: &str, user: Option<u32>) -> Result<()> {
        let made = OpenOptions::new().append(true).create(true).mode(0o600).open(self.file(name));
        made.map_err(failed("a file of a machine cannot be made"))?;
        self.give(name, user)
    }

    /// The names of what is in it.
    pub(super) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Removes a file; nothing there is no error.
    pub(super) fn remove(&self, name: &str) -> Result<()> {
        match fs::remove_file(self.file(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(failed("a file of a machine is not removed")(error))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn remove_all(&self) -> Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(failed("the folder of a machine is not removed")(error))
            }
            _ => Ok(()),
        }
    }

    /// Forgets an earlier run, and writes down that another begins.
    pub(super) fn begin(&self, record: &Record) -> Result<()> {
        for name in [STARTED, PID, REBOOT] {
            self.remove(name)?;
        }
        self.put(RECORD, record)?;
        self.remove(END)?;
        Ok(())
    }

    /// Makes what was begun survive a loss of power, after which it must be known that it ran.
    pub(super) fn synchronise(&self) -> Result<()> {
        let sync = |path: PathBuf| File::open(path)?.sync_all();
        sync(self.file(RECORD))
            .and_then(|()| sync(self.path.clone()))
            .map_err(failed("the record of a machine is not synchronised"))
    }

    pub(super) fn record(&self) -> Option<Record> {
        self.get(RECORD)
    }

    pub(super) fn change_record(&self, record: &Record) -> Result<()> {
        self.put(RECORD, record)
    }

    /// Where the process writes its number.
    pub(super) fn pid_file(&self) -> Result<File> {
        let made =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(self.file(PID));
        made.map_err(failed("a file of a machine cannot be made"))
    }

    pub(super) fn pid(&self) -> Option<u32> {
        fs::read_to_string(self.file(PID)).ok()?.trim().parse().ok()
    }

    /// Writes down that it did not only begin, but runs.
    pub(super) fn mark_started(&self) -> Result<()> {
        File::create(self.file(STARTED)).map(drop).map_err(failed("a file of a machine cannot be made"))
    }

    pub(super) fn was_started(&self) -> bool {
        self.file(STARTED).exists()
    }

    pub(super) fn put_end(&self, end: &Ended) -> Result<()> {
        self.put(END, end)
    }

    pub(super) fn end(&self) -> Option<Ended> {
        self.get(END)
    }

    pub(super) fn clear_end(&self) -> Result<()> {
        self.remove(END)
    }

    /// Wishes that it is switched on again when the guest has switched it off.
    pub(super) fn wish_reboot(&self) -> Result<()> {
        File::create(self.file(REBOOT)).map(drop).map_err(failed("a file of a machine cannot be made"))
    }

    pub(super) fn wishes_reboot(&self) -> bool {
        let wished = fs::metadata(self.file(REBOOT)).and_then(|found| found.modified());
        wished.is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() < REBOOT_WISH)
    }

    pub(super) fn forget_reboot(&self) {
        if let Err(error) = self.remove(REBOOT) {
            tracing::warn!(%error, folder = %self.path.display(), "a wish is not forgotten");
        }
    }

    /// Where QEMU says what is wrong.
    pub(super) fn log(&self) -> Result<File> {
        let _ = self.remove(LOG);
        let made = OpenOptions::new().append(true).create(true).mode(0o600).open(self.file(LOG));
        made.map_err(failed("a file of a machine cannot be made"))
    }

    /// The last that QEMU said, as far as somebody should know it.
    pub(super) fn last_words(&self) -> Option<String> {
        let words = words(&self.end_of_log().unwrap_or_default())?;
        // Who ended it is the host's own business.
        Some(words.split(" from pid ").next().unwrap_or_default().to_owned())
    }

    pub(super) fn log_mentions(&self, text: &str) -> bool {
        self.end_of_log().is_ok_and(|log| log.contains(text))
    }

    fn end_of_log(&self) -> io::Result<String> {
        const TAIL: u64 = 16 << 10;
        let mut file = File::open(self.file(LOG))?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(TAIL)))?;
        let mut text = Vec::new();
        file.take(TAIL).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// How the machine is, if it has no process.
    pub(super) fn power(&self, boot: &str) -> VmPower {
        if let Some(end) = self.end() {
            return end.power();
        }
        match self.record() {
            None => VmPower::Off { reason: "it was not switched on yet".into() },
            Some(record) if record.boot != boot => VmPower::Lost,
            Some(_) if !self.was_started() => VmPower::Crashed { reason: "its start was interrupted".into() },
            Some(_) => {
                let words = self.last_words().map(|words| format!(": {words}")).unwrap_or_default();
                VmPower::Crashed { reason: format!("QEMU ended while nobody watched{words}") }
            }
        }
    }

    fn put(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(value).map_err(|error| Error::Internal(error.to_string()))?;
        let new = self.file(&format!("{name}.new"));
        let written = (|| -> io::Result<()> {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&text)?;
            fs::rename(&new, self.file(name))
        })();
        written.map_err(failed("the record of a machine cannot be written"))
    }

    fn get<T: for<'a> Deserialize<'a>>(&self, name: &str) -> Option<T> {
        let text = fs::read(self.file(name)).ok()?;
        let value = serde_json::from_slice(&text);
        value
            .inspect_err(|error| tracing::warn!(%error, folder = %self.path.display(), name, "not readable"))
            .ok()
    }
}

/// What QEMU complained about: its own lines rather than those of its libraries, without what we told it.
fn words(text: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let own = lines.iter().filter_map(|line| line.strip_prefix("qemu-system-x86_64: "));
    let own: Vec<&str> =
        own.filter(|line| !line.starts_with("warning: ") && !line.starts_with("info: ")).collect();
    let line = own.last().or(lines.last())?;
    // The option that is wrong comes first, with everything that it says.
    let line = match line.strip_prefix('-') {
        Some(rest) => {
            rest.rsplit_once("}: ").or_else(|| rest.split_once(": ")).map_or(*line, |(_, words)| words)
        }
        None => line,
    };
    Some(line.chars().take(LONGEST_WORDS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(boot: &str) -> Record {
        Record {
            boot: boot.into(),
            cpus: 1,
            memory_mb: 64,
            ports: ConsolePorts { console: 1, vdi: 2, vdi_tls: None },
            uid: None,
            has_ports: false,
            disks: vec!["vda".into()],
            nics: BTreeMap::new(),
            side_channels: vec![SideChannel::Agent],
            vsock: Some(7),
        }
    }

    #[test]
    fn what_became_of_a_machine_is_read_from_its_folder() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().join("x"));
        folder.make().unwrap();
        assert!(
            matches!(folder.power("now"), VmPower::Off { reason } if reason.contains("not switched on yet"))
        );
        folder.begin(&record("now")).unwrap();
        folder.synchronise().unwrap();
        assert_eq!(folder.record(), Some(record("now")));
        assert!(matches!(folder.power("now"), VmPower::Crashed { reason } if reason.contains("interrupted")));
        folder.mark_started().unwrap();
        fs::write(folder.file(LOG), "qemu-system-x86_64: it hurts\n").unwrap();
        assert!(
            matches!(folder.power("now"), VmPower::Crashed { reason } if reason.ends_with("watched: it hurts"))
        );
        assert_eq!(folder.power("another"), VmPower::Lost);
        folder.put_end(&Ended::off("enough")).unwrap();
        assert_eq!(folder.power("another"), VmPower::Off { reason: "enough".into() });
        folder.wish_reboot().unwrap();
        assert!(folder.wishes_reboot());
        folder.begin(&record("now")).unwrap();
        assert!(!folder.wishes_reboot() && folder.end().is_none() && !folder.was_started());
        folder.remove_all().unwrap();
        folder.remove_all().unwrap();
        assert!(!folder.path().exists());
    }

    #[test]
    fn a_wish_is_forgotten_after_a_while() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().to_owned());
        folder.wish_reboot().unwrap();
        let file = File::options().write(true).open(folder.file(REBOOT)).unwrap();
        file.set_modified(SystemTime::now() - REBOOT_WISH).unwrap();
        assert!(!folder.wishes_reboot());
    }

    #[test]
    fn the_words_of_qemu_are_found_among_others() {
        let text = "qemu-system-x86_64: warning: slow\nqemu-system-x86_64: -device {\"driver\":\"x\",\"a\":{}}: 'x' is not a valid device model name\n";
        assert_eq!(words(text).unwrap(), "'x' is not a valid device model name");
        let text = "qemu-system-x86_64: -spice addr=::1,port=1: failed to initialize\nqemu-system-x86_64: info: Spice: x\n";
        assert!(words(text).unwrap().contains("failed to initialize"));
        assert_eq!(words("library: broken\n\n").unwrap(), "library: broken");
        assert_eq!(words("\n"), None);
    }
}
