//! Usage events of networks.

use std::collections::BTreeSet;

use muster_test_cluster::{ClusterDatabase, HostCluster, network_id};
use muster_testing::wait_for;
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::{RECONCILE_TIMEOUT, enter};

#[test]
fn usage_events_match_kernel_counters() {
    if !enter("usage::usage_events_match_kernel_counters") {
        return;
    }
    let cluster = HostCluster::single_host(&[("USAGE_EVENT_FREQUENCY", "1")]);
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let host = cluster.host(1);
    let network = network_id(&host.create_network(json!({ "name": "one" })));
    let guest = Guest::new(&database, host, network, "guest", "10.0.0.2");
    guest.dhcp();
    let newest = || host.events(network, "usage").first().cloned();
    let before = wait_for("a first event", RECONCILE_TIMEOUT, newest);
    assert_eq!(before["type"], "usage");
    let names = |direction: &str| -> BTreeSet<String> {
        before["extra"][direction].as_object().unwrap().keys().cloned().collect()
    };
    let expected = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let (rx, tx) = (
        ["bytes", "dropped", "errors", "multicast", "over_errors", "packets"],
        ["bytes", "carrier_errors", "collisions", "dropped", "errors", "packets"],
    );
    assert_eq!(names("rx"), expected(&rx));
    assert_eq!(names("tx"), expected(&tx));

    // Twenty packets of more than a thousand bytes in both directions.
    let counter =
        |event: &Value, direction: &str, name: &str| event["extra"][direction][name].as_u64().unwrap();
    guest.namespace.sh("ping -n -c 20 -i 0.02 -s 1000 198.51.100.1");
    wait_for("the packets to be counted", RECONCILE_TIMEOUT, || {
        let now = newest()?;
        let grew =
            |direction, name, by| counter(&now, direction, name) >= counter(&before, direction, name) + by;
        ["rx", "tx"]
            .iter()
            .all(|direction| grew(direction, "bytes", 20_000) && grew(direction, "packets", 20))
            .then_some(())
    });
    let device = host.namespace.sh(&format!("ip netns exec {network} cat /proc/net/dev | grep egr-"));
    let counters: Vec<u64> =
        device.split_once(':').unwrap().1.split_whitespace().map(|word| word.parse().unwrap()).collect();
    wait_for("the counters of the kernel", RECONCILE_TIMEOUT, || {
        let now = newest()?;
        (counter(&now, "rx", "bytes") >= counters[0] && counter(&now, "tx", "bytes") >= counters[8])
            .then_some(())
    });
}
