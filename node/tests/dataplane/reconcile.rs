//! Plan changes and repairs.

use muster_types::network::{NetworkPlan, NetworkReport};

use crate::fixture::{self, Guest, TestNetwork, Testbed, is_conflict, run_isolated};

#[test]
fn reconciles_many_networks_concurrently() {
    if !run_isolated("reconcile::reconciles_many_networks_concurrently") {
        return;
    }
    let mut testbed = Testbed::new();
    let nets: Vec<TestNetwork> = (0..12)
        .map(|number| TestNetwork::new(0x200 + number, "10.0.0.0/24", &format!("192.168.20.{}", 10 + number)))
        .collect();
    let plans: Vec<NetworkPlan> = nets.iter().map(|net| net.plan(&testbed, 3, &[])).collect();
    let ensure = |testbed: &Testbed| -> Vec<Result<NetworkReport, String>> {
        let results = testbed.host(3).try_ensure(plans.clone());
        results.into_iter().map(|result| result.map_err(|error| error.to_string())).collect()
    };
    let in_sync: Vec<Result<NetworkReport, String>> =
        plans.iter().map(|_| Ok(NetworkReport::default())).collect();

    // Two concurrent passes do not interfere.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| ensure(&testbed));
        assert!(ensure(&testbed).iter().all(Result::is_ok));
        assert!(other.join().unwrap().iter().all(Result::is_ok));
    });
    let whole = testbed.host(3).inventory();
    let before = testbed.host(3).commands_run();
    assert_eq!(ensure(&testbed), in_sync);
    assert_eq!(testbed.host(3).commands_run(), before);
    testbed.hosts[2].restart();
    assert_eq!(ensure(&testbed), in_sync);
    assert_eq!(testbed.host(3).commands_run(), 0, "a restart changed something");

    // All rule sets, a server, and a network that cannot be reconciled: the others are not affected.
    let victim = nets[5].plan.id;
    let netns = &testbed.host(3).netns;
    netns.sh(&format!("nft flush ruleset; kill -9 $(cat /run/muster/networks/{victim}/dnsmasq.pid)"));
    netns.sh("ip link set br-vxlan-000207 alias mine");
    let reports = ensure(&testbed);
    for (at, report) in reports.iter().enumerate() {
        match (at, report) {
            (7, report) => {
                assert!(report.as_ref().is_err_and(|why| why.contains("is not Muster's")), "{report:?}");
            }
            (_, Ok(report)) => {
                assert!(report.repaired.iter().any(|word| word.contains("had been changed")), "{report:?}");
                assert_eq!(report.server_died.is_some(), at == 5, "{report:?}");
            }
            (_, Err(error)) => panic!("{error}"),
        }
    }
    let (id, other) = (nets[7].plan.id, nets[8].plan.id);
    netns.sh(&format!("ip link set br-vxlan-000207 alias muster:{id}; ip netns del {other}"));
    assert!(ensure(&testbed).iter().all(Result::is_ok));
    assert_eq!(testbed.host(3).inventory(), whole);
    assert_eq!(ensure(&testbed), in_sync);
}

#[test]
fn repairs_damage_and_leaves_networks_in_sync_alone() {
    if !run_isolated("reconcile::repairs_damage_and_leaves_networks_in_sync_alone") {
        return;
    }
    let testbed = Testbed::new();
    let (web, db) = (Guest::new(&testbed, 3, "web", "10.0.0.2"), Guest::new(&testbed, 2, "db", "10.0.0.3"));
    let guests = [&web, &db];
    let mut net = TestNetwork::new(0xd1, "10.0.0.0/24", "192.168.20.5").with(&guests);
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.router.egress.masquerade = true;
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    net.ensure(&testbed, &guests);
    web.configure_address();
    db.configure_address();
    testbed.external.serve_source_address(80);

    let host = testbed.host(3);
    let plan = net.plan(&testbed, 3, &guests);
    let router = net.plan.id;
    let within = format!("ip netns exec {router}");
    let whole = host.inventory();
    let before = host.commands_run();
    assert_eq!(host.ensure(&plan), NetworkReport::default());
    assert_eq!(host.commands_run(), before, "a network in sync was changed");

    for (command, word) in [
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
        ("ip link del egr-br-uplink0".into(), "egr-br-uplink0"),
        ("ip addr flush dev egr-br-uplink0".into(), "192.168.20.1"),
        ("sysctl -qw net.ipv4.ip_forward=0".into(), "IPv4 forwarding"),
        ("nft delete table ip muster-egress".into(), "muster-egress"),
        ("nft flush table ip muster-egress".into(), "muster-egress"),
        (format!("{within} ip addr del 10.0.0.1/24 dev veth-0000d1-i"), "10.0.0.1"),
        (format!("{within} ip addr del 192.168.20.7/32 dev egr-0000d1-i"), "192.168.20.7"),
        (format!("{within} ip route del default"), "route to 0.0.0.0/0"),
        (format!("{within} ip route del 192.168.20.9"), "192.168.20.9"),
        (format!("{within} ip neigh del proxy 192.168.20.9 dev egr-0000d1-i"), "192.168.20.9"),
        (format!("{within} ip link set veth-0000d1-i down"), "veth-0000d1-i"),
        (format!("{within} ip link set lo alias x"), "marked"),
        (format!("{within} sysctl -qw net.ipv4.ip_forward=0"), "forwarding settings"),
        (format!("{within} nft flush ruleset"), "rule set of the router"),
        (format!("{within} nft flush chain inet muster forward"), "rule set of the router"),
        (format!("ip netns del {router}"), "was missing"),
        (format!("umount /run/netns/{router}"), "was missing"),
        (format!("rm -r /run/muster/networks/{router}"), ""),
        (format!("rm /run/muster/networks/{router}/hosts"), ""),
    ] {
        host.netns.sh(&command);
        let report = host.ensure(&plan);
        assert!(
            word.is_empty() || report.repaired.iter().any(|found| found.contains(word)),
            "{command}: {report:?}"
        );
        let before = host.commands_run();
        assert_eq!(host.ensure(&plan).repaired, Vec::<String>::new(), "{command}");
        assert_eq!(host.commands_run(), before, "{command}: not in sync after one call");
        assert_eq!(host.inventory(), whole, "{command}");
    }
    assert!(db.netns.can_ping("10.0.0.2") && db.netns.can_ping("10.0.0.1"));
    assert_eq!(db.netns.source_seen_by("198.51.100.1", 80).unwrap(), "198.51.100.2");

    // The DHCP and DNS server.
    let pid = format!("/run/muster/networks/{router}/dnsmasq.pid");
    let first = host.netns.sh(&format!("cat {pid}"));
    host.netns.sh(&format!("kill -9 {}", first.trim()));
    host.netns.until(&format!("! grep -q dnsmasq /proc/{}/cmdline", first.trim()));
    let report = host.ensure(&plan);
    assert!(report.server_died.as_ref().is_some_and(|why| why.contains(first.trim())), "{report:?}");
    assert_ne!(host.netns.sh(&format!("cat {pid}")), first);
    assert_eq!(host.ensure(&plan).server_died, None);
    let answer = db.netns.sh("busybox nslookup -type=a web 10.0.0.1");
    assert!(answer.contains("Address: 10.0.0.2"), "{answer}");
    // This test process is the subreaper, so the node has to reap its servers.
    assert!(!std::path::Path::new("/proc").join(first.trim()).exists(), "a dead server was not reaped");
}

#[test]
fn follows_plan_changes_and_leaves_no_orphans() {
    if !run_isolated("reconcile::follows_plan_changes_and_leaves_no_orphans") {
        return;
    }
    let mut testbed = Testbed::new();
    let empty: Vec<String> = testbed.hosts.iter().map(fixture::Host::inventory).collect();
    let (web, db) = (Guest::new(&testbed, 1, "web", "10.0.0.2"), Guest::new(&testbed, 2, "db", "10.0.0.3"));
    let guests = [&web, &db];
    let mut net = TestNetwork::new(0xe1, "10.0.0.0/24", "192.168.20.5").with(&guests);
    net.ensure(&testbed, &guests);
    web.dhcp();
    db.dhcp();
    assert!(web.netns.can_ping("10.0.0.1"));

    // An older generation is refused; a newer one with new names does not restart the server.
    let old = net.plan(&testbed, 3, &guests);
    let pid = format!("cat /run/muster/networks/{}/dnsmasq.pid", net.plan.id);
    let first = testbed.host(3).netns.sh(&pid);
    net.plan.generation = 2;
    net.router.names = vec![("mail".into(), "10.0.0.44".parse().unwrap())];
    net.ensure(&testbed, &guests);
    let refused = testbed.host(3).try_ensure(vec![old]).remove(0);
    assert!(is_conflict(&refused), "{refused:?}");
    web.netns.until("busybox nslookup -type=a mail.one.example 10.0.0.1 | grep -q 10.0.0.44");
    assert_eq!(testbed.host(3).netns.sh(&pid), first);

    // A restarted node finds the network in sync.
    testbed.hosts[2].restart();
    let plan = net.plan(&testbed, 3, &guests);
    assert_eq!(testbed.host(3).ensure(&plan), NetworkReport::default());
    assert_eq!(testbed.host(3).commands_run(), 0);
    assert_eq!(testbed.host(3).netns.sh(&pid), first);
    assert_eq!(testbed.host(3).find(), [net.found()]);

    // The router moves from the third host to the second.
    net.router_on = 2;
    net.router.nat = false;
    net.plan.generation = 3;
    for host in [3, 1, 2] {
        testbed.host(host).ensure(&net.plan(&testbed, host, &guests));
    }
    assert!(web.netns.can_ping("10.0.0.1"), "the router is not where it moved to");
    assert_eq!(testbed.host(3).netns.sh("ls /run/netns").trim(), "");
    assert!(!testbed.host(3).inventory().contains("egr-"), "{}", testbed.host(3).inventory());
    assert!(testbed.host(2).inventory().contains("veth-0000e1-o"));

    // A guest that left is disconnected, one that comes later is connected.
    net.plan.generation = 4;
    testbed.host(1).ensure(&net.plan(&testbed, 1, &[&db]));
    assert!(web.netns.cannot_ping("10.0.0.1"));
    net.plan.generation = 5;
    let device = web.interface.device();
    testbed.host(1).netns.sh(&format!("ip link set {device} name later"));
    testbed.host(1).ensure(&net.plan(&testbed, 1, &guests));
    testbed.host(1).netns.sh(&format!("ip link set later name {device}"));
    testbed.host(1).ensure(&net.plan(&testbed, 1, &guests));
    assert!(web.netns.can_ping("10.0.0.1"));

    for host in &testbed.hosts {
        host.remove(net.found());
        host.remove(net.found());
    }
    let left: Vec<String> = testbed.hosts.iter().map(fixture::Host::inventory).collect();
    assert_eq!(left, empty);
    assert!(testbed.hosts.iter().all(|host| host.find().is_empty()));
}
