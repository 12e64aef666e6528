//! One thing after the other in a guest, guests beside each other.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn operations_are_done_in_the_order_in_which_they_came() {
    let world = World::new(&[]).await;
    let blob = world.blob(b"first").await;
    let long = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    let put = world.begin("put", json!({"blob_uuid": blob, "path": "/first", "mode": 420})).await;
    let cat = world.begin("execute", json!({"command_line": "cat /first"})).await;
    let get_file = world.begin("get", json!({"path": "/first"})).await;
    let chmod = world.begin("execute", json!({"command_line": "chmod 600 /first"})).await;
    world.reaches(&long, "executing").await;
    world.reaches(&put, "queued").await;
    let all = [&long, &put, &cat, &get_file, &chmod].map(|operation| id(operation).to_owned());
    assert_eq!(world.list(false).await, all);
    let record = get(&world.cluster, &world.token, "/instances/www").await.body;
    let queue = record["agent_operations_queue"].as_array().unwrap();
    assert_eq!(queue.iter().map(id).collect::<Vec<_>>(), all);
    assert_eq!(queue[0]["state"], "executing");
    // The body is read, too.
    let path = format!("/instances/{}/agentoperations", world.instance);
    let list = world.cluster.call(&world.token, Method::GET, &path, Some(json!({"all": true}))).await.body;
    assert_eq!(list.as_array().unwrap().len(), 5);
    assert_eq!(world.node().executions(world.id()).len(), 1, "one at a time");

    world.delete(&long).await;
    let last = world.ended(&chmod).await;
    assert_eq!(last["results"]["0"]["return-code"], 0, "{last}");
    let read = world.show(&cat).await;
    assert_eq!((&read["state"], &read["results"]["0"]["stdout"]), (&json!("complete"), &json!("first")));
    let got = world.show(&get_file).await;
    assert_eq!(got["results"]["0"]["stat_result"]["mode"], json!(0o100_644), "before the last command");
    assert!(world.list(false).await.is_empty());
    assert_eq!(world.list(true).await, all);
    let record = get(&world.cluster, &world.token, "/instances/www").await.body;
    assert_eq!(record["agent_operations_queue"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_do_not_wait_for_each_other() {
    let world = World::new(&[]).await;
    let long = world.begin("execute", json!({"command_line": "sleep 600"})).await;
    world.started("sleep 600", 1).await;
    let other = ready(&world.cluster, &world.token, "other").await;
    let path = format!("/instances/{other}/agent/execute");
    for _ in 0..3 {
        let begun = post(&world.cluster, &world.token, &path, json!({"command_line": "echo hi"})).await.body;
        assert_eq!(world.ended(&begun).await["results"]["0"]["stdout"], "hi\n");
    }
    assert_eq!(world.show(&long).await["state"], "executing");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_commands_run_once_each() {
    let world = World::new(&[]).await;
    let mut begun = Vec::new();
    for number in 0..50 {
        begun.push(world.begin("execute", json!({"command_line": format!("echo {number}")})).await);
    }
    for (number, operation) in begun.iter().enumerate() {
        let done = world.ended(operation).await;
        assert_eq!(done["results"]["0"]["stdout"], format!("{number}\n"), "{done}");
    }
    let executions = world.node().executions(world.id());
    assert!(executions.len() == 50 && executions.values().all(|times| *times == 1), "{executions:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_waits_for_a_silent_agent() {
    let world = World::new(&[]).await;
    world.script(GuestScript { unresponsive: true, ..GuestScript::default() });
    // The API may not know yet that the agent is silent; once it does, it refuses.
    let begun = world.ask("execute", json!({"command_line": "echo late"})).await;
    agent_is(&world.cluster, &world.token, &world.instance, "not ready (unresponsive)").await;
    let refused = world.ask("execute", json!({"command_line": "true"})).await;
    assert_eq!(refusal(&refused), (400, "instance agent not ready"));
    assert!(world.node().executions(world.id()).is_empty());
    world.script(GuestScript::default());
    agent_is(&world.cluster, &world.token, &world.instance, "ready").await;
    if begun.status == 200 {
        assert_eq!(world.ended(&begun.body).await["results"]["0"]["stdout"], "late\n");
    }
    assert_eq!(world.run("echo on").await["state"], "complete");
}
