//! What a machine is made of, as the arguments of QEMU: a pure function of its plan and of what was prepared for it.
//!
//! Whatever callers may choose goes in as JSON, where no comma can add anything to it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::RawFd;

use muster_types::instance::{MachineType, SideChannel};
use muster_types::spec::{DiskBus, Vdi, VideoSpec};
use muster_types::vm::{DiskKind, DiskPlan, NicPlan, VmPlan};
use serde_json::{Map, Value, json};

/// Files of a machine, in its folder.
pub(super) mod file {
    pub(in crate::vm) const CONFIG_DRIVE: &str = "config.iso";
    pub(in crate::vm) const NVRAM: &str = "nvram.fd";
    pub(in crate::vm) const CONSOLE: &str = "console.log";
    pub(in crate::vm) const AUTHORITY: &str = "screen-ca.pem";
    pub(in crate::vm) const CERTIFICATE: &str = "screen-cert.pem";
    pub(in crate::vm) const KEY: &str = "screen-key.pem";
}

/// How many interfaces can be added while a q35 machine runs, whose slots must be there from the start.
const SPARE_PORTS: usize = 8;

/// The slot that they share; QEMU fills the others from below.
const SPARE_SLOT: u8 = 0x1c;

/// Disks on one AHCI controller.
const SATA_PORTS: usize = 6;

/// Ports of the USB controller: for storage, and one for the pointer.
const USB_PORTS: u64 = 15;

/// What was prepared for a start.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) kvm: bool,
    /// Where screens and consoles are served.
    pub(super) listen: IpAddr,
    /// Whether the file system lets QEMU bypass the page cache.
    pub(super) direct: bool,
    /// Names of the files in the machine's folder.
    pub(super) files: BTreeSet<String>,
    /// The firmware of a UEFI machine.
    pub(super) firmware: Option<String>,
    /// In the order of the plan's interfaces.
    pub(super) taps: Vec<TapFiles>,
    pub(super) control: RawFd,
    /// Of a machine with the side channel for agents.
    pub(super) agent: Option<RawFd>,
    /// Of a machine with the side channel for agents that listen.
    pub(super) vsock: Option<VsockFile>,
}

/// A virtual socket's file, as a number that QEMU inherits, and the number of the guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct VsockFile {
    pub(super) file: RawFd,
    pub(super) number: u32,
}

/// An interface's files, as numbers that QEMU inherits.
#[derive(Debug, Clone, Copy)]
pub(super) struct TapFiles {
    pub(super) tap: RawFd,
    pub(super) vhost: Option<RawFd>,
}

/// The name of an interface's device in QEMU.
pub(super) fn nic_id(nic: &NicPlan) -> String {
    format!("nic-{}", nic.interface.device())
}

pub(super) fn netdev_id(nic: &NicPlan) -> String {
    format!("net-{}", nic.interface.device())
}

/// The names of the ports for interfaces that come later.
pub(super) fn spare_ports() -> impl Iterator<Item = String> {
    (0..SPARE_PORTS).map(|number| format!("spare{number}"))
}

/// The mainboard that a machine gets.
pub(super) fn machine_type(plan: &VmPlan) -> MachineType {
    // Only q35 has the system management mode that protects the keys.
    if plan.secure_boot { MachineType::Q35 } else { plan.machine_type }
}

/// What QEMU calls an interface's model.
pub(super) fn nic_driver(nic: &NicPlan) -> &str {
    if nic.model == "virtio" { "virtio-net-pci" } else { &nic.model }
}

/// An interface as a device. `bus` is only for one that comes later.
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
    // Nothing boots from networks. Only PCI devices have a ROM that could.
    if !driver.starts_with("usb") && !driver.contains("isa") {
        device.insert("romfile".into(), "".into());
    }
    if let Some(bus) = bus {
        device.insert("bus".into(), bus.into());
    }
    Value::Object(device)
}

/// Variables in the environment of a machine's QEMU.
pub(super) fn environment(plan: &VmPlan) -> Vec<(&'static str, &'static str)> {
    match plan.video.vdi {
        Vdi::SpiceConcurrent => vec![("SPICE_DEBUG_ALLOW_MC", "1")],
        Vdi::SpiceDebug => vec![("G_MESSAGES_DEBUG", "all")],
        Vdi::Spice | Vdi::Vnc => Vec::new(),
    }
}

/// The whole command line, without the program.
pub(super) fn arguments(plan: &VmPlan, prepared: &Prepared) -> Vec<String> {
    let mut line = Line::default();
    board(&mut line, plan, prepared);
    control(&mut line, plan, prepared);
    if let Some(firmware) = &prepared.firmware {
        pflash(&mut line, plan, firmware);
    }
    let mut buses = Buses::default();
    line.device(&json!({ "driver": "qemu-xhci", "id": "usb", "p2": USB_PORTS, "p3": USB_PORTS }));
    let mut bootindex = 0;
    for disk in &plan.disks {
        let boots = (disk.kind != DiskKind::ConfigDrive).then_some(bootindex);
        bootindex += u64::from(boots.is_some());
        disk_device(&mut line, &mut buses, disk, boots, prepared);
    }
    for (nic, files) in plan.nics.iter().zip(&prepared.taps) {
        let mut netdev = json!({ "type": "tap", "id": netdev_id(nic), "fd": files.tap.to_string() });
        if let Some(vhost) = files.vhost.filter(|_| nic.model == "virtio") {
            netdev["vhost"] = true.into();
            netdev["vhostfd"] = vhost.to_string().into();
        }
        line.json("-netdev", &netdev);
        line.device(&nic_device(nic, None));
    }
    screen(&mut line, plan, prepared.listen);
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
struct Line(Vec<String>);

impl Line {
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

/// Mainboard, processors, memory, clock.
fn board(line: &mut Line, plan: &VmPlan, prepared: &Prepared) {
    // A comma in a value is written twice.
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
    if prepared.firmware.is_some() {
        machine += ",pflash0=firmware,pflash1=nvram";
    }
    line.text("-machine", machine);
    line.text("-accel", if prepared.kvm { "kvm" } else { "tcg" });
    // Emulated, the plain processor is the fastest: guests use what the others have, and that is slow.
    line.text("-cpu", if prepared.kvm { "host" } else { "qemu64" });
    // Some systems use only so many sockets, but any number of cores.
    line.text("-smp", format!("cpus={0},sockets=1,cores={0},threads=1", plan.cpus));
    line.text("-m", format!("size={}M", plan.memory_mb));
    line.text("-rtc", "base=utc");
    line.text("-boot", "menu=off,strict=on");
}

/// The ways in for us and for agents, and the serial console.
fn control(line: &mut Line, plan: &VmPlan, prepared: &Prepared) {
    line.text("-chardev", format!("socket,id=control,fd={},server=on,wait=off", prepared.control));
    line.text("-mon", "chardev=control,mode=control");
    line.text(
        "-chardev",
        format!(
            "socket,id=console,host={},port={},server=on,wait=off,telnet=on,logfile={},logappend=on",
            prepared.listen,
            plan.ports.console,
            file::CONSOLE
        ),
    );
    line.device(&json!({ "driver": "isa-serial", "chardev": "console" }));
    line.device(&json!({ "driver": "virtio-serial-pci", "id": "channels" }));
    if let Some(agent) = prepared.agent {
        line.text("-chardev", format!("socket,id=agent,fd={agent},server=on,wait=off"));
        line.device(&json!({
            "driver": "virtserialport", "bus": "channels.0", "id": "agent", "chardev": "agent",
            "name": SideChannel::Agent.to_string(),
        }));
    }
    if let Some(VsockFile { file, number }) = prepared.vsock {
        line.device(&json!({
            "driver": "vhost-vsock-pci", "id": "vsock", "guest-cid": number, "vhostfd": file.to_string(),
        }));
    }
}

/// The firmware of a UEFI machine and its memory.
fn pflash(line: &mut Line, plan: &VmPlan, firmware: &str) {
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
            "file": { "driver": "file", "filename": file::NVRAM },
        }),
    );
    if plan.secure_boot {
        line.text("-global", "driver=cfi.pflash01,property=secure,value=on");
    }
}

/// How many devices the controllers have so far.
#[derive(Default)]
struct Buses {
    sata: usize,
    scsi: usize,
}

impl Buses {
    /// A free port of an AHCI controller, which is added when it is needed.
    fn sata(&mut self, line: &mut Line) -> String {
        let (controller, port) = (self.sata / SATA_PORTS, self.sata % SATA_PORTS);
        if port == 0 {
            line.device(&json!({ "driver": "ich9-ahci", "id": format!("sata{controller}") }));
        }
        self.sata += 1;
        format!("sata{controller}.{port}")
    }

    /// A free number on the SCSI controller, which is added when it is needed.
    fn scsi(&mut self, line: &mut Line) -> usize {
        if self.scsi == 0 {
            line.device(&json!({ "driver": "virtio-scsi-pci", "id": "scsi" }));
        }
        self.scsi += 1;
        self.scsi - 1
    }
}

fn disk_device(
    line: &mut Line,
    buses: &mut Buses,
    disk: &DiskPlan,
    bootindex: Option<u64>,
    prepared: &Prepared,
) {
    let name = &disk.device;
    let medium = medium(line, disk, prepared);
    let bus = match (disk.kind, disk.bus) {
        // Neither knows drives for discs.
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
            // The short form can only be a disk, and is none of those that can be a disc.
            let bridge = format!("usb-{name}");
            line.device(&json!({ "driver": "usb-bot", "id": bridge, "bus": "usb.0" }));
            let driver = if kind == DiskKind::Cdrom { "scsi-cd" } else { "scsi-hd" };
            json!({ "driver": driver, "bus": format!("{bridge}.0") })
        }
    };
    device["id"] = format!("disk-{name}").into();
    device["serial"] = name.clone().into();
    if let Some(medium) = medium {
        device["drive"] = medium.into();
    }
    if let Some(bootindex) = bootindex {
        device["bootindex"] = bootindex.into();
    }
    line.device(&device);
}

/// What is in a disk, layer by layer from below; the name of the uppermost, or nothing for a drive without a disc.
fn medium(line: &mut Line, disk: &DiskPlan, prepared: &Prepared) -> Option<String> {
    let name = &disk.device;
    let layer = |line: &mut Line, name: &str, driver: &str, filename: &str, backing: Value, writes: bool| {
        let mut file = json!({
            "driver": "file", "filename": filename, "node-name": format!("{name}-file"),
            "cache": { "direct": prepared.direct }, "read-only": !writes,
        });
        let mut format = json!({
            "driver": driver, "node-name": name, "file": file["node-name"], "read-only": !writes,
            "cache": { "direct": prepared.direct },
        });
        if driver == "qcow2" {
            format["backing"] = backing;
        }
        if writes {
            // What the guest throws away, or fills with nothing, takes no room.
            for layer in [&mut file, &mut format] {
                layer["discard"] = "unmap".into();
            }
            format["detect-zeroes"] = "unmap".into();
        }
        line.json("-blockdev", &file);
        line.json("-blockdev", &format);
    };
    let disc = format!("{name}.iso");
    let (base, driver) = match prepared.files.contains(&disc) {
        true => (disc, "raw"),
        false => (format!("{name}.base"), "qcow2"),
    };
    match disk.kind {
        DiskKind::ConfigDrive => {
            // A SATA disk cannot be one that is only read. What the guest writes there is gone with the next start.
            let writes = disk.bus == DiskBus::Sata;
            layer(line, name, "raw", file::CONFIG_DRIVE, Value::Null, writes);
        }
        DiskKind::Cdrom => {
            disk.base?;
            layer(line, name, driver, &base, Value::Null, false);
        }
        DiskKind::Disk => {
            let mut backing = Value::Null;
            if disk.base.is_some() {
                let below = format!("{name}-base");
                layer(line, &below, driver, &base, Value::Null, false);
                backing = below.into();
            }
            layer(line, name, "qcow2", &format!("{name}.qcow2"), backing, true);
        }
    }
    Some(name.clone())
}

fn screen(line: &mut Line, plan: &VmPlan, listen: IpAddr) {
    line.text("-display", "none");
    // Knows where the viewer's pointer is.
    line.device(&json!({ "driver": "usb-tablet", "bus": "usb.0" }));
    if let Some(device) = video(&plan.video) {
        line.device(&device);
    }
    if plan.video.vdi == Vdi::Vnc {
        let host = if listen.is_ipv6() { format!("[{listen}]") } else { listen.to_string() };
        // It counts from the first port of its protocol.
        line.text("-vnc", format!("{host}:{}", plan.ports.vdi.saturating_sub(5900)));
        return;
    }
    let mut spice = format!("addr={listen},port={},disable-ticketing=on", plan.ports.vdi);
    if let Some(tls) = plan.ports.vdi_tls {
        spice += &format!(
            ",tls-port={tls},tls-channel=default,x509-cacert-file={},x509-cert-file={},x509-key-file={}",
            file::AUTHORITY,
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

/// What QEMU calls a screen's model; nothing without a screen.
pub(super) fn video_driver(spec: &VideoSpec) -> Option<String> {
    video(spec)?["driver"].as_str().map(str::to_owned)
}

/// A video card, with as much memory as was asked for where it can be told.
fn video(spec: &VideoSpec) -> Option<Value> {
    let megabytes = spec.memory.div_ceil(1024);
    let within = |least: u64, most: u64| megabytes.clamp(least, most).next_power_of_two();
    Some(match spec.model.as_str() {
        "none" => return None,
        "cirrus" => json!({ "driver": "cirrus-vga", "vgamem_mb": within(4, 16) }),
        "vga" | "std" => json!({ "driver": "VGA", "vgamem_mb": within(1, 256) }),
        "qxl" => json!({ "driver": "qxl-vga", "vgamem_mb": within(8, 256) }),
        "vmvga" => json!({ "driver": "vmware-svga", "vgamem_mb": within(4, 128) }),
        "virtio" => json!({ "driver": "virtio-vga" }),
        "bochs" => json!({ "driver": "bochs-display" }),
        model => json!({ "driver": model }),
    })
}

#[cfg(test)]
#[path = "hardware_tests.rs"]
mod tests;
