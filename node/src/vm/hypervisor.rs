//! The state that all VMs of this host share, and the recovery of VMs that an earlier daemon started.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use muster_types::ids::InstanceId;
use muster_types::instance::FencingPolicy;
use muster_types::vm::{VmPlan, VmPower};
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::AbortHandle;

use super::console_archive::ConsoleArchive;
use super::console_log;
use super::consoles::ConsoleAccess;
use super::device_models::DeviceModels;
use super::display_tls::DisplayCertificates;
use super::kvm::{self, KvmError};
use super::lifecycle::{KILL_TIMEOUT, Vm};
use super::process::{self, Process};
use super::vm_dir::{self, VmDir, file};
use super::watchdog::{self, WatchdogCommand};
use crate::change_notifier::ChangeNotifier;
use crate::command::{COMMAND_TIMEOUT, Commands, Tool};
use crate::console_connections::ConsoleConnectionLog;
use crate::fencing::FencingLease;
use crate::guest::GuestRegistry;
use crate::lost_found::LostFound;
use crate::storage::FileStorage;
use crate::{host, user_ids};

/// The directory in the storage directory that contains the directories of the VMs.
const VMS_DIR: &str = "machines";

/// The range of console ports.
const CONSOLE_PORTS: std::ops::Range<u16> = 30000..50000;

/// The number of random ports to try: enough to find the last free one of the range.
const PORT_ATTEMPTS: usize = 1_000_000;

/// The interval at which the size of logs is checked.
const LOG_TRIM_INTERVAL: Duration = Duration::from_secs(20);
/// How often the archive of console logs is checked.
const ARCHIVE_PRUNE_INTERVAL: Duration = Duration::from_secs(3600);

/// How often and at which interval to check whether a forked process has executed QEMU.
const EXEC_POLL_ATTEMPTS: usize = 300;
const EXEC_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The name and the addresses of a node.
#[derive(Debug)]
pub(crate) struct NodeAddress<'a> {
    pub(crate) name: &'a str,
    pub(crate) ip: Ipv4Addr,
    /// The address of the TCP ports of consoles; unset if they are closed.
    pub(crate) console_address: Option<Ipv4Addr>,
}

/// The state that all VMs of this host share.
#[derive(Debug)]
pub(super) struct Hypervisor {
    storage_dir: PathBuf,
    pub(super) storage: Arc<FileStorage>,
    /// The path of QEMU, or why it is missing.
    qemu: Result<PathBuf, String>,
    pub(super) commands: Arc<Commands>,
    pub(super) kvm: bool,
    /// Why guests cannot run under KVM, if so.
    pub(super) missing_kvm: Option<KvmError>,
    /// Whether each VM can have its own user.
    pub(super) has_vm_users: bool,
    /// The name and the address of the node.
    name: String,
    ip: String,
    pub(super) console_access: ConsoleAccess,
    /// The boot id of the host.
    pub(super) boot_id: String,
    vms: Mutex<HashMap<InstanceId, Arc<Vm>>>,
    pub(super) notifier: ChangeNotifier,
    guest_registry: Arc<GuestRegistry>,
    display_certificates: OnceLock<DisplayCertificates>,
    device_models: OnceLock<DeviceModels>,
    qemu_version: Arc<OnceLock<String>>,
    /// Set once the VMs of earlier daemons were recovered.
    recovery: OnceCell<()>,
    /// Limits concurrent starts.
    pub(super) start_permits: Semaphore,
    log_trimmer: Mutex<Option<AbortHandle>>,
    pub(super) console_archive: ConsoleArchive,
    pub(super) lost_found: LostFound,
    pub(super) fencing_lease: Arc<FencingLease>,
}

impl Hypervisor {
    pub(super) fn new(
        storage_dir: &Path,
        storage: Arc<FileStorage>,
        commands: &Commands,
        node: &NodeAddress<'_>,
        guest_registry: Arc<GuestRegistry>,
        console_archive: ConsoleArchive,
        fencing_lease: Arc<FencingLease>,
    ) -> Self {
        let qemu = commands.path(Tool::QemuSystem).map(Path::to_owned).ok_or_else(|| {
            let tool = Tool::QemuSystem;
            format!("VMs need the program {} (Debian package {})", tool.name(), tool.package())
        });
        let missing_kvm = kvm::probe().err();
        Self {
            storage_dir: storage_dir.to_owned(),
            storage,
            qemu,
            commands: Arc::new(commands.with_own_counter()),
            kvm: missing_kvm.is_none(),
            missing_kvm,
            has_vm_users: user_ids::can_switch(),
            name: node.name.to_owned(),
            ip: node.ip.to_string(),
            console_access: ConsoleAccess {
                address: node.console_address,
                connections: ConsoleConnectionLog::default(),
            },
            boot_id: process::boot_id(),
            vms: Mutex::default(),
            notifier: ChangeNotifier::default(),
            guest_registry,
            display_certificates: OnceLock::new(),
            device_models: OnceLock::new(),
            qemu_version: Arc::default(),
            recovery: OnceCell::new(),
            // More concurrent starts would only compete for the CPUs.
            start_permits: Semaphore::new((2 * host::cpus()).max(4)),
            log_trimmer: Mutex::default(),
            console_archive,
            lost_found: LostFound::new(storage_dir, node.name),
            fencing_lease,
        }
    }

    pub(super) fn get(&self, id: InstanceId) -> Option<Arc<Vm>> {
        self.vms.lock().get(&id).cloned()
    }

    pub(super) fn require(&self, id: InstanceId) -> Result<Arc<Vm>> {
        self.get(id).ok_or_else(|| Error::not_found("VM"))
    }

    pub(super) fn all(&self) -> Vec<Arc<Vm>> {
        self.vms.lock().values().cloned().collect()
    }

    pub(super) fn get_or_insert(&self, id: InstanceId) -> Arc<Vm> {
        let create = || {
            let dir = self.vm_dir(id);
            let power = dir.power(&self.boot_id);
            Arc::new(self.new_vm(id, dir, power))
        };
        self.vms.lock().entry(id).or_insert_with(create).clone()
    }

    /// Removes the entry of a VM whose files were removed.
    pub(super) fn forget(&self, id: InstanceId) {
        self.vms.lock().remove(&id);
        self.notifier.notify(id);
    }

    /// Returns the path of QEMU, or [`Error::Conflict`] if it is not installed.
    pub(super) fn require_qemu(&self) -> Result<&Path> {
        self.qemu.as_deref().map_err(|reason| Error::Conflict(reason.clone()))
    }

    /// Returns the device models of QEMU. Blocks.
    pub(super) fn device_models(&self) -> Result<&DeviceModels> {
        if let Some(models) = self.device_models.get() {
            return Ok(models);
        }
        let models = DeviceModels::query(&self.commands)?;
        Ok(self.device_models.get_or_init(|| models))
    }

    /// Returns the version of QEMU, once it is known.
    pub(super) fn qemu_version(&self) -> Option<&str> {
        self.qemu_version.get().map(String::as_str)
    }

    /// Queries the version of QEMU. The start of the daemon does not wait for it.
    fn query_qemu_version(&self) {
        let (commands, version) = (self.commands.clone(), self.qemu_version.clone());
        tokio::task::spawn_blocking(move || {
            match commands.run(Tool::QemuSystem, &["--version"], "", COMMAND_TIMEOUT) {
                Ok(output) => {
                    if let Some(found) = parse_version(&output.stdout) {
                        version.get_or_init(|| found.to_owned());
                    }
                }
                Err(error) => tracing::warn!(%error, "failed to query the version of QEMU"),
            }
        });
    }

    /// Returns the display certificates of this node, which are created on first use. Blocks.
    pub(super) fn display_certificates(&self) -> Result<&DisplayCertificates> {
        if let Some(certificates) = self.display_certificates.get() {
            return Ok(certificates);
        }
        let certificates = DisplayCertificates::open(&self.storage_dir, &self.name, &self.ip)?;
        Ok(self.display_certificates.get_or_init(|| certificates))
    }

    /// Returns the vsock CIDs of the running VMs.
    pub(super) fn vsock_cids(&self) -> BTreeSet<u32> {
        self.all().iter().filter_map(|vm| vm.running()?.record().vsock).collect()
    }

    fn vm_dir(&self, id: InstanceId) -> VmDir {
        vm_dir(&self.storage_dir, id)
    }

    fn new_vm(&self, id: InstanceId, dir: VmDir, power: VmPower) -> Vm {
        Vm::new(
            id,
            dir,
            power,
            self.notifier.clone(),
            self.guest_registry.clone(),
            self.console_access.clone(),
        )
    }

    /// Waits until the VMs of earlier daemons were recovered.
    pub(super) async fn recovered(self: &Arc<Self>) {
        self.recovery.get_or_init(|| self.recover()).await;
    }

    /// Loads the VMs of earlier daemons, and re-attaches to those that run.
    async fn recover(self: &Arc<Self>) {
        let mut adoptions = tokio::task::JoinSet::new();
        for id in saved_ids(&self.storage_dir.join(VMS_DIR)) {
            let dir = self.vm_dir(id);
            // After a reboot of the host a PID may belong to any process.
            let record = dir.record().filter(|record| record.boot == self.boot_id);
            let running = match record.zip(dir.pid()) {
                Some((record, pid)) => {
                    self.find_process(id, &dir, pid).await.map(|process| (record, process))
                }
                None => None,
            };
            let power = if running.is_some() { VmPower::On } else { dir.power(&self.boot_id) };
            let vm = Arc::new(self.new_vm(id, dir, power));
            self.vms.lock().insert(id, vm.clone());
            if let Some((record, process)) = running {
                adoptions.spawn(async move { vm.adopt(process, record).await });
            }
        }
        let count = adoptions.len();
        adoptions.join_all().await;
        if count > 0 {
            tracing::info!(count, "re-attached to running VMs");
        }
        if self.qemu.is_ok() {
            self.query_qemu_version();
        }
        let trimmer = tokio::spawn(trim_logs(Arc::downgrade(self))).abort_handle();
        *self.log_trimmer.lock() = Some(trimmer);
    }

    /// Returns the process with this PID if it is the QEMU of the VM.
    async fn find_process(&self, id: InstanceId, dir: &VmDir, pid: u32) -> Option<Process> {
        for _ in 0..EXEC_POLL_ATTEMPTS {
            match Process::open_qemu(pid, id) {
                // Its daemon was killed between fork and exec: it is about to execute QEMU.
                Ok(None) if process::has_working_dir(pid, dir.path()) => {
                    tokio::time::sleep(EXEC_POLL_INTERVAL).await;
                }
                Ok(process) => return process,
                Err(error) => {
                    tracing::warn!(vm = %id, pid, %error, "failed to open VM process");
                    return None;
                }
            }
        }
        // Opened before the last check, so that the PID cannot be reused in between. It has not run the guest yet.
        if let Ok(Some(process)) = Process::open(pid)
            && process::has_working_dir(pid, dir.path())
        {
            tracing::warn!(vm = %id, pid, "killing a forked process that did not execute QEMU");
            process.kill();
            process.exits_within(KILL_TIMEOUT).await;
        }
        None
    }

    /// Returns the directory of a VM's disks. Those on shared storage are acquired for this node, unless it has a stale
    /// generation. Blocks.
    pub(super) fn acquire_disks(&self, dir: &VmDir, plan: &VmPlan) -> Result<VmDir> {
        let Some(storage) = plan.shared_storage else { return Ok(dir.clone()) };
        let shared = self.storage.require_shared()?;
        let path = shared.acquire(storage, plan.id, plan.generation);
        dir.link_disks(&path.map_err(|error| shared.explain_full(error))?)?;
        Ok(dir.disks())
    }

    /// Returns [`Error::NotReady`] if the disks of a VM are on shared storage that does not respond.
    pub(super) fn require_responsive_disks(&self, dir: &VmDir) -> Result<()> {
        match self.storage.shared().filter(|_| dir.has_shared_disks()) {
            Some(shared) => shared.require_responsive(),
            None => Ok(()),
        }
    }

    /// Changes whether the watchdog of a VM stops it. If the VM runs, it has a watchdog when this returns; otherwise it can
    /// start with one.
    pub(super) async fn set_fencing(&self, vm: &Vm, fencing: FencingPolicy) -> Result<()> {
        vm.dir.set_fencing(fencing)?;
        if fencing == FencingPolicy::None {
            return Ok(());
        }
        self.fencing_lease.ensure().await?;
        match vm.running() {
            Some(_) => watchdog::ensure(&self.storage_dir, vm.id, &vm.dir).await,
            None => Ok(()),
        }
    }

    /// Returns the watchdog that a VM starts with, if it has self-fencing.
    pub(super) fn watchdog_command(&self, plan: &VmPlan) -> io::Result<Option<WatchdogCommand>> {
        let has_one = plan.fencing == FencingPolicy::Own;
        has_one.then(|| WatchdogCommand::new(&self.storage_dir, plan.id)).transpose()
    }

    /// Chooses free ports that are not in `reserved`. Blocks.
    pub(super) fn choose_ports(&self, count: usize, reserved: &[u16]) -> Result<Vec<u16>> {
        let mut used: BTreeSet<u16> = reserved.iter().copied().collect();
        for running in self.all().iter().filter_map(|vm| vm.running()) {
            let ports = running.record().ports;
            used.extend([Some(ports.console), Some(ports.vdi), ports.vdi_tls].into_iter().flatten());
        }
        let mut chosen = Vec::with_capacity(count);
        for _ in 0..PORT_ATTEMPTS {
            if chosen.len() == count {
                return Ok(chosen);
            }
            let port = random_port();
            if !used.contains(&port) && TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
                used.insert(port);
                chosen.push(port);
            }
        }
        Err(Error::Unavailable("the node has no free ports for another VM".into()))
    }

    /// Stops supervising all VMs, which continue to run.
    pub(super) fn detach(&self) {
        for vm in self.all() {
            vm.detach();
        }
        if let Some(trimmer) = self.log_trimmer.lock().take() {
            trimmer.abort();
        }
    }
}

/// Returns the ids of the VMs that have a directory. Other files are ignored.
fn saved_ids(vms_dir: &Path) -> Vec<InstanceId> {
    let entries = match std::fs::read_dir(vms_dir) {
        Ok(entries) => entries,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::error!(%error, path = %vms_dir.display(), "failed to list VM directories");
            }
            return Vec::new();
        }
    };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.parse().ok().filter(|id: &InstanceId| id.to_string() == name)).collect()
}

fn random_port() -> u16 {
    let size = u128::from(CONSOLE_PORTS.end - CONSOLE_PORTS.start);
    let offset = uuid::Uuid::new_v4().as_u128() % size;
    CONSOLE_PORTS.start + u16::try_from(offset).expect("the offset is less than the size of the range")
}

/// Returns the version in the output of `qemu-system-x86_64 --version`.
fn parse_version(output: &str) -> Option<&str> {
    output.strip_prefix("QEMU emulator version ")?.split_whitespace().next()
}

/// Limits the size of the running VMs' logs and removes expired ones of deleted VMs, until the hypervisor is dropped.
async fn trim_logs(hypervisor: Weak<Hypervisor>) {
    let mut next_prune = Instant::now();
    loop {
        tokio::time::sleep(LOG_TRIM_INTERVAL).await;
        let Some(hypervisor) = hypervisor.upgrade() else { return };
        let mut vms = hypervisor.all();
        vms.retain(|vm| vm.running().is_some());
        let archive = hypervisor.console_archive.clone();
        let prune = Instant::now() >= next_prune;
        if prune {
            next_prune = Instant::now() + ARCHIVE_PRUNE_INTERVAL;
        }
        let trimmed = blocking(move || {
            if prune && let Err(error) = archive.prune(SystemTime::now()) {
                tracing::warn!(%error, "failed to remove expired console logs");
            }
            for vm in vms {
                for log in [file::CONSOLE, vm_dir::LOG_FILE] {
                    if let Err(error) = console_log::trim(&vm.dir.file(log)) {
                        tracing::warn!(vm = %vm.id, log, %error, "failed to trim VM log");
                    }
                }
            }
            Ok(())
        });
        if let Err(error) = trimmed.await {
            tracing::warn!(%error, "failed to trim VM logs");
        }
    }
}

/// Returns the directory of a VM of a node.
pub(super) fn vm_dir(storage_dir: &Path, id: InstanceId) -> VmDir {
    VmDir::new(storage_dir.join(VMS_DIR).join(id.to_string()))
}

/// Returns the VMs of a node that are stopped when its fencing lease expires, with their directories.
pub(super) fn self_fencing(storage_dir: &Path) -> impl Iterator<Item = (InstanceId, VmDir)> {
    let vms = saved_ids(&storage_dir.join(VMS_DIR)).into_iter().map(|id| (id, vm_dir(storage_dir, id)));
    vms.filter(|(_, dir)| dir.fencing() == FencingPolicy::Own)
}

/// Returns whether a VM of a node is stopped when its fencing lease expires.
pub(crate) fn has_self_fencing(storage_dir: &Path) -> bool {
    self_fencing(storage_dir).next().is_some()
}

/// Runs blocking work on the blocking thread pool.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::Internal(format!("VM task failed: {error}")))?
}
