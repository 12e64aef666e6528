//! The machines of this node: each a QEMU that we start, drive and find again. They outlive us.
//!
//! `hardware` turns a plan into arguments, `start` prepares and starts, `life` looks after what runs, `qmp` speaks with
//! QEMU, `folder` has everything of one machine. Only here they are known all together.

mod cgroup;
mod config_drive;
mod console;
mod disks;
mod folder;
mod hardware;
mod kvm;
mod life;
mod models;
mod plug;
mod process;
mod qmp;
mod screens;
mod snapshot;
pub(crate) mod socket;
mod start;
mod tap;
mod usage;
mod vsock;

use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use muster_types::ids::InstanceId;
use muster_types::node::{Limit, NodeFuture};
use muster_types::storage::Draft;
use muster_types::vm::{
    ChangeStream, DisplayIdentity, FoundVm, NicPlan, SnapshotDisk, VmApi, VmPlan, VmPower, VmUsage,
};
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::AbortHandle;

use self::folder::{Ended, Folder};
use self::hardware::file;
use self::life::{DEATH, Machine};
use self::models::Models;
use self::process::Process;
use self::screens::Screens;
use crate::changes::Teller;
use crate::command::{Commands, Tool};
use crate::guest::GuestRegistry;
use crate::host;
use crate::storage::FileStorage;

/// Where the ports of machines are.
const PORTS: std::ops::Range<u16> = 30000..50000;

/// How often logs are looked at whether they are too large.
const LOOK_AT_LOGS: Duration = Duration::from_secs(20);

/// How long to wait for a process that is not yet what it will be.
const BECOMING: Duration = Duration::from_millis(10);

/// How often it is looked at.
const BECOMING_MOST: usize = 300;

/// The machines of this node.
#[derive(Debug)]
pub(crate) struct LocalMachines {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Where the folders of the machines are.
    place: PathBuf,
    storage_folder: PathBuf,
    storage: Arc<FileStorage>,
    qemu: Option<PathBuf>,
    commands: Arc<Commands>,
    limits: Vec<(Limit, String)>,
    kvm: bool,
    /// Whether machines can have users of their own.
    root: bool,
    /// The node's own name and address.
    name: String,
    ip: String,
    /// Which start of the host this is.
    boot: String,
    known: Mutex<HashMap<InstanceId, Arc<Machine>>>,
    teller: Teller,
    contacts: Arc<GuestRegistry>,
    screens: OnceLock<Screens>,
    models: OnceLock<Models>,
    /// Done once what was there has been looked at.
    found: OnceCell<()>,
    starts: Semaphore,
    logs: Mutex<Option<AbortHandle>>,
}

impl LocalMachines {
    /// Nothing is looked at yet, unless this is called where somebody can do it at once.
    pub(crate) fn new(
        storage_folder: &Path,
        storage: Arc<FileStorage>,
        commands: &Commands,
        node: (&str, &str),
        contacts: Arc<GuestRegistry>,
    ) -> Self {
        let qemu = commands.path(Tool::QemuSystem).map(Path::to_owned);
        let kvm = kvm::probe();
        let missing = qemu.is_none().then(|| {
            let tool = Tool::QemuSystem;
            format!("running machines needs the program {} (Debian package {})", tool.name(), tool.package())
        });
        let slow = kvm.as_ref().err().map(|why| format!("machines are emulated, which is slow: {why}"));
        let limits = [(Limit::VmApi, missing), (Limit::Kvm, slow)];
        let inner = Arc::new(Inner {
            place: storage_folder.join("machines"),
            storage_folder: storage_folder.to_owned(),
            storage,
            qemu,
            commands: Arc::new(commands.afresh()),
            limits: limits.into_iter().filter_map(|(limit, why)| Some((limit, why?))).collect(),
            kvm: kvm.is_ok(),
            root: nix::unistd::geteuid().is_root(),
            name: node.0.to_owned(),
            ip: node.1.to_owned(),
            boot: process::boot_id(),
            known: Mutex::default(),
            teller: Teller::default(),
            contacts,
            screens: OnceLock::new(),
            models: OnceLock::new(),
            found: OnceCell::new(),
            // More at once would only wait for each other.
            starts: Semaphore::new((2 * host::cpus()).max(4)),
            logs: Mutex::default(),
        });
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let shared = inner.clone();
            runtime.spawn(async move { shared.ready().await });
        }
        Self { inner }
    }

    /// Waits until the machines of earlier daemons were found.
    pub(crate) async fn ready(&self) {
        self.inner.ready().await;
    }

    /// What machines of this node cannot do, and why.
    pub(crate) fn limits(&self) -> &[(Limit, String)] {
        &self.inner.limits
    }

    /// What viewers compare; nothing if this node runs no machines.
    pub(crate) fn screens(&self) -> Option<DisplayIdentity> {
        self.inner.require_qemu().ok()?;
        let screens = self.inner.screens();
        screens
            .inspect_err(|error| tracing::warn!(%error, "no certificates"))
            .ok()
            .map(|screens| screens.identity.clone())
    }

    /// What the machines are and have, for the node's report.
    pub(crate) fn resources(&self) -> Map<String, Value> {
        let machines: Vec<Arc<Machine>> = self.inner.known().values().cloned().collect();
        let (mut cpus, mut cpu_time, mut memory, mut actual, mut active) = (0, 0.0, 0, 0, 0);
        for live in machines.iter().filter_map(|machine| machine.live()) {
            let (record, (user, system)) = (live.record(), live.process.times());
            cpus += u64::from(record.cpus);
            memory += record.memory_mb;
            cpu_time += Duration::from_nanos(user + system).as_secs_f64();
            actual += live.process.memory() >> 20;
            active += 1;
        }
        let facts = json!({
            "accelerator": if self.inner.kvm { "kvm" } else { "tcg" },
            "cpu_total_instance_vcpus": cpus,
            "cpu_total_instance_cpu_time": cpu_time,
            "memory_total_instance_max": memory,
            "memory_total_instance_actual": actual,
            "instances_total": machines.len(),
            "instances_active": active,
        });
        if let Value::Object(facts) = facts { facts } else { Map::new() }
    }

    /// Does something that is finished even if nobody waits for it any more.
    fn task<T, W>(&self, work: impl FnOnce(Arc<Inner>) -> W + Send + 'static) -> NodeFuture<'_, T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        let inner = self.inner.clone();
        Box::pin(async move {
            let work = async move {
                inner.ready().await;
                work(inner).await
            };
            let done = tokio::spawn(work).await;
            done.map_err(|error| Error::Internal(format!("work on a machine ended early: {error}")))?
        })
    }

    /// Does something with a machine that is there.
    fn with<T, W>(
        &self,
        id: InstanceId,
        work: impl FnOnce(Arc<Inner>, Arc<Machine>) -> W + Send + 'static,
    ) -> NodeFuture<'_, T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        self.task(move |inner| async move {
            let machine = inner.require(id)?;
            work(inner, machine).await
        })
    }

    /// Tells a machine that is on one thing.
    fn tell(&self, id: InstanceId, command: &'static str) -> NodeFuture<'_, ()> {
        self.with(id, move |_, machine| async move {
            let live = machine.require_live()?;
            live.qmp()?.execute(command, json!({})).await?;
            machine.refresh(&live).await
        })
    }
}

impl Drop for LocalMachines {
    fn drop(&mut self) {
        for machine in self.inner.known().values() {
            machine.leave();
        }
        let logs = self.inner.logs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = logs.map(|logs| logs.abort());
    }
}

impl Inner {
    fn known(&self) -> MutexGuard<'_, HashMap<InstanceId, Arc<Machine>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn require(&self, id: InstanceId) -> Result<Arc<Machine>> {
        self.known().get(&id).cloned().ok_or_else(|| Error::not_found("machine"))
    }

    fn require_qemu(&self) -> Result<&Path> {
        let why = self.limits.iter().find(|(limit, _)| *limit == Limit::VmApi).map(|(_, why)| why.clone());
        self.qemu.as_deref().ok_or_else(|| Error::Conflict(why.unwrap_or_default()))
    }

    /// The devices that QEMU has. Blocks.
    fn models(&self) -> Result<&Models> {
        if let Some(models) = self.models.get() {
            return Ok(models);
        }
        let asked = Models::ask(&self.commands)?;
        Ok(self.models.get_or_init(|| asked))
    }

    fn folder(&self, id: InstanceId) -> Folder {
        Folder::new(self.place.join(id.to_string()))
    }

    fn machine(&self, id: InstanceId, folder: Folder, power: VmPower) -> Machine {
        Machine::new(id, folder, power, self.teller.clone(), self.contacts.clone())
    }

    /// Waits until what was there at the start has been looked at.
    async fn ready(self: &Arc<Self>) {
        self.found.get_or_init(|| self.look()).await;
    }

    /// Finds the machines of earlier daemons, and takes over those that run.
    async fn look(self: &Arc<Self>) {
        let entries = std::fs::read_dir(&self.place).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        // Nothing else is ours, whatever it is.
        let ids: Vec<InstanceId> = names
            .filter_map(|name| name.parse().ok().filter(|id: &InstanceId| id.to_string() == name))
            .collect();
        let mut taken = tokio::task::JoinSet::new();
        for id in ids {
            let folder = self.folder(id);
            // After a start of the host a number is anybody's.
            let record = folder.record().filter(|record| record.boot == self.boot);
            let running = match record.zip(folder.pid()) {
                Some((record, pid)) => {
                    self.recognise(id, &folder, pid).await.map(|process| (record, process))
                }
                None => None,
            };
            let power = if running.is_some() { VmPower::On } else { folder.power(&self.boot) };
            let machine = Arc::new(self.machine(id, folder, power));
            self.known().insert(id, machine.clone());
            if let Some((record, process)) = running {
                taken.spawn(async move { machine.adopt(process, record).await });
            }
        }
        let count = taken.len();
        taken.join_all().await;
        if count > 0 {
            tracing::info!(count, "machines that run were found again");
        }
        let look = tokio::spawn(look_at_logs(Arc::downgrade(self))).abort_handle();
        *self.logs.lock().unwrap_or_else(PoisonError::into_inner) = Some(look);
    }

    /// The process of a machine, if it is one.
    async fn recognise(&self, id: InstanceId, folder: &Folder, pid: u32) -> Option<Process> {
        for _ in 0..BECOMING_MOST {
            match Process::recognise(pid, id) {
                // It left a daemon that was killed just then, and is about to become QEMU.
                Ok(None) if process::is_in(pid, folder.path()) => tokio::time::sleep(BECOMING).await,
                Ok(process) => return process,
                Err(error) => {
                    tracing::warn!(machine = %id, pid, %error, "a machine's process cannot be looked at");
                    return None;
                }
            }
        }
        // Held before it is looked at once more, so that it cannot be another one by then. It has run no guest yet.
        if let Ok(Some(process)) = Process::hold(pid)
            && process::is_in(pid, folder.path())
        {
            tracing::warn!(machine = %id, pid, "a process in the folder of a machine did not become its QEMU");
            process.kill();
            process.ends_within(DEATH).await;
        }
        None
    }

    fn choose_ports(&self, count: usize, taken: &[u16]) -> Result<Vec<u16>> {
        let mut used: BTreeSet<u16> = taken.iter().copied().collect();
        for live in self.known().values().filter_map(|machine| machine.live()) {
            let ports = live.record().ports;
            used.extend([Some(ports.console), Some(ports.vdi), ports.vdi_tls].into_iter().flatten());
        }
        let mut chosen = Vec::with_capacity(count);
        let range = u128::from(PORTS.end - PORTS.start);
        // Enough to find the last free one among all.
        for _ in 0..1_000_000 {
            if chosen.len() == count {
                return Ok(chosen);
            }
            let offset = u16::try_from(uuid::Uuid::new_v4().as_u128() % range).unwrap_or(0);
            let port = PORTS.start + offset;
            if !used.contains(&port) && TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
                used.insert(port);
                chosen.push(port);
            }
        }
        Err(Error::Unavailable("the node has no free ports for another machine".into()))
    }
}

/// Keeps the logs small, for as long as somebody is interested in the machines.
async fn look_at_logs(inner: std::sync::Weak<Inner>) {
    loop {
        tokio::time::sleep(LOOK_AT_LOGS).await;
        let Some(inner) = inner.upgrade() else { return };
        let running: Vec<Arc<Machine>> =
            inner.known().values().filter(|machine| machine.live().is_some()).cloned().collect();
        if running.is_empty() {
            continue;
        }
        let trimmed = blocking(move || {
            for machine in running {
                for log in [file::CONSOLE, folder::LOG] {
                    if let Err(error) = console::trim(&machine.folder.file(log)) {
                        tracing::warn!(machine = %machine.id, log, %error, "a log is not cut");
                    }
                }
            }
            Ok(())
        });
        if let Err(error) = trimmed.await {
            tracing::warn!(%error, "logs are not looked at");
        }
    }
}

/// Does something that blocks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::Internal(format!("work on a machine ended early: {error}")))?
}

impl VmApi for LocalMachines {
    fn build<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        let plan = plan.clone();
        self.task(move |inner| async move {
            inner.require_qemu()?;
            let id = plan.id;
            let folder = inner.folder(id);
            let machine = {
                let mut known = inner.known();
                let fresh = || {
                    let power = folder.power(&inner.boot);
                    Arc::new(inner.machine(id, folder.clone(), power))
                };
                known.entry(id).or_insert_with(fresh).clone()
            };
            let _turn = machine.turn.lock().await;
            let storage = inner.storage.clone();
            blocking(move || {
                folder.make()?;
                disks::build(folder.path(), &plan, &disks::Sources::new(&storage))
            })
            .await
        })
    }

    fn start<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        let plan = plan.clone();
        self.with(plan.id, move |inner, machine| async move {
            let _turn = machine.turn.lock().await;
            if matches!(machine.power(), VmPower::On | VmPower::Paused) && machine.live().is_some() {
                return Ok(());
            }
            if let Some(live) = machine.live() {
                machine.end(&live, Ended::off("it is switched on again"), false).await?;
            }
            start::start(&inner, &machine, &plan).await
        })
    }

    fn stop(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.task(move |inner| async move {
            let Ok(machine) = inner.require(id) else { return Ok(()) };
            let _turn = machine.turn.lock().await;
            let off = Ended::off("it was switched off");
            match machine.live() {
                Some(live) => machine.end(&live, off, true).await,
                None => {
                    if !matches!(machine.power(), VmPower::Off { .. }) {
                        machine.note_end(&off);
                        machine.set_power(off.power());
                    }
                    Ok(())
                }
            }
        })
    }

    fn pause(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.tell(id, "stop")
    }

    fn resume(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.tell(id, "cont")
    }

    fn reset(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with(id, |_, machine| async move {
            let live = machine.require_live()?;
            // Whatever it was asked before, this is its restart.
            machine.folder.forget_reboot();
            live.qmp()?.execute("system_reset", json!({})).await?;
            machine.refresh(&live).await
        })
    }

    fn reboot(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with(id, |_, machine| async move {
            let qmp = machine.require_live()?.qmp()?;
            machine.folder.wish_reboot()?;
            qmp.execute("system_powerdown", json!({})).await?;
            Ok(())
        })
    }

    fn plug<'a>(&'a self, id: InstanceId, nic: &'a NicPlan) -> NodeFuture<'a, ()> {
        let nic = nic.clone();
        self.with(id, move |inner, machine| async move {
            let _turn = machine.turn.lock().await;
            match machine.live() {
                Some(live) => plug::plug(&inner, &machine, &live, &nic).await,
                // Its next start takes it along, and must not fail because of it.
                None => blocking(move || inner.models()?.check_nic(&nic)).await,
            }
        })
    }

    fn remove(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.task(move |inner| async move {
            let Ok(machine) = inner.require(id) else { return Ok(()) };
            let _turn = machine.turn.lock().await;
            if let Some(live) = machine.live() {
                machine.end(&live, Ended::off("it is removed"), false).await?;
            }
            let gone = machine.clone();
            blocking(move || {
                cgroup::remove(gone.id)?;
                gone.folder.remove_all()
            })
            .await?;
            inner.known().remove(&id);
            inner.teller.tell(id);
            Ok(())
        })
    }

    fn power(&self, id: InstanceId) -> NodeFuture<'_, Option<VmPower>> {
        Box::pin(async move {
            self.inner.ready().await;
            Ok(self.inner.known().get(&id).map(|machine| machine.power()))
        })
    }

    fn find(&self) -> NodeFuture<'_, Vec<FoundVm>> {
        Box::pin(async move {
            self.inner.ready().await;
            let known = self.inner.known();
            Ok(known.iter().map(|(id, machine)| FoundVm { id: *id, power: machine.power() }).collect())
        })
    }

    fn changes(&self) -> ChangeStream {
        self.inner.teller.listen()
    }

    fn choose_ports<'a>(&'a self, count: usize, taken: &'a [u16]) -> NodeFuture<'a, Vec<u16>> {
        let taken = taken.to_vec();
        self.task(move |inner| async move { blocking(move || inner.choose_ports(count, &taken)).await })
    }

    fn console(&self, id: InstanceId, most: Option<u64>) -> NodeFuture<'_, Bytes> {
        self.with(id, move |_, machine| async move {
            blocking(move || console::read(&machine.folder.file(file::CONSOLE), most)).await
        })
    }

    fn clear_console(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        self.with(id, |_, machine| async move {
            blocking(move || console::clear(&machine.folder.file(file::CONSOLE))).await
        })
    }

    fn screenshot(&self, id: InstanceId, draft: Draft) -> NodeFuture<'_, ()> {
        self.with(
            id,
            move |inner, machine| async move { snapshot::screenshot(&inner, &machine, draft).await },
        )
    }

    fn snapshot<'a>(
        &'a self,
        id: InstanceId,
        disks: &'a [SnapshotDisk],
        compress: bool,
    ) -> NodeFuture<'a, ()> {
        let disks = disks.to_vec();
        self.with(id, move |inner, machine| async move {
            snapshot::snapshot(&inner, &machine, &disks, compress).await
        })
    }

    fn usage(&self, id: InstanceId) -> NodeFuture<'_, Option<VmUsage>> {
        self.with(id, |_, machine| async move {
            match machine.live() {
                Some(live) => usage::usage(&machine.folder, &live).await.map(Some),
                None => Ok(None),
            }
        })
    }
}
