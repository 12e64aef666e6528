//! Validation, access control and limits of agent operations.

use muster_test_cluster::caller;
use muster_types::ids::BlobId;

use super::*;
use crate::instances::{create_and_settle, instance_request};
use crate::scopes::scoped_token;

#[tokio::test(flavor = "multi_thread")]
async fn names_the_invalid_field() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(b"content").await;
    let execute = |overrides: Value| merge(json!({"command_line": "true"}), &overrides);
    let put = |overrides: Value| merge(json!({"blob_uuid": blob, "path": "/x", "mode": 420}), &overrides);
    let get = |overrides: Value| merge(json!({"path": "/x"}), &overrides);
    let above_maximum = "must not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of 86400 seconds";
    let (deadline, progress_timeout) = ("deadline_seconds", "progress_timeout_seconds");
    for (verb, body, error) in [
        ("execute", json!({}), "command_line: Missing data for required field."),
        ("execute", execute(json!({"command_line": 7})), "command_line: Not a valid string."),
        ("execute", execute(json!({"command_line": ""})), "command_line: must not be empty"),
        ("execute", execute(json!({"command_line": "a\0b"})), "command_line: must not contain NUL"),
        (
            "execute",
            execute(json!({"command_line": "x".repeat(65537)})),
            "command_line: must be at most 65536 bytes",
        ),
        ("execute", execute(json!({"path": "/x"})), "path: not declared by this endpoint"),
        (
            "execute",
            execute(json!({progress_timeout: 5})),
            "progress_timeout_seconds: not declared by this endpoint",
        ),
        ("put", json!({"path": "/x", "mode": 420}), "blob_uuid: Missing data for required field."),
        ("put", json!({"blob_uuid": blob, "mode": 420}), "path: Missing data for required field."),
        ("put", put(json!({"path": "x"})), "path: must be absolute"),
        ("put", put(json!({"path": "/x\0"})), "path: must not contain NUL"),
        ("get", json!({}), "path: Missing data for required field."),
        ("get", get(json!({"path": ""})), "path: must not be empty"),
        ("get", get(json!({"path": "etc/passwd"})), "path: must be absolute"),
        ("get", get(json!({"path": format!("/{}", "x".repeat(4096))})), "path: must be at most 4096 bytes"),
        ("get", get(json!({"mode": 420})), "mode: not declared by this endpoint"),
    ] {
        assert_eq!(status_and_error(&fixture.request(verb, body).await), (400, error), "{verb}");
    }
    for (verb, names, body) in [
        ("execute", vec![deadline], json!({"command_line": "true"})),
        ("put", vec![deadline, progress_timeout], put(json!({}))),
        ("get", vec![deadline, progress_timeout], get(json!({}))),
    ] {
        for name in names {
            for (value, error) in [
                (json!(true), "must be a number of seconds, not a boolean"),
                (json!(false), "must be a number of seconds, not a boolean"),
                (json!("5"), "must be a number of seconds"),
                (json!([5]), "must be a number of seconds"),
                (json!({}), "must be a number of seconds"),
                (json!(-1), "must not be negative"),
                (json!(-0.001), "must not be negative"),
                (json!(86400.5), above_maximum),
                (json!(1e300), above_maximum),
            ] {
                let response = fixture.request(verb, merge(body.clone(), &json!({name: value}))).await;
                assert_eq!(status_and_error(&response), (400, format!("{name} {error}").as_str()), "{verb}");
            }
        }
    }
    // Python serializes such numbers, but they are not valid JSON.
    let path = format!("/instances/{}/agent/get", fixture.instance);
    for number in ["NaN", "Infinity", "1e999"] {
        let body = format!("{{\"path\": \"/x\", \"deadline_seconds\": {number}}}");
        let response = fixture.cluster.send(&fixture.token, Method::POST, &path, body.into_bytes()).await;
        assert_eq!(response.status, 400, "{}", response.text);
    }
    for mode in
        [json!("rwx"), json!(-1), json!(70000), json!(4.5), json!(true), json!("u+r; reboot"), json!("")]
    {
        let response = fixture.request("put", put(json!({"mode": mode}))).await;
        let (status, error) = status_and_error(&response);
        assert!(status == 406 && error.starts_with("invalid mode: "), "{mode}: {}", response.text);
    }
    for unknown in [BlobId::new().to_string(), "no-uuid".to_owned()] {
        let response = fixture.request("put", put(json!({"blob_uuid": unknown}))).await;
        assert_eq!(status_and_error(&response), (404, "blob not found"));
    }
    assert!(fixture.list_operations(true).await.is_empty(), "rejected operations are not queued");
    assert!(fixture.node().executions(fixture.instance_id()).is_empty());
}

fn merge(mut body: Value, overrides: &Value) -> Value {
    for (key, value) in overrides.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

const VERBS: [&str; 3] = ["execute", "put", "get"];

fn request_body(verb: &str) -> Value {
    match verb {
        "execute" => json!({"command_line": "true"}),
        "put" => json!({"blob_uuid": BlobId::new().to_string(), "path": "/x", "mode": "what"}),
        _ => json!({"path": "/x"}),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requires_created_instance_with_ready_agent() {
    let (cluster, token) = cluster(&[]).await;
    let request = async |reference: &str, verb: &str| {
        post(&cluster, &token, &format!("/instances/{reference}/agent/{verb}"), request_body(verb)).await
    };
    let unknown = InstanceId::new().to_string();
    let early = post(&cluster, &token, "/instances", instance_request("early", &json!({}))).await.body;
    let early = early["uuid"].as_str().unwrap();
    for verb in VERBS {
        assert_eq!(status_and_error(&request(&unknown, verb).await), (404, "instance not found"), "{verb}");
        let text = format!("instance {early} is not ready (initial)");
        assert_eq!(status_and_error(&request(early, verb).await), (406, text.as_str()), "{verb}");
    }
    cluster.settle().await;
    wait_for_agent_state(&cluster, &token, early, "ready").await;
    let script = GuestScript { ready_after: None, ..GuestScript::default() };
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript { guest: script.clone(), ..SimulationScript::default() });
    }
    for (name, overrides, state) in [
        ("mute", json!({}), json!("not ready (no contact)")),
        ("deaf", json!({"side_channels": []}), Value::Null),
    ] {
        let record = create_and_settle(&cluster, &token, name, &overrides).await;
        assert_eq!(record["agent_state"], state);
        for verb in VERBS {
            assert_eq!(
                status_and_error(&request(name, verb).await),
                (400, "instance agent not ready"),
                "{name} {verb}"
            );
        }
        let facts = get(&cluster, &token, &format!("/instances/{name}/agent/facts")).await;
        assert_eq!(status_and_error(&facts), (400, "instance agent not ready"), "{name}");
    }
    for (verb, state) in [("pause", "instance paused"), ("poweroff", "instance powered off")] {
        let path = format!("/instances/{early}/{verb}");
        assert_eq!(cluster.call(&token, Method::POST, &path, None).await.status, 200);
        wait_for_agent_state(&cluster, &token, early, &format!("not ready ({state})")).await;
        for verb in VERBS {
            assert_eq!(
                status_and_error(&request(early, verb).await),
                (400, "instance agent not ready"),
                "{state}"
            );
        }
    }
    let deleted = cluster.call(&token, Method::DELETE, &format!("/instances/{early}"), None).await;
    assert_eq!(deleted.status, 200, "{}", deleted.text);
    cluster.settle().await;
    let text = format!("instance {early} is not ready (deleted)");
    assert_eq!(status_and_error(&request(early, "execute").await), (406, text.as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn validates_timeouts_then_mode_then_blob() {
    let fixture = Fixture::new(&[("AGENT_OPERATION_MAX_DEADLINE", "60")]).await;
    let mut body = request_body("put");
    body["deadline_seconds"] = json!(61);
    let text =
        "deadline_seconds must not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of 60 seconds";
    assert_eq!(status_and_error(&fixture.request("put", body.clone()).await), (400, text));
    body["deadline_seconds"] = json!(60);
    assert_eq!(status_and_error(&fixture.request("put", body.clone()).await), (406, "invalid mode: what"));
    body["mode"] = json!("a+r");
    assert_eq!(status_and_error(&fixture.request("put", body).await), (404, "blob not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_are_visible_to_callers_who_see_the_instance() {
    let fixture = Fixture::new(&[]).await;
    let operation = fixture.run_command("echo secret").await;
    let operation_path = format!("/agentoperations/{}", operation_id(&operation));
    let (cluster, not_found) = (&fixture.cluster, (404, "agent operation not found"));
    cluster.create_namespace("other").await;
    let other = cluster.token("other").await;
    for path in [operation_path.clone(), format!("{operation_path}/events")] {
        assert_eq!(status_and_error(&get(cluster, &other, &path).await), not_found);
        assert_eq!(get(cluster, &fixture.token, &path).await.status, 200);
        assert_eq!(get(cluster, &cluster.token("system").await, &path).await.status, 200);
    }
    assert_eq!(
        status_and_error(&cluster.call(&other, Method::DELETE, &operation_path, None).await),
        not_found
    );
    let list = format!("/instances/{}/agentoperations", fixture.instance);
    assert_eq!(status_and_error(&get(cluster, &other, &list).await), (404, "instance not found"));
    for path in ["/agentoperations/no-uuid", "/agentoperations/00000000-0000-4000-8000-000000000000"] {
        assert_eq!(status_and_error(&get(cluster, &fixture.token, path).await), not_found);
        assert_eq!(
            status_and_error(&cluster.call(&fixture.token, Method::DELETE, path, None).await),
            not_found
        );
    }
    // A trusted namespace can read but not modify.
    muster_control::objects::trust::add(&cluster.app, &caller(), "ci", "other").await.unwrap();
    assert_eq!(get(cluster, &other, &operation_path).await.body, operation);
    assert_eq!(get(cluster, &other, &format!("{list}?all=true")).await.body, json!([operation]));
    assert_eq!(
        status_and_error(&cluster.call(&other, Method::DELETE, &operation_path, None).await),
        not_found
    );
    let execute_path = format!("/instances/{}/agent/execute", fixture.instance);
    let refused = post(cluster, &other, &execute_path, json!({"command_line": "true"})).await;
    assert_eq!(status_and_error(&refused), (404, "instance not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn execute_requires_its_own_scope() {
    let fixture = Fixture::new(&[]).await;
    let token = async |scopes: &[&str]| scoped_token(&fixture.cluster, "ci", scopes).await;
    let execute_path = format!("/instances/{}/agent/execute", fixture.instance);
    let get_path = format!("/instances/{}/agent/get", fixture.instance);
    let (command, file_request) = (json!({"command_line": "true"}), json!({"path": "/etc/hostname"}));
    let writer = token(&["instance.write", "instance.read"]).await;
    let refused = post(&fixture.cluster, &writer, &execute_path, command.clone()).await;
    assert_eq!(status_and_error(&refused), (403, "token is not scoped for this operation"));
    let queued = post(&fixture.cluster, &writer, &get_path, file_request.clone()).await;
    assert_eq!(queued.status, 200, "{}", queued.text);
    let console_path = format!("/instances/{}/vdiconsolehelper", fixture.instance);
    assert_eq!(
        get(&fixture.cluster, &writer, &console_path).await.status,
        403,
        "console access needs its own scope"
    );
    let operation_path = format!("/agentoperations/{}", operation_id(&queued.body));
    assert_eq!(get(&fixture.cluster, &writer, &operation_path).await.status, 403);

    let runner = token(&["instance.execute", "agentoperation.read"]).await;
    assert_eq!(post(&fixture.cluster, &runner, &execute_path, command).await.status, 200);
    assert_eq!(post(&fixture.cluster, &runner, &get_path, file_request).await.status, 403);
    assert_eq!(get(&fixture.cluster, &runner, &operation_path).await.status, 200);
    assert_eq!(fixture.cluster.call(&runner, Method::DELETE, &operation_path, None).await.status, 403);
    let all = token(&["instance.*"]).await;
    assert_eq!(get(&fixture.cluster, &all, &console_path).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_queued_operations_per_instance() {
    let fixture = Fixture::new(&[]).await;
    fixture.queue("execute", json!({"command_line": "sleep 600"})).await;
    let mut last = Value::Null;
    for _ in 1..100 {
        last = fixture.queue("execute", json!({"command_line": "true"})).await;
    }
    for (verb, body) in
        [("execute", json!({"command_line": "true"})), ("get", json!({"path": "/etc/hostname"}))]
    {
        let response = fixture.request(verb, body).await;
        let error = "the agent queue of the instance is full: it can hold 100 agent operations and 256 KiB of command \
                     lines and paths";
        assert_eq!(status_and_error(&response), (409, error));
    }
    assert_eq!(fixture.list_operations(false).await.len(), 100);
    // Ended operations do not count.
    fixture.delete_operation(&last).await;
    fixture.queue("execute", json!({"command_line": "true"})).await;
    assert_eq!(
        (fixture.list_operations(false).await.len(), fixture.list_operations(true).await.len()),
        (100, 101)
    );
    assert_eq!(fixture.request("execute", json!({"command_line": "true"})).await.status, 409);

    // The total size is limited as well.
    let other = Fixture::new(&[]).await;
    other.queue("execute", json!({"command_line": "sleep 600"})).await;
    let long = json!({"command_line": format!("echo {}", "x".repeat(60_000))});
    for _ in 0..4 {
        other.queue("execute", long.clone()).await;
    }
    assert_eq!(other.request("execute", long).await.status, 409);
}
