//! Whatever is damaged by hand is whole again soon, and there is an event that says so.

use std::time::Instant;

use muster_test_cluster::{ClusterDatabase, HostCluster, inventories, network_id, wait_until_same};
use muster_testing::wait_for;
use serde_json::json;

use crate::guest::Guest;
use crate::{SOON, enter};

#[test]
fn what_is_damaged_by_hand_is_whole_again_within_ten_seconds() {
    if !enter("repair::what_is_damaged_by_hand_is_whole_again_within_ten_seconds") {
        return;
    }
    let Some(world) = HostCluster::with_hosts(2, &[]) else { return };
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let record = world.host(1).create_network(json!({ "name": "one", "provide_dns": true }));
    let network = network_id(&record);
    let guest = Guest::new(&backdoor, world.host(1), network, "guest", "10.0.0.2");
    guest.dhcp();
    let interface = format!("/interfaces/{}", guest.interface.id);
    world.host(1).post(&format!("{interface}/float"), None);
    let floating = world.host(1).get(&interface)["floating"].as_str().unwrap().to_owned();
    assert!(world.external_peer.pings(&floating));

    let vxid = format!("{:06x}", record["vxid"].as_u64().unwrap());
    let (hypervisor, nn) = (world.host(1), world.host(2));
    let whole = inventories(&world.hosts);
    let within = format!("ip netns exec {network}");
    let flood = |peer: &str| format!("bridge fdb del 00:00:00:00:00:00 dev vxlan-{vxid} dst {peer}");
    for (machine, deed) in [
        (hypervisor, format!("ip link del br-vxlan-{vxid}")),
        (nn, format!("ip link del br-vxlan-{vxid}")),
        (hypervisor, flood("10.99.0.2")),
        (nn, flood("10.99.0.1")),
        (hypervisor, format!("nft delete table bridge muster-{vxid}")),
        (hypervisor, format!("nft flush table bridge muster-{vxid}")),
        (nn, format!("{within} nft delete table inet muster")),
        (nn, format!("{within} nft flush table inet muster")),
        (nn, format!("{within} ip addr del 10.0.0.1/24 dev veth-{vxid}-i")),
        (nn, format!("{within} ip addr flush dev egr-{vxid}-i")),
        (nn, format!("{within} ip route del default")),
        (nn, "ip link del egr-br-ext0; nft delete table ip muster-egress".into()),
        (nn, format!("ip netns del {network}")),
    ] {
        let before = nn.events(network, "network repaired").len();
        machine.namespace.sh(&deed);
        let began = Instant::now();
        wait_until_same(&format!("repair of: {deed}"), SOON, &whole, || inventories(&world.hosts));
        let events = wait_for(&format!("the event of: {deed}"), SOON, || {
            Some(nn.events(network, "network repaired")).filter(|events| events.len() > before)
        });
        println!("{:?}: {deed}: {}", began.elapsed(), events[0]["extra"]["repaired"]);
        assert_eq!(events[0]["type"], "status");
        assert!(!events[0]["extra"]["repaired"].as_array().unwrap().is_empty(), "{deed}: {}", events[0]);
    }
    assert!(guest.namespace.pings("10.0.0.1") && guest.namespace.pings("198.51.100.1"));
    assert!(world.external_peer.pings(&floating));

    // The server of addresses and names.
    let died = "dnsmasq died and was started again";
    let before = nn.events(network, died).len();
    let pid = nn.namespace.sh(&format!("cat /run/muster/networks/{network}/dnsmasq.pid"));
    nn.namespace.sh(&format!("kill -9 {}", pid.trim()));
    wait_until_same("dnsmasq to be back", SOON, &whole, || inventories(&world.hosts));
    let events = wait_for("the event of its death", SOON, || {
        Some(nn.events(network, died)).filter(|events| events.len() > before)
    });
    assert!(events[0]["extra"]["reason"].as_str().unwrap().contains(pid.trim()), "{}", events[0]);
    assert_ne!(nn.namespace.sh(&format!("cat /run/muster/networks/{network}/dnsmasq.pid")), pid);
    guest.resolves("guest", guest.address());
    guest.namespace.sh("ip addr flush dev eth0");
    guest.dhcp();
    // What is well is left alone.
    let repairs = nn.events(network, "network repaired").len();
    world
        .host(1)
        .post(&format!("/networks/{network}/dns"), Some(json!({ "name": "a", "value": "10.0.0.7" })));
    guest.resolves("a", "10.0.0.7".parse().unwrap());
    assert_eq!(nn.events(network, "network repaired").len(), repairs);
}
