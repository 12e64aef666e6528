//! What guests must not reach, and what must not be taken from the machine.

use muster_types::Error;
use muster_types::network::NetworkReport;
use muster_types::node::NodeApi;

use crate::world::{self, API_PORT, Guest, Net, Place, World, enter, is_conflict};

/// Starts to note frames of a kind.
fn listen(place: &Place, filter: &str) {
    let tcpdump = format!("tcpdump -Z root -lnnei eth0 '{filter}'");
    place.sh(&format!("rm -f /run/seen; {tcpdump} > /run/seen 2> /run/log & echo $! > /run/pid"));
    place.until("grep -q listening /run/log");
}

/// What was noted.
fn heard(place: &Place) -> String {
    place.sh("kill $(cat /run/pid); wait $(cat /run/pid) 2>/dev/null; cat /run/seen").trim().to_owned()
}

/// Sends a frame to everybody in a network to a node, as another node would.
fn smuggle(from: &Place, node: &str, vxid: u32, size: usize) {
    let frame = format!("ffffffffffff020000666666 88b5 {}", "6d".repeat(size)).replace(' ', "");
    from.sh(&format!(
        "python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); \
         s.sendto(bytes.fromhex(\"08000000{vxid:06x}00{frame}\"), (\"{node}\", 4789))'"
    ));
}

#[test]
fn frames_are_not_smuggled_into_other_networks_by_the_way_out() {
    if !enter("guard::frames_are_not_smuggled_into_other_networks_by_the_way_out") {
        return;
    }
    let world = World::new();
    let bad = Guest::new(&world, 1, "bad", "10.0.0.2");
    let (near, far) = (Guest::new(&world, 3, "near", "10.1.0.2"), Guest::new(&world, 2, "far", "10.1.0.3"));
    let mut own = Net::new(0x71, "10.0.0.0/24", "192.168.20.5").with(&[&bad]);
    let mut other = Net::new(0x72, "10.1.0.0/24", "192.168.20.6").with(&[&near, &far]);
    let nn = &world.machine(3).place;
    let router = format!("ip netns exec {}", own.plan.id);
    let open_router = format!("{router} nft insert rule inet muster forward accept");
    let open_node = "nft delete table ip muster-egress";
    for guest in [&bad, &near, &far] {
        guest.settle();
    }
    // All addresses of the network node, and another node.
    let nodes = ["192.168.20.1", "10.99.0.3", "198.51.100.2", "10.99.0.2"];
    let attack = || {
        for (node, size) in nodes.into_iter().flat_map(|node| [(node, 100), (node, 3000)]) {
            smuggle(&bad.place, node, 0x72, size);
        }
    };
    for masquerade in [true, false] {
        for (guarded_by, deeds) in
            [("both", &[][..]), ("the node", &[open_router.as_str()]), ("the router", &[open_node])]
        {
            for net in [&mut own, &mut other] {
                net.router.egress.masquerade = masquerade;
                net.plan.generation += 1;
            }
            own.ensure(&world, &[&bad]);
            other.ensure(&world, &[&near, &far]);
            deeds.iter().for_each(|deed| drop(nn.sh(deed)));
            for victim in [&near, &far] {
                listen(&victim.place, "ether proto 0x88b5");
            }
            attack();
            // What was sent before these is seen before these.
            assert!(bad.place.pings("198.51.100.1"), "guarded by {guarded_by}");
            assert!(near.place.pings("10.1.0.3"));
            for victim in [&near, &far] {
                assert_eq!(heard(&victim.place), "", "{}, guarded by {guarded_by}", victim.name);
            }
        }
    }
    // It was this that held them up.
    own.router.egress.masquerade = true;
    own.plan.generation += 1;
    own.ensure(&world, &[&bad]);
    nn.sh(&open_router);
    nn.sh("nft 'flush chain ip muster-egress input; flush chain ip muster-egress forward'");
    for (victim, node) in
        [(&near, "192.168.20.1"), (&near, "10.99.0.3"), (&near, "198.51.100.2"), (&far, "10.99.0.2")]
    {
        listen(&victim.place, "ether proto 0x88b5");
        smuggle(&bad.place, node, 0x72, 100);
        victim.place.until("test -s /run/seen");
        heard(&victim.place);
    }
}

#[test]
fn guests_reach_nothing_of_the_network_node_but_its_api() {
    if !enter("guard::guests_reach_nothing_of_the_network_node_but_its_api") {
        return;
    }
    let world = World::new();
    let (web, db) = (Guest::new(&world, 1, "web", "10.0.0.2"), Guest::new(&world, 2, "db", "10.0.0.3"));
    let mut net = Net::new(0x73, "10.0.0.0/24", "192.168.20.5").with(&[&web, &db]);
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    net.plan.routed = vec!["192.168.20.9".parse().unwrap()];
    let nn = &world.machine(3).place;
    for port in [22, API_PORT] {
        nn.answer(port);
    }
    world.outside.sh("ip addr add 169.254.169.254/32 dev lo");
    nn.sh("ip route add 169.254.169.254 via 198.51.100.1");
    for place in [&web.place, &db.place, &world.outside] {
        place.answer(80);
    }
    web.settle();
    db.settle();
    db.place.sh("ip addr add 192.168.20.9/32 dev eth0");
    for masquerade in [false, true] {
        net.router.egress.masquerade = masquerade;
        net.plan.generation += 1;
        net.ensure(&world, &[&web, &db]);
        for address in ["192.168.20.1", "10.99.0.3", "198.51.100.2"] {
            for guest in [&web, &db] {
                assert_eq!(guest.place.seen_by(address, 22), None, "{} reached {address}", guest.name);
                assert!(guest.place.seen_by(address, API_PORT).is_some(), "{} to {address}", guest.name);
            }
            assert!(db.place.pings(address));
        }
        let name = "busybox timeout 2 busybox nslookup -type=a x.example 192.168.20.1";
        assert!(!db.place.try_sh(name).status.success());
        assert_eq!(db.place.seen_by("169.254.169.254", 80), None);
        // What others do is not judged, nor what the node does itself.
        assert_eq!(nn.seen_by("169.254.169.254", 80).unwrap(), "198.51.100.2");
        assert_eq!(world.outside.seen_by("198.51.100.2", 22).unwrap(), "198.51.100.1");
        for address in ["192.168.20.7", "192.168.20.9"] {
            assert!(nn.pings(address) && world.outside.pings(address), "{address}");
            assert_eq!(nn.seen_by(address, 80).unwrap(), "192.168.20.1");
            assert_eq!(world.outside.seen_by(address, 80).unwrap(), "198.51.100.1");
        }
        let expected = if masquerade { "198.51.100.2" } else { "192.168.20.5" };
        assert_eq!(db.place.seen_by("198.51.100.1", 80).unwrap(), expected);
        assert_eq!(db.place.seen_by("192.168.20.7", 80).unwrap(), "10.0.0.1");
    }
}

#[test]
fn a_floating_network_that_the_machine_has_elsewhere_is_refused() {
    if !enter("guard::a_floating_network_that_the_machine_has_elsewhere_is_refused") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let outward = Net::new(0x74, "10.0.0.0/24", "192.168.20.5").plan(&world, 3, &[]);
    let mut inward = Net::new(0x75, "10.0.0.0/24", "192.168.20.6");
    inward.router.nat = false;
    let inward = inward.plan(&world, 3, &[]);
    for (deed, undo) in [
        ("ip addr add 192.168.20.77/32 dev world0", "ip addr del 192.168.20.77/32 dev world0"),
        ("ip addr add 192.168.21.77/22 dev mesh0", "ip addr del 192.168.21.77/22 dev mesh0"),
        ("ip route add 192.168.20.128/25 dev world0", "ip route del 192.168.20.128/25"),
    ] {
        machine.place.sh(deed);
        let routes = machine.place.sh("ip route");
        let mut results = machine.try_ensure(vec![outward.clone(), inward.clone()]);
        results.pop().unwrap().unwrap();
        let refused = results.remove(0);
        let device = if deed.ends_with("mesh0") { "mesh0" } else { "world0" };
        let named =
            |why: &Error| why.to_string().contains("192.168.20.0/24") && why.to_string().contains(device);
        assert!(is_conflict(&refused) && refused.as_ref().is_err_and(named), "{deed}: {refused:?}");
        assert_eq!(machine.place.sh("ip route"), routes);
        assert!(!machine.inventory().contains("egr-br"), "{deed}");
        machine.place.sh(undo);
    }
    // The way to the world is nobody's block.
    machine
        .place
        .sh("ip route add default via 198.51.100.1; ip route add 192.168.20.0/24 via 198.51.100.1 metric 50");
    machine.place.sh("ip route add 0.0.0.0/1 dev world0");
    machine.ensure(&outward);
    // A bridge that is there is guarded, whatever else is wrong.
    machine.place.sh("ip addr flush dev egr-br-world0; nft delete table ip muster-egress");
    machine.place.sh("ip addr add 192.168.20.77/32 dev world0");
    assert!(is_conflict(&machine.try_ensure(vec![outward]).remove(0)));
    machine.place.sh("nft list chain ip muster-egress input");
}

#[test]
fn a_bridge_of_the_operator_is_neither_used_nor_removed() {
    if !enter("guard::a_bridge_of_the_operator_is_neither_used_nor_removed") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let empty = machine.inventory();
    let net = Net::new(0x76, "10.0.0.0/24", "192.168.20.5");
    let plan = net.plan(&world, 3, &[]);
    for (name, deed, undo) in [
        ("egr-br-world0", "ip addr add 10.50.0.1/24 dev egr-br-world0", "ip addr flush dev egr-br-world0"),
        ("egr-br-world0", "ip link set world0 master egr-br-world0", "ip link set world0 nomaster"),
        ("egr-br-world0", "ip -6 addr add fd00::1/64 dev egr-br-world0", "ip addr flush dev egr-br-world0"),
        (
            "br-vxlan-000076",
            "ip addr add 10.50.0.1/24 dev br-vxlan-000076",
            "ip addr flush dev br-vxlan-000076",
        ),
        ("br-vxlan-000076", "ip link set world0 master br-vxlan-000076", "ip link set world0 nomaster"),
    ] {
        machine.place.sh(&format!("ip link add {name} type bridge"));
        // Not every kernel has IPv6.
        if machine.place.try_sh(deed).status.success() {
            let state = format!("ip -o addr show dev {name}; ip -o link show master {name}");
            let before = machine.place.sh(&state);
            let refused = machine.try_ensure(vec![plan.clone()]).remove(0);
            assert!(is_conflict(&refused) && format!("{refused:?}").contains(name), "{deed}: {refused:?}");
            machine.remove(net.found());
            machine.try_ensure(Vec::new());
            assert_eq!(machine.place.sh(&state), before, "{deed}");
        }
        // What nobody uses is what we left when we were killed.
        machine.place.sh(undo);
        machine.ensure(&plan);
        machine.remove(net.found());
        machine.try_ensure(Vec::new());
        assert_eq!(machine.inventory(), empty, "{deed}");
    }
}

#[test]
fn a_network_whose_server_keeps_dying_is_not_well() {
    if !enter("guard::a_network_whose_server_keeps_dying_is_not_well") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let web = Guest::new(&world, 3, "web", "10.0.0.2");
    let net = Net::new(0x77, "10.0.0.0/24", "192.168.20.5").with(&[&web]);
    net.ensure(&world, &[&web]);
    web.settle();
    web.place.answer(80);
    let kill = || {
        let pid = machine.place.sh(&format!("cat /run/muster/networks/{}/dnsmasq.pid", net.plan.id));
        machine.place.sh(&format!("kill -9 {}", pid.trim()));
        machine.place.until(&format!("! grep -q dnsmasq /proc/{}/cmdline", pid.trim()));
    };
    kill();
    assert!(machine.ensure(&net.plan(&world, 3, &[&web])).server_died.is_some());
    kill();
    let mut last = net.clone();
    last.plan.generation += 1;
    last.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), web.address)];
    let plan = last.plan(&world, 3, &[&web]);
    let result = machine.try_ensure(vec![plan.clone()]).remove(0);
    let why = "dnsmasq of this network keeps dying: process";
    assert!(matches!(&result, Err(Error::Unavailable(text)) if text.starts_with(why)), "{result:?}");
    // Everything else is in force.
    assert_eq!(world.outside.seen_by("192.168.20.7", 80).unwrap(), "198.51.100.1");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while machine.try_ensure(vec![plan.clone()]).remove(0).is_err() {
        assert!(std::time::Instant::now() < deadline, "the server was never started again");
    }
    assert_eq!(machine.ensure(&plan), NetworkReport::default());
    web.place.sh("ip addr flush dev eth0");
    web.dhcp();
}

#[test]
fn pings_wait_for_each_other_and_nothing_waits_for_them() {
    if !enter("guard::pings_wait_for_each_other_and_nothing_waits_for_them") {
        return;
    }
    const PINGS: usize = 20;
    let world = World::new();
    let machine = world.machine(3);
    let mut net = Net::new(0x78, "10.0.0.0/24", "192.168.20.5");
    net.router.nat = false;
    let (plan, network) = (net.plan(&world, 3, &[]), net.plan.id);
    machine.ensure(&plan);
    let node = machine.node.clone();
    let (done, over) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            machine.place.run(move || {
                // As few threads for blocking work as can be.
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
        let mut most = 0;
        while over.recv_timeout(std::time::Duration::from_millis(50)) != Ok(()) {
            let entries = std::fs::read_dir("/proc").unwrap().flatten();
            let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
            most =
                most.max(lines.filter(|line| line.windows(10).any(|word| word == b"ping\0-n\0-c")).count());
        }
        assert_eq!(most, 16);
    });
    let gone = world.machine(1).ask(async move |node| node.ping(network, "10.0.0.1".parse().unwrap()).await);
    assert!(matches!(gone, Err(Error::Unavailable(_))), "{gone:?}");
}

#[test]
fn what_a_program_refuses_is_said_and_what_the_kernel_keeps_fails_no_other_network() {
    if !enter("guard::what_a_program_refuses_is_said_and_what_the_kernel_keeps_fails_no_other_network") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let mut net = Net::new(0x79, "10.0.0.0/24", "192.168.20.5");
    net.plan.mtu = 1_000_000;
    let refused = machine.try_ensure(vec![net.plan(&world, 3, &[])]).remove(0);
    assert!(
        matches!(&refused, Err(Error::Unavailable(why)) if why.starts_with("ip: ") && why.contains("mtu")),
        "{refused:?}"
    );
    machine.place.sh("mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys");
    let mut plans: Vec<_> = (0..10)
        .map(|number| Net::new(0x80 + number, "10.0.0.0/24", "192.168.20.5").plan(&world, 3, &[]))
        .collect();
    plans[1..].iter_mut().for_each(|plan| plan.router = None);
    let results = machine.try_ensure(plans);
    assert!(results[1..].iter().all(Result::is_ok), "{results:?}");
    let why = |result: &Result<NetworkReport, Error>| result.as_ref().err().map(ToString::to_string);
    assert!(why(&results[0]).is_none_or(|why| why.contains("cannot set net/")), "{results:?}");
}

/// Not a test: a node that lost its rights.
#[test]
#[ignore = "only without rights"]
fn powerless() {
    let Ok(id) = std::env::var("MUSTER_TEST_VICTIM") else { return };
    let net = world::victim(&id);
    let node = world::victims_node();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refused = runtime.block_on(node.remove_network(net.found()));
    assert!(matches!(&refused, Err(Error::Conflict(why)) if why.contains("CAP_NET_ADMIN")), "{refused:?}");
    let other = muster_types::node::FoundNetwork { id: muster_types::ids::NetworkId::new(), vxid: 5 };
    runtime.block_on(node.remove_network(other)).unwrap();
}

#[test]
fn a_machine_that_lost_its_rights_does_not_say_that_a_network_is_gone() {
    if !enter("guard::a_machine_that_lost_its_rights_does_not_say_that_a_network_is_gone") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let id = muster_types::ids::NetworkId::new().to_string();
    let net = world::victim(&id);
    machine.ensure(&world::victims_plan(&net));
    for deed in ["true".to_owned(), format!("rm -r /run/muster/networks/{id}")] {
        machine.place.sh(&deed);
        let output = machine.place.sh(&format!(
            "MUSTER_TEST_VICTIM={id} setpriv --bounding-set=-net_admin {} --exact guard::powerless --ignored 2>&1",
            std::env::current_exe().unwrap().display()
        ));
        assert!(output.contains("1 passed"), "{output}");
    }
    machine.ensure(&world::victims_plan(&net));
}
