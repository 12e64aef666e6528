//! The hardware that plans can describe.

use muster_types::guest::AgentState;
use muster_types::ids::InterfaceId;
use muster_types::instance::{MachineType, SideChannel};
use muster_types::node::NodeApi as _;
use muster_types::spec::{DiskBus, Vdi};
use muster_types::vm::{DiskKind, DiskPlan, NicPlan, VmPower};

use crate::fixture::{Fixture, GUEST_TIMEOUT, next, sh};

/// A tap device for an interface, deleted when dropped.
struct Tap(InterfaceId);

impl Tap {
    fn new() -> Option<Self> {
        let tap = Self(InterfaceId::new());
        let created =
            std::process::Command::new("ip").args(["tuntap", "add", &tap.0.device(), "mode", "tap"]).status();
        if !created.is_ok_and(|status| status.success()) {
            muster_testing::skipped("the privilege to create network devices");
            return None;
        }
        sh(&format!("ip link set {} up", tap.0.device()));
        Some(tap)
    }

    fn nic(&self, number: u8, model: &str) -> NicPlan {
        let mac = format!("02:00:00:00:00:{number:02x}").parse().unwrap();
        NicPlan { interface: self.0, vxid: 1, mac, model: model.into(), mtu: 1400 }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip").args(["link", "del", &self.0.device()]).output();
    }
}

#[tokio::test]
async fn guest_sees_hotplugged_interfaces() {
    let Some(fixture) = Fixture::new().await else { return };
    let vms = fixture.vms();
    let (Some(first), Some(second), Some(third)) = (Tap::new(), Tap::new(), Tap::new()) else { return };
    for machine_type in [MachineType::Q35, MachineType::Pc] {
        let mut plan = fixture.plan("plugged").await;
        plan.machine_type = machine_type;
        plan.nics.push(first.nic(1, "virtio"));
        let mut console = fixture.boot(&plan).await;
        console.log_in().await;
        assert_eq!(console.run("cat /sys/class/net/eth0/address").await, "02:00:00:00:00:01\n");
        assert_eq!(console.run("cat /sys/class/net/eth0/mtu").await, "1400\n");
        let nic = second.nic(2, "virtio");
        vms.attach_nic(plan.id, &nic).await.unwrap();
        vms.attach_nic(plan.id, &nic).await.unwrap();
        let seen =
            console.run("until cat /sys/class/net/eth1/address; do usleep 20000; done 2>/dev/null").await;
        assert!(seen.contains("02:00:00:00:00:02"), "{seen}");
        let usage = vms.usage(plan.id).await.unwrap().unwrap();
        assert_eq!(usage.networks.len(), 2);
        assert!(usage.networks["02:00:00:00:00:01"]["write packets"] > 0, "{usage:?}");
        // An unknown model, and an interface without a network.
        let wrong = vms.attach_nic(plan.id, &third.nic(3, "nonsense")).await.unwrap_err();
        assert!(
            matches!(&wrong, muster_types::Error::Conflict(text) if text.contains("nonsense")),
            "{wrong:?}"
        );
        vms.attach_nic(plan.id, &third.nic(3, "e1000")).await.unwrap();
        let missing = vms.attach_nic(plan.id, &NicPlan { interface: InterfaceId::new(), ..nic }).await;
        assert!(matches!(missing, Err(muster_types::Error::Unavailable(_))), "{missing:?}");
        vms.remove(plan.id).await.unwrap();
    }
}

/// Starts and removes a VM with a modified plan.
async fn start_with(fixture: &Fixture, change: impl FnOnce(&mut muster_types::vm::VmPlan)) {
    let mut plan = fixture.plan("hardware").await;
    change(&mut plan);
    let what = format!("{:?} {:?} {:?}", plan.machine_type, plan.disks, plan.video);
    fixture.vms().build(&plan).await.unwrap();
    fixture.vms().start(&plan).await.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(fixture.power(&plan).await, VmPower::On, "{what}");
    fixture.vms().remove(plan.id).await.unwrap();
}

#[tokio::test]
async fn starts_with_every_bus_display_and_firmware() {
    let Some(fixture) = Fixture::new().await else { return };
    for bus in [DiskBus::Sata, DiskBus::Scsi, DiskBus::Usb, DiskBus::Virtio, DiskBus::Nvme] {
        for machine_type in [MachineType::Pc, MachineType::Q35] {
            start_with(&fixture, |plan| {
                plan.machine_type = machine_type;
                plan.disks.iter_mut().for_each(|disk| disk.bus = bus);
                let disk = |device: &str, kind, base| DiskPlan {
                    device: device.into(),
                    bus,
                    kind,
                    size: (kind == DiskKind::Disk).then_some(1 << 30),
                    base,
                };
                plan.disks.push(disk("sdx", DiskKind::Disk, None));
                plan.disks.push(disk("sdy", DiskKind::Cdrom, Some(fixture.image)));
                plan.disks.push(disk("sdz", DiskKind::Cdrom, None));
            })
            .await;
        }
    }
    for vdi in [Vdi::Vnc, Vdi::Spice, Vdi::SpiceConcurrent, Vdi::SpiceDebug] {
        start_with(&fixture, |plan| plan.video.vdi = vdi).await;
    }
    for model in ["vga", "qxl", "virtio", "vmvga", "bochs", "none", "VGA"] {
        for memory in [1, 16384, 65536] {
            start_with(&fixture, |plan| {
                plan.video.model = model.into();
                plan.video.memory = memory;
            })
            .await;
        }
    }
    if !std::path::Path::new("/usr/share/OVMF/OVMF_CODE_4M.fd").exists() {
        return muster_testing::skipped("ovmf");
    }
    for (secure_boot, machine_type) in
        [(false, MachineType::Pc), (false, MachineType::Q35), (true, MachineType::Pc)]
    {
        start_with(&fixture, |plan| {
            (plan.uefi, plan.secure_boot, plan.machine_type) = (true, secure_boot, machine_type);
        })
        .await;
    }
}

#[tokio::test]
async fn guest_boots_from_other_buses_and_with_uefi() {
    let Some(fixture) = Fixture::new().await else { return };
    let vms = fixture.vms();
    for (bus, machine_type) in [(DiskBus::Scsi, MachineType::Pc), (DiskBus::Nvme, MachineType::Q35)] {
        let mut plan = fixture.plan(&bus.to_string()).await;
        plan.machine_type = machine_type;
        plan.disks.iter_mut().for_each(|disk| disk.bus = bus);
        let mut console = fixture.boot(&plan).await;
        let before = console.log_in().await;
        assert!(before.ends_with(&bus.to_string()), "{before}");
        vms.remove(plan.id).await.unwrap();
    }
    if !std::path::Path::new("/usr/share/OVMF/OVMF_CODE_4M.fd").exists() {
        return muster_testing::skipped("ovmf");
    }
    let mut plan = fixture.plan("uefi").await;
    (plan.uefi, plan.secure_boot, plan.memory_mb) = (true, true, 512);
    let mut console = fixture.boot(&plan).await;
    let before = console.log_in().await;
    assert!(before.ends_with("uefi"), "{before}");
    let secure = console.run("dmesg | grep -i 'secure boot'").await;
    assert!(secure.contains("Secure boot enabled"), "{secure}");
    // The NVRAM can be copied, too.
    let blob = muster_types::ids::BlobId::new();
    let copy = muster_types::vm::SnapshotDisk {
        device: "nvram".into(),
        draft: muster_types::storage::Draft::Vm(blob),
        thin: false,
    };
    vms.snapshot(plan.id, &[copy], false).await.unwrap();
    let copied = std::fs::read(fixture.storage.path().join(format!("drafts/machine-{blob}"))).unwrap();
    assert_eq!(copied, std::fs::read(fixture.vm_dir(&plan).join("nvram.fd")).unwrap());
    vms.remove(plan.id).await.unwrap();
}

// The daemon forwards connections while the test waits for openssl.
#[tokio::test(flavor = "multi_thread")]
async fn display_uses_the_certificate_that_the_node_reports() {
    let Some(fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("screen").await;
    fixture.boot(&plan).await;
    let display = fixture.node().report().await.unwrap().display.unwrap();
    assert_eq!(display.subject, "O=Muster,CN=here");
    let authority = fixture.storage.path().join("authority.pem");
    std::fs::write(&authority, display.authority).unwrap();
    let port = plan.ports.vdi_tls.unwrap();
    let seen = sh(&format!(
        "openssl s_client -connect 127.0.0.1:{port} -CAfile {} -verify_return_error </dev/null 2>&1",
        authority.display()
    ));
    assert!(seen.contains("Verify return code: 0 (ok)") && seen.contains("O = Muster, CN = here"), "{seen}");
    // Only the VM's user can read the key, and it cannot create files in the directory.
    let mode = |name: &str| sh(&format!("stat -c '%a %U' {}", fixture.vm_dir(&plan).join(name).display()));
    assert!(mode("screen-key.pem").starts_with("600"), "{}", mode("screen-key.pem"));
    if nix::unistd::geteuid().is_root() {
        assert_eq!(mode("").trim(), "710 root");
    }
    // VNC is not encrypted.
    let mut vnc = fixture.plan("vnc").await;
    vnc.video.vdi = Vdi::Vnc;
    vnc.ports.vdi_tls = None;
    fixture.boot(&vnc).await;
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", vnc.ports.vdi)).await.unwrap();
    let mut greeting = [0; 4];
    tokio::io::AsyncReadExt::read_exact(&mut stream, &mut greeting).await.unwrap();
    assert_eq!(&greeting, b"RFB ");
}

#[tokio::test]
async fn agent_is_reachable_with_and_without_vsock() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let mut plan = fixture.plan("listens").await;
    plan.side_channels = vec![SideChannel::Agent2];
    fixture.vms().build(&plan).await.unwrap();
    fixture.vms().start(&plan).await.unwrap();
    let has_vsock = std::fs::File::options().read(true).write(true).open("/dev/vhost-vsock").is_ok();
    // The next daemon uses the same side channel.
    for _ in 0..2 {
        let guests = fixture.node().guests();
        let mut changes = guests.changes();
        fixture.node().report().await.unwrap();
        let wait = async {
            loop {
                let report = guests.report(plan.id).unwrap();
                // The small guest's agent does not listen on vsock, but uses the serial port that replaces it.
                match report.state {
                    AgentState::NoContact if has_vsock => break,
                    AgentState::Ready => break assert!(!has_vsock),
                    _ => next(&mut changes).await.unwrap(),
                };
            }
        };
        tokio::time::timeout(GUEST_TIMEOUT, wait).await.unwrap();
        fixture.restart_daemon();
    }
}
