//! Deletion of agent operations by callers, by the cleaner and with their instance.

use muster_control::reconcile;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn deletes_operation_in_every_state() {
    let fixture = Fixture::new(&[]).await;
    let complete = fixture.run_command("bytes 100").await;
    let failed = fixture.run_operation("get", json!({"path": "/no"})).await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    let expired = fixture.queue("execute", json!({"command_line": "echo x", "deadline_seconds": 0.2})).await;
    let queued = fixture.queue("execute", json!({"command_line": "echo never"})).await;
    let last = fixture.queue("execute", json!({"command_line": "echo last"})).await;
    assert_eq!(fixture.wait_until_ended(&expired).await["state"], "expired");
    fixture.wait_for_execution("sleep 600", 1).await;
    for (operation, state) in [
        (&complete, "complete"),
        (&failed, "error"),
        (&expired, "expired"),
        (&queued, "queued"),
        (&long, "executing"),
    ] {
        assert_eq!(fixture.get_operation(operation).await["state"], state);
        for _ in 0..2 {
            let deleted = fixture.delete_operation(operation).await;
            assert_eq!(
                (&deleted["state"], &deleted["uuid"]),
                (&json!("deleted"), &operation["uuid"]),
                "{state}"
            );
            assert_eq!(deleted["references_from"], json!({}), "{state}");
        }
        let (own_events, instance_events) = fixture.event_messages(operation).await;
        let message = "agent operation deletion request from REST API".to_owned();
        assert!(
            own_events.contains(&message) && instance_events.contains(&message),
            "{state}: {own_events:?} {instance_events:?}"
        );
    }
    // The operation queued behind them completes, and the deleted one never ran.
    assert_eq!(fixture.wait_until_ended(&last).await["results"]["0"]["stdout"], "last\n");
    assert!(!fixture.node().executions(fixture.instance_id()).contains_key("echo never"));
    assert_eq!(
        fixture.get_operation(&long).await["state"],
        "deleted",
        "a late result does not change the state"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_transfer_leaves_no_partial_file() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[1; 5000]).await;
    fixture.set_guest_script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put =
        fixture.queue("put", json!({"blob_uuid": blob, "path": "/x", "progress_timeout_seconds": 0})).await;
    fixture.wait_for_transfers(1).await;
    assert_eq!(fixture.delete_operation(&put).await["state"], "deleted");
    fixture.set_guest_script(GuestScript::default());
    let got = fixture.run_operation("get", json!({"path": "/x"})).await;
    assert_eq!(got["state"], "error", "{got}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cleaner_removes_ended_operations_and_keeps_instance_events() {
    let fixture = Fixture::new(&[("CLEANER_DELAY", "0")]).await;
    let complete = fixture.run_command("bytes 100").await;
    let blob = complete["results"]["0"]["stdout_blob"].clone();
    let expired =
        fixture.queue("execute", json!({"command_line": "sleep 600", "deadline_seconds": 0.2})).await;
    assert_eq!(fixture.wait_until_ended(&expired).await["state"], "expired");
    let long = fixture.queue("execute", json!({"command_line": "sleep 601"})).await;
    fixture.wait_for_execution("sleep 601", 1).await;
    // Flushes events to the database.
    fixture.event_messages(&expired).await;
    wait_for("ended operations to be removed", async || {
        reconcile::cleaner::run(&fixture.cluster.app).await.unwrap();
        let path = format!("/agentoperations/{}", operation_id(&expired));
        (get(&fixture.cluster, &fixture.token, &path).await.status == 404).then_some(())
    })
    .await;
    assert_eq!(fixture.list_operations(true).await, [operation_id(&long)], "running operations are kept");
    assert_eq!(
        fixture.cluster.count_rows("object_references", "relationship = 'agent_output'").await,
        0,
        "{blob}"
    );
    let instance_events =
        fixture.cluster.messages(&ObjectRef::new(ObjectType::Instance, &fixture.instance)).await;
    assert!(instance_events.contains(&"agent operation expired".to_owned()), "{instance_events:?}");
    assert!(fixture.cluster.events(&object(&expired)).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_operations_with_their_instance() {
    let fixture = Fixture::new(&[]).await;
    let complete = fixture.run_command("bytes 100").await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    let queued = fixture.queue("execute", json!({"command_line": "echo never"})).await;
    fixture.wait_for_execution("sleep 600", 1).await;
    let path = format!("/instances/{}", fixture.instance);
    assert_eq!(fixture.cluster.call(&fixture.token, Method::DELETE, &path, None).await.status, 200);
    fixture.cluster.settle().await;
    for operation in [&complete, &long, &queued] {
        let deleted = fixture.wait_for_state(operation, "deleted").await;
        assert_eq!(deleted["references_from"], json!({}), "{deleted}");
    }
    assert!(fixture.list_operations(false).await.is_empty());
    assert_eq!(fixture.cluster.vms(), []);
}
