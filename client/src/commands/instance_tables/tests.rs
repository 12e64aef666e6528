use serde_json::{Value, from_value, json};

use super::*;

/// Creates a running instance with some fields replaced.
pub(in crate::commands) fn example(changes: &Value) -> InstanceRecord {
    let interface = json!({
        "uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "instance_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "network_uuid": "2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "macaddr": "02:00:00:00:00:07",
        "ipv4": "10.0.0.7", "floating": "192.168.20.9", "model": "virtio", "order": 0, "state": "created",
        "metadata": {}, "version": 3
    });
    let mut record = json!({
        "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": "web", "namespace": "ci", "state": "created",
        "error_message": null, "power_state": "on", "cpus": 2, "memory": 2048, "disks": [],
        "disk_spec": [{ "size": 8, "base": "label:tiny", "bus": "virtio", "type": "disk" }],
        "video": { "model": "cirrus", "memory": 16384, "vdi": "spice" }, "ssh_key": null, "user_data": null,
        "uefi": false, "secure_boot": false, "configdrive": "openstack-disk", "nvram_template": null,
        "machine_type": "pc", "side_channels": ["sf-agent"], "interfaces": [interface]
    });
    let rest = json!({
        "agent_state": null, "agent_start_time": null, "agent_system_boot_time": null, "console_port": 31000,
        "vdi_port": 31001, "vdi_tls_port": 31002, "node": "sim-1", "last_cluster_operation": null,
        "agent_operations_queue": [], "metadata": { "a": 7 }, "version": 19, "references_to": {},
        "references_from": {}
    });
    let rest = rest.as_object().into_iter().flatten();
    for (name, value) in rest.chain(changes.as_object().into_iter().flatten()) {
        record[name] = value.clone();
    }
    from_value(record).unwrap()
}

#[test]
fn lists_an_instance_in_one_line() {
    let text = table(vec![example(&json!({}))]).render(None);
    let line = "web   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  created  on     2     2.0 GiB  sim-1  ci         \
                10.0.0.7 (192.168.20.9)";
    assert_eq!(text.lines().nth(1), Some(line));
}

#[test]
fn shows_requested_disks_until_they_exist() {
    let text = details(example(&json!({}))).render(None);
    assert!(text.contains("disk 0          8 GB from label:tiny, virtio, disk\n"), "{text}");
    assert!(text.contains("metadata a      7\n") && !text.contains("error"), "{text}");
    assert!(text.contains("interface 0     10.0.0.7, floats as 192.168.20.9, mac 02:"), "{text}");
    let disks = json!([
        { "device": "vda", "bus": "virtio", "size": 8, "blob_uuid": null, "snapshot_ignores": false },
        { "device": "vdb", "bus": "virtio", "size": null, "blob_uuid": null, "snapshot_ignores": true }
    ]);
    let failed = example(&json!({ "disks": disks, "state": "error", "error_message": "no image" }));
    let text = details(failed).render(None);
    assert!(text.contains("disk vda        8 GB, virtio\ndisk vdb        config drive, virtio\n"), "{text}");
    assert!(text.contains("error           no image\n"), "{text}");
}

#[test]
fn lists_snapshots_by_device_and_age() {
    let one = |device: &str, created: f64| {
        json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "blob_uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
            "state": "created", "size": 1024, "device": device, "created": created, "anything": "else"
        })
    };
    let all = from_value(json!([one("vdc", 1.0), one("vda", 2.0), one("vda", 1.0)])).unwrap();
    let text = snapshots(all).render(None);
    let ends: Vec<&str> = text.lines().skip(1).map(|line| line.rsplit_once("  ").unwrap().1).collect();
    assert_eq!(ends, ["1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.000Z", "1970-01-01T00:00:01.000Z"]);
    assert!(text.lines().nth(3).unwrap().starts_with("vdc "), "{text}");
}

#[test]
fn pending_images_are_those_without_a_blob_before_creation() {
    let disk = |base: &str, blob: Value| json!({ "size": null, "base": base, "bus": "virtio", "type": "disk", "blob_uuid": blob });
    let blob = json!("5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01");
    let disks = json!([disk("debian:12", json!(null)), disk("label:tiny", blob)]);
    let in_state = |state: &str| example(&json!({ "state": state, "disk_spec": disks }));
    assert_eq!(pending_images(&in_state("preflight")), ["debian:12"]);
    assert!(pending_images(&in_state("creating")).is_empty());
}
