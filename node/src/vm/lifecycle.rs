//! The lifecycle of one VM, and the supervision of its process while it runs.
//!
//! The power state follows QEMU's events and the exit of its process, without polling:
//!
//! ```text
//! RESUME ─▶ on    STOP ─▶ paused    SHUTDOWN by the guest ─▶ reset if a reboot was requested, otherwise off
//! KVM error or guest panic ─▶ crashed    exit of the process ─▶ the requested state, otherwise crashed
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use muster_types::ids::InstanceId;
use muster_types::instance::SideChannel;
use muster_types::vm::VmPower;
use muster_types::{Error, Result};
use nix::sys::statvfs::statvfs;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use super::consoles::{ConsoleAccess, ConsoleListeners, ConsoleTarget, Consoles};
use super::process::{Process, ProcessExit};
use super::qemu_status::{QemuStatus, parse_status};
use super::qmp::{Qmp, QmpEvent, SharedQmp};
use super::vm_dir::{VmDir, VmExit, VmRecord};
use super::{backup_job, cgroup, migration_jobs};
use crate::change_notifier::ChangeNotifier;
use crate::guest::{GuestHandle, GuestRegistry};
use crate::vm_socket;

/// How long QEMU may take to flush its caches and exit.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the kernel may take to end a killed process.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the QEMU of an earlier daemon may take to answer before it is considered unresponsive.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The delays between attempts to connect to a QEMU that does not respond: doubled each time.
const MIN_RECONNECT_DELAY: Duration = Duration::from_millis(50);
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(30);

/// The interval at which the disk space of a VM that a full disk paused is checked.
const DISK_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The free disk space in bytes with which such a VM is resumed.
const MIN_RESUME_SPACE: u64 = 16 << 20;

/// A VM of which the node has at least some files.
#[derive(Debug)]
pub(super) struct Vm {
    pub(super) id: InstanceId,
    pub(super) dir: VmDir,
    /// Serializes everything that starts or stops the VM or changes its hardware.
    pub(super) power_lock: tokio::sync::Mutex<()>,
    /// Serializes snapshots.
    pub(super) snapshot_lock: tokio::sync::Mutex<()>,
    state: Mutex<VmState>,
    notifier: ChangeNotifier,
    guest_registry: Arc<GuestRegistry>,
    console_access: ConsoleAccess,
}

#[derive(Debug)]
struct VmState {
    power: VmPower,
    running: Option<Arc<RunningVm>>,
}

/// The process of a VM, and the connections to it.
#[derive(Debug)]
pub(super) struct RunningVm {
    pub(super) process: Process,
    record: Mutex<VmRecord>,
    qmp: SharedQmp,
    /// The outcome to record when the process exits, if its end was requested.
    requested_exit: Mutex<Option<VmExit>>,
    /// True once the exit of the process was handled.
    exited: watch::Sender<bool>,
    monitor: Mutex<Option<AbortHandle>>,
    /// Keeps the connection to the guest's agent open, if the VM has a side channel.
    guest_handle: Mutex<Option<GuestHandle>>,
    /// Unset for a VM whose QEMU opened the ports itself, as earlier releases did.
    consoles: Mutex<Option<Arc<Consoles>>>,
    /// Whether QEMU paused the guest because a write to a disk failed. It does so only when the disk is full.
    disk_failed: AtomicBool,
}

impl RunningVm {
    pub(super) fn new(process: Process, record: VmRecord, qmp: Option<Qmp>) -> Self {
        Self {
            process,
            record: Mutex::new(record),
            qmp: SharedQmp::new(qmp),
            requested_exit: Mutex::default(),
            exited: watch::Sender::new(false),
            monitor: Mutex::default(),
            guest_handle: Mutex::default(),
            consoles: Mutex::default(),
            disk_failed: AtomicBool::new(false),
        }
    }

    /// Returns the consoles, or [`Error::Conflict`] if an earlier release started the VM.
    pub(super) fn consoles(&self) -> Result<Arc<Consoles>> {
        let missing =
            "the VM was started by an earlier release: power it off and on, or use its console port";
        self.consoles.lock().clone().ok_or_else(|| Error::Conflict(missing.into()))
    }

    pub(super) fn record(&self) -> VmRecord {
        self.record.lock().clone()
    }

    pub(super) fn set_record(&self, record: VmRecord) {
        *self.record.lock() = record;
    }

    /// Returns the QMP connection, or [`Error::Unavailable`] while QEMU does not respond.
    pub(super) fn qmp(&self) -> Result<Arc<Qmp>> {
        self.qmp.get().ok_or_else(|| {
            let pid = self.process.pid;
            Error::Unavailable(format!("the VM runs, but its QEMU (process {pid}) does not respond"))
        })
    }

    /// Returns the side channels for agents. Records written before agents were supported do not list them.
    fn side_channels(&self, dir: &VmDir) -> Vec<SideChannel> {
        let channels = self.record.lock().side_channels.clone();
        match channels.is_empty() && dir.file(vm_socket::AGENT).exists() {
            true => vec![SideChannel::Agent],
            false => channels,
        }
    }

    fn set_paused(&self, paused: bool) {
        if let Some(guest_handle) = &*self.guest_handle.lock() {
            guest_handle.set_paused(paused);
        }
    }

    fn notify_reset(&self) {
        if let Some(guest_handle) = &*self.guest_handle.lock() {
            guest_handle.notify_reset();
        }
    }

    /// Sets the outcome to record at exit, unless one is set already; returns the one that applies.
    fn request_exit(&self, exit: VmExit) -> VmExit {
        self.requested_exit.lock().get_or_insert(exit).clone()
    }

    /// Waits until the exit of the process was handled.
    async fn exited(&self) {
        let _ = self.exited.subscribe().wait_for(|exited| *exited).await;
    }
}

impl Vm {
    pub(super) fn new(
        id: InstanceId,
        dir: VmDir,
        power: VmPower,
        notifier: ChangeNotifier,
        guest_registry: Arc<GuestRegistry>,
        console_access: ConsoleAccess,
    ) -> Self {
        let state = Mutex::new(VmState { power, running: None });
        let (power_lock, snapshot_lock) = Default::default();
        Self { id, dir, power_lock, snapshot_lock, state, notifier, guest_registry, console_access }
    }

    pub(super) fn power(&self) -> VmPower {
        self.state.lock().power.clone()
    }

    pub(super) fn running(&self) -> Option<Arc<RunningVm>> {
        self.state.lock().running.clone()
    }

    /// Returns the process of a VM that is on or paused, otherwise [`Error::Conflict`].
    pub(super) fn require_running(&self) -> Result<Arc<RunningVm>> {
        self.running().ok_or_else(|| Error::Conflict("the VM is not running".into()))
    }

    pub(super) fn set_power(&self, power: VmPower) {
        {
            let mut state = self.state.lock();
            if state.power == power {
                return;
            }
            tracing::info!(vm = %self.id, ?power, "VM power state changed");
            if let Some(running) = &state.running {
                running.set_paused(power == VmPower::Paused);
            }
            state.power = power;
        }
        self.notifier.notify(self.id);
    }

    /// Saves how the VM ended or is about to end. A failure, such as a full disk, does not prevent the end.
    pub(super) fn save_exit(&self, exit: &VmExit) {
        if let Err(error) = self.dir.save_exit(exit) {
            tracing::warn!(vm = %self.id, %error, "failed to save VM exit");
        }
    }

    /// Supervises a process from now on. `events` is unset if QEMU did not answer yet, and `listeners` if the ports of
    /// the consoles are not open yet.
    pub(super) fn supervise(
        self: &Arc<Self>,
        running: &Arc<RunningVm>,
        events: Option<mpsc::Receiver<QmpEvent>>,
        listeners: Option<ConsoleListeners>,
    ) {
        let record = running.record();
        *running.consoles.lock() = record.display.map(|display| {
            let (dir, qmp) = (self.dir.path(), running.qmp.clone());
            let target = ConsoleTarget { id: self.id, dir, ports: record.ports, display, qmp };
            Arc::new(Consoles::open(target, &self.console_access, listeners))
        });
        if !self.dir.is_incoming() {
            self.attach_guest(running);
        }
        self.state.lock().running = Some(running.clone());
        let monitor = Monitor { vm: self.clone(), running: running.clone(), restarting: false };
        *running.monitor.lock() = Some(tokio::spawn(monitor.run(events)).abort_handle());
    }

    /// Connects to the agent of the guest, if the VM has a side channel.
    pub(super) fn attach_guest(&self, running: &RunningVm) {
        let (channels, vsock) = (running.side_channels(&self.dir), running.record.lock().vsock);
        *running.guest_handle.lock() = self.guest_registry.attach(self.id, self.dir.path(), &channels, vsock);
    }

    /// Takes over a process that an earlier daemon started.
    pub(super) async fn adopt(self: &Arc<Self>, process: Process, record: VmRecord) {
        // The process still runs, so the daemon that saved this exit did not complete it.
        let cleared = self.dir.clear_exit();
        let running = Arc::new(RunningVm::new(process, record, None));
        let monitor = Monitor { vm: self.clone(), running: running.clone(), restarting: false };
        let connected = monitor.connect().await;
        let pid = running.process.pid;
        if let Err(error) = &cleared {
            tracing::warn!(vm = %self.id, pid, %error, "failed to clear saved VM exit");
        }
        if let Err(error) = &connected {
            tracing::warn!(vm = %self.id, pid, %error, "failed to connect to the QEMU of a running VM");
        }
        // The requester of a snapshot or migration ended with the earlier daemon.
        if let Ok(qmp) = running.qmp() {
            if let Err(error) = backup_job::cancel_all(&qmp, &self.dir).await {
                tracing::warn!(vm = %self.id, %error, "failed to cancel orphaned backup jobs");
            }
            if !self.dir.is_incoming()
                && let Err(error) = migration_jobs::cancel(&qmp, &self.dir, false).await
            {
                tracing::warn!(vm = %self.id, %error, "failed to cancel orphaned migration");
            }
        }
        self.state.lock().power = VmPower::On;
        self.supervise(&running, connected.ok(), None);
        let is_loaded = match running.qmp() {
            Ok(qmp) => migration_jobs::is_loaded(&qmp, &self.dir).await,
            Err(_) => false,
        };
        if !self.dir.was_started() && !is_loaded {
            let interrupted = VmExit { crashed: true, reason: "its start was interrupted".into() };
            if let Err(error) = self.terminate(&running, interrupted, false).await {
                tracing::warn!(vm = %self.id, pid, %error, "failed to end an interrupted start");
            }
        } else if let Err(error) = self.refresh_power(&running).await {
            tracing::warn!(vm = %self.id, %error, "failed to query VM status");
        }
    }

    /// Ends the process, and returns when its exit was handled. `graceful` lets QEMU flush its caches first.
    pub(super) async fn terminate(&self, running: &RunningVm, exit: VmExit, graceful: bool) -> Result<()> {
        self.save_exit(&running.request_exit(exit));
        if graceful && let Ok(qmp) = running.qmp() {
            let quit = tokio::time::timeout(QUIT_TIMEOUT, qmp.execute("quit", json!({})));
            if !matches!(quit.await, Ok(Ok(_))) || !running.process.exits_within(QUIT_TIMEOUT).await {
                running.process.kill();
            }
        } else {
            running.process.kill();
        }
        tokio::time::timeout(KILL_TIMEOUT, running.exited()).await.map_err(|_| {
            Error::Unavailable(format!(
                "process {} was killed but does not exit: it waits for a disk or a device",
                running.process.pid
            ))
        })
    }

    /// Queries QEMU for the power state.
    pub(super) async fn refresh_power(&self, running: &RunningVm) -> Result<()> {
        Monitor::query_status(self, running).await.map(drop)
    }

    /// Stops supervising the VM, which continues to run.
    pub(super) fn detach(&self) {
        if let Some(running) = self.state.lock().running.take() {
            if let Some(monitor) = running.monitor.lock().take() {
                monitor.abort();
            }
            if let Some(qmp) = running.qmp.take() {
                qmp.close();
            }
            running.guest_handle.lock().take();
            running.consoles.lock().take();
        }
    }
}

/// Supervises one process until it exits.
struct Monitor {
    vm: Arc<Vm>,
    running: Arc<RunningVm>,
    /// Whether the VM was reset after the guest powered off, and continues when the reset is complete.
    restarting: bool,
}

impl Monitor {
    async fn run(mut self, mut events: Option<mpsc::Receiver<QmpEvent>>) {
        let running = self.running.clone();
        let mut signalled = false;
        if events.is_some() {
            self.handle_status(Self::query_status(&self.vm, &running).await).await;
        }
        let mut delay = MIN_RECONNECT_DELAY;
        loop {
            let Some(receiver) = &mut events else {
                tokio::select! {
                    () = running.process.exited() => break,
                    () = tokio::time::sleep(delay) => {}
                }
                delay = (delay * 2).min(MAX_RECONNECT_DELAY);
                tokio::select! {
                    () = running.process.exited() => break,
                    connected = self.connect() => events = connected.ok(),
                }
                if events.is_some() {
                    tracing::info!(vm = %self.vm.id, "reconnected to QEMU");
                    self.handle_status(Self::query_status(&self.vm, &running).await).await;
                    delay = MIN_RECONNECT_DELAY;
                }
                continue;
            };
            let event = tokio::select! {
                () = running.process.exited() => break,
                event = receiver.recv() => event,
                () = tokio::time::sleep(DISK_POLL_INTERVAL), if running.disk_failed.load(Ordering::Relaxed) => {
                    self.resume_if_disk_has_space().await;
                    continue;
                }
            };
            match event {
                Some(event) => self.handle_event(event, &mut signalled).await,
                None => {
                    running.qmp.take();
                    events = None;
                }
            }
        }
        if let Some(mut events) = events {
            while let Ok(event) = events.try_recv() {
                signalled |= event.is_signal();
            }
        }
        self.handle_exit(signalled).await;
    }

    /// Connects to the QMP socket.
    async fn connect(&self) -> Result<mpsc::Receiver<QmpEvent>> {
        let failed =
            |error: &dyn std::fmt::Display| Error::Unavailable(format!("failed to connect to QEMU: {error}"));
        let connecting = vm_socket::connect(self.vm.dir.path(), vm_socket::QMP);
        let stream =
            tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.map_err(|error| failed(&error))?;
        let stream = stream.map_err(|error| failed(&error))?;
        let (qmp, events) = Qmp::negotiate(stream, CONNECT_TIMEOUT).await?;
        let answer = qmp.execute("query-uuid", json!({})).await?;
        if answer["UUID"].as_str() != Some(self.vm.id.to_string().as_str()) {
            return Err(failed(&"the socket belongs to another VM"));
        }
        self.running.qmp.set(qmp);
        Ok(events)
    }

    async fn handle_event(&mut self, event: QmpEvent, signalled: &mut bool) {
        *signalled |= event.is_signal();
        let reset = event.name == "RESET";
        if event.name == "SHUTDOWN" && event.data["guest"] != json!(true) {
            // Requested by the host: the exit of the process determines the outcome.
            return;
        }
        if reset {
            self.running.notify_reset();
        }
        if reset && self.restarting {
            self.restarting = false;
            self.continue_guest().await;
        }
        let status = Self::query_status(&self.vm, &self.running).await;
        if reset && matches!(status, Ok(QemuStatus::Power(VmPower::On))) {
            // The guest restarted without powering off.
            self.vm.dir.clear_reboot_request();
        }
        self.handle_status(status).await;
    }

    /// Queries the status, and updates the power state unless the VM is about to end.
    async fn query_status(vm: &Vm, running: &RunningVm) -> Result<QemuStatus> {
        let qmp = running.qmp()?;
        let answer = qmp.execute("query-status", json!({})).await?;
        let status = answer["status"]
            .as_str()
            .ok_or_else(|| Error::Internal(format!("QEMU reported no status: {answer}")))?;
        if status == "shutdown" && qmp.is_signalled() {
            return Ok(QemuStatus::Exiting);
        }
        let disk_failed = status == "io-error";
        if disk_failed && !running.disk_failed.swap(true, Ordering::Relaxed) {
            tracing::warn!(vm = %vm.id, "VM is paused until the node's disk has space again");
        }
        running.disk_failed.store(disk_failed, Ordering::Relaxed);
        let mut status = parse_status(status);
        let is_stopped = status == QemuStatus::Power(VmPower::Paused);
        if is_stopped && !disk_failed && vm.dir.is_stopped_for_migration() {
            // The migration resumes it, so all but its agent see it as on.
            status = QemuStatus::Power(VmPower::On);
        }
        if let QemuStatus::Power(power) = &status
            && running.requested_exit.lock().is_none()
        {
            vm.set_power(power.clone());
            running.set_paused(is_stopped);
        }
        Ok(status)
    }

    /// Restarts or ends the VM if its status requires it.
    async fn handle_status(&mut self, status: Result<QemuStatus>) {
        let exit = match status {
            Ok(QemuStatus::PoweredOff) if self.restarting => return,
            Ok(QemuStatus::PoweredOff) if self.vm.dir.is_reboot_requested() => {
                self.restarting = true;
                let reset = match self.running.qmp() {
                    Ok(qmp) => qmp.execute("system_reset", json!({})).await.map(drop),
                    Err(error) => Err(error),
                };
                if let Err(error) = reset {
                    tracing::warn!(vm = %self.vm.id, %error, "failed to restart VM");
                }
                return;
            }
            Ok(QemuStatus::PoweredOff) => VmExit::off("the guest switched itself off"),
            Ok(QemuStatus::Failed(reason)) => VmExit { crashed: true, reason: reason.into() },
            Ok(QemuStatus::Power(VmPower::Paused)) if self.vm.dir.is_reboot_requested() => {
                // Either an earlier daemon ended right after the reset, or the VM was paused on request. The status
                // after a reset tells them apart.
                return self.continue_after_reset().await;
            }
            Ok(QemuStatus::Power(_) | QemuStatus::Exiting) => return,
            Err(error) => {
                return tracing::debug!(vm = %self.vm.id, %error, "failed to query VM status");
            }
        };
        self.vm.save_exit(&self.running.request_exit(exit));
        if let Ok(qmp) = self.running.qmp() {
            let _ = tokio::time::timeout(QUIT_TIMEOUT, qmp.execute("quit", json!({}))).await;
        }
        if !self.running.process.exits_within(QUIT_TIMEOUT).await {
            self.running.process.kill();
        }
    }

    /// Resumes a VM that a full disk paused. QEMU repeats the failed write, and pauses it again if that fails again.
    async fn resume_if_disk_has_space(&mut self) {
        let path = self.vm.dir.disks().path().to_owned();
        let free = tokio::task::spawn_blocking(move || {
            statvfs(&path).map(|usage| usage.blocks_available() * usage.fragment_size())
        });
        if !free.await.is_ok_and(|free| free.is_ok_and(|free| free >= MIN_RESUME_SPACE)) {
            return;
        }
        let resume = async {
            let qmp = self.running.qmp()?;
            migration_jobs::require_resumable(&qmp).await?;
            qmp.execute("cont", json!({})).await
        };
        match resume.await.map(drop) {
            Ok(()) => tracing::info!(vm = %self.vm.id, "resumed VM: the node's disk has space again"),
            Err(error) => tracing::warn!(vm = %self.vm.id, %error, "failed to resume VM after a full disk"),
        }
        self.handle_status(Self::query_status(&self.vm, &self.running).await).await;
    }

    async fn continue_after_reset(&mut self) {
        let status = match self.running.qmp() {
            Ok(qmp) => qmp.execute("query-status", json!({})).await,
            Err(_) => return,
        };
        if status.is_ok_and(|status| status["status"] == json!("prelaunch")) {
            self.continue_guest().await;
        }
    }

    async fn continue_guest(&mut self) {
        let continued = match self.running.qmp() {
            Ok(qmp) => qmp.execute("cont", json!({})).await.map(drop),
            Err(error) => Err(error),
        };
        match continued {
            Ok(()) => self.vm.dir.clear_reboot_request(),
            Err(error) => tracing::warn!(vm = %self.vm.id, %error, "failed to continue VM after reset"),
        }
    }

    /// Records why the process exited, and releases its resources.
    async fn handle_exit(self, signalled: bool) {
        let (vm, running) = (self.vm, self.running);
        let process_exit = running.process.exit();
        let requested = running.requested_exit.lock().take();
        running.qmp.take();
        running.guest_handle.lock().take();
        let consoles = running.consoles.lock().take();
        if let Some(consoles) = consoles {
            consoles.close_ports().await;
        }
        let (id, dir) = (vm.id, vm.dir.clone());
        let cleanup = move || {
            if let Err(error) = cgroup::remove(id, dir.generation()) {
                tracing::warn!(vm = %id, %error, "failed to remove VM cgroup");
            }
            dir.last_qemu_error()
        };
        let message = tokio::task::spawn_blocking(cleanup).await.ok().flatten();
        let power = if requested.is_none() && vm.dir.is_fenced() {
            // Like after a reboot of the host, it is started again if its instance is still on this node.
            VmPower::Lost
        } else {
            Self::exit_of(&vm, requested, signalled, process_exit, message).power()
        };
        vm.state.lock().running = None;
        vm.set_power(power);
        running.exited.send_replace(true);
    }

    /// Returns how a VM ended, and saves it unless that was requested.
    fn exit_of(
        vm: &Vm,
        requested: Option<VmExit>,
        signalled: bool,
        process_exit: ProcessExit,
        message: Option<String>,
    ) -> VmExit {
        requested.unwrap_or_else(|| {
            let reason =
                if signalled { "QEMU received a signal to exit".into() } else { process_exit.reason() };
            let reason = message.map(|message| format!("{reason}: {message}")).unwrap_or(reason);
            let exit = VmExit { crashed: true, reason };
            // A signal may come from the shutdown of the host, after which the VM must run again.
            if !signalled {
                vm.save_exit(&exit);
            }
            exit
        })
    }
}
