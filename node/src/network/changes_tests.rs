use muster_types::network::NetworkPlan;

use super::super::example;
use super::super::names::Names;
use super::super::view::Vxlan;
use super::*;

fn around() -> Surroundings {
    Surroundings { egress_bridge: "egr-br-eth0".into(), ipv6: true }
}

fn link(index: u32, name: &str, kind: &str, plan: &NetworkPlan) -> Link {
    Link {
        index,
        name: name.into(),
        kind: kind.into(),
        alias: marker(plan.id),
        mtu: plan.mtu,
        up: true,
        ..Link::default()
    }
}

/// A node that has the plan's bridge and tunnel.
fn links(plan: &NetworkPlan) -> Vec<Link> {
    let names = Names::new(plan.vxid);
    let vxlan = Vxlan { id: plan.vxid, local: plan.mesh_address, port: VXLAN_PORT, learning: true };
    vec![
        link(3, &names.bridge, "bridge", plan),
        Link { master: 3, vxlan: Some(vxlan), ..link(4, &names.vxlan, "vxlan", plan) },
    ]
}

fn floods(plan: &NetworkPlan) -> Vec<Destination> {
    plan.peers.iter().map(|node| Destination { mac: FLOOD, node: *node }).collect()
}

fn compare(plan: &NetworkPlan, links: Vec<Link>, destinations: Vec<Destination>) -> Result<Changes> {
    let node = Snapshot::of(links).with_destinations(4, destinations);
    on_node(plan, &Names::new(plan.vxid), &around(), &node, None)
}

#[test]
fn what_is_as_it_should_be_is_left_alone() {
    let plan = example::plan();
    let changes = compare(&plan, links(&plan), floods(&plan)).unwrap();
    assert_eq!(changes, Changes::default());
}

#[test]
fn a_network_is_made_from_nothing_and_marked_at_once() {
    let plan = example::plan();
    let changes = compare(&plan, Vec::new(), Vec::new()).unwrap();
    let at = |start: &str| changes.ip.iter().position(|line| line.starts_with(start)).unwrap();
    assert_eq!(at("link set dev br-vxlan-00000a alias"), at("link add br-vxlan-00000a") + 1);
    assert_eq!(at("link set dev vxlan-00000a alias"), at("link add vxlan-00000a") + 1);
    assert_eq!(changes.bridge, ["fdb append 00:00:00:00:00:00 dev vxlan-00000a dst 10.99.0.2 self"]);
    assert!(changes.repaired.contains(&"bridge br-vxlan-00000a was missing".to_owned()));
}

#[test]
fn nodes_that_left_are_forgotten_and_new_ones_are_added() {
    let mut plan = example::plan();
    let stale = "10.99.0.7".parse().unwrap();
    let learned = Destination { mac: [2, 0, 0, 0, 0, 9], node: stale };
    let known = vec![Destination { mac: FLOOD, node: stale }, learned];
    plan.peers.push(plan.mesh_address);
    let changes = compare(&plan, links(&plan), known).unwrap();
    assert_eq!(
        changes.bridge,
        [
            "fdb append 00:00:00:00:00:00 dev vxlan-00000a dst 10.99.0.2 self",
            "fdb del 00:00:00:00:00:00 dev vxlan-00000a dst 10.99.0.7 self",
            "fdb del 02:00:00:00:00:09 dev vxlan-00000a dst 10.99.0.7 self",
        ]
    );
    assert!(changes.ip.is_empty());
}

#[test]
fn guests_are_connected_when_they_appear_and_others_are_not() {
    let plan = example::plan();
    let mut found = links(&plan);
    let device = plan.ports[0].interface.device();
    let tap = |index, name: &str, master| Link { index, name: name.into(), master, ..Link::default() };
    found.extend([tap(7, &device, 0), tap(8, "tapstranger", 3), tap(9, "eth7", 3), tap(10, "tapother", 99)]);
    let changes = compare(&plan, found, floods(&plan)).unwrap();
    assert_eq!(
        changes.ip,
        [
            format!("link set dev {device} addrgenmode none"),
            format!("link set dev {device} mtu 1450 master br-vxlan-00000a up")
        ]
    );
    assert_eq!(changes.detach, ["link set dev tapstranger nomaster"]);
}

#[test]
fn what_is_not_ours_is_refused() {
    let plan = example::plan();
    for (alias, why) in [("uplink", "is not Muster's"), (&marker(NetworkId::new()), "belongs to network")] {
        let mut found = links(&plan);
        found[0].alias = alias.into();
        let refusal = compare(&plan, found, floods(&plan)).unwrap_err();
        assert!(matches!(refusal, Error::Conflict(_)) && refusal.to_string().contains(why), "{refusal}");
    }
}

#[test]
fn a_device_without_marker_is_ours_only_while_nobody_uses_it() {
    let plan = example::plan();
    let names = Names::new(plan.vxid);
    let unmarked = |link: Link| Link { alias: String::new(), up: false, ..link };
    let (bridge, vxlan) = (unmarked(links(&plan)[0].clone()), unmarked(links(&plan)[1].clone()));
    let alone = Link { master: 0, ..vxlan.clone() };
    let compare = |links: Vec<Link>, addressed: bool| {
        let node = Snapshot::of(links);
        let node = if addressed { node.with_addressed(3) } else { node };
        on_node(&plan, &names, &around(), &node, None)
    };
    let changes = compare(vec![bridge.clone(), alone.clone()], false).unwrap();
    for name in [&names.bridge, &names.vxlan] {
        let line = format!("link set dev {name} alias {} addrgenmode none", marker(plan.id));
        assert!(changes.ip.contains(&line), "{changes:?}");
    }
    let other = Vxlan { id: 11, ..alone.vxlan.unwrap() };
    for (what, links, addressed) in [
        ("an address", vec![bridge.clone()], true),
        ("a port", vec![bridge.clone(), vxlan], false),
        ("another kind", vec![Link { kind: "dummy".into(), ..bridge }], false),
        ("another number", vec![links(&plan)[0].clone(), Link { vxlan: Some(other), ..alone }], false),
    ] {
        let refusal = compare(links, addressed).unwrap_err();
        assert!(refusal.to_string().contains("is not Muster's"), "{what}: {refusal}");
        assert!(matches!(refusal, Error::Conflict(_)), "{what}");
    }
}

#[test]
fn a_tunnel_from_another_address_is_made_again() {
    let mut plan = example::plan();
    let found = links(&plan);
    plan.mesh_address = "10.99.0.9".parse().unwrap();
    let changes = compare(&plan, found, floods(&plan)).unwrap();
    assert_eq!(changes.ip[0], "link del dev vxlan-00000a");
    assert!(changes.ip[1].contains("local 10.99.0.9"), "{changes:?}");
    assert_eq!(changes.bridge.len(), 1);
}

#[test]
fn a_node_that_is_no_longer_the_router_drops_its_devices() {
    let plan = example::plan();
    let mut found = links(&plan);
    found.push(Link { master: 3, ..link(5, "veth-00000a-o", "veth", &plan) });
    let changes = compare(&plan, found, floods(&plan)).unwrap();
    assert_eq!(changes.ip, ["link del dev veth-00000a-o"]);
}

/// A router that has everything that the plan wants.
fn inside(plan: &NetworkPlan) -> Inside {
    let side = |index, name: &str, mac: [u8; 6], mtu| Link {
        index,
        mac: mac.to_vec(),
        forwarding: true,
        reverse_path: 1,
        mtu,
        ..link(index, name, "veth", plan)
    };
    let (default, outer) = (Ipv4Addr::UNSPECIFIED, 3);
    Inside {
        links: vec![
            link(1, "lo", "", plan),
            side(2, "veth-00000a-i", router_mac(plan.id), plan.mtu),
            side(outer, "egr-00000a-i", egress_mac(plan.id), EGRESS_MTU),
        ],
        addresses: [
            (2, "10.0.0.1".parse().unwrap(), 24),
            (outer, "192.168.20.5".parse().unwrap(), 24),
            (outer, "192.168.20.7".parse().unwrap(), 32),
        ]
        .into(),
        routes: [Route { to: default, prefix: 0, via: "192.168.20.1".parse().ok(), device: outer }].into(),
        proxies: BTreeSet::new(),
    }
}

fn routed_plan() -> NetworkPlan {
    NetworkPlan { router: Some(example::router()), ..example::plan() }
}

fn router_changes(plan: &NetworkPlan, inside: &Inside) -> Changes {
    in_router(plan, plan.router.as_ref().unwrap(), &Names::new(plan.vxid), inside)
}

#[test]
fn a_router_as_it_should_be_is_left_alone() {
    let plan = routed_plan();
    assert_eq!(router_changes(&plan, &inside(&plan)), Changes::default());
}

#[test]
fn what_a_router_lost_comes_back_and_what_it_got_goes() {
    let plan = routed_plan();
    let mut found = inside(&plan);
    found.addresses.remove(&(3, "192.168.20.7".parse().unwrap(), 32));
    found.addresses.insert((3, "192.168.20.99".parse().unwrap(), 32));
    found.routes.clear();
    found.links[1].forwarding = false;
    let changes = router_changes(&plan, &found);
    assert_eq!(
        changes.ip,
        [
            "addr del 192.168.20.99/32 dev egr-00000a-i",
            "addr add 192.168.20.7/32 dev egr-00000a-i",
            "route replace default via 192.168.20.1 dev egr-00000a-i onlink",
        ]
    );
    assert_eq!(changes.settings[0], ("ipv4/conf/veth-00000a-i/forwarding".to_owned(), "1"));
}

#[test]
fn a_router_answers_for_the_addresses_that_are_routed_to_it() {
    let mut plan = routed_plan();
    plan.routed = vec!["192.168.20.9".parse().unwrap()];
    let changes = router_changes(&plan, &inside(&plan));
    assert_eq!(
        changes.ip,
        [
            "route replace 192.168.20.9/32 dev veth-00000a-i scope link",
            "neigh add proxy 192.168.20.9 dev egr-00000a-i",
        ]
    );
}

#[test]
fn a_network_without_a_way_out_has_none() {
    let mut plan = routed_plan();
    let router = plan.router.as_mut().unwrap();
    router.nat = false;
    router.egress.floating.clear();
    assert!(!has_egress(&plan));
    let mut found = inside(&plan);
    found.links.pop();
    found.addresses.retain(|(index, _, _)| *index == 2);
    found.routes.clear();
    assert_eq!(router_changes(&plan, &found), Changes::default());
}
