use muster_types::network::NetworkPlan;

use super::super::fixtures;
use super::super::names::NetworkNames;
use super::super::observed::Vxlan;
use super::*;

fn host() -> HostContext {
    HostContext { egress_bridge: "egr-br-eth0".into(), ipv6: true }
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

/// A host that has the plan's bridge and tunnel.
fn links(plan: &NetworkPlan) -> Vec<Link> {
    let names = NetworkNames::new(plan.vxid);
    let vxlan = Vxlan { id: plan.vxid, local: plan.mesh_address, port: VXLAN_PORT, learning: true };
    vec![
        link(3, &names.bridge, "bridge", plan),
        Link { master: 3, vxlan: Some(vxlan), ..link(4, &names.vxlan, "vxlan", plan) },
    ]
}

fn floods(plan: &NetworkPlan) -> Vec<FdbEntry> {
    plan.peers.iter().map(|node| FdbEntry { mac: FLOOD_MAC, node: *node }).collect()
}

fn compare(plan: &NetworkPlan, links: Vec<Link>, fdb_entries: Vec<FdbEntry>) -> Result<Changes> {
    let snapshot = HostSnapshot::new(links).with_fdb_entries(4, fdb_entries);
    host_changes(plan, &NetworkNames::new(plan.vxid), &host(), &snapshot, None)
}

#[test]
fn network_in_sync_needs_no_changes() {
    let plan = fixtures::plan();
    let changes = compare(&plan, links(&plan), floods(&plan)).unwrap();
    assert_eq!(changes, Changes::default());
}

#[test]
fn new_devices_are_marked_right_after_they_are_created() {
    let plan = fixtures::plan();
    let changes = compare(&plan, Vec::new(), Vec::new()).unwrap();
    let at = |start: &str| changes.ip.iter().position(|line| line.starts_with(start)).unwrap();
    assert_eq!(at("link set dev br-vxlan-00000a alias"), at("link add br-vxlan-00000a") + 1);
    assert_eq!(at("link set dev vxlan-00000a alias"), at("link add vxlan-00000a") + 1);
    assert_eq!(changes.bridge, ["fdb append 00:00:00:00:00:00 dev vxlan-00000a dst 10.99.0.2 self"]);
    assert!(changes.repaired.contains(&"bridge br-vxlan-00000a was missing".to_owned()));
}

#[test]
fn peers_that_left_are_removed_and_new_ones_are_added() {
    let mut plan = fixtures::plan();
    let stale = "10.99.0.7".parse().unwrap();
    let learned = FdbEntry { mac: [2, 0, 0, 0, 0, 9], node: stale };
    let found = vec![FdbEntry { mac: FLOOD_MAC, node: stale }, learned];
    plan.peers.push(plan.mesh_address);
    let changes = compare(&plan, links(&plan), found).unwrap();
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
fn attaches_devices_of_the_plan_and_detaches_others() {
    let plan = fixtures::plan();
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
fn refuses_devices_of_other_networks_and_programs() {
    let plan = fixtures::plan();
    for (alias, reason) in [("uplink", "is not Muster's"), (&marker(NetworkId::new()), "belongs to network")]
    {
        let mut found = links(&plan);
        found[0].alias = alias.into();
        let error = compare(&plan, found, floods(&plan)).unwrap_err();
        assert!(matches!(error, Error::Conflict(_)) && error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn adopts_an_unmarked_device_only_while_it_is_unused() {
    let plan = fixtures::plan();
    let names = NetworkNames::new(plan.vxid);
    let unmarked = |link: Link| Link { alias: String::new(), up: false, ..link };
    let (bridge, vxlan) = (unmarked(links(&plan)[0].clone()), unmarked(links(&plan)[1].clone()));
    let detached = Link { master: 0, ..vxlan.clone() };
    let compare = |links: Vec<Link>, addressed: bool| {
        let snapshot = HostSnapshot::new(links);
        let snapshot = if addressed { snapshot.with_addressed_device(3) } else { snapshot };
        host_changes(&plan, &names, &host(), &snapshot, None)
    };
    let changes = compare(vec![bridge.clone(), detached.clone()], false).unwrap();
    for name in [&names.bridge, &names.vxlan] {
        let line = format!("link set dev {name} alias {} addrgenmode none", marker(plan.id));
        assert!(changes.ip.contains(&line), "{changes:?}");
    }
    let other = Vxlan { id: 11, ..detached.vxlan.unwrap() };
    for (what, links, addressed) in [
        ("an address", vec![bridge.clone()], true),
        ("a port", vec![bridge.clone(), vxlan], false),
        ("another kind", vec![Link { kind: "dummy".into(), ..bridge }], false),
        ("another number", vec![links(&plan)[0].clone(), Link { vxlan: Some(other), ..detached }], false),
    ] {
        let error = compare(links, addressed).unwrap_err();
        assert!(error.to_string().contains("is not Muster's"), "{what}: {error}");
        assert!(matches!(error, Error::Conflict(_)), "{what}");
    }
}

#[test]
fn recreates_a_tunnel_with_another_local_address() {
    let mut plan = fixtures::plan();
    let found = links(&plan);
    plan.mesh_address = "10.99.0.9".parse().unwrap();
    let changes = compare(&plan, found, floods(&plan)).unwrap();
    assert_eq!(changes.ip[0], "link del dev vxlan-00000a");
    assert!(changes.ip[1].contains("local 10.99.0.9"), "{changes:?}");
    assert_eq!(changes.bridge.len(), 1);
}

#[test]
fn removes_router_devices_from_a_former_network_node() {
    let plan = fixtures::plan();
    let mut found = links(&plan);
    found.push(Link { master: 3, ..link(5, "veth-00000a-o", "veth", &plan) });
    let changes = compare(&plan, found, floods(&plan)).unwrap();
    assert_eq!(changes.ip, ["link del dev veth-00000a-o"]);
}

/// A router that matches the plan.
fn router_snapshot(plan: &NetworkPlan) -> RouterSnapshot {
    let veth = |index, name: &str, mac: [u8; 6], mtu| Link {
        index,
        mac: mac.to_vec(),
        forwarding: true,
        rp_filter: 1,
        mtu,
        ..link(index, name, "veth", plan)
    };
    let (default, outer) = (Ipv4Addr::UNSPECIFIED, 3);
    RouterSnapshot {
        links: vec![
            link(1, "lo", "", plan),
            veth(2, "veth-00000a-i", router_mac(plan.id), plan.mtu),
            veth(outer, "egr-00000a-i", egress_mac(plan.id), EGRESS_MTU),
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
    NetworkPlan { router: Some(fixtures::router()), ..fixtures::plan() }
}

fn changes_in_router(plan: &NetworkPlan, router_snapshot: &RouterSnapshot) -> Changes {
    router_changes(plan, plan.router.as_ref().unwrap(), &NetworkNames::new(plan.vxid), router_snapshot)
}

#[test]
fn router_in_sync_needs_no_changes() {
    let plan = routed_plan();
    assert_eq!(changes_in_router(&plan, &router_snapshot(&plan)), Changes::default());
}

#[test]
fn restores_missing_router_settings_and_removes_foreign_ones() {
    let plan = routed_plan();
    let mut found = router_snapshot(&plan);
    found.addresses.remove(&(3, "192.168.20.7".parse().unwrap(), 32));
    found.addresses.insert((3, "192.168.20.99".parse().unwrap(), 32));
    found.routes.clear();
    found.links[1].forwarding = false;
    let changes = changes_in_router(&plan, &found);
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
fn router_answers_arp_for_routed_addresses() {
    let mut plan = routed_plan();
    plan.routed = vec!["192.168.20.9".parse().unwrap()];
    let changes = changes_in_router(&plan, &router_snapshot(&plan));
    assert_eq!(
        changes.ip,
        [
            "route replace 192.168.20.9/32 dev veth-00000a-i scope link",
            "neigh add proxy 192.168.20.9 dev egr-00000a-i",
        ]
    );
}

#[test]
fn network_without_egress_has_no_egress_device() {
    let mut plan = routed_plan();
    let router = plan.router.as_mut().unwrap();
    router.nat = false;
    router.egress.floating.clear();
    assert!(!has_egress(&plan));
    let mut found = router_snapshot(&plan);
    found.links.pop();
    found.addresses.retain(|(index, _, _)| *index == 2);
    found.routes.clear();
    assert_eq!(changes_in_router(&plan, &found), Changes::default());
}
