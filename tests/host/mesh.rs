//! Networks across several hosts.

use reqwest::Method;
use serde_json::{Value, json};

use crate::backdoor::Backdoor;
use crate::enter;
use crate::guest::Guest;
use crate::machine::{World, id};

#[test]
fn guests_on_two_hosts_reach_each_other_router_and_external_network() {
    if !enter("mesh::guests_on_two_hosts_reach_each_other_router_and_external_network") {
        return;
    }
    let Some(mut world) = World::of(3, &[]) else { return };
    let backdoor = Backdoor::open(&world.database, &world.folder);
    let network = world.machine(1).create(json!({ "name": "one", "provide_dns": true }));
    let uuid = id(&network);
    let web = Guest::new(&backdoor, world.machine(1), uuid, "web", "10.0.0.2");
    let db = Guest::new(&backdoor, world.machine(2), uuid, "db", "10.0.0.3");

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
    assert!(web.place.pings("10.0.0.3") && db.place.pings("10.0.0.2"));
    assert!(web.place.pings("-M do -s 1422 10.0.0.3"), "the largest packet does not pass");
    assert!(web.place.pings("10.0.0.1") && db.place.pings("10.0.0.1"));

    // The external network, masqueraded by the network node.
    for place in [&world.outside, &web.place, &db.place] {
        place.answer(80);
    }
    assert_eq!(web.place.seen_by("198.51.100.1", 80).unwrap(), "198.51.100.2");
    assert!(db.place.pings("198.51.100.1"));

    // A floating address, requested on a host that is not the network node.
    let interface = format!("/interfaces/{}", web.interface.id);
    world.machine(2).post(&format!("{interface}/float"), None);
    let floating = world.machine(1).get(&interface)["floating"].as_str().unwrap().to_owned();
    assert_eq!(world.outside.seen_by(&floating, 80).unwrap(), "198.51.100.1");

    // A routed address is configured in the guest, which sees the address of the client.
    let routed = world.machine(1).post(&format!("/networks/{uuid}/route"), None).as_str().unwrap().to_owned();
    db.place.sh(&format!("ip addr add {routed}/32 dev eth0"));
    assert_eq!(world.outside.seen_by(&routed, 80).unwrap(), "198.51.100.1");
    assert!(world.outside.pings(&routed));

    // Neither is reachable after it was released.
    world.machine(1).post(&format!("{interface}/defloat"), None);
    let path = format!("/networks/{uuid}/route/{routed}");
    assert_eq!(world.machine(1).call(Method::DELETE, &path, None).0, 200);
    assert_eq!(world.outside.seen_by(&floating, 80), None);
    assert_eq!(world.outside.seen_by(&routed, 80), None);

    // Without masquerading the external network sees the gateway of the network.
    world.machines[2].restart_with("NETWORK_MASQUERADE", "false");
    let gateway = network["floating_gateway"].as_str();
    muster_testing::wait_for("the gateway as source address", crate::RECONCILE_TIMEOUT, || {
        (web.place.seen_by("198.51.100.1", 80).as_deref() == gateway).then_some(())
    });
}

#[test]
fn networks_with_equal_addresses_are_isolated() {
    if !enter("mesh::networks_with_equal_addresses_are_isolated") {
        return;
    }
    let Some(world) = World::of(3, &[]) else { return };
    let backdoor = Backdoor::open(&world.database, &world.folder);
    let first = id(&world.machine(1).create(json!({ "name": "first", "provide_dns": true })));
    let second = id(&world.machine(1).create(json!({ "name": "second", "provide_dns": true })));
    let one = Guest::new(&backdoor, world.machine(1), first, "one", "10.0.0.2");
    let two = Guest::new(&backdoor, world.machine(2), first, "two", "10.0.0.3");
    let three = Guest::new(&backdoor, world.machine(1), second, "three", "10.0.0.4");
    let four = Guest::new(&backdoor, world.machine(2), second, "four", "10.0.0.3");
    for guest in [&one, &two, &three, &four] {
        assert!(guest.dhcp().starts_with(&format!("{}/24 ", guest.address())));
    }
    assert!(one.place.pings("10.0.0.3") && three.place.pings("10.0.0.3"));

    // The same address belongs to another guest in the other network.
    for (guest, expected) in [(&one, &two), (&three, &four)] {
        let neighbours = guest.place.sh("ip neigh show 10.0.0.3");
        assert!(neighbours.contains(&expected.interface.mac.to_string()), "{neighbours}");
    }
    two.place.sh("ip link set eth0 down");
    assert!(one.place.pings_not("10.0.0.3"), "another network's guest answers");
    assert!(one.place.pings_not("10.0.0.4") && three.place.pings_not("10.0.0.2"));
    assert!(three.place.pings("10.0.0.3"), "its own neighbour does not reply");
    three.wait_until_resolved("four", four.address());
    assert!(!three.place.does("busybox nslookup -type=a one 10.0.0.1 | grep -q 'Address: 10.0.0.2'"));
    // Broadcasts do not reach the other network.
    four.place.sh(
        "nft 'add table netdev seen; add chain netdev seen in { type filter hook ingress device eth0 priority 0; }; \
         add rule netdev seen in arp daddr ip 10.0.0.77 counter'",
    );
    let arping = "busybox arping -c 2 -w 2 -I eth0 10.0.0.77";
    assert!(!one.place.does(arping));
    assert!(four.place.sh("nft list table netdev seen").contains("packets 0 "));
    assert!(!three.place.does(arping));
    assert!(!four.place.sh("nft list table netdev seen").contains("packets 0 "));
}

#[test]
fn ping_is_forwarded_to_network_node() {
    if !enter("mesh::ping_is_forwarded_to_network_node") {
        return;
    }
    let Some(mut world) = World::of(2, &[]) else { return };
    let backdoor = Backdoor::open(&world.database, &world.folder);
    let network = id(&world.machine(1).create(json!({ "name": "one" })));
    let guest = Guest::new(&backdoor, world.machine(1), network, "guest", "10.0.0.9");
    guest.dhcp();
    let ping = |world: &World, number: usize, address: &str| {
        world.machine(number).call(Method::GET, &format!("/networks/{network}/ping/{address}"), None)
    };
    let lines = |response: &Value| response["stdout"].as_array().unwrap().clone();
    for number in [1, 2] {
        let (status, response) = ping(&world, number, "10.0.0.9");
        assert_eq!(status, 200, "{response}");
        let summary = |line: &Value| line.as_str().unwrap().contains("10 received, 0% packet loss");
        assert!(lines(&response).iter().any(summary), "{response}");
    }
    let (status, response) = ping(&world, 1, "10.0.0.99");
    assert_eq!(status, 200, "{response}");
    assert!(
        lines(&response).iter().any(|line| line.as_str().unwrap().contains("100% packet loss")),
        "{response}"
    );
    assert_eq!(ping(&world, 1, "10.0.1.9").0, 400);

    // The network works without its daemon.
    world.machines[1].kill();
    let (status, response) = ping(&world, 1, "10.0.0.9");
    assert_eq!(status, 503, "{response}");
    assert!(response["error"].as_str().unwrap().contains("m2"), "{response}");
    assert!(guest.place.pings("10.0.0.1") && guest.place.pings("198.51.100.1"));
    guest.place.sh("ip addr flush dev eth0");
    guest.dhcp();
    world.machines[1].start();
    assert_eq!(ping(&world, 1, "10.0.0.9").0, 200);
    world.machines[1].stop();
    assert_eq!(ping(&world, 1, "10.0.0.9").0, 503);
}
