//! The data plane on the real kernel: machines, guests and the outside, each in namespaces of their own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod care;
mod guard;
mod kill;
mod world;

use muster_types::node::{HostFeature, NodeApi};

use world::{Guest, Net, World, enter, is_alive};

#[test]
fn guests_meet_each_other_their_router_and_the_world() {
    if !enter("guests_meet_each_other_their_router_and_the_world") {
        return;
    }
    let world = World::new();
    let web = Guest::new(&world, 1, "web", "10.0.0.2");
    let db = Guest::new(&world, 2, "db", "10.0.0.3");
    let guests = [&web, &db];
    let mut net = Net::new(0xa1, "10.0.0.0/24", "192.168.20.5").with(&guests);
    net.router.names = vec![("printer".into(), "10.0.0.99".parse().unwrap())];
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    net.ensure(&world, &guests);

    // Addresses and names.
    for guest in guests {
        let lease = guest.dhcp();
        let expected =
            format!("{}/24 mtu=1450 dns=10.0.0.1 domain=one.example router=10.0.0.1", guest.address);
        assert_eq!(lease.trim(), expected);
    }
    for (name, address) in [("web", "10.0.0.2"), ("db.one.example", "10.0.0.3"), ("printer", "10.0.0.99")] {
        let answer = db.place.sh(&format!("busybox nslookup -type=a {name} 10.0.0.1"));
        assert!(answer.contains(&format!("Address: {address}")), "{answer}");
    }

    // Each other, also with the largest packet, and the router.
    assert!(web.place.pings("10.0.0.3") && db.place.pings("10.0.0.2") && db.place.pings("10.0.0.1"));
    assert!(web.place.pings("-M do -s 1422 10.0.0.3"), "the largest packet does not pass");
    let address = db.address;
    let id = net.plan.id;
    let ping = world.machine(3).ask(async move |node| node.ping(id, address).await).unwrap();
    assert!(ping.stdout.iter().any(|line| line.contains(" 0% packet loss")), "{ping:?}");
    let elsewhere = world.machine(1).ask(async move |node| node.ping(id, address).await);
    assert!(matches!(elsewhere, Err(muster_types::Error::Unavailable(_))), "{elsewhere:?}");

    // The world: behind the gateway, behind the floating address, and as what is routed.
    for place in [&world.outside, &web.place, &db.place] {
        place.answer(80);
    }
    assert_eq!(db.place.seen_by("198.51.100.1", 80).unwrap(), "192.168.20.5");
    assert_eq!(web.place.seen_by("198.51.100.1", 80).unwrap(), "192.168.20.7");
    assert_eq!(world.outside.seen_by("192.168.20.7", 80).unwrap(), "198.51.100.1");
    assert_eq!(world.outside.seen_by("192.168.20.5", 80), None);
    // From inside to an address that floats: to a neighbour, and to oneself.
    assert_eq!(db.place.seen_by("192.168.20.7", 80).unwrap(), "10.0.0.1");
    assert_eq!(web.place.seen_by("192.168.20.7", 80).unwrap(), "10.0.0.1");
    db.place.sh("ip addr add 192.168.20.9/32 dev eth0");
    assert_eq!(world.outside.seen_by("192.168.20.9", 80).unwrap(), "198.51.100.1");
    assert_eq!(web.place.seen_by("192.168.20.9", 80).unwrap(), "10.0.0.2");
    db.place.sh("ip route replace 198.51.100.0/24 via 10.0.0.1 src 192.168.20.9");
    assert_eq!(db.place.seen_by("198.51.100.1", 80).unwrap(), "192.168.20.9");
    // Inner addresses cannot be reached even by who knows the way.
    world.outside.sh("ip route add 10.0.0.0/24 via 198.51.100.2");
    world.machine(3).place.sh("ip route add 10.0.0.0/24 via 192.168.20.5");
    assert!(world.outside.pings_not("10.0.0.2"));
    assert_eq!(world.outside.seen_by("10.0.0.2", 80), None);

    let network = net.found();
    let usage = world.machine(3).ask(async move |node| node.network_usage(network).await).unwrap().unwrap();
    assert!(usage.rx["packets"] > 0 && usage.tx["bytes"] > 0, "{usage:?}");
    let usage = world.machine(1).ask(async move |node| node.network_usage(network).await).unwrap();
    assert_eq!(usage, None);
}

#[test]
fn networks_with_the_same_addresses_do_not_meet() {
    if !enter("networks_with_the_same_addresses_do_not_meet") {
        return;
    }
    let world = World::new();
    let (one, two) = (Guest::new(&world, 1, "one", "10.0.0.2"), Guest::new(&world, 2, "two", "10.0.0.3"));
    let (three, four) =
        (Guest::new(&world, 1, "three", "10.0.0.4"), Guest::new(&world, 2, "four", "10.0.0.3"));
    let first = Net::new(0xb1, "10.0.0.0/24", "192.168.20.5").with(&[&one, &two]);
    let mut second = Net::new(0xb2, "10.0.0.0/24", "192.168.20.6").with(&[&three, &four]);
    second.router.egress.masquerade = false;
    second.router.egress.floating = vec![("192.168.20.8".parse().unwrap(), four.address)];
    first.ensure(&world, &[&one, &two]);
    second.ensure(&world, &[&three, &four]);
    for guest in [&one, &two, &three, &four] {
        guest.settle();
        guest.place.answer(80);
    }
    two.place.sh("ip link set eth0 down");
    assert!(three.place.pings("10.0.0.3"), "its own neighbour");
    assert!(one.place.pings_not("10.0.0.3") && one.place.pings_not("10.0.0.4"), "another network's guest");
    // What floats can be reached from another network, as from the world; nothing else can.
    assert_eq!(one.place.seen_by("192.168.20.8", 80).unwrap(), "192.168.20.5");
    let router = first.plan.id;
    let nn = &world.machine(3).place;
    nn.sh(&format!("ip netns exec {router} ip route add 172.30.0.0/24 via 192.168.20.6"));
    assert!(one.place.pings_not("172.30.0.2"));
    // GuestApi do not reach the machine that they are on, even by its hardware address.
    let host = &world.machine(1).place;
    let bridge = host.sh("ip -o link show br-vxlan-0000b1 | sed 's/.*ether //; s/ .*//'");
    one.place.sh(&format!(
        "ip route add 10.99.0.1 dev eth0 && ip neigh add 10.99.0.1 lladdr {} dev eth0",
        bridge.trim()
    ));
    host.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.br-vxlan-0000b1.rp_filter=0");
    host.sh("nft 'add table ip seen; add chain ip seen in { type filter hook prerouting priority 0; }; add rule ip seen in ip saddr 10.0.0.2 counter'");
    assert!(one.place.pings_not("10.99.0.1"));
    assert!(host.sh("nft list table ip seen").contains("packets 0"));
}

#[test]
fn forged_senders_do_not_leave_their_machine() {
    if !enter("forged_senders_do_not_leave_their_machine") {
        return;
    }
    let world = World::new();
    let (good, bad) = (Guest::new(&world, 2, "good", "10.0.0.2"), Guest::new(&world, 1, "bad", "10.0.0.3"));
    let mut net = Net::new(0xc1, "10.0.0.0/24", "192.168.20.5").with(&[&good, &bad]);
    net.ensure(&world, &[&good, &bad]);
    good.settle();
    bad.settle();
    assert!(bad.place.pings("10.0.0.2"));

    // Everything that would be a forgery, and by what it would be seen.
    let (own, other) = (bad.mac.to_string(), "02:00:00:66:66:66");
    let all = "ff:ff:ff:ff:ff:ff";
    let to = good.mac.to_string();
    // 10.0.0.3 and 10.0.0.66 to 10.0.0.2, with both ports.
    let packet = |from: &str, ports: &str| {
        format!("0800 4500 0024 0001 0000 4011 0000 {from} 0a000002 {ports} 0010 0000 6d75737465720000")
    };
    let arp = |mac: &str, from: &str| format!("0806 0001 0800 06 04 0001 {mac} {from} 000000000000 0a000002");
    let forged = [
        (
            "hardware address",
            "ether src 02:00:00:66:66:66",
            format!("{to} {other} {}", packet("0a000003", "1234 0009")),
        ),
        ("address", "src host 10.0.0.66", format!("{to} {own} {}", packet("0a000042", "1234 0009"))),
        (
            "hardware address in ARP",
            "arp[8:4] = 0x02000066",
            format!("{all} {own} {}", arp(other, "0a000003")),
        ),
        ("address in ARP", "arp src host 10.0.0.66", format!("{all} {own} {}", arp(&own, "0a000042"))),
        (
            "address of the router in ARP",
            "arp src host 10.0.0.1",
            format!("{all} {own} {}", arp(&own, "0a000001")),
        ),
        (
            "answer of a DHCP server",
            "udp src port 67",
            format!("{to} {own} {}", packet("0a000003", "0043 0009")),
        ),
        (
            "answer of a DHCP server from another port",
            "udp dst port 68",
            format!("{to} {own} {}", packet("0a000003", "1234 0044")),
        ),
        (
            "IPv6",
            "ip6",
            format!("33:33:00:00:00:01 {own} 86dd 6000000000003b40 {} {}", "fd".repeat(16), "ff".repeat(16)),
        ),
        ("VLAN", "vlan", format!("{to} {own} 8100 0005 {}", packet("0a000003", "1234 0009"))),
        ("something else", "ether proto 0x88b5", format!("{all} {own} 88b5 {}", "00".repeat(46))),
    ];
    let listen = |filter: &str| {
        let tcpdump = format!("tcpdump -Z root -lnnei eth0 '{filter}'");
        good.place.sh(&format!("rm -f /run/seen; {tcpdump} > /run/seen 2> /run/log & echo $! > /run/pid"));
        good.place.until("grep -q listening /run/log");
    };
    let stop = || good.place.sh("kill $(cat /run/pid); wait $(cat /run/pid) 2>/dev/null; cat /run/seen");
    for (what, filter, frame) in &forged {
        listen(filter);
        bad.place.send(frame);
        // What was sent before this is seen before this.
        assert!(bad.place.pings("10.0.0.2"));
        assert_eq!(stop().trim(), "", "{what}");
    }
    // It was the check that held them up.
    net.plan.check_senders = false;
    net.plan.generation += 1;
    net.ensure(&world, &[&good, &bad]);
    for (_, filter, frame) in &forged {
        listen(filter);
        bad.place.send(frame);
        good.place.until("test -s /run/seen");
        stop();
    }
}

#[test]
fn addresses_that_float_or_are_routed_need_no_gateway_and_end_when_they_are_taken() {
    if !enter("addresses_that_float_or_are_routed_need_no_gateway_and_end_when_they_are_taken") {
        return;
    }
    let world = World::new();
    let web = Guest::new(&world, 1, "web", "10.0.0.2");
    let mut net = Net::new(0x91, "10.0.0.0/24", "192.168.20.5").with(&[&web]);
    net.router.nat = false;
    net.router.egress.gateway = None;
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    net.ensure(&world, &[&web]);
    web.settle();
    web.place.answer(80);
    web.place.echo(7);
    web.place.sh("ip addr add 192.168.20.9/32 dev eth0");
    assert_eq!(world.outside.seen_by("192.168.20.9", 80).unwrap(), "198.51.100.1");
    // Its own address is nobody's in the world.
    assert_eq!(web.place.seen_by("198.51.100.1", 80), None);

    net.plan.routed.clear();
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.plan.generation += 1;
    net.ensure(&world, &[&web]);
    assert_eq!(world.outside.seen_by("192.168.20.9", 80), None);
    assert_eq!(world.outside.seen_by("192.168.20.7", 80).unwrap(), "198.51.100.1");
    world.outside.answer(80);
    assert_eq!(web.place.seen_by("198.51.100.1", 80).unwrap(), "192.168.20.7");

    let connection = world.outside.connect("192.168.20.7", 7);
    assert!(is_alive(&connection));
    net.router.names = vec![("new".into(), web.address)];
    net.plan.generation += 1;
    net.ensure(&world, &[&web]);
    assert!(is_alive(&connection), "a change of something else ended a connection");
    net.router.egress.floating = vec![("192.168.20.8".parse().unwrap(), web.address)];
    net.plan.generation += 1;
    net.ensure(&world, &[&web]);
    assert!(!is_alive(&connection), "a connection outlived its address");
    assert_eq!(world.outside.seen_by("192.168.20.8", 80).unwrap(), "198.51.100.1");
    assert_eq!(world.outside.seen_by("192.168.20.7", 80), None);
}

#[test]
fn a_machine_says_what_its_mesh_takes_and_what_it_cannot_do() {
    if !enter("a_machine_says_what_its_mesh_takes_and_what_it_cannot_do") {
        return;
    }
    let world = World::new();
    let report = world.machine(1).ask(async |node| node.report().await).unwrap();
    assert_eq!(report.mesh_mtu, Some(1600));
    assert!(!report.limits.contains_key(&HostFeature::Networks), "{:?}", report.limits);
    // What it tried to find that out left nothing, not even in the count of programs.
    let mut world = world;
    let before = world.machine(1).inventory();
    let begin = std::time::Instant::now();
    world.machines[0].restart();
    println!("a start took {:?}", begin.elapsed());
    assert_eq!(world.machine(1).inventory(), before);
    assert_eq!(world.machine(1).programs_run(), 0);
}
