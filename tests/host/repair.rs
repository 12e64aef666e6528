//! Manual changes to networks are repaired and recorded as events.

use std::time::Instant;

use muster_test_cluster::{ClusterDatabase, HostCluster, inventories, network_id, wait_until_same};
use muster_testing::wait_for;
use serde_json::json;

use crate::guest::Guest;
use crate::{RECONCILE_TIMEOUT, enter};

#[test]
fn repairs_manual_damage_within_ten_seconds() {
    if !enter("repair::repairs_manual_damage_within_ten_seconds") {
        return;
    }
    let Some(cluster) = HostCluster::with_hosts(2, &[]) else { return };
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let record = cluster.host(1).create_network(json!({ "name": "one", "provide_dns": true }));
    let network = network_id(&record);
    let guest = Guest::new(&database, cluster.host(1), network, "guest", "10.0.0.2");
    guest.dhcp();
    let interface = format!("/interfaces/{}", guest.interface.id);
    cluster.host(1).post(&format!("{interface}/float"), None);
    let floating = cluster.host(1).get(&interface)["floating"].as_str().unwrap().to_owned();
    assert!(cluster.external_peer.pings(&floating));

    let vxid = format!("{:06x}", record["vxid"].as_u64().unwrap());
    let (hypervisor, nn) = (cluster.host(1), cluster.host(2));
    let complete = inventories(&cluster.hosts);
    let in_router = format!("ip netns exec {network}");
    let flood = |peer: &str| format!("bridge fdb del 00:00:00:00:00:00 dev vxlan-{vxid} dst {peer}");
    for (host, command) in [
        (hypervisor, format!("ip link del br-vxlan-{vxid}")),
        (nn, format!("ip link del br-vxlan-{vxid}")),
        (hypervisor, flood("10.99.0.2")),
        (nn, flood("10.99.0.1")),
        (hypervisor, format!("nft delete table bridge muster-{vxid}")),
        (hypervisor, format!("nft flush table bridge muster-{vxid}")),
        (nn, format!("{in_router} nft delete table inet muster")),
        (nn, format!("{in_router} nft flush table inet muster")),
        (nn, format!("{in_router} ip addr del 10.0.0.1/24 dev veth-{vxid}-i")),
        (nn, format!("{in_router} ip addr flush dev egr-{vxid}-i")),
        (nn, format!("{in_router} ip route del default")),
        (nn, "ip link del egr-br-ext0; nft delete table ip muster-egress".into()),
        (nn, format!("ip netns del {network}")),
    ] {
        let before = nn.events(network, "network repaired").len();
        host.namespace.sh(&command);
        let began = Instant::now();
        wait_until_same(&format!("repair of: {command}"), RECONCILE_TIMEOUT, &complete, || {
            inventories(&cluster.hosts)
        });
        let events = wait_for(&format!("the event of: {command}"), RECONCILE_TIMEOUT, || {
            Some(nn.events(network, "network repaired")).filter(|events| events.len() > before)
        });
        println!("{:?}: {command}: {}", began.elapsed(), events[0]["extra"]["repaired"]);
        assert_eq!(events[0]["type"], "status");
        assert!(!events[0]["extra"]["repaired"].as_array().unwrap().is_empty(), "{command}: {}", events[0]);
    }
    assert!(guest.namespace.pings("10.0.0.1") && guest.namespace.pings("198.51.100.1"));
    assert!(cluster.external_peer.pings(&floating));

    // dnsmasq.
    let message = "dnsmasq died and was started again";
    let before = nn.events(network, message).len();
    let pid = nn.namespace.sh(&format!("cat /run/muster/networks/{network}/dnsmasq.pid"));
    nn.namespace.sh(&format!("kill -9 {}", pid.trim()));
    wait_until_same("dnsmasq to be restarted", RECONCILE_TIMEOUT, &complete, || inventories(&cluster.hosts));
    let events = wait_for("the event of the restart", RECONCILE_TIMEOUT, || {
        Some(nn.events(network, message)).filter(|events| events.len() > before)
    });
    assert!(events[0]["extra"]["reason"].as_str().unwrap().contains(pid.trim()), "{}", events[0]);
    assert_ne!(nn.namespace.sh(&format!("cat /run/muster/networks/{network}/dnsmasq.pid")), pid);
    guest.wait_until_resolved("guest", guest.address());
    guest.namespace.sh("ip addr flush dev eth0");
    guest.dhcp();
    // A regular change does not repair anything.
    let repairs = nn.events(network, "network repaired").len();
    cluster
        .host(1)
        .post(&format!("/networks/{network}/dns"), Some(json!({ "name": "a", "value": "10.0.0.7" })));
    guest.wait_until_resolved("a", "10.0.0.7".parse().unwrap());
    assert_eq!(nn.events(network, "network repaired").len(), repairs);
}
