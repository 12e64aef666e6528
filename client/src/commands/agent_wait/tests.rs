use serde_json::{Value, json};

use super::super::agent::tests::example;
use super::super::instance_tables::tests::example as instance;
use super::*;
use crate::fake_server::FakeServer;

const EXECUTE: &str = "POST /instances/web/agent/execute";

fn refused() -> (u16, Value) {
    (400, json!({ "error": "instance agent not ready", "status": 400 }))
}

fn agent_is(state: &str) -> (u16, Value) {
    (200, json!(instance(&json!({ "agent_state": state }))))
}

async fn submit_with(
    responses: Vec<(u16, Value)>,
    instances: Vec<(u16, Value)>,
    wait: u32,
) -> (anyhow::Result<()>, Vec<String>) {
    let (client, fake) =
        FakeServer::start(vec![(EXECUTE, responses), ("GET /instances/web", instances)]).await;
    let request = async || client.execute("web", "uptime", None).await;
    let pending = PendingOperation::default();
    let response = submit(&client, "web", ReadinessArguments { wait }, &pending, request).await.map(drop);
    assert_eq!(response.is_ok(), pending.operation.get().is_some());
    (response, fake.requests())
}

#[tokio::test]
async fn waits_for_an_agent_that_is_not_ready_if_requested() {
    let done = (200, json!(example(&json!({ "state": "queued" }))));
    let starting = agent_is("not ready (agent startup)");
    let states = vec![starting.clone(), agent_is("ready (degraded)")];
    let (response, calls) = submit_with(vec![refused(), done], states, 9).await;
    response.unwrap();
    assert_eq!(calls.iter().filter(|call| call.starts_with(EXECUTE)).count(), 2);
    let (response, calls) = submit_with(vec![refused()], vec![starting], 0).await;
    let error = response.unwrap_err().to_string();
    assert!(
        error.starts_with("the agent of instance web is not ready (agent startup); the instance"),
        "{error}"
    );
    assert_eq!(calls.len(), 2);
}

#[tokio::test]
async fn does_not_wait_for_a_failed_instance() {
    let error = (406, json!({ "error": "instance x is not ready (error)" }));
    let failed = (200, json!(instance(&json!({ "state": "error" }))));
    let (response, _) = submit_with(vec![error], vec![failed], 600).await;
    assert!(response.unwrap_err().to_string().starts_with("instance web is in state error; "));
    let mode = (406, json!({ "error": "invalid mode: x" }));
    assert_eq!(
        submit_with(vec![mode], vec![agent_is("ready")], 600).await.0.unwrap_err().to_string(),
        "invalid mode: x"
    );
}

#[tokio::test]
async fn tolerates_a_short_outage_of_the_server() {
    let record = example(&json!({}));
    let executing = (200, json!(example(&json!({ "state": "executing" }))));
    let outage = (503, json!({ "error": "draining" }));
    let (client, _) = FakeServer::start(vec![(
        "GET /agentoperations/7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        vec![executing, outage.clone(), outage, (200, json!(record))],
    )])
    .await;
    let seen = Cell::new(0);
    let response = wait_until_final(&client, record.uuid, |_| seen.set(seen.get() + 1)).await.unwrap();
    assert_eq!((response.value().unwrap(), seen.get()), (record, 1));
}

#[tokio::test]
async fn does_not_wait_for_a_missing_operation() {
    let (client, _) = FakeServer::start(vec![]).await;
    let record = example(&json!({}));
    let error = wait_until_final(&client, record.uuid, |_| {}).await.unwrap_err().to_string();
    assert!(error.starts_with("not found; the outcome of agent operation 7d5e1b5a"), "{error}");
}

#[test]
fn distinguishes_expired_and_failed_operations() {
    check_success(&example(&json!({}))).unwrap();
    let expired = example(&json!({ "state": "expired", "expiry_reason": "deadline" }));
    let text = "timed out: its deadline timeout expired".to_owned();
    assert_eq!(check_success(&expired), Err(AgentFailure::Expired(text)));
    let failed = example(&json!({ "state": "error", "error_message": "a\nb" }));
    assert_eq!(check_success(&failed), Err(AgentFailure::Other("a\\nb".to_owned())));
}

#[test]
fn timeouts_are_numbers_of_seconds() {
    assert_eq!((parse_seconds("0"), parse_seconds("1.5")), (Ok(0.0), Ok(1.5)));
    for text in ["-1", "inf", "NaN", "1m", ""] {
        assert!(parse_seconds(text).is_err(), "{text}");
    }
}
