//! Resource usage of running VMs, as counted by QEMU and the kernel.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

use muster_types::Result;
use muster_types::vm::VmUsage;
use serde_json::{Value, json};

use super::hypervisor::blocking;
use super::lifecycle::RunningVm;
use super::process::CpuTimes;
use super::vm_dir::{VmDir, VmRecord};
use crate::files::io_error;

pub(super) async fn usage(dir: &VmDir, running: &RunningVm) -> Result<VmUsage> {
    let stats = running.qmp()?.execute("query-blockstats", json!({})).await?;
    let record = running.record();
    let times = running.process.cpu_times().map_err(io_error("failed to read the CPU time of a VM"))?;
    let CpuTimes { user_ns, system_ns } = times;
    let cpu =
        [("cpu time ns", user_ns + system_ns), ("system time ns", system_ns), ("user time ns", user_ns)];
    let devices = fs::read_to_string("/proc/net/dev").map_err(io_error("failed to read network counters"))?;
    let networks = networks(&record, &devices);
    let dir = dir.clone();
    // A shared storage may not respond.
    let disks = blocking(move || Ok(disks(&dir, &record, &stats))).await?;
    Ok(VmUsage { cpu: cpu.into(), disks, networks })
}

/// Returns the counters of the disks, by device. Missing counters are zero.
fn disks(dir: &VmDir, record: &VmRecord, stats: &Value) -> BTreeMap<String, BTreeMap<&'static str, u64>> {
    let stats = stats.as_array().map(Vec::as_slice).unwrap_or_default();
    let counters_of = |device: &String| {
        let stats =
            stats.iter().find(|stats| stats["node-name"] == json!(device)).map(|stats| &stats["stats"]);
        let count = |name: &str| stats.and_then(|stats| stats[name].as_u64()).unwrap_or(0);
        let errors = ["failed_rd_operations", "failed_wr_operations", "failed_flush_operations"];
        let file = fs::metadata(dir.disks().file(&format!("{device}.qcow2")));
        let counters = [
            ("actual bytes on disk", file.map_or(0, |metadata| metadata.blocks() * 512)),
            ("errors", errors.into_iter().map(count).sum()),
            ("read bytes", count("rd_bytes")),
            ("read requests", count("rd_operations")),
            ("write bytes", count("wr_bytes")),
            ("write requests", count("wr_operations")),
        ];
        (device.clone(), counters.into())
    };
    record.disks.iter().map(counters_of).collect()
}

/// Returns the counters of the tap devices from the guest's point of view: what the device sends, the guest receives.
/// Missing counters are zero.
fn networks(record: &VmRecord, devices: &str) -> BTreeMap<String, BTreeMap<&'static str, u64>> {
    let of_device = |name: &str| -> Option<Vec<u64>> {
        let line = devices.lines().find_map(|line| {
            line.split_once(':').filter(|(device, _)| device.trim() == name).map(|(_, numbers)| numbers)
        })?;
        line.split_whitespace().map(|word| word.parse().ok()).collect()
    };
    let counters_of = |(mac, device): (&String, &String)| {
        let numbers = of_device(device)?;
        let at = |index: usize| numbers.get(index).copied().unwrap_or(0);
        let counters = [
            ("read bytes", at(8)),
            ("read packets", at(9)),
            ("read errors", at(10)),
            ("read drops", at(11)),
            ("write bytes", at(0)),
            ("write packets", at(1)),
            ("write errors", at(2)),
            ("write drops", at(3)),
        ];
        Some((mac.clone(), counters.into()))
    };
    record.nics.iter().filter_map(counters_of).collect()
}

#[cfg(test)]
mod tests {
    use muster_types::vm::ConsolePorts;

    use super::*;

    fn record() -> VmRecord {
        VmRecord {
            boot: String::new(),
            generation: 1,
            cpus: 1,
            memory_mb: 64,
            display: None,
            ports: ConsolePorts { console: 1, vdi: 2, vdi_tls: None },
            uid: None,
            has_ports: false,
            disks: vec!["vda".into()],
            nics: [("02:00:00:00:00:01".to_owned(), "tap1".to_owned())].into(),
            side_channels: Vec::new(),
            vsock: None,
            hotplugged: false,
        }
    }

    #[test]
    fn guest_receives_what_its_tap_device_sends() {
        let devices =
            " face |bytes\n  tap11: 9 9 9 9 0 0 0 0 9 9 9 9\n  tap1: 100 1 2 3 0 0 0 0 200 4 5 6 0 0 0 0\n";
        let counters = &networks(&record(), devices)["02:00:00:00:00:01"];
        assert_eq!((counters["read bytes"], counters["write bytes"]), (200, 100));
        assert_eq!((counters["read packets"], counters["read errors"], counters["read drops"]), (4, 5, 6));
        assert_eq!((counters["write packets"], counters["write errors"], counters["write drops"]), (1, 2, 3));
        assert!(networks(&record(), "").is_empty());
    }

    #[test]
    fn counts_disks_by_device() {
        let dir = tempfile::tempdir().unwrap();
        let stats = json!([
            { "node-name": "vdb", "stats": { "rd_bytes": 1 } },
            { "node-name": "vda", "stats": {
                "rd_bytes": 4096, "rd_operations": 2, "wr_bytes": 512, "wr_operations": 1,
                "failed_rd_operations": 1, "failed_wr_operations": 1, "failed_flush_operations": 1,
            } },
        ]);
        let disks = disks(&VmDir::new(dir.path().to_owned()), &record(), &stats);
        let counters = &disks["vda"];
        assert_eq!((counters["read bytes"], counters["read requests"], counters["errors"]), (4096, 2, 3));
        assert_eq!((counters["write bytes"], counters["write requests"]), (512, 1));
        assert_eq!(disks.len(), 1);
    }
}
