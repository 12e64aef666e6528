//! Simulated machines: they run in the memory of this process only, and obey the same rules as real ones. They compute
//! nothing, but show a console and a screen, and hand out copies of disks that are images.
//!
//! That they were built and whether they were on is remembered by the names of empty files. To them the end of this
//! process is that of their host: the next one finds those lost that were on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use muster_types::ids::{BlobId, InstanceId};
use muster_types::node::NodeFuture;
use muster_types::storage::Draft;
use muster_types::vm::{
    ChangeStream, ConsolePorts, DiskKind, DiskPlan, FoundVm, NicPlan, PORT_TAKEN, SnapshotDisk, VmApi,
    VmPlan, VmPower, VmUsage,
};
use muster_types::{Error, Result};
use uuid::Uuid;

use super::Script;
use super::guests::SimulatedGuests;
use super::screen;
use crate::changes::Teller;
use crate::image::qcow2_writer;
use crate::storage::{FileStorage, failed};

/// Where the ports of machines are.
const PORTS: std::ops::Range<u16> = 30000..50000;

/// How many boots a console remembers.
const MOST_BOOTS: usize = 16;

/// What the memory of a simulated firmware holds, in bytes.
const NVRAM: usize = 64 << 10;

/// The machines of a simulated node.
#[derive(Debug)]
pub(super) struct SimulatedMachines {
    storage: Arc<FileStorage>,
    /// What is remembered: `<id>.on`, `<id>.off`.
    folder: PathBuf,
    teller: Teller,
    state: Mutex<State>,
    guests: SimulatedGuests,
}

#[derive(Debug, Default)]
struct State {
    machines: BTreeMap<InstanceId, Machine>,
    script: Script,
    /// What consoles show after a start, shared by all that do.
    console: Option<Arc<str>>,
}

#[derive(Debug)]
struct Machine {
    /// Without the contents of the config drive, which nobody reads. Nothing for one that was remembered, until it is
    /// built or started again.
    plan: Option<VmPlan>,
    power: VmPower,
    /// When it was switched on the last time.
    started: Instant,
    /// What its console showed: the usual text, or another one, for each time that it booted.
    boots: Vec<Option<Arc<str>>>,
    /// How many copies were made of its disks.
    snapshots: u64,
    /// How often somebody asked what it used.
    asked: u64,
}

/// What the machines of a node have in sum.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) total: u64,
    pub(super) active: u64,
    /// Of those that are active.
    pub(super) cpus: u64,
    pub(super) memory_mb: u64,
}

impl SimulatedMachines {
    pub(super) fn new(storage: Arc<FileStorage>, folder: PathBuf, guests: SimulatedGuests) -> Self {
        let machines = remembered(&folder).into_iter().map(|(id, power)| (id, Machine::new(None, power)));
        let state = State { machines: machines.collect(), ..State::default() };
        Self { storage, folder, teller: Teller::default(), state: Mutex::new(state), guests }
    }

    /// Remembers how a machine is, or that there is none.
    fn remember(&self, id: InstanceId, power: Option<&VmPower>) {
        let kind = power.map(|power| match power {
            VmPower::On | VmPower::Paused | VmPower::Lost => "on",
            VmPower::Off { .. } | VmPower::Crashed { .. } => "off",
        });
        let path = |kind: &str| self.folder.join(format!("{id}.{kind}"));
        // The new name first: one of them is always there.
        let noted = kind.map_or(Ok(()), |kind| {
            fs::create_dir_all(&self.folder)?;
            File::create(path(kind)).map(drop)
        });
        if let Err(error) = noted {
            tracing::warn!(%error, machine = %id, "a simulated machine will be forgotten");
        }
        for old in ["on", "off"].into_iter().filter(|old| Some(*old) != kind) {
            let _ = fs::remove_file(path(old));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn script(&self, script: Script) {
        let mut state = self.state();
        state.console = script.console.as_deref().map(Arc::from);
        state.script = script;
    }

    pub(super) fn plan(&self, id: InstanceId) -> Option<VmPlan> {
        self.state().machines.get(&id).and_then(|machine| machine.plan.clone())
    }

    pub(super) fn ids(&self) -> Vec<InstanceId> {
        self.state().machines.keys().copied().collect()
    }

    /// Ends those of `which` that run.
    pub(super) fn end(&self, which: impl Fn(InstanceId) -> bool, power: &VmPower) {
        let mut ended = Vec::new();
        for (id, machine) in &mut self.state().machines {
            if which(*id) && machine.is_active() {
                machine.power = power.clone();
                ended.push(*id);
            }
        }
        for id in ended {
            self.guests.switched_off(id);
            self.remember(id, Some(power));
            self.teller.tell(id);
        }
    }

    pub(super) fn sum(&self) -> Sum {
        let state = self.state();
        let total = Sum { total: state.machines.len() as u64, ..Sum::default() };
        let active = state.machines.values().filter(|machine| machine.is_active());
        active.fold(total, |sum, machine| Sum {
            active: sum.active + 1,
            cpus: sum.cpus + machine.plan.as_ref().map_or(0, |plan| u64::from(plan.cpus)),
            memory_mb: sum.memory_mb + machine.plan.as_ref().map_or(0, |plan| plan.memory_mb),
            ..sum
        })
    }

    /// Does something with a machine that is there, and tells of it if its power is another one then.
    fn with<T>(&self, id: InstanceId, work: impl FnOnce(&mut Machine) -> Result<T>) -> Result<T> {
        let mut state = self.state();
        let machine = state.machines.get_mut(&id).ok_or_else(|| Error::not_found("machine"))?;
        let before = machine.power.clone();
        let result = work(machine);
        let changed = (machine.power != before).then(|| machine.power.clone());
        let plan = machine.plan.clone();
        drop(state);
        if let Some(power) = changed {
            self.guests.follow(id, &before, &power, plan.as_ref());
            self.remember(id, Some(&power));
            self.teller.tell(id);
        }
        result
    }

    /// Refuses a disk that cannot be made, as a real node does.
    fn require_base(&self, disk: &DiskPlan) -> Result<()> {
        let Some(base) = disk.base else { return Ok(()) };
        let conversion = self.storage.conversion(base)?;
        let conversion = conversion.ok_or_else(|| missing("the conversion", base))?;
        let (device, needed) = (&disk.device, conversion.facts.virtual_size);
        match disk.size.filter(|size| disk.kind == DiskKind::Disk && *size < needed) {
            Some(size) => Err(Error::Invalid(format!(
                "disk {device} of {size} bytes is smaller than its base, which has {needed} bytes"
            ))),
            None => Ok(()),
        }
    }

    fn build_now(&self, plan: &VmPlan) -> Result<()> {
        if let Some(reason) = self.state().script.build_fails.clone() {
            return Err(Error::Conflict(reason));
        }
        if let Some(machine) = self.state().machines.get_mut(&plan.id) {
            if !machine.is_active() {
                machine.plan = Some(slim(plan));
            }
            return Ok(());
        }
        plan.disks.iter().try_for_each(|disk| self.require_base(disk))?;
        if let Some(template) = plan.nvram_template.filter(|_| plan.uefi)
            && self.storage.blob(template).is_none()
        {
            return Err(missing("the file", template));
        }
        let power = never_on();
        self.remember(plan.id, Some(&power));
        self.state().machines.insert(plan.id, Machine::new(Some(slim(plan)), power));
        Ok(())
    }

    async fn start_now(&self, plan: &VmPlan) -> Result<()> {
        let (boot, fails) = {
            let state = self.state();
            let machine = state.machines.get(&plan.id).ok_or_else(|| Error::not_found("machine"))?;
            if machine.is_active() {
                return Ok(());
            }
            state.require_ports(plan)?;
            (state.script.boot, state.script.start_fails.clone())
        };
        if !boot.is_zero() {
            tokio::time::sleep(boot).await;
        }
        if let Some(reason) = fails {
            return Err(Error::Conflict(reason));
        }
        let console = {
            let state = self.state();
            state.require_ports(plan)?;
            state.console.clone()
        };
        self.with(plan.id, |machine| {
            machine.plan = Some(slim(plan));
            machine.power = VmPower::On;
            machine.started = Instant::now();
            machine.boot(console);
            Ok(())
        })
    }

    /// Boots a guest again.
    fn boot_again(&self, id: InstanceId, does: impl FnOnce(&Machine) -> bool) -> Result<()> {
        let console = self.state().console.clone();
        let boots = self.with(id, |machine| {
            machine.require_active()?;
            let boots = does(machine);
            if boots {
                machine.boot(console);
            }
            Ok(boots)
        })?;
        if boots {
            self.guests.restart(id);
        }
        Ok(())
    }

    async fn snapshot_now(&self, id: InstanceId, disks: &[SnapshotDisk]) -> Result<()> {
        let (known, number) = self.with(id, |machine| {
            for disk in disks {
                machine.require_copied(&disk.device)?;
            }
            machine.snapshots += 1;
            let disks = machine.plan.as_ref().map_or_else(Vec::new, |plan| plan.disks.clone());
            Ok((disks, machine.snapshots))
        })?;
        for disk in disks {
            let scratch = self.storage.scratch()?;
            let file = scratch.path("copy");
            let words = format!(
                "disk {} of simulated machine {id}, copy {number}, thin: {}\n",
                disk.device, disk.thin
            );
            let of = known.iter().find(|of| of.device == disk.device);
            let written = match of {
                Some(of) => qcow2_writer::write(&file, self.size(of)?, None, Some(words.as_bytes())),
                None => {
                    let mut nvram = words.into_bytes();
                    nvram.resize(NVRAM, 0xff);
                    fs::write(&file, nvram)
                }
            };
            written.map_err(failed("a copy of a disk is not written"))?;
            self.storage.adopt_draft(disk.draft, &file).await?;
        }
        Ok(())
    }

    /// The bytes of a disk. The conversion of its base may be gone by now.
    fn size(&self, disk: &DiskPlan) -> Result<u64> {
        let base = disk.base.map(|base| self.storage.conversion(base)).transpose()?.flatten();
        let least = base.map_or(1 << 20, |base| base.facts.virtual_size);
        Ok(disk.size.map_or(least, |size| size.max(least)))
    }

    async fn screenshot_now(&self, id: InstanceId, draft: Draft) -> Result<()> {
        self.with(id, |machine| machine.require_active())?;
        let scratch = self.storage.scratch()?;
        let file = scratch.path("screen");
        let written = fs::write(&file, screen::picture(id.0.as_u128()));
        written.map_err(failed("a picture is not written"))?;
        self.storage.adopt_draft(draft, &file).await
    }

    fn choose(&self, count: usize, taken: &[u16]) -> Result<Vec<u16>> {
        let mut used: BTreeSet<u16> = taken.iter().copied().collect();
        used.extend(self.state().machines.values().flat_map(Machine::ports));
        let size = u128::from(PORTS.end - PORTS.start);
        let begin = PORTS.start + u16::try_from(Uuid::new_v4().as_u128() % size).unwrap_or(0);
        let free = (begin..PORTS.end).chain(PORTS.start..begin).filter(|port| !used.contains(port));
        let chosen: Vec<u16> = free.take(count).collect();
        if chosen.len() == count { Ok(chosen) } else { Err(Error::Unavailable("no port is free".into())) }
    }
}

impl State {
    /// Refuses ports that a machine that runs has.
    fn require_ports(&self, plan: &VmPlan) -> Result<()> {
        let others = self.machines.iter().filter(|(id, other)| **id != plan.id && other.is_active());
        let wanted: Vec<u16> = ports(plan.ports).collect();
        match others.flat_map(|(_, other)| other.ports()).find(|port| wanted.contains(port)) {
            Some(port) => Err(Error::Unavailable(format!("{PORT_TAKEN}: {port}"))),
            None => Ok(()),
        }
    }
}

impl Machine {
    fn new(plan: Option<VmPlan>, power: VmPower) -> Self {
        Self { plan, power, started: Instant::now(), boots: Vec::new(), snapshots: 0, asked: 0 }
    }

    fn ports(&self) -> impl Iterator<Item = u16> + use<> {
        self.plan.as_ref().map(|plan| plan.ports).into_iter().flat_map(ports)
    }

    fn is_active(&self) -> bool {
        match self.power {
            VmPower::On | VmPower::Paused => true,
            VmPower::Off { .. } | VmPower::Crashed { .. } | VmPower::Lost => false,
        }
    }

    fn require_active(&self) -> Result<()> {
        if self.is_active() { Ok(()) } else { Err(Error::Conflict("the machine is not on".into())) }
    }

    /// Refuses what no copy can be made of.
    fn require_copied(&self, device: &str) -> Result<()> {
        let copied = |disk: &DiskPlan| disk.device == device && disk.kind == DiskKind::Disk;
        let has = |plan: &VmPlan| plan.disks.iter().any(copied) || (device == "nvram" && plan.uefi);
        if self.plan.as_ref().is_some_and(has) {
            return Ok(());
        }
        Err(Error::Conflict(format!("the machine has no disk {device}")))
    }

    fn boot(&mut self, console: Option<Arc<str>>) {
        if self.boots.len() == MOST_BOOTS {
            self.boots.remove(0);
        }
        self.boots.push(console);
    }

    fn console(&self) -> String {
        let text = |boot: &Option<Arc<str>>| match (boot, &self.plan) {
            (Some(text), _) => text.to_string(),
            (None, Some(plan)) => log(plan),
            (None, None) => String::new(),
        };
        self.boots.iter().map(text).collect()
    }

    /// Grows with time and with each question.
    fn usage(&mut self) -> VmUsage {
        self.asked += 1;
        let asked = self.asked;
        let age = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // A machine that idles.
        let (user, system) = (age / 100 + asked * 1_000_000, age / 200 + asked * 500_000);
        let cpu = [("cpu time ns", user + system), ("system time ns", system), ("user time ns", user)];
        let disk = [
            ("actual bytes on disk", 196_608 + 4096 * asked),
            ("errors", 0),
            ("read bytes", 65536 * asked),
            ("read requests", 16 * asked),
            ("write bytes", 4096 * asked),
            ("write requests", asked),
        ];
        let network = [
            ("read bytes", 8400 * asked),
            ("read drops", 0),
            ("read errors", 0),
            ("read packets", 100 * asked),
            ("write bytes", 4200 * asked),
            ("write drops", 0),
            ("write errors", 0),
            ("write packets", 50 * asked),
        ];
        let disks = self.plan.iter().flat_map(|plan| &plan.disks).filter(|of| of.kind == DiskKind::Disk);
        let nics = self.plan.iter().flat_map(|plan| &plan.nics);
        VmUsage {
            cpu: cpu.into(),
            disks: disks.map(|of| (of.device.clone(), disk.into())).collect(),
            networks: nics.map(|nic| (nic.mac.to_string(), network.into())).collect(),
        }
    }
}

/// What a guest says while it boots.
fn log(plan: &VmPlan) -> String {
    let VmPlan { id, name, cpus, memory_mb, .. } = plan;
    let mut lines = vec![
        "[    0.000000] Linux version 6.1.0-simulated".to_owned(),
        format!("[    0.000000] DMI: Muster Simulated Machine, UUID {id}"),
        format!("[    0.021340] Memory: {}K available", memory_mb * 1024),
        format!("[    0.084210] smp: Brought up 1 node, {cpus} CPUs"),
    ];
    for disk in &plan.disks {
        lines.push(format!("[    0.412800] {}: attached on {}", disk.device, disk.bus));
    }
    for (number, nic) in plan.nics.iter().enumerate() {
        lines.push(format!("[    0.533100] eth{number}: {} {}, mtu {}", nic.model, nic.mac, nic.mtu));
    }
    lines.push("[    0.700000] Run /sbin/init as init process".into());
    lines.push(String::new());
    lines.push(format!("{name} login: "));
    lines.join("\r\n")
}

fn never_on() -> VmPower {
    VmPower::Off { reason: "it was never switched on".into() }
}

/// The machines of a process before this one.
fn remembered(folder: &Path) -> BTreeMap<InstanceId, VmPower> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((id, kind)) = name.split_once('.') else { continue };
        let Ok(id) = id.parse() else { continue };
        match kind {
            "on" => drop(found.insert(id, VmPower::Lost)),
            "off" => drop(found.entry(id).or_insert_with(never_on)),
            _ => {}
        }
    }
    found
}

fn slim(plan: &VmPlan) -> VmPlan {
    let mut slim = VmPlan { config_drive: None, ..plan.clone() };
    slim.config_drive = plan.config_drive.as_ref().map(|_| Vec::new());
    slim
}

fn ports(ports: ConsolePorts) -> impl Iterator<Item = u16> {
    [Some(ports.console), Some(ports.vdi), ports.vdi_tls].into_iter().flatten()
}

fn missing(what: &str, blob: BlobId) -> Error {
    Error::Unavailable(format!("{what} of blob {blob} is not on this node"))
}

impl VmApi for SimulatedMachines {
    fn build<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        Box::pin(async { self.build_now(plan) })
    }

    fn start<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()> {
        Box::pin(self.start_now(plan))
    }

    fn stop(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let stopped = self.with(id, |machine| {
            if !matches!(machine.power, VmPower::Off { .. }) {
                machine.power = VmPower::Off { reason: "switched off".into() };
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
        let result = self.with(id, |machine| {
            machine.require_active()?;
            machine.power = VmPower::Paused;
            Ok(())
        });
        Box::pin(async { result })
    }

    fn resume(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.with(id, |machine| {
            machine.require_active()?;
            machine.power = VmPower::On;
            Ok(())
        });
        Box::pin(async { result })
    }

    fn reset(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.boot_again(id, |_| true);
        Box::pin(async { result })
    }

    fn reboot(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        // A guest that is paused hears nothing.
        let result = self.boot_again(id, |machine| machine.power == VmPower::On);
        Box::pin(async { result })
    }

    fn plug<'a>(&'a self, id: InstanceId, nic: &'a NicPlan) -> NodeFuture<'a, ()> {
        let result = self.with(id, |machine| {
            // One without a plan gets it with its next start.
            if let Some(plan) = &mut machine.plan
                && plan.nics.iter().all(|known| known.interface != nic.interface)
            {
                plan.nics.push(nic.clone());
            }
            Ok(())
        });
        Box::pin(async { result })
    }

    fn remove(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let removed = self.state().machines.remove(&id);
        if removed.is_some() {
            self.guests.removed(id);
            self.remember(id, None);
            self.teller.tell(id);
        }
        Box::pin(async { Ok(()) })
    }

    fn power(&self, id: InstanceId) -> NodeFuture<'_, Option<VmPower>> {
        let power = self.state().machines.get(&id).map(|machine| machine.power.clone());
        Box::pin(async { Ok(power) })
    }

    fn find(&self) -> NodeFuture<'_, Vec<FoundVm>> {
        let state = self.state();
        let found = state.machines.iter();
        let found = found.map(|(id, machine)| FoundVm { id: *id, power: machine.power.clone() }).collect();
        Box::pin(async { Ok(found) })
    }

    fn changes(&self) -> ChangeStream {
        self.teller.listen()
    }

    fn choose_ports<'a>(&'a self, count: usize, taken: &'a [u16]) -> NodeFuture<'a, Vec<u16>> {
        let chosen = self.choose(count, taken);
        Box::pin(async { chosen })
    }

    fn console(&self, id: InstanceId, most: Option<u64>) -> NodeFuture<'_, Bytes> {
        let text = self.state().machines.get(&id).map(Machine::console).unwrap_or_default().into_bytes();
        let most = most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let begin = text.len().saturating_sub(most);
        Box::pin(async move { Ok(Bytes::from(text).slice(begin..)) })
    }

    fn clear_console(&self, id: InstanceId) -> NodeFuture<'_, ()> {
        let result = self.with(id, |machine| {
            machine.boots.clear();
            Ok(())
        });
        Box::pin(async { result })
    }

    fn screenshot(&self, id: InstanceId, draft: Draft) -> NodeFuture<'_, ()> {
        Box::pin(self.screenshot_now(id, draft))
    }

    fn snapshot<'a>(
        &'a self,
        id: InstanceId,
        disks: &'a [SnapshotDisk],
        _compress: bool,
    ) -> NodeFuture<'a, ()> {
        Box::pin(self.snapshot_now(id, disks))
    }

    fn usage(&self, id: InstanceId) -> NodeFuture<'_, Option<VmUsage>> {
        let mut state = self.state();
        let machine = state.machines.get_mut(&id).filter(|machine| machine.is_active());
        let usage = machine.map(Machine::usage);
        Box::pin(async { Ok(usage) })
    }
}
