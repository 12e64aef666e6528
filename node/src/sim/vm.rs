//! The state of one simulated VM.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Instant;
use std::{fs, io};

use muster_types::ids::InstanceId;
use muster_types::key::Secret;
use muster_types::migration::IncomingState;
use muster_types::vm::{ConsolePorts, DiskKind, DiskPlan, VmPlan, VmPower, VmUsage};
use muster_types::{Error, Result};

/// The number of boots whose console output is kept.
const MAX_BOOTS: usize = 16;

#[derive(Debug)]
pub(super) struct SimulatedVm {
    /// The plan without the contents of the config drive; unset after a restart of the process until the next build or
    /// start.
    pub(super) plan: Option<VmPlan>,
    pub(super) power: VmPower,
    /// When the VM was last powered on.
    pub(super) started: Instant,
    /// New after each start.
    pub(super) display_password: Secret,
    /// The console output of each boot, `None` for the default one.
    pub(super) boots: Vec<Option<Arc<str>>>,
    /// The connections to its consoles, which end with it.
    connections: Vec<Weak<UnixStream>>,
    /// Set while it waits for a migration.
    pub(super) incoming: Option<IncomingState>,
    /// The number of snapshots so far.
    pub(super) snapshots: u64,
    /// The number of usage queries, from which the simulated usage is computed.
    usage_queries: u64,
}

impl SimulatedVm {
    pub(super) fn new(plan: Option<VmPlan>, power: VmPower) -> Self {
        Self {
            plan,
            power,
            started: Instant::now(),
            display_password: Secret::default(),
            boots: Vec::new(),
            connections: Vec::new(),
            incoming: None,
            snapshots: 0,
            usage_queries: 0,
        }
    }

    pub(super) fn ports(&self) -> impl Iterator<Item = u16> + use<> {
        self.plan.as_ref().map(|plan| plan.ports).into_iter().flat_map(ports)
    }

    pub(super) fn is_active(&self) -> bool {
        match self.power {
            VmPower::On | VmPower::Paused => true,
            VmPower::Off { .. } | VmPower::Crashed { .. } | VmPower::Lost => false,
        }
    }

    pub(super) fn require_active(&self) -> Result<()> {
        if self.is_active() { Ok(()) } else { Err(Error::Conflict("the VM is not running".into())) }
    }

    pub(super) fn add_connection(&mut self, connection: &Arc<UnixStream>) {
        self.connections.retain(|connection| connection.strong_count() > 0);
        self.connections.push(Arc::downgrade(connection));
    }

    pub(super) fn close_connections(&mut self) {
        for connection in self.connections.drain(..).filter_map(|connection| connection.upgrade()) {
            // Fails if the user has closed it.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Returns an error if no snapshot can be taken of a device.
    pub(super) fn require_snapshottable(&self, device: &str) -> Result<()> {
        let is_disk = |disk: &DiskPlan| disk.device == device && disk.kind == DiskKind::Disk;
        let has = |plan: &VmPlan| plan.disks.iter().any(is_disk) || (device == "nvram" && plan.uefi);
        if self.plan.as_ref().is_some_and(has) {
            return Ok(());
        }
        Err(Error::Conflict(format!("the VM has no disk {device}")))
    }

    pub(super) fn boot(&mut self, console: Option<Arc<str>>) {
        if self.boots.len() == MAX_BOOTS {
            self.boots.remove(0);
        }
        self.boots.push(console);
    }

    pub(super) fn console(&self) -> String {
        let text = |boot: &Option<Arc<str>>| match (boot, &self.plan) {
            (Some(text), _) => text.to_string(),
            (None, Some(plan)) => boot_log(plan),
            (None, None) => String::new(),
        };
        self.boots.iter().map(text).collect()
    }

    /// Returns counters that grow with time and with each query.
    pub(super) fn usage(&mut self) -> VmUsage {
        self.usage_queries += 1;
        let queries = self.usage_queries;
        let age = u64::try_from(self.started.elapsed().as_nanos()).expect("an uptime below 584 years");
        // An idle VM.
        let (user, system) = (age / 100 + queries * 1_000_000, age / 200 + queries * 500_000);
        let cpu = [("cpu time ns", user + system), ("system time ns", system), ("user time ns", user)];
        let disk = [
            ("actual bytes on disk", 196_608 + 4096 * queries),
            ("errors", 0),
            ("read bytes", 65536 * queries),
            ("read requests", 16 * queries),
            ("write bytes", 4096 * queries),
            ("write requests", queries),
        ];
        let network = [
            ("read bytes", 8400 * queries),
            ("read drops", 0),
            ("read errors", 0),
            ("read packets", 100 * queries),
            ("write bytes", 4200 * queries),
            ("write drops", 0),
            ("write errors", 0),
            ("write packets", 50 * queries),
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

/// Returns the default console output of a boot.
fn boot_log(plan: &VmPlan) -> String {
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

pub(super) fn ports(ports: ConsolePorts) -> impl Iterator<Item = u16> {
    [Some(ports.console), Some(ports.vdi), ports.vdi_tls].into_iter().flatten()
}

pub(super) fn never_started() -> VmPower {
    VmPower::Off { reason: "it was never started".into() }
}

/// Loads the VMs of an earlier process.
pub(super) fn load(dir: &Path) -> BTreeMap<InstanceId, VmPower> {
    let mut found = BTreeMap::new();
    let entries: io::Result<Vec<_>> = fs::read_dir(dir).and_then(Iterator::collect);
    let entries = entries.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            tracing::warn!(%error, ?dir, "failed to load the simulated VMs of an earlier process");
        }
        Vec::new()
    });
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((id, kind)) = name.split_once('.') else { continue };
        let Ok(id) = id.parse() else { continue };
        match kind {
            "on" => drop(found.insert(id, VmPower::Lost)),
            "off" => drop(found.entry(id).or_insert_with(never_started)),
            _ => {}
        }
    }
    found
}
