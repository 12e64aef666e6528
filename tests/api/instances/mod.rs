//! Instances, on simulated nodes.

mod concurrency;
pub(crate) mod consoles;
mod explanations;
mod images;
mod interfaces;
mod lifecycle;
mod lookup;
mod placement;
mod snapshots;
mod validation;

use axum::http::Method;
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::ids::InstanceId;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::networks::{cluster, create_network, get, post};
use crate::scopes::scoped_token;

/// Returns the request body of a small instance with a blank disk, with fields added or replaced.
pub(crate) fn instance_request(name: &str, overrides: &Value) -> Value {
    let mut body = json!({"name": name, "cpus": 1, "memory": 512, "disk": [{"size": 1}]});
    for (key, value) in overrides.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

async fn try_create(cluster: &Cluster, token: &str, name: &str, overrides: &Value) -> ApiResponse {
    post(cluster, token, "/instances", instance_request(name, overrides)).await
}

/// Creates a running instance, waits for its agent if it has one, and returns its record.
pub(crate) async fn create(cluster: &Cluster, token: &str, name: &str, overrides: &Value) -> Value {
    let record = create_and_settle(cluster, token, name, overrides).await;
    assert_eq!((&record["state"], &record["power_state"]), (&json!("created"), &json!("on")), "{record}");
    wait_for("the agent to be ready", async || {
        let record = show(cluster, token, &record).await;
        (record["side_channels"] == json!([]) || record["agent_state"] == "ready").then_some(record)
    })
    .await
}

/// Creates an instance, waits until no operation is unfinished, and returns its record.
pub(crate) async fn create_and_settle(
    cluster: &Cluster,
    token: &str,
    name: &str,
    overrides: &Value,
) -> Value {
    let response = try_create(cluster, token, name, overrides).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(
        (&response.body["state"], &response.body["power_state"]),
        (&json!("initial"), &json!("initial"))
    );
    cluster.settle().await;
    show(cluster, token, &response.body).await
}

/// Returns the current record of an instance.
pub(crate) async fn show(cluster: &Cluster, token: &str, record: &Value) -> Value {
    get(cluster, token, &path(record, "")).await.body
}

pub(crate) fn text<'a>(record: &'a Value, key: &str) -> &'a str {
    record[key].as_str().unwrap()
}

fn path(record: &Value, suffix: &str) -> String {
    format!("/instances/{}{suffix}", text(record, "uuid"))
}

fn id(record: &Value) -> InstanceId {
    text(record, "uuid").parse().unwrap()
}

fn object(record: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::Instance, text(record, "uuid"))
}

fn status_and_error(response: &ApiResponse) -> (u16, &str) {
    (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default())
}

/// Posts an action without a body.
async fn post_action(cluster: &Cluster, token: &str, record: &Value, verb: &str) -> ApiResponse {
    cluster.call(token, Method::POST, &path(record, &format!("/{verb}")), None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn created_instance_has_every_field_clients_read() {
    let (cluster, token) = cluster(&[]).await;
    cluster.allow_undocumented_requests("released clients send numbers as strings");
    let network_id =
        create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let overrides = json!({
        "cpus": "2",
        "disk": [{"size": 8}, {"size": 3, "bus": "sata"}, {"size": 1, "type": "cdrom"}],
        "network": [{"network_uuid": "blue"}, {"network_uuid": network_id, "address": "10.0.0.77", "model": "e1000"}],
        "video": {"model": "qxl", "memory": "65536"},
        "ssh_key": "ssh-ed25519 AAAA me",
        "user_data": "aGVsbG8=",
        "metadata": {"tags": ["web"], "owner": {"team": 7}},
        "side_channels": ["sf-agent", "sf-agent"],
        "uefi": true,
    });
    let response = try_create(&cluster, &token, "www", &overrides).await;
    assert_eq!(response.status, 200, "{}", response.text);
    let initial = response.body;
    assert_eq!((&initial["state"], &initial["disks"]), (&json!("initial"), &json!([])));
    assert_eq!((&initial["console_port"], &initial["vdi_port"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (&initial["agent_start_time"], &initial["agent_system_boot_time"]),
        (&Value::Null, &Value::Null)
    );
    cluster.settle().await;
    let record = wait_for("the agent to be ready", async || {
        Some(show(&cluster, &token, &initial).await).filter(|record| record["agent_state"] == "ready")
    })
    .await;

    assert_eq!((text(&record, "name"), text(&record, "namespace")), ("www", "ci"));
    assert_eq!((text(&record, "state"), text(&record, "power_state")), ("created", "on"));
    assert_eq!(
        (&record["cpus"], &record["memory"], &record["version"]),
        (&json!(2), &json!(512), &json!(19))
    );
    assert_eq!(record["error_message"], Value::Null);
    assert_eq!(record["disk_spec"][0], json!({"size": 8, "base": null, "bus": "virtio", "type": "disk"}));
    assert_eq!(record["disk_spec"][2], json!({"size": 1, "base": null, "bus": "virtio", "type": "cdrom"}));
    let disk = |device: &str, bus: &str, size: Option<i64>, ignored: bool| json!({"device": device, "bus": bus, "size": size, "blob_uuid": null, "snapshot_ignores": ignored});
    let disks = [
        disk("vda", "virtio", Some(8), false),
        disk("vdb", "virtio", None, true),
        disk("sdc", "sata", Some(3), false),
        disk("sdd", "usb", Some(1), true),
    ];
    assert_eq!(record["disks"], json!(disks));
    assert_eq!(record["video"], json!({"model": "qxl", "memory": 65536, "vdi": "spice"}));
    assert_eq!(
        (&record["ssh_key"], &record["user_data"]),
        (&json!("ssh-ed25519 AAAA me"), &json!("aGVsbG8="))
    );
    assert_eq!((&record["uefi"], &record["secure_boot"]), (&json!(true), &json!(false)));
    assert_eq!((text(&record, "configdrive"), text(&record, "machine_type")), ("openstack-disk", "pc"));
    assert_eq!((&record["nvram_template"], &record["side_channels"]), (&Value::Null, &json!(["sf-agent"])));
    assert!(record["agent_start_time"].is_f64() && record["agent_system_boot_time"].is_f64(), "{record}");
    for port in ["console_port", "vdi_port", "vdi_tls_port"] {
        assert!((30000..50000).contains(&record[port].as_u64().unwrap()), "{port}: {record}");
    }
    assert_eq!(record["metadata"], json!({"tags": ["web"], "owner": {"team": 7}}));
    assert_eq!((&record["agent_operations_queue"], &record["references_from"]), (&json!([]), &json!({})));
    let users: Vec<&String> = record["references_to"].as_object().unwrap().keys().collect();
    assert_eq!(users, ["operation_target"], "only operations refer to an instance");
    assert_eq!(record["last_cluster_operation"]["op_type"], "node_inst_op");
    assert!(record.get("requested_placement").is_none());
    let interfaces = get(&cluster, &token, &path(&record, "/interfaces")).await.body;
    assert_eq!(record["interfaces"], interfaces);
    assert_eq!((&interfaces[0]["order"], &interfaces[0]["model"]), (&json!(0), &json!("virtio")));
    assert_eq!((&interfaces[1]["ipv4"], &interfaces[1]["model"]), (&json!("10.0.0.77"), &json!("e1000")));
    assert_eq!(
        (&interfaces[1]["state"], &interfaces[1]["network_uuid"]),
        (&json!("created"), &json!(network_id))
    );

    // The VM plan matches the record.
    let plan = cluster.node_named(text(&record, "node")).vm_plan(id(&record)).unwrap();
    assert_eq!((plan.cpus, plan.memory_mb, plan.uefi, plan.nics.len()), (2, 512, true, 2));
    assert_eq!(
        plan.disks.iter().map(|disk| disk.device.as_str()).collect::<Vec<_>>(),
        ["vda", "vdb", "sdc", "sdd"]
    );
    assert!(plan.config_drive.is_some());
    assert_eq!(u64::from(plan.ports.console), record["console_port"].as_u64().unwrap());

    // The network has a lease with its name, and lists include it.
    let leases = cluster.node.network_plans().remove(0).router.unwrap().leases;
    assert!(leases.iter().any(|lease| lease.name == "www"), "{leases:?}");
    assert_eq!(get(&cluster, &token, "/instances").await.body, json!([record]));
    assert_eq!(get(&cluster, &token, "/instances/www").await.body, record);
}

#[tokio::test(flavor = "multi_thread")]
async fn omitted_and_null_fields_have_defaults() {
    let (cluster, token) = cluster(&[]).await;
    let nulls = json!({
        "network": null, "video": null, "ssh_key": null, "user_data": null, "placed_on": null, "namespace": null,
        "uefi": null, "secure_boot": null, "nvram_template": null, "configdrive": null, "metadata": null,
        "side_channels": null,
    });
    for (name, overrides) in [("plain", json!({})), ("nulls", nulls)] {
        let record = create(&cluster, &token, name, &overrides).await;
        assert_eq!(record["video"], json!({"model": "cirrus", "memory": 16384, "vdi": "spice"}));
        assert_eq!(record["side_channels"], json!(["sf-agent", "sf-agent2"]));
        assert_eq!(
            (&record["configdrive"], &record["machine_type"]),
            (&json!("openstack-disk"), &json!("pc"))
        );
        assert_eq!((&record["uefi"], &record["secure_boot"]), (&json!(false), &json!(false)));
        assert_eq!((&record["interfaces"], &record["metadata"]), (&json!([]), &json!({})));
        assert_eq!((&record["ssh_key"], &record["user_data"]), (&Value::Null, &Value::Null));
    }
    let quiet = json!({
        "side_channels": [], "configdrive": "none", "video": {"model": "vga", "memory": 8192, "vdi": "vnc"},
        "uefi": true, "secure_boot": true,
    });
    let record = create(&cluster, &token, "quiet", &quiet).await;
    assert_eq!((&record["side_channels"], &record["agent_state"]), (&json!([]), &Value::Null));
    assert_eq!(record["disks"].as_array().unwrap().len(), 1, "no config drive is attached");
    assert_eq!(record["vdi_tls_port"], Value::Null, "only SPICE is encrypted");
    assert_eq!((text(&record, "machine_type"), &record["secure_boot"]), ("q35", &json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_events_and_operations_of_creation() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({"metadata": {"affinity": {"db": 3}}})).await;
    let events = cluster.events(&object(&record)).await;
    let messages: Vec<&str> = events.iter().map(|event| event.message.as_str()).collect();
    for expected in [
        "db record created",
        "creation request from REST API",
        "deprecated weighted affinity specification accepted",
        "started scheduling",
        "schedule inputs",
        "schedule initial candidates",
        "schedule at stage sufficient_idle_memory",
        "schedule final candidates",
        "state is now preflight",
        "state is now creating",
        "state is now created",
    ] {
        assert!(messages.contains(&expected), "{expected}: {messages:?}");
    }
    let last = events.iter().find(|event| event.message == "schedule final candidates").unwrap();
    assert_eq!(last.extra["chosen"], record["node"]);
    let fetched = get(&cluster, &token, &path(&record, "/events?limit=1")).await.body;
    for key in ["timestamp", "fqdn", "duration", "message", "extra", "type"] {
        assert!(fetched[0].get(key).is_some(), "{key}: {fetched}");
    }

    assert_eq!(
        get(&cluster, &token, &path(&record, "/clusteroperations?all=false")).await.body,
        json!([]),
        "all operations ended"
    );
    let all = get(&cluster, &token, &path(&record, "/clusteroperations")).await.body;
    assert_eq!(get(&cluster, &token, &path(&record, "/clusteroperations?all=true")).await.body, all);
    let query =
        format!("/clusteroperations?target_object_type=instance&target_uuid={}", text(&record, "uuid"));
    assert_eq!(get(&cluster, &token, &query).await.body, all);
    assert_eq!(all[0]["tasks"], json!(["instance_preflight", "network_ensure_mesh", "instance_start"]));
    assert_eq!((text(&all[0], "state"), text(&all[0], "operation_type")), ("complete", "node_inst_op"));
    let handle = &record["last_cluster_operation"];
    let operation_path =
        format!("/clusteroperations/{}/{}", text(handle, "op_type"), text(handle, "op_uuid"));
    assert_eq!(get(&cluster, &token, &operation_path).await.body, all[0]);
    assert_eq!(post_action(&cluster, &token, &record, "snapshot").await.status, 200);
    let unfinished = get(&cluster, &token, &path(&record, "/clusteroperations?all=false")).await.body;
    assert_eq!(
        (unfinished.as_array().unwrap().len(), text(&unfinished[0], "operation_type")),
        (1, "node_inst_snap_op")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn records_usage_of_running_instances() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record = create(&cluster, &token, "www", &json!({"network": [{"network_uuid": "blue"}]})).await;
    let idle = create(&cluster, &token, "idle", &json!({})).await;
    assert_eq!(post_action(&cluster, &token, &idle, "poweroff").await.status, 200);
    muster_control::reconcile::vm_usage::run(&cluster.app).await.unwrap();
    cluster.events(&object(&record)).await;
    let query = json!({"event_type": "usage"});
    let list = cluster.call(&token, Method::GET, &path(&record, "/events"), Some(query.clone())).await.body;
    assert_eq!((text(&list[0], "message"), text(&list[0], "type")), ("usage", "usage"));
    let extra = &list[0]["extra"];
    for key in ["cpu time ns", "system time ns", "user time ns"] {
        assert!(extra["cpu usage"][key].is_u64(), "{key}: {extra}");
    }
    for key in
        ["actual bytes on disk", "errors", "read bytes", "read requests", "write bytes", "write requests"]
    {
        assert!(extra["disk usage"]["vda"][key].is_u64(), "{key}: {extra}");
    }
    let mac = text(&record["interfaces"][0], "macaddr");
    for key in ["bytes", "drops", "errors", "packets"] {
        for direction in ["read", "write"] {
            assert!(
                extra["network usage"][mac][format!("{direction} {key}")].is_u64(),
                "{direction} {key}: {extra}"
            );
        }
    }
    let none = cluster.call(&token, Method::GET, &path(&idle, "/events"), Some(query)).await.body;
    assert_eq!(none, json!([]), "an instance that is off has no usage");
}

#[tokio::test(flavor = "multi_thread")]
async fn validates_metadata_used_by_the_scheduler() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let put = async |key: &str, value: Value| {
        let metadata_path = path(&record, &format!("/metadata/{key}"));
        cluster.call(&token, Method::PUT, &metadata_path, Some(json!({"value": value}))).await
    };
    for (key, value, error) in [
        ("tags", json!("web"), "value for \"tags\" key should be a JSON list"),
        ("affinity", json!(["web"]), "value for \"affinity\" key should be a valid JSON dictionary"),
        ("affinity", json!({"web": "much"}), "affinity dictionary values should be integers"),
        ("affinity", json!({"web": true}), "affinity dictionary values should be integers, not booleans"),
    ] {
        assert_eq!(status_and_error(&put(key, value).await), (400, error), "{key}");
    }
    for (key, value) in [
        ("tags", json!(["web", "prod"])),
        ("affinity", json!({"prefer_with_tag": ["db"]})),
        ("affinity", json!({"db": "-2"})),
        ("empty", json!("")),
        ("any", json!({"deep": [1, {"a": null}]})),
    ] {
        assert_eq!(put(key, value).await.text, "null\n");
    }
    let posted = post(&cluster, &token, &path(&record, "/metadata"), json!({"key": "k", "value": "v"})).await;
    assert_eq!(posted.text, "null\n");
    assert_eq!(
        status_and_error(&post(&cluster, &token, &path(&record, "/metadata"), json!({"value": "v"})).await),
        (400, "no key specified")
    );
    let deleted = cluster.call(&token, Method::DELETE, &path(&record, "/metadata/any"), None).await;
    assert_eq!(deleted.text, "null\n");
    let expected = json!({"tags": ["web", "prod"], "affinity": {"db": "-2"}, "empty": "", "k": "v"});
    assert_eq!(get(&cluster, &token, &path(&record, "/metadata")).await.body, expected);
    assert_eq!(show(&cluster, &token, &record).await["metadata"], expected);
    let messages = cluster.messages(&object(&record)).await;
    assert!(
        messages.contains(&"deprecated weighted affinity specification accepted".to_owned()),
        "{messages:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn read_scope_does_not_allow_changes() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let reader = scoped_token(&cluster, "ci", &["instance.read"]).await;
    assert_eq!(get(&cluster, &reader, &path(&record, "")).await.status, 200);
    let refused = post_action(&cluster, &reader, &record, "poweroff").await;
    assert_eq!(status_and_error(&refused), (403, "token is not scoped for this operation"));
    assert_eq!(try_create(&cluster, &reader, "x", &json!({})).await.status, 403);
}
