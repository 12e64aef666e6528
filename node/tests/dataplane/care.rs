//! Plans that change, things that break.

use muster_types::network::{NetworkPlan, NetworkReport};

use crate::world::{self, Guest, Net, World, enter, is_conflict};

#[test]
fn many_networks_are_looked_after_at_once() {
    if !enter("care::many_networks_are_looked_after_at_once") {
        return;
    }
    let mut world = World::new();
    let nets: Vec<Net> = (0..12)
        .map(|number| Net::new(0x200 + number, "10.0.0.0/24", &format!("192.168.20.{}", 10 + number)))
        .collect();
    let plans: Vec<NetworkPlan> = nets.iter().map(|net| net.plan(&world, 3, &[])).collect();
    let ensure = |world: &World| -> Vec<Result<NetworkReport, String>> {
        let results = world.machine(3).try_ensure(plans.clone());
        results.into_iter().map(|result| result.map_err(|error| error.to_string())).collect()
    };
    let well: Vec<Result<NetworkReport, String>> =
        plans.iter().map(|_| Ok(NetworkReport::default())).collect();

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
fn what_is_damaged_is_repaired_and_what_is_well_is_left_alone() {
    if !enter("care::what_is_damaged_is_repaired_and_what_is_well_is_left_alone") {
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
    assert_eq!(machine.ensure(&plan), NetworkReport::default());
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
    if !enter("care::plans_change_roles_move_and_nothing_is_left") {
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
    assert_eq!(world.machine(3).ensure(&plan), NetworkReport::default());
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
