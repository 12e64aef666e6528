//! Rounds: one fault under load, healing, and a comparison of what callers were told with what is true.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fastrand::Rng;
use muster_testing::wait;
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::{Direction, FaultCluster, HEAL_TIMEOUT, Link};
use crate::load::{ExpectedNetwork, Load};
use crate::referee::{Referee, running_vms};

/// The hosts of the cluster.
const HOSTS: usize = 3;
/// The threads that call the API.
const CALLERS: usize = 3;

/// What fails in a round.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    KillDaemon,
    FreezeDaemon,
    FreezeHost,
    PowerFailure,
    CutDatabase(Direction),
    CutMesh(Direction),
    KillDatabase,
}

/// One of each kind, in the order in which a short run takes them.
const FAULTS: [Fault; 10] = [
    Fault::PowerFailure,
    Fault::FreezeDaemon,
    Fault::CutDatabase(Direction::Both),
    Fault::KillDatabase,
    Fault::KillDaemon,
    Fault::FreezeHost,
    Fault::CutMesh(Direction::Both),
    Fault::CutDatabase(Direction::ToHost),
    Fault::CutMesh(Direction::FromHost),
    Fault::CutDatabase(Direction::FromHost),
];

/// Runs rounds on one cluster.
pub(crate) fn run(rounds: usize, seed: u64, image: &str) {
    println!("MUSTER_FAULT_SEED={seed} MUSTER_FAULT_ROUNDS={rounds}");
    let settings = [("NODE_CHECKIN_MAXIMUM", "6"), ("NODE_CHECKIN_INTERVAL", "1"), ("CLUSTER_OP_LEASE", "3")];
    let Some(mut cluster) = FaultCluster::start(HOSTS, image, &settings) else { return };
    let mut random = Rng::with_seed(seed);
    let mut referee = Referee::start();
    let guests = create_guests(&cluster);
    for round in 0..rounds {
        let (fault, host) = (FAULTS[round % FAULTS.len()], random.usize(..HOSTS));
        let load = Load::start(&cluster.client, CALLERS, random.u64(..));
        let pause = Duration::from_millis(random.u64(2_000..9_000));
        let began = Instant::now();
        inject(&mut cluster, fault, host, pause);
        let expected = load.finish();
        cluster.wait_until_healthy();
        let (told, took) = (expected.len(), began.elapsed());
        println!("round {round}: {fault:?} of m{} for {pause:?}, {told} networks, {took:.1?}", host + 1);
        let violations =
            [check_networks(&cluster, &expected), check_guests(&cluster, &guests), referee.violations()];
        let violations = violations.concat();
        assert!(violations.is_empty(), "{}\n{}", violations.join("\n"), cluster.logs());
        delete_networks(&cluster);
    }
    delete_guests(&cluster, &guests);
    println!("{} observations of all hosts", referee.finish());
    for host in &mut cluster.hosts {
        host.stop_daemon();
    }
}

/// Causes a fault, keeps it for a while, and repairs it.
fn inject(cluster: &mut FaultCluster, fault: Fault, host: usize, pause: Duration) {
    match fault {
        Fault::KillDaemon => {
            cluster.hosts[host].kill_daemon();
            wait(pause);
            cluster.hosts[host].start_daemon();
        }
        Fault::FreezeDaemon => {
            cluster.hosts[host].signal_daemon(Signal::SIGSTOP);
            wait(pause);
            cluster.hosts[host].signal_daemon(Signal::SIGCONT);
        }
        Fault::FreezeHost => {
            cluster.hosts[host].signal_all(Signal::SIGSTOP);
            wait(pause);
            cluster.hosts[host].signal_all(Signal::SIGCONT);
        }
        Fault::PowerFailure => {
            cluster.hosts[host].power_off();
            wait(pause);
            cluster.power_on(host);
        }
        Fault::CutDatabase(direction) => {
            cluster.cut(host, Link::Database, direction);
            wait(pause);
            cluster.restore_links();
        }
        Fault::CutMesh(direction) => {
            cluster.cut(host, Link::Mesh, direction);
            wait(pause);
            cluster.restore_links();
        }
        Fault::KillDatabase => {
            cluster.kill_database();
            wait(pause);
            cluster.restart_database();
        }
    }
}

/// Creates one guest on each host, and returns their ids.
fn create_guests(cluster: &FaultCluster) -> Vec<String> {
    let create = |host: &crate::host::FaultHost| {
        let body = json!({
            "name": format!("guest-{}", host.name), "cpus": 1, "memory": 128, "network": [],
            "disk": [{ "base": "label:tiny" }], "placed_on": host.name,
        });
        let (status, record) = cluster.client.call(0, Method::POST, "/instances", Some(&body)).unwrap();
        assert_eq!(status, 200, "{record}");
        record["uuid"].as_str().unwrap().to_owned()
    };
    let guests: Vec<String> = cluster.hosts.iter().map(create).collect();
    for guest in &guests {
        muster_testing::wait_for("a guest", HEAL_TIMEOUT, || {
            let record = cluster.client.get(0, &format!("/instances/{guest}")).unwrap();
            assert_ne!(record["state"], "error", "{record}\n{}", cluster.logs());
            (record["state"] == "created").then_some(())
        });
    }
    guests
}

/// Compares the recorded power state of each guest with its process, from the point of view of every host.
fn check_guests(cluster: &FaultCluster, guests: &[String]) -> Vec<String> {
    let is_true = |guest: &String| {
        let running = running_vms().contains_key(guest);
        (0..HOSTS).all(|host| {
            let record = cluster.client.get(host, &format!("/instances/{guest}"));
            record.is_ok_and(|record| (record["power_state"] == "on") == running)
        })
    };
    let began = Instant::now();
    loop {
        let wrong: Vec<&String> = guests.iter().filter(|guest| !is_true(guest)).collect();
        if wrong.is_empty() {
            return restart_guests(cluster, guests);
        }
        if began.elapsed() > HEAL_TIMEOUT {
            return wrong.iter().map(|guest| format!("the power state of {guest} is wrong")).collect();
        }
        wait(Duration::from_millis(100));
    }
}

/// Starts the guests that a power failure ended, for the next round.
fn restart_guests(cluster: &FaultCluster, guests: &[String]) -> Vec<String> {
    let off = guests.iter().filter(|guest| !running_vms().contains_key(*guest));
    let problems = off.filter_map(|guest| {
        let path = format!("/instances/{guest}/poweron");
        let response = cluster.client.call(0, Method::POST, &path, None);
        let is_on = matches!(response, Ok((200, _)));
        (!is_on).then(|| format!("{guest} cannot be started: {response:?}"))
    });
    problems.collect()
}

/// Compares what callers were told with the networks that exist.
fn check_networks(cluster: &FaultCluster, expected: &BTreeMap<String, ExpectedNetwork>) -> Vec<String> {
    let networks = cluster.client.get(0, "/networks").unwrap();
    let existing: BTreeMap<&str, &Value> = networks
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|record| Some((record["name"].as_str()?, record)))
        .collect();
    let mut violations = Vec::new();
    for (name, network) in expected {
        let found = existing.get(name.as_str());
        match (network, found) {
            (ExpectedNetwork { rejected: Some(reason), .. }, Some(_)) => {
                violations.push(format!("{name} exists, but its caller was told {reason}"));
            }
            (ExpectedNetwork { id: Some(_), deleted: None, .. }, None) => {
                violations.push(format!("{name} was acknowledged and is lost"));
            }
            (ExpectedNetwork { deleted: Some(true), .. }, Some(record)) => {
                violations.push(format!("{name} was deleted and is {}", record["state"]));
            }
            (ExpectedNetwork { value: acknowledged, possible_values, deleted: None, .. }, Some(record)) => {
                let value = record["metadata"]["value"].as_u64();
                if value != *acknowledged && !value.is_some_and(|value| possible_values.contains(&value)) {
                    violations.push(format!("the value of {name} is {value:?}, not {acknowledged:?}"));
                }
            }
            _ => {}
        }
    }
    violations
}

fn delete_networks(cluster: &FaultCluster) {
    let networks = cluster.client.get(0, "/networks").unwrap();
    for network in networks.as_array().unwrap() {
        if network["name"].as_str().is_some_and(|name| name.starts_with("net-")) {
            let path = format!("/networks/{}", network["uuid"].as_str().unwrap());
            let _ = cluster.client.call(0, Method::DELETE, &path, None);
        }
    }
    cluster.wait_until_healthy();
}

/// Deletes the guests; nothing of them may remain on any host.
fn delete_guests(cluster: &FaultCluster, guests: &[String]) {
    for guest in guests {
        let response = cluster.client.call(0, Method::DELETE, &format!("/instances/{guest}"), None);
        assert!(matches!(response, Ok((200, _))), "{response:?}");
    }
    muster_testing::wait_for("VMs to be removed", HEAL_TIMEOUT, || {
        let directories = cluster.data_directories();
        let mut entries = directories
            .iter()
            .flat_map(|data| std::fs::read_dir(data.join("machines")).into_iter().flatten());
        (running_vms().is_empty() && entries.next().is_none()).then_some(())
    });
}
