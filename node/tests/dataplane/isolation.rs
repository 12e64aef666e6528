//! Isolation of guests from each other and from the host, and of the host from conflicting configuration.

use muster_types::Error;
use muster_types::network::NetworkReport;
use muster_types::node::NodeApi;

use crate::fixture::{self, API_PORT, Guest, Namespace, TestNetwork, Testbed, is_conflict, run_isolated};

/// Starts to capture frames that match a filter.
fn capture(netns: &Namespace, filter: &str) {
    let tcpdump = format!("tcpdump -Z root -lnnei eth0 '{filter}'");
    netns.sh(&format!("rm -f /run/seen; {tcpdump} > /run/seen 2> /run/log & echo $! > /run/pid"));
    netns.until("grep -q listening /run/log");
}

/// Returns the captured frames.
fn captured(netns: &Namespace) -> String {
    netns.sh("kill $(cat /run/pid); wait $(cat /run/pid) 2>/dev/null; cat /run/seen").trim().to_owned()
}

/// Sends a VXLAN packet with a broadcast frame to a node, as another node would.
fn inject(from: &Namespace, node: &str, vxid: u32, size: usize) {
    let frame = format!("ffffffffffff020000666666 88b5 {}", "6d".repeat(size)).replace(' ', "");
    from.sh(&format!(
        "python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); \
         s.sendto(bytes.fromhex(\"08000000{vxid:06x}00{frame}\"), (\"{node}\", 4789))'"
    ));
}

#[test]
fn frames_cannot_be_injected_into_other_networks_through_egress() {
    if !run_isolated("isolation::frames_cannot_be_injected_into_other_networks_through_egress") {
        return;
    }
    let testbed = Testbed::new();
    let bad = Guest::new(&testbed, 1, "bad", "10.0.0.2");
    let (near, far) =
        (Guest::new(&testbed, 3, "near", "10.1.0.2"), Guest::new(&testbed, 2, "far", "10.1.0.3"));
    let mut own = TestNetwork::new(0x71, "10.0.0.0/24", "192.168.20.5").with(&[&bad]);
    let mut other = TestNetwork::new(0x72, "10.1.0.0/24", "192.168.20.6").with(&[&near, &far]);
    let nn = &testbed.host(3).netns;
    let router = format!("ip netns exec {}", own.plan.id);
    let open_router = format!("{router} nft insert rule inet muster forward accept");
    let open_node = "nft 'delete table ip muster-egress; delete table ip muster-mesh'";
    for guest in [&bad, &near, &far] {
        guest.configure_address();
    }
    // All addresses of the network node, and one of another node.
    let nodes = ["192.168.20.1", "10.99.0.3", "198.51.100.2", "10.99.0.2"];
    let attack = || {
        for (node, size) in nodes.into_iter().flat_map(|node| [(node, 100), (node, 3000)]) {
            inject(&bad.netns, node, 0x72, size);
        }
    };
    for masquerade in [true, false] {
        for (guarded_by, commands) in
            [("both", &[][..]), ("the node", &[open_router.as_str()]), ("the router", &[open_node])]
        {
            for net in [&mut own, &mut other] {
                net.router.egress.masquerade = masquerade;
                net.plan.generation += 1;
            }
            own.ensure(&testbed, &[&bad]);
            other.ensure(&testbed, &[&near, &far]);
            commands.iter().for_each(|command| drop(nn.sh(command)));
            for victim in [&near, &far] {
                capture(&victim.netns, "ether proto 0x88b5");
            }
            attack();
            // Frames sent before these pings would have been captured before them.
            assert!(bad.netns.can_ping("198.51.100.1"), "guarded by {guarded_by}");
            assert!(near.netns.can_ping("10.1.0.3"));
            for victim in [&near, &far] {
                assert_eq!(captured(&victim.netns), "", "{}, guarded by {guarded_by}", victim.name);
            }
        }
    }
    // Without the rules the same packets arrive.
    own.router.egress.masquerade = true;
    own.plan.generation += 1;
    own.ensure(&testbed, &[&bad]);
    nn.sh(&open_router);
    nn.sh("nft 'flush chain ip muster-egress input; flush chain ip muster-egress forward; delete table ip muster-mesh'");
    for (victim, node) in
        [(&near, "192.168.20.1"), (&near, "10.99.0.3"), (&near, "198.51.100.2"), (&far, "10.99.0.2")]
    {
        capture(&victim.netns, "ether proto 0x88b5");
        inject(&bad.netns, node, 0x72, 100);
        victim.netns.until("test -s /run/seen");
        captured(&victim.netns);
    }
}

#[test]
fn guests_reach_only_the_api_of_the_network_node() {
    if !run_isolated("isolation::guests_reach_only_the_api_of_the_network_node") {
        return;
    }
    let testbed = Testbed::new();
    let (web, db) = (Guest::new(&testbed, 1, "web", "10.0.0.2"), Guest::new(&testbed, 2, "db", "10.0.0.3"));
    let mut net = TestNetwork::new(0x73, "10.0.0.0/24", "192.168.20.5").with(&[&web, &db]);
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    let nn = &testbed.host(3).netns;
    for port in [22, API_PORT] {
        nn.serve_source_address(port);
    }
    testbed.external.sh("ip addr add 169.254.169.254/32 dev lo");
    nn.sh("ip route add 169.254.169.254 via 198.51.100.1");
    for netns in [&web.netns, &db.netns, &testbed.external] {
        netns.serve_source_address(80);
    }
    web.configure_address();
    db.configure_address();
    db.netns.sh("ip addr add 192.168.20.9/32 dev eth0");
    for masquerade in [false, true] {
        net.router.egress.masquerade = masquerade;
        net.plan.generation += 1;
        net.ensure(&testbed, &[&web, &db]);
        for address in ["192.168.20.1", "10.99.0.3", "198.51.100.2"] {
            for guest in [&web, &db] {
                assert_eq!(guest.netns.source_seen_by(address, 22), None, "{} reached {address}", guest.name);
                assert!(
                    guest.netns.source_seen_by(address, API_PORT).is_some(),
                    "{} to {address}",
                    guest.name
                );
            }
            assert!(db.netns.can_ping(address));
        }
        let name = "busybox timeout 2 busybox nslookup -type=a x.example 192.168.20.1";
        assert!(!db.netns.try_sh(name).status.success());
        assert_eq!(db.netns.source_seen_by("169.254.169.254", 80), None);
        // Traffic of others, and of the host itself, is not filtered.
        assert_eq!(nn.source_seen_by("169.254.169.254", 80).unwrap(), "198.51.100.2");
        assert_eq!(testbed.external.source_seen_by("198.51.100.2", 22).unwrap(), "198.51.100.1");
        for address in ["192.168.20.7", "192.168.20.9"] {
            assert!(nn.can_ping(address) && testbed.external.can_ping(address), "{address}");
            assert_eq!(nn.source_seen_by(address, 80).unwrap(), "192.168.20.1");
            assert_eq!(testbed.external.source_seen_by(address, 80).unwrap(), "198.51.100.1");
        }
        let expected = if masquerade { "198.51.100.2" } else { "192.168.20.5" };
        assert_eq!(db.netns.source_seen_by("198.51.100.1", 80).unwrap(), expected);
        assert_eq!(db.netns.source_seen_by("192.168.20.7", 80).unwrap(), "10.0.0.1");
    }
}

#[test]
fn refuses_floating_network_that_overlaps_a_host_network() {
    if !run_isolated("isolation::refuses_floating_network_that_overlaps_a_host_network") {
        return;
    }
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let outward = TestNetwork::new(0x74, "10.0.0.0/24", "192.168.20.5").plan(&testbed, 3, &[]);
    let mut inward = TestNetwork::new(0x75, "10.0.0.0/24", "192.168.20.6");
    inward.router.nat = false;
    let inward = inward.plan(&testbed, 3, &[]);
    for (command, undo) in [
        ("ip addr add 192.168.20.77/32 dev uplink0", "ip addr del 192.168.20.77/32 dev uplink0"),
        ("ip addr add 192.168.21.77/22 dev mesh0", "ip addr del 192.168.21.77/22 dev mesh0"),
        ("ip route add 192.168.20.128/25 dev uplink0", "ip route del 192.168.20.128/25"),
    ] {
        host.netns.sh(command);
        let routes = host.netns.sh("ip route");
        let mut results = host.try_ensure(vec![outward.clone(), inward.clone()]);
        results.pop().unwrap().unwrap();
        let refused = results.remove(0);
        let device = if command.ends_with("mesh0") { "mesh0" } else { "uplink0" };
        let named =
            |why: &Error| why.to_string().contains("192.168.20.0/24") && why.to_string().contains(device);
        assert!(is_conflict(&refused) && refused.as_ref().is_err_and(named), "{command}: {refused:?}");
        assert_eq!(host.netns.sh("ip route"), routes);
        assert!(!host.inventory().contains("egr-br"), "{command}");
        host.netns.sh(undo);
    }
    // Default routes do not overlap the floating network.
    host.netns
        .sh("ip route add default via 198.51.100.1; ip route add 192.168.20.0/24 via 198.51.100.1 metric 50");
    host.netns.sh("ip route add 0.0.0.0/1 dev uplink0");
    host.ensure(&outward);
    // An existing bridge is protected even if the rest fails.
    host.netns.sh("ip addr flush dev egr-br-uplink0; nft delete table ip muster-egress");
    host.netns.sh("ip addr add 192.168.20.77/32 dev uplink0");
    assert!(is_conflict(&host.try_ensure(vec![outward]).remove(0)));
    host.netns.sh("nft list chain ip muster-egress input");
}

#[test]
fn operator_bridges_are_neither_used_nor_removed() {
    if !run_isolated("isolation::operator_bridges_are_neither_used_nor_removed") {
        return;
    }
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let empty = host.inventory();
    let net = TestNetwork::new(0x76, "10.0.0.0/24", "192.168.20.5");
    let plan = net.plan(&testbed, 3, &[]);
    for (name, command, undo) in [
        ("egr-br-uplink0", "ip addr add 10.50.0.1/24 dev egr-br-uplink0", "ip addr flush dev egr-br-uplink0"),
        ("egr-br-uplink0", "ip link set uplink0 master egr-br-uplink0", "ip link set uplink0 nomaster"),
        (
            "egr-br-uplink0",
            "ip -6 addr add fd00::1/64 dev egr-br-uplink0",
            "ip addr flush dev egr-br-uplink0",
        ),
        (
            "br-vxlan-000076",
            "ip addr add 10.50.0.1/24 dev br-vxlan-000076",
            "ip addr flush dev br-vxlan-000076",
        ),
        ("br-vxlan-000076", "ip link set uplink0 master br-vxlan-000076", "ip link set uplink0 nomaster"),
    ] {
        host.netns.sh(&format!("ip link add {name} type bridge"));
        // Not every kernel has IPv6.
        if host.netns.try_sh(command).status.success() {
            let state = format!("ip -o addr show dev {name}; ip -o link show master {name}");
            let before = host.netns.sh(&state);
            let refused = host.try_ensure(vec![plan.clone()]).remove(0);
            assert!(is_conflict(&refused) && format!("{refused:?}").contains(name), "{command}: {refused:?}");
            host.remove(net.found());
            host.try_ensure(Vec::new());
            assert_eq!(host.netns.sh(&state), before, "{command}");
        }
        // An unused one counts as left behind by a killed process.
        host.netns.sh(undo);
        host.ensure(&plan);
        host.remove(net.found());
        host.try_ensure(Vec::new());
        assert_eq!(host.inventory(), empty, "{command}");
    }
}

#[test]
fn network_with_crashing_dnsmasq_reports_an_error() {
    if !run_isolated("isolation::network_with_crashing_dnsmasq_reports_an_error") {
        return;
    }
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let web = Guest::new(&testbed, 3, "web", "10.0.0.2");
    let net = TestNetwork::new(0x77, "10.0.0.0/24", "192.168.20.5").with(&[&web]);
    net.ensure(&testbed, &[&web]);
    web.configure_address();
    web.netns.serve_source_address(80);
    let kill = || {
        let pid = host.netns.sh(&format!("cat /run/muster/networks/{}/dnsmasq.pid", net.plan.id));
        host.netns.sh(&format!("kill -9 {}", pid.trim()));
        host.netns.until(&format!("! grep -q dnsmasq /proc/{}/cmdline", pid.trim()));
    };
    kill();
    assert!(host.ensure(&net.plan(&testbed, 3, &[&web])).server_died.is_some());
    kill();
    let mut last = net.clone();
    last.plan.generation += 1;
    last.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    let plan = last.plan(&testbed, 3, &[&web]);
    let result = host.try_ensure(vec![plan.clone()]).remove(0);
    let why = "dnsmasq of this network keeps dying: process";
    assert!(matches!(&result, Err(Error::Unavailable(text)) if text.starts_with(why)), "{result:?}");
    // Everything else is applied.
    assert_eq!(testbed.external.source_seen_by("192.168.20.7", 80).unwrap(), "198.51.100.1");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while host.try_ensure(vec![plan.clone()]).remove(0).is_err() {
        assert!(std::time::Instant::now() < deadline, "the server was never started again");
    }
    assert_eq!(host.ensure(&plan), NetworkReport::default());
    web.netns.sh("ip addr flush dev eth0");
    web.dhcp();
}

#[test]
fn pings_are_limited_and_block_nothing_else() {
    if !run_isolated("isolation::pings_are_limited_and_block_nothing_else") {
        return;
    }
    const PINGS: usize = 20;
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let mut net = TestNetwork::new(0x78, "10.0.0.0/24", "192.168.20.5");
    net.router.nat = false;
    let (plan, network) = (net.plan(&testbed, 3, &[]), net.plan.id);
    host.ensure(&plan);
    let node = host.node.clone();
    let (done, over) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            host.netns.run(move || {
                // A single thread for blocking work.
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(1)
                    .max_blocking_threads(1)
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let ping = |at: usize| {
                        let node = node.clone();
                        let to = if at == 0 { "10.0.0.1" } else { "10.0.0.77" }.parse().unwrap();
                        tokio::spawn(async move { node.ping(network, to).await })
                    };
                    let pings: Vec<_> = (0..PINGS).map(ping).collect();
                    tokio::task::yield_now().await;
                    node.ensure_networks(&[plan]).await.unwrap().remove(0).unwrap();
                    assert!(!pings.iter().any(tokio::task::JoinHandle::is_finished), "it waited for pings");
                    for (at, ping) in pings.into_iter().enumerate() {
                        let result = ping.await.unwrap().unwrap();
                        let answered = result.stdout.iter().any(|line| line.contains(" 0% packet loss"));
                        assert_eq!(answered, at == 0, "{result:?}");
                        assert_eq!(result.stdout.last().unwrap(), "");
                        assert_eq!(result.stderr, [""]);
                    }
                });
            });
            done.send(()).unwrap();
        });
        let mut max_running = 0;
        while over.recv_timeout(std::time::Duration::from_millis(50)) != Ok(()) {
            let entries = std::fs::read_dir("/proc").unwrap().flatten();
            let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
            max_running = max_running
                .max(lines.filter(|line| line.windows(10).any(|word| word == b"ping\0-n\0-c")).count());
        }
        assert_eq!(max_running, 16);
    });
    let unavailable =
        testbed.host(1).call(async move |node| node.ping(network, "10.0.0.1".parse().unwrap()).await);
    assert!(matches!(unavailable, Err(Error::Unavailable(_))), "{unavailable:?}");
}

#[test]
fn failures_name_the_program_and_do_not_affect_other_networks() {
    if !run_isolated("isolation::failures_name_the_program_and_do_not_affect_other_networks") {
        return;
    }
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let mut net = TestNetwork::new(0x79, "10.0.0.0/24", "192.168.20.5");
    net.plan.mtu = 1_000_000;
    let refused = host.try_ensure(vec![net.plan(&testbed, 3, &[])]).remove(0);
    assert!(
        matches!(&refused, Err(Error::Unavailable(why)) if why.starts_with("ip: ") && why.contains("mtu")),
        "{refused:?}"
    );
    host.netns.sh("mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys");
    let mut plans: Vec<_> = (0..10)
        .map(|number| TestNetwork::new(0x80 + number, "10.0.0.0/24", "192.168.20.5").plan(&testbed, 3, &[]))
        .collect();
    plans[1..].iter_mut().for_each(|plan| plan.router = None);
    let results = host.try_ensure(plans);
    assert!(results[1..].iter().all(Result::is_ok), "{results:?}");
    let why = |result: &Result<NetworkReport, Error>| result.as_ref().err().map(ToString::to_string);
    assert!(why(&results[0]).is_none_or(|why| why.contains("failed to set net/")), "{results:?}");
}

/// Not a test by itself: a node without CAP_NET_ADMIN.
#[test]
#[ignore = "started by another test"]
fn unprivileged() {
    let Ok(id) = std::env::var("MUSTER_TEST_VICTIM") else { return };
    let net = fixture::kill_target_network(&id);
    let node = fixture::kill_target_node();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refused = runtime.block_on(node.remove_network(net.found()));
    assert!(matches!(&refused, Err(Error::Conflict(why)) if why.contains("CAP_NET_ADMIN")), "{refused:?}");
    let other = muster_types::node::FoundNetwork { id: muster_types::ids::NetworkId::new(), vxid: 5 };
    runtime.block_on(node.remove_network(other)).unwrap();
}

#[test]
fn unprivileged_host_does_not_report_a_network_as_removed() {
    if !run_isolated("isolation::unprivileged_host_does_not_report_a_network_as_removed") {
        return;
    }
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let id = muster_types::ids::NetworkId::new().to_string();
    let net = fixture::kill_target_network(&id);
    host.ensure(&fixture::kill_target_plan(&net));
    for command in ["true".to_owned(), format!("rm -r /run/muster/networks/{id}")] {
        host.netns.sh(&command);
        let output = host.netns.sh(&format!(
            "MUSTER_TEST_VICTIM={id} setpriv --bounding-set=-net_admin {} --exact isolation::unprivileged --ignored 2>&1",
            std::env::current_exe().unwrap().display()
        ));
        assert!(output.contains("1 passed"), "{output}");
    }
    host.ensure(&fixture::kill_target_plan(&net));
}

#[test]
fn vxlan_packets_are_accepted_only_from_nodes() {
    if !run_isolated("isolation::vxlan_packets_are_accepted_only_from_nodes") {
        return;
    }
    let testbed = Testbed::new();
    let guest = Guest::new(&testbed, 3, "guest", "10.0.0.2");
    let mut net = TestNetwork::new(0xe7, "10.0.0.0/24", "192.168.20.5").with(&[&guest]);
    net.ensure(&testbed, &[&guest]);
    let host = testbed.host(3);
    // The length identifies a frame.
    let saw = |size: usize| format!("grep -q 'length {}:' /run/seen", size + 14);
    capture(&guest.netns, "ether proto 0x88b5");
    inject(&testbed.external, "198.51.100.2", 0xe7, 101);
    // Frames arrive in order.
    inject(&testbed.host(1).netns, "10.99.0.3", 0xe7, 102);
    guest.netns.until(&saw(102));
    assert!(!guest.netns.try_sh(&saw(101)).status.success());

    // The rules follow the nodes of the cluster, and are repaired.
    let mut plan = net.plan(&testbed, 3, &[&guest]);
    plan.cluster_nodes.push("198.51.100.1".parse().unwrap());
    assert_eq!(host.ensure(&plan), NetworkReport::default());
    inject(&testbed.external, "198.51.100.2", 0xe7, 103);
    guest.netns.until(&saw(103));
    net.plan.generation += 1;
    let plan = net.plan(&testbed, 3, &[&guest]);
    host.ensure(&plan);
    host.netns.sh("nft delete table ip muster-mesh");
    assert_eq!(host.ensure(&plan).repaired, ["rule set muster-mesh was missing or had been changed"]);
    inject(&testbed.external, "198.51.100.2", 0xe7, 104);
    inject(&testbed.host(1).netns, "10.99.0.3", 0xe7, 105);
    guest.netns.until(&saw(105));
    assert!(!guest.netns.try_sh(&saw(104)).status.success());
    captured(&guest.netns);

    host.remove(net.found());
    assert!(!host.netns.sh("nft list tables").contains("muster"));
}

#[test]
fn files_of_networks_are_readable_by_root_and_dnsmasq_only() {
    if !run_isolated("isolation::files_of_networks_are_readable_by_root_and_dnsmasq_only") {
        return;
    }
    let testbed = Testbed::new();
    let guest = Guest::new(&testbed, 3, "guest", "10.0.0.2");
    let net = TestNetwork::new(0xe8, "10.0.0.0/24", "192.168.20.5").with(&[&guest]);
    net.ensure(&testbed, &[&guest]);
    let nn = &testbed.host(3).netns;
    let dir = format!("/run/muster/networks/{}", net.plan.id);
    for file in ["leases", "hosts"] {
        assert_eq!(nn.sh(&format!("stat -c %a {dir}/{file}")).trim(), "600", "{file}");
    }
    let readable = nn.sh(&format!("find {dir} -type f -perm /o=r ! -name dnsmasq.pid"));
    assert_eq!(readable, "");
}
