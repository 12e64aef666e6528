//! The arguments that plans result in.

use muster_types::ids::{BlobId, InstanceId, InterfaceId, StorageId};
use muster_types::instance::FencingPolicy;
use muster_types::vm::ConsolePorts;

use super::*;

fn plan() -> VmPlan {
    VmPlan {
        id: InstanceId::new(),
        generation: 1,
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
        ports: ConsolePorts { console: 31000, vdi: 31001, vdi_tls: Some(31002) },
        config_drive: None,
        side_channels: Vec::new(),
        fencing: FencingPolicy::None,
        shared_storage: None,
    }
}

fn disk(device: &str, bus: DiskBus, kind: DiskKind) -> DiskPlan {
    DiskPlan { device: device.into(), bus, kind, size: None, base: Some(BlobId::new()) }
}

fn nic(model: &str) -> NicPlan {
    let mac = "02:00:00:00:00:01".parse().unwrap();
    NicPlan { interface: InterfaceId::new(), vxid: 1, mac, model: model.into(), mtu: 1450 }
}

fn resources() -> StartResources {
    StartResources {
        incoming: false,
        kvm: false,
        direct_io: true,
        files: BTreeSet::new(),
        firmware: None,
        taps: Vec::new(),
        qmp: 10,
        console: 13,
        agent: None,
        vsock: None,
    }
}

/// Returns the values of an option.
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
fn cpu_model_follows_the_accelerator() {
    let line = arguments(&plan(), &resources());
    assert_eq!((values(&line, "-accel"), values(&line, "-cpu")), (vec!["tcg".into()], vec!["qemu64".into()]));
    let line = arguments(&plan(), &StartResources { kvm: true, ..resources() });
    assert_eq!((values(&line, "-accel"), values(&line, "-cpu")), (vec!["kvm".into()], vec!["host".into()]));
    assert_eq!(values(&line, "-smp"), ["cpus=2,sockets=1,cores=2,threads=1"]);
    assert_eq!(values(&line, "-m"), ["size=512M"]);
}

#[test]
fn names_cannot_inject_options() {
    let line = arguments(&VmPlan { name: "a,process=b".into(), ..plan() }, &resources());
    assert_eq!(values(&line, "-name"), ["guest=a,,process=b,debug-threads=on"]);
    let nic = nic_device(&nic("e1000,romfile=/etc/passwd"), None);
    assert_eq!(nic["driver"], "e1000,romfile=/etc/passwd");
}

#[test]
fn only_the_upper_layer_of_a_disk_is_writable() {
    let line = arguments(&plan(), &resources());
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
fn adds_controllers_on_demand() {
    let disks = (0..8).map(|number| disk(&format!("sd{number}"), DiskBus::Sata, DiskKind::Disk));
    let mut disks: Vec<DiskPlan> = disks.collect();
    disks.push(disk("sdx", DiskBus::Scsi, DiskKind::Disk));
    disks.push(disk("sdy", DiskBus::Scsi, DiskKind::Cdrom));
    disks.push(disk("sdz", DiskBus::Usb, DiskKind::Disk));
    disks.push(disk("vdc", DiskBus::Virtio, DiskKind::Cdrom));
    disks.push(disk("nvme0", DiskBus::Nvme, DiskKind::Disk));
    let line = arguments(&VmPlan { disks, ..plan() }, &resources());
    let devices = objects(&line, "-device");
    let count = |driver: &str| devices.iter().filter(|device| device["driver"] == driver).count();
    assert_eq!((count("ide-hd"), count("ich9-ahci"), count("virtio-scsi-pci")), (8, 2, 1));
    assert_eq!((count("scsi-hd"), count("scsi-cd"), count("usb-bot"), count("nvme")), (2, 2, 2, 1));
    assert_eq!(find(&devices, "serial", "sd6")["bus"], "sata1.0");
    // virtio has no optical drives.
    assert_eq!(find(&devices, "serial", "vdc")["bus"], "usb-vdc.0");
}

#[test]
fn empty_cdrom_has_no_medium_and_iso_is_raw() {
    let mut drive = disk("sda", DiskBus::Sata, DiskKind::Cdrom);
    let full = VmPlan { disks: vec![drive.clone()], ..plan() };
    let files = ["sda.iso".to_owned()].into();
    let line = arguments(&full, &StartResources { files, ..resources() });
    assert_eq!(find(&objects(&line, "-blockdev"), "node-name", "sda")["driver"], "raw");
    drive.base = None;
    let line = arguments(&VmPlan { disks: vec![drive], ..plan() }, &resources());
    assert!(objects(&line, "-blockdev").is_empty());
    assert_eq!(find(&objects(&line, "-device"), "driver", "ide-cd")["drive"], Value::Null);
}

#[test]
fn config_drive_is_read_only_and_not_bootable() {
    let mut drive = disk("vdb", DiskBus::Virtio, DiskKind::ConfigDrive);
    drive.base = None;
    let disks = vec![disk("vda", DiskBus::Virtio, DiskKind::Disk), drive.clone()];
    let line = arguments(&VmPlan { disks, ..plan() }, &resources());
    let medium = find(&objects(&line, "-blockdev"), "node-name", "vdb");
    assert_eq!((&medium["driver"], &medium["read-only"]), (&json!("raw"), &json!(true)));
    let device = find(&objects(&line, "-device"), "serial", "vdb");
    assert_eq!(device["bootindex"], Value::Null);
    drive.bus = DiskBus::Sata;
    let line = arguments(&VmPlan { disks: vec![drive], ..plan() }, &resources());
    assert_eq!(find(&objects(&line, "-blockdev"), "node-name", "vdb")["read-only"], false);
}

#[test]
fn only_virtio_interfaces_use_vhost() {
    let nics = vec![nic("virtio"), nic("e1000")];
    let taps = vec![TapFds { tap: 5, vhost: Some(6) }, TapFds { tap: 7, vhost: Some(8) }];
    let plan = VmPlan { nics, ..plan() };
    let line = arguments(&plan, &StartResources { taps, ..resources() });
    let netdevs = objects(&line, "-netdev");
    assert_eq!((&netdevs[0]["fd"], &netdevs[0]["vhostfd"]), (&json!("5"), &json!("6")));
    assert_eq!((&netdevs[1]["fd"], &netdevs[1]["vhost"]), (&json!("7"), &Value::Null));
    let devices = objects(&line, "-device");
    assert_eq!(find(&devices, "driver", "virtio-net-pci")["host_mtu"], 1450);
    assert_eq!(find(&devices, "driver", "e1000")["host_mtu"], Value::Null);
    assert_eq!(find(&devices, "driver", "e1000")["netdev"], netdevs[1]["id"]);
}

#[test]
fn only_q35_has_spare_root_ports() {
    let ports = |machine_type| {
        let line = arguments(&VmPlan { machine_type, ..plan() }, &resources());
        objects(&line, "-device").iter().filter(|device| device["driver"] == "pcie-root-port").count()
    };
    assert_eq!((ports(MachineType::Pc), ports(MachineType::Q35)), (0, SPARE_PORTS));
}

#[test]
fn secure_boot_uses_q35_and_protects_the_firmware() {
    let plan = VmPlan { uefi: true, secure_boot: true, ..plan() };
    let line = arguments(&plan, &StartResources { firmware: Some("/fw".into()), ..resources() });
    let machine = &values(&line, "-machine")[0];
    assert!(machine.starts_with("q35,") && machine.contains("smm=on"), "{machine}");
    assert!(machine.contains("pflash0=firmware,pflash1=nvram"), "{machine}");
    assert_eq!(values(&line, "-global"), ["driver=cfi.pflash01,property=secure,value=on"]);
    assert_eq!(find(&objects(&line, "-blockdev"), "node-name", "firmware")["read-only"], true);
}

#[test]
fn serves_display_over_spice_or_vnc() {
    let line = arguments(&plan(), &resources());
    let spice = &values(&line, "-spice")[0];
    assert!(spice.starts_with("unix=on,addr=display/spice,"), "{spice}");
    assert!(spice.contains("tls-channel=default") && !spice.contains("disable-ticketing"), "{spice}");
    let video = VideoSpec { vdi: Vdi::Vnc, model: "vga".into(), memory: 20_000 };
    let line = arguments(&VmPlan { video, ..plan() }, &resources());
    assert_eq!(values(&line, "-vnc"), ["none,password=on"]);
    assert!(values(&line, "-spice").is_empty());
    assert_eq!(find(&objects(&line, "-device"), "driver", "VGA")["vgamem_mb"], 32);
    let spec = |vdi| environment(&VmPlan { video: VideoSpec { vdi, ..VideoSpec::default() }, ..plan() });
    assert_eq!(spec(Vdi::SpiceConcurrent), [("SPICE_DEBUG_ALLOW_MC", "1")]);
    assert!(spec(Vdi::Spice).is_empty());
}

#[test]
fn adds_only_the_prepared_side_channels() {
    let find = |resources: &StartResources, key: &str, value: &str| {
        let devices = objects(&arguments(&plan(), resources), "-device");
        devices.into_iter().find(|device| device[key] == value)
    };
    let port = StartResources { agent: Some(11), ..resources() };
    assert_eq!(find(&port, "name", "sf-agent").unwrap()["chardev"], "agent");
    assert_eq!(find(&port, "driver", "vhost-vsock-pci"), None);
    let vsock = StartResources { vsock: Some(VsockFd { fd: 12, cid: u32::MAX - 1 }), ..resources() };
    assert_eq!(find(&vsock, "name", "sf-agent"), None);
    let device = find(&vsock, "driver", "vhost-vsock-pci").unwrap();
    assert_eq!((&device["guest-cid"], &device["vhostfd"]), (&json!(4_294_967_294_u32), &json!("12")));
}

#[test]
fn disks_on_shared_storage_are_locked_and_in_their_own_directory() {
    let disks = vec![
        disk("vda", DiskBus::Virtio, DiskKind::Disk),
        disk("vdb", DiskBus::Virtio, DiskKind::ConfigDrive),
    ];
    let own = VmPlan { disks, uefi: true, ..plan() };
    let shared = VmPlan { shared_storage: Some(StorageId::new()), ..own.clone() };
    let resources = StartResources { firmware: Some("/firmware".into()), ..resources() };
    for (plan, prefix, locking) in [(own, "", Value::Null), (shared, "disks/", "on".into())] {
        let nodes = objects(&arguments(&plan, &resources), "-blockdev");
        let file = |name: &str| find(&nodes, "node-name", name);
        assert_eq!(file("vda-file")["filename"], format!("{prefix}vda.qcow2"));
        assert_eq!(file("vda-file")["locking"], locking);
        assert_eq!(file("vda-base-file")["filename"], format!("{prefix}vda.base"));
        assert_eq!(file("nvram")["file"]["filename"], format!("{prefix}nvram.fd"));
        assert_eq!(file("vdb-file")["filename"], "config.iso", "it is written at every start");
    }
}
