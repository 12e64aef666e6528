//! A daemon that is killed while it creates or deletes a network resumes after its restart.

use std::time::{Duration, Instant};

use muster_test_cluster::{Host, HostCluster, network_id, wait_until_same};
use muster_testing::wait;
use muster_types::ids::NetworkId;
use serde_json::{Value, json};

use crate::enter;

const ATTEMPTS: u32 = 12;

/// Returns a delay within an operation of this duration: later for each attempt, and slightly random.
fn kill_delay(attempt: u32, duration: Duration) -> Duration {
    let part = duration / ATTEMPTS;
    let random = u32::from(NetworkId::new().0.as_bytes()[15]);
    part * attempt + part * random / 256
}

/// Returns the inventory of a host with the values of this network replaced by placeholders.
fn normalized_inventory(host: &Host, network: &Value) -> String {
    let vxid = format!("{:06x}", network["vxid"].as_u64().unwrap());
    let mut text = host.inventory();
    for (value, placeholder) in [
        (network["uuid"].as_str().unwrap(), "UUID"),
        (vxid.as_str(), "VXID"),
        (network["floating_gateway"].as_str().unwrap(), "GATEWAY"),
    ] {
        text = text.replace(value, placeholder);
    }
    // The order depends on the replaced values.
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines.join("\n")
}

#[test]
fn killed_daemon_resumes_network_creation_and_deletion() {
    if !enter("kill::killed_daemon_resumes_network_creation_and_deletion") {
        return;
    }
    let mut cluster = HostCluster::single_host(&[("IP_DELETION_HALO_DURATION", "1")]);
    let host = &mut cluster.hosts[0];
    let empty = host.inventory();
    // A network without interruption.
    let began = Instant::now();
    let uninterrupted = host.create_network(json!({ "name": "calm", "provide_dns": true }));
    let create_duration = began.elapsed();
    let complete = normalized_inventory(host, &uninterrupted);
    let began = Instant::now();
    host.request_network_deletion(network_id(&uninterrupted));
    host.wait_for_network_state(network_id(&uninterrupted), "deleted");
    let delete_duration = began.elapsed();
    wait_until_same("an empty host", Duration::ZERO, &empty, || host.inventory());

    for attempt in 0..ATTEMPTS {
        let (create_delay, delete_delay) =
            (kill_delay(attempt, create_duration), kill_delay(attempt, delete_duration));
        println!(
            "killed {create_delay:?} of {create_duration:?} after the creation, {delete_delay:?} of {delete_duration:?} after the deletion"
        );
        let network = network_id(&host.request_network(json!({ "name": "victim", "provide_dns": true })));
        wait(create_delay);
        host.kill();
        host.start();
        let record = host.wait_for_network_state(network, "created");
        // The reported state is true immediately, not only eventually.
        wait_until_same("the complete network", Duration::ZERO, &complete, || {
            normalized_inventory(host, &record)
        });

        host.request_network_deletion(network);
        wait(delete_delay);
        host.kill();
        host.start();
        host.wait_for_network_state(network, "deleted");
        wait_until_same("an empty host", Duration::ZERO, &empty, || host.inventory());
    }
    let log = host.log();
    assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
