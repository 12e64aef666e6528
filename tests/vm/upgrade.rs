//! A rolling upgrade from the previous build, which `make test-upgrade` runs: three hosts with guests that count, under load.

mod load;
mod previous_build;

use std::process::Command;

use muster_test_cluster::{
    Host, HostCluster, SYSTEM_KEY, enter_vm_namespaces, qemu_processes, vm_hosts_with_program,
};
use muster_testing::{daemon_program, wait_for};
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::instance::Instance;
use load::Load;

/// The port on which each guest receives the numbers that another guest counts.
const PORT: u16 = 9000;

/// A guest that counts to the next one, over one TCP connection.
struct CountingGuest {
    instance: Instance,
    host: usize,
}

impl CountingGuest {
    /// Returns the numbers that the guest has received, and whether one is missing or repeated.
    fn received(&self, cluster: &HostCluster) -> (u64, bool) {
        let mut console = self.instance.console(cluster.host(self.host));
        let output = console.run("awk 'NR != $1 { wrong = 1 } END { print NR, wrong + 0 }' /run/received");
        let (count, wrong) = output.trim().split_once(' ').unwrap();
        (count.parse().unwrap(), wrong != "0")
    }
}

/// Creates a guest on each host. Each one counts to the next.
fn create_guests(cluster: &HostCluster) -> Vec<CountingGuest> {
    let first = cluster.host(1);
    let network = first.create_network(json!({ "name": "lan", "netblock": "10.50.0.0/24" }))["uuid"].clone();
    let request = |host: usize| {
        let changes = json!({ "network": [{ "network_uuid": network }], "placed_on": format!("m{host}") });
        CountingGuest { instance: Instance::request(first, &format!("guest-{host}"), &changes), host }
    };
    let guests: Vec<CountingGuest> = (1..=cluster.hosts.len()).map(request).collect();
    let mut consoles: Vec<_> = guests
        .iter()
        .map(|guest| {
            guest.instance.wait_for_state(first, "created");
            guest.instance.console(cluster.host(guest.host))
        })
        .collect();
    for console in &mut consoles {
        console.log_in();
        // Its input never ends, because that could end the connection.
        console.run(&format!("{{ sleep 1000000 | nc -l -p {PORT} >/run/received; }} 2>/dev/null & true"));
    }
    for (index, console) in consoles.iter_mut().enumerate() {
        let next = &guests[(index + 1) % guests.len()];
        let address = next.instance.address(first, 0);
        console.run_until(&format!("ping -c 1 -W 5 {address} >/dev/null"));
        console.run(&format!(
            "{{ n=0; while :; do n=$((n + 1)); echo $n; usleep 200000; done | nc {address} {PORT}; }} >/dev/null 2>&1 & true"
        ));
    }
    guests
}

/// Waits until every guest has received more than before, and returns how much.
fn wait_for_counts(cluster: &HostCluster, guests: &[CountingGuest], before: &[u64]) -> Vec<u64> {
    let wait = |(guest, before): (&CountingGuest, &u64)| {
        wait_for(&format!("the guest on m{} to receive more", guest.host), TIMEOUT, || {
            let (count, is_wrong) = guest.received(cluster);
            assert!(!is_wrong, "the guest on m{} lacks a number", guest.host);
            (count > *before).then_some(count)
        })
    };
    guests.iter().zip(before).map(wait).collect()
}

/// Returns the output of `muster cluster upgrade status` on a host.
fn upgrade_status(host: &Host) -> String {
    let url = host.url();
    let output = host.namespace.run(move || {
        Command::new(daemon_program())
            .args(["cluster", "upgrade", "status"])
            .envs([
                ("MUSTER_API_URL", url.as_str()),
                ("MUSTER_NAMESPACE", "system"),
                ("MUSTER_KEY", SYSTEM_KEY),
            ])
            .output()
            .unwrap()
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Waits until every node is up.
fn wait_until_up(host: &Host) {
    wait_for("every node to be up", TIMEOUT, || {
        let nodes = host.get("/nodes");
        let is_up = |node: &Value| node["state"] == "created" && node["degraded"].is_null();
        nodes.as_array().unwrap().iter().all(is_up).then_some(())
    });
}

#[test]
#[ignore = "builds the previous program: make test-upgrade"]
fn hosts_are_upgraded_one_after_the_other_under_load() {
    let previous = previous_build::program();
    if !enter_vm_namespaces("upgrade::hosts_are_upgraded_one_after_the_other_under_load") {
        return;
    }
    let settings = [("API_TOKEN_DURATION", "1440"), ("CLEANER_DELAY", "8")];
    let Some(mut cluster) = vm_hosts_with_program(&previous, 3, &settings) else { return };
    let guests = create_guests(&cluster);
    let mut counts = wait_for_counts(&cluster, &guests, &[0, 0, 0]);
    let processes = qemu_processes();
    assert_eq!(processes.len(), 3, "{processes:?}");
    let instances: Vec<String> = guests.iter().map(|guest| guest.instance.uuid.clone()).collect();
    let load = Load::start(&cluster, &instances);

    for (index, next_step) in
        ["upgrade node m2 ", "upgrade node m3 ", "nothing to do"].into_iter().enumerate()
    {
        let host = &mut cluster.hosts[index];
        // The previous build may still be starting on the last host, which then exits with an error.
        if index == 2 {
            host.kill();
        } else {
            host.stop();
        }
        host.set_program(&daemon_program());
        host.start();
        wait_until_up(cluster.host(index + 1));
        let status = upgrade_status(cluster.host(index + 1));
        println!("m{} is upgraded:\n{status}", index + 1);
        assert!(status.lines().next().unwrap().contains(next_step), "{status}");
        if index == 0 {
            // A daemon of the previous build also starts on a database that was migrated.
            cluster.hosts[2].kill();
            cluster.hosts[2].start();
            wait_until_up(cluster.host(3));
            // The upgrade of a host can be undone.
            cluster.hosts[0].stop();
            cluster.hosts[0].set_program(&previous);
            cluster.hosts[0].start();
            wait_until_up(cluster.host(1));
            cluster.hosts[0].kill();
            cluster.hosts[0].set_program(&daemon_program());
            cluster.hosts[0].start();
            wait_until_up(cluster.host(1));
        }
        counts = wait_for_counts(&cluster, &guests, &counts);
        assert_eq!(qemu_processes(), processes, "the VMs were restarted");
    }

    load.finish();
    println!("numbers that the guests received: {counts:?}");
    let host = cluster.host(1);
    for guest in &guests {
        assert_eq!(guest.instance.record(host)["power_state"], "on");
        for state in ["off", "crashed", "unknown"] {
            let events = guest.instance.events(host, &format!("power state is now {state}"));
            assert!(events.is_empty(), "{events:?}");
        }
    }
}
