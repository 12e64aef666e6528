//! VmApi: what an instance is on its node, and everything that the control plane may ask about them.
//!
//! ```text
//! build ──▶ (files) ──start──▶ on ◀──pause, resume──▶ paused
//!              ▲               │ │ │
//!              │   stop, or the guest switches itself off: off
//!              │               │ └── its process dies: crashed
//!              │               └──── the whole host went down: lost
//!              └───────────────start again, from each of these;  remove, from anywhere: nothing is left
//! ```
//!
//! A machine outlives the daemon that started it: the next one finds it again. Every call may be repeated.

use std::collections::BTreeMap;
use std::pin::Pin;

use bytes::Bytes;
use futures_core::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::address::MacAddress;
use crate::ids::{BlobId, InstanceId, InterfaceId};
use crate::instance::{MachineType, SideChannel};
use crate::node::NodeFuture;
use crate::spec::{DiskBus, VideoSpec};
use crate::storage::Draft;

/// Everything that a node needs to build and start a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct VmPlan {
    /// The guest sees it as the UUID of its hardware.
    pub id: InstanceId,
    pub name: String,
    pub cpus: u32,
    pub memory_mb: u64,
    pub machine_type: MachineType,
    pub uefi: bool,
    pub secure_boot: bool,
    /// What the memory of the firmware begins as; nothing: what the firmware's package has.
    pub nvram_template: Option<BlobId>,
    /// In the order of their devices. The first is booted from.
    pub disks: Vec<DiskPlan>,
    pub nics: Vec<NicPlan>,
    pub video: VideoSpec,
    pub ports: ConsolePorts,
    /// The files of the config drive, which is written anew at every start; nothing without one.
    pub config_drive: Option<Vec<DriveFile>>,
    pub side_channels: Vec<SideChannel>,
}

/// A disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlan {
    /// Its name in the guest, such as `vda`; unique in the machine.
    pub device: String,
    pub bus: DiskBus,
    pub kind: DiskKind,
    /// In bytes, at least; nothing: as large as its base.
    pub size: Option<u64>,
    /// What it begins as: the conversion of this blob, which the node has. Nothing: empty.
    pub base: Option<BlobId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    Disk,
    /// A disc in a drive that only reads. Without a base the drive is empty.
    Cdrom,
    /// Holds what the guest is told; it looks like a disk and can only be read.
    ConfigDrive,
}

/// A file of the config drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveFile {
    /// Such as `openstack/latest/meta_data.json`.
    pub path: String,
    pub content: Vec<u8>,
}

/// An interface of a machine. Its network is on the node before it is asked for; its device there
/// ([`InterfaceId::device`]) comes and goes with the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPlan {
    pub interface: InterfaceId,
    /// Which VXLAN it is in.
    pub vxid: u32,
    pub mac: MacAddress,
    pub model: String,
    /// The largest packet, which the guest is told.
    pub mtu: u32,
}

/// How [`VmApi::start`] begins to say that somebody else has one of the ports: others may do.
pub const PORT_TAKEN: &str = "a port of the consoles is in use";

/// TCP ports of a machine on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsolePorts {
    pub console: u16,
    pub vdi: u16,
    /// Only with SPICE.
    pub vdi_tls: Option<u16>,
}

/// How a machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmPower {
    On,
    Paused,
    /// Switched off by us or by itself, or never on.
    Off {
        reason: String,
    },
    /// It ended although nobody wanted that.
    Crashed {
        reason: String,
    },
    /// It was on when the host went down.
    Lost,
}

/// A machine that a node has something of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundVm {
    pub id: InstanceId,
    pub power: VmPower,
}

/// The machines whose power may have changed.
pub type ChangeStream = Pin<Box<dyn Stream<Item = InstanceId> + Send>>;

/// A disk to copy while its machine may go on writing to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotDisk {
    /// Its device, or `nvram` for the memory of the firmware.
    pub device: String,
    /// Where the copy goes: a qcow2 image, or the bytes of the firmware's memory.
    pub draft: Draft,
    /// Whether only what differs from the disk's base is copied.
    pub thin: bool,
}

/// What a machine has used since it was started, as counted by QEMU and the kernel.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct VmUsage {
    /// `cpu time ns`, `system time ns`, `user time ns`.
    pub cpu: BTreeMap<&'static str, u64>,
    /// By device: `actual bytes on disk`, `errors`, `read bytes`, `read requests`, `write bytes`, `write requests`.
    pub disks: BTreeMap<String, BTreeMap<&'static str, u64>>,
    /// By hardware address: `read bytes`, `read drops`, `read errors`, `read packets`, and the same of `write`.
    /// What the guest receives it reads.
    pub networks: BTreeMap<String, BTreeMap<&'static str, u64>>,
}

/// What makes the screens of a node trustworthy to viewers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisplayIdentity {
    /// The authority that signed the node's certificate, as PEM.
    pub authority: String,
    /// The subject of the certificate, as viewers compare it.
    pub subject: String,
}

/// Everything that the control plane may ask about the machines of a node.
///
/// Calls about one machine come one after the other; calls about different machines come at the same time.
/// [`Error::NotFound`]: the node has nothing of it. [`Error::Conflict`]: it is not in a state for that, or it can never
/// work, and the text says why. [`Error::Unavailable`]: it may work later. [`Error::Insufficient`]: the disk is full.
///
/// [`Error::NotFound`]: crate::Error::NotFound
/// [`Error::Conflict`]: crate::Error::Conflict
/// [`Error::Unavailable`]: crate::Error::Unavailable
/// [`Error::Insufficient`]: crate::Error::Insufficient
pub trait VmApi: Send + Sync {
    /// Makes the disks of a machine, synchronised. Those that are there stay as they are. The conversions of their
    /// bases are there, and may go afterwards: the machine keeps what it needs.
    fn build<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()>;

    /// Switches a machine on and returns when it runs. One that is on or paused is left alone. Whatever an earlier
    /// start left half done is cleared away first.
    fn start<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()>;

    /// Switches a machine off at once, and returns when its process is gone. Off is no error, nor is nothing.
    fn stop(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    fn pause(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    fn resume(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Presses the reset switch.
    fn reset(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Asks the guest to restart: it is asked to switch off, and when it has done so it is switched on again. Returns
    /// when it was asked; it may never do it.
    fn reboot(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Adds an interface to a machine. One that runs gets it at once; one that is off with its next start. One that
    /// it has is left alone.
    fn plug<'a>(&'a self, id: InstanceId, nic: &'a NicPlan) -> NodeFuture<'a, ()>;

    /// Removes everything that the node has of a machine: process, files, resource group. Nothing there is no error.
    fn remove(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// How a machine is; nothing if the node has nothing of it.
    fn power(&self, id: InstanceId) -> NodeFuture<'_, Option<VmPower>>;

    /// Every machine that the node has something of, whether it should or not.
    fn find(&self) -> NodeFuture<'_, Vec<FoundVm>>;

    /// Names a machine whenever its power may have changed, from now on. There is one listener at a time.
    fn changes(&self) -> ChangeStream;

    /// ConsolePorts that nobody uses on this node, in 30000..50000, none of them among `taken`.
    fn choose_ports<'a>(&'a self, count: usize, taken: &'a [u16]) -> NodeFuture<'a, Vec<u16>>;

    /// The last bytes of what the serial console showed, at most `most`. Nothing there is no error.
    fn console(&self, id: InstanceId, most: Option<u64>) -> NodeFuture<'_, Bytes>;

    /// Forgets what the serial console showed.
    fn clear_console(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Puts what the screen shows into a draft, as PNG.
    fn screenshot(&self, id: InstanceId, draft: Draft) -> NodeFuture<'_, ()>;

    /// Copies disks as they were at one moment, all of them the same. The machine may be on, paused or off. A draft
    /// that is there is replaced.
    fn snapshot<'a>(
        &'a self,
        id: InstanceId,
        disks: &'a [SnapshotDisk],
        compress: bool,
    ) -> NodeFuture<'a, ()>;

    /// What a machine used; nothing if it is not on.
    fn usage(&self, id: InstanceId) -> NodeFuture<'_, Option<VmUsage>>;
}

impl VmUsage {
    /// What a usage event says.
    #[must_use]
    pub fn extra(self) -> Map<String, Value> {
        let mut extra = Map::new();
        extra.insert("cpu usage".into(), serde_json::json!(self.cpu));
        extra.insert("disk usage".into(), serde_json::json!(self.disks));
        extra.insert("network usage".into(), serde_json::json!(self.networks));
        extra
    }
}
