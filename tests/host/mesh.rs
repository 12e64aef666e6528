//! One network across three machines.

use muster_test_cluster::{ClusterDatabase, HostCluster, network_id};
use reqwest::Method;
use serde_json::{Value, json};

use crate::enter;
use crate::guest::Guest;

#[test]
fn hosts_on_two_machines_meet_each_other_their_router_and_the_world() {
    if !enter("mesh::hosts_on_two_machines_meet_each_other_their_router_and_the_world") {
        return;
    }
    let Some(mut world) = HostCluster::with_hosts(3, &[]) else { return };
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let network = world.host(1).create_network(json!({ "name": "one", "provide_dns": true }));
    let uuid = network_id(&network);
    let web = Guest::new(&backdoor, world.host(1), uuid, "web", "10.0.0.2");
    let db = Guest::new(&backdoor, world.host(2), uuid, "db", "10.0.0.3");

    // Addresses and names, from the third machine.
    for guest in [&web, &db] {
        let lease =
            format!("{}/24 mtu=1450 dns=10.0.0.1 domain=system.shakenfist router=10.0.0.1", guest.address());
        assert_eq!(guest.dhcp(), lease);
    }
    web.resolves("db", db.address());
    db.resolves("web", web.address());
    db.resolves("web.system.shakenfist", web.address());

    // Each other, also with the largest packet, and the gateway.
    assert!(web.namespace.pings("10.0.0.3") && db.namespace.pings("10.0.0.2"));
    assert!(web.namespace.pings("-M do -s 1422 10.0.0.3"), "the largest packet does not pass");
    assert!(web.namespace.pings("10.0.0.1") && db.namespace.pings("10.0.0.1"));

    // The world, hidden behind the network node.
    for place in [&world.external_peer, &web.namespace, &db.namespace] {
        place.serve_peer_address(80);
    }
    assert_eq!(web.namespace.address_seen_by("198.51.100.1", 80).unwrap(), "198.51.100.2");
    assert!(db.namespace.pings("198.51.100.1"));

    // A floating address, asked for on a machine that is not the network node.
    let interface = format!("/interfaces/{}", web.interface.id);
    world.host(2).post(&format!("{interface}/float"), None);
    let floating = world.host(1).get(&interface)["floating"].as_str().unwrap().to_owned();
    assert_eq!(world.external_peer.address_seen_by(&floating, 80).unwrap(), "198.51.100.1");

    // A routed address: the guest itself has it, and sees who calls.
    let routed = world.host(1).post(&format!("/networks/{uuid}/route"), None).as_str().unwrap().to_owned();
    db.namespace.sh(&format!("ip addr add {routed}/32 dev eth0"));
    assert_eq!(world.external_peer.address_seen_by(&routed, 80).unwrap(), "198.51.100.1");
    assert!(world.external_peer.pings(&routed));

    // Taken back, both are nobody's.
    world.host(1).post(&format!("{interface}/defloat"), None);
    let path = format!("/networks/{uuid}/route/{routed}");
    assert_eq!(world.host(1).call(Method::DELETE, &path, None).0, 200);
    assert_eq!(world.external_peer.address_seen_by(&floating, 80), None);
    assert_eq!(world.external_peer.address_seen_by(&routed, 80), None);

    // Without masquerading the world sees the network's own address.
    world.hosts[2].restart_with("NETWORK_MASQUERADE", "false");
    let gateway = network["floating_gateway"].as_str();
    muster_testing::wait_for("the gateway to be seen", crate::SOON, || {
        (web.namespace.address_seen_by("198.51.100.1", 80).as_deref() == gateway).then_some(())
    });
}

#[test]
fn a_second_network_with_the_same_addresses_sees_nothing_of_the_first() {
    if !enter("mesh::a_second_network_with_the_same_addresses_sees_nothing_of_the_first") {
        return;
    }
    let Some(world) = HostCluster::with_hosts(3, &[]) else { return };
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let first = network_id(&world.host(1).create_network(json!({ "name": "first", "provide_dns": true })));
    let second = network_id(&world.host(1).create_network(json!({ "name": "second", "provide_dns": true })));
    let one = Guest::new(&backdoor, world.host(1), first, "one", "10.0.0.2");
    let two = Guest::new(&backdoor, world.host(2), first, "two", "10.0.0.3");
    let three = Guest::new(&backdoor, world.host(1), second, "three", "10.0.0.4");
    let four = Guest::new(&backdoor, world.host(2), second, "four", "10.0.0.3");
    for guest in [&one, &two, &three, &four] {
        assert!(guest.dhcp().starts_with(&format!("{}/24 ", guest.address())));
    }
    assert!(one.namespace.pings("10.0.0.3") && three.namespace.pings("10.0.0.3"));

    // The same address is another guest in the other network.
    for (guest, expected) in [(&one, &two), (&three, &four)] {
        let known = guest.namespace.sh("ip neigh show 10.0.0.3");
        assert!(known.contains(&expected.interface.mac.to_string()), "{known}");
    }
    two.namespace.sh("ip link set eth0 down");
    assert!(one.namespace.cannot_ping("10.0.0.3"), "another network's guest answers");
    assert!(one.namespace.cannot_ping("10.0.0.4") && three.namespace.cannot_ping("10.0.0.2"));
    assert!(three.namespace.pings("10.0.0.3"), "its own neighbour does not answer");
    three.resolves("four", four.address());
    assert!(!three.namespace.succeeds("busybox nslookup -type=a one 10.0.0.1 | grep -q 'Address: 10.0.0.2'"));
    // What one says to everybody, nobody over there hears.
    four.namespace.sh(
        "nft 'add table netdev seen; add chain netdev seen in { type filter hook ingress device eth0 priority 0; }; \
         add rule netdev seen in arp daddr ip 10.0.0.77 counter'",
    );
    let ask = "busybox arping -c 2 -w 2 -I eth0 10.0.0.77";
    assert!(!one.namespace.succeeds(ask));
    assert!(four.namespace.sh("nft list table netdev seen").contains("packets 0 "));
    assert!(!three.namespace.succeeds(ask));
    assert!(!four.namespace.sh("nft list table netdev seen").contains("packets 0 "));
}

#[test]
fn a_ping_is_handed_on_to_the_network_node() {
    if !enter("mesh::a_ping_is_handed_on_to_the_network_node") {
        return;
    }
    let Some(mut world) = HostCluster::with_hosts(2, &[]) else { return };
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let network = network_id(&world.host(1).create_network(json!({ "name": "one" })));
    let guest = Guest::new(&backdoor, world.host(1), network, "guest", "10.0.0.9");
    guest.dhcp();
    let ping = |world: &HostCluster, number: usize, address: &str| {
        world.host(number).call(Method::GET, &format!("/networks/{network}/ping/{address}"), None)
    };
    let lines = |answer: &Value| answer["stdout"].as_array().unwrap().clone();
    for number in [1, 2] {
        let (status, answer) = ping(&world, number, "10.0.0.9");
        assert_eq!(status, 200, "{answer}");
        let summary = |line: &Value| line.as_str().unwrap().contains("10 received, 0% packet loss");
        assert!(lines(&answer).iter().any(summary), "{answer}");
    }
    let (status, answer) = ping(&world, 1, "10.0.0.99");
    assert_eq!(status, 200, "{answer}");
    assert!(
        lines(&answer).iter().any(|line| line.as_str().unwrap().contains("100% packet loss")),
        "{answer}"
    );
    assert_eq!(ping(&world, 1, "10.0.1.9").0, 400);

    // Its daemon is gone; what it made goes on.
    world.hosts[1].kill();
    let (status, answer) = ping(&world, 1, "10.0.0.9");
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("m2"), "{answer}");
    assert!(guest.namespace.pings("10.0.0.1") && guest.namespace.pings("198.51.100.1"));
    guest.namespace.sh("ip addr flush dev eth0");
    guest.dhcp();
    world.hosts[1].start();
    assert_eq!(ping(&world, 1, "10.0.0.9").0, 200);
    world.hosts[1].stop();
    assert_eq!(ping(&world, 1, "10.0.0.9").0, 503);
}
