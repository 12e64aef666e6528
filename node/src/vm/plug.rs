//! Adds an interface to a machine that runs.

use std::os::fd::AsFd;
use std::sync::Arc;

use muster_types::vm::NicPlan;
use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::hardware::{self, nic_device};
use super::life::{Live, Machine};
use super::qmp::Qmp;
use super::tap::Tap;
use super::{Inner, blocking};
use crate::command::Commands;

pub(super) async fn plug(inner: &Arc<Inner>, machine: &Machine, live: &Live, nic: &NicPlan) -> Result<()> {
    let (shared, wanted) = (inner.clone(), nic.clone());
    blocking(move || shared.models()?.check_nic(&wanted)).await?;
    let qmp = live.qmp()?;
    let mut record = live.record();
    if !has(&qmp, &hardware::nic_id(nic)).await? {
        add(&qmp, nic, record.has_ports, &inner.commands).await?;
    }
    record.nics.insert(nic.mac.to_string(), nic.interface.device());
    machine.folder.change_record(&record)?;
    live.set_record(record);
    Ok(())
}

async fn add(qmp: &Qmp, nic: &NicPlan, has_ports: bool, commands: &Arc<Commands>) -> Result<()> {
    let port = if has_ports { Some(free_port(qmp).await?) } else { None };
    let netdev = hardware::netdev_id(nic);
    let names = (format!("{netdev}-tap"), format!("{netdev}-vhost"));
    // An earlier attempt may have come this far. Nobody else can open what QEMU still holds then.
    let _ = qmp.execute("netdev_del", json!({ "id": netdev })).await;
    for name in [&names.0, &names.1] {
        let _ = qmp.execute("closefd", json!({ "fdname": name })).await;
    }
    let (wanted, commands) = (nic.clone(), commands.clone());
    let tap = blocking(move || Tap::open(&wanted, &commands)).await?;
    qmp.give(&names.0, tap.tap.as_fd()).await?;
    let mut backend = json!({ "type": "tap", "id": netdev, "fd": names.0 });
    if let Some(vhost) = tap.vhost.filter(|_| nic.model == "virtio") {
        qmp.give(&names.1, vhost.as_fd()).await?;
        backend["vhost"] = true.into();
        backend["vhostfd"] = names.1.into();
    }
    qmp.execute("netdev_add", backend).await?;
    if let Err(error) = qmp.execute("device_add", nic_device(nic, port.as_deref())).await {
        let _ = qmp.execute("netdev_del", json!({ "id": netdev })).await;
        return Err(error);
    }
    Ok(())
}

async fn has(qmp: &Qmp, device: &str) -> Result<bool> {
    let devices = qmp.execute("qom-list", json!({ "path": "/machine/peripheral" })).await?;
    Ok(devices.as_array().is_some_and(|devices| devices.iter().any(|found| found["name"] == json!(device))))
}

/// A port that nothing is plugged into.
async fn free_port(qmp: &Qmp) -> Result<String> {
    let buses = qmp.execute("query-pci", json!({})).await?;
    let full = || {
        Error::Conflict("the machine has no free slot for another interface until it is switched off".into())
    };
    hardware::spare_ports().find(|port| is_free(&buses, port)).ok_or_else(full)
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
    fn a_port_is_free_until_something_is_behind_it() {
        let buses = json!([{ "bus": 0, "devices": [
            { "qdev_id": "spare0", "pci_bridge": { "devices": [{ "qdev_id": "nic-tap1" }] } },
            { "qdev_id": "spare1", "pci_bridge": { "bus": {} } },
            { "qdev_id": "spare2", "pci_bridge": { "devices": [] } },
        ] }]);
        assert!(!is_free(&buses, "spare0") && is_free(&buses, "spare1") && is_free(&buses, "spare2"));
        assert!(!is_free(&buses, "spare3"));
    }
}
