use serde_json::json;

use super::super::instance_tables::tests::example;
use super::*;
use crate::fake_server::FakeServer;
use crate::output::Format;

#[test]
fn failure_is_a_state_that_cannot_become_running() {
    for state in ["initial", "preflight", "creating", "created"] {
        assert_eq!(failure(&example(&json!({ "state": state }))), None, "{state}");
    }
    let broken = example(&json!({ "state": "error", "error_message": "no image" }));
    assert_eq!(failure(&broken).as_deref(), Some("no image"));
    assert!(failure(&example(&json!({ "state": "deleted" }))).unwrap().contains("deleted"));
    assert!(failure(&example(&json!({ "state": "creating-error" }))).is_some());
}

#[test]
fn phase_names_node_and_image() {
    let at =
        |state: &str, node: Value, image| phase(&example(&json!({ "state": state, "node": node })), image);
    assert_eq!(at("initial", json!(null), None), "placing");
    assert_eq!(at("initial", json!("sim-1"), None), "preparing on sim-1");
    assert_eq!(at("preflight", json!("sim-1"), Some("tiny")), "fetching tiny on sim-1");
    assert_eq!(at("creating", json!("sim-1"), Some("tiny")), "building and starting on sim-1");
}

const ID: &str = "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

fn arguments(line: &str) -> Arguments {
    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }
    let words = std::iter::once("create").chain(line.split_whitespace());
    <Line as clap::Parser>::try_parse_from(words).unwrap().arguments
}

fn at(state: &str) -> (u16, Value) {
    (
        200,
        json!(example(&json!({ "state": state, "error_message": (state == "error").then_some("no image") }))),
    )
}

#[tokio::test]
async fn waits_until_the_instance_runs() {
    let (client, fake) = FakeServer::start(vec![
        ("POST /instances", vec![at("initial")]),
        ("GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![at("creating"), at("created")]),
    ])
    .await;
    let session = Session { client, format: Format::Json };
    create(&session, arguments("web --disk 8@a:b --network lan --tag big --memory 2G")).await.unwrap();
    let requests = fake.requests();
    let body = requests.iter().find_map(|call| call.strip_prefix("POST /instances ")).unwrap();
    let expected = json!({
        "name": "web", "cpus": 1, "memory": 2048, "uefi": false, "secure_boot": false,
        "disk": [{ "size": 8, "base": "a:b", "bus": "virtio", "type": "disk" }],
        "network": [{ "network_uuid": "lan", "float": false }],
        "configdrive": "openstack-disk", "metadata": { "tags": ["big"] }
    });
    assert_eq!(serde_json::from_str::<Value>(body).unwrap(), expected);
    assert_eq!(requests.last().unwrap(), &format!("GET /instances/{ID}"));
}

#[tokio::test]
async fn failure_contains_the_reason() {
    let (client, _) = FakeServer::start(vec![
        ("POST /instances", vec![at("initial")]),
        ("GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![at("error")]),
    ])
    .await;
    let session = Session { client, format: Format::Table };
    let error = create(&session, arguments("web --disk 8")).await.unwrap_err().to_string();
    assert!(error.starts_with("instance web failed: no image; "), "{error}");
}

#[tokio::test]
async fn explains_a_scheduling_refusal() {
    let full =
        json!({ "error": "No nodes remaining", "status": 507, "stage": "queue_state", "transient": true });
    let event = json!({
        "event_uuid": "x", "request_id": null, "timestamp": 1.0, "event_type": "status", "type": "status",
        "message": "schedule has no candidates at stage queue_state, aborting", "extra": {}, "node": "",
        "fqdn": "", "duration": null
    });
    let (client, fake) = FakeServer::start(vec![
        ("POST /instances", vec![(507, full)]),
        ("GET /instances", vec![(200, json!([at("error").1]))]),
        (
            "GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/events",
            vec![(200, json!([])), (200, json!([event]))],
        ),
    ])
    .await;
    let session = Session { client, format: Format::Table };
    let error = create(&session, arguments("web --disk 8")).await.unwrap_err().to_string();
    let expected = format!(
        "No nodes remaining: try again in a minute; a later attempt may succeed; delete the failed instance with `muster \
         instance delete {ID}`"
    );
    assert_eq!(error, expected);
    assert_eq!(fake.requests().len(), 5);
}

#[tokio::test]
async fn does_not_advise_to_retry_what_no_node_can_take() {
    let full = json!({
        "error": "No nodes remaining at scheduling stage sufficient_idle_memory: no node is large enough for this instance",
        "status": 507, "stage": "sufficient_idle_memory", "transient": false
    });
    let (client, _) = FakeServer::start(vec![
        ("POST /instances", vec![(507, full)]),
        ("GET /instances", vec![(200, json!([]))]),
    ])
    .await;
    let session = Session { client, format: Format::Table };
    let error = create(&session, arguments("web --disk 8")).await.unwrap_err().to_string();
    assert!(
        error.ends_with("this instance: request less, or let an administrator add a larger node"),
        "{error}"
    );
}
