//! VMs: what a node runs for an instance, and the interface by which the control plane manages them.
//!
//! ```text
//! build ──▶ (files) ──start──▶ on ◀──pause, resume──▶ paused
//!              ▲               │ │ │
//!              │   stop, or the guest powers off: off
//!              │               │ └── its process dies: crashed
//!              │               └──── the whole host went down: lost
//!              └───────────────start again, from each of these;  remove, from any state: nothing remains
//! prepare_incoming ──▶ (waits for memory) ──finish_incoming──▶ on or paused     migrate: from on or paused to another node
//!                                          move_to_lost_found, from any state: the node only keeps its files, elsewhere
//! ```
//!
//! A VM outlives the daemon that started it: the next daemon re-attaches to it. Every call is idempotent.
//! See docs/decisions/0018 and 0020.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::pin::Pin;

use bytes::Bytes;
use futures_core::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::address::MacAddress;
use crate::ids::{BlobId, InstanceId, InterfaceId, StorageId};
use crate::instance::{FencingPolicy, MachineType, SideChannel};
use crate::key::Secret;
use crate::migration::{
    IncomingState, MigrationConnection, MigrationDriver, MigrationMode, MigrationSettings,
};
use crate::node_future::NodeFuture;
use crate::replica::{ReplicaCopy, ReplicaDriver};
use crate::spec::{DiskBus, VideoSpec};
use crate::storage::Draft;

/// Everything that a node needs to build and start a VM.
#[derive(Debug, Clone, PartialEq)]
pub struct VmPlan {
    /// Also the UUID of the hardware that the guest sees.
    pub id: InstanceId,
    /// The generation of the instance that the VM runs under. See docs/decisions/0052.
    pub generation: i64,
    pub name: String,
    pub cpus: u32,
    pub memory_mb: u64,
    pub machine_type: MachineType,
    pub uefi: bool,
    pub secure_boot: bool,
    /// The initial content of the NVRAM; if unset, the template of the firmware package.
    pub nvram_template: Option<BlobId>,
    /// In device order. The VM boots from the first.
    pub disks: Vec<DiskPlan>,
    pub nics: Vec<NicPlan>,
    pub video: VideoSpec,
    pub ports: ConsolePorts,
    /// The files of the config drive, which is rewritten at every start; unset without a config drive.
    pub config_drive: Option<Vec<ConfigDriveFile>>,
    pub side_channels: Vec<SideChannel>,
    pub fencing: FencingPolicy,
    /// The shared storage with its disks; unset if they are on the node.
    pub shared_storage: Option<StorageId>,
}

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlan {
    /// Its name in the guest, such as `vda`; unique within the VM.
    pub device: String,
    pub bus: DiskBus,
    pub kind: DiskKind,
    /// The minimum size in bytes; if unset, the size of the base.
    pub size: Option<u64>,
    /// The blob whose conversion, present on the node, is the initial content; if unset, the disk is empty.
    pub base: Option<BlobId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    Disk,
    /// An optical drive. Without a base the drive is empty.
    Cdrom,
    /// A read-only disk with the metadata of the instance.
    ConfigDrive,
}

/// A file of the config drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigDriveFile {
    /// Such as `openstack/latest/meta_data.json`.
    pub path: String,
    pub content: Vec<u8>,
}

/// A network interface of a VM. Its network exists on the node before the VM starts; its tap device
/// ([`InterfaceId::device`]) lives as long as the VM's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPlan {
    pub interface: InterfaceId,
    /// The VXLAN of its network.
    pub vxid: u32,
    pub mac: MacAddress,
    pub model: String,
    /// The MTU announced to the guest.
    pub mtu: u32,
}

/// TCP ports of a VM's consoles on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsolePorts {
    pub console: u16,
    pub vdi: u16,
    /// Only with SPICE.
    pub vdi_tls: Option<u16>,
}

/// The power state of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmPower {
    On,
    Paused,
    /// Stopped by us, powered off by the guest, or never started.
    Off {
        reason: String,
    },
    /// Its process ended unexpectedly.
    Crashed {
        reason: String,
    },
    /// It was on when the host went down.
    Lost,
}

/// A VM of which a node has at least some files.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundVm {
    pub id: InstanceId,
    /// The generation that it was last started under; unset if it was never started.
    pub generation: Option<i64>,
    pub power: VmPower,
    pub fencing: FencingPolicy,
    /// The Unix time when the watchdog stopped it, until this is acknowledged.
    pub fenced_at: Option<f64>,
    /// Whether it was started to receive a migration and has not run on this node.
    pub incoming: bool,
}

/// Yields the VMs whose power state may have changed.
pub type ChangeStream = Pin<Box<dyn Stream<Item = InstanceId> + Send>>;

/// The protocol to which connections to the API change for a serial console: the bytes of the guest in one direction and
/// of the user in the other.
pub const CONSOLE_PROTOCOL: &str = "muster-console";

/// The protocol to which connections to the API change for a display: the bytes of VNC or SPICE.
pub const DISPLAY_PROTOCOL: &str = "muster-display";

/// A connection to the TCP port of a serial console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsoleConnection {
    pub vm: InstanceId,
    pub source: SocketAddr,
    /// The number of earlier connections that were not reported because there were too many.
    pub unreported: u64,
}

/// Yields connections to serial consoles.
pub type ConsoleConnectionStream = Pin<Box<dyn Stream<Item = ConsoleConnection> + Send>>;

/// A disk to copy, possibly while the guest writes to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotDisk {
    /// Its device, or `nvram` for the NVRAM of the firmware.
    pub device: String,
    /// The target: a qcow2 image, or the raw bytes of the NVRAM.
    pub draft: Draft,
    /// Whether to copy only the difference to the disk's base.
    pub thin: bool,
}

/// The resources that a VM has used since it was started, as counted by QEMU and the kernel.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct VmUsage {
    /// `cpu time ns`, `system time ns`, `user time ns`.
    pub cpu: BTreeMap<&'static str, u64>,
    /// By device: `actual bytes on disk`, `errors`, `read bytes`, `read requests`, `write bytes`, `write requests`.
    pub disks: BTreeMap<String, BTreeMap<&'static str, u64>>,
    /// By MAC address: `read bytes`, `read drops`, `read errors`, `read packets`, and the same with `write`, from the
    /// guest's point of view.
    pub networks: BTreeMap<String, BTreeMap<&'static str, u64>>,
}

/// By what viewers verify the TLS certificate of a node's displays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisplayIdentity {
    /// The CA certificate that signed the node's certificate, as PEM.
    pub authority: String,
    /// The subject of the node's certificate, in the notation that viewers compare.
    pub subject: String,
}

/// The interface between the control plane and the VMs of a node.
///
/// Calls about one VM are serialized by the caller; calls about different VMs are concurrent.
/// [`Error::NotFound`]: the node has no such VM. [`Error::Conflict`]: the VM is in the wrong state, or the request can
/// never succeed; the text says why. [`Error::Unavailable`]: a retry may succeed. [`Error::InsufficientCapacity`]: the disk of
/// the node is full. [`Error::NotReady`]: the shared storage is not mounted, or another host still uses the disks.
///
/// [`Error::NotFound`]: crate::Error::NotFound
/// [`Error::Conflict`]: crate::Error::Conflict
/// [`Error::Unavailable`]: crate::Error::Unavailable
/// [`Error::InsufficientCapacity`]: crate::Error::InsufficientCapacity
/// [`Error::NotReady`]: crate::Error::NotReady
pub trait VmApi: Send + Sync {
    /// Creates the missing disks of a VM and syncs them. Existing disks are kept. The conversions of their bases must
    /// be present, but may be deleted afterwards: the VM keeps its own link.
    fn build<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()>;

    /// Starts a VM and returns when it runs. A VM that is on or paused is left unchanged. Remains of an earlier,
    /// interrupted start are removed first. [`Error::PortInUse`] if another process listens on one of its ports.
    ///
    /// [`Error::PortInUse`]: crate::Error::PortInUse
    fn start<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, ()>;

    /// Stops a VM immediately and returns when its process has ended. Succeeds if the VM is off or does not exist.
    fn stop(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    fn pause(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    fn resume(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Resets the VM's hardware.
    fn reset(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Requests that the guest powers off, and starts it again afterwards. Returns when the request was sent; the guest
    /// may ignore it.
    fn reboot(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Requests that the guest powers off. Returns when the request was sent; the guest may ignore it.
    fn request_power_off(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Attaches a network interface to a VM: immediately if it runs, otherwise with its next start. Does nothing if the
    /// interface is attached already.
    fn attach_nic<'a>(&'a self, id: InstanceId, nic: &'a NicPlan) -> NodeFuture<'a, ()>;

    /// Removes everything that the node has of a VM: process, files, cgroup. Succeeds if the VM does not exist. Disks on shared
    /// storage are not the node's own, and stay.
    fn remove(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Removes the disks of an instance from the shared storage, which need not exist. The node needs no VM of it.
    fn remove_shared_disks(&self, id: InstanceId, storage: StorageId) -> NodeFuture<'_, ()>;

    /// Stops a VM and moves its files to a directory of `lost+found`, with a README that says why. Returns the path of
    /// the directory, or `None` if the node has no such VM. Disks on shared storage stay there.
    fn move_to_lost_found<'a>(&'a self, id: InstanceId, reason: &'a str) -> NodeFuture<'a, Option<PathBuf>>;

    /// Returns the power state of a VM, or `None` if the node has no such VM.
    fn power(&self, id: InstanceId) -> NodeFuture<'_, Option<VmPower>>;

    /// Returns every VM of which the node has at least some files, expected or not.
    fn list(&self) -> NodeFuture<'_, Vec<FoundVm>>;

    /// Changes whether its watchdog stops a VM when the fencing lease expires. With [`FencingPolicy::Own`], a VM that runs has a
    /// watchdog when this returns.
    fn set_fencing(&self, id: InstanceId, fencing: FencingPolicy) -> NodeFuture<'_, ()>;

    /// Removes the note that the watchdog has stopped a VM.
    fn acknowledge_fencing(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Subscribes to changes of power state. There is one subscriber at a time: an earlier stream ends.
    fn changes(&self) -> ChangeStream;

    /// Chooses TCP ports in 30000..50000 that are free on this node and not in `reserved`.
    fn choose_ports<'a>(&'a self, count: usize, reserved: &'a [u16]) -> NodeFuture<'a, Vec<u16>>;

    /// Returns the end of the serial console's log, at most `max_bytes`. An absent log is empty.
    fn console(&self, id: InstanceId, max_bytes: Option<u64>) -> NodeFuture<'_, Bytes>;

    /// Opens a session with the serial console of a running VM: a stream of the bytes that the guest and the user send.
    /// It ends with the VM. [`Error::Unavailable`] if the console has too many sessions.
    ///
    /// [`Error::Unavailable`]: crate::Error::Unavailable
    fn open_console(&self, id: InstanceId) -> NodeFuture<'_, UnixStream>;

    /// Opens a connection to the display of a running VM, which requires its password. It ends with the VM.
    /// [`Error::Unavailable`] if the display has too many connections.
    ///
    /// [`Error::Unavailable`]: crate::Error::Unavailable
    fn open_display(&self, id: InstanceId) -> NodeFuture<'_, UnixStream>;

    /// Subscribes to connections to the TCP ports of serial consoles. There is one subscriber at a time: an earlier
    /// stream ends.
    fn console_connections(&self) -> ConsoleConnectionStream;

    /// Returns the password of a running VM's display, which is new after every start; `None` if an earlier release
    /// started the VM, whose display has no password.
    fn display_password(&self, id: InstanceId) -> NodeFuture<'_, Option<Secret>>;

    /// Truncates the log of the serial console.
    fn clear_console(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Writes the content of the display into a draft, as PNG.
    fn screenshot(&self, id: InstanceId, draft: Draft) -> NodeFuture<'_, ()>;

    /// Copies disks, all as of the same point in time. The VM may be on, paused or off. Existing drafts are replaced.
    fn snapshot<'a>(
        &'a self,
        id: InstanceId,
        disks: &'a [SnapshotDisk],
        compress: bool,
    ) -> NodeFuture<'a, ()>;

    /// Prepares a VM that receives the disks of the same VM on another node and, if it is migrated live, its memory: then it is
    /// started. It was built, unless its disks are on shared storage: then it is migrated while it is off, and does not acquire them. Remains
    /// of an earlier attempt are removed first.
    fn prepare_incoming<'a>(&'a self, plan: &'a VmPlan, mode: MigrationMode) -> NodeFuture<'a, ()>;

    /// Opens a connection over which a VM receives its memory, a disk or files.
    fn connect_incoming<'a>(
        &'a self,
        id: InstanceId,
        connection: &'a MigrationConnection,
    ) -> NodeFuture<'a, UnixStream>;

    /// Returns the state of a VM that was prepared to receive a migration, or `None` of any other.
    fn incoming_state(&self, id: InstanceId) -> NodeFuture<'_, Option<IncomingState>>;

    /// Lets a VM continue that has received everything, with `resume` unless it stays paused; one that is off stays off. Call
    /// it only if the instance is on this node. Does nothing if it has continued already.
    fn finish_incoming(&self, id: InstanceId, resume: bool) -> NodeFuture<'_, ()>;

    /// Migrates a VM to another node, and returns for how many milliseconds its guest was stopped; 0 if it is off. After
    /// an error the guest continues here, unless the outcome of [`MigrationDriver::switch_over`] is unknown. If the
    /// future is dropped, the migration is cancelled.
    fn migrate<'a>(
        &'a self,
        id: InstanceId,
        mode: MigrationMode,
        settings: &'a MigrationSettings,
        driver: &'a dyn MigrationDriver,
    ) -> NodeFuture<'a, u64>;

    /// Cancels a migration to another node that was interrupted, and with `resume` lets the guest continue. Call it only if the
    /// instance cannot be moved by that migration. Succeeds if the VM is not being migrated.
    fn cancel_migration(&self, id: InstanceId, resume: bool) -> NodeFuture<'_, ()>;

    /// Copies the disks of a VM to its replica on another node, all as of the same point in time: only the
    /// changes since the copy that the replica has, if QEMU knows them. Returns when the replica has committed the copy.
    fn copy_to_replica<'a>(
        &'a self,
        id: InstanceId,
        driver: &'a dyn ReplicaDriver,
    ) -> NodeFuture<'a, ReplicaCopy>;

    /// Returns how many bytes of the disks of a VM have changed since the copy that its replica has. `None` if QEMU does not know,
    /// as while the VM is off.
    fn replica_lag(&self, id: InstanceId) -> NodeFuture<'_, Option<u64>>;

    /// Opens a connection over which the node receives a copy of the disks of an instance, whose VM is on another node under
    /// this generation. The replica changes only when the copy is complete.
    fn receive_replica(&self, id: InstanceId, generation: i64) -> NodeFuture<'_, UnixStream>;

    /// Makes the content of the replica the disks of a VM that has none. From then on the replica receives no copies. Returns the
    /// time that the content dates from. [`Error::Conflict`] if the replica does not have all disks of the plan.
    ///
    /// [`Error::Conflict`]: crate::Error::Conflict
    fn restore_replica<'a>(&'a self, plan: &'a VmPlan) -> NodeFuture<'a, f64>;

    /// Removes a replica, which need not exist. Disks that were restored from it stay.
    fn remove_replica(&self, id: InstanceId) -> NodeFuture<'_, ()>;

    /// Returns the resource usage of a VM, or `None` if it is not on.
    fn usage(&self, id: InstanceId) -> NodeFuture<'_, Option<VmUsage>>;
}

impl VmUsage {
    /// Converts into the extra fields of a usage event.
    #[must_use]
    pub fn into_event_extra(self) -> Map<String, Value> {
        let mut extra = Map::new();
        extra.insert("cpu usage".into(), serde_json::json!(self.cpu));
        extra.insert("disk usage".into(), serde_json::json!(self.disks));
        extra.insert("network usage".into(), serde_json::json!(self.networks));
        extra
    }
}
