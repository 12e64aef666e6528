//! A daemon that is killed at any step of making or removing a network goes on where it was.

use std::time::{Duration, Instant};

use muster_test_cluster::{Host, HostCluster, network_id, wait_until_same};
use muster_testing::wait;
use muster_types::ids::NetworkId;
use serde_json::{Value, json};

use crate::enter;

const ATTEMPTS: u32 = 12;

/// Some moment of something that takes so long: another one for each attempt, and not the same in every run.
fn moment(attempt: u32, took: Duration) -> Duration {
    let part = took / ATTEMPTS;
    let random = u32::from(NetworkId::new().0.as_bytes()[15]);
    part * attempt + part * random / 256
}

/// What a machine has of a network, without what only this network has.
fn picture(machine: &Host, network: &Value) -> String {
    let vxid = format!("{:06x}", network["vxid"].as_u64().unwrap());
    let mut text = machine.inventory();
    for (own, word) in [
        (network["uuid"].as_str().unwrap(), "UUID"),
        (vxid.as_str(), "VXID"),
        (network["floating_gateway"].as_str().unwrap(), "GATEWAY"),
    ] {
        text = text.replace(own, word);
    }
    // Without their names they stand in another order.
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines.join("\n")
}

#[test]
fn a_daemon_killed_while_it_makes_or_removes_a_network_ends_what_it_began() {
    if !enter("kill::a_daemon_killed_while_it_makes_or_removes_a_network_ends_what_it_began") {
        return;
    }
    let mut world = HostCluster::single_host(&[("IP_DELETION_HALO_DURATION", "1")]);
    let machine = &mut world.hosts[0];
    let empty = machine.inventory();
    // A network that nobody disturbs.
    let began = Instant::now();
    let calm = machine.create_network(json!({ "name": "calm", "provide_dns": true }));
    let making = began.elapsed();
    let whole = picture(machine, &calm);
    let began = Instant::now();
    machine.request_network_deletion(network_id(&calm));
    machine.wait_for_network_state(network_id(&calm), "deleted");
    let removing = began.elapsed();
    wait_until_same("nothing to be left", Duration::ZERO, &empty, || machine.inventory());

    for attempt in 0..ATTEMPTS {
        let (made, removed) = (moment(attempt, making), moment(attempt, removing));
        println!(
            "killed {made:?} of {making:?} after the creation, {removed:?} of {removing:?} after the deletion"
        );
        let network = network_id(&machine.request_network(json!({ "name": "victim", "provide_dns": true })));
        wait(made);
        machine.kill();
        machine.start();
        let record = machine.wait_for_network_state(network, "created");
        // The state is the truth at once, not some time later.
        wait_until_same("what was made", Duration::ZERO, &whole, || picture(machine, &record));

        machine.request_network_deletion(network);
        wait(removed);
        machine.kill();
        machine.start();
        machine.wait_for_network_state(network, "deleted");
        wait_until_same("nothing to be left", Duration::ZERO, &empty, || machine.inventory());
    }
    let log = machine.log();
    assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
