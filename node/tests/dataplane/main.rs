//! The data plane on the real kernel: hosts, guests and the external network, each in its own namespaces.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod fixture;
mod gate;
mod isolation;
mod kill;
mod reconcile;

use muster_types::node::{HostFeature, NodeApi};

use fixture::{Guest, TestNetwork, Testbed, is_alive, run_isolated};

#[test]
fn guests_reach_each_other_their_router_and_the_external_network() {
    if !run_isolated("guests_reach_each_other_their_router_and_the_external_network") {
        return;
    }
    let testbed = Testbed::new();
    let web = Guest::new(&testbed, 1, "web", "10.0.0.2");
    let db = Guest::new(&testbed, 2, "db", "10.0.0.3");
    let guests = [&web, &db];
    let mut net = TestNetwork::new(0xa1, "10.0.0.0/24", "192.168.20.5").with(&guests);
    net.router.names = vec![("printer".into(), "10.0.0.99".parse().unwrap())];
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    net.ensure(&testbed, &guests);

    // DHCP and DNS.
    for guest in guests {
        let lease = guest.dhcp();
        let expected =
            format!("{}/24 mtu=1450 dns=10.0.0.1 domain=one.example router=10.0.0.1", guest.address);
        assert_eq!(lease.trim(), expected);
    }
    for (name, address) in [("web", "10.0.0.2"), ("db.one.example", "10.0.0.3"), ("printer", "10.0.0.99")] {
        let output = db.netns.sh(&format!("busybox nslookup -type=a {name} 10.0.0.1"));
        assert!(output.contains(&format!("Address: {address}")), "{output}");
    }

    // Reachability of guests, also with the largest packet, and of the router.
    assert!(web.netns.can_ping("10.0.0.3") && db.netns.can_ping("10.0.0.2") && db.netns.can_ping("10.0.0.1"));
    assert!(web.netns.can_ping("-M do -s 1422 10.0.0.3"), "the largest packet does not pass");
    let address = db.address;
    let id = net.plan.id;
    let ping = testbed.host(3).call(async move |node| node.ping(id, address).await).unwrap();
    assert!(ping.stdout.iter().any(|line| line.contains(" 0% packet loss")), "{ping:?}");
    let elsewhere = testbed.host(1).call(async move |node| node.ping(id, address).await);
    assert!(matches!(elsewhere, Err(muster_types::Error::Unavailable(_))), "{elsewhere:?}");

    // The external network: behind the gateway, behind the floating address, and from a routed address.
    for netns in [&testbed.external, &web.netns, &db.netns] {
        netns.serve_source_address(80);
    }
    assert_eq!(db.netns.source_seen_by("198.51.100.1", 80).unwrap(), "192.168.20.5");
    assert_eq!(web.netns.source_seen_by("198.51.100.1", 80).unwrap(), "192.168.20.7");
    assert_eq!(testbed.external.source_seen_by("192.168.20.7", 80).unwrap(), "198.51.100.1");
    assert_eq!(testbed.external.source_seen_by("192.168.20.5", 80), None);
    // Hairpin: a floating address from inside, of a neighbour and of the guest itself.
    assert_eq!(db.netns.source_seen_by("192.168.20.7", 80).unwrap(), "10.0.0.1");
    assert_eq!(web.netns.source_seen_by("192.168.20.7", 80).unwrap(), "10.0.0.1");
    db.netns.sh("ip addr add 192.168.20.9/32 dev eth0");
    assert_eq!(testbed.external.source_seen_by("192.168.20.9", 80).unwrap(), "198.51.100.1");
    assert_eq!(web.netns.source_seen_by("192.168.20.9", 80).unwrap(), "10.0.0.2");
    db.netns.sh("ip route replace 198.51.100.0/24 via 10.0.0.1 src 192.168.20.9");
    assert_eq!(db.netns.source_seen_by("198.51.100.1", 80).unwrap(), "192.168.20.9");
    // Inner addresses are unreachable even with a route.
    testbed.external.sh("ip route add 10.0.0.0/24 via 198.51.100.2");
    testbed.host(3).netns.sh("ip route add 10.0.0.0/24 via 192.168.20.5");
    assert!(testbed.external.cannot_ping("10.0.0.2"));
    assert_eq!(testbed.external.source_seen_by("10.0.0.2", 80), None);

    let network = net.found();
    let usage = testbed.host(3).call(async move |node| node.network_usage(network).await).unwrap().unwrap();
    assert!(usage.rx["packets"] > 0 && usage.tx["bytes"] > 0, "{usage:?}");
    let usage = testbed.host(1).call(async move |node| node.network_usage(network).await).unwrap();
    assert_eq!(usage, None);
}

#[test]
fn networks_with_equal_addresses_are_isolated() {
    if !run_isolated("networks_with_equal_addresses_are_isolated") {
        return;
    }
    let testbed = Testbed::new();
    let (one, two) = (Guest::new(&testbed, 1, "one", "10.0.0.2"), Guest::new(&testbed, 2, "two", "10.0.0.3"));
    let (three, four) =
        (Guest::new(&testbed, 1, "three", "10.0.0.4"), Guest::new(&testbed, 2, "four", "10.0.0.3"));
    let first = TestNetwork::new(0xb1, "10.0.0.0/24", "192.168.20.5").with(&[&one, &two]);
    let mut second = TestNetwork::new(0xb2, "10.0.0.0/24", "192.168.20.6").with(&[&three, &four]);
    second.router.egress.masquerade = false;
    second.router.egress.floating = vec![("192.168.20.8".parse().unwrap(), four.address)];
    first.ensure(&testbed, &[&one, &two]);
    second.ensure(&testbed, &[&three, &four]);
    for guest in [&one, &two, &three, &four] {
        guest.configure_address();
        guest.netns.serve_source_address(80);
    }
    two.netns.sh("ip link set eth0 down");
    assert!(three.netns.can_ping("10.0.0.3"), "its own neighbour");
    assert!(
        one.netns.cannot_ping("10.0.0.3") && one.netns.cannot_ping("10.0.0.4"),
        "another network's guest"
    );
    // Floating addresses can be reached from another network; nothing else can.
    assert_eq!(one.netns.source_seen_by("192.168.20.8", 80).unwrap(), "192.168.20.5");
    let router = first.plan.id;
    let nn = &testbed.host(3).netns;
    nn.sh(&format!("ip netns exec {router} ip route add 172.30.0.0/24 via 192.168.20.6"));
    assert!(one.netns.cannot_ping("172.30.0.2"));
    // Guests do not reach their host, even by its MAC address.
    let host_ns = &testbed.host(1).netns;
    let bridge = host_ns.sh("ip -o link show br-vxlan-0000b1 | sed 's/.*ether //; s/ .*//'");
    one.netns.sh(&format!(
        "ip route add 10.99.0.1 dev eth0 && ip neigh add 10.99.0.1 lladdr {} dev eth0",
        bridge.trim()
    ));
    host_ns.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.br-vxlan-0000b1.rp_filter=0");
    host_ns.sh("nft 'add table ip seen; add chain ip seen in { type filter hook prerouting priority 0; }; add rule ip seen in ip saddr 10.0.0.2 counter'");
    assert!(one.netns.cannot_ping("10.99.0.1"));
    assert!(host_ns.sh("nft list table ip seen").contains("packets 0"));
}

#[test]
fn forged_sender_addresses_are_dropped() {
    if !run_isolated("forged_sender_addresses_are_dropped") {
        return;
    }
    let testbed = Testbed::new();
    let (good, bad) =
        (Guest::new(&testbed, 2, "good", "10.0.0.2"), Guest::new(&testbed, 1, "bad", "10.0.0.3"));
    let mut net = TestNetwork::new(0xc1, "10.0.0.0/24", "192.168.20.5").with(&[&good, &bad]);
    net.ensure(&testbed, &[&good, &bad]);
    good.configure_address();
    bad.configure_address();
    assert!(bad.netns.can_ping("10.0.0.2"));

    // Every kind of forgery, and the filter that would capture it.
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
            "reply of a DHCP server",
            "udp src port 67",
            format!("{to} {own} {}", packet("0a000003", "0043 0009")),
        ),
        (
            "reply of a DHCP server from another port",
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
    let capture = |filter: &str| {
        let tcpdump = format!("tcpdump -Z root -lnnei eth0 '{filter}'");
        good.netns.sh(&format!("rm -f /run/seen; {tcpdump} > /run/seen 2> /run/log & echo $! > /run/pid"));
        good.netns.until("grep -q listening /run/log");
    };
    let stop = || good.netns.sh("kill $(cat /run/pid); wait $(cat /run/pid) 2>/dev/null; cat /run/seen");
    for (what, filter, frame) in &forged {
        capture(filter);
        bad.netns.send_frame(frame);
        // A frame sent before this ping would have been captured before it.
        assert!(bad.netns.can_ping("10.0.0.2"));
        assert_eq!(stop().trim(), "", "{what}");
    }
    // Without the check they arrive.
    net.plan.check_senders = false;
    net.plan.generation += 1;
    net.ensure(&testbed, &[&good, &bad]);
    for (_, filter, frame) in &forged {
        capture(filter);
        bad.netns.send_frame(frame);
        good.netns.until("test -s /run/seen");
        stop();
    }
}

#[test]
fn floating_and_routed_addresses_work_without_gateway_until_removed() {
    if !run_isolated("floating_and_routed_addresses_work_without_gateway_until_removed") {
        return;
    }
    let testbed = Testbed::new();
    let web = Guest::new(&testbed, 1, "web", "10.0.0.2");
    let mut net = TestNetwork::new(0x91, "10.0.0.0/24", "192.168.20.5").with(&[&web]);
    net.router.nat = false;
    net.router.egress.gateway = None;
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    net.ensure(&testbed, &[&web]);
    web.configure_address();
    web.netns.serve_source_address(80);
    web.netns.serve_echo(7);
    web.netns.sh("ip addr add 192.168.20.9/32 dev eth0");
    assert_eq!(testbed.external.source_seen_by("192.168.20.9", 80).unwrap(), "198.51.100.1");
    // Its own address is not translated, hence not reachable from outside.
    assert_eq!(web.netns.source_seen_by("198.51.100.1", 80), None);

    net.plan.routed.clear();
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.plan.generation += 1;
    net.ensure(&testbed, &[&web]);
    assert_eq!(testbed.external.source_seen_by("192.168.20.9", 80), None);
    assert_eq!(testbed.external.source_seen_by("192.168.20.7", 80).unwrap(), "198.51.100.1");
    testbed.external.serve_source_address(80);
    assert_eq!(web.netns.source_seen_by("198.51.100.1", 80).unwrap(), "192.168.20.7");

    let connection = testbed.external.connect("192.168.20.7", 7);
    assert!(is_alive(&connection));
    net.router.names = vec![("new".into(), web.address)];
    net.plan.generation += 1;
    net.ensure(&testbed, &[&web]);
    assert!(is_alive(&connection), "a change of something else ended a connection");
    net.router.egress.floating = vec![("192.168.20.8".parse().unwrap(), web.address)];
    net.plan.generation += 1;
    net.ensure(&testbed, &[&web]);
    assert!(!is_alive(&connection), "a connection outlived its address");
    assert_eq!(testbed.external.source_seen_by("192.168.20.8", 80).unwrap(), "198.51.100.1");
    assert_eq!(testbed.external.source_seen_by("192.168.20.7", 80), None);
}

#[test]
fn address_of_a_deleted_guest_serves_the_next_one() {
    if !run_isolated("address_of_a_deleted_guest_serves_the_next_one") {
        return;
    }
    let mut testbed = Testbed::new();
    testbed.external.serve_echo(7);
    let mut net = TestNetwork::new(0xa7, "10.0.0.0/24", "192.168.20.5");
    let within = format!("ip netns exec {}", net.plan.id);
    let neighbour = Guest::new(&testbed, 2, "neighbour", "10.0.0.3");
    // Every third time the plan without the previous guest is skipped, and every second time the daemon restarts.
    for number in 0..6 {
        let name = format!("guest{number}");
        let guest = Guest::new(&testbed, 1, &name, "10.0.0.77");
        let guests = [&neighbour, &guest];
        net = net.with(&guests);
        net.plan.generation += 1;
        net.ensure(&testbed, &guests);
        let router = &testbed.host(3).netns;
        if number > 0 {
            let arp = router.sh(&format!("{within} ip neigh show 10.0.0.77"));
            assert!(!arp.contains("lladdr"), "{arp}");
            let flows = router.sh(&format!("{within} cat /proc/net/nf_conntrack"));
            assert!(!flows.contains("10.0.0.77"), "{flows}");
            let previous = format!("guest{}", number - 1);
            let answer = neighbour.netns.try_sh(&format!("busybox nslookup -type=a {previous} 10.0.0.1"));
            assert!(!answer.status.success(), "{previous} still has an address");
        } else {
            neighbour.dhcp();
        }
        assert!(guest.dhcp().starts_with("10.0.0.77/24 "), "{name}");
        let connection = guest.netns.connect("198.51.100.1", 7);
        assert!(is_alive(&connection));
        assert!(router.sh(&format!("{within} ip neigh show 10.0.0.77")).contains(&guest.mac.to_string()));
        guest.netns.sh("ip link del eth0");
        if number % 3 != 2 {
            net = net.with(&[&neighbour]);
            net.plan.generation += 1;
            net.ensure(&testbed, &[&neighbour]);
        }
        if number % 2 == 1 {
            testbed.hosts[2].restart();
        }
    }
}

#[test]
fn host_reports_mesh_mtu_and_limits() {
    if !run_isolated("host_reports_mesh_mtu_and_limits") {
        return;
    }
    let testbed = Testbed::new();
    let report = testbed.host(1).call(async |node| node.report().await).unwrap();
    assert_eq!(report.mesh_mtu, Some(1600));
    assert!(!report.limits.contains_key(&HostFeature::Networks), "{:?}", report.limits);
    // Probing the kernel left nothing behind, and does not count as a program run.
    let mut testbed = testbed;
    let before = testbed.host(1).inventory();
    let begin = std::time::Instant::now();
    testbed.hosts[0].restart();
    println!("a start took {:?}", begin.elapsed());
    assert_eq!(testbed.host(1).inventory(), before);
    assert_eq!(testbed.host(1).commands_run(), 0);
}
