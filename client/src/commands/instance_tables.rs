//! Tables of instances and their snapshots.

use muster_types::instance::{DiskRecord, DiskSpecRecord, InstanceRecord, InstanceState};
use muster_types::interface::InterfaceRecord;

use super::agent::describe;
use crate::api::SnapshotRecord;
use crate::output::{Table, compact, format_size, or_dash};
use crate::time::format_utc;

/// Formats a number of mebibytes with a binary unit.
pub(super) fn format_megabytes(count: i64) -> String {
    format_size(count.saturating_mul(1 << 20))
}

/// Returns the addresses of an instance, with floating addresses in parentheses.
fn addresses(interfaces: &[InterfaceRecord]) -> String {
    let addresses = interfaces.iter().filter_map(|interface| {
        let own = interface.ipv4?.to_string();
        Some(interface.floating.map_or_else(|| own.clone(), |floating| format!("{own} ({floating})")))
    });
    or_dash(addresses.collect::<Vec<_>>().join(", "))
}

/// Lists instances.
pub(super) fn table(instances: Vec<InstanceRecord>) -> Table {
    let fixed = ["NAME", "UUID", "STATE", "POWER", "CPUS", "MEMORY", "NODE", "NAMESPACE"];
    Table::new(&fixed, &["ADDRESSES"]).rows(instances.into_iter().map(|instance| {
        let addresses = addresses(&instance.interfaces);
        [
            instance.name,
            instance.uuid.to_string(),
            instance.state.to_string(),
            instance.power_state.to_string(),
            instance.cpus.to_string(),
            format_megabytes(instance.memory),
            or_dash(instance.node.unwrap_or_default()),
            instance.namespace,
            addresses,
        ]
    }))
}

/// Describes a requested disk.
pub(super) fn describe_disk_spec(disk: &DiskSpecRecord) -> String {
    let spec = &disk.spec;
    let size = spec.size.map(|size| format!("{size} GB"));
    let base = spec.base.as_ref().map(|base| format!("from {base}"));
    let what = [size, base].into_iter().flatten().collect::<Vec<_>>().join(" ");
    format!("{}, {}, {}", if what.is_empty() { "empty" } else { &what }, spec.bus, spec.disk_type)
}

fn describe_disk(disk: &DiskRecord) -> String {
    let what = match (disk.size, disk.blob_uuid, disk.snapshot_ignores) {
        (Some(size), Some(blob), _) => format!("{size} GB from blob {blob}"),
        (Some(size), None, _) => format!("{size} GB"),
        (None, Some(blob), _) => format!("from blob {blob}"),
        (None, None, true) => "config drive".to_owned(),
        (None, None, false) => "empty".to_owned(),
    };
    format!("{what}, {}", disk.bus)
}

fn describe_interface(interface: &InterfaceRecord) -> String {
    let address = interface.ipv4.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let floating = interface.floating.map_or_else(String::new, |floating| format!(", floats as {floating}"));
    format!(
        "{address}{floating}, mac {}, {}, {}, network {}, uuid {}",
        interface.macaddr, interface.model, interface.state, interface.network_uuid, interface.uuid
    )
}

/// Returns where the replica of an instance is, and how far it is behind.
fn describe_replica(instance: &InstanceRecord) -> String {
    let Some(replica) = &instance.replica else {
        return if instance.replicas == 0 { "none" } else { "not placed" }.to_owned();
    };
    let node = replica.node.as_deref().unwrap_or("an unknown node");
    let behind = replica.seconds_behind.map_or_else(
        || "no complete copy".to_owned(),
        |seconds| {
            let time = format_utc(replica.last_complete.unwrap_or_default());
            let bytes = replica.bytes_behind.map(|bytes| format!(" and {}", format_size(bytes)));
            let bytes = bytes.unwrap_or_default();
            format!("{seconds} s{bytes} behind ({time})")
        },
    );
    let error = replica.error.as_ref().map_or_else(String::new, |error| format!(", failing: {error}"));
    format!("{} on {node}, {behind}{error}", replica.state)
}

/// Shows all fields of an instance.
pub(super) fn details(instance: InstanceRecord) -> Table {
    let replica = describe_replica(&instance);
    let disks: Vec<_> = if instance.disks.is_empty() {
        let requested = instance.disk_spec.iter().enumerate();
        requested.map(|(at, disk)| (format!("disk {at}"), describe_disk_spec(disk))).collect()
    } else {
        instance.disks.iter().map(|disk| (format!("disk {}", disk.device), describe_disk(disk))).collect()
    };
    let interfaces =
        instance.interfaces.iter().map(|one| (format!("interface {}", one.order), describe_interface(one)));
    let error = instance.error_message.map(|reason| ("error".to_owned(), reason));
    let port = |port: Option<u16>| port.map_or_else(|| "-".to_owned(), |port| port.to_string());
    let screen = format!("{}, {} KiB, {}", instance.video.model, instance.video.memory, instance.video.vdi);
    let firmware = match (instance.uefi, instance.secure_boot) {
        (true, true) => "uefi, secure boot",
        (true, false) => "uefi",
        (false, _) => "bios",
    };
    let since = |time: Option<f64>| or_dash(time.map(format_utc).unwrap_or_default());
    let queue = instance.agent_operations_queue.iter();
    let queue = queue
        .map(|one| ("agent queue".to_owned(), format!("{}: {}, {}", one.uuid, describe(one), one.state)));
    let operation = instance.last_cluster_operation.map(|last| format!("{} {}", last.op_type, last.op_uuid));
    let channels: Vec<&str> = instance.side_channels.iter().map(|channel| channel.as_str()).collect();
    let storage = match instance.storage_uuid {
        Some(uuid) => format!("{} {uuid}", instance.storage),
        None => instance.storage.to_string(),
    };
    let details = [
        ("name", instance.name),
        ("uuid", instance.uuid.to_string()),
        ("namespace", instance.namespace),
        ("state", instance.state.to_string()),
        ("power", instance.power_state.to_string()),
        ("node", or_dash(instance.node.unwrap_or_default())),
        ("cpus", instance.cpus.to_string()),
        ("memory", format_megabytes(instance.memory)),
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
        (
            "fencing",
            instance.fencing.map_or_else(|| "as the cluster".to_owned(), |policy| policy.to_string()),
        ),
        ("restart", instance.restart.to_string()),
        ("storage", storage),
        ("replica", replica),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value)).into_iter();
    let metadata = instance.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    Table::key_values(details.chain(error).chain(disks).chain(interfaces).chain(queue).chain(metadata))
}

/// Returns the base images of disks that are not ready yet.
pub(super) fn pending_images(record: &InstanceRecord) -> Vec<&str> {
    if !matches!(record.state, InstanceState::Initial | InstanceState::Preflight) {
        return vec![];
    }
    let missing = record.disk_spec.iter().filter(|disk| disk.blob_uuid.is_none());
    missing.filter_map(|disk| disk.spec.base.as_deref()).collect()
}

/// Lists the snapshots of an instance's disks.
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
            snapshot.state.to_string(),
            snapshot.size.map_or_else(|| "-".to_owned(), format_size),
            snapshot.created.map_or_else(|| "-".to_owned(), format_utc),
        ]
    }))
}

#[cfg(test)]
pub(super) mod tests;
