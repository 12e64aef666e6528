//! Guests cannot spoof their addresses.

use muster_test_cluster::{ClusterDatabase, HostCluster, network_id};
use muster_testing::{NetworkNamespace, wait_for};
use serde_json::json;

use crate::guest::Guest;
use crate::{RECONCILE_TIMEOUT, enter};

const SPOOFED_MAC: &str = "02:00:00:66:66:66";

/// Counts the frames that arrive in a namespace by their claimed sender.
fn count_frames(namespace: &NetworkNamespace) {
    namespace.sh(&format!(
        "nft 'add table netdev seen; add counter netdev seen by_mac; add counter netdev seen by_ip; \
         add counter netdev seen by_arp; add counter netdev seen honest; \
         add chain netdev seen in {{ type filter hook ingress device eth0 priority 0; }}; \
         add rule netdev seen in ether saddr {SPOOFED_MAC} counter name by_mac; \
         add rule netdev seen in ip saddr 10.0.0.66 counter name by_ip; \
         add rule netdev seen in arp saddr ip 10.0.0.77 counter name by_arp; \
         add rule netdev seen in ip saddr 10.0.0.3 counter name honest'",
    ));
}

fn frame_count(namespace: &NetworkNamespace, name: &str) -> u64 {
    let text = namespace.sh(&format!("nft list counter netdev seen {name}"));
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "packets").unwrap();
    words[at + 1].parse().unwrap()
}

/// Sends frames with a spoofed IP address, MAC address and ARP sender, and then with the own ones.
fn spoof(bad: &Guest, others: &[&Guest]) {
    for other in others {
        let (address, mac) = (other.address(), other.interface.mac);
        bad.namespace.sh(&format!("ip neigh replace {address} lladdr {mac} dev eth0 nud permanent"));
        bad.namespace.sh("ip addr add 10.0.0.66/24 dev eth0");
        let _ = bad.namespace.succeeds(&format!("ping -c 2 -i 0.2 -W 0.2 -I 10.0.0.66 {address}"));
        bad.namespace.sh("ip addr del 10.0.0.66/24 dev eth0");
        bad.namespace.sh(&format!("ip link set eth0 address {SPOOFED_MAC}"));
        let _ = bad.namespace.succeeds(&format!("ping -c 2 -i 0.2 -W 0.2 {address}"));
        bad.namespace.sh(&format!("ip link set eth0 address {}", bad.interface.mac));
        bad.namespace.sh("ip addr add 10.0.0.77/24 dev eth0");
        let _ = bad.namespace.succeeds(&format!("busybox arping -c 1 -w 1 -I eth0 -s 10.0.0.77 {address}"));
        bad.namespace.sh("ip addr del 10.0.0.77/24 dev eth0");
        // Frames sent before this ping would have arrived before it.
        assert!(bad.namespace.pings(&address.to_string()));
    }
}

#[test]
fn drops_spoofed_frames_unless_check_is_disabled() {
    if !enter("spoofing::drops_spoofed_frames_unless_check_is_disabled") {
        return;
    }
    let Some(mut cluster) = HostCluster::with_hosts(3, &[]) else { return };
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let network = network_id(&cluster.host(1).create_network(json!({ "name": "one" })));
    let far = Guest::new(&database, cluster.host(2), network, "far", "10.0.0.2");
    let bad = Guest::new(&database, cluster.host(1), network, "bad", "10.0.0.3");
    let near = Guest::new(&database, cluster.host(1), network, "near", "10.0.0.4");
    let others = [&far, &near];
    for guest in [&far, &bad, &near] {
        guest.dhcp();
        // Reverse path filtering must not influence the result.
        guest.namespace.sh("for all in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $all; done");
    }
    for other in others {
        count_frames(&other.namespace);
    }
    spoof(&bad, &others);
    for other in others {
        assert!(frame_count(&other.namespace, "honest") > 0);
        for kind in ["by_mac", "by_ip", "by_arp"] {
            assert_eq!(frame_count(&other.namespace, kind), 0, "a frame spoofed {kind} arrived");
        }
    }
    // No spoofed frame reached the router through the tunnel either.
    let router = format!("ip netns exec {network} ip neigh");
    let neighbours = cluster.host(3).namespace.sh(&router);
    assert!(
        !neighbours.contains(SPOOFED_MAC)
            && !neighbours.contains("10.0.0.66")
            && !neighbours.contains("10.0.0.77"),
        "{neighbours}"
    );

    // Without the check they arrive.
    for host in &mut cluster.hosts {
        host.restart_with("NETWORK_CHECK_SENDERS", "false");
    }
    wait_for("the rules to be removed", RECONCILE_TIMEOUT, || {
        (!cluster.host(1).namespace.sh("nft list ruleset").contains("senders")).then_some(())
    });
    spoof(&bad, &others);
    for other in others {
        for kind in ["by_mac", "by_ip", "by_arp"] {
            assert!(frame_count(&other.namespace, kind) > 0, "no frame spoofed {kind} arrived");
        }
    }
}
