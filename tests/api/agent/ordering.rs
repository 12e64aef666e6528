//! Agent operations run one at a time per guest and concurrently across guests.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn runs_operations_in_submission_order() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(b"first").await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    let put = fixture.queue("put", json!({"blob_uuid": blob, "path": "/first", "mode": 420})).await;
    let cat = fixture.queue("execute", json!({"command_line": "cat /first"})).await;
    let get_file = fixture.queue("get", json!({"path": "/first"})).await;
    let chmod = fixture.queue("execute", json!({"command_line": "chmod 600 /first"})).await;
    fixture.wait_for_state(&long, "executing").await;
    fixture.wait_for_state(&put, "queued").await;
    let all = [&long, &put, &cat, &get_file, &chmod].map(|operation| operation_id(operation).to_owned());
    assert_eq!(fixture.list_operations(false).await, all);
    let record = get(&fixture.cluster, &fixture.token, "/instances/www").await.body;
    let queue = record["agent_operations_queue"].as_array().unwrap();
    assert_eq!(queue.iter().map(operation_id).collect::<Vec<_>>(), all);
    assert_eq!(queue[0]["state"], "executing");
    // `all` is also accepted in the request body.
    let path = format!("/instances/{}/agentoperations", fixture.instance);
    let list =
        fixture.cluster.call(&fixture.token, Method::GET, &path, Some(json!({"all": true}))).await.body;
    assert_eq!(list.as_array().unwrap().len(), 5);
    assert_eq!(fixture.node().executions(fixture.instance_id()).len(), 1, "one at a time");

    fixture.delete_operation(&long).await;
    let last = fixture.wait_until_ended(&chmod).await;
    assert_eq!(last["results"]["0"]["return-code"], 0, "{last}");
    let cat_result = fixture.get_operation(&cat).await;
    assert_eq!(
        (&cat_result["state"], &cat_result["results"]["0"]["stdout"]),
        (&json!("complete"), &json!("first"))
    );
    let get_result = fixture.get_operation(&get_file).await;
    assert_eq!(
        get_result["results"]["0"]["stat_result"]["mode"],
        json!(0o100_644),
        "read before the last command changed the mode"
    );
    assert!(fixture.list_operations(false).await.is_empty());
    assert_eq!(fixture.list_operations(true).await, all);
    let record = get(&fixture.cluster, &fixture.token, "/instances/www").await.body;
    assert_eq!(record["agent_operations_queue"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_run_operations_independently() {
    let fixture = Fixture::new(&[]).await;
    let long = fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    fixture.wait_for_execution("sleep 600", 1).await;
    let other = create_with_ready_agent(&fixture.cluster, &fixture.token, "other").await;
    let path = format!("/instances/{other}/agent/execute");
    for _ in 0..3 {
        let operation =
            post(&fixture.cluster, &fixture.token, &path, json!({"command_line": "echo hi"})).await.body;
        assert_eq!(fixture.wait_until_ended(&operation).await["results"]["0"]["stdout"], "hi\n");
    }
    assert_eq!(fixture.get_operation(&long).await["state"], "executing");
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_each_of_many_commands_once() {
    let fixture = Fixture::new(&[]).await;
    let mut operations = Vec::new();
    for number in 0..50 {
        operations.push(fixture.queue("execute", json!({"command_line": format!("echo {number}")})).await);
    }
    for (number, operation) in operations.iter().enumerate() {
        let ended_operation = fixture.wait_until_ended(operation).await;
        assert_eq!(ended_operation["results"]["0"]["stdout"], format!("{number}\n"), "{ended_operation}");
    }
    let executions = fixture.node().executions(fixture.instance_id());
    assert!(executions.len() == 50 && executions.values().all(|times| *times == 1), "{executions:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_waits_for_unresponsive_agent() {
    let fixture = Fixture::new(&[]).await;
    fixture.set_guest_script(GuestScript { unresponsive: true, ..GuestScript::default() });
    // The API accepts operations until it notices that the agent is unresponsive.
    let queued = fixture.request("execute", json!({"command_line": "echo late"})).await;
    wait_for_agent_state(&fixture.cluster, &fixture.token, &fixture.instance, "not ready (unresponsive)")
        .await;
    let refused = fixture.request("execute", json!({"command_line": "true"})).await;
    assert_eq!(status_and_error(&refused), (400, "instance agent not ready"));
    assert!(fixture.node().executions(fixture.instance_id()).is_empty());
    fixture.set_guest_script(GuestScript::default());
    wait_for_agent_state(&fixture.cluster, &fixture.token, &fixture.instance, "ready").await;
    if queued.status == 200 {
        assert_eq!(fixture.wait_until_ended(&queued.body).await["results"]["0"]["stdout"], "late\n");
    }
    assert_eq!(fixture.run_command("echo on").await["state"], "complete");
}
