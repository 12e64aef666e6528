//! What instances and their snapshots look like in print.

use muster_types::instance::{DiskRecord, DiskSpecRecord, InstanceRecord};
use muster_types::interface::InterfaceRecord;

use super::agent::wanted;
use crate::api::SnapshotRecord;
use crate::output::{Table, compact, or_dash, size};
use crate::time::iso;

/// Megabytes for people.
pub(super) fn megabytes(count: i64) -> String {
    size(count.saturating_mul(1 << 20))
}

/// The addresses that an instance can be reached at, the floating ones in brackets.
fn addresses(interfaces: &[InterfaceRecord]) -> String {
    let addresses = interfaces.iter().filter_map(|interface| {
        let own = interface.ipv4?.to_string();
        Some(interface.floating.map_or_else(|| own.clone(), |floating| format!("{own} ({floating})")))
    });
    or_dash(addresses.collect::<Vec<_>>().join(", "))
}

/// Instances, one a line.
pub(super) fn table(mut instances: Vec<InstanceRecord>) -> Table {
    instances.sort_by(|a, b| (&a.namespace, &a.name, a.uuid).cmp(&(&b.namespace, &b.name, b.uuid)));
    let whole = ["NAME", "UUID", "STATE", "POWER", "CPUS", "MEMORY", "NODE", "NAMESPACE"];
    Table::new(&whole, &["ADDRESSES"]).rows(instances.into_iter().map(|instance| {
        let addresses = addresses(&instance.interfaces);
        [
            instance.name,
            instance.uuid.to_string(),
            instance.state.to_string(),
            instance.power_state.to_string(),
            instance.cpus.to_string(),
            megabytes(instance.memory),
            or_dash(instance.node.unwrap_or_default()),
            instance.namespace,
            addresses,
        ]
    }))
}

/// What a disk was asked to be, in one line.
pub(super) fn asked_for(disk: &DiskSpecRecord) -> String {
    let spec = &disk.spec;
    let size = spec.size.map(|size| format!("{size} GB"));
    let base = spec.base.as_ref().map(|base| format!("from {base}"));
    let what = [size, base].into_iter().flatten().collect::<Vec<_>>().join(" ");
    format!("{}, {}, {}", if what.is_empty() { "empty" } else { &what }, spec.bus, spec.disk_type)
}

fn laid_out(disk: &DiskRecord) -> String {
    let what = match (disk.size, disk.blob_uuid, disk.snapshot_ignores) {
        (Some(size), Some(blob), _) => format!("{size} GB from blob {blob}"),
        (Some(size), None, _) => format!("{size} GB"),
        (None, Some(blob), _) => format!("from blob {blob}"),
        (None, None, true) => "config drive".to_owned(),
        (None, None, false) => "empty".to_owned(),
    };
    format!("{what}, {}", disk.bus)
}

fn interface(interface: &InterfaceRecord) -> String {
    let address = interface.ipv4.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let floating = interface.floating.map_or_else(String::new, |floating| format!(", floats as {floating}"));
    format!(
        "{address}{floating}, mac {}, {}, {}, network {}, uuid {}",
        interface.macaddr, interface.model, interface.state, interface.network_uuid, interface.uuid
    )
}

/// One instance, in full.
pub(super) fn facts(instance: InstanceRecord) -> Table {
    let disks: Vec<_> = if instance.disks.is_empty() {
        let asked = instance.disk_spec.iter().enumerate();
        asked.map(|(at, disk)| (format!("disk {at}"), asked_for(disk))).collect()
    } else {
        instance.disks.iter().map(|disk| (format!("disk {}", disk.device), laid_out(disk))).collect()
    };
    let interfaces =
        instance.interfaces.iter().map(|one| (format!("interface {}", one.order), interface(one)));
    let error = instance.error_message.map(|why| ("error".to_owned(), why));
    let port = |port: Option<u16>| port.map_or_else(|| "-".to_owned(), |port| port.to_string());
    let screen = format!("{}, {} KiB, {}", instance.video.model, instance.video.memory, instance.video.vdi);
    let firmware = match (instance.uefi, instance.secure_boot) {
        (true, true) => "uefi, secure boot",
        (true, false) => "uefi",
        (false, _) => "bios",
    };
    let since = |time: Option<f64>| or_dash(time.map(iso).unwrap_or_default());
    let queue = instance.agent_operations_queue.iter();
    let queue =
        queue.map(|one| ("agent queue".to_owned(), format!("{}: {}, {}", one.uuid, wanted(one), one.state)));
    let operation = instance.last_cluster_operation.map(|last| format!("{} {}", last.op_type, last.op_uuid));
    let channels: Vec<&str> = instance.side_channels.iter().map(|channel| channel.as_str()).collect();
    let facts = [
        ("name", instance.name),
        ("uuid", instance.uuid.to_string()),
        ("namespace", instance.namespace),
        ("state", instance.state.to_string()),
        ("power", instance.power_state.to_string()),
        ("node", or_dash(instance.node.unwrap_or_default())),
        ("cpus", instance.cpus.to_string()),
        ("memory", megabytes(instance.memory)),
        ("machine", instance.machine_type.to_string()),
        ("firmware", firmware.to_owned()),
        ("config drive", instance.configdrive.to_string()),
        ("screen", screen),
        ("screen port", port(instance.vdi_tls_port.or(instance.vdi_port))),
        ("console port", port(instance.console_port)),
        ("agent", or_dash(instance.agent_state.unwrap_or_default())),
        ("agent since", since(instance.agent_start_time)),
        ("guest since", since(instance.agent_system_boot_time)),
        ("side channels", or_dash(channels.join(", "))),
        ("ssh key", or_dash(instance.ssh_key.unwrap_or_default())),
        ("last operation", or_dash(operation.unwrap_or_default())),
    ];
    let facts = facts.map(|(name, value)| (name.to_owned(), value)).into_iter();
    let metadata = instance.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    Table::facts(facts.chain(error).chain(disks).chain(interfaces).chain(queue).chain(metadata))
}

/// The copies of an instance's disks, one a line.
pub(super) fn snapshots(mut snapshots: Vec<SnapshotRecord>) -> Table {
    snapshots.sort_by(|a, b| {
        (&a.device, a.uuid)
            .cmp(&(&b.device, b.uuid))
            .then(a.created.unwrap_or(0.0).total_cmp(&b.created.unwrap_or(0.0)))
    });
    let table = Table::new(&["DEVICE", "ARTIFACT", "BLOB", "STATE", "SIZE", "SINCE"], &[]);
    table.rows(snapshots.into_iter().map(|snapshot| {
        [
            or_dash(snapshot.device.unwrap_or_default()),
            snapshot.uuid.to_string(),
            snapshot.blob_uuid.to_string(),
            snapshot.state,
            snapshot.size.map_or_else(|| "-".to_owned(), size),
            snapshot.created.map_or_else(|| "-".to_owned(), iso),
        ]
    }))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    /// An instance that runs, with some of its fields replaced.
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
    fn an_instance_is_one_line_of_a_list() {
        let text = table(vec![example(&json!({}))]).render(None);
        let line = "web   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  created  on     2     2.0 GiB  sim-1  ci         \
                    10.0.0.7 (192.168.20.9)";
        assert_eq!(text.lines().nth(1), Some(line));
    }

    #[test]
    fn disks_are_shown_as_asked_for_until_they_are_laid_out() {
        let text = facts(example(&json!({}))).render(None);
        assert!(text.contains("disk 0          8 GB from label:tiny, virtio, disk\n"), "{text}");
        assert!(text.contains("metadata a      7\n") && !text.contains("error"), "{text}");
        assert!(text.contains("interface 0     10.0.0.7, floats as 192.168.20.9, mac 02:"), "{text}");
        let disks = json!([
            { "device": "vda", "bus": "virtio", "size": 8, "blob_uuid": null, "snapshot_ignores": false },
            { "device": "vdb", "bus": "virtio", "size": null, "blob_uuid": null, "snapshot_ignores": true }
        ]);
        let failed = example(&json!({ "disks": disks, "state": "error", "error_message": "no image" }));
        let text = facts(failed).render(None);
        assert!(
            text.contains("disk vda        8 GB, virtio\ndisk vdb        config drive, virtio\n"),
            "{text}"
        );
        assert!(text.contains("error           no image\n"), "{text}");
    }

    #[test]
    fn snapshots_are_listed_by_device_and_age() {
        let one = |device: &str, created: f64| {
            json!({
                "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "blob_uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
                "state": "created", "size": 1024, "device": device, "created": created, "anything": "else"
            })
        };
        let all = from_value(json!([one("vdc", 1.0), one("vda", 2.0), one("vda", 1.0)])).unwrap();
        let text = snapshots(all).render(None);
        let ends: Vec<&str> = text.lines().skip(1).map(|line| line.rsplit_once("  ").unwrap().1).collect();
        assert_eq!(
            ends,
            ["1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.000Z", "1970-01-01T00:00:01.000Z"]
        );
        assert!(text.lines().nth(3).unwrap().starts_with("vdc "), "{text}");
    }
}
