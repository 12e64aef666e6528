//! Source checks: guests cannot forge their addresses.

use muster_test_cluster::{ClusterDatabase, HostCluster, network_id};
use muster_testing::{NetworkNamespace, wait_for};
use serde_json::json;

use crate::guest::Guest;
use crate::{SOON, enter};

const OTHER: &str = "02:00:00:66:66:66";

/// Counts frames that a place gets, by who says that it sent them.
fn count_at(namespace: &NetworkNamespace) {
    namespace.sh(&format!(
        "nft 'add table netdev seen; add counter netdev seen by_mac; add counter netdev seen by_ip; \
         add counter netdev seen by_arp; add counter netdev seen honest; \
         add chain netdev seen in {{ type filter hook ingress device eth0 priority 0; }}; \
         add rule netdev seen in ether saddr {OTHER} counter name by_mac; \
         add rule netdev seen in ip saddr 10.0.0.66 counter name by_ip; \
         add rule netdev seen in arp saddr ip 10.0.0.77 counter name by_arp; \
         add rule netdev seen in ip saddr 10.0.0.3 counter name honest'",
    ));
}

fn counted(namespace: &NetworkNamespace, name: &str) -> u64 {
    let text = namespace.sh(&format!("nft list counter netdev seen {name}"));
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "packets").unwrap();
    words[at + 1].parse().unwrap()
}

/// Speaks as somebody else, in three ways, and then as itself.
fn forge(bad: &Guest, others: &[&Guest]) {
    for other in others {
        let (address, mac) = (other.address(), other.interface.mac);
        bad.namespace.sh(&format!("ip neigh replace {address} lladdr {mac} dev eth0 nud permanent"));
        bad.namespace.sh("ip addr add 10.0.0.66/24 dev eth0");
        let _ = bad.namespace.succeeds(&format!("ping -c 2 -i 0.2 -W 0.2 -I 10.0.0.66 {address}"));
        bad.namespace.sh("ip addr del 10.0.0.66/24 dev eth0");
        bad.namespace.sh(&format!("ip link set eth0 address {OTHER}"));
        let _ = bad.namespace.succeeds(&format!("ping -c 2 -i 0.2 -W 0.2 {address}"));
        bad.namespace.sh(&format!("ip link set eth0 address {}", bad.interface.mac));
        bad.namespace.sh("ip addr add 10.0.0.77/24 dev eth0");
        let _ = bad.namespace.succeeds(&format!("busybox arping -c 1 -w 1 -I eth0 -s 10.0.0.77 {address}"));
        bad.namespace.sh("ip addr del 10.0.0.77/24 dev eth0");
        // What was sent before this arrives before this.
        assert!(bad.namespace.pings(&address.to_string()));
    }
}

#[test]
fn a_forged_sender_never_leaves_its_guest_unless_that_is_allowed() {
    if !enter("senders::a_forged_sender_never_leaves_its_guest_unless_that_is_allowed") {
        return;
    }
    let Some(mut world) = HostCluster::with_hosts(3, &[]) else { return };
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let network = network_id(&world.host(1).create_network(json!({ "name": "one" })));
    let far = Guest::new(&backdoor, world.host(2), network, "far", "10.0.0.2");
    let bad = Guest::new(&backdoor, world.host(1), network, "bad", "10.0.0.3");
    let near = Guest::new(&backdoor, world.host(1), network, "near", "10.0.0.4");
    let others = [&far, &near];
    for guest in [&far, &bad, &near] {
        guest.dhcp();
        // Answers come to the address, whoever has it; they must not make a difference.
        guest.namespace.sh("for all in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $all; done");
    }
    for other in others {
        count_at(&other.namespace);
    }
    forge(&bad, &others);
    for other in others {
        assert!(counted(&other.namespace, "honest") > 0);
        for forgery in ["by_mac", "by_ip", "by_arp"] {
            assert_eq!(counted(&other.namespace, forgery), 0, "{forgery} was forged");
        }
    }
    // The tunnel carried none of it either, to nobody.
    let router = format!("ip netns exec {network} ip neigh");
    let known = world.host(3).namespace.sh(&router);
    assert!(
        !known.contains(OTHER) && !known.contains("10.0.0.66") && !known.contains("10.0.0.77"),
        "{known}"
    );

    // It was the check that held them up.
    for machine in &mut world.hosts {
        machine.restart_with("NETWORK_CHECK_SENDERS", "false");
    }
    wait_for("the rules to go", SOON, || {
        (!world.host(1).namespace.sh("nft list ruleset").contains("senders")).then_some(())
    });
    forge(&bad, &others);
    for other in others {
        for forgery in ["by_mac", "by_ip", "by_arp"] {
            assert!(counted(&other.namespace, forgery) > 0, "{forgery} did not pass");
        }
    }
}
