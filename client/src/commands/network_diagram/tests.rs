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

fn default_addresses() -> Vec<AddressRecord> {
    [("10.0.0.0", "network"), ("10.0.0.1", "gateway"), ("10.0.0.255", "broadcast")]
        .map(|(text, kind)| address(text, kind, Some(["network", "5d5e1b5a"]), ""))
        .into()
}

fn view_of(network: &NetworkRecord) -> NetworkView<'_> {
    NetworkView {
        network,
        interfaces: vec![],
        addresses: default_addresses(),
        routed: vec![],
        operations: vec![],
    }
}

#[test]
fn shows_all_interfaces_and_addresses() {
    let network = network(&json!({}));
    let mut view = view_of(&network);
    view.interfaces = vec![
        interface(3, None, None, "created"),
        interface(2, Some("10.0.0.23"), None, "initial"),
        interface(1, Some("10.0.0.9"), Some("192.168.20.9"), "created"),
    ];
    view.addresses.extend([
        address("10.0.0.51", "deletion-halo", None, ""),
        address("10.0.0.50", "manual", Some(["network", "5d5e1b5a"]), "printer\u{1b}[31m"),
        address("10.0.0.52", "manual", Some(["network", "5d5e1b5a"]), ""),
        address("10.0.0.9", "instance", Some(["instance", "00000001-8a3c"]), ""),
        address("10.0.0.23", "instance", Some(["instance", "00000002-8a3c"]), ""),
        address("10.0.0.99", "instance", Some(["instance", "00000004-8a3c"]), ""),
    ]);
    view.routed = vec!["192.168.20.44".into()];
    let text = render(&view);
    let expected = r"external network
 │  192.168.20.7
router 10.0.0.1
 ├─ 10.0.0.9    02:00:00:00:00:01  instance 00000001…  floats as 192.168.20.9
 ├─ 10.0.0.23   02:00:00:00:00:02  instance 00000002…  (initial)
 ├─ no address  02:00:00:00:00:03  instance 00000003…
 ├─ 10.0.0.50   reserved: printer\u{1b}[31m
 ├─ 10.0.0.51   quarantined
 ├─ 10.0.0.52   reserved
 ├─ 10.0.0.99   allocated to instance 00000004…
 └─ routed to this network: 192.168.20.44

8 of 256 addresses in use, 1 quarantined
";
    assert_eq!(text, expected);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn shows_an_empty_network_without_nat() {
    let empty = network(&json!({ "provide_nat": false, "floating_gateway": null }));
    assert_eq!(
        render(&view_of(&empty)),
        "router 10.0.0.1, no NAT\n └─ no interfaces yet\n\n3 of 256 addresses in use\n"
    );
    let initial = network(&json!({ "floating_gateway": null, "state": "initial" }));
    assert!(render(&view_of(&initial)).starts_with("router 10.0.0.1, no NAT yet\n"));
    let deleting = network(&json!({ "state": "delete-wait" }));
    assert!(render(&view_of(&deleting)).contains(" └─ no interfaces left\n"));
}

#[test]
fn lists_all_interfaces_and_counts_many_other_addresses() {
    let network = network(&json!({}));
    let mut view = view_of(&network);
    view.interfaces = (10..=209)
        .map(|number| interface(number, Some(&format!("10.0.0.{number}")), None, "created"))
        .collect();
    view.addresses
        .extend((210..=230).map(|number| address(&format!("10.0.0.{number}"), "manual", None, "x")));
    view.addresses
        .extend((231..=250).map(|number| address(&format!("10.0.0.{number}"), "deletion-halo", None, "")));
    let text = render(&view);
    assert_eq!(text.lines().filter(|line| line.contains("instance")).count(), 200);
    assert_eq!(text.lines().filter(|line| line.ends_with("quarantined")).count(), 20 + 1);
    assert!(text.contains(" └─ 21 addresses reserved\n"), "{text}");
}

#[test]
fn shows_the_users_of_floating_addresses() {
    let network = network(&json!({
        "uuid": FLOATING_NETWORK_ID, "namespace": null, "netblock": "192.168.20.0/24", "floating_gateway": null
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
external network
 ├─ 192.168.20.7   NAT of network 01234567…
 ├─ 192.168.20.9   floats for interface 01234567…
 └─ 192.168.20.44  routed to network 01234567…

5 of 256 addresses in use
";
    assert_eq!(render(&NetworkView { addresses, ..view_of(&network) }), expected);
}

#[test]
fn shows_operations_and_truncates_long_comments() {
    let network = network(&json!({}));
    let mut view = view_of(&network);
    view.addresses.push(address("10.0.0.50", "manual", None, &"é".repeat(49)));
    view.operations = from_value(json!([{
        "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "object_type": "clusteroperation",
        "operation_type": "net_op", "state": "executing", "tasks": [], "depends_on": [], "error_report": null,
        "namespace": "ci", "target_object_type": "network", "target_uuid": "x", "attempts": 1, "created": 0.0,
        "updated": 0.0, "version": 1
    }]))
    .unwrap();
    let text = render(&view);
    assert!(text.contains(&format!("10.0.0.50  reserved: {}…\n", "é".repeat(48))), "{text}");
    let line = "in progress: net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01, executing\n";
    assert!(text.ends_with(line), "{text}");
}
