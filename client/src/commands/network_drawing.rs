//! The drawing of `muster network show`: the way from the world to whoever is on a network. Text only; what
//! it shows is fetched elsewhere.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use muster_types::address::{AddressRecord, AddressType};
use muster_types::interface::{InterfaceRecord, InterfaceState};
use muster_types::network::{FLOATING, NetworkRecord, NetworkState};
use muster_types::operation::OperationRecord;

use crate::output::visible;

/// More reserved or resting addresses than this are only counted.
const MOST_ADDRESSES: usize = 20;
/// Longest part of a comment that is drawn, in characters.
const LONGEST_COMMENT: usize = 48;
/// Characters of an id that tell it apart at a glance.
const SHORT_ID: usize = 8;

/// What is drawn.
#[derive(Debug)]
pub(super) struct Scene<'a> {
    pub(super) network: &'a NetworkRecord,
    pub(super) interfaces: Vec<InterfaceRecord>,
    /// The addresses of the network that are not free.
    pub(super) addresses: Vec<AddressRecord>,
    /// The addresses of the floating network that are routed here.
    pub(super) routed: Vec<String>,
    /// Those that have not ended.
    pub(super) operations: Vec<OperationRecord>,
}

/// Somebody on the network: an address, maybe none, and who it is.
struct Branch {
    address: String,
    who: String,
}

/// The drawing, in whole lines.
pub(super) fn draw(scene: &Scene<'_>) -> String {
    let mut text = way_in(scene.network);
    let branches = branches(scene);
    let width = branches.iter().map(|branch| branch.address.len()).max().unwrap_or_default();
    let mut lines: Vec<String> =
        branches.into_iter().map(|branch| format!("{:width$}  {}", branch.address, branch.who)).collect();
    lines.extend(counted(scene));
    lines.extend(scene.routed.iter().map(|routed| format!("routed here: {}", visible(routed))));
    if lines.is_empty() {
        lines.push(nobody(scene.network.state).to_owned());
    }
    let last = lines.len() - 1;
    for (at, line) in lines.iter().enumerate() {
        let sign = if at == last { '└' } else { '├' };
        text.push_str(&format!(" {sign}─ {line}\n"));
    }
    text.push_str(&format!("\n{}\n", use_of(scene)));
    for operation in &scene.operations {
        let (kind, id, state) = (operation.operation_type, operation.uuid, operation.state);
        text.push_str(&format!("not finished: {kind} {id}, {state}\n"));
    }
    text
}

/// What lies between the world and those on the network.
fn way_in(network: &NetworkRecord) -> String {
    let router = network.netblock.router();
    match network.floating_gateway {
        _ if network.uuid == FLOATING => "world\n".to_owned(),
        Some(gateway) => format!("world\n │  {gateway}\nrouter {router}\n"),
        None if network.provide_nat && network.state == NetworkState::Initial => {
            format!("router {router}, no NAT yet\n")
        }
        None => format!("router {router}, no NAT\n"),
    }
}

fn nobody(state: NetworkState) -> &'static str {
    match state {
        NetworkState::Initial | NetworkState::Created | NetworkState::Error => "nobody yet",
        NetworkState::DeleteWait | NetworkState::Deleted => "nobody any more",
    }
}

/// The interfaces by address, then the addresses that something else holds.
fn branches(scene: &Scene<'_>) -> Vec<Branch> {
    let mut interfaces: Vec<&InterfaceRecord> = scene.interfaces.iter().collect();
    interfaces.sort_by_key(|interface| (interface.ipv4.is_none(), interface.ipv4, interface.macaddr));
    let drawn: HashSet<Ipv4Addr> = interfaces.iter().filter_map(|interface| interface.ipv4).collect();
    let mut branches: Vec<Branch> = interfaces.into_iter().map(of_interface).collect();

    let mut addresses: Vec<&AddressRecord> = scene.addresses.iter().collect();
    addresses.sort_by_key(|address| address.address);
    let others = addresses.into_iter().filter(|address| !drawn.contains(&address.address));
    branches.extend(others.filter_map(|address| of_address(scene, address)));
    branches
}

fn of_interface(interface: &InterfaceRecord) -> Branch {
    let address = interface.ipv4.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let mut who = format!("{}  instance {}", interface.macaddr, short(&interface.instance_uuid.to_string()));
    if let Some(floating) = interface.floating {
        who.push_str(&format!("  floats as {floating}"));
    }
    if interface.state != InterfaceState::Created {
        who.push_str(&format!("  ({})", interface.state));
    }
    Branch { address, who }
}

/// Nothing for what every network has, and for what is only counted.
fn of_address(scene: &Scene<'_>, address: &AddressRecord) -> Option<Branch> {
    let user = || match address.user.as_slice() {
        [kind, id] => format!("{} {}", visible(kind), short(id)),
        _ => "nobody".to_owned(),
    };
    let who = match address.kind {
        AddressType::Network | AddressType::Broadcast => return None,
        AddressType::Gateway if address.address == scene.network.netblock.router() => return None,
        AddressType::Gateway => format!("NAT of {}", user()),
        AddressType::Floating => format!("floats for {}", user()),
        AddressType::Routed => format!("routed to {}", user()),
        // Its interface came or went between the questions.
        AddressType::Instance => format!("held for {}", user()),
        AddressType::Manual | AddressType::Halo if is_only_counted(scene, address.kind) => return None,
        AddressType::Manual if address.comment.is_empty() => "reserved".to_owned(),
        AddressType::Manual => format!("reserved: {}", cut(&address.comment, LONGEST_COMMENT)),
        AddressType::Halo => "resting".to_owned(),
    };
    Some(Branch { address: address.address.to_string(), who })
}

fn count(scene: &Scene<'_>, kind: AddressType) -> usize {
    scene.addresses.iter().filter(|address| address.kind == kind).count()
}

fn is_only_counted(scene: &Scene<'_>, kind: AddressType) -> bool {
    count(scene, kind) > MOST_ADDRESSES
}

/// The lines that stand for many addresses.
fn counted(scene: &Scene<'_>) -> impl Iterator<Item = String> {
    let kinds = [(AddressType::Manual, "reserved"), (AddressType::Halo, "resting")];
    kinds
        .into_iter()
        .filter(|(kind, _)| is_only_counted(scene, *kind))
        .map(|(kind, word)| format!("{} addresses {word}", count(scene, kind)))
}

fn use_of(scene: &Scene<'_>) -> String {
    let resting = count(scene, AddressType::Halo);
    let used = scene.addresses.len() - resting;
    let size = scene.network.netblock.size();
    let rest = if resting == 0 { String::new() } else { format!(", {resting} resting") };
    format!("{used} of {size} addresses in use{rest}")
}

fn short(id: &str) -> String {
    cut(id, SHORT_ID)
}

/// The beginning of a text of others.
fn cut(text: &str, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some((end, _)) => visible(&text[..end]) + "…",
        None => visible(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn network(change: &Value) -> NetworkRecord {
        let mut network = json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": "lan", "namespace": "ci",
            "netblock": "10.0.0.0/24", "provide_dhcp": true, "provide_nat": true, "provide_dns": false,
            "floating_gateway": "192.168.20.7", "vxid": 77, "vxlan_id": 77, "state": "created",
            "error_message": null, "last_cluster_operation": null, "metadata": {}, "version": 1,
            "references_to": {}, "references_from": {}
        });
        network.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        from_value(network).unwrap()
    }

    fn address(address: &str, kind: &str, user: Option<[&str; 2]>, comment: &str) -> AddressRecord {
        from_value(json!({
            "address": address, "type": kind, "reservation_type": kind, "user": user.map_or(vec![], |user| user.to_vec()), "user_type": user.map(|user| user[0]),
            "user_uuid": user.map(|user| user[1]), "comment": comment, "when": 0.0, "reserved_at": 0.0,
            "ipam_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"
        }))
        .unwrap()
    }

    fn interface(number: u8, address: Option<&str>, floating: Option<&str>, state: &str) -> InterfaceRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "instance_uuid": format!("{number:08}-8a3c-4b0e-9d0c-6f1c1f6f0a01"),
            "network_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "macaddr": format!("02:00:00:00:00:{number:02x}"),
            "ipv4": address, "floating": floating, "model": "virtio", "order": 0, "state": state, "metadata": {},
            "version": 3
        }))
        .unwrap()
    }

    fn own() -> Vec<AddressRecord> {
        [("10.0.0.0", "network"), ("10.0.0.1", "gateway"), ("10.0.0.255", "broadcast")]
            .map(|(text, kind)| address(text, kind, Some(["network", "5d5e1b5a"]), ""))
            .into()
    }

    fn scene(network: &NetworkRecord) -> Scene<'_> {
        Scene { network, interfaces: vec![], addresses: own(), routed: vec![], operations: vec![] }
    }

    #[test]
    fn everybody_on_the_network_is_drawn() {
        let network = network(&json!({}));
        let mut scene = scene(&network);
        scene.interfaces = vec![
            interface(3, None, None, "created"),
            interface(2, Some("10.0.0.23"), None, "initial"),
            interface(1, Some("10.0.0.9"), Some("192.168.20.9"), "created"),
        ];
        scene.addresses.extend([
            address("10.0.0.51", "deletion-halo", None, ""),
            address("10.0.0.50", "manual", Some(["network", "5d5e1b5a"]), "printer\u{1b}[31m"),
            address("10.0.0.52", "manual", Some(["network", "5d5e1b5a"]), ""),
            address("10.0.0.9", "instance", Some(["instance", "00000001-8a3c"]), ""),
            address("10.0.0.23", "instance", Some(["instance", "00000002-8a3c"]), ""),
            address("10.0.0.99", "instance", Some(["instance", "00000004-8a3c"]), ""),
        ]);
        scene.routed = vec!["192.168.20.44".into()];
        let text = draw(&scene);
        let expected = r"world
 │  192.168.20.7
router 10.0.0.1
 ├─ 10.0.0.9    02:00:00:00:00:01  instance 00000001…  floats as 192.168.20.9
 ├─ 10.0.0.23   02:00:00:00:00:02  instance 00000002…  (initial)
 ├─ no address  02:00:00:00:00:03  instance 00000003…
 ├─ 10.0.0.50   reserved: printer\u{1b}[31m
 ├─ 10.0.0.51   resting
 ├─ 10.0.0.52   reserved
 ├─ 10.0.0.99   held for instance 00000004…
 └─ routed here: 192.168.20.44

8 of 256 addresses in use, 1 resting
";
        assert_eq!(text, expected);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn an_empty_network_without_nat_says_so() {
        let lonely = network(&json!({ "provide_nat": false, "floating_gateway": null }));
        assert_eq!(
            draw(&scene(&lonely)),
            "router 10.0.0.1, no NAT\n └─ nobody yet\n\n3 of 256 addresses in use\n"
        );
        let young = network(&json!({ "floating_gateway": null, "state": "initial" }));
        assert!(draw(&scene(&young)).starts_with("router 10.0.0.1, no NAT yet\n"));
        let going = network(&json!({ "state": "delete-wait" }));
        assert!(draw(&scene(&going)).contains(" └─ nobody any more\n"));
    }

    #[test]
    fn many_interfaces_are_all_drawn_and_many_other_addresses_counted() {
        let network = network(&json!({}));
        let mut scene = scene(&network);
        scene.interfaces = (10..=209)
            .map(|number| interface(number, Some(&format!("10.0.0.{number}")), None, "created"))
            .collect();
        scene
            .addresses
            .extend((210..=230).map(|number| address(&format!("10.0.0.{number}"), "manual", None, "x")));
        scene.addresses.extend(
            (231..=250).map(|number| address(&format!("10.0.0.{number}"), "deletion-halo", None, "")),
        );
        let text = draw(&scene);
        assert_eq!(text.lines().filter(|line| line.contains("instance")).count(), 200);
        assert_eq!(text.lines().filter(|line| line.ends_with("resting")).count(), 20 + 1);
        assert!(text.contains(" └─ 21 addresses reserved\n"), "{text}");
    }

    #[test]
    fn the_floating_network_shows_what_its_addresses_stand_for() {
        let network = network(&json!({
            "uuid": FLOATING, "namespace": null, "netblock": "192.168.20.0/24", "floating_gateway": null
        }));
        let id = "0123456789abcdef";
        let addresses = vec![
            address("192.168.20.0", "network", Some(["network", id]), ""),
            address("192.168.20.1", "gateway", Some(["network", id]), ""),
            address("192.168.20.7", "gateway", Some(["network", id]), ""),
            address("192.168.20.9", "floating", Some(["interface", id]), ""),
            address("192.168.20.44", "routed", Some(["network", id]), ""),
        ];
        let expected = "\
world
 ├─ 192.168.20.7   NAT of network 01234567…
 ├─ 192.168.20.9   floats for interface 01234567…
 └─ 192.168.20.44  routed to network 01234567…

5 of 256 addresses in use
";
        assert_eq!(draw(&Scene { addresses, ..scene(&network) }), expected);
    }

    #[test]
    fn work_that_goes_on_is_named_and_a_long_comment_is_cut() {
        let network = network(&json!({}));
        let mut scene = scene(&network);
        scene.addresses.push(address("10.0.0.50", "manual", None, &"é".repeat(49)));
        scene.operations = from_value(json!([{
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "object_type": "clusteroperation",
            "operation_type": "net_op", "state": "executing", "tasks": [], "depends_on": [], "error_report": null,
            "namespace": "ci", "target_object_type": "network", "target_uuid": "x", "attempts": 1, "created": 0.0,
            "updated": 0.0, "version": 1
        }]))
        .unwrap();
        let text = draw(&scene);
        assert!(text.contains(&format!("10.0.0.50  reserved: {}…\n", "é".repeat(48))), "{text}");
        let line = "not finished: net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01, executing\n";
        assert!(text.ends_with(line), "{text}");
    }
}
