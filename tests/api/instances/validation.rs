//! Validation of instance creation: exact errors, and no side effects.

use axum::http::Method;
use muster_test_cluster::Cluster;
use serde_json::{Value, json};

use super::{create, create_and_settle, instance_request, path, status_and_error, try_create};
use crate::networks::{cluster, create_network, get, post};

/// Returns the row counts of every table that a create request writes to.
async fn row_counts(cluster: &Cluster) -> Vec<i64> {
    let mut counts = Vec::new();
    for table in
        ["instances", "interfaces", "artifacts", "node_claims", "instance_ports", "hardware_addresses"]
    {
        counts.push(cluster.count_rows(table, "1 = 1").await);
    }
    counts.push(cluster.count_rows("addresses", "kind = 'instance'").await);
    counts.push(cluster.count_rows("metadata", "object_type = 'instance'").await);
    counts.push(cluster.count_rows("operations", "target_type = 'instance'").await);
    counts
}

/// Returns invalid request fields with their errors. The network does not exist, because lookups come after
/// validation.
fn invalid_requests() -> Vec<(Value, &'static str)> {
    let disk = |disk: Value| json!({"disk": [disk]});
    let net = |mut net: Value| {
        net.as_object_mut().unwrap().entry("network_uuid").or_insert(json!("absent"));
        json!({"network": [net]})
    };
    vec![
        (json!({"disk": null}), "instance must specify at least one disk"),
        (json!({"disk": []}), "instance must specify at least one disk"),
        (json!({"disk": "8@debian:12"}), "disk: Not a valid list."),
        (json!({"disk": ["8@debian:12"]}), "disk specification should contain JSON objects"),
        (disk(json!({})), "disk[0]: a disk needs a size or a base"),
        (disk(json!({"size": 0})), "disk[0]: a disk needs a size or a base"),
        (disk(json!({"size": null, "base": null})), "disk[0]: a disk needs a size or a base"),
        (disk(json!({"base": "none"})), "disk[0]: a disk needs a size or a base"),
        (disk(json!({"base": ""})), "disk[0]: a disk needs a size or a base"),
        (disk(json!({"size": -1})), "disk[0].size: Must be greater than or equal to 0."),
        (disk(json!({"size": "big"})), "disk[0].size: Not a valid integer."),
        (disk(json!({"size": 1.5})), "disk[0].size: Not a valid integer."),
        (disk(json!({"size": true})), "disk[0].size: Not a valid integer."),
        (disk(json!({"size": 1, "base": 7})), "disk[0].base: Not a valid string."),
        (
            disk(json!({"size": 1, "bus": "ide"})),
            "disk[0].bus: Must be one of: sata, scsi, usb, virtio, nvme.",
        ),
        (disk(json!({"size": 1, "type": "floppy"})), "disk[0].type: Must be one of: disk, cdrom."),
        (disk(json!({"size": 1, "colour": "red"})), "disk[0].colour: Unknown field."),
        (json!({"disk": [{"size": 1}, {"size": 1, "bus": 3}]}), "disk[1].bus: Not a valid string."),
        (json!({"network": {"network_uuid": "x"}}), "network: Not a valid list."),
        (json!({"network": ["x"]}), "network specification should contain JSON objects"),
        (json!({"network": [{}]}), "network specification is missing network_uuid"),
        (json!({"network": [{"network_uuid": null}]}), "network specification is missing network_uuid"),
        (json!({"network": [{"network_uuid": 7}]}), "network[0].network_uuid: Not a valid string."),
        (
            net(json!({"macaddress": "02-00-00-00-00-01"})),
            "network[0].macaddress: String does not match expected pattern.",
        ),
        (
            net(json!({"macaddress": "2:0:0:0:0:1"})),
            "network[0].macaddress: String does not match expected pattern.",
        ),
        (net(json!({"address": 7})), "network[0].address: Not a valid string."),
        (net(json!({"model": "vir tio"})), "network[0].model: String does not match expected pattern."),
        (net(json!({"model": "x".repeat(33)})), "network[0].model: String does not match expected pattern."),
        (net(json!({"float": "maybe"})), "network[0].float: Not a valid boolean."),
        (net(json!({"float": [true]})), "network[0].float: Not a valid boolean."),
        (net(json!({"vlan": 1})), "network[0].vlan: Unknown field."),
        (json!({"video": "qxl"}), "video: Not a valid mapping type."),
        (json!({"video": {"memory": 1}}), "video specification requires \"model\""),
        (json!({"video": {"model": null, "memory": 1}}), "video specification requires \"model\""),
        (json!({"video": {"model": "qxl"}}), "video specification requires \"memory\""),
        (json!({"video": {"model": "qxl", "memory": null}}), "video specification requires \"memory\""),
        (json!({"video": {"model": "qxl", "memory": 1.5}}), "video.memory: Not a valid integer."),
        (
            json!({"video": {"model": "a b", "memory": 1}}),
            "video.model: String does not match expected pattern.",
        ),
        (
            json!({"video": {"model": "qxl", "memory": 1, "vdi": "rdp"}}),
            "video.vdi: Must be one of: vnc, spice, spiceconcurrent, spicedebug.",
        ),
        (json!({"videospec": {"model": "qxl", "memory": 1, "heads": 2}}), "videospec.heads: Unknown field."),
        (
            json!({"video": {"model": "qxl", "memory": 1}, "videospec": {"model": "vga", "memory": 1}}),
            "videospec: differs from video, send only one of them",
        ),
        (json!({"name": null}), "name: Missing data for required field."),
        (json!({"cpus": null}), "cpus: Missing data for required field."),
        (json!({"memory": null}), "memory: Missing data for required field."),
        (json!({"cpus": "two"}), "cpus: Not a valid integer."),
        (json!({"cpus": 0}), "cpus: Must be greater than or equal to 1 and less than or equal to 1024."),
        (
            json!({"memory": -5}),
            "memory: Must be greater than or equal to 1 and less than or equal to 67108864.",
        ),
        (json!({"secure_boot": true}), "secure boot requires UEFI be enabled"),
        (json!({"configdrive": "floppy"}), "invalid config drive type: \"floppy\""),
        (json!({"user_data": "not base64!"}), "user_data: Not valid base64."),
        (json!({"metadata": ["a"]}), "metadata must be a dictionary"),
        (json!({"metadata": {"tags": "web"}}), "value for \"tags\" key should be a JSON list"),
        (
            json!({"metadata": {"affinity": {"require_with_tag": "web"}}}),
            "value for affinity constraint \"require_with_tag\" should be a JSON list of tags",
        ),
        (json!({"side_channels": ["telepathy"]}), "telepathy is not a known side channel type"),
        (json!({"colour": "red"}), "colour: not declared by this endpoint"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_request_before_lookups_without_side_effects() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let before = row_counts(&cluster).await;
    for (overrides, error) in invalid_requests() {
        // Neither the node nor the namespace exists.
        let mut body = instance_request("www", &json!({"placed_on": "nowhere", "namespace": "absent"}));
        for (key, value) in overrides.as_object().unwrap() {
            body[key] = value.clone();
        }
        let response = post(&cluster, &token, "/instances", body).await;
        assert_eq!(status_and_error(&response), (400, error), "{overrides}");
    }
    for name in
        ["", "a.b", "-a", "a-", "a_b", "10.0.0.1", &"x".repeat(64), "7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11"]
    {
        let response = try_create(&cluster, &token, name, &json!({"placed_on": "nowhere"})).await;
        let error_prefix = format!("instance name {name} is not useable as a DNS and Linux host name.");
        assert!(
            response.status == 400 && status_and_error(&response).1.starts_with(&error_prefix),
            "{}",
            response.text
        );
    }
    assert_eq!(row_counts(&cluster).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_missing_references_without_side_effects() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    for _ in 0..2 {
        create_network(
            &cluster,
            &token,
            json!({"name": "twin", "netblock": "10.1.0.0/24", "provide_nat": false}),
        )
        .await;
    }
    let system = cluster.token("system").await;
    let foreign =
        create_network(&cluster, &system, json!({"name": "foreign", "netblock": "10.2.0.0/24"})).await;
    let before = row_counts(&cluster).await;
    let absent = "7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11";
    let with_network =
        |reference: &str| json!({"network": [{"network_uuid": "blue"}, {"network_uuid": reference}]});
    let with_address =
        |with_address: &str| json!({"network": [{"network_uuid": "blue", "address": with_address}]});
    let with_base = |with_base: &str| json!({"disk": [{"size": 1}, {"base": with_base}]});
    for (overrides, status, error) in [
        (json!({"namespace": "absent"}), 404, "namespace not found".to_owned()),
        (json!({"namespace": "system"}), 404, "namespace not found".to_owned()),
        (json!({"placed_on": "nowhere"}), 404, "Specified node nowhere does not exist".to_owned()),
        (with_network("absent"), 404, "network absent not found".into()),
        (with_network(absent), 404, format!("network {absent} not found")),
        (with_network(&foreign), 404, format!("network {foreign} does not exist")),
        (with_network("foreign"), 404, "network foreign not found".into()),
        (
            with_address("10.9.9.9"),
            400,
            "network specification requests an address outside the range of the network".into(),
        ),
        (with_address("ten"), 400, "network[0].address: Not a valid IPv4 address.".into()),
        (
            json!({"network": [{"network_uuid": "blue", "address": "none", "float": true}]}),
            400,
            "network[0].float: an interface without an address cannot float".into(),
        ),
        (with_base("label:absent"), 404, "artifact not found".into()),
        (with_base("sf://label/ci/absent"), 404, "artifact not found".into()),
        (with_base("sf://upload/ci/absent"), 404, "artifact not found".into()),
        (with_base(&format!("sf://artifact/{absent}")), 404, "artifact not found".into()),
        (with_base(&format!("sf://snapshot/{absent}")), 404, "artifact not found".into()),
        (with_base("sf://artifact/x"), 404, "artifact not found".into()),
        (with_base(&format!("sf://blob/{absent}")), 404, "blob not found".into()),
        (with_base("sf://nonsense"), 404, "artifact not found".into()),
        (
            json!({"nvram_template": "nonsense"}),
            400,
            "nvram_template: \"nonsense\" is neither label:<name> nor sf://blob/<uuid>".into(),
        ),
        (json!({"nvram_template": "label:absent"}), 404, "artifact not found".into()),
    ] {
        let response = try_create(&cluster, &token, "www", &overrides).await;
        assert_eq!(status_and_error(&response), (status, error.as_str()), "{overrides}");
    }
    let ambiguous = try_create(&cluster, &token, "www", &with_network("twin")).await;
    let (status, error) = status_and_error(&ambiguous);
    let expected = "multiple networks have the name \"twin\" in namespace \"ci\": ";
    assert!(status == 400 && error.starts_with(expected), "{error}");
    assert_eq!(row_counts(&cluster).await, before);

    // A network that is not ready is reported as such.
    let network_request = json!({"name": "young", "netblock": "10.3.0.0/24"});
    let initial_network =
        post(&cluster, &token, "/networks", network_request).await.body["uuid"].as_str().unwrap().to_owned();
    let response = try_create(&cluster, &token, "www", &with_network("young")).await;
    assert_eq!(
        status_and_error(&response),
        (406, format!("network {initial_network} is not ready (initial)").as_str())
    );
    assert_eq!(cluster.count_rows("instances", "1 = 1").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn accepts_video_and_videospec_in_all_forms() {
    let (cluster, token) = cluster(&[]).await;
    cluster.allow_undocumented_requests("released clients send empty objects");
    let (default, qxl) = (
        json!({"model": "cirrus", "memory": 16384, "vdi": "spice"}),
        json!({"model": "qxl", "memory": 1024}),
    );
    let with_vdi = |vdi: &str| json!({"model": "qxl", "memory": 1024, "vdi": vdi});
    for (number, (overrides, expected)) in [
        (json!({"video": {}}), default.clone()),
        (json!({"videospec": null, "video": {}}), default),
        (json!({"video": qxl}), with_vdi("spice")),
        (json!({"videospec": qxl}), with_vdi("spice")),
        (json!({"videospec": qxl, "video": qxl}), with_vdi("spice")),
        (json!({"videospec": {"model": "qxl", "memory": 1024, "vdi": null}}), with_vdi("spice")),
        (json!({"video": with_vdi("vnc")}), with_vdi("vnc")),
        (json!({"video": with_vdi("spiceconcurrent")}), with_vdi("spiceconcurrent")),
        (json!({"videospec": with_vdi("spicedebug")}), with_vdi("spicedebug")),
    ]
    .into_iter()
    .enumerate()
    {
        let response = try_create(&cluster, &token, &format!("n{number}"), &overrides).await;
        assert_eq!((response.status.as_u16(), &response.body["video"]), (200, &expected), "{overrides}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn treats_empty_terraform_values_as_unset() {
    let (cluster, token) = cluster(&[]).await;
    cluster.allow_undocumented_requests("Terraform sends empty strings");
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let empty = json!({
        "network": [{"network_uuid": "blue", "address": "", "macaddress": "", "model": ""}],
        "disk": [{"size": 1, "base": "", "bus": "", "type": ""}],
        "ssh_key": "", "user_data": "", "namespace": "", "nvram_template": "", "placed_on": "", "metadata": "",
        "video": {"model": "cirrus", "memory": 16384},
    });
    let record = create(&cluster, &token, "tf", &empty).await;
    assert_eq!((&record["ssh_key"], &record["user_data"]), (&Value::Null, &Value::Null));
    assert_eq!((&record["nvram_template"], &record["namespace"]), (&Value::Null, &json!("ci")));
    assert_eq!(record["disk_spec"][0], json!({"size": 1, "base": null, "bus": "virtio", "type": "disk"}));
    let interface = &record["interfaces"][0];
    assert_eq!(
        (&interface["ipv4"], &interface["model"]),
        (&Value::Null, &json!("virtio")),
        "no address is allocated"
    );
    assert!(interface["macaddr"].as_str().unwrap().starts_with("02:00:00:"));
}

#[tokio::test(flavor = "multi_thread")]
async fn accepts_boolean_spellings() {
    let (cluster, token) = cluster(&[]).await;
    cluster.allow_undocumented_requests("released clients send booleans as strings");
    let network_id =
        create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    for (number, (spelling, floats)) in [
        (json!(true), true),
        (json!("yes"), true),
        (json!("ON"), true),
        (json!(1), true),
        (json!(false), false),
        (json!("false"), false),
        (json!("off"), false),
        (json!("0"), false),
        (Value::Null, false),
    ]
    .into_iter()
    .enumerate()
    {
        let overrides =
            json!({"network": [{"network_uuid": network_id, "float": spelling, "address": null}]});
        let response = try_create(&cluster, &token, &format!("n{number}"), &overrides).await;
        assert_eq!(response.status, 200, "{}", response.text);
        assert_eq!(response.body["interfaces"][0]["floating"].is_string(), floats, "{spelling}");
        assert!(response.body["interfaces"][0]["ipv4"].is_string(), "null requests any address");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn relaxed_validation_accepts_unknown_fields_but_rejects_invalid_values() {
    for mode in ["warn", "off"] {
        let (cluster, token) = cluster(&[("API_VALIDATION_MODE", mode)]).await;
        create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
        let unknown_fields = json!({
            "colour": "red",
            "disk": [{"size": 1, "colour": "red"}],
            "network": [{"network_uuid": "blue", "float": "maybe", "vlan": 3}],
            "video": {"model": "qxl", "memory": 1, "heads": 2},
        });
        let record = create_and_settle(&cluster, &token, "odd", &unknown_fields).await;
        assert_eq!(record["state"], "created", "{record}");
        assert!(record["interfaces"][0]["floating"].is_string(), "unrecognized values count as true");
        assert!(record["disk_spec"][0].get("colour").is_none());
        for invalid in [
            json!({"disk": [{"size": -1}]}),
            json!({"disk": [{"size": 1, "bus": "ide"}]}),
            json!({"network": [{"network_uuid": null}]}),
            json!({"network": [{"network_uuid": "blue", "macaddress": "x"}]}),
            json!({"video": {"model": "qxl"}}),
        ] {
            assert_eq!(try_create(&cluster, &token, "www", &invalid).await.status, 400, "{mode}: {invalid}");
        }
        let interface_request = json!({"network_uuid": "blue", "float": "maybe", "vlan": 3});
        let response =
            cluster.call(&token, Method::POST, &path(&record, "/interfaces"), Some(interface_request)).await;
        assert_eq!(response.status, 200, "{}", response.text);
        assert!(response.body["floating"].is_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trailing_slash_is_accepted() {
    let (cluster, token) = cluster(&[]).await;
    let response = post(&cluster, &token, "/instances/", instance_request("www", &json!({}))).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(get(&cluster, &token, "/instances/").await.body.as_array().unwrap().len(), 1);
}
