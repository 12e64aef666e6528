//! How long an operation may take.

use std::time::Instant;

use muster_store::Retry;

use super::*;

async fn is_expired(world: &World, operation: &Value, reason: &str) -> Value {
    let ended = world.ended(operation).await;
    assert_eq!((&ended["state"], &ended["expiry_reason"]), (&json!("expired"), &json!(reason)), "{ended}");
    let (own, of_instance) = world.audits(operation).await;
    for events in [own, of_instance] {
        let told = events.iter().filter(|message| *message == "agent operation expired").count();
        assert_eq!(told, 1, "{events:?}");
    }
    ended
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_command_that_runs_and_those_that_wait() {
    let world = World::new(&[]).await;
    let begun = Instant::now();
    let long = world.begin("execute", json!({"command_line": "sleep 600", "deadline_seconds": 1.5})).await;
    let waits = world.begin("execute", json!({"command_line": "echo never", "deadline_seconds": 0.3})).await;
    let last = world.begin("execute", json!({"command_line": "echo last"})).await;
    let waited = is_expired(&world, &waits, "deadline").await;
    assert_eq!((&waited["attempts"], &waited["results"]), (&json!(0), &json!({})));
    is_expired(&world, &long, "deadline").await;
    assert!(begun.elapsed().as_secs_f64() >= 1.5);
    assert_eq!(world.ended(&last).await["results"]["0"]["stdout"], "last\n");
    assert!(begun.elapsed().as_secs() < 20);
    assert!(!world.node().executions(world.id()).contains_key("echo never"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_transfer() {
    let world = World::new(&[]).await;
    let blob = world.blob(&vec![1; 200_000]).await;
    world.script(GuestScript { bytes_per_second: Some(1000), ..GuestScript::default() });
    let body =
        json!({"blob_uuid": blob, "path": "/x", "deadline_seconds": 0.5, "progress_timeout_seconds": 0});
    let put = world.begin("put", body).await;
    assert_eq!(put["progress_timeout"], json!(0.0));
    let ended = is_expired(&world, &put, "deadline").await;
    assert_eq!(ended["references_from"], json!({}), "{ended}");
    world.script(GuestScript::default());
    let got = world.done("get", json!({"path": "/x"})).await;
    assert_eq!(got["state"], "error", "nothing was left in the guest: {got}");
}

/// Says that every copy of every blob is in a state.
async fn set_copies(world: &World, state: &str) {
    let mut tx = world.cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE blob_locations SET state = ?", &[state.to_owned().into()]).await.unwrap();
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_an_operation_whose_blob_does_not_come() {
    let world = World::new(&[]).await;
    let blob = world.blob(&[7; 5000]).await;
    // No node has it whole, so that none can get it.
    set_copies(&world, "coming").await;
    let put = world.begin("put", json!({"blob_uuid": blob, "path": "/x", "deadline_seconds": 0.8})).await;
    let behind = world.begin("execute", json!({"command_line": "echo behind"})).await;
    assert_eq!((&put["state"], &behind["state"]), (&json!("preflight"), &json!("queued")));
    let held = &put["references_from"]["agent_input"][0];
    assert_eq!(held["target_uuid"], json!(blob), "the blob is held meanwhile: {put}");
    let ended = is_expired(&world, &put, "deadline").await;
    assert_eq!((&ended["attempts"], &ended["references_from"]), (&json!(0), &json!({})), "{ended}");
    assert_eq!(world.ended(&behind).await["results"]["0"]["stdout"], "behind\n");
    assert_eq!(world.done("get", json!({"path": "/x"})).await["state"], "error", "nothing arrived");

    // One that has more time gets it in the end, and what is behind it waits.
    let put = world.begin("put", json!({"blob_uuid": blob, "path": "/x"})).await;
    let cat = world.begin("get", json!({"path": "/x"})).await;
    let soon = world.begin("execute", json!({"command_line": "echo no", "deadline_seconds": 0.3})).await;
    is_expired(&world, &soon, "deadline").await;
    assert_eq!(
        (&world.show(&put).await["state"], &world.show(&cat).await["state"]),
        (&json!("preflight"), &json!("queued"))
    );
    set_copies(&world, "whole").await;
    assert_eq!(world.ended(&put).await["state"], "complete");
    assert_eq!(world.ended(&cat).await["results"]["0"]["stat_result"]["size"], json!(5000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_tried_again_and_then_given_up() {
    let world = World::new(&[]).await;
    let blob = world.blob(&[1; 5000]).await;
    assert_eq!(world.done("put", json!({"blob_uuid": blob, "path": "/x"})).await["state"], "complete");
    world.script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    for (verb, body) in [
        ("put", json!({"blob_uuid": blob, "path": "/y", "progress_timeout_seconds": 0.3})),
        ("get", json!({"path": "/x", "progress_timeout_seconds": 0.3})),
    ] {
        let operation = world.begin(verb, body).await;
        assert_eq!(operation["progress_timeout"], json!(0.3));
        let ended = is_expired(&world, &operation, "progress").await;
        assert_eq!(ended["attempts"], json!(3), "{ended}");
        assert_eq!(ended["references_from"], json!({}), "{ended}");
    }
    world.script(GuestScript::default());
    assert_eq!(world.done("get", json!({"path": "/y"})).await["state"], "error", "nothing was left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_that_stalls_once_succeeds_the_second_time() {
    let world = World::new(&[]).await;
    let blob = world.blob(&[1; 5000]).await;
    world.script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put =
        world.begin("put", json!({"blob_uuid": blob, "path": "/x", "progress_timeout_seconds": 1})).await;
    world.transferring(1).await;
    world.script(GuestScript::default());
    let ended = world.ended(&put).await;
    assert_eq!((&ended["state"], &ended["attempts"]), (&json!("complete"), &json!(2)), "{ended}");
    assert_eq!(ended["expiry_reason"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_transfer_that_moves_does_not_stall() {
    let world = World::new(&[]).await;
    let blob = world.blob(&[1; 20_000]).await;
    assert_eq!(world.done("put", json!({"blob_uuid": blob, "path": "/x"})).await["state"], "complete");
    world.script(GuestScript { bytes_per_second: Some(10_000), ..GuestScript::default() });
    let got = world.done("get", json!({"path": "/x", "progress_timeout_seconds": 1})).await;
    assert_eq!((&got["state"], &got["attempts"]), (&json!("complete"), &json!(1)), "{got}");
    assert_eq!(world.data(&got["results"]["0"]["content_blob"]).await.len(), 20_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_holds_up_the_others_for_ever() {
    let world = World::new(&[("AGENT_OPERATION_MAX_DEADLINE", "1")]).await;
    let long = world.begin("execute", json!({"command_line": "sleep 600", "deadline_seconds": 0})).await;
    assert_eq!((&long["deadline"], &long["progress_timeout"]), (&json!(0.0), &json!(0.0)));
    is_expired(&world, &long, "deadline").await;
    assert_eq!(
        world.done("execute", json!({"command_line": "true", "deadline_seconds": 1})).await["state"],
        "complete"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_said_is_as_the_operator_set_it() {
    let settings =
        [("AGENT_OPERATION_DEFAULT_DEADLINE", "0"), ("AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT", "7")];
    let world = World::new(&settings).await;
    let got = world.begin("get", json!({"path": "/etc/hostname"})).await;
    assert_eq!((&got["deadline"], &got["progress_timeout"]), (&json!(0.0), &json!(7.0)));
    let got = world.begin("get", json!({"path": "/etc/hostname", "progress_timeout_seconds": 0.0})).await;
    assert_eq!(got["progress_timeout"], json!(0.0));
    let ran = world.begin("execute", json!({"command_line": "true", "deadline_seconds": 30})).await;
    assert!(ran["deadline"].as_f64().unwrap() > muster_types::time::now() + 20.0);
    assert_eq!(world.ended(&ran).await["state"], "complete");
}
