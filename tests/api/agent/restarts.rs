//! Restarts of guests, agents and daemons during agent operations.

use super::*;

const RESULT_UNKNOWN: &str =
    "the guest or its agent restarted while the command ran; whether it finished is not known";

#[tokio::test(flavor = "multi_thread")]
async fn command_that_reboots_its_guest_runs_once() {
    let fixture = Fixture::new(&[]).await;
    let before = get(&fixture.cluster, &fixture.token, "/instances/www").await.body;
    // Leaves enough time to queue the others.
    fixture.queue("execute", json!({"command_line": "sleep 0.5"})).await;
    let reboot = fixture.queue("execute", json!({"command_line": "reboot"})).await;
    let after = fixture.queue("execute", json!({"command_line": "echo up again"})).await;
    let ended = fixture.wait_until_ended(&reboot).await;
    assert_eq!(
        (&ended["state"], &ended["error_message"]),
        (&json!("error"), &json!(RESULT_UNKNOWN)),
        "{ended}"
    );
    assert_eq!(fixture.wait_until_ended(&after).await["results"]["0"]["stdout"], "up again\n");
    assert_eq!(fixture.node().executions(fixture.instance_id())["reboot"], 1);
    let record = wait_for_agent_state(&fixture.cluster, &fixture.token, &fixture.instance, "ready").await;
    let boot = |record: &Value| record["agent_system_boot_time"].as_f64().unwrap();
    assert!(boot(&record) > boot(&before), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_transfer_after_guest_reboot() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[1; 5000]).await;
    fixture.set_guest_script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put =
        fixture.queue("put", json!({"blob_uuid": blob, "path": "/x", "progress_timeout_seconds": 20})).await;
    fixture.wait_for_transfers(1).await;
    fixture.set_guest_script(GuestScript::default());
    fixture.node().restart_guest(fixture.instance_id());
    let ended = fixture.wait_until_ended(&put).await;
    assert_eq!(ended["state"], "complete", "{ended}");
    assert!(ended["attempts"].as_i64().unwrap() >= 2, "{ended}");
    let got = fixture.run_operation("get", json!({"path": "/x"})).await;
    assert_eq!(fixture.blob_data(&got["results"]["0"]["content_blob"]).await, [1; 5000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn does_not_rerun_command_after_agent_restart() {
    let fixture = Fixture::new(&[]).await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    fixture.wait_for_execution("sleep 600", 1).await;
    fixture.node().restart_agent(fixture.instance_id());
    let ended = fixture.wait_until_ended(&long).await;
    assert_eq!(ended["state"], "error", "{ended}");
    assert_eq!(fixture.node().executions(fixture.instance_id())["sleep 600"], 1);
    assert_eq!(fixture.run_command("echo on").await["state"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_event_when_stateless_agent_reruns_command() {
    let fixture = Fixture::new(&[]).await;
    fixture.set_guest_script(GuestScript { stateless_agent: true, ..GuestScript::default() });
    let long = fixture.queue("execute", json!({"command_line": "sleep 0.5; echo done"})).await;
    fixture.wait_for_execution("sleep 0.5; echo done", 1).await;
    fixture.node().restart_agent(fixture.instance_id());
    let ended = fixture.wait_until_ended(&long).await;
    assert_eq!(ended["results"]["0"]["stdout"], "done\n", "{ended}");
    assert_eq!(fixture.node().executions(fixture.instance_id())["sleep 0.5; echo done"], 2);
    let (own_events, instance_events) = fixture.event_messages(&long).await;
    for events in [own_events, instance_events] {
        assert!(events.iter().any(|message| message.contains("second time")), "{events:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn power_cycle_fails_running_command() {
    let fixture = Fixture::new(&[]).await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    let after = fixture.queue("execute", json!({"command_line": "echo up again"})).await;
    fixture.wait_for_execution("sleep 600", 1).await;
    for verb in ["poweroff", "poweron"] {
        let path = format!("/instances/{}/{verb}", fixture.instance);
        assert_eq!(
            fixture.cluster.call(&fixture.token, Method::POST, &path, None).await.status,
            200,
            "{verb}"
        );
    }
    fixture.cluster.settle().await;
    let ended = fixture.wait_until_ended(&long).await;
    assert_eq!(
        (&ended["state"], &ended["error_message"]),
        (&json!("error"), &json!(RESULT_UNKNOWN)),
        "{ended}"
    );
    assert_eq!(fixture.wait_until_ended(&after).await["results"]["0"]["stdout"], "up again\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_guest_continues_command_after_unpause() {
    let fixture = Fixture::new(&[]).await;
    let short = fixture.queue("execute", json!({"command_line": "sleep 0.3; echo done"})).await;
    fixture.wait_for_execution("sleep 0.3; echo done", 1).await;
    let post_action = async |verb: &str| {
        let path = format!("/instances/{}/{verb}", fixture.instance);
        assert_eq!(
            fixture.cluster.call(&fixture.token, Method::POST, &path, None).await.status,
            200,
            "{verb}"
        );
    };
    post_action("pause").await;
    wait_for_agent_state(&fixture.cluster, &fixture.token, &fixture.instance, "not ready (instance paused)")
        .await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(fixture.get_operation(&short).await["state"], "executing");
    post_action("unpause").await;
    let ended = fixture.wait_until_ended(&short).await;
    assert_eq!(ended["results"]["0"]["stdout"], "done\n", "{ended}");
    assert_eq!(fixture.node().executions(fixture.instance_id())["sleep 0.3; echo done"], 1);
    wait_for_agent_state(&fixture.cluster, &fixture.token, &fixture.instance, "ready").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_daemon_resumes_command() {
    let mut fixture = Fixture::new(&[]).await;
    let command = "sleep 0.5; echo done; exit 4";
    let running = fixture.queue("execute", json!({"command_line": command})).await;
    let queued = fixture.queue("execute", json!({"command_line": "echo next"})).await;
    fixture.wait_for_execution(command, 1).await;
    fixture.cluster.kill().await;
    fixture.cluster.start();
    let ended = fixture.wait_until_ended(&running).await;
    let result = &ended["results"]["0"];
    assert_eq!((&result["stdout"], &result["return-code"]), (&json!("done\n"), &json!(4)), "{ended}");
    assert_eq!(fixture.wait_until_ended(&queued).await["results"]["0"]["stdout"], "next\n");

    // A command that ends while no daemon runs.
    let command = "sleep 0.2; seq 1 30000";
    let running = fixture.queue("execute", json!({"command_line": command})).await;
    fixture.wait_for_execution(command, 1).await;
    fixture.cluster.kill().await;
    tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    assert_eq!(fixture.get_operation(&running).await["state"], "executing");
    fixture.cluster.start();
    let ended = fixture.wait_until_ended(&running).await;
    assert_eq!(ended["state"], "complete", "{ended}");
    assert!(fixture.blob_data(&ended["results"]["0"]["stdout_blob"]).await.ends_with(b"\n30000\n"));
    let executions = fixture.node().executions(fixture.instance_id());
    assert!(executions.values().all(|times| *times == 1), "{executions:?}");
    for operation in [&running, &queued] {
        let (own_events, _) = fixture.event_messages(operation).await;
        assert!(!own_events.iter().any(|message| message.contains("second time")), "{own_events:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_daemon_restarts_transfer() {
    let mut fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(&[3; 5000]).await;
    fixture.set_guest_script(GuestScript { stall_after_bytes: Some(1000), ..GuestScript::default() });
    let put = fixture.queue("put", json!({"blob_uuid": blob, "path": "/x", "mode": 384})).await;
    let download = fixture.queue("get", json!({"path": "/x"})).await;
    fixture.wait_for_transfers(1).await;
    fixture.cluster.kill().await;
    fixture.set_guest_script(GuestScript::default());
    fixture.cluster.start();
    let ended = fixture.wait_until_ended(&put).await;
    assert_eq!((&ended["state"], &ended["attempts"]), (&json!("complete"), &json!(2)), "{ended}");
    let download = fixture.wait_until_ended(&download).await;
    assert_eq!(download["results"]["0"]["stat_result"]["mode"], json!(0o100_600));
    assert_eq!(fixture.blob_data(&download["results"]["0"]["content_blob"]).await, [3; 5000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_daemon_detects_guest_reboot() {
    let mut fixture = Fixture::new(&[]).await;
    let running = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    fixture.wait_for_execution("sleep 600", 1).await;
    fixture.cluster.kill().await;
    fixture.node().restart_guest(fixture.instance_id());
    fixture.cluster.start();
    let ended = fixture.wait_until_ended(&running).await;
    assert_eq!(
        (&ended["state"], &ended["error_message"]),
        (&json!("error"), &json!(RESULT_UNKNOWN)),
        "{ended}"
    );
    assert_eq!(fixture.node().executions(fixture.instance_id())["sleep 600"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_daemon_kills_command_deleted_meanwhile() {
    let mut fixture = Fixture::new(&[]).await;
    let running = fixture.queue("execute", json!({"command_line": "sleep 2; touch /late"})).await;
    let next = fixture.queue("execute", json!({"command_line": "echo next"})).await;
    fixture.wait_for_execution("sleep 2; touch /late", 1).await;
    fixture.cluster.kill().await;
    assert_eq!(fixture.delete_operation(&running).await["state"], "deleted");
    fixture.cluster.start();
    assert_eq!(fixture.wait_until_ended(&next).await["results"]["0"]["stdout"], "next\n");
    let check = fixture.run_command("sleep 2.5; cat /late").await;
    assert_eq!(check["results"]["0"]["return-code"], 1, "the deleted command continued: {check}");
    assert_eq!(fixture.get_operation(&running).await["state"], "deleted");
}
