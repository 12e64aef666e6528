use serde_json::{Value, json};

use super::super::instance_tables::tests::example;
use super::*;
use crate::fake_server::FakeServer;

const IDS: [&str; 2] = ["5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "6d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"];

/// Starts a server with two instances of the same name in these states and namespaces.
async fn two_instances(instances: [(&str, &str); 2]) -> Client {
    let list: Vec<Value> = IDS
        .iter()
        .zip(instances)
        .map(|(id, (state, namespace))| {
            json!(example(&json!({ "uuid": id, "state": state, "namespace": namespace })))
        })
        .collect();
    let event = json!({
        "event_uuid": "x", "request_id": null, "timestamp": now() - 7200.0, "event_type": "audit", "type": "audit",
        "message": "created", "extra": {}, "node": "", "fqdn": "", "duration": null
    });
    let several = (400, json!({ "error": "multiple instances have the name \"web\"", "status": 400 }));
    let routes = vec![
        ("GET /instances/web", vec![several]),
        ("GET /instances", vec![(200, json!(list))]),
        ("GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/events", vec![(200, json!([event]))]),
    ];
    FakeServer::start(routes).await.0
}

async fn resolved(client: &Client) -> anyhow::Result<String> {
    let mut reference = "web".to_owned();
    resolve(client, NamedType::Instance, &mut reference, None).await.map(|()| reference)
}

#[tokio::test]
async fn ambiguity_lists_id_state_and_age_of_the_candidates() {
    let client = two_instances([("created", "ci"), ("created", "ci")]).await;
    let expected = format!(
        "2 instances have the name web: {} (created, created 2 h ago, namespace ci), {} (created, created at an unknown time, \
         namespace ci); give a UUID instead of the name",
        IDS[0], IDS[1]
    );
    let error = resolved(&client).await.unwrap_err();
    assert_eq!((error.to_string(), Outcome::of(&error)), (expected, Outcome::Refused));
}

#[tokio::test]
async fn name_refers_to_the_only_instance_that_has_not_failed() {
    for other in ["error", "creating-error", "delete-wait"] {
        let client = two_instances([(other, "ci"), ("created", "ci")]).await;
        assert_eq!(resolved(&client).await.unwrap(), IDS[1], "{other}");
        // The command could mean either of them.
        let error = require_unambiguous(&client, NamedType::Instance, "web", None).await.unwrap_err();
        assert!(IDS.iter().all(|id| error.to_string().contains(id)), "{error}");
    }
    let client = two_instances([("error", "ci"), ("error", "ci")]).await;
    assert!(resolved(&client).await.unwrap_err().to_string().contains("error, created 2 h ago"));
}

#[tokio::test]
async fn own_namespace_precedes_others() {
    let client = two_instances([("created", "ci"), ("created", "production")]).await;
    assert_eq!(resolved(&client).await.unwrap(), IDS[0]);
    let client = two_instances([("created", "test"), ("created", "production")]).await;
    assert!(resolved(&client).await.is_err());
}

#[tokio::test]
async fn id_and_unambiguous_name_are_not_replaced() {
    let (client, fake) =
        FakeServer::start(vec![("GET /instances/web", vec![(200, json!(example(&json!({}))))])]).await;
    assert_eq!(resolved(&client).await.unwrap(), "web");
    let mut id = IDS[0].to_owned();
    resolve(&client, NamedType::Instance, &mut id, None).await.unwrap();
    assert_eq!((id.as_str(), fake.requests().len()), (IDS[0], 1));
}
