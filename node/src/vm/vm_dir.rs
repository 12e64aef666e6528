//! The directory of a VM: its disks, and the state that the next daemon needs.
//!
//! ```text
//! <disk>.qcow2  <disk>.base  <disk>.iso  nvram.fd  config.iso     disks and firmware
//! machine.json  pid  started  end.json  reboot                    state
//! fencing  fenced  fenced-at  watchdog.lock                       fencing
//! incoming  received  migrating                                   migration
//! qmp  console  sc-sf-agent  display/spice  nbd  mirror-<disk>    sockets
//! display-password                                                secret of the daemon
//! console.log  console.old  qemu.log                              logs
//! disks                                                           a link to the directory of shared disks
//! ```
//!
//! If the disks are on shared storage, they and the NVRAM are in the directory that `disks` refers to.
//!
//! The directory belongs to the daemon; QEMU may only traverse it. QEMU owns its files, but cannot create any, not even
//! a link. Only while it starts may it create the socket of SPICE, in `display`.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use muster_types::instance::{FencingPolicy, SideChannel, first_generation};
use muster_types::key::Secret;
use muster_types::migration::MigrationMode;
use muster_types::time::now;
use muster_types::vm::{ConsolePorts, VmPower};
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};

use super::consoles::DisplayProtocol;
use super::qemu_log;
use crate::files::io_error;

const RECORD_FILE: &str = "machine.json";
const PID_FILE: &str = "pid";
const STARTED_FILE: &str = "started";
const EXIT_FILE: &str = "end.json";
const REBOOT_FILE: &str = "reboot";
/// Exists if the watchdog of the VM stops it when the fencing lease expires.
const FENCING_FILE: &str = "fencing";
/// Exists if the watchdog has stopped the last run of the VM.
const FENCED_FILE: &str = "fenced";
/// The Unix time when the watchdog has stopped the VM, until that was recorded.
const FENCED_AT_FILE: &str = "fenced-at";
/// Exists if the VM was prepared to receive a migration and has not run here. Contains what is migrated.
const INCOMING_FILE: &str = "incoming";
/// Exists if all files of a VM that is off were received.
const RECEIVED_FILE: &str = "received";
/// Exists while the guest is stopped because its memory is copied to another host.
const MIGRATING_FILE: &str = "migrating";
const PASSWORD_FILE: &str = "display-password";
pub(super) const LOG_FILE: &str = "qemu.log";

/// Files that QEMU opens.
pub(super) mod file {
    /// The link to the directory of disks on shared storage.
    pub(in crate::vm) const DISKS_LINK: &str = "disks";
    pub(in crate::vm) const CONFIG_DRIVE: &str = "config.iso";
    pub(in crate::vm) const NVRAM: &str = "nvram.fd";
    pub(in crate::vm) const CONSOLE: &str = "console.log";
    pub(in crate::vm) const CA_CERTIFICATE: &str = "screen-ca.pem";
    pub(in crate::vm) const CERTIFICATE: &str = "screen-cert.pem";
    pub(in crate::vm) const KEY: &str = "screen-key.pem";
    /// The directory in which QEMU creates its SPICE socket.
    pub(in crate::vm) const DISPLAY_DIR: &str = "display";
}

/// How long a guest may take to power off after a reboot request. A later power-off is not a reboot.
const REBOOT_REQUEST_TTL: Duration = Duration::from_secs(600);

/// The configuration that a VM was started with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct VmRecord {
    /// The boot id of the host at that time.
    pub(super) boot: String,
    /// The generation of its instance at that time.
    #[serde(default = "first_generation")]
    pub(super) generation: i64,
    pub(super) cpus: u32,
    pub(super) memory_mb: u64,
    pub(super) ports: ConsolePorts,
    /// The user of its process, if that differs from ours.
    pub(super) uid: Option<u32>,
    /// Whether hotplugged interfaces need a PCIe root port.
    pub(super) has_ports: bool,
    /// The devices of its writable disks.
    pub(super) disks: Vec<String>,
    /// The tap devices of its interfaces, by MAC address.
    pub(super) nics: BTreeMap<String, String>,
    /// The side channels for agents.
    #[serde(default)]
    pub(super) side_channels: Vec<SideChannel>,
    /// Its vsock CID, if it has one.
    #[serde(default)]
    pub(super) vsock: Option<u32>,
    /// Whether interfaces were attached since it was started.
    #[serde(default)]
    pub(super) hotplugged: bool,
    /// The protocol of its display; unset if an earlier release started it, whose QEMU opened the ports itself.
    #[serde(default)]
    pub(super) display: Option<DisplayProtocol>,
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VmExit {
    /// Whether the end was unexpected.
    pub(super) crashed: bool,
    pub(super) reason: String,
}

impl VmExit {
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
pub(super) struct VmDir {
    path: PathBuf,
}

impl VmDir {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the directory of the disks: this one, unless they are on shared storage.
    pub(super) fn disks(&self) -> Self {
        fs::read_link(self.file(file::DISKS_LINK)).map_or_else(|_| self.clone(), Self::new)
    }

    /// Returns whether the disks are on shared storage.
    pub(super) fn has_shared_disks(&self) -> bool {
        self.file(file::DISKS_LINK).is_symlink()
    }

    /// Refers to the directory of disks on shared storage.
    pub(super) fn link_disks(&self, path: &Path) -> Result<()> {
        if fs::read_link(self.file(file::DISKS_LINK)).is_ok_and(|found| found == path) {
            return Ok(());
        }
        self.unlink_disks()?;
        symlink(path, self.file(file::DISKS_LINK))
            .map_err(io_error("failed to create a link to shared disks"))
    }

    /// Removes the link to disks on shared storage, if there is one.
    pub(super) fn unlink_disks(&self) -> Result<()> {
        self.remove(file::DISKS_LINK)
    }

    pub(super) fn create(&self) -> Result<()> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        created.map_err(io_error("failed to create VM directory"))
    }

    /// Lets a group traverse the directory, but not list it.
    pub(super) fn allow_traversal(&self, gid: u32) -> Result<()> {
        let changed = chown(&self.path, None, Some(gid))
            .and_then(|()| fs::set_permissions(&self.path, Permissions::from_mode(0o710)));
        changed.map_err(io_error("failed to change the permissions of a VM directory"))
    }

    /// Makes a file readable and writable by `user` only; by us if unset.
    pub(super) fn set_owner(&self, name: &str, user: Option<u32>) -> Result<()> {
        let path = self.file(name);
        let changed = lchown(&path, user, user)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o600)));
        changed.map_err(io_error("failed to change the owner of a VM file"))
    }

    /// Creates an empty file owned by `user`, unless it exists.
    pub(super) fn ensure(&self, name: &str, user: Option<u32>) -> Result<()> {
        let created = OpenOptions::new().append(true).create(true).mode(0o600).open(self.file(name));
        created.map_err(io_error("failed to create VM file"))?;
        self.set_owner(name, user)
    }

    /// Creates the directory in which QEMU, as `user`, creates its SPICE socket, replacing an existing one.
    pub(super) fn create_display_dir(&self, user: Option<u32>) -> Result<()> {
        let path = self.file(file::DISPLAY_DIR);
        let removed = match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        let created = removed
            .and_then(|()| DirBuilder::new().mode(0o700).create(&path))
            .and_then(|()| chown(&path, user, user));
        created.map_err(io_error("failed to create the directory of the display socket"))
    }

    /// Takes the directory of the display socket from QEMU, which has created the socket if it needs one.
    pub(super) fn seal_display_dir(&self) -> Result<()> {
        let own = nix::unistd::geteuid().as_raw();
        let sealed = lchown(self.file(file::DISPLAY_DIR), Some(own), None);
        sealed.map_err(io_error("failed to change the owner of the directory of the display socket"))
    }

    /// Saves the password of the display for the next daemon. QEMU cannot read the file.
    pub(super) fn save_display_password(&self, password: &Secret) -> Result<()> {
        self.save(PASSWORD_FILE, &password.expose())
    }

    /// Returns the password of the display, if the VM has one.
    pub(super) fn display_password(&self) -> Option<Secret> {
        self.load::<String>(PASSWORD_FILE).map(Secret::new)
    }

    /// Returns the names of the files in the directory.
    pub(super) fn file_names(&self) -> Result<Vec<String>> {
        let entries = fs::read_dir(&self.path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.map_err(io_error("failed to list VM directory"))?;
        Ok(entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
    }

    /// Removes a file, if it exists.
    pub(super) fn remove(&self, name: &str) -> Result<()> {
        match fs::remove_file(self.file(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to remove VM file")(error))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn remove_all(&self) -> Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to remove VM directory")(error))
            }
            _ => Ok(()),
        }
    }

    /// Clears the state of an earlier run, and saves the record of a new one.
    pub(super) fn begin_run(&self, record: &VmRecord) -> Result<()> {
        let of_last_run = [STARTED_FILE, PID_FILE, REBOOT_FILE, PASSWORD_FILE, FENCED_FILE];
        for name in of_last_run.into_iter().chain([INCOMING_FILE, RECEIVED_FILE, MIGRATING_FILE]) {
            self.remove(name)?;
        }
        self.save(RECORD_FILE, record)?;
        self.remove(EXIT_FILE)?;
        Ok(())
    }

    /// Syncs the record, so that the VM counts as lost rather than never started after a power failure.
    pub(super) fn sync(&self) -> Result<()> {
        let sync = |path: PathBuf| File::open(path)?.sync_all();
        sync(self.file(RECORD_FILE))
            .and_then(|()| sync(self.path.clone()))
            .map_err(io_error("failed to sync VM record"))
    }

    pub(super) fn record(&self) -> Option<VmRecord> {
        self.load(RECORD_FILE)
    }

    /// Returns the generation that the VM was last started under.
    pub(super) fn generation(&self) -> i64 {
        self.record().map_or_else(first_generation, |record| record.generation)
    }

    pub(super) fn save_record(&self, record: &VmRecord) -> Result<()> {
        self.save(RECORD_FILE, record)
    }

    /// Creates the file into which the process writes its PID.
    pub(super) fn create_pid_file(&self) -> Result<File> {
        let created =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(self.file(PID_FILE));
        created.map_err(io_error("failed to create VM file"))
    }

    pub(super) fn pid(&self) -> Option<u32> {
        fs::read_to_string(self.file(PID_FILE)).ok()?.trim().parse().ok()
    }

    /// Records that the start is complete and the guest runs.
    pub(super) fn mark_started(&self) -> Result<()> {
        File::create(self.file(STARTED_FILE)).map(drop).map_err(io_error("failed to create VM file"))
    }

    pub(super) fn was_started(&self) -> bool {
        self.file(STARTED_FILE).exists()
    }

    pub(super) fn save_exit(&self, exit: &VmExit) -> Result<()> {
        self.save(EXIT_FILE, exit)
    }

    pub(super) fn exit(&self) -> Option<VmExit> {
        self.load(EXIT_FILE)
    }

    pub(super) fn clear_exit(&self) -> Result<()> {
        self.remove(EXIT_FILE)
    }

    pub(super) fn set_fencing(&self, fencing: FencingPolicy) -> Result<()> {
        match fencing {
            FencingPolicy::None => self.remove(FENCING_FILE),
            FencingPolicy::Own => {
                File::create(self.file(FENCING_FILE)).map(drop).map_err(io_error("failed to create VM file"))
            }
        }
    }

    pub(super) fn fencing(&self) -> FencingPolicy {
        // An unreadable directory must not keep a VM running.
        if self.file(FENCING_FILE).try_exists().unwrap_or(true) {
            FencingPolicy::Own
        } else {
            FencingPolicy::None
        }
    }

    /// Records that the VM is prepared to receive a migration.
    pub(super) fn mark_incoming(&self, mode: MigrationMode) -> Result<()> {
        self.save(INCOMING_FILE, &mode)
    }

    pub(super) fn is_incoming(&self) -> bool {
        self.file(INCOMING_FILE).exists()
    }

    /// Returns what of the VM this node receives.
    pub(super) fn incoming_mode(&self) -> Option<MigrationMode> {
        self.load(INCOMING_FILE)
    }

    /// Records that all files of a VM that is off were received.
    pub(super) fn mark_received(&self) -> Result<()> {
        let created = File::create(self.file(RECEIVED_FILE)).and_then(|_| File::open(&self.path)?.sync_all());
        created.map_err(io_error("failed to create VM file"))
    }

    pub(super) fn is_received(&self) -> bool {
        self.file(RECEIVED_FILE).exists()
    }

    /// Records that a VM that has received a migration belongs to this node.
    pub(super) fn clear_incoming(&self) -> Result<()> {
        self.remove(INCOMING_FILE)?;
        self.remove(RECEIVED_FILE)
    }

    /// Records that the guest is about to be stopped because its memory is copied to another host.
    pub(super) fn mark_stopped_for_migration(&self) -> Result<()> {
        File::create(self.file(MIGRATING_FILE)).map(drop).map_err(io_error("failed to create VM file"))
    }

    pub(super) fn is_stopped_for_migration(&self) -> bool {
        self.file(MIGRATING_FILE).exists()
    }

    pub(super) fn clear_stopped_for_migration(&self) -> Result<()> {
        self.remove(MIGRATING_FILE)
    }

    /// Records that the process is killed because the fencing lease expired.
    pub(super) fn mark_fenced(&self) -> Result<()> {
        File::create(self.file(FENCED_FILE)).map(drop).map_err(io_error("failed to create VM file"))?;
        self.save(FENCED_AT_FILE, &now())
    }

    /// Returns when the watchdog has stopped the VM, if that was not acknowledged.
    pub(super) fn fenced_at(&self) -> Option<f64> {
        self.load(FENCED_AT_FILE)
    }

    pub(super) fn acknowledge_fencing(&self) -> Result<()> {
        self.remove(FENCED_AT_FILE)
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.file(FENCED_FILE).exists()
    }

    /// Requests that the VM is restarted when the guest has powered off.
    pub(super) fn request_reboot(&self) -> Result<()> {
        File::create(self.file(REBOOT_FILE)).map(drop).map_err(io_error("failed to create VM file"))
    }

    pub(super) fn is_reboot_requested(&self) -> bool {
        let requested = fs::metadata(self.file(REBOOT_FILE)).and_then(|metadata| metadata.modified());
        // A time in the future, after the clock was set back, counts as now.
        requested
            .is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() < REBOOT_REQUEST_TTL)
    }

    pub(super) fn clear_reboot_request(&self) {
        if let Err(error) = self.remove(REBOOT_FILE) {
            tracing::warn!(%error, path = %self.path.display(), "failed to clear reboot request");
        }
    }

    /// Creates an empty log for QEMU.
    pub(super) fn create_log(&self) -> Result<File> {
        self.remove(LOG_FILE)?;
        let created = OpenOptions::new().append(true).create(true).mode(0o600).open(self.file(LOG_FILE));
        created.map_err(io_error("failed to create VM file"))
    }

    /// Returns the last error in QEMU's log.
    pub(super) fn last_qemu_error(&self) -> Option<String> {
        qemu_log::last_error(&self.log_tail().ok()?)
    }

    /// Returns the end of QEMU's log.
    pub(super) fn log_tail(&self) -> io::Result<String> {
        const MAX_TAIL: u64 = 16 << 10;
        let mut file = File::open(self.file(LOG_FILE))?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(MAX_TAIL)))?;
        let mut text = Vec::new();
        file.take(MAX_TAIL).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Returns the power state of a VM that has no process.
    pub(super) fn power(&self, boot: &str) -> VmPower {
        if let Some(exit) = self.exit() {
            return exit.power();
        }
        match self.record() {
            None => VmPower::Off { reason: "it was never started".into() },
            Some(record) if record.boot != boot || self.is_fenced() => VmPower::Lost,
            Some(_) if !self.was_started() => VmPower::Crashed { reason: "its start was interrupted".into() },
            Some(_) => {
                let message =
                    self.last_qemu_error().map(|message| format!(": {message}")).unwrap_or_default();
                VmPower::Crashed { reason: format!("QEMU exited while the daemon was not running{message}") }
            }
        }
    }

    fn save(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(value).map_err(|error| Error::Internal(error.to_string()))?;
        let new = self.file(&format!("{name}.new"));
        let written = (|| -> io::Result<()> {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&text)?;
            fs::rename(&new, self.file(name))
        })();
        written.map_err(io_error("failed to save VM state"))
    }

    fn load<T: for<'a> Deserialize<'a>>(&self, name: &str) -> Option<T> {
        let loaded = match fs::read(self.file(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            text => text.and_then(|text| Ok(serde_json::from_slice(&text)?)),
        };
        loaded
            .inspect_err(|error| {
                tracing::warn!(%error, path = %self.file(name).display(), "failed to load VM state");
            })
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(boot: &str) -> VmRecord {
        VmRecord {
            boot: boot.into(),
            generation: 2,
            cpus: 1,
            memory_mb: 64,
            ports: ConsolePorts { console: 1, vdi: 2, vdi_tls: None },
            uid: None,
            has_ports: false,
            disks: vec!["vda".into()],
            nics: BTreeMap::new(),
            side_channels: vec![SideChannel::Agent],
            vsock: Some(7),
            hotplugged: false,
            display: Some(DisplayProtocol::Spice),
        }
    }

    #[test]
    fn derives_power_state_from_files() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = VmDir::new(temporary.path().join("x"));
        dir.create().unwrap();
        assert!(matches!(dir.power("now"), VmPower::Off { reason } if reason.contains("never started")));
        dir.begin_run(&record("now")).unwrap();
        dir.sync().unwrap();
        assert_eq!(dir.record(), Some(record("now")));
        assert!(matches!(dir.power("now"), VmPower::Crashed { reason } if reason.contains("interrupted")));
        dir.mark_started().unwrap();
        fs::write(dir.file(LOG_FILE), "qemu-system-x86_64: a disk failed\n").unwrap();
        assert!(
            matches!(dir.power("now"), VmPower::Crashed { reason } if reason.ends_with("running: a disk failed"))
        );
        assert_eq!(dir.power("another"), VmPower::Lost);
        dir.mark_fenced().unwrap();
        assert_eq!(dir.power("now"), VmPower::Lost);
        assert!(dir.fenced_at().is_some());
        dir.save_exit(&VmExit::off("enough")).unwrap();
        assert_eq!(dir.power("another"), VmPower::Off { reason: "enough".into() });
        dir.request_reboot().unwrap();
        assert!(dir.is_reboot_requested());
        dir.begin_run(&record("now")).unwrap();
        assert!(!dir.is_reboot_requested() && dir.exit().is_none() && !dir.was_started() && !dir.is_fenced());
        assert!(dir.fenced_at().is_some(), "a restart does not acknowledge it");
        dir.acknowledge_fencing().unwrap();
        assert_eq!(dir.fenced_at(), None);
        assert_eq!(dir.fencing(), FencingPolicy::None);
        for fencing in [FencingPolicy::Own, FencingPolicy::Own, FencingPolicy::None, FencingPolicy::None] {
            dir.set_fencing(fencing).unwrap();
            assert_eq!(dir.fencing(), fencing);
        }
        dir.remove_all().unwrap();
        dir.remove_all().unwrap();
        assert!(!dir.path().exists());
    }

    #[test]
    fn reboot_request_expires() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = VmDir::new(temporary.path().to_owned());
        dir.request_reboot().unwrap();
        let file = File::options().write(true).open(dir.file(REBOOT_FILE)).unwrap();
        file.set_modified(SystemTime::now() - REBOOT_REQUEST_TTL).unwrap();
        assert!(!dir.is_reboot_requested());
    }
}
