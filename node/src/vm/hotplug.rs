//! Attaches network interfaces to running VMs.

use std::os::fd::AsFd;
use std::sync::Arc;

use muster_types::vm::NicPlan;
use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::hypervisor::{Hypervisor, blocking};
use super::lifecycle::{RunningVm, Vm};
use super::qemu_args::{self, nic_device};
use super::qmp::Qmp;
use super::tap::Tap;
use crate::command::Commands;

/// Attaches an interface, unless it is attached already.
pub(super) async fn attach_nic(
    hypervisor: &Arc<Hypervisor>,
    vm: &Vm,
    running: &RunningVm,
    nic: &NicPlan,
) -> Result<()> {
    let (shared, own_nic) = (hypervisor.clone(), nic.clone());
    blocking(move || shared.device_models()?.check_nic(&own_nic)).await?;
    let qmp = running.qmp()?;
    let mut record = running.record();
    if !has_device(&qmp, &qemu_args::nic_id(nic)).await? {
        add_device(&qmp, nic, record.has_ports, &hypervisor.commands).await?;
        record.hotplugged = true;
    }
    record.nics.insert(nic.mac.to_string(), nic.interface.device());
    vm.dir.save_record(&record)?;
    running.set_record(record);
    Ok(())
}

async fn add_device(qmp: &Qmp, nic: &NicPlan, has_ports: bool, commands: &Arc<Commands>) -> Result<()> {
    let port = if has_ports { Some(free_port(qmp).await?) } else { None };
    let netdev = qemu_args::netdev_id(nic);
    let fd_names = (format!("{netdev}-tap"), format!("{netdev}-vhost"));
    // Clean up after an earlier attempt: a tap device that QEMU still has open cannot be opened again.
    let _ = qmp.execute("netdev_del", json!({ "id": netdev })).await;
    for name in [&fd_names.0, &fd_names.1] {
        let _ = qmp.execute("closefd", json!({ "fdname": name })).await;
    }
    let (own_nic, commands) = (nic.clone(), commands.clone());
    let tap = blocking(move || Tap::open(&own_nic, &commands)).await?;
    qmp.send_fd(&fd_names.0, tap.tap.as_fd()).await?;
    let mut backend = json!({ "type": "tap", "id": netdev, "fd": fd_names.0 });
    if let Some(vhost) = tap.vhost.filter(|_| nic.model == "virtio") {
        qmp.send_fd(&fd_names.1, vhost.as_fd()).await?;
        backend["vhost"] = true.into();
        backend["vhostfd"] = fd_names.1.into();
    }
    qmp.execute("netdev_add", backend).await?;
    if let Err(error) = qmp.execute("device_add", nic_device(nic, port.as_deref())).await {
        let _ = qmp.execute("netdev_del", json!({ "id": netdev })).await;
        return Err(error);
    }
    Ok(())
}

async fn has_device(qmp: &Qmp, device: &str) -> Result<bool> {
    let devices = qmp.execute("qom-list", json!({ "path": "/machine/peripheral" })).await?;
    Ok(devices.as_array().is_some_and(|devices| devices.iter().any(|found| found["name"] == json!(device))))
}

/// Returns an unused PCIe root port.
async fn free_port(qmp: &Qmp) -> Result<String> {
    let buses = qmp.execute("query-pci", json!({})).await?;
    let full =
        || Error::Conflict("the VM has no free slot for another interface until it is restarted".into());
    qemu_args::spare_ports().find(|port| is_free(&buses, port)).ok_or_else(full)
}

fn is_free(buses: &Value, port: &str) -> bool {
    let devices = buses.as_array().into_iter().flatten();
    let devices = devices.flat_map(|bus| bus["devices"].as_array().into_iter().flatten());
    let port = devices.into_iter().find(|device| device["qdev_id"] == json!(port));
    port.is_some_and(|port| port["pci_bridge"]["devices"].as_array().is_none_or(Vec::is_empty))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_is_free_until_it_has_a_device() {
        let buses = json!([{ "bus": 0, "devices": [
            { "qdev_id": "spare0", "pci_bridge": { "devices": [{ "qdev_id": "nic-tap1" }] } },
            { "qdev_id": "spare1", "pci_bridge": { "bus": {} } },
            { "qdev_id": "spare2", "pci_bridge": { "devices": [] } },
        ] }]);
        assert!(!is_free(&buses, "spare0") && is_free(&buses, "spare1") && is_free(&buses, "spare2"));
        assert!(!is_free(&buses, "spare3"));
    }
}
