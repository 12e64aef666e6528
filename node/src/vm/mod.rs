//! The VMs of this node: QEMU processes that outlive the daemon, which re-attaches to them when it restarts. See
//! docs/decisions/0018.
//!
//! `qemu_args` turns a plan into a command line, `start` prepares and launches, `lifecycle` supervises running VMs,
//! `qmp` talks to QEMU, `consoles` gives access to serial consoles and displays, `watchdog` enforces self-fencing, `vm_dir` stores
//! everything of one VM, and `hypervisor` has the state that all VMs share.

mod backup_job;
mod cgroup;
mod config_drive;
mod console_archive;
mod console_log;
mod consoles;
mod device_models;
mod disks;
mod display_tls;
mod hotplug;
mod hypervisor;
mod kvm;
mod lifecycle;
mod migration_files;
mod migration_incoming;
mod migration_jobs;
mod migration_outgoing;
mod network_isolation;
mod process;
mod qemu_args;
mod qemu_log;
mod qemu_status;
mod qmp;
mod replica_source;
mod replica_store;
mod resource_usage;
mod snapshot;
mod start;
mod tap;
mod vm_dir;
mod vsock;
mod watchdog;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use muster_types::ids::{InstanceId, StorageId};
use muster_types::instance::FencingPolicy;
use muster_types::key::Secret;
use muster_types::migration::{
    IncomingState, MigrationConnection, MigrationDriver, MigrationMode, MigrationSettings,
};
use muster_types::node::NodeFuture;
use muster_types::replica::{ReplicaCopy, ReplicaDriver};
use muster_types::storage::Draft;
use muster_types::vm::{
    ChangeStream, ConsoleConnectionStream, DiskKind, DisplayIdentity, FoundVm, NicPlan, SnapshotDisk, VmApi,
    VmPlan, VmPower, VmUsage,
};
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

pub(crate) use self::console_archive::ConsoleArchive;
pub(crate) use self::disks::FIRMWARE_DIR;
use self::hypervisor::{Hypervisor, blocking};
pub(crate) use self::hypervisor::{NodeAddress, has_self_fencing};
pub(crate) use self::kvm::{KvmError, probe as probe_kvm};
use self::lifecycle::Vm;
use self::replica_store::ReplicaStore;
use self::start::StartMode;
use self::vm_dir::{VmExit, file};
pub(crate) use self::watchdog::ensure_watchdogs;
pub use self::watchdog::run_watchdog;
use crate::command::Commands;
use crate::fencing::FencingLease;
use crate::guest::GuestRegistry;
use crate::storage::FileStorage;

/// The VMs of this node. When dropped, the VMs continue to run unsupervised.
#[derive(Debug)]
pub(crate) struct LocalVms {
    hypervisor: Arc<Hypervisor>,
    replicas: Arc<ReplicaStore>,
}

impl LocalVms {
    /// Starts to re-attach to running VMs in the background if called within a runtime; otherwise the first call does.
    pub(crate) fn new(
        storage_dir: &Path,
        storage: Arc<FileStorage>,
        commands: &Commands,
        node: &NodeAddress<'_>,
        guest_registry: Arc<GuestRegistry>,
        console_archive: ConsoleArchive,
        fencing_lease: Arc<FencingLease>,
    ) -> Self {
        let replicas = Arc::new(ReplicaStore::new(storage_dir, storage.clone()));
        let hypervisor = Hypervisor::new(
            storage_dir,
            storage,
            commands,
            node,
            guest_registry,
            console_archive,
            fencing_lease,
        );
        let hypervisor = Arc::new(hypervisor);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let shared = hypervisor.clone();
            runtime.spawn(async move { shared.recovered().await });
        }
        Self { hypervisor, replicas }
    }

    /// Waits until the VMs of earlier daemons were recovered.
    pub(crate) async fn recovered(&self) {
        self.hypervisor.recovered().await;
    }

    /// Returns why guests cannot run under KVM, if so.
    pub(crate) fn missing_kvm(&self) -> Option<KvmError> {
        self.hypervisor.missing_kvm.clone()
    }

    /// Returns the identity that viewers verify, or `None` if this host cannot run VMs.
    pub(crate) fn display_identity(&self) -> Option<DisplayIdentity> {
        self.hypervisor.require_qemu().ok()?;
        self.hypervisor
            .display_certificates()
            .inspect_err(|error| tracing::warn!(%error, "failed to load the display certificates"))
            .ok()
            .map(|certificates| certificates.identity.clone())
    }

    /// Returns the totals of all VMs for the node's report.
    pub(crate) fn resources(&self) -> Map<String, Value> {
        let vms = self.hypervisor.all();
        let (mut cpus, mut cpu_time, mut memory, mut actual, mut active) = (0, 0.0, 0, 0, 0);
        for running in vms.iter().filter_map(|vm| vm.running()) {
            let record = running.record();
            cpus += u64::from(record.cpus);
            memory += record.memory_mb;
            active += 1;
            // A process that exits meanwhile uses nothing.
            if let (Ok(times), Ok(resident)) = (running.process.cpu_times(), running.process.memory()) {
                cpu_time += Duration::from_nanos(times.user_ns + times.system_ns).as_secs_f64();
                actual += resident >> 20;
            }
        }
        let totals = json!({
            "accelerator": if self.hypervisor.kvm { "kvm" } else { "tcg" },
            "qemu_version": self.hypervisor.qemu_version(),
            "cpu_total_instance_vcpus": cpus,
            "cpu_total_instance_cpu_time": cpu_time,
            "memory_total_instance_max": memory,
            "memory_total_instance_actual": actual,
            "instances_total": vms.len(),
            "instances_active": active,
        });
        let Value::Object(totals) = totals else { unreachable!("the literal is an object") };
        totals
    }

    /// Runs work that completes even if the caller stops waiting for it.
    fn task<T, W>(&self, work: impl FnOnce(Arc<Hypervisor>) -> W + Send + 'static) -> NodeFuture<'_, T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        let hypervisor = self.hypervisor.clone();
        Box::pin(async move {
            let work = async move {
                hypervisor.recovered().await;
                work(hypervisor).await
            };
            let done = tokio::spawn(work).await;
            done.map_err(|error| Error::Internal(format!("VM task failed: {error}")))?
        })
    }

    /// Runs work on a VM, which must exist.
    fn with_vm<T, W>(
        &self,
        id: InstanceId,
        work: impl FnOnce(Arc<Hypervisor>, Arc<Vm>) -> W + Send + 'static,
    ) -> NodeFuture<'_, T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        self.task(move |hypervisor| async move {
            let vm = hypervisor.require(id)?;
            work(hypervisor, vm).await
        })
    }
}

fn found(vm: &Arc<Vm>) -> FoundVm {
    let record = vm.running().map(|running| running.record()).or_else(|| vm.dir.record());
    FoundVm {
        id: vm.id,
        generation: record.map(|record| record.generation),
        power: vm.power(),
        fencing: vm.dir.fencing(),
        fenced_at: vm.dir.fenced_at(),
        incoming: vm.dir.is_incoming(),
    }
}

impl Drop for LocalVms {
    fn drop(&mut self) {
        self.hypervisor.detach();
    }
}

impl VmApi for LocalVms {
    fn build<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        let plan = plan.clone();
        self.task(move |hypervisor| async move {
            hypervisor.require_qemu()?;
            let vm = hypervisor.get_or_insert(plan.id);
            let _power = vm.power_lock.lock().await;
            let dir = vm.dir.clone();
            blocking(move || {
                dir.create()?;
                let disk_dir = hypervisor.acquire_disks(&dir, &plan)?;
                let built =
                    disks::build(disk_dir.path(), &plan, &disks::DiskSources::new(&hypervisor.storage));
                match hypervisor.storage.shared().filter(|_| plan.shared_storage.is_some()) {
                    Some(shared) => built.map_err(|error| shared.explain_full(error)),
                    None => built,
                }
            })
            .await
        })
    }

    fn start<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        let plan = plan.clone();
        self.with_vm(plan.id, move |hypervisor, vm| async move {
            let _power = vm.power_lock.lock().await;
            if matches!(vm.power(), VmPower::On | VmPower::Paused) && vm.running().is_some() {
                return Ok(());
            }
            if let Some(running) = vm.running() {
                vm.terminate(&running, VmExit::off("it is switched on again"), false).await?;
            }
            start::start(&hypervisor, &vm, &plan, StartMode::Boot).await
        })
    }

    fn stop(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.task(move |hypervisor| async move {
            let Ok(vm) = hypervisor.require(id) else { return Ok(()) };
            let _power = vm.power_lock.lock().await;
            let off = VmExit::off("it was switched off");
            match vm.running() {
                Some(running) => vm.terminate(&running, off, true).await,
                None => {
                    if !matches!(vm.power(), VmPower::Off { .. }) {
                        vm.save_exit(&off);
                        vm.set_power(off.power());
                    }
                    Ok(())
                }
            }
        })
    }

    fn pause(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move {
            let running = vm.require_running()?;
            running.qmp()?.execute("stop", json!({})).await?;
            // A migration that ends does not resume it any longer.
            vm.dir.clear_stopped_for_migration()?;
            vm.refresh_power(&running).await
        })
    }

    fn resume(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move {
            let running = vm.require_running()?;
            let qmp = running.qmp()?;
            migration_jobs::require_resumable(&qmp).await?;
            qmp.execute("cont", json!({})).await?;
            vm.refresh_power(&running).await
        })
    }

    fn reset(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move {
            let running = vm.require_running()?;
            // The reset fulfills a reboot that was requested before.
            vm.dir.clear_reboot_request();
            running.qmp()?.execute("system_reset", json!({})).await?;
            vm.refresh_power(&running).await
        })
    }

    fn reboot(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move {
            let qmp = vm.require_running()?.qmp()?;
            vm.dir.request_reboot()?;
            qmp.execute("system_powerdown", json!({})).await?;
            Ok(())
        })
    }

    fn request_power_off(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move {
            let qmp = vm.require_running()?.qmp()?;
            // It must not start again.
            vm.dir.clear_reboot_request();
            qmp.execute("system_powerdown", json!({})).await.map(drop)
        })
    }

    fn attach_nic<'a>(&'a self, id: InstanceId, nic: &'a NicPlan) -> NodeFuture<'a, ()> {
        let nic = nic.clone();
        self.with_vm(id, move |hypervisor, vm| async move {
            let _power = vm.power_lock.lock().await;
            match vm.running() {
                Some(running) => hotplug::attach_nic(&hypervisor, &vm, &running, &nic).await,
                // The next start includes it, and must not fail because of it.
                None => blocking(move || hypervisor.device_models()?.check_nic(&nic)).await,
            }
        })
    }

    fn remove(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.task(move |hypervisor| async move {
            let Ok(vm) = hypervisor.require(id) else { return Ok(()) };
            let _power = vm.power_lock.lock().await;
            if let Some(running) = vm.running() {
                vm.terminate(&running, VmExit::off("it is removed"), false).await?;
            }
            let (dir, archive) = (vm.dir.clone(), hypervisor.console_archive.clone());
            blocking(move || {
                // A full disk must not prevent the removal.
                if let Err(error) = archive.add(id, &dir.file(file::CONSOLE)) {
                    tracing::warn!(vm = %id, %error, "failed to archive console log");
                }
                cgroup::remove(id, dir.generation())?;
                dir.remove_all()
            })
            .await?;
            hypervisor.forget(id);
            Ok(())
        })
    }

    fn remove_shared_disks(&self, id: InstanceId, storage: StorageId) -> NodeFuture<'_, ()> {
        self.task(move |hypervisor| async move {
            blocking(move || hypervisor.storage.require_shared()?.remove(storage, id)).await
        })
    }

    fn move_to_lost_found<'a>(&'a self, id: InstanceId, reason: &'a str) -> NodeFuture<'a, Option<PathBuf>> {
        let reason = reason.to_owned();
        self.task(move |hypervisor| async move {
            let Ok(vm) = hypervisor.require(id) else { return Ok(None) };
            let _power = vm.power_lock.lock().await;
            if let Some(running) = vm.running() {
                // Another host may use its shared disks, so a stale VM must not flush its caches to them.
                let is_graceful = !vm.dir.has_shared_disks();
                vm.terminate(&running, VmExit::off("it is moved to lost+found"), is_graceful).await?;
            }
            let (dir, lost_found) = (vm.dir.clone(), hypervisor.lost_found.clone());
            let path = blocking(move || {
                cgroup::remove(id, dir.generation())?;
                if !dir.has_shared_disks() {
                    return lost_found.add(id, dir.path(), &reason);
                }
                let reason =
                    format!("{reason}. Its disks are on shared storage: {}", dir.disks().path().display());
                dir.unlink_disks()?;
                lost_found.add(id, dir.path(), &reason)
            })
            .await?;
            hypervisor.forget(id);
            Ok(Some(path))
        })
    }

    fn power(&self, id: InstanceId) -> NodeFuture<'_, Option<VmPower>> {
        Box::pin(async move {
            self.hypervisor.recovered().await;
            Ok(self.hypervisor.get(id).map(|vm| vm.power()))
        })
    }

    fn list(&self) -> NodeFuture<'_, Vec<FoundVm>> {
        Box::pin(async move {
            self.hypervisor.recovered().await;
            let vms = self.hypervisor.all();
            Ok(vms.iter().map(found).collect())
        })
    }

    fn set_fencing(&self, id: InstanceId, fencing: FencingPolicy) -> NodeFuture<'_, ()> {
        self.with_vm(id, move |hypervisor, vm| async move {
            let _power = vm.power_lock.lock().await;
            hypervisor.set_fencing(&vm, fencing).await
        })
    }

    fn acknowledge_fencing(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move { vm.dir.acknowledge_fencing() })
    }

    fn changes(&self) -> ChangeStream {
        self.hypervisor.notifier.subscribe()
    }

    fn choose_ports<'a>(&'a self, count: usize, reserved: &'a [u16]) -> NodeFuture<'a, Vec<u16>> {
        let reserved = reserved.to_vec();
        self.task(move |hypervisor| async move {
            blocking(move || hypervisor.choose_ports(count, &reserved)).await
        })
    }

    fn console(&self, id: InstanceId, max_bytes: Option<u64>) -> NodeFuture<'_, Bytes> {
        self.with_vm(id, move |_, vm| async move {
            blocking(move || console_log::read(&vm.dir.file(file::CONSOLE), max_bytes)).await
        })
    }

    fn open_console(&self, id: InstanceId) -> NodeFuture<'_, UnixStream> {
        self.with_vm(id, |_, vm| async move { vm.require_running()?.consoles()?.open_serial().await })
    }

    fn open_display(&self, id: InstanceId) -> NodeFuture<'_, UnixStream> {
        self.with_vm(id, |_, vm| async move { vm.require_running()?.consoles()?.open_display().await })
    }

    fn console_connections(&self) -> ConsoleConnectionStream {
        self.hypervisor.console_access.connections.subscribe()
    }

    fn display_password(&self, id: InstanceId) -> NodeFuture<'_, Option<Secret>> {
        self.with_vm(id, |_, vm| async move {
            // The password of an earlier run is not valid.
            vm.require_running()?;
            blocking(move || Ok(vm.dir.display_password())).await
        })
    }

    fn clear_console(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with_vm(id, |_, vm| async move {
            blocking(move || console_log::clear(&vm.dir.file(file::CONSOLE))).await
        })
    }

    fn screenshot(&self, id: InstanceId, draft: Draft) -> NodeFuture<'_, ()> {
        self.with_vm(
            id,
            move |hypervisor, vm| async move { snapshot::screenshot(&hypervisor, &vm, draft).await },
        )
    }

    fn snapshot<'a>(
        &'a self,
        id: InstanceId,
        disks: &'a [SnapshotDisk],
        compress: bool,
    ) -> NodeFuture<'a, ()> {
        let disks = disks.to_vec();
        self.with_vm(id, move |hypervisor, vm| async move {
            snapshot::snapshot(&hypervisor, &vm, &disks, compress).await
        })
    }

    fn prepare_incoming<'a>(&'a self, plan: &'a VmPlan, mode: MigrationMode) -> NodeFuture<'a, ()> {
        let plan = plan.clone();
        self.task(move |hypervisor| async move {
            let vm = hypervisor.get_or_insert(plan.id);
            let _power = vm.power_lock.lock().await;
            if let Some(running) = vm.running() {
                vm.terminate(&running, VmExit::off("it is prepared again"), false).await?;
            }
            match mode {
                MigrationMode::Live => start::start(&hypervisor, &vm, &plan, StartMode::Incoming).await,
                MigrationMode::Off => migration_incoming::prepare_off(&hypervisor, &vm, &plan).await,
            }
        })
    }

    fn connect_incoming<'a>(
        &'a self,
        id: InstanceId,
        connection: &'a MigrationConnection,
    ) -> NodeFuture<'a, UnixStream> {
        let connection = connection.clone();
        self.with_vm(id, move |_, vm| async move { migration_incoming::connect(&vm, &connection).await })
    }

    fn incoming_state(&self, id: InstanceId) -> NodeFuture<'_, Option<IncomingState>> {
        self.with_vm(id, |_, vm| async move { Ok(migration_incoming::state(&vm).await) })
    }

    fn finish_incoming(&self, id: InstanceId, resume: bool) -> NodeFuture<'_, ()> {
        self.with_vm(id, move |_, vm| async move {
            let _power = vm.power_lock.lock().await;
            migration_incoming::finish(&vm, resume).await
        })
    }

    fn migrate<'a>(
        &'a self,
        id: InstanceId,
        mode: MigrationMode,
        settings: &'a MigrationSettings,
        driver: &'a dyn MigrationDriver,
    ) -> NodeFuture<'a, u64> {
        Box::pin(async move {
            self.hypervisor.recovered().await;
            let vm = self.hypervisor.require(id)?;
            match mode {
                MigrationMode::Live => migration_outgoing::migrate(&vm, settings, driver).await,
                MigrationMode::Off => migration_files::migrate(&vm, settings, driver).await,
            }
        })
    }

    fn cancel_migration(&self, id: InstanceId, resume: bool) -> NodeFuture<'_, ()> {
        self.task(move |hypervisor| async move {
            let Some(running) = hypervisor.get(id).and_then(|vm| vm.running()) else { return Ok(()) };
            let vm = hypervisor.require(id)?;
            migration_jobs::cancel(&*running.qmp()?, &vm.dir, resume).await?;
            vm.refresh_power(&running).await
        })
    }

    fn copy_to_replica<'a>(
        &'a self,
        id: InstanceId,
        driver: &'a dyn ReplicaDriver,
    ) -> NodeFuture<'a, ReplicaCopy> {
        Box::pin(async move {
            self.hypervisor.recovered().await;
            replica_source::copy(&self.hypervisor.storage, &self.hypervisor.require(id)?, driver).await
        })
    }

    fn replica_lag(&self, id: InstanceId) -> NodeFuture<'_, Option<u64>> {
        self.with_vm(id, |_, vm| async move {
            match vm.running() {
                Some(running) => replica_source::lag(&*running.qmp()?, &running.record().disks).await,
                None => Ok(None),
            }
        })
    }

    fn receive_replica(&self, id: InstanceId, generation: i64) -> NodeFuture<'_, UnixStream> {
        Box::pin(async move { self.replicas.receive(id, generation) })
    }

    fn restore_replica<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, f64> {
        let (plan, replicas) = (plan.clone(), self.replicas.clone());
        self.task(move |hypervisor| async move {
            let vm = hypervisor.get_or_insert(plan.id);
            let _power = vm.power_lock.lock().await;
            let disks = plan.disks.iter().filter(|disk| disk.kind == DiskKind::Disk);
            let disks: Vec<String> = disks.map(|disk| disk.device.clone()).collect();
            replicas.restore(plan.id, &disks, vm.dir.clone()).await
        })
    }

    fn remove_replica(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let replicas = self.replicas.clone();
        self.task(move |_| async move { replicas.remove(id).await })
    }

    fn usage(&self, id: InstanceId) -> NodeFuture<'_, Option<VmUsage>> {
        self.with_vm(id, |hypervisor, vm| async move {
            let Some(running) = vm.running() else { return Ok(None) };
            hypervisor.require_responsive_disks(&vm.dir)?;
            resource_usage::usage(&vm.dir, &running).await.map(Some)
        })
    }
}
