//! Switches a machine on: everything from its plan to a guest that runs.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muster_types::instance::{MachineType, SideChannel};
use muster_types::spec::Vdi;
use muster_types::vm::{DiskKind, PORT_TAKEN, VmPlan, VmPower};
use muster_types::{Error, Result};
use nix::libc;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::folder::{Ended, Folder, Record};
use super::hardware::{self, Prepared, TapFiles, VsockFile, file};
use super::life::{Live, Machine};
use super::process::{self, End, Identity, Order, Process};
use super::qmp::{Event, Qmp};
use super::screens::Screens;
use super::tap::Tap;
use super::vsock::Vsock;
use super::{Inner, blocking, cgroup, config_drive, snapshot, socket, vsock};
use crate::storage::failed;

/// The users of machines: this and the number of the console's port, of which there is one on a node.
const USERS: u32 = 1_900_000_000;

/// Where the firmware's package puts it.
const FIRMWARE: &str = "/usr/share/OVMF";

/// How long QEMU may take to answer first. Many at once on a small host take their time.
const GREETING: Duration = Duration::from_secs(60);

/// How long after its last words QEMU may take to end.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// A QEMU that was started.
struct Launched {
    pid: u32,
    record: Record,
    stream: std::os::unix::net::UnixStream,
}

/// Starts a machine that is not on.
pub(super) async fn start(inner: &Arc<Inner>, machine: &Arc<Machine>, plan: &VmPlan) -> Result<()> {
    let _turn = inner.starts.acquire().await.map_err(|error| Error::Internal(error.to_string()))?;
    let (shared, order, target) = (inner.clone(), plan.clone(), machine.clone());
    let Launched { pid, record, stream } = blocking(move || launch(&shared, &target.folder, &order)).await?;
    // It is our child: as long as nobody asks how it ended, its number is nobody else's.
    let process = Process::hold(pid).map_err(failed("a process cannot be watched"))?;
    let process = process.ok_or_else(|| Error::Internal(format!("process {pid} is gone")))?;
    let begun = machine.clone();
    let synchronised = tokio::task::spawn_blocking(move || begun.folder.synchronise());
    let greeted = async {
        let (qmp, events) = greet(stream).await?;
        // Only now: should power be lost after the guest ran, it must be known that it did.
        synchronised.await.map_err(|error| Error::Internal(error.to_string()))??;
        qmp.execute("cont", json!({})).await?;
        // Only now: one that did not get here is cleared away by the next daemon.
        machine.folder.mark_started()?;
        Result::Ok((qmp, events))
    };
    let greeted = tokio::select! {
        biased;
        greeted = greeted => greeted,
        () = process.ended() => Err(Error::Unavailable("QEMU ended before it answered".into())),
    };
    match greeted {
        Ok((qmp, events)) => {
            machine.look_after(&Arc::new(Live::new(process, record, Some(qmp))), Some(events));
            machine.set_power(VmPower::On);
            Ok(())
        }
        Err(error) => Err(failed_start(machine, &process, error).await),
    }
}

async fn greet(stream: std::os::unix::net::UnixStream) -> Result<(Qmp, mpsc::Receiver<Event>)> {
    let stream = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
    Qmp::greet(stream.map_err(failed("the way to QEMU cannot be made"))?, GREETING).await
}

/// Clears away what did not start, and says why.
async fn failed_start(machine: &Machine, process: &Process, error: Error) -> Error {
    if !process.ends_within(LAST_BREATH).await {
        process.kill();
        process.ended().await;
    }
    let end = process.end();
    let (id, folder) = (machine.id, machine.folder.clone());
    let words = blocking(move || {
        if let Err(error) = cgroup::remove(id) {
            tracing::warn!(machine = %id, %error, "the resource group of a machine is not removed");
        }
        Ok((folder.last_words(), folder.log_mentions("binding socket")))
    });
    let (words, port_taken) = words.await.unwrap_or_default();
    let error = match (error, end, words) {
        (error @ (Error::Conflict(_) | Error::Insufficient(_)), ..) => error,
        (_, End::Code(_), Some(words)) if port_taken => Error::Unavailable(format!("{PORT_TAKEN}: {words}")),
        (_, End::Code(_), Some(words)) if may_pass(&words) => Error::Unavailable(words),
        (_, End::Code(_), Some(words)) => Error::Conflict(words),
        (_, end @ (End::Code(_) | End::Signal(_)), _) => Error::Unavailable(end.reason()),
        (error, ..) => error,
    };
    // Nobody switched it off: it is still wanted to be on.
    let ended = Ended { crashed: true, reason: format!("it could not be switched on: {error}") };
    machine.note_end(&ended);
    machine.set_power(ended.power());
    error
}

/// Whether another attempt may succeed.
fn may_pass(words: &str) -> bool {
    [
        "Address already in use",
        "Cannot allocate memory",
        "cannot allocate memory",
        "Resource temporarily",
        "Failed to get",
    ]
    .iter()
    .any(|text| words.contains(text))
}

/// Everything up to a process that is about to answer. Blocks.
fn launch(inner: &Inner, folder: &Folder, plan: &VmPlan) -> Result<Launched> {
    let qemu = inner.require_qemu()?;
    inner.models()?.check(plan)?;
    let identity = inner.root.then(|| {
        let user = USERS + u32::from(plan.ports.console);
        Identity { uid: user, gid: user, kvm: inner.kvm.then(kvm_group).flatten() }
    });
    let user = identity.map(|identity| identity.uid);
    hand_over(inner, folder, plan, user)?;

    let cannot = |error: io::Error| failed("the way to QEMU cannot be made")(error);
    let control = socket::listen(folder.path(), socket::CONTROL).map_err(cannot)?;
    let vsock =
        plan.side_channels.contains(&SideChannel::Agent2).then(|| Vsock::open(&inner.vsocks())).flatten();
    let ways = vsock::ways(&plan.side_channels, vsock.is_some());
    let agent = match ways.contains(&SideChannel::Agent) {
        true => Some(socket::listen(folder.path(), socket::AGENT).map_err(cannot)?),
        false => None,
    };
    let taps = plan.nics.iter().map(|nic| Tap::open(nic, &inner.commands)).collect::<Result<Vec<Tap>>>()?;
    let prepared = Prepared {
        kvm: inner.kvm,
        listen: listen_address(&inner.ip),
        direct: bypasses_cache(&folder.file(file::CONSOLE)),
        files: folder.names().into_iter().collect(),
        firmware: plan.uefi.then(|| firmware(plan)).transpose()?,
        taps: taps.iter().map(numbers).collect(),
        control: control.as_raw_fd(),
        agent: agent.as_ref().map(AsRawFd::as_raw_fd),
        vsock: vsock.as_ref().map(|vsock| VsockFile { file: vsock.file.as_raw_fd(), number: vsock.number }),
    };
    let mut record = record(inner, plan, user);
    record.side_channels = ways;
    record.vsock = vsock.as_ref().map(|vsock| vsock.number);
    folder.begin(&record)?;
    let group = cgroup::Group::create(plan.id, plan.cpus, plan.memory_mb)?;
    let mut files = vec![prepared.control];
    files.extend(prepared.agent);
    files.extend(prepared.vsock.map(|vsock| vsock.file));
    files.extend(prepared.taps.iter().flat_map(|files| [Some(files.tap), files.vhost]).flatten());
    // Waits in the socket until QEMU comes to it.
    let stream = socket::connect_ahead(folder.path(), socket::CONTROL).map_err(cannot)?;
    let order = Order {
        program: qemu,
        arguments: &hardware::arguments(plan, &prepared),
        environment: &hardware::environment(plan),
        folder: folder.path(),
        identity,
        files: &files,
        pid_file: folder.pid_file()?,
        log: folder.log()?,
    };
    let pid = process::start(&order)
        .map_err(|error| Error::Unavailable(format!("QEMU cannot be started: {error}")))?;
    if let Some(group) = group
        && let Err(error) = group.add(pid)
    {
        tracing::warn!(machine = %plan.id, %error, "a machine is not in its resource group");
    }
    Ok(Launched { pid, record, stream })
}

/// Makes the files of a start, and gives a machine's user what it needs and no more.
fn hand_over(inner: &Inner, folder: &Folder, plan: &VmPlan, user: Option<u32>) -> Result<()> {
    snapshot::sweep(folder)?;
    if let Some(group) = user {
        folder.open_to(group)?;
    }
    for disk in &plan.disks {
        match disk.kind {
            DiskKind::Disk => {
                let name = format!("{}.qcow2", disk.device);
                if !folder.file(&name).exists() {
                    return Err(Error::Conflict(format!(
                        "the disk {} of the machine is not there",
                        disk.device
                    )));
                }
                folder.give(&name, user)?;
            }
            DiskKind::ConfigDrive => {
                let files = plan.config_drive.as_deref().unwrap_or_default();
                config_drive::write(&folder.file(file::CONFIG_DRIVE), files)?;
                folder.give(file::CONFIG_DRIVE, user)?;
            }
            // It is the storage's, and everybody may read it who gets to it.
            DiskKind::Cdrom => {}
        }
    }
    if plan.uefi {
        folder.give(file::NVRAM, user)?;
    }
    folder.ensure(file::CONSOLE, user)?;
    if plan.video.vdi != Vdi::Vnc && plan.ports.vdi_tls.is_some() {
        inner.screens()?.copy_to(folder, user)?;
    }
    Ok(())
}

fn record(inner: &Inner, plan: &VmPlan, user: Option<u32>) -> Record {
    let disks = plan.disks.iter().filter(|disk| disk.kind == DiskKind::Disk);
    Record {
        boot: inner.boot.clone(),
        cpus: plan.cpus,
        memory_mb: plan.memory_mb,
        ports: plan.ports,
        uid: user,
        has_ports: hardware::machine_type(plan) == MachineType::Q35,
        disks: disks.map(|disk| disk.device.clone()).collect(),
        nics: plan.nics.iter().map(|nic| (nic.mac.to_string(), nic.interface.device())).collect(),
        side_channels: plan.side_channels.clone(),
        vsock: None,
    }
}

fn numbers(tap: &Tap) -> TapFiles {
    TapFiles { tap: tap.tap.as_raw_fd(), vhost: tap.vhost.as_ref().map(AsRawFd::as_raw_fd) }
}

/// Who may use the processor's virtualisation, if not everybody may.
fn kvm_group() -> Option<u32> {
    std::fs::metadata("/dev/kvm").ok().filter(|found| found.mode() & 0o006 != 0o006).map(|found| found.gid())
}

/// The firmware that goes with a machine's memory for it.
fn firmware(plan: &VmPlan) -> Result<String> {
    let name = if plan.secure_boot { "OVMF_CODE_4M.secboot.fd" } else { "OVMF_CODE_4M.fd" };
    let path: PathBuf = Path::new(FIRMWARE).join(name);
    if !path.exists() {
        return Err(Error::Conflict(format!("UEFI needs {} (Debian package ovmf)", path.display())));
    }
    Ok(path.to_string_lossy().into_owned())
}

/// Where screens and consoles are served: at the node's own address, unless this machine does not have it.
fn listen_address(ip: &str) -> IpAddr {
    let own = ip.parse().ok().filter(|ip: &IpAddr| TcpListener::bind((*ip, 0)).is_ok());
    own.unwrap_or(Ipv4Addr::LOCALHOST.into())
}

fn bypasses_cache(file: &Path) -> bool {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(file).is_ok()
}

impl Inner {
    /// The numbers of the virtual sockets of the machines that run here.
    fn vsocks(&self) -> BTreeSet<u32> {
        let machines: Vec<Arc<Machine>> = self.known().values().cloned().collect();
        machines.iter().filter_map(|machine| machine.live()?.record().vsock).collect()
    }

    /// The certificates of this node, made when they are first needed. Blocks.
    pub(super) fn screens(&self) -> Result<&Screens> {
        if let Some(screens) = self.screens.get() {
            return Ok(screens);
        }
        let screens = Screens::open(&self.storage_folder, &self.name, &self.ip)?;
        Ok(self.screens.get_or_init(|| screens))
    }
}
