//! Operations that somebody deletes, and what goes with their instance.

use muster_control::reconcile;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_is_deleted_in_every_state() {
    let world = World::new(&[]).await;
    let complete = world.run("bytes 100").await;
    let failed = world.done("get", json!({"path": "/no"})).await;
    let long = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    let expired = world.begin("execute", json!({"command_line": "echo x", "deadline_seconds": 0.2})).await;
    let queued = world.begin("execute", json!({"command_line": "echo never"})).await;
    let last = world.begin("execute", json!({"command_line": "echo last"})).await;
    assert_eq!(world.ended(&expired).await["state"], "expired");
    world.started("sleep 600", 1).await;
    for (operation, state) in [
        (&complete, "complete"),
        (&failed, "error"),
        (&expired, "expired"),
        (&queued, "queued"),
        (&long, "executing"),
    ] {
        assert_eq!(world.show(operation).await["state"], state);
        for _ in 0..2 {
            let deleted = world.delete(operation).await;
            assert_eq!(
                (&deleted["state"], &deleted["uuid"]),
                (&json!("deleted"), &operation["uuid"]),
                "{state}"
            );
            assert_eq!(deleted["references_from"], json!({}), "{state}");
        }
        let (own, of_instance) = world.audits(operation).await;
        let message = "agent operation deletion request from REST API".to_owned();
        assert!(own.contains(&message) && of_instance.contains(&message), "{state}: {own:?} {of_instance:?}");
    }
    // What waited behind them is done now, and what was deleted never was.
    assert_eq!(world.ended(&last).await["results"]["0"]["stdout"], "last\n");
    assert!(!world.node().executions(world.id()).contains_key("echo never"));
    assert_eq!(world.show(&long).await["state"], "deleted", "its end does not come later");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_that_is_deleted_leaves_nothing() {
    let world = World::new(&[]).await;
    let blob = world.blob(&[1; 5000]).await;
    world.script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put =
        world.begin("put", json!({"blob_uuid": blob, "path": "/x", "progress_timeout_seconds": 0})).await;
    world.transferring(1).await;
    assert_eq!(world.delete(&put).await["state"], "deleted");
    world.script(GuestScript::default());
    let got = world.done("get", json!({"path": "/x"})).await;
    assert_eq!(got["state"], "error", "{got}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ended_is_removed_after_a_while_and_the_instance_remembers() {
    let world = World::new(&[("CLEANER_DELAY", "0")]).await;
    let complete = world.run("bytes 100").await;
    let blob = complete["results"]["0"]["stdout_blob"].clone();
    let expired = world.begin("execute", json!({"command_line": "sleep 600", "deadline_seconds": 0.2})).await;
    assert_eq!(world.ended(&expired).await["state"], "expired");
    let long = world.begin("execute", json!({"command_line": "sleep 601"})).await;
    world.started("sleep 601", 1).await;
    // What was told of it is written down by now.
    world.audits(&expired).await;
    wait_for("ended operations to be removed", async || {
        reconcile::cleaner::run(&world.cluster.app).await.unwrap();
        let path = format!("/agentoperations/{}", id(&expired));
        (get(&world.cluster, &world.token, &path).await.status == 404).then_some(())
    })
    .await;
    assert_eq!(world.list(true).await, [id(&long)], "what goes on stays");
    assert_eq!(
        world.cluster.count_rows("object_references", "relationship = 'agent_output'").await,
        0,
        "{blob}"
    );
    let of_instance = world.cluster.messages(&ObjectRef::new(ObjectType::Instance, &world.instance)).await;
    assert!(of_instance.contains(&"agent operation expired".to_owned()), "{of_instance:?}");
    assert!(world.cluster.events(&object(&expired)).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_go_with_their_instance() {
    let world = World::new(&[]).await;
    let complete = world.run("bytes 100").await;
    let long = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    let queued = world.begin("execute", json!({"command_line": "echo never"})).await;
    world.started("sleep 600", 1).await;
    let path = format!("/instances/{}", world.instance);
    assert_eq!(world.cluster.call(&world.token, Method::DELETE, &path, None).await.status, 200);
    world.cluster.settle().await;
    for operation in [&complete, &long, &queued] {
        let deleted = world.reaches(operation, "deleted").await;
        assert_eq!(deleted["references_from"], json!({}), "{deleted}");
    }
    assert!(world.list(false).await.is_empty());
    assert_eq!(world.cluster.vms(), []);
}
