//! One guest on each host, with an agent that runs commands and an address outside, and one that restarts elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Instant;

use muster_testing::{wait, wait_for};
use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::{FaultCluster, HEAL_TIMEOUT};
use crate::host::FaultHost;
use crate::load::commands::{Commands, OUTPUT_FILE};
use crate::referee::running_vms;

const GATEWAY: &str = "10.50.0.1";
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);

/// The guests.
#[derive(Debug)]
pub(crate) struct Guests {
    /// The guests by the number of their host, and as the last one that which restarts elsewhere.
    ids: Vec<String>,
    pub(crate) network: String,
    /// An address outside of the first guest.
    pub(crate) floating: Ipv4Addr,
    /// What is known of the commands that ran in each guest.
    ledgers: BTreeMap<String, Ledger>,
    /// Whether a router has answered a guest.
    pub(crate) has_gateway: bool,
    /// The addresses of the guests.
    addresses: Vec<String>,
    /// Whether a guest has answered another one.
    pub(crate) has_neighbours: bool,
}

/// The commands of one process of a VM.
#[derive(Debug, Default)]
struct Ledger {
    pid: u32,
    /// Commands that were reported as failed and had not run.
    failed: BTreeSet<String>,
}

impl Guests {
    /// Creates the guests and waits until they run commands.
    pub(crate) fn create(cluster: &FaultCluster) -> Self {
        let body =
            json!({ "name": "lan", "netblock": "10.50.0.0/24", "provide_dhcp": true, "provide_nat": true });
        let network = cluster.client.post("/networks", &body).unwrap()["uuid"].as_str().unwrap().to_owned();
        wait_for("the network of the guests", HEAL_TIMEOUT, || {
            let record = cluster.client.get(0, &format!("/networks/{network}")).ok()?;
            (record["state"] == "created").then_some(())
        });
        let create = |name: &str, changes: Value| {
            let mut body = json!({
                "name": format!("guest-{name}"), "cpus": 1, "memory": 128,
                "network": [{ "network_uuid": network }], "side_channels": ["sf-agent"],
                "disk": [{ "base": "label:tiny" }],
            });
            body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let record = cluster.client.post("/instances", &body).unwrap();
            record["uuid"].as_str().unwrap().to_owned()
        };
        let on_host = |host: &FaultHost| create(&host.name, json!({ "placed_on": host.name }));
        let mut ids: Vec<String> = cluster.hosts.iter().map(on_host).collect();
        ids.push(create(
            "anywhere",
            json!({ "fencing": "self", "restart": "elsewhere", "disposable": true }),
        ));
        let mut interfaces = Vec::new();
        for id in &ids {
            interfaces.push(wait_for("a guest", HEAL_TIMEOUT, || {
                let record = cluster.client.get(0, &format!("/instances/{id}")).ok()?;
                assert_ne!(record["state"], "error", "{record}\n{}", cluster.logs());
                let is_ready = record["agent_state"].as_str().is_some_and(|state| state.starts_with("ready"));
                (record["state"] == "created" && is_ready).then(|| record["interfaces"][0].clone())
            }));
        }
        let interface = format!("/interfaces/{}", interfaces[0]["uuid"].as_str().unwrap());
        cluster.client.post(&format!("{interface}/float"), &json!({})).unwrap();
        let record = cluster.client.get(0, &interface).unwrap();
        let floating = record["floating"].as_str().unwrap().parse().unwrap();
        let address = |interface: &Value| interface["ipv4"].as_str().unwrap().to_owned();
        let mut guests = Self {
            ids,
            network,
            floating,
            ledgers: BTreeMap::new(),
            has_gateway: false,
            addresses: interfaces.iter().map(address).collect(),
            has_neighbours: false,
        };
        let violations = guests.check_commands(cluster, &Commands::default());
        assert!(violations.is_empty(), "{violations:?}");
        guests
    }

    /// Returns the guest on a host.
    pub(crate) fn on(&self, host: usize) -> &str {
        &self.ids[host]
    }

    /// Returns the guest that restarts elsewhere when its host is lost.
    fn mobile(&self) -> &str {
        &self.ids[self.ids.len() - 1]
    }

    /// Returns the host of the guest that restarts elsewhere.
    pub(crate) fn host_of_mobile(&self, cluster: &FaultCluster) -> usize {
        let record = cluster.client.get(0, &format!("/instances/{}", self.mobile())).unwrap();
        cluster.hosts.iter().position(|host| record["node"] == *host.name).unwrap()
    }

    /// Waits until the guest that restarts elsewhere runs there, while its host is lost.
    pub(crate) fn wait_for_restart(&self, cluster: &FaultCluster, lost: usize) {
        let (other, began) = ((lost + 1) % cluster.hosts.len(), Instant::now());
        wait_for("a guest to run elsewhere", 2 * HEAL_TIMEOUT, || {
            let get = |path: &str| cluster.client.get(other, path);
            let record = get(&format!("/instances/{}", self.mobile()));
            if began.elapsed() > HEAL_TIMEOUT {
                let explanation = get(&format!("/instances/{}/explain", self.mobile()));
                let nodes = get("/nodes");
                panic!("{record:?}\n{explanation:?}\n{nodes:?}\n{}", cluster.logs());
            }
            let record = record.ok()?;
            let is_elsewhere = record["node"] != *cluster.hosts[lost].name;
            (is_elsewhere && record["power_state"] == "on").then_some(())
        });
    }

    pub(crate) fn ids(&self) -> &[String] {
        &self.ids
    }

    /// Compares the recorded power state of each guest with its process, from the point of view of every host.
    pub(crate) fn check_power(&self, cluster: &FaultCluster) -> Vec<String> {
        let is_true = |guest: &String| {
            let running = running_vms().contains_key(guest);
            (0..cluster.hosts.len()).all(|host| {
                let record = cluster.client.get(host, &format!("/instances/{guest}"));
                record.is_ok_and(|record| (record["power_state"] == "on") == running)
            })
        };
        let began = Instant::now();
        loop {
            let wrong: Vec<&String> = self.ids.iter().filter(|guest| !is_true(guest)).collect();
            if wrong.is_empty() {
                return vec![];
            }
            if began.elapsed() > HEAL_TIMEOUT {
                let record = |guest: &String| cluster.client.get(0, &format!("/instances/{guest}"));
                return wrong
                    .iter()
                    .map(|guest| format!("the power state of {guest} is wrong: {:?}", record(guest)))
                    .collect();
            }
            wait(POLL_INTERVAL);
        }
    }

    /// Starts the guests that a power failure or their watchdog ended, for the next round.
    pub(crate) fn restart(&self, cluster: &FaultCluster) -> Vec<String> {
        let off = self.ids.iter().filter(|guest| !running_vms().contains_key(*guest));
        let problems = off.filter_map(|guest| {
            let path = format!("/instances/{guest}/poweron");
            let began = Instant::now();
            loop {
                // It may be restarted elsewhere at the same time.
                let response = cluster.client.call(0, Method::POST, &path, None);
                if matches!(response, Ok((200, _))) || running_vms().contains_key(guest) {
                    return None;
                }
                if began.elapsed() > HEAL_TIMEOUT {
                    return Some(format!("{guest} cannot be started: {response:?}"));
                }
                wait(POLL_INTERVAL);
            }
        });
        problems.collect()
    }

    /// Compares what callers were told with the commands that ran in the guests, and whether two routers, or two owners of the address of
    /// a guest, answered them.
    pub(crate) fn check_commands(&mut self, cluster: &FaultCluster, commands: &Commands) -> Vec<String> {
        let (states, mut violations) = commands.wait_for_states(&cluster.client);
        for guest in &self.ids {
            let Some(pid) = process_of(guest) else { continue };
            let known = self.ledgers.get(guest).map(|ledger| ledger.pid);
            if known.is_some_and(|known| known != pid) {
                // It was started again and has forgotten everything; its agent may not be ready yet.
                self.ledgers.insert(guest.clone(), Ledger { pid, failed: BTreeSet::new() });
                continue;
            }
            let output = match run_in_guest(cluster, guest, &observer_script(&self.addresses)) {
                Ok(output) => output,
                Err(error) => {
                    violations.push(format!("{guest} does not run commands: {error}"));
                    continue;
                }
            };
            if process_of(guest) != Some(pid) {
                continue;
            }
            let mut lines = output.lines();
            let counts: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
            let [duplicates, answers, neighbours, second_owners] = counts[..] else {
                violations.push(format!("{guest} does not observe addresses: {output}"));
                continue;
            };
            if duplicates != "0" {
                violations.push(format!("two routers answered {guest}: {output}"));
            }
            if second_owners != "0" {
                violations
                    .push(format!("the address of a guest was answered with two MACs, to {guest}: {output}"));
            }
            self.has_gateway |= answers != "0";
            self.has_neighbours |= neighbours != "0";
            let ran: Vec<&str> = lines.collect();
            let ledger = self.ledgers.entry(guest.clone()).or_default();
            ledger.pid = pid;
            let late = ledger.failed.iter().filter(|id| ran.contains(&id.as_str()));
            violations.extend(late.map(|id| format!("{id} ran after it was reported as failed")));
            for command in commands.of(guest) {
                let count = ran.iter().filter(|id| **id == command.id).count();
                violations.extend(command.violation(states.get(&command.id), count));
                if count == 0 {
                    ledger.failed.insert(command.id.clone());
                }
            }
        }
        violations
    }

    /// Deletes the guests; nothing of them may remain on any host.
    pub(crate) fn delete(&self, cluster: &FaultCluster) {
        for guest in &self.ids {
            cluster.client.delete(&format!("/instances/{guest}")).unwrap();
        }
        wait_for("VMs to be removed", HEAL_TIMEOUT, || {
            let directories = cluster.data_directories();
            let mut entries = directories
                .iter()
                .flat_map(|data| std::fs::read_dir(data.join("machines")).into_iter().flatten());
            (running_vms().is_empty() && entries.next().is_none()).then_some(())
        });
        cluster.client.delete(&format!("/networks/{}", self.network)).unwrap();
    }
}

/// Returns the process of a guest, if it runs.
fn process_of(guest: &str) -> Option<u32> {
    running_vms().get(guest).map(|processes| processes[0])
}

/// Returns a script that prints how often more than one router and how often one answered, how many guests answered and how many
/// of them with a second MAC, and the commands that ran. It starts loops that ask for the gateway and for the guests. All routers have
/// the same MAC address, so their answers are counted.
fn observer_script(guests: &[String]) -> String {
    let guests = guests.join(" ");
    format!(
        "[ -e /run/observed ] || {{ touch /run/observed /run/owners /run/second_owners; \
         (while :; do arping -b -c 1 -w 1 -I eth0 {GATEWAY} | \
         grep -c 'reply from' >>/run/observed; sleep 0.2; done) >/dev/null 2>&1 & \
         (while :; do for guest in {guests}; do arping -b -c 1 -w 1 -I eth0 $guest | grep 'reply from' | \
         while read -r kind reply from address mac rest; do \
         if ! grep -q \"^$address \" /run/owners; then echo \"$address $mac\" >>/run/owners; \
         elif ! grep -qF \"$address $mac\" /run/owners; then echo \"$address $mac\" >>/run/second_owners; fi; \
         done; done; done) >/dev/null 2>&1 & }}; \
         echo $(grep -cv '^[01]$' /run/observed) $(grep -c '^1$' /run/observed) \
         $(grep -c . /run/owners) $(grep -c . /run/second_owners); cat {OUTPUT_FILE} 2>/dev/null; true"
    )
}

/// Runs a command line in a guest and returns its output.
fn run_in_guest(cluster: &FaultCluster, guest: &str, line: &str) -> Result<String, String> {
    let began = Instant::now();
    loop {
        let result = try_run_in_guest(cluster, guest, line);
        if result.is_ok() || began.elapsed() > HEAL_TIMEOUT {
            return result;
        }
        wait(POLL_INTERVAL);
    }
}

fn try_run_in_guest(cluster: &FaultCluster, guest: &str, line: &str) -> Result<String, String> {
    let body = json!({ "command_line": line, "deadline_seconds": 60 });
    let operation = cluster.client.post(&format!("/instances/{guest}/agent/execute"), &body)?;
    let path = format!("/agentoperations/{}", operation["uuid"].as_str().unwrap_or_default());
    let began = Instant::now();
    loop {
        let record: Value = cluster.client.get(0, &path)?;
        match record["state"].as_str().unwrap_or_default() {
            "complete" => {
                return Ok(record["results"]["0"]["stdout"].as_str().unwrap_or_default().to_owned());
            }
            "queued" | "executing" | "initial" if began.elapsed() < HEAL_TIMEOUT => wait(POLL_INTERVAL),
            _ => return Err(record.to_string()),
        }
    }
}
