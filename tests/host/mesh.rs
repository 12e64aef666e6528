//! Networks across several hosts.

use muster_test_cluster::{ClusterDatabase, HostCluster, network_id};
use reqwest::Method;
use serde_json::{Value, json};

use crate::enter;
use crate::guest::Guest;

#[test]
fn guests_on_two_hosts_reach_each_other_router_and_external_network() {
    if !enter("mesh::guests_on_two_hosts_reach_each_other_router_and_external_network") {
        return;
    }
    let Some(mut cluster) = HostCluster::with_hosts(3, &[]) else { return };
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let network = cluster.host(1).create_network(json!({ "name": "one", "provide_dns": true }));
    let uuid = network_id(&network);
    let web = Guest::new(&database, cluster.host(1), uuid, "web", "10.0.0.2");
    let db = Guest::new(&database, cluster.host(2), uuid, "db", "10.0.0.3");

    // DHCP and DNS of the third host.
    for guest in [&web, &db] {
        let lease =
            format!("{}/24 mtu=1450 dns=10.0.0.1 domain=system.shakenfist router=10.0.0.1", guest.address());
        assert_eq!(guest.dhcp(), lease);
    }
    web.wait_until_resolved("db", db.address());
    db.wait_until_resolved("web", web.address());
    db.wait_until_resolved("web.system.shakenfist", web.address());

    // Guests reach each other, also with the largest packet, and the gateway.
    assert!(web.namespace.pings("10.0.0.3") && db.namespace.pings("10.0.0.2"));
    assert!(web.namespace.pings("-M do -s 1422 10.0.0.3"), "the largest packet does not pass");
    assert!(web.namespace.pings("10.0.0.1") && db.namespace.pings("10.0.0.1"));

    // The external network, masqueraded by the network node.
    for namespace in [&cluster.external_peer, &web.namespace, &db.namespace] {
        namespace.serve_peer_address(80);
    }
    assert_eq!(web.namespace.address_seen_by("198.51.100.1", 80).unwrap(), "198.51.100.2");
    assert!(db.namespace.pings("198.51.100.1"));

    // A floating address, requested on a host that is not the network node.
    let interface = format!("/interfaces/{}", web.interface.id);
    cluster.host(2).post(&format!("{interface}/float"), None);
    let floating = cluster.host(1).get(&interface)["floating"].as_str().unwrap().to_owned();
    assert_eq!(cluster.external_peer.address_seen_by(&floating, 80).unwrap(), "198.51.100.1");

    // A routed address is configured in the guest, which sees the address of the client.
    let routed = cluster.host(1).post(&format!("/networks/{uuid}/route"), None).as_str().unwrap().to_owned();
    db.namespace.sh(&format!("ip addr add {routed}/32 dev eth0"));
    assert_eq!(cluster.external_peer.address_seen_by(&routed, 80).unwrap(), "198.51.100.1");
    assert!(cluster.external_peer.pings(&routed));

    // Neither is reachable after it was released.
    cluster.host(1).post(&format!("{interface}/defloat"), None);
    let path = format!("/networks/{uuid}/route/{routed}");
    assert_eq!(cluster.host(1).call(Method::DELETE, &path, None).0, 200);
    assert_eq!(cluster.external_peer.address_seen_by(&floating, 80), None);
    assert_eq!(cluster.external_peer.address_seen_by(&routed, 80), None);

    // Without masquerading the external network sees the gateway of the network.
    cluster.hosts[2].restart_with("NETWORK_MASQUERADE", "false");
    let gateway = network["floating_gateway"].as_str();
    muster_testing::wait_for("the gateway as source address", crate::RECONCILE_TIMEOUT, || {
        (web.namespace.address_seen_by("198.51.100.1", 80).as_deref() == gateway).then_some(())
    });
}

#[test]
fn networks_with_equal_addresses_are_isolated() {
    if !enter("mesh::networks_with_equal_addresses_are_isolated") {
        return;
    }
    let Some(cluster) = HostCluster::with_hosts(3, &[]) else { return };
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let first = network_id(&cluster.host(1).create_network(json!({ "name": "first", "provide_dns": true })));
    let second =
        network_id(&cluster.host(1).create_network(json!({ "name": "second", "provide_dns": true })));
    let one = Guest::new(&database, cluster.host(1), first, "one", "10.0.0.2");
    let two = Guest::new(&database, cluster.host(2), first, "two", "10.0.0.3");
    let three = Guest::new(&database, cluster.host(1), second, "three", "10.0.0.4");
    let four = Guest::new(&database, cluster.host(2), second, "four", "10.0.0.3");
    for guest in [&one, &two, &three, &four] {
        assert!(guest.dhcp().starts_with(&format!("{}/24 ", guest.address())));
    }
    assert!(one.namespace.pings("10.0.0.3") && three.namespace.pings("10.0.0.3"));

    // The same address belongs to another guest in the other network.
    for (guest, expected) in [(&one, &two), (&three, &four)] {
        let neighbours = guest.namespace.sh("ip neigh show 10.0.0.3");
        assert!(neighbours.contains(&expected.interface.mac.to_string()), "{neighbours}");
    }
    two.namespace.sh("ip link set eth0 down");
    assert!(one.namespace.cannot_ping("10.0.0.3"), "another network's guest answers");
    assert!(one.namespace.cannot_ping("10.0.0.4") && three.namespace.cannot_ping("10.0.0.2"));
    assert!(three.namespace.pings("10.0.0.3"), "its own neighbour does not reply");
    three.wait_until_resolved("four", four.address());
    assert!(!three.namespace.succeeds("busybox nslookup -type=a one 10.0.0.1 | grep -q 'Address: 10.0.0.2'"));
    // Broadcasts do not reach the other network.
    four.namespace.sh(
        "nft 'add table netdev seen; add chain netdev seen in { type filter hook ingress device eth0 priority 0; }; \
         add rule netdev seen in arp daddr ip 10.0.0.77 counter'",
    );
    let arping = "busybox arping -c 2 -w 2 -I eth0 10.0.0.77";
    assert!(!one.namespace.succeeds(arping));
    assert!(four.namespace.sh("nft list table netdev seen").contains("packets 0 "));
    assert!(!three.namespace.succeeds(arping));
    assert!(!four.namespace.sh("nft list table netdev seen").contains("packets 0 "));
}

#[test]
fn ping_is_forwarded_to_network_node() {
    if !enter("mesh::ping_is_forwarded_to_network_node") {
        return;
    }
    let Some(mut cluster) = HostCluster::with_hosts(2, &[]) else { return };
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let network = network_id(&cluster.host(1).create_network(json!({ "name": "one" })));
    let guest = Guest::new(&database, cluster.host(1), network, "guest", "10.0.0.9");
    guest.dhcp();
    let ping = |cluster: &HostCluster, number: usize, address: &str| {
        cluster.host(number).call(Method::GET, &format!("/networks/{network}/ping/{address}"), None)
    };
    let lines = |response: &Value| response["stdout"].as_array().unwrap().clone();
    for number in [1, 2] {
        let (status, response) = ping(&cluster, number, "10.0.0.9");
        assert_eq!(status, 200, "{response}");
        let summary = |line: &Value| line.as_str().unwrap().contains("10 received, 0% packet loss");
        assert!(lines(&response).iter().any(summary), "{response}");
    }
    let (status, response) = ping(&cluster, 1, "10.0.0.99");
    assert_eq!(status, 200, "{response}");
    assert!(
        lines(&response).iter().any(|line| line.as_str().unwrap().contains("100% packet loss")),
        "{response}"
    );
    assert_eq!(ping(&cluster, 1, "10.0.1.9").0, 400);

    // The network works without its daemon.
    cluster.hosts[1].kill();
    let (status, response) = ping(&cluster, 1, "10.0.0.9");
    assert_eq!(status, 503, "{response}");
    assert!(response["error"].as_str().unwrap().contains("m2"), "{response}");
    assert!(guest.namespace.pings("10.0.0.1") && guest.namespace.pings("198.51.100.1"));
    guest.namespace.sh("ip addr flush dev eth0");
    guest.dhcp();
    cluster.hosts[1].start();
    assert_eq!(ping(&cluster, 1, "10.0.0.9").0, 200);
    cluster.hosts[1].stop();
    assert_eq!(ping(&cluster, 1, "10.0.0.9").0, 503);
}
