//! The command line of QEMU: a pure function of a VM's plan and of the resources prepared for its start.
//!
//! Values chosen by users are passed as JSON, so that they cannot inject further options.

use std::collections::BTreeSet;
use std::os::fd::RawFd;

use muster_types::instance::{MachineType, SideChannel};
use muster_types::spec::{DiskBus, Vdi, VideoSpec};
use muster_types::vm::{DiskKind, DiskPlan, NicPlan, VmPlan};
use serde_json::{Map, Value, json};

use super::vm_dir::file;

/// The number of interfaces that can be hotplugged into a q35 VM, whose root ports must exist from the start.
const SPARE_PORTS: usize = 8;

/// The PCI slot that the spare ports share; QEMU assigns other slots from the lowest upwards.
const SPARE_SLOT: u8 = 0x1c;

/// The number of ports of an AHCI controller.
const SATA_PORTS: usize = 6;

/// The number of ports of the USB controller: one for the pointer, the others for storage.
const USB_PORTS: u64 = 15;

/// Host resources that were prepared for a start.
#[derive(Debug)]
pub(super) struct StartResources {
    /// Whether the VM receives a migration.
    pub(super) incoming: bool,
    pub(super) kvm: bool,
    /// Whether the file system supports direct I/O, which bypasses the page cache.
    pub(super) direct_io: bool,
    /// The names of the files in the directory of the disks.
    pub(super) files: BTreeSet<String>,
    /// The path of the UEFI firmware.
    pub(super) firmware: Option<String>,
    /// In the order of the plan's interfaces.
    pub(super) taps: Vec<TapFds>,
    /// The listening socket of QMP.
    pub(super) qmp: RawFd,
    /// The listening socket of the serial console.
    pub(super) console: RawFd,
    /// The listening socket of the agent's serial port, if the VM has one.
    pub(super) agent: Option<RawFd>,
    pub(super) vsock: Option<VsockFd>,
}

/// The inherited file descriptor of a vsock device, and the guest's CID.
#[derive(Debug, Clone, Copy)]
pub(super) struct VsockFd {
    pub(super) fd: RawFd,
    pub(super) cid: u32,
}

/// The inherited file descriptors of an interface.
#[derive(Debug, Clone, Copy)]
pub(super) struct TapFds {
    pub(super) tap: RawFd,
    pub(super) vhost: Option<RawFd>,
}

/// Returns the QEMU device id of an interface.
pub(super) fn nic_id(nic: &NicPlan) -> String {
    format!("nic-{}", nic.interface.device())
}

/// Returns the QEMU netdev id of an interface.
pub(super) fn netdev_id(nic: &NicPlan) -> String {
    format!("net-{}", nic.interface.device())
}

/// Returns the ids of the root ports for hotplugged interfaces.
pub(super) fn spare_ports() -> impl Iterator<Item = String> {
    (0..SPARE_PORTS).map(|number| format!("spare{number}"))
}

/// Returns the machine type that a VM gets.
pub(super) fn machine_type(plan: &VmPlan) -> MachineType {
    // Only q35 has the system management mode that protects the Secure Boot keys.
    if plan.secure_boot { MachineType::Q35 } else { plan.machine_type }
}

/// Returns the QEMU driver of an interface's model.
pub(super) fn nic_driver(nic: &NicPlan) -> &str {
    if nic.model == "virtio" { "virtio-net-pci" } else { &nic.model }
}

/// Returns the device of an interface. `bus` is only set for a hotplugged one.
pub(super) fn nic_device(nic: &NicPlan, bus: Option<&str>) -> Value {
    let virtio = nic.model == "virtio";
    let driver = nic_driver(nic);
    let mut device = Map::new();
    device.insert("driver".into(), driver.into());
    device.insert("id".into(), nic_id(nic).into());
    device.insert("netdev".into(), netdev_id(nic).into());
    device.insert("mac".into(), nic.mac.to_string().into());
    if virtio {
        device.insert("host_mtu".into(), nic.mtu.into());
    }
    // VMs do not boot from the network. Only PCI devices have a boot ROM to disable.
    if !driver.starts_with("usb") && !driver.contains("isa") {
        device.insert("romfile".into(), "".into());
    }
    if let Some(bus) = bus {
        device.insert("bus".into(), bus.into());
    }
    Value::Object(device)
}

/// Returns the environment variables of QEMU.
pub(super) fn environment(plan: &VmPlan) -> Vec<(&'static str, &'static str)> {
    match plan.video.vdi {
        Vdi::SpiceConcurrent => vec![("SPICE_DEBUG_ALLOW_MC", "1")],
        Vdi::SpiceDebug => vec![("G_MESSAGES_DEBUG", "all")],
        Vdi::Spice | Vdi::Vnc => Vec::new(),
    }
}

/// Returns the arguments of QEMU.
pub(super) fn arguments(plan: &VmPlan, resources: &StartResources) -> Vec<String> {
    let mut line = CommandLine::default();
    if resources.incoming {
        line.text("-incoming", "defer");
    }
    add_board(&mut line, plan, resources);
    add_consoles(&mut line, resources);
    if let Some(firmware) = &resources.firmware {
        add_firmware(&mut line, plan, firmware);
    }
    let mut buses = Buses::default();
    line.device(&json!({ "driver": "qemu-xhci", "id": "usb", "p2": USB_PORTS, "p3": USB_PORTS }));
    let mut bootindex = 0;
    for disk in &plan.disks {
        let own_bootindex = (disk.kind != DiskKind::ConfigDrive).then_some(bootindex);
        bootindex += u64::from(own_bootindex.is_some());
        add_disk(&mut line, &mut buses, (plan, disk), own_bootindex, resources);
    }
    for (nic, fds) in plan.nics.iter().zip(&resources.taps) {
        let mut netdev = json!({ "type": "tap", "id": netdev_id(nic), "fd": fds.tap.to_string() });
        if let Some(vhost) = fds.vhost.filter(|_| nic.model == "virtio") {
            netdev["vhost"] = true.into();
            netdev["vhostfd"] = vhost.to_string().into();
        }
        line.json("-netdev", &netdev);
        line.device(&nic_device(nic, None));
    }
    add_display(&mut line, plan);
    line.json("-object", &json!({ "qom-type": "rng-builtin", "id": "rng" }));
    line.device(&json!({ "driver": "virtio-rng-pci", "rng": "rng" }));
    if machine_type(plan) == MachineType::Q35 {
        for (function, id) in spare_ports().enumerate() {
            line.device(&json!({
                "driver": "pcie-root-port", "id": id, "bus": "pcie.0", "chassis": function + 1,
                "addr": format!("{SPARE_SLOT:x}.{function}"), "multifunction": true,
            }));
        }
    }
    line.0
}

#[derive(Default)]
struct CommandLine(Vec<String>);

impl CommandLine {
    fn flag(&mut self, name: &str) {
        self.0.push(name.into());
    }

    fn text(&mut self, name: &str, value: impl Into<String>) {
        self.0.extend([name.into(), value.into()]);
    }

    fn json(&mut self, name: &str, value: &Value) {
        self.text(name, value.to_string());
    }

    fn device(&mut self, device: &Value) {
        self.text("-device", device.to_string());
    }
}

/// Adds the machine type, CPUs, memory and clock.
fn add_board(line: &mut CommandLine, plan: &VmPlan, resources: &StartResources) {
    // A comma is escaped by doubling it.
    line.text("-name", format!("guest={},debug-threads=on", plan.name.replace(',', ",,")));
    line.text("-uuid", plan.id.to_string());
    for flag in ["-no-user-config", "-nodefaults", "-no-shutdown", "-S"] {
        line.flag(flag);
    }
    line.text("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    let kind = machine_type(plan);
    let mut machine = format!("{kind},usb=off,vmport=off,dump-guest-core=off");
    if kind == MachineType::Q35 {
        machine += if plan.secure_boot { ",smm=on" } else { ",smm=off" };
    }
    if resources.firmware.is_some() {
        machine += ",pflash0=firmware,pflash1=nvram";
    }
    line.text("-machine", machine);
    line.text("-accel", if resources.kvm { "kvm" } else { "tcg" });
    // The plainest CPU is the fastest to emulate: guests use the features of the others, which are slow.
    line.text("-cpu", if resources.kvm { "host" } else { "qemu64" });
    // Some guests limit the number of sockets, but not of cores.
    line.text("-smp", format!("cpus={0},sockets=1,cores={0},threads=1", plan.cpus));
    line.text("-m", format!("size={}M", plan.memory_mb));
    line.text("-rtc", "base=utc");
    line.text("-boot", "menu=off,strict=on");
}

/// Adds QMP, the serial console and the side channels for agents.
fn add_consoles(line: &mut CommandLine, resources: &StartResources) {
    line.text("-chardev", format!("socket,id=control,fd={},server=on,wait=off", resources.qmp));
    line.text("-mon", "chardev=control,mode=control");
    line.text(
        "-chardev",
        format!(
            "socket,id=console,fd={},server=on,wait=off,logfile={},logappend=on",
            resources.console,
            file::CONSOLE
        ),
    );
    line.device(&json!({ "driver": "isa-serial", "chardev": "console" }));
    line.device(&json!({ "driver": "virtio-serial-pci", "id": "channels" }));
    if let Some(agent) = resources.agent {
        line.text("-chardev", format!("socket,id=agent,fd={agent},server=on,wait=off"));
        line.device(&json!({
            "driver": "virtserialport", "bus": "channels.0", "id": "agent", "chardev": "agent",
            "name": SideChannel::Agent.to_string(),
        }));
    }
    if let Some(VsockFd { fd, cid }) = resources.vsock {
        line.device(&json!({
            "driver": "vhost-vsock-pci", "id": "vsock", "guest-cid": cid, "vhostfd": fd.to_string(),
        }));
    }
}

/// Adds the UEFI firmware and its NVRAM.
fn add_firmware(line: &mut CommandLine, plan: &VmPlan, firmware: &str) {
    line.json(
        "-blockdev",
        &json!({
            "driver": "raw", "node-name": "firmware", "read-only": true,
            "file": { "driver": "file", "filename": firmware, "read-only": true },
        }),
    );
    line.json(
        "-blockdev",
        &json!({
            "driver": "raw", "node-name": "nvram",
            "file": { "driver": "file", "filename": disk_file(plan, file::NVRAM) },
        }),
    );
    if plan.secure_boot {
        line.text("-global", "driver=cfi.pflash01,property=secure,value=on");
    }
}

/// The number of devices on each kind of controller so far.
#[derive(Default)]
struct Buses {
    sata: usize,
    scsi: usize,
}

impl Buses {
    /// Returns a free port of an AHCI controller, which is added on demand.
    fn sata(&mut self, line: &mut CommandLine) -> String {
        let (controller, port) = (self.sata / SATA_PORTS, self.sata % SATA_PORTS);
        if port == 0 {
            line.device(&json!({ "driver": "ich9-ahci", "id": format!("sata{controller}") }));
        }
        self.sata += 1;
        format!("sata{controller}.{port}")
    }

    /// Returns a free id on the SCSI controller, which is added on demand.
    fn scsi(&mut self, line: &mut CommandLine) -> usize {
        if self.scsi == 0 {
            line.device(&json!({ "driver": "virtio-scsi-pci", "id": "scsi" }));
        }
        self.scsi += 1;
        self.scsi - 1
    }
}

fn add_disk(
    line: &mut CommandLine,
    buses: &mut Buses,
    (plan, disk): (&VmPlan, &DiskPlan),
    bootindex: Option<u64>,
    resources: &StartResources,
) {
    let name = &disk.device;
    let node = add_block_nodes(line, (plan, disk), resources);
    let bus = match (disk.kind, disk.bus) {
        // Neither bus supports optical drives.
        (DiskKind::Cdrom, DiskBus::Virtio | DiskBus::Nvme) => DiskBus::Usb,
        (_, bus) => bus,
    };
    let mut device = match (bus, disk.kind) {
        (DiskBus::Virtio, _) => json!({ "driver": "virtio-blk-pci" }),
        (DiskBus::Nvme, _) => json!({ "driver": "nvme" }),
        (DiskBus::Sata, DiskKind::Cdrom) => json!({ "driver": "ide-cd", "bus": buses.sata(line) }),
        (DiskBus::Sata, _) => json!({ "driver": "ide-hd", "bus": buses.sata(line) }),
        (DiskBus::Scsi, DiskKind::Cdrom) => {
            json!({ "driver": "scsi-cd", "bus": "scsi.0", "scsi-id": buses.scsi(line) })
        }
        (DiskBus::Scsi, _) => json!({ "driver": "scsi-hd", "bus": "scsi.0", "scsi-id": buses.scsi(line) }),
        (DiskBus::Usb, kind) => {
            // `usb-storage` supports only disks, so the SCSI device is attached to an explicit bridge.
            let bridge = format!("usb-{name}");
            line.device(&json!({ "driver": "usb-bot", "id": bridge, "bus": "usb.0" }));
            let driver = if kind == DiskKind::Cdrom { "scsi-cd" } else { "scsi-hd" };
            json!({ "driver": driver, "bus": format!("{bridge}.0") })
        }
    };
    device["id"] = format!("disk-{name}").into();
    device["serial"] = name.clone().into();
    if let Some(node) = node {
        device["drive"] = node.into();
    }
    if let Some(bootindex) = bootindex {
        device["bootindex"] = bootindex.into();
    }
    line.device(&device);
}

/// Adds the block nodes of a disk, and returns the name of the top node, or `None` for an empty drive.
fn add_block_nodes(
    line: &mut CommandLine,
    (plan, disk): (&VmPlan, &DiskPlan),
    resources: &StartResources,
) -> Option<String> {
    let name = &disk.device;
    let layer = |line: &mut CommandLine,
                 name: &str,
                 driver: &str,
                 filename: &str,
                 backing: Value,
                 is_writable: bool| {
        let mut file = json!({
            "driver": "file", "filename": filename, "node-name": format!("{name}-file"),
            "cache": { "direct": resources.direct_io }, "read-only": !is_writable,
        });
        let mut format = json!({
            "driver": driver, "node-name": name, "file": file["node-name"], "read-only": !is_writable,
            "cache": { "direct": resources.direct_io },
        });
        if driver == "qcow2" {
            format["backing"] = backing;
        }
        if is_writable {
            // Discarded and zeroed blocks take no space.
            for layer in [&mut file, &mut format] {
                layer["discard"] = "unmap".into();
            }
            format["detect-zeroes"] = "unmap".into();
            if plan.shared_storage.is_some() {
                // Another host must not open it at the same time, even if a stale VM runs there.
                file["locking"] = "on".into();
            }
        }
        line.json("-blockdev", &file);
        line.json("-blockdev", &format);
    };
    let iso = format!("{name}.iso");
    let (base, driver) = match resources.files.contains(&iso) {
        true => (iso, "raw"),
        false => (format!("{name}.base"), "qcow2"),
    };
    match disk.kind {
        DiskKind::ConfigDrive => {
            // A SATA disk cannot be read-only. Data that the guest writes is lost at the next start.
            let is_writable = disk.bus == DiskBus::Sata;
            layer(line, name, "raw", file::CONFIG_DRIVE, Value::Null, is_writable);
        }
        DiskKind::Cdrom => {
            disk.base?;
            layer(line, name, driver, &disk_file(plan, &base), Value::Null, false);
        }
        DiskKind::Disk => {
            let mut backing = Value::Null;
            if disk.base.is_some() {
                let base_node = format!("{name}-base");
                layer(line, &base_node, driver, &disk_file(plan, &base), Value::Null, false);
                backing = base_node.into();
            }
            layer(line, name, "qcow2", &disk_file(plan, &format!("{name}.qcow2")), backing, true);
        }
    }
    Some(name.clone())
}

/// Returns the path of a disk, relative to the directory of the VM.
fn disk_file(plan: &VmPlan, name: &str) -> String {
    match plan.shared_storage {
        Some(_) => format!("{}/{name}", file::DISKS_LINK),
        None => name.to_owned(),
    }
}

/// Adds the video card and the server of the display. It listens on no port: the daemon passes connections to it.
fn add_display(line: &mut CommandLine, plan: &VmPlan) {
    line.text("-display", "none");
    // An absolute pointer stays in sync with the viewer's.
    line.device(&json!({ "driver": "usb-tablet", "bus": "usb.0" }));
    if let Some(device) = video(&plan.video) {
        line.device(&device);
    }
    if plan.video.vdi == Vdi::Vnc {
        line.text("-vnc", "none,password=on");
        return;
    }
    let mut spice = format!("unix=on,addr={}/spice", file::DISPLAY_DIR);
    if plan.ports.vdi_tls.is_some() {
        // The number has no meaning for a UNIX socket, but enables TLS.
        spice += &format!(
            ",tls-port=1,tls-channel=default,x509-cacert-file={},x509-cert-file={},x509-key-file={}",
            file::CA_CERTIFICATE,
            file::CERTIFICATE,
            file::KEY
        );
    }
    line.text("-spice", spice);
    line.text("-chardev", "spicevmc,id=viewer,name=vdagent");
    line.device(&json!({
        "driver": "virtserialport", "bus": "channels.0", "chardev": "viewer", "name": "com.redhat.spice.0",
    }));
}

/// Returns the QEMU driver of a video card, or `None` without one.
pub(super) fn video_driver(spec: &VideoSpec) -> Option<String> {
    video(spec)?["driver"].as_str().map(str::to_owned)
}

/// Returns the device of a video card, with the requested memory where the model allows to set it.
fn video(spec: &VideoSpec) -> Option<Value> {
    let megabytes = spec.memory.div_ceil(1024);
    let clamped = |min: u64, max: u64| megabytes.clamp(min, max).next_power_of_two();
    Some(match spec.model.as_str() {
        "none" => return None,
        "cirrus" => json!({ "driver": "cirrus-vga", "vgamem_mb": clamped(4, 16) }),
        "vga" | "std" => json!({ "driver": "VGA", "vgamem_mb": clamped(1, 256) }),
        "qxl" => json!({ "driver": "qxl-vga", "vgamem_mb": clamped(8, 256) }),
        "vmvga" => json!({ "driver": "vmware-svga", "vgamem_mb": clamped(4, 128) }),
        "virtio" => json!({ "driver": "virtio-vga" }),
        "bochs" => json!({ "driver": "bochs-display" }),
        model => json!({ "driver": model }),
    })
}

#[cfg(test)]
mod tests;
