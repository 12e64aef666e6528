//! Simulated VMs. They exist only in memory but follow the same rules as real ones, with consoles, screenshots and disk
//! snapshots that are valid images.
//!
//! Which VMs exist and which are running is persisted as the names of empty files. The end of the process counts as a
//! reboot of the host: the next process reports the VMs that were running as lost.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use muster_types::ids::{BlobId, InstanceId, StorageId};
use muster_types::instance::FencingPolicy;
use muster_types::key::Secret;
use muster_types::migration::{
    IncomingState, MigrationConnection, MigrationDriver, MigrationMode, MigrationSettings,
};
use muster_types::node::NodeFuture;
use muster_types::replica::{ReplicaCopy, ReplicaDriver};
use muster_types::storage::Draft;
use muster_types::vm::{
    ChangeStream, ConsoleConnectionStream, DiskKind, DiskPlan, FoundVm, NicPlan, SnapshotDisk, VmApi, VmPlan,
    VmPower, VmUsage,
};
use muster_types::{Error, Result};
use parking_lot::Mutex;
use uuid::Uuid;

use super::guests::SimulatedGuests;
use super::script::SimulationScript;
use super::vm::{SimulatedVm, load, never_started, ports};
use crate::change_notifier::ChangeNotifier;
use crate::console_connections::{ConnectionSampler, ConsoleConnectionLog};
use crate::files::{create_dir, io_error};
use crate::lost_found::LostFound;
use crate::storage::FileStorage;

/// The port range of consoles.
const CONSOLE_PORTS: std::ops::Range<u16> = 30000..50000;

/// What a simulated display sends first: the version of VNC.
const VNC_GREETING: &str = "RFB 003.008\n";

/// The VMs of a simulated node.
#[derive(Debug)]
pub(super) struct SimulatedVms {
    pub(super) storage: Arc<FileStorage>,
    /// Contains the files `<id>.on`, `<id>.off` and `<id>.replica`.
    pub(super) dir: PathBuf,
    pub(super) change_notifier: ChangeNotifier,
    console_connections: ConsoleConnectionLog,
    pub(super) state: Arc<Mutex<VmsState>>,
    pub(super) guests: SimulatedGuests,
    lost_found: LostFound,
}

#[derive(Debug, Default)]
pub(super) struct VmsState {
    pub(super) vms: BTreeMap<InstanceId, SimulatedVm>,
    pub(super) script: SimulationScript,
    /// The console output of a boot, shared by all VMs.
    console_text: Option<Arc<str>>,
}

/// The total resources of the VMs of a node.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct VmTotals {
    pub(super) total: u64,
    pub(super) active: u64,
    /// Of the active VMs.
    pub(super) cpus: u64,
    /// Of the active VMs.
    pub(super) memory_mb: u64,
}

impl SimulatedVms {
    pub(super) fn new(
        storage: Arc<FileStorage>,
        dir: PathBuf,
        guests: SimulatedGuests,
        lost_found: LostFound,
    ) -> Self {
        let vms = load(&dir).into_iter().map(|(id, power)| (id, SimulatedVm::new(None, power)));
        let state = VmsState { vms: vms.collect(), ..VmsState::default() };
        Self {
            storage,
            dir,
            change_notifier: ChangeNotifier::default(),
            console_connections: ConsoleConnectionLog::default(),
            state: Arc::new(Mutex::new(state)),
            guests,
            lost_found,
        }
    }

    /// Persists the power state of a VM, or its removal.
    pub(super) fn save(&self, id: InstanceId, power: Option<&VmPower>) {
        let kind = power.map(|power| match power {
            VmPower::On | VmPower::Paused | VmPower::Lost => "on",
            VmPower::Off { .. } | VmPower::Crashed { .. } => "off",
        });
        let path = |kind: &str| self.dir.join(format!("{id}.{kind}"));
        // The new file is created first so that there always is one.
        let saved = kind.map_or(Ok(()), |kind| {
            fs::create_dir_all(&self.dir)?;
            File::create(path(kind)).map(drop)
        });
        if let Err(error) = saved {
            tracing::warn!(%error, instance = %id, "failed to save the state of a simulated VM");
        }
        for old in ["on", "off"].into_iter().filter(|old| Some(*old) != kind) {
            match fs::remove_file(path(old)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, instance = %id, "failed to remove the old state of a simulated VM");
                }
                _ => {}
            }
        }
    }

    pub(super) fn set_script(&self, script: SimulationScript) {
        let mut state = self.state.lock();
        state.console_text = script.console_text.as_deref().map(Arc::from);
        state.script = script;
    }

    /// Reports connections to the port of a VM's serial console.
    pub(super) fn connect_console(&self, id: InstanceId, source: SocketAddr, count: usize) {
        let sampler = ConnectionSampler::new(id, self.console_connections.clone());
        (0..count).for_each(|_| sampler.record(source));
    }

    pub(super) fn plan(&self, id: InstanceId) -> Option<VmPlan> {
        self.state.lock().vms.get(&id).and_then(|vm| vm.plan.clone())
    }

    pub(super) fn ids(&self) -> Vec<InstanceId> {
        self.state.lock().vms.keys().copied().collect()
    }

    /// Changes the running VMs that `which` selects to a power state without a process.
    pub(super) fn terminate(&self, which: impl Fn(InstanceId) -> bool, power: &VmPower) {
        let mut terminated = Vec::new();
        for (id, vm) in &mut self.state.lock().vms {
            if which(*id) && vm.is_active() {
                vm.power = power.clone();
                vm.close_connections();
                terminated.push(*id);
            }
        }
        for id in terminated {
            self.guests.power_off(id);
            self.save(id, Some(power));
            self.change_notifier.notify(id);
        }
    }

    pub(super) fn totals(&self) -> VmTotals {
        let state = self.state.lock();
        let total = VmTotals { total: state.vms.len() as u64, ..VmTotals::default() };
        let active = state.vms.values().filter(|vm| vm.is_active());
        active.fold(total, |totals, vm| VmTotals {
            active: totals.active + 1,
            cpus: totals.cpus + vm.plan.as_ref().map_or(0, |plan| u64::from(plan.cpus)),
            memory_mb: totals.memory_mb + vm.plan.as_ref().map_or(0, |plan| plan.memory_mb),
            ..totals
        })
    }

    /// Updates a VM. If its power state changes, saves it and notifies the guest and the subscriber.
    pub(super) fn update<T>(
        &self,
        id: InstanceId,
        update: impl FnOnce(&mut SimulatedVm) -> Result<T>,
    ) -> Result<T> {
        let mut state = self.state.lock();
        let vm = state.vms.get_mut(&id).ok_or_else(|| Error::not_found("VM"))?;
        let before = vm.power.clone();
        let result = update(vm);
        if !vm.is_active() {
            vm.close_connections();
        }
        let changed = (vm.power != before).then(|| vm.power.clone());
        let plan = vm.plan.clone();
        drop(state);
        if let Some(power) = changed {
            self.guests.apply_power(id, &before, &power, plan.as_ref());
            self.save(id, Some(&power));
            self.change_notifier.notify(id);
        }
        result
    }

    /// Returns an error if the base of a disk is missing or too large.
    fn require_base(&self, disk: &DiskPlan) -> Result<()> {
        let Some(base) = disk.base else { return Ok(()) };
        let conversion = self.storage.conversion(base)?;
        let conversion = conversion.ok_or_else(|| missing("the conversion", base))?;
        let (device, needed) = (&disk.device, conversion.facts.virtual_size);
        match disk.size.filter(|size| disk.kind == DiskKind::Disk && *size < needed) {
            Some(size) => Err(Error::Invalid(format!(
                "disk {device} of {size} bytes is smaller than its base of {needed} bytes"
            ))),
            None => Ok(()),
        }
    }

    /// Acquires the disks of a VM on shared storage: an empty file. Returns whether they existed.
    fn acquire_shared_disks(&self, plan: &VmPlan) -> Result<bool> {
        let Some(storage) = plan.shared_storage else { return Ok(false) };
        let disks = self.storage.require_shared()?.acquire(storage, plan.id, plan.generation)?.join("disks");
        let existed = disks.exists();
        let created = File::options().append(true).create(true).open(disks);
        created.map_err(io_error("failed to create simulated disks"))?;
        Ok(existed)
    }

    fn build_vm(&self, plan: &VmPlan) -> Result<()> {
        if let Some(reason) = self.state.lock().script.build_error.clone() {
            return Err(Error::Conflict(reason));
        }
        if let Some(vm) = self.state.lock().vms.get_mut(&plan.id) {
            if !vm.is_active() {
                vm.plan = Some(without_drive_files(plan));
            }
            return Ok(());
        }
        if !self.acquire_shared_disks(plan)? {
            plan.disks.iter().try_for_each(|disk| self.require_base(disk))?;
        }
        if let Some(template) = plan.nvram_template.filter(|_| plan.uefi)
            && self.storage.blob(template).is_none()
        {
            return Err(missing("the file", template));
        }
        let power = never_started();
        self.save(plan.id, Some(&power));
        self.state.lock().vms.insert(plan.id, SimulatedVm::new(Some(without_drive_files(plan)), power));
        Ok(())
    }

    async fn start_vm(&self, plan: &VmPlan) -> Result<()> {
        self.acquire_shared_disks(plan)?;
        let (duration, error) = {
            let state = self.state.lock();
            let vm = state.vms.get(&plan.id).ok_or_else(|| Error::not_found("VM"))?;
            if vm.is_active() {
                return Ok(());
            }
            state.require_ports(plan)?;
            (state.script.start_duration, state.script.start_error.clone())
        };
        if !duration.is_zero() {
            tokio::time::sleep(duration).await;
        }
        if let Some(reason) = error {
            return Err(Error::Conflict(reason));
        }
        let console = {
            let state = self.state.lock();
            state.require_ports(plan)?;
            state.console_text.clone()
        };
        self.update(plan.id, |vm| {
            vm.plan = Some(without_drive_files(plan));
            vm.power = VmPower::On;
            vm.started = Instant::now();
            vm.display_password = Secret::new(Uuid::new_v4().simple().to_string());
            vm.boot(console);
            Ok(())
        })
    }

    /// Reboots the guest of an active VM if `condition` holds.
    fn reboot_if(&self, id: InstanceId, condition: impl FnOnce(&SimulatedVm) -> bool) -> Result<()> {
        let console = self.state.lock().console_text.clone();
        let rebooted = self.update(id, |vm| {
            vm.require_active()?;
            let reboots = condition(vm);
            if reboots {
                vm.boot(console);
            }
            Ok(reboots)
        })?;
        if rebooted {
            self.guests.reboot(id);
        }
        Ok(())
    }

    fn free_ports(&self, count: usize, reserved: &[u16]) -> Result<Vec<u16>> {
        let mut used: BTreeSet<u16> = reserved.iter().copied().collect();
        used.extend(self.state.lock().vms.values().flat_map(SimulatedVm::ports));
        let size = u128::from(CONSOLE_PORTS.end - CONSOLE_PORTS.start);
        let begin = CONSOLE_PORTS.start
            + u16::try_from(Uuid::new_v4().as_u128() % size).expect("less than the size of CONSOLE_PORTS");
        let free =
            (begin..CONSOLE_PORTS.end).chain(CONSOLE_PORTS.start..begin).filter(|port| !used.contains(port));
        let chosen: Vec<u16> = free.take(count).collect();
        if chosen.len() == count {
            Ok(chosen)
        } else {
            Err(Error::Unavailable("the node has no free ports for another VM".into()))
        }
    }
}

impl VmsState {
    /// Returns an error if a running VM uses one of the ports.
    fn require_ports(&self, plan: &VmPlan) -> Result<()> {
        let others = self.vms.iter().filter(|(id, other)| **id != plan.id && other.is_active());
        let wanted: Vec<u16> = ports(plan.ports).collect();
        match others.flat_map(|(_, other)| other.ports()).find(|port| wanted.contains(port)) {
            Some(port) => Err(Error::PortInUse(format!("console port {port} is in use"))),
            None => Ok(()),
        }
    }
}

/// Writes the output of a guest, and then returns its input like a terminal, until the user leaves.
fn echo(mut stream: &UnixStream, output: &str) {
    let mut buffer = [0; 1024];
    let mut written = stream.write_all(output.as_bytes());
    while let (Ok(()), Ok(size @ 1..)) = (&written, stream.read(&mut buffer)) {
        written = stream.write_all(&buffer[..size]);
    }
}

/// Returns a plan without the contents of the config drive.
pub(super) fn without_drive_files(plan: &VmPlan) -> VmPlan {
    VmPlan { config_drive: plan.config_drive.as_ref().map(|_| Vec::new()), ..plan.clone() }
}

fn missing(what: &str, blob: BlobId) -> Error {
    Error::Unavailable(format!("{what} of blob {blob} is not on this node"))
}

impl SimulatedVms {
    /// Opens a connection to a console that sends a text, and then everything that it receives.
    fn open_echo(&self, id: InstanceId, text: impl FnOnce(&SimulatedVm) -> String) -> Result<UnixStream> {
        let (text, (guest, user)) = self.update(id, |vm| {
            vm.require_active()?;
            let (guest, user) = UnixStream::pair().map_err(io_error("failed to create a socket pair"))?;
            let guest = Arc::new(guest);
            vm.add_connection(&guest);
            Ok((text(vm), (guest, user)))
        })?;
        user.set_nonblocking(true).map_err(io_error("failed to configure a socket"))?;
        std::thread::spawn(move || echo(&guest, &text));
        Ok(user)
    }
}

impl VmApi for SimulatedVms {
    fn build<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        Box::pin(async { self.build_vm(plan) })
    }

    fn start<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        Box::pin(self.start_vm(plan))
    }

    fn stop(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let stopped = self.update(id, |vm| {
            if !matches!(vm.power, VmPower::Off { .. }) {
                vm.power = VmPower::Off { reason: "it was switched off".into() };
            }
            Ok(())
        });
        let result = match stopped {
            Err(Error::NotFound(_)) => Ok(()),
            other => other,
        };
        Box::pin(async { result })
    }

    fn pause(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.update(id, |vm| {
            vm.require_active()?;
            vm.power = VmPower::Paused;
            Ok(())
        });
        Box::pin(async { result })
    }

    fn resume(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.update(id, |vm| {
            vm.require_active()?;
            vm.power = VmPower::On;
            Ok(())
        });
        Box::pin(async { result })
    }

    fn reset(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.reboot_if(id, |_| true);
        Box::pin(async { result })
    }

    fn reboot(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        // A paused guest does not receive the request.
        let result = self.reboot_if(id, |vm| vm.power == VmPower::On);
        Box::pin(async { result })
    }

    fn request_power_off(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.update(id, |vm| {
            vm.require_active()?;
            // A paused guest does not receive the request.
            if vm.power == VmPower::On {
                vm.power = VmPower::Off { reason: "the guest switched itself off".into() };
            }
            Ok(())
        });
        Box::pin(async { result })
    }

    fn attach_nic<'a>(&'a self, id: InstanceId, nic: &'a NicPlan) -> NodeFuture<'a, ()> {
        let result = self.update(id, |vm| {
            // Without a plan, the interface is part of the next start.
            if let Some(plan) = &mut vm.plan
                && plan.nics.iter().all(|other| other.interface != nic.interface)
            {
                plan.nics.push(nic.clone());
            }
            Ok(())
        });
        Box::pin(async { result })
    }

    fn remove(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let removed = self.state.lock().vms.remove(&id);
        if removed.is_some() {
            self.guests.remove(id);
            self.save(id, None);
            self.change_notifier.notify(id);
        }
        Box::pin(async { Ok(()) })
    }

    fn remove_shared_disks(&self, id: InstanceId, storage: StorageId) -> NodeFuture<'_, ()> {
        let removed = self.storage.require_shared().and_then(|shared| shared.remove(storage, id));
        Box::pin(async { removed })
    }

    fn move_to_lost_found<'a>(&'a self, id: InstanceId, reason: &'a str) -> NodeFuture<'a, Option<PathBuf>> {
        Box::pin(async move {
            if !self.state.lock().vms.contains_key(&id) {
                return Ok(None);
            }
            self.remove(id).await?;
            // A simulated VM has no directory.
            let dir = self.dir.join(id.to_string());
            create_dir(&dir)?;
            self.lost_found.add(id, &dir, reason).map(Some)
        })
    }

    fn power(&self, id: InstanceId) -> NodeFuture<'_, Option<VmPower>> {
        let power = self.state.lock().vms.get(&id).map(|vm| vm.power.clone());
        Box::pin(async { Ok(power) })
    }

    fn list(&self) -> NodeFuture<'_, Vec<FoundVm>> {
        let state = self.state.lock();
        let found = state.vms.iter();
        let found = found.map(|(id, vm)| FoundVm {
            id: *id,
            generation: vm.plan.as_ref().map(|plan| plan.generation),
            power: vm.power.clone(),
            fencing: vm.plan.as_ref().map_or(FencingPolicy::None, |plan| plan.fencing),
            fenced_at: None,
            incoming: vm.incoming.is_some(),
        });
        let found = found.collect();
        Box::pin(async { Ok(found) })
    }

    fn set_fencing(&self, id: InstanceId, fencing: FencingPolicy) -> NodeFuture<'_, ()> {
        if let Some(plan) = self.state.lock().vms.get_mut(&id).and_then(|vm| vm.plan.as_mut()) {
            plan.fencing = fencing;
        }
        Box::pin(async { Ok(()) })
    }

    fn acknowledge_fencing(&self, _: InstanceId) -> NodeFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn changes(&self) -> ChangeStream {
        self.change_notifier.subscribe()
    }

    fn choose_ports<'a>(&'a self, count: usize, reserved: &'a [u16]) -> NodeFuture<'a, Vec<u16>> {
        let chosen = self.free_ports(count, reserved);
        Box::pin(async { chosen })
    }

    fn console(&self, id: InstanceId, max_bytes: Option<u64>) -> NodeFuture<'_, Bytes> {
        let text = self.state.lock().vms.get(&id).map(SimulatedVm::console).unwrap_or_default().into_bytes();
        // A limit above the address space has no effect.
        let max_bytes = max_bytes.and_then(|max| usize::try_from(max).ok());
        let start = max_bytes.map_or(0, |max| text.len().saturating_sub(max));
        Box::pin(async move { Ok(Bytes::from(text).slice(start..)) })
    }

    fn open_console(&self, id: InstanceId) -> NodeFuture<'_, UnixStream> {
        let opened = self.open_echo(id, SimulatedVm::console);
        Box::pin(async { opened })
    }

    fn open_display(&self, id: InstanceId) -> NodeFuture<'_, UnixStream> {
        let opened = self.open_echo(id, |_| VNC_GREETING.to_owned());
        Box::pin(async { opened })
    }

    fn console_connections(&self) -> ConsoleConnectionStream {
        self.console_connections.subscribe()
    }

    fn display_password(&self, id: InstanceId) -> NodeFuture<'_, Option<Secret>> {
        let password = self.update(id, |vm| {
            vm.require_active()?;
            Ok(Some(vm.display_password.clone()))
        });
        Box::pin(async { password })
    }

    fn clear_console(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.update(id, |vm| {
            vm.boots.clear();
            Ok(())
        });
        Box::pin(async { result })
    }

    fn screenshot(&self, id: InstanceId, draft: Draft) -> NodeFuture<'_, ()> {
        Box::pin(self.take_screenshot(id, draft))
    }

    fn snapshot<'a>(
        &'a self,
        id: InstanceId,
        disks: &'a [SnapshotDisk],
        _compress: bool,
    ) -> NodeFuture<'a, ()> {
        Box::pin(self.take_snapshot(id, disks))
    }

    fn prepare_incoming<'a>(&'a self, plan: &'a VmPlan, mode: MigrationMode) -> NodeFuture<'a, ()> {
        let prepared = self.prepare_migration(plan, mode);
        Box::pin(async { prepared })
    }

    fn connect_incoming<'a>(
        &'a self,
        id: InstanceId,
        connection: &'a MigrationConnection,
    ) -> NodeFuture<'a, UnixStream> {
        let connected = self.accept_migration(id, connection);
        Box::pin(async { connected })
    }

    fn incoming_state(&self, id: InstanceId) -> NodeFuture<'_, Option<IncomingState>> {
        let state = self.update(id, |vm| Ok(vm.incoming.clone()));
        Box::pin(async { state })
    }

    fn finish_incoming(&self, id: InstanceId, resume: bool) -> NodeFuture<'_, ()> {
        let finished = self.finish_migration(id, resume);
        Box::pin(async { finished })
    }

    fn migrate<'a>(
        &'a self,
        id: InstanceId,
        mode: MigrationMode,
        _settings: &'a MigrationSettings,
        driver: &'a dyn MigrationDriver,
    ) -> NodeFuture<'a, u64> {
        Box::pin(self.run_migration(id, mode, driver))
    }

    fn cancel_migration(&self, _: InstanceId, _resume: bool) -> NodeFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn copy_to_replica<'a>(
        &'a self,
        id: InstanceId,
        driver: &'a dyn ReplicaDriver,
    ) -> NodeFuture<'a, ReplicaCopy> {
        Box::pin(self.send_copy(id, driver))
    }

    fn replica_lag(&self, _id: InstanceId) -> NodeFuture<'_, Option<u64>> {
        let lag = self.state.lock().script.replica_lag;
        Box::pin(async move { Ok(lag) })
    }

    fn receive_replica(&self, id: InstanceId, generation: i64) -> NodeFuture<'_, UnixStream> {
        Box::pin(async move { self.receive_copy(id, generation) })
    }

    fn restore_replica<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, f64> {
        Box::pin(async { self.seal_replica(plan.id) })
    }

    fn remove_replica(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        Box::pin(async move { self.delete_replica(id) })
    }

    fn usage(&self, id: InstanceId) -> NodeFuture<'_, Option<VmUsage>> {
        let mut state = self.state.lock();
        let usage = state.vms.get_mut(&id).filter(|vm| vm.is_active()).map(SimulatedVm::usage);
        Box::pin(async { Ok(usage) })
    }
}
