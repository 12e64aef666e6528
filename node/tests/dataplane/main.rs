//! The data plane on the real kernel: machines, guests and the outside, each in namespaces of their own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod world;

use muster_types::network::{NetworkCare, NetworkPlan};
use muster_types::node::{Limit, NodeApi};

use world::{Guest, Net, World, enter, is_alive, is_conflict};

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
    assert!(elsewhere.is_err());

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
    // Guests do not reach the machine that they are on, even by its hardware address.
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
    // 10.0.0.3 and 10.0.0.66 to 10.0.0.2, from port 4660 and 67.
    let packet = |from: &str, port: &str| {
        format!("0800 4500 0024 0001 0000 4011 0000 {from} 0a000002 {port} 0044 0010 0000 6d75737465720000")
    };
    let arp = |mac: &str, from: &str| format!("0806 0001 0800 06 04 0001 {mac} {from} 000000000000 0a000002");
    let forged = [
        (
            "hardware address",
            "ether src 02:00:00:66:66:66",
            format!("{to} {other} {}", packet("0a000003", "1234")),
        ),
        ("address", "src host 10.0.0.66", format!("{to} {own} {}", packet("0a000042", "1234"))),
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
        ("answer of a DHCP server", "udp src port 67", format!("{to} {own} {}", packet("0a000003", "0043"))),
        (
            "IPv6",
            "ip6",
            format!("33:33:00:00:00:01 {own} 86dd 6000000000003b40 {} {}", "fd".repeat(16), "ff".repeat(16)),
        ),
        ("VLAN", "vlan", format!("{to} {own} 8100 0005 {}", packet("0a000003", "1234"))),
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
fn many_networks_are_looked_after_at_once() {
    if !enter("many_networks_are_looked_after_at_once") {
        return;
    }
    let mut world = World::new();
    let nets: Vec<Net> = (0..12)
        .map(|number| Net::new(0x200 + number, "10.0.0.0/24", &format!("192.168.20.{}", 10 + number)))
        .collect();
    let plans: Vec<NetworkPlan> = nets.iter().map(|net| net.plan(&world, 3, &[])).collect();
    let ensure = |world: &World| -> Vec<Result<NetworkCare, String>> {
        let results = world.machine(3).try_ensure(plans.clone());
        results.into_iter().map(|result| result.map_err(|error| error.to_string())).collect()
    };
    let well: Vec<Result<NetworkCare, String>> = plans.iter().map(|_| Ok(NetworkCare::default())).collect();

    // Two passes at the same time do not trip over each other.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| ensure(&world));
        assert!(ensure(&world).iter().all(Result::is_ok));
        assert!(other.join().unwrap().iter().all(Result::is_ok));
    });
    let whole = world.machine(3).inventory();
    let before = world.machine(3).programs_run();
    assert_eq!(ensure(&world), well);
    assert_eq!(world.machine(3).programs_run(), before);
    world.machines[2].restart();
    assert_eq!(ensure(&world), well);
    assert_eq!(world.machine(3).programs_run(), 0, "a restart changed something");

    // All rule sets at once, a server, and a network that cannot be: the others do not suffer.
    let victim = nets[5].plan.id;
    let place = &world.machine(3).place;
    place.sh(&format!("nft flush ruleset; kill -9 $(cat /run/muster/networks/{victim}/dnsmasq.pid)"));
    place.sh("ip link set br-vxlan-000207 alias mine");
    let cares = ensure(&world);
    for (at, care) in cares.iter().enumerate() {
        match (at, care) {
            (7, care) => assert!(care.as_ref().is_err_and(|why| why.contains("is not Muster's")), "{care:?}"),
            (_, Ok(care)) => {
                assert!(care.repaired.iter().any(|word| word.contains("had been changed")), "{care:?}");
                assert_eq!(care.server_died.is_some(), at == 5, "{care:?}");
            }
            (_, Err(error)) => panic!("{error}"),
        }
    }
    let (id, other) = (nets[7].plan.id, nets[8].plan.id);
    place.sh(&format!("ip link set br-vxlan-000207 alias muster:{id}; ip netns del {other}"));
    assert!(ensure(&world).iter().all(Result::is_ok));
    assert_eq!(world.machine(3).inventory(), whole);
    assert_eq!(ensure(&world), well);
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
fn what_is_damaged_is_repaired_and_what_is_well_is_left_alone() {
    if !enter("what_is_damaged_is_repaired_and_what_is_well_is_left_alone") {
        return;
    }
    let world = World::new();
    let (web, db) = (Guest::new(&world, 3, "web", "10.0.0.2"), Guest::new(&world, 2, "db", "10.0.0.3"));
    let guests = [&web, &db];
    let mut net = Net::new(0xd1, "10.0.0.0/24", "192.168.20.5").with(&guests);
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.router.egress.masquerade = true;
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    net.ensure(&world, &guests);
    web.settle();
    db.settle();
    world.outside.answer(80);

    let machine = world.machine(3);
    let plan = net.plan(&world, 3, &guests);
    let router = net.plan.id;
    let within = format!("ip netns exec {router}");
    let whole = machine.inventory();
    let before = machine.programs_run();
    assert_eq!(machine.ensure(&plan), NetworkCare::default());
    assert_eq!(machine.programs_run(), before, "a network that is well was changed");

    for (deed, word) in [
        ("ip link del br-vxlan-0000d1".to_owned(), "bridge br-vxlan-0000d1 was missing"),
        ("ip link del vxlan-0000d1".into(), "tunnel vxlan-0000d1 was missing"),
        ("ip link set vxlan-0000d1 down".into(), "vxlan-0000d1"),
        ("ip link set vxlan-0000d1 nomaster".into(), "vxlan-0000d1"),
        ("ip link set br-vxlan-0000d1 mtu 1300".into(), "br-vxlan-0000d1"),
        ("ip link set br-vxlan-0000d1 type bridge stp_state 1".into(), "br-vxlan-0000d1"),
        ("bridge fdb del 00:00:00:00:00:00 dev vxlan-0000d1 dst 10.99.0.2".into(), "10.99.0.2"),
        ("bridge fdb append 00:00:00:00:00:00 dev vxlan-0000d1 dst 10.99.0.77".into(), "10.99.0.77"),
        (format!("ip link set {} nomaster", web.interface.device()), "tap"),
        ("nft delete table bridge muster-0000d1".into(), "rule set muster-0000d1"),
        ("nft flush chain bridge muster-0000d1 node".into(), "rule set muster-0000d1"),
        ("nft insert rule bridge muster-0000d1 senders accept".into(), "rule set muster-0000d1"),
        ("ip link del veth-0000d1-o".into(), "veth-0000d1-o"),
        ("ip link del egr-0000d1-o".into(), "egr-0000d1-o"),
        ("ip link del egr-br-world0".into(), "egr-br-world0"),
        ("ip addr flush dev egr-br-world0".into(), "192.168.20.1"),
        ("sysctl -qw net.ipv4.ip_forward=0".into(), "pass packets"),
        ("nft delete table ip muster-egress".into(), "muster-egress"),
        ("nft flush table ip muster-egress".into(), "muster-egress"),
        (format!("{within} ip addr del 10.0.0.1/24 dev veth-0000d1-i"), "10.0.0.1"),
        (format!("{within} ip addr del 192.168.20.7/32 dev egr-0000d1-i"), "192.168.20.7"),
        (format!("{within} ip route del default"), "route to 0.0.0.0/0"),
        (format!("{within} ip route del 192.168.20.9"), "192.168.20.9"),
        (format!("{within} ip neigh del proxy 192.168.20.9 dev egr-0000d1-i"), "192.168.20.9"),
        (format!("{within} ip link set veth-0000d1-i down"), "veth-0000d1-i"),
        (format!("{within} ip link set lo alias x"), "marked"),
        (format!("{within} sysctl -qw net.ipv4.ip_forward=0"), "pass packets on"),
        (format!("{within} nft flush ruleset"), "rule set of the router"),
        (format!("{within} nft flush chain inet muster forward"), "rule set of the router"),
        (format!("ip netns del {router}"), "was missing"),
        (format!("umount /run/netns/{router}"), "was missing"),
        (format!("rm -r /run/muster/networks/{router}"), ""),
        (format!("rm /run/muster/networks/{router}/hosts"), ""),
    ] {
        machine.place.sh(&deed);
        let care = machine.ensure(&plan);
        assert!(
            word.is_empty() || care.repaired.iter().any(|found| found.contains(word)),
            "{deed}: {care:?}"
        );
        let before = machine.programs_run();
        assert_eq!(machine.ensure(&plan).repaired, Vec::<String>::new(), "{deed}");
        assert_eq!(machine.programs_run(), before, "{deed}: not whole after one call");
        assert_eq!(machine.inventory(), whole, "{deed}");
    }
    assert!(db.place.pings("10.0.0.2") && db.place.pings("10.0.0.1"));
    assert_eq!(db.place.seen_by("198.51.100.1", 80).unwrap(), "198.51.100.2");

    // The server of addresses and names.
    let pid = format!("/run/muster/networks/{router}/dnsmasq.pid");
    let first = machine.place.sh(&format!("cat {pid}"));
    machine.place.sh(&format!("kill -9 {}", first.trim()));
    machine.place.until(&format!("! grep -q dnsmasq /proc/{}/cmdline", first.trim()));
    let care = machine.ensure(&plan);
    assert!(care.server_died.as_ref().is_some_and(|why| why.contains(first.trim())), "{care:?}");
    assert_ne!(machine.place.sh(&format!("cat {pid}")), first);
    assert_eq!(machine.ensure(&plan).server_died, None);
    let answer = db.place.sh("busybox nslookup -type=a web 10.0.0.1");
    assert!(answer.contains("Address: 10.0.0.2"), "{answer}");
    // Here the test is whom orphans fall to, so that nobody else buries them.
    assert!(!std::path::Path::new("/proc").join(first.trim()).exists(), "a dead server was not buried");
}

#[test]
fn plans_change_roles_move_and_nothing_is_left() {
    if !enter("plans_change_roles_move_and_nothing_is_left") {
        return;
    }
    let mut world = World::new();
    let empty: Vec<String> = world.machines.iter().map(world::Machine::inventory).collect();
    let (web, db) = (Guest::new(&world, 1, "web", "10.0.0.2"), Guest::new(&world, 2, "db", "10.0.0.3"));
    let guests = [&web, &db];
    let mut net = Net::new(0xe1, "10.0.0.0/24", "192.168.20.5").with(&guests);
    net.ensure(&world, &guests);
    web.dhcp();
    db.dhcp();
    assert!(web.place.pings("10.0.0.1"));

    // An older generation is refused; a newer one with new names does not restart the server.
    let old = net.plan(&world, 3, &guests);
    let pid = format!("cat /run/muster/networks/{}/dnsmasq.pid", net.plan.id);
    let first = world.machine(3).place.sh(&pid);
    net.plan.generation = 2;
    net.router.names = vec![("mail".into(), "10.0.0.44".parse().unwrap())];
    net.ensure(&world, &guests);
    let refused = world.machine(3).try_ensure(vec![old]).remove(0);
    assert!(is_conflict(&refused), "{refused:?}");
    web.place.until("busybox nslookup -type=a mail.one.example 10.0.0.1 | grep -q 10.0.0.44");
    assert_eq!(world.machine(3).place.sh(&pid), first);

    // Another run of the program finds everything as it should be.
    world.machines[2].restart();
    let plan = net.plan(&world, 3, &guests);
    assert_eq!(world.machine(3).ensure(&plan), NetworkCare::default());
    assert_eq!(world.machine(3).programs_run(), 0);
    assert_eq!(world.machine(3).place.sh(&pid), first);
    assert_eq!(world.machine(3).find(), [net.found()]);

    // The router moves from the third machine to the second.
    net.router_on = 2;
    net.router.nat = false;
    net.plan.generation = 3;
    for machine in [3, 1, 2] {
        world.machine(machine).ensure(&net.plan(&world, machine, &guests));
    }
    assert!(web.place.pings("10.0.0.1"), "the router is not where it moved to");
    assert_eq!(world.machine(3).place.sh("ls /run/netns").trim(), "");
    assert!(!world.machine(3).inventory().contains("egr-"), "{}", world.machine(3).inventory());
    assert!(world.machine(2).inventory().contains("veth-0000e1-o"));

    // A guest that left is disconnected, one that comes later is connected.
    net.plan.generation = 4;
    world.machine(1).ensure(&net.plan(&world, 1, &[&db]));
    assert!(web.place.pings_not("10.0.0.1"));
    net.plan.generation = 5;
    let device = web.interface.device();
    world.machine(1).place.sh(&format!("ip link set {device} name later"));
    world.machine(1).ensure(&net.plan(&world, 1, &guests));
    world.machine(1).place.sh(&format!("ip link set later name {device}"));
    world.machine(1).ensure(&net.plan(&world, 1, &guests));
    assert!(web.place.pings("10.0.0.1"));

    for machine in &world.machines {
        machine.remove(net.found());
        machine.remove(net.found());
    }
    let left: Vec<String> = world.machines.iter().map(world::Machine::inventory).collect();
    assert_eq!(left, empty);
    assert!(world.machines.iter().all(|machine| machine.find().is_empty()));
}

#[test]
fn what_a_kill_leaves_half_made_is_found_and_removed() {
    if !enter("what_a_kill_leaves_half_made_is_found_and_removed") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let empty = machine.inventory();
    let net = Net::new(0xf1, "10.0.0.0/24", "192.168.20.5");
    let plan = net.plan(&world, 3, &[]);
    let router = net.plan.id;
    for deed in [
        "true".to_owned(),
        format!("rm -r /run/muster/networks/{router}"),
        "ip link del br-vxlan-0000f1; ip link del vxlan-0000f1; ip link del veth-0000f1-o; ip link del egr-0000f1-o".into(),
        format!("ip netns del {router}; nft delete table bridge muster-0000f1; touch /run/netns/{router}"),
        format!("rm -r /run/muster/networks/{router}; ip link del br-vxlan-0000f1; ip link del vxlan-0000f1; ip link del veth-0000f1-o; ip link del egr-0000f1-o; nft delete table bridge muster-0000f1"),
        "ip link set br-vxlan-0000f1 alias ''; ip link set vxlan-0000f1 alias ''".into(),
    ] {
        machine.ensure(&plan);
        machine.place.sh(&deed);
        let found = machine.find();
        assert_eq!(found.iter().map(|found| found.id).collect::<Vec<_>>(), [router], "{deed}");
        machine.remove(found[0]);
        assert_eq!(machine.inventory(), empty, "{deed}");
        assert_eq!(machine.find(), [], "{deed}");
    }
    // Half of it, then the whole again.
    machine.ensure(&plan);
    let whole = machine.inventory();
    machine.place.sh("ip link set br-vxlan-0000f1 alias ''; ip link del veth-0000f1-o");
    machine.ensure(&plan);
    assert_eq!(machine.inventory(), whole);

    // What is not ours is neither used nor removed.
    machine.remove(net.found());
    machine.place.sh("ip link add br-vxlan-0000f1 type bridge; ip link set br-vxlan-0000f1 alias mine");
    let refused = machine.try_ensure(vec![plan]).remove(0);
    assert!(is_conflict(&refused), "{refused:?}");
    machine.remove(net.found());
    machine.place.sh("ip link show br-vxlan-0000f1");
}

/// Not a test: what `a_kill_at_any_moment_is_survived` kills.
#[test]
#[ignore = "only as a victim"]
fn victim() {
    let Ok(id) = std::env::var("MUSTER_TEST_VICTIM") else { return };
    let net = world::victim(&id);
    let node = world::victims_node();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    loop {
        runtime.block_on(async {
            node.ensure_networks(&[world::victims_plan(&net)]).await.unwrap().remove(0).unwrap();
            node.remove_network(net.found()).await.unwrap();
        });
    }
}

#[test]
fn a_kill_at_any_moment_is_survived() {
    if !enter("a_kill_at_any_moment_is_survived") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let empty = machine.inventory();
    let net = world::victim(&muster_types::ids::NetworkId::new().to_string());
    let plan = world::victims_plan(&net);
    machine.ensure(&plan);
    let whole = machine.inventory();
    machine.remove(net.found());
    let (never, clock) = std::sync::mpsc::channel::<()>();
    for attempt in 0..30 {
        let id = net.plan.id.to_string();
        let mut victim = machine.place.run(move || {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "victim", "--ignored"])
                .env("MUSTER_TEST_VICTIM", id)
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        });
        let _ = clock.recv_timeout(std::time::Duration::from_millis(10 + 11 * attempt));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let found = machine.find();
        assert!(found.iter().all(|found| found.id == net.plan.id), "{found:?}");
        if attempt % 2 == 0 {
            machine.ensure(&plan);
            assert_eq!(machine.inventory(), whole, "attempt {attempt}");
            let before = machine.programs_run();
            machine.ensure(&plan);
            assert_eq!(machine.programs_run(), before, "attempt {attempt}");
        } else {
            found.into_iter().for_each(|found| machine.remove(found));
            assert_eq!(machine.inventory(), empty, "attempt {attempt}");
        }
    }
    drop(never);
}

#[test]
fn a_machine_says_what_its_mesh_takes_and_what_it_cannot_do() {
    if !enter("a_machine_says_what_its_mesh_takes_and_what_it_cannot_do") {
        return;
    }
    let world = World::new();
    let report = world.machine(1).ask(async |node| node.report().await).unwrap();
    assert_eq!(report.mesh_mtu, Some(1600));
    assert!(!report.limits.contains_key(&Limit::Networks), "{:?}", report.limits);
}

/// Not a test but a measurement: `cargo test -p muster-node --release --test dataplane -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn many_networks() {
    if !enter("many_networks") {
        return;
    }
    let count: u32 =
        std::env::var("MUSTER_TEST_NETWORKS").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    let world = World::new();
    let machine = world.machine(3);
    let plans: Vec<NetworkPlan> = (1..=count)
        .map(|number| {
            let guests: Vec<Guest> = Vec::new();
            let mut net = Net::new(0x1000 + number, "10.0.0.0/24", "192.168.20.5");
            let octets = [192, 168, 20, 5].map(|byte: u8| byte);
            net.router.egress.gateway = Some((u32::from_be_bytes(octets) + number).into());
            net.router.egress.netblock = "192.168.0.0/16".parse().unwrap();
            net.plan(&world, 3, &guests.iter().collect::<Vec<_>>())
        })
        .collect();
    let pass = |plans: Vec<NetworkPlan>| {
        let begin = (std::time::Instant::now(), cpu(), machine.programs_run());
        let results = machine.try_ensure(plans);
        for result in results {
            result.unwrap();
        }
        let (wall, used) = (begin.0.elapsed(), cpu() - begin.1);
        (wall, used, machine.programs_run() - begin.2)
    };
    println!("first network: {:?}", pass(plans[..1].to_vec()));
    println!("second network: {:?}", pass(plans[1..2].to_vec()));
    println!("{count} networks made: {:?}", pass(plans.clone()));
    for _ in 0..5 {
        println!("{count} networks, nothing to do: {:?}", pass(plans.clone()));
    }
    println!("one of them alone, nothing to do: {:?}", pass(plans[5..6].to_vec()));
    machine.place.sh("nft add table ip other");
    println!("{count} networks, after a change of other rules: {:?}", pass(plans.clone()));
    let begin = std::time::Instant::now();
    for plan in &plans {
        machine.remove(muster_types::node::FoundNetwork { id: plan.id, vxid: plan.vxid });
    }
    println!("{count} networks removed: {:?}", begin.elapsed());
    println!("{}", machine.inventory());
}

/// Processor seconds of this process, without its children.
fn cpu() -> f64 {
    let usage = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = usage.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
