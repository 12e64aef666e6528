//! What must not remain of deleted objects on any host.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use muster_test_cluster::inventory;
use muster_testing::{job_directories, wait};
use serde_json::Value;

use crate::cluster::{FaultCluster, HEAL_TIMEOUT};
use crate::guests::Guests;
use crate::host::FaultHost;
use crate::referee::running_vms;

/// Waits until only the guests and their network remain, and returns what else remains.
pub(crate) fn check(cluster: &FaultCluster, guests: &Guests) -> Vec<String> {
    let began = Instant::now();
    loop {
        match orphans(cluster, guests) {
            Ok(found) if found.is_empty() => return vec![],
            found if began.elapsed() > HEAL_TIMEOUT => {
                return found.unwrap_or_else(|error| vec![error]);
            }
            _ => wait(Duration::from_millis(200)),
        }
    }
}

fn orphans(cluster: &FaultCluster, guests: &Guests) -> Result<Vec<String>, String> {
    let mut found: Vec<String> = Vec::new();
    let is_guest = |id: &str| guests.ids().iter().any(|guest| guest == id);
    let processes = running_vms().into_iter().filter(|(id, _)| !is_guest(id));
    found.extend(processes.map(|(id, pids)| format!("processes {pids:?} of {id}")));
    let networks = cluster.client.get(0, "/networks")?;
    let mut live = BTreeSet::new();
    for network in networks.as_array().into_iter().flatten() {
        live.extend(network["uuid"].as_str().map(str::to_owned));
        live.extend(network["vxid"].as_u64().map(|vxid| format!("{vxid:06x}")));
    }
    for guest in guests.ids() {
        let record = cluster.client.get(0, &format!("/instances/{guest}"))?;
        let interfaces = record["interfaces"].as_array().into_iter().flatten();
        live.extend(interfaces.filter_map(|interface| tap_name(&interface["uuid"])));
    }
    for host in &cluster.hosts {
        let machines = std::fs::read_dir(host.data.join("machines")).into_iter().flatten().flatten();
        let names = machines.map(|entry| entry.file_name().to_string_lossy().into_owned());
        found.extend(names.filter(|id| !is_guest(id)).map(|id| format!("{}: directory of {id}", host.name)));
        found.extend(job_directories(&host.data));
        found.extend(network_orphans(host, &live));
    }
    Ok(found)
}

fn tap_name(interface: &Value) -> Option<String> {
    let digits: String = interface.as_str()?.chars().filter(char::is_ascii_hexdigit).take(12).collect();
    Some(format!("tap{digits}"))
}

/// Returns the devices, routers and files of networks and interfaces that do not exist.
fn network_orphans(host: &FaultHost, live: &BTreeSet<String>) -> Vec<String> {
    let inventory = inventory(host.network());
    let is_orphan = |line: &&str| {
        let name = line.split_whitespace().next().unwrap_or_default().trim_end_matches(':');
        let vxid = ["br-vxlan-", "vxlan-", "veth-", "egr-"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix))
            .map(|rest| rest.get(..6).unwrap_or(rest))
            .filter(|digits| digits.len() == 6 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let router = line.strip_prefix("router ");
        let tap = name.starts_with("tap").then_some(name);
        [vxid, router, tap].into_iter().flatten().any(|name| !live.contains(name))
    };
    inventory.lines().filter(is_orphan).map(|line| format!("{}: {line}", host.name)).collect()
}
