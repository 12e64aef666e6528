//! Restarts of guests, agents and daemons during agent operations.

use super::*;

const LOST: &str = "the guest or its agent restarted while the command ran; whether it finished is not known";

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_restarts_its_guest_runs_once() {
    let world = World::new(&[]).await;
    let before = get(&world.cluster, &world.token, "/instances/www").await.body;
    // Time enough to queue the others.
    world.begin("execute", json!({"command_line": "sleep 0.5"})).await;
    let reboot = world.begin("execute", json!({"command_line": "reboot"})).await;
    let after = world.begin("execute", json!({"command_line": "echo up again"})).await;
    let ended = world.ended(&reboot).await;
    assert_eq!((&ended["state"], &ended["error_message"]), (&json!("error"), &json!(LOST)), "{ended}");
    assert_eq!(world.ended(&after).await["results"]["0"]["stdout"], "up again\n");
    assert_eq!(world.node().executions(world.id())["reboot"], 1);
    let record = agent_is(&world.cluster, &world.token, &world.instance, "ready").await;
    let boot = |record: &Value| record["agent_system_boot_time"].as_f64().unwrap();
    assert!(boot(&record) > boot(&before), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_is_begun_again_when_the_guest_is_up_again() {
    let world = World::new(&[]).await;
    let blob = world.blob(&[1; 5000]).await;
    world.script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put =
        world.begin("put", json!({"blob_uuid": blob, "path": "/x", "progress_timeout_seconds": 20})).await;
    world.transferring(1).await;
    world.script(GuestScript::default());
    world.node().restart_guest(world.id());
    let ended = world.ended(&put).await;
    assert_eq!(ended["state"], "complete", "{ended}");
    assert!(ended["attempts"].as_i64().unwrap() >= 2, "{ended}");
    let got = world.done("get", json!({"path": "/x"})).await;
    assert_eq!(world.data(&got["results"]["0"]["content_blob"]).await, [1; 5000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_ran_when_its_agent_ended_is_not_run_again() {
    let world = World::new(&[]).await;
    let long = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    world.started("sleep 600", 1).await;
    world.node().restart_agent(world.id());
    let ended = world.ended(&long).await;
    assert_eq!(ended["state"], "error", "{ended}");
    assert_eq!(world.node().executions(world.id())["sleep 600"], 1);
    assert_eq!(world.run("echo on").await["state"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_without_memory_may_run_a_command_twice_and_that_is_told() {
    let world = World::new(&[]).await;
    world.script(GuestScript { stateless_agent: true, ..GuestScript::default() });
    let long = world.begin("execute", json!({"command_line": "sleep 0.5; echo done"})).await;
    world.started("sleep 0.5; echo done", 1).await;
    world.node().restart_agent(world.id());
    let ended = world.ended(&long).await;
    assert_eq!(ended["results"]["0"]["stdout"], "done\n", "{ended}");
    assert_eq!(world.node().executions(world.id())["sleep 0.5; echo done"], 2);
    let (own, of_instance) = world.audits(&long).await;
    for events in [own, of_instance] {
        assert!(events.iter().any(|message| message.contains("second time")), "{events:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn power_is_lost_in_the_middle() {
    let world = World::new(&[]).await;
    let long = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    let after = world.begin("execute", json!({"command_line": "echo up again"})).await;
    world.started("sleep 600", 1).await;
    for verb in ["poweroff", "poweron"] {
        let path = format!("/instances/{}/{verb}", world.instance);
        assert_eq!(world.cluster.call(&world.token, Method::POST, &path, None).await.status, 200, "{verb}");
    }
    world.cluster.settle().await;
    let ended = world.ended(&long).await;
    assert_eq!((&ended["state"], &ended["error_message"]), (&json!("error"), &json!(LOST)), "{ended}");
    assert_eq!(world.ended(&after).await["results"]["0"]["stdout"], "up again\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_guest_goes_on_where_it_was() {
    let world = World::new(&[]).await;
    let short = world.begin("execute", json!({"command_line": "sleep 0.3; echo done"})).await;
    world.started("sleep 0.3; echo done", 1).await;
    let act = async |verb: &str| {
        let path = format!("/instances/{}/{verb}", world.instance);
        assert_eq!(world.cluster.call(&world.token, Method::POST, &path, None).await.status, 200, "{verb}");
    };
    act("pause").await;
    agent_is(&world.cluster, &world.token, &world.instance, "not ready (instance paused)").await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(world.show(&short).await["state"], "executing");
    act("unpause").await;
    let ended = world.ended(&short).await;
    assert_eq!(ended["results"]["0"]["stdout"], "done\n", "{ended}");
    assert_eq!(world.node().executions(world.id())["sleep 0.3; echo done"], 1);
    agent_is(&world.cluster, &world.token, &world.instance, "ready").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_goes_on_with_a_command() {
    let mut world = World::new(&[]).await;
    let line = "sleep 0.5; echo done; exit 4";
    let runs = world.begin("execute", json!({"command_line": line})).await;
    let waits = world.begin("execute", json!({"command_line": "echo next"})).await;
    world.started(line, 1).await;
    world.cluster.kill().await;
    world.cluster.start();
    let ended = world.ended(&runs).await;
    let result = &ended["results"]["0"];
    assert_eq!((&result["stdout"], &result["return-code"]), (&json!("done\n"), &json!(4)), "{ended}");
    assert_eq!(world.ended(&waits).await["results"]["0"]["stdout"], "next\n");

    // One that ends while no daemon is there.
    let line = "sleep 0.2; seq 1 30000";
    let runs = world.begin("execute", json!({"command_line": line})).await;
    world.started(line, 1).await;
    world.cluster.kill().await;
    tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    assert_eq!(world.show(&runs).await["state"], "executing");
    world.cluster.start();
    let ended = world.ended(&runs).await;
    assert_eq!(ended["state"], "complete", "{ended}");
    assert!(world.data(&ended["results"]["0"]["stdout_blob"]).await.ends_with(b"\n30000\n"));
    let executions = world.node().executions(world.id());
    assert!(executions.values().all(|times| *times == 1), "{executions:?}");
    for operation in [&runs, &waits] {
        let (own, _) = world.audits(operation).await;
        assert!(!own.iter().any(|message| message.contains("second time")), "{own:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_begins_a_transfer_again() {
    let mut world = World::new(&[]).await;
    let blob = world.blob(&[3; 5000]).await;
    world.script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put = world.begin("put", json!({"blob_uuid": blob, "path": "/x", "mode": 384})).await;
    let got = world.begin("get", json!({"path": "/x"})).await;
    world.transferring(1).await;
    world.cluster.kill().await;
    world.script(GuestScript::default());
    world.cluster.start();
    let ended = world.ended(&put).await;
    assert_eq!((&ended["state"], &ended["attempts"]), (&json!("complete"), &json!(2)), "{ended}");
    let got = world.ended(&got).await;
    assert_eq!(got["results"]["0"]["stat_result"]["mode"], json!(0o100_600));
    assert_eq!(world.data(&got["results"]["0"]["content_blob"]).await, [3; 5000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_learns_that_the_guest_was_restarted() {
    let mut world = World::new(&[]).await;
    let runs = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    world.started("sleep 600", 1).await;
    world.cluster.kill().await;
    world.node().restart_guest(world.id());
    world.cluster.start();
    let ended = world.ended(&runs).await;
    assert_eq!((&ended["state"], &ended["error_message"]), (&json!("error"), &json!(LOST)), "{ended}");
    assert_eq!(world.node().executions(world.id())["sleep 600"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_is_deleted_while_no_daemon_is_there_is_ended_by_the_next() {
    let mut world = World::new(&[]).await;
    let runs = world.begin("execute", json!({"command_line": "sleep 2; touch /late"})).await;
    let next = world.begin("execute", json!({"command_line": "echo next"})).await;
    world.started("sleep 2; touch /late", 1).await;
    world.cluster.kill().await;
    assert_eq!(world.delete(&runs).await["state"], "deleted");
    world.cluster.start();
    assert_eq!(world.ended(&next).await["results"]["0"]["stdout"], "next\n");
    let waits = world.run("sleep 2.5; cat /late").await;
    assert_eq!(waits["results"]["0"]["return-code"], 1, "it went on: {waits}");
    assert_eq!(world.show(&runs).await["state"], "deleted");
}
