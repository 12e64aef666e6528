//! Starts a VM: everything from its plan to a running guest.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muster_types::instance::{FencingPolicy, MachineType, SideChannel};
use muster_types::migration::MigrationMode;
use muster_types::spec::Vdi;
use muster_types::vm::{DiskKind, VmPlan, VmPower};
use muster_types::{Error, Result};
use nix::libc;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::consoles::{ConsoleListeners, DisplayProtocol};
use super::disks::FIRMWARE_DIR;
use super::hypervisor::{Hypervisor, blocking};
use super::lifecycle::{RunningVm, Vm};
use super::process::{self, Credentials, Process, ProcessExit, SpawnRequest};
use super::qemu_args::{self, StartResources, TapFds, VsockFd};
use super::qemu_log::{self, StartFailure};
use super::qmp::{Qmp, QmpEvent};
use super::tap::Tap;
use super::vm_dir::{VmDir, VmExit, VmRecord, file};
use super::vsock::Vsock;
use super::{backup_job, cgroup, config_drive, migration_incoming, vsock, watchdog};
use crate::files::io_error;
use crate::user_ids::FIRST_VM_UID;
use crate::vm_socket;

/// How long QEMU may take to answer. Many concurrent starts on a small host are slow.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);

/// How long QEMU may take to exit after it reported an error.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// A QEMU process that was spawned, but has not answered yet.
struct SpawnedVm {
    process: Process,
    record: VmRecord,
    stream: std::os::unix::net::UnixStream,
    /// The ports of its consoles, unless they are closed.
    listeners: Option<ConsoleListeners>,
}

/// What happens when QEMU has started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartMode {
    /// The guest boots.
    Boot,
    /// The VM waits for the memory of a migration.
    Incoming,
}

/// Starts a VM that is not on.
pub(super) async fn start(
    hypervisor: &Arc<Hypervisor>,
    vm: &Arc<Vm>,
    plan: &VmPlan,
    mode: StartMode,
) -> Result<()> {
    let _permit =
        hypervisor.start_permits.acquire().await.map_err(|error| Error::Internal(error.to_string()))?;
    hypervisor.set_fencing(vm, plan.fencing).await?;
    let (shared, own_plan, dir) = (hypervisor.clone(), plan.clone(), vm.dir.clone());
    let SpawnedVm { process, record, stream, listeners } =
        blocking(move || spawn(&shared, &dir, &own_plan, mode)).await?;
    let dir = vm.dir.clone();
    let synced = tokio::task::spawn_blocking(move || dir.sync());
    let started = async {
        let (qmp, events) = connect(stream).await?;
        protect_display(&qmp, &vm.dir, DisplayProtocol::of(plan.video.vdi)).await?;
        if plan.fencing == FencingPolicy::Own {
            watchdog::wait(&vm.dir).await?;
        }
        // Before the guest runs, so that a power failure cannot hide that it did.
        synced.await.map_err(|error| Error::Internal(error.to_string()))??;
        match mode {
            StartMode::Boot => {
                qmp.execute("cont", json!({})).await?;
                // The next daemon kills a VM whose start did not get here.
                vm.dir.mark_started()?;
            }
            StartMode::Incoming => migration_incoming::export_disks(&qmp, &vm.dir, &record.disks).await?,
        }
        Result::Ok((qmp, events))
    };
    let started = tokio::select! {
        biased;
        started = started => started,
        () = process.exited() => Err(Error::Unavailable("QEMU exited before it answered".into())),
    };
    match started {
        Ok((qmp, events)) => {
            vm.supervise(&Arc::new(RunningVm::new(process, record, Some(qmp))), Some(events), listeners);
            vm.set_power(VmPower::On);
            Ok(())
        }
        Err(error) => Err(clean_up_failed_start(vm, &process, error).await),
    }
}

async fn connect(stream: std::os::unix::net::UnixStream) -> Result<(Qmp, mpsc::Receiver<QmpEvent>)> {
    let stream = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
    Qmp::negotiate(stream.map_err(io_error("failed to create QMP socket"))?, GREETING_TIMEOUT).await
}

/// Sets a new password, and prevents QEMU from creating further sockets.
async fn protect_display(qmp: &Qmp, dir: &VmDir, display: DisplayProtocol) -> Result<()> {
    let password = display.generate_password();
    // Before it is set, so that a display never has a password that the daemon does not know.
    dir.save_display_password(&password)?;
    display.set_password(qmp, &password).await?;
    dir.seal_display_dir()
}

/// Ends the process of a failed start, releases its resources, and returns the error that describes the cause best.
async fn clean_up_failed_start(vm: &Vm, process: &Process, error: Error) -> Error {
    if !process.exits_within(EXIT_TIMEOUT).await {
        process.kill();
        process.exited().await;
    }
    let exit = process.exit();
    let (id, dir) = (vm.id, vm.dir.clone());
    let log = blocking(move || {
        if let Err(error) = cgroup::remove(id, dir.generation()) {
            tracing::warn!(vm = %id, %error, "failed to remove VM cgroup");
        }
        dir.log_tail().map_err(io_error("failed to read the log of QEMU"))
    });
    let log = log.await.inspect_err(|error| tracing::warn!(vm = %id, %error, "failed to read VM log")).ok();
    let error = match start_error(error, exit, log.as_deref()) {
        // Another host uses them, or its locks have not expired yet.
        Error::Unavailable(message) if vm.dir.has_shared_disks() && qemu_log::is_locked(&message) => {
            Error::NotReady(format!("another host still uses the disks: {message}"))
        }
        error => error,
    };
    // Saved as a crash rather than off, because the VM is still meant to run.
    let exit = VmExit { crashed: true, reason: format!("failed to start: {error}") };
    vm.save_exit(&exit);
    vm.set_power(exit.power());
    error
}

/// Returns the error of a failed start: by QEMU's log if QEMU exited, otherwise `error`.
fn start_error(error: Error, exit: ProcessExit, log: Option<&str>) -> Error {
    let failure = log.and_then(|log| {
        let message = qemu_log::last_error(log)?;
        Some((qemu_log::classify_start_failure(&message), message))
    });
    match (error, exit, failure) {
        (error @ (Error::Conflict(_) | Error::InsufficientCapacity(_)), ..) => error,
        (_, ProcessExit::Code(_), Some((StartFailure::Transient, message))) => Error::Unavailable(message),
        (_, ProcessExit::Code(_), Some((StartFailure::Permanent, message))) => Error::Conflict(message),
        (_, exit @ (ProcessExit::Code(_) | ProcessExit::Signal(_)), _) => Error::Unavailable(exit.reason()),
        (error, ..) => error,
    }
}

/// Prepares files, sockets, devices and the cgroup, and spawns QEMU. Blocks.
fn spawn(hypervisor: &Hypervisor, dir: &VmDir, plan: &VmPlan, mode: StartMode) -> Result<SpawnedVm> {
    let qemu = hypervisor.require_qemu()?;
    hypervisor.device_models()?.check(plan)?;
    let credentials = hypervisor.has_vm_users.then(|| {
        let id = FIRST_VM_UID + u32::from(plan.ports.console);
        Credentials { uid: id, gid: id, kvm_gid: hypervisor.kvm.then(kvm_gid).flatten() }
    });
    let uid = credentials.map(|credentials| credentials.uid);
    let disk_dir = hypervisor.acquire_disks(dir, plan)?;
    prepare_files(hypervisor, (dir, &disk_dir), plan, uid)?;

    let listeners = open_ports(hypervisor, plan)?;
    let socket_error = |error: io::Error| io_error("failed to create VM socket")(error);
    let console = vm_socket::listen(dir.path(), vm_socket::CONSOLE).map_err(socket_error)?;
    let qmp = vm_socket::listen(dir.path(), vm_socket::QMP).map_err(socket_error)?;
    let wants_vsock = plan.side_channels.contains(&SideChannel::Agent2);
    let vsock = wants_vsock.then(|| Vsock::open(&hypervisor.vsock_cids())).flatten();
    let side_channels = vsock::available_side_channels(&plan.side_channels, vsock.is_some());
    let agent = match side_channels.contains(&SideChannel::Agent) {
        true => Some(vm_socket::listen(dir.path(), vm_socket::AGENT).map_err(socket_error)?),
        false => None,
    };
    let taps =
        plan.nics.iter().map(|nic| Tap::open(nic, &hypervisor.commands)).collect::<Result<Vec<Tap>>>()?;
    let resources = StartResources {
        incoming: mode == StartMode::Incoming,
        kvm: hypervisor.kvm,
        direct_io: supports_direct_io(&dir.file(file::CONSOLE)) && disks_support_direct_io(&disk_dir, plan),
        files: disk_dir.file_names()?.into_iter().collect(),
        firmware: plan.uefi.then(|| firmware(plan)).transpose()?,
        taps: taps.iter().map(tap_fds).collect(),
        qmp: qmp.as_raw_fd(),
        console: console.as_raw_fd(),
        agent: agent.as_ref().map(AsRawFd::as_raw_fd),
        vsock: vsock.as_ref().map(|vsock| VsockFd { fd: vsock.file.as_raw_fd(), cid: vsock.cid }),
    };
    let record = VmRecord {
        side_channels,
        vsock: vsock.as_ref().map(|vsock| vsock.cid),
        ..new_record(hypervisor, plan, uid)
    };
    dir.begin_run(&record)?;
    if mode == StartMode::Incoming {
        dir.mark_incoming(MigrationMode::Live)?;
    }
    let cgroup = cgroup::Cgroup::create(plan.id, plan.generation, plan.cpus, plan.memory_mb)?;
    // The connection waits in the socket's backlog until QEMU accepts it.
    let stream = vm_socket::connect_early(dir.path(), vm_socket::QMP).map_err(socket_error)?;
    let failed = |error: io::Error| Error::Unavailable(format!("failed to start QEMU: {error}"));
    let request = SpawnRequest {
        program: qemu,
        arguments: &qemu_args::arguments(plan, &resources),
        environment: &qemu_args::environment(plan),
        working_dir: dir.path(),
        credentials,
        inherited_fds: &inherited_fds(&resources),
        pid_file: dir.create_pid_file()?,
        log: dir.create_log()?,
        watchdog: hypervisor.watchdog_command(plan).map_err(failed)?,
    };
    let child = process::spawn(&request).map_err(failed)?;
    // A child's PID is not reused before its exit status is collected.
    let process = match &request.watchdog {
        Some(_) => dir.pid().map_or(Ok(None), |pid| Process::open_watched(pid, child)),
        None => Process::open(child),
    };
    let process = process.map_err(io_error("failed to watch VM process"))?;
    let process = process.ok_or_else(|| Error::Internal(format!("process {child} does not exist")))?;
    if let Some(cgroup) = cgroup
        && let Err(error) = cgroup.add(process.pid)
    {
        tracing::warn!(vm = %plan.id, %error, "failed to move VM process into its cgroup");
    }
    Ok(SpawnedVm { process, record, stream, listeners })
}

/// Creates the files of a start, and gives the VM's user access to exactly the files that it needs.
fn prepare_files(
    hypervisor: &Hypervisor,
    (dir, disk_dir): (&VmDir, &VmDir),
    plan: &VmPlan,
    uid: Option<u32>,
) -> Result<()> {
    backup_job::remove_files(dir)?;
    if let Some(gid) = uid {
        dir.allow_traversal(gid)?;
        disk_dir.allow_traversal(gid)?;
    }
    for disk in &plan.disks {
        match disk.kind {
            DiskKind::Disk => {
                let name = format!("{}.qcow2", disk.device);
                if !disk_dir.file(&name).exists() {
                    return Err(Error::Conflict(format!("disk {} of the VM is missing", disk.device)));
                }
                disk_dir.set_owner(&name, uid)?;
            }
            DiskKind::ConfigDrive => {
                let files = plan.config_drive.as_deref().unwrap_or_default();
                config_drive::write(&dir.file(file::CONFIG_DRIVE), files)?;
                dir.set_owner(file::CONFIG_DRIVE, uid)?;
            }
            // A link to a file of the storage, which is readable by every user who can traverse the directory.
            DiskKind::Cdrom => {}
        }
    }
    if plan.uefi {
        disk_dir.set_owner(file::NVRAM, uid)?;
    }
    dir.ensure(file::CONSOLE, uid)?;
    if plan.video.vdi != Vdi::Vnc && plan.ports.vdi_tls.is_some() {
        hypervisor.display_certificates()?.copy_to(dir, uid)?;
    }
    dir.create_display_dir(uid)?;
    Ok(())
}

pub(super) fn new_record(hypervisor: &Hypervisor, plan: &VmPlan, uid: Option<u32>) -> VmRecord {
    let disks = plan.disks.iter().filter(|disk| disk.kind == DiskKind::Disk);
    VmRecord {
        boot: hypervisor.boot_id.clone(),
        generation: plan.generation,
        cpus: plan.cpus,
        memory_mb: plan.memory_mb,
        ports: plan.ports,
        uid,
        has_ports: qemu_args::machine_type(plan) == MachineType::Q35,
        disks: disks.map(|disk| disk.device.clone()).collect(),
        nics: plan.nics.iter().map(|nic| (nic.mac.to_string(), nic.interface.device())).collect(),
        side_channels: Vec::new(),
        vsock: None,
        hotplugged: false,
        display: Some(DisplayProtocol::of(plan.video.vdi)),
    }
}

/// Opens the ports of the consoles, unless they are closed on this node.
fn open_ports(hypervisor: &Hypervisor, plan: &VmPlan) -> Result<Option<ConsoleListeners>> {
    let Some(address) = hypervisor.console_access.address else { return Ok(None) };
    match ConsoleListeners::bind(address, plan.ports) {
        Ok(listeners) => Ok(Some(listeners)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(Error::PortInUse(format!("a console port is in use: {error}")))
        }
        Err(error) => Err(io_error("failed to open console ports")(error)),
    }
}

fn tap_fds(tap: &Tap) -> TapFds {
    TapFds { tap: tap.tap.as_raw_fd(), vhost: tap.vhost.as_ref().map(AsRawFd::as_raw_fd) }
}

/// Returns the file descriptors that QEMU inherits.
fn inherited_fds(resources: &StartResources) -> Vec<RawFd> {
    let mut fds = vec![resources.qmp, resources.console];
    fds.extend(resources.agent);
    fds.extend(resources.vsock.map(|vsock| vsock.fd));
    fds.extend(resources.taps.iter().flat_map(|fds| [Some(fds.tap), fds.vhost]).flatten());
    fds
}

/// Returns the group that may use KVM, unless all users may.
fn kvm_gid() -> Option<u32> {
    let metadata = std::fs::metadata("/dev/kvm").ok()?;
    (metadata.mode() & 0o006 != 0o006).then(|| metadata.gid())
}

/// Returns the path of the firmware that matches the NVRAM of a VM.
fn firmware(plan: &VmPlan) -> Result<String> {
    let name = if plan.secure_boot { "OVMF_CODE_4M.secboot.fd" } else { "OVMF_CODE_4M.fd" };
    let path: PathBuf = Path::new(FIRMWARE_DIR).join(name);
    if !path.exists() {
        return Err(Error::Conflict(format!("UEFI needs {} (Debian package ovmf)", path.display())));
    }
    Ok(path.to_string_lossy().into_owned())
}

/// Returns whether the file system of disks on shared storage supports direct I/O. Other disks are next to the console log.
fn disks_support_direct_io(disk_dir: &VmDir, plan: &VmPlan) -> bool {
    let disks = plan.disks.iter().filter(|disk| disk.kind == DiskKind::Disk && plan.shared_storage.is_some());
    disks.map(|disk| disk_dir.file(&format!("{}.qcow2", disk.device))).all(|file| supports_direct_io(&file))
}

fn supports_direct_io(file: &Path) -> bool {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(file).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_failed_start_follows_the_log_only_if_qemu_exited() {
        let timeout = || Error::Unavailable("QEMU does not respond".into());
        let log = Some("qemu-system-x86_64: Invalid CPU topology\n");
        let exit = ProcessExit::Code(1);
        assert!(
            matches!(start_error(timeout(), exit, log), Error::Conflict(reason) if reason.contains("CPU"))
        );
        let refused = Error::Conflict("refused".into());
        assert!(matches!(start_error(refused, exit, log), Error::Conflict(reason) if reason == "refused"));
        let killed = start_error(timeout(), ProcessExit::Signal(9), log);
        assert!(matches!(killed, Error::Unavailable(reason) if reason.contains("signal 9")));
        assert!(
            matches!(start_error(timeout(), exit, None), Error::Unavailable(reason) if reason.contains("status 1"))
        );
    }
}
