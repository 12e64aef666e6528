//! Derives the plan of an instance's VM from the database.

use base64::Engine as _;
use muster_types::ids::NetworkId;
use muster_types::instance::{ConfigDriveType, DiskRecord};
use muster_types::interface::InterfaceState;
use muster_types::spec::{self, DiskDevice, DiskRole, DiskType};
use muster_types::vm::{ConfigDriveFile, ConsolePorts, DiskKind, DiskPlan, NicPlan, VmPlan};
use muster_types::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{fence, user_data};
use crate::app::App;
use crate::objects::network::plan::{domain, mtu};
use muster_store::instances::{InstanceRow, InstanceSpec};
use muster_store::interfaces::InterfaceRow;
use muster_store::networks::NetworkRow;
use muster_store::{interfaces, networks, nodes};

const GIB: u64 = 1 << 30;
/// The versions of the config drive format that guests read.
const VERSIONS: [&str; 2] = ["latest", "2017-02-22"];

/// Returns the devices of an instance's disks, including its config drive.
fn devices(spec: &InstanceSpec) -> Vec<DiskDevice> {
    let disks: Vec<_> = spec.disks.iter().map(|disk| disk.spec.clone()).collect();
    spec::layout_disks(&disks, spec.configdrive == ConfigDriveType::OpenStackDisk)
}

/// Returns the devices of an instance's disks without its config drive, with the numbers of the disks.
pub(crate) fn disk_devices(spec: &InstanceSpec) -> impl Iterator<Item = (String, usize)> {
    devices(spec).into_iter().filter_map(|device| match device.role {
        DiskRole::Disk(number) => Some((device.device, number)),
        DiskRole::ConfigDrive => None,
    })
}

/// Returns the disks of an instance. `sizes` are the virtual sizes of the images in bytes, by disk number.
pub(crate) fn disk_records(spec: &InstanceSpec, sizes: &[Option<u64>]) -> Vec<DiskRecord> {
    devices(spec)
        .into_iter()
        .map(|device| match device.role {
            DiskRole::ConfigDrive => DiskRecord {
                device: device.device,
                bus: device.bus,
                size: None,
                blob_uuid: None,
                snapshot_ignores: true,
            },
            DiskRole::Disk(number) => {
                let disk = &spec.disks[number];
                let image = sizes.get(number).copied().flatten().map(|size| size.div_ceil(GIB));
                DiskRecord {
                    device: device.device,
                    bus: device.bus,
                    size: disk.spec.size.or(image),
                    blob_uuid: disk.blob_uuid,
                    snapshot_ignores: disk.spec.disk_type == DiskType::Cdrom,
                }
            }
        })
        .collect()
}

/// Returns the plan of an instance that has disk records and ports.
pub(crate) async fn build(app: &App, row: &InstanceRow, ports: ConsolePorts) -> Result<VmPlan> {
    let all = interfaces::of_instances(&*app.store, &[row.id]).await?;
    let present: Vec<&InterfaceRow> =
        all.iter().filter(|interface| interface.state != InterfaceState::Error).collect();
    let mut ids: Vec<NetworkId> = present.iter().map(|interface| interface.network).collect();
    ids.sort_unstable();
    ids.dedup();
    let networks = networks::by_ids(&*app.store, &ids).await?;
    // The MTU requires reading all nodes, so it is skipped without interfaces.
    let mtu = if present.is_empty() { 0 } else { mtu(nodes::list(&*app.store).await?.iter(), &app.settings) };
    let config_drive = (row.spec.configdrive == ConfigDriveType::OpenStackDisk)
        .then(|| config_drive(app, row, &present, &networks, mtu))
        .transpose()?;
    let invalid = |field| Error::Internal(format!("instance {}: {field} is out of range", row.id));
    Ok(VmPlan {
        id: row.id,
        generation: row.generation,
        name: row.name.clone(),
        cpus: u32::try_from(row.spec.cpus).map_err(|_| invalid("cpus"))?,
        memory_mb: u64::try_from(row.spec.memory).map_err(|_| invalid("memory"))?,
        machine_type: row.spec.machine_type,
        uefi: row.spec.uefi,
        secure_boot: row.spec.secure_boot,
        nvram_template: row.spec.nvram_template,
        disks: disks(row)?,
        nics: nics(&present, &networks, mtu),
        video: row.spec.video.clone(),
        ports,
        config_drive,
        side_channels: row.spec.side_channels.clone(),
        fencing: fence::policy(app, &row.spec),
        shared_storage: row.spec.storage_uuid,
    })
}

fn nics(interfaces: &[&InterfaceRow], networks: &[NetworkRow], mtu: u32) -> Vec<NicPlan> {
    let with_network = |interface: &&InterfaceRow| {
        let network = networks.iter().find(|network| network.id == interface.network)?;
        Some(nic(interface, network, mtu))
    };
    interfaces.iter().filter_map(with_network).collect()
}

/// Returns the network device of the VM for an interface.
pub(crate) fn nic(interface: &InterfaceRow, network: &NetworkRow, mtu: u32) -> NicPlan {
    let model = interface.model.clone();
    NicPlan { interface: interface.id, vxid: network.vxid, mac: interface.mac, model, mtu }
}

fn disks(row: &InstanceRow) -> Result<Vec<DiskPlan>> {
    let devices = devices(&row.spec);
    if devices.len() != row.disks.len() {
        return Err(Error::Internal("the instance has no disk records".into()));
    }
    Ok(devices
        .into_iter()
        .map(|device| match device.role {
            DiskRole::ConfigDrive => DiskPlan {
                device: device.device,
                bus: device.bus,
                kind: DiskKind::ConfigDrive,
                size: None,
                base: None,
            },
            DiskRole::Disk(number) => {
                let disk = &row.spec.disks[number];
                let is_disc = disk.spec.disk_type == DiskType::Cdrom;
                DiskPlan {
                    device: device.device,
                    bus: device.bus,
                    kind: if is_disc { DiskKind::Cdrom } else { DiskKind::Disk },
                    size: disk.spec.size.map(|size| size.saturating_mul(GIB)),
                    base: disk.blob_uuid,
                }
            }
        })
        .collect())
}

/// Returns the files of the config drive in the OpenStack layout.
fn config_drive(
    app: &App,
    row: &InstanceRow,
    interfaces: &[&InterfaceRow],
    networks: &[NetworkRow],
    mtu: u32,
) -> Result<Vec<ConfigDriveFile>> {
    let mut seed = [0u8; 512];
    aws_lc_rs::rand::fill(&mut seed)
        .map_err(|_| Error::Internal("failed to read random numbers from the system".into()))?;
    let meta_data = json!({
        "random_seed": base64::engine::general_purpose::STANDARD.encode(seed),
        "uuid": row.id,
        "availability_zone": app.settings.zone,
        "hostname": format!("{}.local", row.name),
        "launch_index": 0,
        "devices": [],
        "project_id": null,
        "name": row.name,
        "public_keys": { "mykey": row.spec.ssh_key },
    });
    let user_data = row.spec.user_data.as_deref().and_then(user_data::decode);
    let network_data = serde_json::to_vec(&network_data(app, row, interfaces, networks, mtu))
        .map_err(|error| Error::Internal(format!("failed to write network_data.json: {error}")))?;
    let text = |value: &Value| value.to_string().into_bytes();
    let mut files = Vec::new();
    for version in VERSIONS {
        for (name, content) in [
            ("meta_data.json", text(&meta_data)),
            ("user_data", user_data.clone().unwrap_or_else(|| b"#cloud-config\n".to_vec())),
            ("network_data.json", network_data.clone()),
            ("vendor_data.json", b"{}".to_vec()),
            ("vendor_data2.json", b"{}".to_vec()),
        ] {
            files.push(ConfigDriveFile { path: format!("openstack/{version}/{name}"), content });
        }
    }
    Ok(files)
}

/// The content of `network_data.json`.
#[derive(Debug, Serialize)]
struct NetworkData {
    links: Vec<Value>,
    networks: Vec<Value>,
    services: Vec<NetworkService>,
}

/// A DNS server, with the fields in the order in which the existing service writes them: some guests parse them as text.
#[derive(Debug, Serialize)]
struct NetworkService {
    address: String,
    #[serde(rename = "type")]
    service_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<[String; 1]>,
}

fn network_data(
    app: &App,
    row: &InstanceRow,
    interfaces: &[&InterfaceRow],
    networks: &[NetworkRow],
    mtu: u32,
) -> NetworkData {
    let (mut links, mut addresses, mut services) = (vec![], vec![], vec![]);
    for interface in interfaces {
        let network = networks.iter().find(|network| network.id == interface.network);
        let (Some(address), Some(network)) = (interface.ipv4, network) else { continue };
        let link = format!("eth{}", interface.order);
        let router = network.netblock.router().to_string();
        links.push(json!({
            "ethernet_mac_address": interface.mac,
            "id": link,
            "name": link,
            "mtu": mtu,
            "type": "vif",
            "vif_id": interface.id,
        }));
        let mut entry: Map<String, Value> = Map::new();
        entry.insert("id".into(), json!(format!("{}-{}", network.id, interface.order)));
        entry.insert("link".into(), json!(link));
        entry.insert("type".into(), json!("ipv4"));
        entry.insert("network_id".into(), json!(network.id));
        entry.insert("ip_address".into(), json!(address));
        entry.insert("netmask".into(), json!(network.netblock.netmask()));
        if addresses.is_empty() {
            let route = json!({ "network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": router });
            entry.insert("routes".into(), json!([route]));
        }
        addresses.push(Value::Object(entry));
        if network.provide_dns {
            let search = domain(&row.namespace, &app.settings.zone);
            services.push(NetworkService { address: router, service_type: "dns", search: Some([search]) });
        }
    }
    if services.is_empty() {
        let address = app.settings.dns_server.to_string();
        services.push(NetworkService { address, service_type: "dns", search: None });
    }
    NetworkData { links, networks: addresses, services }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_the_fields_of_a_service_in_order() {
        let search = Some(["ci.example".to_owned()]);
        let service = NetworkService { address: "10.0.0.1".into(), service_type: "dns", search };
        let data = NetworkData { links: vec![], networks: vec![], services: vec![service] };
        let expected = r#"{"links":[],"networks":[],"services":[{"address":"10.0.0.1","type":"dns","search":["ci.example"]}]}"#;
        assert_eq!(serde_json::to_string(&data).unwrap(), expected);
    }
}
