//! Simulated VMs follow the rules of real ones.

use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use muster_types::blob::ImageFormat;
use muster_types::ids::{BlobId, InterfaceId, UploadId};
use muster_types::instance::{FencingPolicy, MachineType};
use muster_types::spec::{DiskBus, VideoSpec};
use muster_types::storage::{ByteStream, Draft};
use muster_types::vm::{
    ChangeStream, ConfigDriveFile, ConsolePorts, DiskKind, DiskPlan, NicPlan, SnapshotDisk,
};

use super::*;

fn node() -> (SimulatedNode, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (SimulatedNode::new(1, NodeId::new(), dir.path()), dir)
}

fn disk(device: &str, size: Option<u64>, base: Option<BlobId>) -> DiskPlan {
    DiskPlan { device: device.into(), bus: DiskBus::Virtio, kind: DiskKind::Disk, size, base }
}

fn nic() -> NicPlan {
    let mac = "02:00:00:12:34:56".parse().unwrap();
    NicPlan { interface: InterfaceId::new(), vxid: 1, mac, model: "virtio".into(), mtu: 1450 }
}

fn plan(base: Option<BlobId>) -> VmPlan {
    VmPlan {
        id: InstanceId::new(),
        generation: 1,
        name: "apple".into(),
        cpus: 2,
        memory_mb: 1024,
        machine_type: MachineType::Pc,
        uefi: true,
        secure_boot: false,
        nvram_template: None,
        disks: vec![disk("vda", None, base), disk("vdb", Some(1 << 30), None)],
        nics: vec![nic()],
        video: VideoSpec::default(),
        ports: ConsolePorts { console: 30000, vdi: 30001, vdi_tls: Some(30002) },
        config_drive: Some(vec![ConfigDriveFile { path: "openstack/x".into(), content: vec![0; 4096] }]),
        side_channels: Vec::new(),
        fencing: FencingPolicy::None,
        shared_storage: None,
    }
}

struct OneChunk(Option<Bytes>);

impl Stream for OneChunk {
    type Item = Result<Bytes>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.take().map(Ok))
    }
}

/// Creates a blob with a conversion.
async fn create_image(node: &SimulatedNode, size: usize) -> BlobId {
    let (storage, draft, blob) = (node.storage(), Draft::Upload(UploadId::new()), BlobId::new());
    let data: ByteStream = Box::pin(OneChunk(Some(vec![7; size].into())));
    storage.append(draft, Some(0), u64::MAX, data).await.unwrap();
    storage.commit(draft, blob).await.unwrap();
    let facts = storage.inspect("ci", blob).await.unwrap();
    storage.convert("ci", blob, &facts).await.unwrap();
    blob
}

async fn next(changes: &mut ChangeStream) -> Option<InstanceId> {
    std::future::poll_fn(|context| changes.as_mut().poll_next(context)).await
}

async fn power(node: &SimulatedNode, id: InstanceId) -> Option<VmPower> {
    node.vms().power(id).await.unwrap()
}

#[tokio::test]
async fn vm_lifecycle_is_reported() {
    let (node, _dir) = node();
    let plan = plan(Some(create_image(&node, 1 << 20).await));
    let (vms, id) = (node.vms(), plan.id);
    let mut changes = vms.changes();
    assert!(matches!(vms.start(&plan).await, Err(Error::NotFound(_))));
    assert_eq!(power(&node, id).await, None);
    vms.build(&plan).await.unwrap();
    vms.build(&plan).await.unwrap();
    assert!(matches!(power(&node, id).await, Some(VmPower::Off { .. })));
    for refused in [vms.pause(id).await, vms.resume(id).await, vms.reset(id).await] {
        assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
    }
    assert_eq!(vms.usage(id).await.unwrap(), None);

    vms.start(&plan).await.unwrap();
    assert_eq!(next(&mut changes).await, Some(id));
    vms.start(&plan).await.unwrap();
    assert_eq!(power(&node, id).await, Some(VmPower::On));
    let console = vms.console(id, None).await.unwrap();
    let console = String::from_utf8(console.to_vec()).unwrap();
    assert!(console.contains(&id.to_string()) && console.ends_with("apple login: "), "{console}");
    assert_eq!(&vms.console(id, Some(7)).await.unwrap()[..], b"login: ");
    vms.reboot(id).await.unwrap();
    vms.reset(id).await.unwrap();
    assert_eq!(vms.console(id, None).await.unwrap().len(), 3 * console.len());
    vms.clear_console(id).await.unwrap();
    assert!(vms.console(id, None).await.unwrap().is_empty());

    vms.pause(id).await.unwrap();
    assert_eq!(next(&mut changes).await, Some(id));
    assert_eq!(power(&node, id).await, Some(VmPower::Paused));
    vms.start(&plan).await.unwrap();
    assert_eq!(power(&node, id).await, Some(VmPower::Paused));
    vms.resume(id).await.unwrap();
    let before = vms.usage(id).await.unwrap().unwrap();
    let after = vms.usage(id).await.unwrap().unwrap();
    assert!(after.cpu["cpu time ns"] > before.cpu["cpu time ns"]);
    assert!(after.disks["vdb"]["write bytes"] > before.disks["vdb"]["write bytes"]);
    assert!(after.networks["02:00:00:12:34:56"]["read packets"] > 0);

    vms.stop(id).await.unwrap();
    vms.stop(InstanceId::new()).await.unwrap();
    assert_eq!(vms.list().await.unwrap().len(), 1);
    vms.remove(id).await.unwrap();
    vms.remove(id).await.unwrap();
    assert_eq!((node.vm_ids(), power(&node, id).await), (vec![], None));
}

#[tokio::test]
async fn reports_why_a_vm_is_no_longer_running() {
    let (node, _dir) = node();
    let plan = plan(None);
    let (vms, id) = (node.vms(), plan.id);
    let mut changes = vms.changes();
    vms.build(&plan).await.unwrap();
    for (end, expected) in [
        (
            &(|| node.power_off(id, "the guest did it")) as &dyn Fn(),
            VmPower::Off { reason: "the guest did it".into() },
        ),
        (&|| node.crash(id, "signal 9"), VmPower::Crashed { reason: "signal 9".into() }),
        (&|| node.lose_all_vms(), VmPower::Lost),
    ] {
        vms.start(&plan).await.unwrap();
        next(&mut changes).await;
        end();
        assert_eq!(next(&mut changes).await, Some(id));
        assert_eq!(power(&node, id).await, Some(expected));
    }
}

#[tokio::test]
async fn rejects_disk_without_base_or_smaller_than_it() {
    let (node, _dir) = node();
    let missing = plan(Some(BlobId::new()));
    let refused = node.vms().build(&missing).await;
    assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
    let mut small = plan(Some(create_image(&node, 2 << 20).await));
    small.disks[0].size = Some(1 << 20);
    let refused = node.vms().build(&small).await.unwrap_err();
    assert!(matches!(refused, Error::Invalid(_)), "{refused:?}");
    assert!(refused.to_string().contains("1048576") && refused.to_string().contains("2097152"), "{refused}");
    assert_eq!(node.vm_ids(), []);
    // A built VM no longer needs the conversion.
    small.disks[0].size = None;
    node.vms().build(&small).await.unwrap();
    node.storage().remove_conversion(small.disks[0].base.unwrap()).await.unwrap();
    node.vms().build(&small).await.unwrap();
    node.vms().start(&small).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn script_sets_start_duration_and_errors() {
    let (node, _dir) = node();
    let plan = plan(None);
    let script = SimulationScript { build_error: Some("no".into()), ..SimulationScript::default() };
    node.set_script(script);
    let refused = node.vms().build(&plan).await;
    assert!(matches!(&refused, Err(Error::Conflict(reason)) if reason == "no"), "{refused:?}");
    let (start_duration, console_text) = (Duration::from_secs(30), Some("hello\n".to_owned()));
    node.set_script(SimulationScript { start_duration, console_text, ..SimulationScript::default() });
    node.vms().build(&plan).await.unwrap();
    let before = tokio::time::Instant::now();
    node.vms().start(&plan).await.unwrap();
    assert_eq!(before.elapsed().as_secs(), 30);
    assert_eq!(&node.vms().console(plan.id, None).await.unwrap()[..], b"hello\n");
    node.vms().stop(plan.id).await.unwrap();
    node.set_script(SimulationScript { start_error: Some("no".into()), ..SimulationScript::default() });
    assert!(matches!(node.vms().start(&plan).await, Err(Error::Conflict(_))));
    assert!(matches!(power(&node, plan.id).await, Some(VmPower::Off { .. })));
}

#[tokio::test]
async fn screenshots_and_snapshots_become_blobs() {
    let (node, _dir) = node();
    let plan = plan(Some(create_image(&node, 1 << 20).await));
    let (vms, id) = (node.vms(), plan.id);
    vms.build(&plan).await.unwrap();
    let (screen, blob) = (Draft::Vm(BlobId::new()), BlobId::new());
    assert!(matches!(vms.screenshot(id, screen).await, Err(Error::Conflict(_))));
    vms.start(&plan).await.unwrap();
    vms.screenshot(id, screen).await.unwrap();
    vms.screenshot(id, screen).await.unwrap();
    assert!(node.storage().commit(screen, blob).await.unwrap().size > 1000);

    let snapshot = |device: &str| SnapshotDisk {
        device: device.into(),
        draft: Draft::Vm(BlobId::new()),
        thin: device == "vda",
    };
    let snapshots = ["vda", "vdb", "nvram"].map(snapshot);
    vms.snapshot(id, &snapshots, true).await.unwrap();
    let mut contents = Vec::new();
    for (disk, size) in snapshots.iter().zip([1 << 20, 1 << 30]) {
        let blob = BlobId::new();
        contents.push(node.storage().commit(disk.draft, blob).await.unwrap().checksums.sha256);
        let facts = node.storage().inspect("ci", blob).await.unwrap();
        assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Qcow2, size));
    }
    assert_ne!(contents[0], contents[1]);
    assert_eq!(node.storage().draft_size(snapshots[2].draft).await.unwrap(), Some(64 << 10));
    // A new snapshot replaces the draft and its checksums.
    vms.snapshot(id, &snapshots[..1], false).await.unwrap();
    let again = node.storage().digest(snapshots[0].draft).await.unwrap().checksums.sha256;
    assert_ne!(again, contents[0]);
    assert!(matches!(vms.snapshot(id, &[snapshot("vdz")], false).await, Err(Error::Conflict(_))));
}

#[tokio::test]
async fn no_two_running_vms_share_a_port() {
    let (node, _dir) = node();
    let (one, mut other) = (plan(None), plan(None));
    for plan in [&one, &other] {
        node.vms().build(plan).await.unwrap();
    }
    node.vms().start(&one).await.unwrap();
    let refused = node.vms().start(&other).await;
    assert!(matches!(refused, Err(Error::PortInUse(_))), "{refused:?}");
    let reserved: Vec<u16> = (30003..49990).collect();
    let mut chosen = node.vms().choose_ports(10, &reserved).await.unwrap();
    chosen.sort_unstable();
    assert_eq!(chosen, (49990..50000).collect::<Vec<u16>>());
    assert!(node.vms().choose_ports(11, &reserved).await.is_err());
    other.ports = ConsolePorts { console: chosen[0], vdi: chosen[1], vdi_tls: None };
    node.vms().start(&other).await.unwrap();
}

#[tokio::test]
async fn attaches_an_interface_once() {
    let (node, _dir) = node();
    let (plan, new) = (plan(None), nic());
    assert!(matches!(node.vms().attach_nic(plan.id, &new).await, Err(Error::NotFound(_))));
    node.vms().build(&plan).await.unwrap();
    node.vms().start(&plan).await.unwrap();
    for nic in [&new, &new, &plan.nics[0]] {
        node.vms().attach_nic(plan.id, nic).await.unwrap();
    }
    let stored = node.vm_plan(plan.id).unwrap();
    assert_eq!(stored.nics, [plan.nics[0].clone(), new]);
    assert_eq!(stored.config_drive, Some(Vec::new()));
}

#[tokio::test]
async fn node_report_includes_its_vms() {
    let (node, _dir) = node();
    let node = node.with_size(4, 4096, 10);
    let plan = plan(None);
    node.vms().build(&plan).await.unwrap();
    let report = node.report().await.unwrap().resources;
    assert_eq!((&report["instances_total"], &report["instances_active"]), (&1.into(), &0.into()));
    node.vms().start(&plan).await.unwrap();
    let report = node.report().await.unwrap().resources;
    for (key, value) in [
        ("instances_active", 1),
        ("cpu_total_instance_vcpus", 2),
        ("cpu_max_per_instance", 4),
        ("memory_available", 3072),
        ("memory_total_instance_max", 1024),
        ("disk_total", 10u64 << 30),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
    assert_eq!(report["accelerator"], "simulated");
}

#[tokio::test]
async fn restart_of_the_process_counts_as_host_reboot() {
    let (node, dir) = node();
    let plans: Vec<VmPlan> = (0..4)
        .map(|number| {
            let port = 30000 + 3 * number;
            let ports = ConsolePorts { console: port, vdi: port + 1, vdi_tls: None };
            VmPlan { ports, ..plan(None) }
        })
        .collect();
    for plan in &plans {
        node.vms().build(plan).await.unwrap();
    }
    for plan in &plans[1..] {
        node.vms().start(plan).await.unwrap();
    }
    node.vms().stop(plans[2].id).await.unwrap();
    node.vms().remove(plans[3].id).await.unwrap();
    drop(node);
    let node = SimulatedNode::new(1, NodeId::new(), dir.path());
    assert!(matches!(power(&node, plans[0].id).await, Some(VmPower::Off { .. })));
    assert_eq!(power(&node, plans[1].id).await, Some(VmPower::Lost));
    assert!(matches!(power(&node, plans[2].id).await, Some(VmPower::Off { .. })));
    assert_eq!(power(&node, plans[3].id).await, None);
    node.vms().start(&plans[1]).await.unwrap();
    assert_eq!(node.vm_plan(plans[1].id).unwrap().name, "apple");
    for plan in &plans {
        node.vms().remove(plan.id).await.unwrap();
    }
    assert_eq!(std::fs::read_dir(dir.path().join("machines")).unwrap().count(), 0);
}

#[test]
fn ping_output_has_the_format_of_ping() {
    let address = "10.0.0.2".parse().unwrap();
    let lines = ping_output(address, true);
    assert_eq!(lines.iter().filter(|line| line.contains("icmp_seq")).count(), 10);
    assert_eq!(lines.last().map(String::as_str), Some(""));
    assert!(ping_output(address, false).iter().any(|line| line.contains("100% packet loss")));
}
