use serde_json::from_value;

use super::*;

fn example(name: &str, namespace: &str, error: Option<&str>) -> NetworkRecord {
    from_value(json!({
        "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": name, "namespace": namespace,
        "netblock": "10.0.0.0/24", "provide_dhcp": true, "provide_nat": true, "provide_dns": false,
        "floating_gateway": "192.168.20.7", "vxid": 77, "vxlan_id": 77,
        "state": if error.is_some() { "error" } else { "created" }, "error_message": error,
        "last_cluster_operation": null, "metadata": { "size": 7 }, "version": 1, "references_to": {},
        "references_from": {}
    }))
    .unwrap()
}

fn address(address: &str, kind: &str, user: Option<[&str; 2]>, comment: &str) -> AddressRecord {
    from_value(json!({
        "address": address, "type": kind, "reservation_type": kind, "user": user.map_or(vec![], |user| user.to_vec()), "user_type": user.map(|user| user[0]),
        "user_uuid": user.map(|user| user[1]), "comment": comment, "when": 1_767_225_600.0, "reserved_at": 1_767_225_600.0,
        "ipam_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"
    }))
    .unwrap()
}

#[test]
fn lists_networks() {
    let text = table(vec![
        example("web", "ci", Some("it broke")),
        example("db", "production", None),
        example("lan", "production", None),
    ])
    .render(None);
    let expected = "\
NAME  UUID                                  NETBLOCK     STATE    NAMESPACE   PROVIDES
web   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.0/24  error    ci          dhcp, nat
db    5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.0/24  created  production  dhcp, nat
lan   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.0/24  created  production  dhcp, nat
";
    assert_eq!(text, expected);
}

#[test]
fn shows_why_a_network_failed() {
    let text = details(example("lan", "ci", Some("no address is free"))).render(None);
    let expected = "\
name           lan
uuid           5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01
namespace      ci
netblock       10.0.0.0/24
provides       dhcp, nat
gateway        192.168.20.7
vxlan          77
state          error
error          no address is free
metadata size  7
";
    assert_eq!(text, expected);
}

#[test]
fn lists_addresses_with_their_users() {
    let text = addresses(vec![
        address("10.0.0.9", "deletion-halo", None, ""),
        address("10.0.0.50", "manual", Some(["network", "n-1"]), "printer"),
    ])
    .render(None);
    let expected = "\
ADDRESS    TYPE           USER         SINCE                     COMMENT
10.0.0.9   deletion-halo  -            2026-01-01T00:00:00.000Z  -
10.0.0.50  manual         network n-1  2026-01-01T00:00:00.000Z  printer
";
    assert_eq!(text, expected);
}

#[test]
fn reads_routed_addresses_from_the_record() {
    let mut network = example("lan", "ci", None);
    assert!(routed(&network).is_empty());
    let reference = json!({ "source_object_type": "network", "source_uuid": "n", "relationship": "routed_address",
        "relationship_value": "192.168.20.44", "target_object_type": "network", "target_uuid": "f", "created": 0.0,
        "last_active": 0.0 });
    network.references_from.insert("routed_address".into(), vec![from_value(reference).unwrap()]);
    assert_eq!(routed(&network), ["192.168.20.44"]);
}

#[test]
fn delete_all_lists_operation_per_network_and_what_it_waits_for() {
    let deleted = json!([
        { "network_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "op_type": "net_op",
          "op_uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01" },
        { "network_uuid": "6d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "op_type": "net_op",
          "op_uuid": "2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "reason": "it has interfaces" }]);
    let expected = "\
NETWORK                               OPERATION                                    WAITS
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  net_op 1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  -
6d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  net_op 2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  it has interfaces
";
    assert_eq!(deletions(from_value(deleted).unwrap()).render(None), expected);
}

#[test]
fn ignores_the_empty_last_line_of_ping() {
    let text = |given: &[&str]| join_lines(&given.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
    assert_eq!(text(&["PING", "", "64 bytes\u{1b}", ""]), "PING\n\n64 bytes\\u{1b}\n");
    assert_eq!((text(&["PING"]), text(&[])), ("PING\n".into(), String::new()));
}
