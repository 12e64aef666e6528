//! What passes a router is told in events.

use std::collections::BTreeSet;

use muster_test_cluster::{ClusterDatabase, HostCluster, network_id};
use muster_testing::wait_for;
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::{SOON, enter};

#[test]
fn usage_is_what_the_kernel_counted() {
    if !enter("usage::usage_is_what_the_kernel_counted") {
        return;
    }
    let world = HostCluster::single_host(&[("USAGE_EVENT_FREQUENCY", "1")]);
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let machine = world.host(1);
    let network = network_id(&machine.create_network(json!({ "name": "one" })));
    let guest = Guest::new(&backdoor, machine, network, "guest", "10.0.0.2");
    guest.dhcp();
    let newest = || machine.events(network, "usage").first().cloned();
    let before = wait_for("a first event", SOON, newest);
    assert_eq!(before["type"], "usage");
    let names = |way: &str| -> BTreeSet<String> {
        before["extra"][way].as_object().unwrap().keys().cloned().collect()
    };
    let expected = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let (rx, tx) = (
        ["bytes", "dropped", "errors", "multicast", "over_errors", "packets"],
        ["bytes", "carrier_errors", "collisions", "dropped", "errors", "packets"],
    );
    assert_eq!(names("rx"), expected(&rx));
    assert_eq!(names("tx"), expected(&tx));

    // Twenty packets of more than a thousand bytes, there and back.
    let number = |event: &Value, way: &str, name: &str| event["extra"][way][name].as_u64().unwrap();
    guest.namespace.sh("ping -n -c 20 -i 0.02 -s 1000 198.51.100.1");
    wait_for("the packets to be counted", SOON, || {
        let now = newest()?;
        let more = |way, name, most| number(&now, way, name) >= number(&before, way, name) + most;
        ["rx", "tx"].iter().all(|way| more(way, "bytes", 20_000) && more(way, "packets", 20)).then_some(())
    });
    let device = machine.namespace.sh(&format!("ip netns exec {network} cat /proc/net/dev | grep egr-"));
    let counters: Vec<u64> =
        device.split_once(':').unwrap().1.split_whitespace().map(|word| word.parse().unwrap()).collect();
    wait_for("what the kernel counted", SOON, || {
        let now = newest()?;
        (number(&now, "rx", "bytes") >= counters[0] && number(&now, "tx", "bytes") >= counters[8])
            .then_some(())
    });
}
