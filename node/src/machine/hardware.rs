//! What a machine is made of, as the arguments of QEMU: a pure function of its plan and of what was prepared for it.
//!
//! Whatever callers may choose goes in as JSON, where no comma can add anything to it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::RawFd;

use muster_types::instance::{MachineType, SideChannel};
use muster_types::machine::{DiskKind, DiskPlan, MachinePlan, Nic};
use muster_types::spec::{DiskBus, Vdi, VideoSpec};
use serde_json::{Map, Value, json};

/// Files of a machine, in its folder.
pub(super) mod file {
    pub(in crate::machine) const CONFIG_DRIVE: &str = "config.iso";
    pub(in crate::machine) const NVRAM: &str = "nvram.fd";
    pub(in crate::machine) const CONSOLE: &str = "console.log";
    pub(in crate::machine) const AUTHORITY: &str = "screen-ca.pem";
    pub(in crate::machine) const CERTIFICATE: &str = "screen-cert.pem";
    pub(in crate::machine) const KEY: &str = "screen-key.pem";
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
}

/// An interface's files, as numbers that QEMU inherits.
#[derive(Debug, Clone, Copy)]
pub(super) struct TapFiles {
    pub(super) tap: RawFd,
    pub(super) vhost: Option<RawFd>,
}

/// The name of an interface's device in QEMU.
pub(super) fn nic_id(nic: &Nic) -> String {
    format!("nic-{}", nic.interface.device())
}

pub(super) fn netdev_id(nic: &Nic) -> String {
    format!("net-{}", nic.interface.device())
}

/// The names of the ports for interfaces that come later.
pub(super) fn spare_ports() -> impl Iterator<Item = String> {
    (0..SPARE_PORTS).map(|number| format!("spare{number}"))
}

/// The mainboard that a machine gets.
pub(super) fn machine_type(plan: &MachinePlan) -> MachineType {
    // Only q35 has the system management mode that protects the keys.
    if plan.secure_boot { MachineType::Q35 } else { plan.machine_type }
}

/// An interface as a device. `bus` is only for one that comes later.
pub(super) fn nic_device(nic: &Nic, bus: Option<&str>) -> Value {
    let virtio = nic.model == "virtio";
    let driver = if virtio { "virtio-net-pci" } else { &nic.model };
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
pub(super) fn environment(plan: &MachinePlan) -> Vec<(&'static str, &'static str)> {
    match plan.video.vdi {
        Vdi::SpiceConcurrent => vec![("SPICE_DEBUG_ALLOW_MC", "1")],
        Vdi::SpiceDebug => vec![("SPICE_DEBUG_LEVEL", "5"), ("G_MESSAGES_DEBUG", "all")],
        Vdi::Spice | Vdi::Vnc => Vec::new(),
    }
}

/// The whole command line, without the program.
pub(super) fn arguments(plan: &MachinePlan, prepared: &Prepared) -> Vec<String> {
    let mut line = Line::default();
    board(&mut line, plan, prepared);
    control(&mut line, plan, prepared);
    if let Some(firmware) = &prepared.firmware {
        pflash(&mut line, plan, firmware);
    }
    let mut buses = Buses::default();
    line.device(json!({ "driver": "qemu-xhci", "id": "usb", "p2": USB_PORTS, "p3": USB_PORTS }));
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
        line.device(nic_device(nic, None));
    }
    screen(&mut line, plan, prepared.listen);
    line.json("-object", &json!({ "qom-type": "rng-builtin", "id": "rng" }));
    line.device(json!({ "driver": "virtio-rng-pci", "rng": "rng" }));
    if machine_type(plan) == MachineType::Q35 {
        for (function, id) in spare_ports().enumerate() {
            line.device(json!({
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

    fn device(&mut self, device: Value) {
        self.text("-device", device.to_string());
    }
}

/// Mainboard, processors, memory, clock.
fn board(line: &mut Line, plan: &MachinePlan, prepared: &Prepared) {
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
fn control(line: &mut Line, plan: &MachinePlan, prepared: &Prepared) {
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
    line.device(json!({ "driver": "isa-serial", "chardev": "console" }));
    line.device(json!({ "driver": "virtio-serial-pci", "id": "channels" }));
    if let Some(agent) = prepared.agent.filter(|_| plan.side_channels.contains(&SideChannel::Agent)) {
        line.text("-chardev", format!("socket,id=agent,fd={agent},server=on,wait=off"));
        line.device(json!({
            "driver": "virtserialport", "bus": "channels.0", "id": "agent", "chardev": "agent",
            "name": SideChannel::Agent.to_string(),
        }));
    }
}

/// The firmware of a UEFI machine and its memory.
fn pflash(line: &mut Line, plan: &MachinePlan, firmware: &str) {
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
            line.device(json!({ "driver": "ich9-ahci", "id": format!("sata{controller}") }));
        }
        self.sata += 1;
        format!("sata{controller}.{port}")
    }

    /// A free number on the SCSI controller, which is added when it is needed.
    fn scsi(&mut self, line: &mut Line) -> usize {
        if self.scsi == 0 {
            line.device(json!({ "driver": "virtio-scsi-pci", "id": "scsi" }));
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
            line.device(json!({ "driver": "usb-bot", "id": bridge, "bus": "usb.0" }));
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
    line.device(device);
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

fn screen(line: &mut Line, plan: &MachinePlan, listen: IpAddr) {
    line.text("-display", "none");
    // Knows where the viewer's pointer is.
    line.device(json!({ "driver": "usb-tablet", "bus": "usb.0" }));
    if let Some(device) = video(&plan.video) {
        line.device(device);
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
    line.device(json!({
        "driver": "virtserialport", "bus": "channels.0", "chardev": "viewer", "name": "com.redhat.spice.0",
    }));
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
mod tests {
    use muster_types::ids::{BlobId, InstanceId, InterfaceId};
    use muster_types::machine::Ports;

    use super::*;

    fn plan() -> MachinePlan {
        MachinePlan {
            id: InstanceId::new(),
            name: "web".into(),
            cpus: 2,
            memory_mb: 512,
            machine_type: MachineType::Pc,
            uefi: false,
            secure_boot: false,
            nvram_template: None,
            disks: vec![disk("vda", DiskBus::Virtio, DiskKind::Disk)],
            nics: Vec::new(),
            video: VideoSpec::default(),
            ports: Ports { console: 31000, vdi: 31001, vdi_tls: Some(31002) },
            config_drive: None,
            side_channels: Vec::new(),
        }
    }

    fn disk(device: &str, bus: DiskBus, kind: DiskKind) -> DiskPlan {
        DiskPlan { device: device.into(), bus, kind, size: None, base: Some(BlobId::new()) }
    }

    fn nic(model: &str) -> Nic {
        let mac = "02:00:00:00:00:01".parse().unwrap();
        Nic { interface: InterfaceId::new(), vxid: 1, mac, model: model.into(), mtu: 1450 }
    }

    fn prepared() -> Prepared {
        Prepared {
            kvm: false,
            listen: IpAddr::from([127, 0, 0, 1]),
            direct: true,
            files: BTreeSet::new(),
            firmware: None,
            taps: Vec::new(),
            control: 10,
            agent: None,
        }
    }

    /// The values of an option.
    fn values(line: &[String], option: &str) -> Vec<String> {
        line.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1].clone()).collect()
    }

    fn objects(line: &[String], option: &str) -> Vec<Value> {
        values(line, option).iter().map(|value| serde_json::from_str(value).unwrap()).collect()
    }

    fn find(objects: &[Value], key: &str, value: &str) -> Value {
        let found = objects.iter().find(|object| object[key] == value);
        found.unwrap_or_else(|| panic!("no {key} {value} in {objects:?}")).clone()
    }

    #[test]
    fn the_processor_follows_the_accelerator() {
        let line = arguments(&plan(), &prepared());
        assert_eq!(
            (values(&line, "-accel"), values(&line, "-cpu")),
            (vec!["tcg".into()], vec!["qemu64".into()])
        );
        let line = arguments(&plan(), &Prepared { kvm: true, ..prepared() });
        assert_eq!(
            (values(&line, "-accel"), values(&line, "-cpu")),
            (vec!["kvm".into()], vec!["host".into()])
        );
        assert_eq!(values(&line, "-smp"), ["cpus=2,sockets=1,cores=2,threads=1"]);
        assert_eq!(values(&line, "-m"), ["size=512M"]);
    }

    #[test]
    fn a_name_adds_nothing_to_the_line() {
        let line = arguments(&MachinePlan { name: "a,process=b".into(), ..plan() }, &prepared());
        assert_eq!(values(&line, "-name"), ["guest=a,,process=b,debug-threads=on"]);
        let nic = nic_device(&nic("e1000,romfile=/etc/passwd"), None);
        assert_eq!(nic["driver"], "e1000,romfile=/etc/passwd");
    }

    #[test]
    fn a_disk_lies_over_its_base_and_only_the_upper_layer_is_written() {
        let line = arguments(&plan(), &prepared());
        let layers = objects(&line, "-blockdev");
        let (upper, base) = (find(&layers, "node-name", "vda"), find(&layers, "node-name", "vda-base"));
        assert_eq!((&upper["backing"], &upper["read-only"]), (&json!("vda-base"), &json!(false)));
        assert_eq!((&base["backing"], &base["read-only"]), (&Value::Null, &json!(true)));
        assert_eq!(find(&layers, "node-name", "vda-base-file")["filename"], "vda.base");
        assert_eq!(find(&layers, "node-name", "vda-file")["filename"], "vda.qcow2");
        let device = find(&objects(&line, "-device"), "driver", "virtio-blk-pci");
        assert_eq!((&device["bootindex"], &device["serial"]), (&json!(0), &json!("vda")));
    }

    #[test]
    fn every_bus_has_its_device_and_controllers_come_once() {
        let disks = (0..8).map(|number| disk(&format!("sd{number}"), DiskBus::Sata, DiskKind::Disk));
        let mut disks: Vec<DiskPlan> = disks.collect();
        disks.push(disk("sdx", DiskBus::Scsi, DiskKind::Disk));
        disks.push(disk("sdy", DiskBus::Scsi, DiskKind::Cdrom));
        disks.push(disk("sdz", DiskBus::Usb, DiskKind::Disk));
        disks.push(disk("vdc", DiskBus::Virtio, DiskKind::Cdrom));
        disks.push(disk("nvme0", DiskBus::Nvme, DiskKind::Disk));
        let line = arguments(&MachinePlan { disks, ..plan() }, &prepared());
        let devices = objects(&line, "-device");
        let count = |driver: &str| devices.iter().filter(|device| device["driver"] == driver).count();
        assert_eq!((count("ide-hd"), count("ich9-ahci"), count("virtio-scsi-pci")), (8, 2, 1));
        assert_eq!((count("scsi-hd"), count("scsi-cd"), count("usb-bot"), count("nvme")), (2, 2, 2, 1));
        assert_eq!(find(&devices, "serial", "sd6")["bus"], "sata1.0");
        // A drive for discs that virtio does not have.
        assert_eq!(find(&devices, "serial", "vdc")["bus"], "usb-vdc.0");
    }

    #[test]
    fn an_empty_drive_has_no_disc_and_a_disc_is_raw() {
        let mut drive = disk("sda", DiskBus::Sata, DiskKind::Cdrom);
        let full = MachinePlan { disks: vec![drive.clone()], ..plan() };
        let files = ["sda.iso".to_owned()].into();
        let line = arguments(&full, &Prepared { files, ..prepared() });
        assert_eq!(find(&objects(&line, "-blockdev"), "node-name", "sda")["driver"], "raw");
        drive.base = None;
        let line = arguments(&MachinePlan { disks: vec![drive], ..plan() }, &prepared());
        assert!(objects(&line, "-blockdev").is_empty());
        assert_eq!(find(&objects(&line, "-device"), "driver", "ide-cd")["drive"], Value::Null);
    }

    #[test]
    fn the_config_drive_is_not_booted_from_and_only_read() {
        let mut drive = disk("vdb", DiskBus::Virtio, DiskKind::ConfigDrive);
        drive.base = None;
        let disks = vec![disk("vda", DiskBus::Virtio, DiskKind::Disk), drive.clone()];
        let line = arguments(&MachinePlan { disks, ..plan() }, &prepared());
        let medium = find(&objects(&line, "-blockdev"), "node-name", "vdb");
        assert_eq!((&medium["driver"], &medium["read-only"]), (&json!("raw"), &json!(true)));
        let device = find(&objects(&line, "-device"), "serial", "vdb");
        assert_eq!(device["bootindex"], Value::Null);
        drive.bus = DiskBus::Sata;
        let line = arguments(&MachinePlan { disks: vec![drive], ..plan() }, &prepared());
        assert_eq!(find(&objects(&line, "-blockdev"), "node-name", "vdb")["read-only"], false);
    }

    #[test]
    fn interfaces_have_their_files_and_only_virtio_is_helped_by_the_kernel() {
        let nics = vec![nic("virtio"), nic("e1000")];
        let taps = vec![TapFiles { tap: 5, vhost: Some(6) }, TapFiles { tap: 7, vhost: Some(8) }];
        let plan = MachinePlan { nics, ..plan() };
        let line = arguments(&plan, &Prepared { taps, ..prepared() });
        let netdevs = objects(&line, "-netdev");
        assert_eq!((&netdevs[0]["fd"], &netdevs[0]["vhostfd"]), (&json!("5"), &json!("6")));
        assert_eq!((&netdevs[1]["fd"], &netdevs[1]["vhost"]), (&json!("7"), &Value::Null));
        let devices = objects(&line, "-device");
        assert_eq!(find(&devices, "driver", "virtio-net-pci")["host_mtu"], 1450);
        assert_eq!(find(&devices, "driver", "e1000")["host_mtu"], Value::Null);
        assert_eq!(find(&devices, "driver", "e1000")["netdev"], netdevs[1]["id"]);
    }

    #[test]
    fn only_q35_needs_ports_for_what_comes_later() {
        let ports = |machine_type| {
            let line = arguments(&MachinePlan { machine_type, ..plan() }, &prepared());
            objects(&line, "-device").iter().filter(|device| device["driver"] == "pcie-root-port").count()
        };
        assert_eq!((ports(MachineType::Pc), ports(MachineType::Q35)), (0, SPARE_PORTS));
    }

    #[test]
    fn secure_boot_brings_its_board_and_protects_the_firmware() {
        let plan = MachinePlan { uefi: true, secure_boot: true, ..plan() };
        let line = arguments(&plan, &Prepared { firmware: Some("/fw".into()), ..prepared() });
        let machine = &values(&line, "-machine")[0];
        assert!(machine.starts_with("q35,") && machine.contains("smm=on"), "{machine}");
        assert!(machine.contains("pflash0=firmware,pflash1=nvram"), "{machine}");
        assert_eq!(values(&line, "-global"), ["driver=cfi.pflash01,property=secure,value=on"]);
        assert_eq!(find(&objects(&line, "-blockdev"), "node-name", "firmware")["read-only"], true);
    }

    #[test]
    fn screens_are_served_as_asked() {
        let line = arguments(&plan(), &prepared());
        let spice = &values(&line, "-spice")[0];
        assert!(spice.starts_with("addr=127.0.0.1,port=31001,"), "{spice}");
        assert!(spice.contains("tls-port=31002,tls-channel=default"), "{spice}");
        let video = VideoSpec { vdi: Vdi::Vnc, model: "vga".into(), memory: 20_000 };
        let listen = "fd00::1".parse().unwrap();
        let line = arguments(&MachinePlan { video, ..plan() }, &Prepared { listen, ..prepared() });
        assert_eq!(values(&line, "-vnc"), ["[fd00::1]:25101"]);
        assert!(values(&line, "-spice").is_empty());
        assert_eq!(find(&objects(&line, "-device"), "driver", "VGA")["vgamem_mb"], 32);
        let spec =
            |vdi| environment(&MachinePlan { video: VideoSpec { vdi, ..VideoSpec::default() }, ..plan() });
        assert_eq!(spec(Vdi::SpiceConcurrent), [("SPICE_DEBUG_ALLOW_MC", "1")]);
        assert!(spec(Vdi::Spice).is_empty());
    }

    #[test]
    fn the_agent_has_its_port_only_if_asked_for() {
        let with = |side_channels| {
            let plan = MachinePlan { side_channels, ..plan() };
            let line = arguments(&plan, &Prepared { agent: Some(11), ..prepared() });
            objects(&line, "-device").iter().any(|device| device["name"] == "sf-agent")
        };
        assert!(with(vec![SideChannel::Agent]) && !with(vec![SideChannel::Agent2]) && !with(Vec::new()));
    }
}
