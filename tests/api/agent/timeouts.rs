//! Deadlines and progress timeouts of agent operations.

use std::time::Instant;

use muster_store::Retry;

use super::*;

async fn assert_expired(fixture: &Fixture, operation: &Value, reason: &str) -> Value {
    let ended = fixture.wait_until_ended(operation).await;
    assert_eq!((&ended["state"], &ended["expiry_reason"]), (&json!("expired"), &json!(reason)), "{ended}");
    let count =
        |events: &[String]| events.iter().filter(|message| *message == "agent operation expired").count();
    // The events are recorded after the state.
    let (own_events, instance_events) = wait_for("the events", async || {
        let (own, instance) = fixture.event_messages(operation).await;
        (count(&own) > 0 && count(&instance) > 0).then_some((own, instance))
    })
    .await;
    assert_eq!((count(&own_events), count(&instance_events)), (1, 1), "{own_events:?}, {instance_events:?}");
    ended
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_expires_running_and_queued_commands() {
    let fixture = Fixture::new(&[]).await;
    let start = Instant::now();
    let long = fixture.queue("execute", json!({"command_line": "sleep 600", "deadline_seconds": 1.5})).await;
    let queued =
        fixture.queue("execute", json!({"command_line": "echo never", "deadline_seconds": 0.3})).await;
    let last = fixture.queue("execute", json!({"command_line": "echo last"})).await;
    let expired = assert_expired(&fixture, &queued, "deadline").await;
    assert_eq!((&expired["attempts"], &expired["results"]), (&json!(0), &json!({})));
    assert_expired(&fixture, &long, "deadline").await;
    assert!(start.elapsed().as_secs_f64() >= 1.5);
    assert_eq!(fixture.wait_until_ended(&last).await["results"]["0"]["stdout"], "last\n");
    assert!(start.elapsed().as_secs() < 20);
    assert!(!fixture.node().executions(fixture.instance_id()).contains_key("echo never"));
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_expires_transfer() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&vec![1; 200_000]).await;
    fixture.set_guest_script(GuestScript { bytes_per_second: Some(1000), ..GuestScript::default() });
    let body =
        json!({"blob_uuid": blob, "path": "/x", "deadline_seconds": 0.5, "progress_timeout_seconds": 0});
    let put = fixture.queue("put", body).await;
    assert_eq!(put["progress_timeout"], json!(0.0));
    let ended = assert_expired(&fixture, &put, "deadline").await;
    assert_eq!(ended["references_from"], json!({}), "{ended}");
    fixture.set_guest_script(GuestScript::default());
    let got = fixture.run_operation("get", json!({"path": "/x"})).await;
    assert_eq!(got["state"], "error", "no partial file remains in the guest: {got}");
}

/// Sets the state of every replica of every blob.
async fn set_replica_states(fixture: &Fixture, state: &str) {
    let mut tx = fixture.cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE blob_locations SET state = ?", &[state.to_owned().into()]).await.unwrap();
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_expires_put_whose_blob_is_unavailable() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[7; 5000]).await;
    // No node has a complete replica, so that none can fetch the blob.
    set_replica_states(&fixture, "coming").await;
    let put = fixture.queue("put", json!({"blob_uuid": blob, "path": "/x", "deadline_seconds": 0.8})).await;
    let behind = fixture.queue("execute", json!({"command_line": "echo behind"})).await;
    assert_eq!((&put["state"], &behind["state"]), (&json!("preflight"), &json!("queued")));
    let reference = &put["references_from"]["agent_input"][0];
    assert_eq!(reference["target_uuid"], json!(blob), "the blob is referenced meanwhile: {put}");
    let ended = assert_expired(&fixture, &put, "deadline").await;
    assert_eq!((&ended["attempts"], &ended["references_from"]), (&json!(0), &json!({})), "{ended}");
    assert_eq!(fixture.wait_until_ended(&behind).await["results"]["0"]["stdout"], "behind\n");
    assert_eq!(
        fixture.run_operation("get", json!({"path": "/x"})).await["state"],
        "error",
        "the file was not written"
    );

    // An operation with a later deadline gets the blob eventually, and the ones behind it wait.
    let put = fixture.queue("put", json!({"blob_uuid": blob, "path": "/x"})).await;
    let cat = fixture.queue("get", json!({"path": "/x"})).await;
    let short_deadline =
        fixture.queue("execute", json!({"command_line": "echo no", "deadline_seconds": 0.3})).await;
    assert_expired(&fixture, &short_deadline, "deadline").await;
    assert_eq!(
        (&fixture.get_operation(&put).await["state"], &fixture.get_operation(&cat).await["state"]),
        (&json!("preflight"), &json!("queued"))
    );
    set_replica_states(&fixture, "whole").await;
    assert_eq!(fixture.wait_until_ended(&put).await["state"], "complete");
    assert_eq!(fixture.wait_until_ended(&cat).await["results"]["0"]["stat_result"]["size"], json!(5000));
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_transfer_expires_after_retries() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[1; 5000]).await;
    assert_eq!(
        fixture.run_operation("put", json!({"blob_uuid": blob, "path": "/x"})).await["state"],
        "complete"
    );
    fixture.set_guest_script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    for (verb, body) in [
        ("put", json!({"blob_uuid": blob, "path": "/y", "progress_timeout_seconds": 0.3})),
        ("get", json!({"path": "/x", "progress_timeout_seconds": 0.3})),
    ] {
        let operation = fixture.queue(verb, body).await;
        assert_eq!(operation["progress_timeout"], json!(0.3));
        let ended = assert_expired(&fixture, &operation, "progress").await;
        assert_eq!(ended["attempts"], json!(3), "{ended}");
        assert_eq!(ended["references_from"], json!({}), "{ended}");
    }
    fixture.set_guest_script(GuestScript::default());
    assert_eq!(
        fixture.run_operation("get", json!({"path": "/y"})).await["state"],
        "error",
        "no partial file remains"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn transfer_that_stalls_once_succeeds_on_retry() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[1; 5000]).await;
    fixture.set_guest_script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put =
        fixture.queue("put", json!({"blob_uuid": blob, "path": "/x", "progress_timeout_seconds": 1})).await;
    fixture.wait_for_transfers(1).await;
    fixture.set_guest_script(GuestScript::default());
    let ended = fixture.wait_until_ended(&put).await;
    assert_eq!((&ended["state"], &ended["attempts"]), (&json!("complete"), &json!(2)), "{ended}");
    assert_eq!(ended["expiry_reason"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_transfer_with_progress_completes() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[1; 20_000]).await;
    assert_eq!(
        fixture.run_operation("put", json!({"blob_uuid": blob, "path": "/x"})).await["state"],
        "complete"
    );
    fixture.set_guest_script(GuestScript { bytes_per_second: Some(10_000), ..GuestScript::default() });
    let got = fixture.run_operation("get", json!({"path": "/x", "progress_timeout_seconds": 1})).await;
    assert_eq!((&got["state"], &got["attempts"]), (&json!("complete"), &json!(1)), "{got}");
    assert_eq!(fixture.blob_data(&got["results"]["0"]["content_blob"]).await.len(), 20_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn maximum_deadline_limits_operations_without_deadline() {
    let fixture = Fixture::new(&[("AGENT_OPERATION_MAX_DEADLINE", "1")]).await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600", "deadline_seconds": 0})).await;
    assert_eq!((&long["deadline"], &long["progress_timeout"]), (&json!(0.0), &json!(0.0)));
    assert_expired(&fixture, &long, "deadline").await;
    assert_eq!(
        fixture.run_operation("execute", json!({"command_line": "true", "deadline_seconds": 1})).await["state"],
        "complete"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn omitted_timeouts_default_to_settings() {
    let settings =
        [("AGENT_OPERATION_DEFAULT_DEADLINE", "0"), ("AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT", "7")];
    let fixture = Fixture::new(&settings).await;
    let got = fixture.queue("get", json!({"path": "/etc/hostname"})).await;
    assert_eq!((&got["deadline"], &got["progress_timeout"]), (&json!(0.0), &json!(7.0)));
    let got = fixture.queue("get", json!({"path": "/etc/hostname", "progress_timeout_seconds": 0.0})).await;
    assert_eq!(got["progress_timeout"], json!(0.0));
    let executed = fixture.queue("execute", json!({"command_line": "true", "deadline_seconds": 30})).await;
    assert!(executed["deadline"].as_f64().unwrap() > muster_types::time::now() + 20.0);
    assert_eq!(fixture.wait_until_ended(&executed).await["state"], "complete");
}
