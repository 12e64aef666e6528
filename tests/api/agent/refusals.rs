//! What is refused, and with which words.

use muster_types::ids::BlobId;

use super::*;
use crate::harness::caller;
use crate::instances::{settled, small};
use crate::scopes::scoped;

#[tokio::test(flavor = "multi_thread")]
async fn every_field_that_is_wrong_is_named() {
    let world = World::new(&[]).await;
    let blob = world.blob(b"content").await;
    let line = |more: Value| with(json!({"command_line": "true"}), &more);
    let put = |more: Value| with(json!({"blob_uuid": blob, "path": "/x", "mode": 420}), &more);
    let get = |more: Value| with(json!({"path": "/x"}), &more);
    let most = "must not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of 86400 seconds";
    let (late, still) = ("deadline_seconds", "progress_timeout_seconds");
    for (verb, body, why) in [
        ("execute", json!({}), "command_line: Missing data for required field."),
        ("execute", line(json!({"command_line": 7})), "command_line: Not a valid string."),
        ("execute", line(json!({"command_line": ""})), "command_line: must not be empty"),
        ("execute", line(json!({"command_line": "a\0b"})), "command_line: must not contain NUL"),
        (
            "execute",
            line(json!({"command_line": "x".repeat(65537)})),
            "command_line: must be at most 65536 bytes",
        ),
        ("execute", line(json!({"path": "/x"})), "path: not declared by this endpoint"),
        ("execute", line(json!({still: 5})), "progress_timeout_seconds: not declared by this endpoint"),
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
        assert_eq!(refusal(&world.ask(verb, body).await), (400, why), "{verb}");
    }
    for (verb, names, body) in [
        ("execute", vec![late], json!({"command_line": "true"})),
        ("put", vec![late, still], put(json!({}))),
        ("get", vec![late, still], get(json!({}))),
    ] {
        for name in names {
            for (value, why) in [
                (json!(true), "must be a number of seconds, not a boolean"),
                (json!(false), "must be a number of seconds, not a boolean"),
                (json!("5"), "must be a number of seconds"),
                (json!([5]), "must be a number of seconds"),
                (json!({}), "must be a number of seconds"),
                (json!(-1), "must not be negative"),
                (json!(-0.001), "must not be negative"),
                (json!(86400.5), most),
                (json!(1e300), most),
            ] {
                let answer = world.ask(verb, with(body.clone(), &json!({name: value}))).await;
                assert_eq!(refusal(&answer), (400, format!("{name} {why}").as_str()), "{verb}");
            }
        }
    }
    // Python writes such numbers; they are no JSON.
    let path = format!("/instances/{}/agent/get", world.instance);
    for number in ["NaN", "Infinity", "1e999"] {
        let body = format!("{{\"path\": \"/x\", \"deadline_seconds\": {number}}}");
        let answer = world.cluster.send(&world.token, Method::POST, &path, body.into_bytes()).await;
        assert_eq!(answer.status, 400, "{}", answer.text);
    }
    for mode in
        [json!("rwx"), json!(-1), json!(70000), json!(4.5), json!(true), json!("u+r; reboot"), json!("")]
    {
        let answer = world.ask("put", put(json!({"mode": mode}))).await;
        let (status, why) = refusal(&answer);
        assert!(status == 406 && why.starts_with("invalid mode: "), "{mode}: {}", answer.text);
    }
    for unknown in [BlobId::new().to_string(), "no-uuid".to_owned()] {
        let answer = world.ask("put", put(json!({"blob_uuid": unknown}))).await;
        assert_eq!(refusal(&answer), (404, "blob not found"));
    }
    assert!(world.list(true).await.is_empty(), "nothing that was refused is queued");
    assert!(world.node().executions(world.id()).is_empty());
}

fn with(mut body: Value, more: &Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

const CALLS: [&str; 3] = ["execute", "put", "get"];

fn body(verb: &str) -> Value {
    match verb {
        "execute" => json!({"command_line": "true"}),
        "put" => json!({"blob_uuid": BlobId::new().to_string(), "path": "/x", "mode": "what"}),
        _ => json!({"path": "/x"}),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_must_be_there_and_created_and_its_agent_ready() {
    let (cluster, token) = cluster(&[]).await;
    let ask = async |reference: &str, verb: &str| {
        post(&cluster, &token, &format!("/instances/{reference}/agent/{verb}"), body(verb)).await
    };
    let unknown = InstanceId::new().to_string();
    let early = post(&cluster, &token, "/instances", small("early", &json!({}))).await.body;
    let early = early["uuid"].as_str().unwrap();
    for verb in CALLS {
        assert_eq!(refusal(&ask(&unknown, verb).await), (404, "instance not found"), "{verb}");
        let text = format!("instance {early} is not ready (initial)");
        assert_eq!(refusal(&ask(early, verb).await), (406, text.as_str()), "{verb}");
    }
    cluster.settle().await;
    agent_is(&cluster, &token, early, "ready").await;
    let script = GuestScript { ready_after: None, ..GuestScript::default() };
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript { guest: script.clone(), ..SimulationScript::default() });
    }
    for (name, more, state) in [
        ("mute", json!({}), json!("not ready (no contact)")),
        ("deaf", json!({"side_channels": []}), Value::Null),
    ] {
        let record = settled(&cluster, &token, name, &more).await;
        assert_eq!(record["agent_state"], state);
        for verb in CALLS {
            assert_eq!(refusal(&ask(name, verb).await), (400, "instance agent not ready"), "{name} {verb}");
        }
        let facts = get(&cluster, &token, &format!("/instances/{name}/agent/facts")).await;
        assert_eq!(refusal(&facts), (400, "instance agent not ready"), "{name}");
    }
    for (verb, state) in [("pause", "instance paused"), ("poweroff", "instance powered off")] {
        let path = format!("/instances/{early}/{verb}");
        assert_eq!(cluster.call(&token, Method::POST, &path, None).await.status, 200);
        agent_is(&cluster, &token, early, &format!("not ready ({state})")).await;
        for verb in CALLS {
            assert_eq!(refusal(&ask(early, verb).await), (400, "instance agent not ready"), "{state}");
        }
    }
    let gone = cluster.call(&token, Method::DELETE, &format!("/instances/{early}"), None).await;
    assert_eq!(gone.status, 200, "{}", gone.text);
    cluster.settle().await;
    let text = format!("instance {early} is not ready (deleted)");
    assert_eq!(refusal(&ask(early, "execute").await), (406, text.as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn budgets_are_looked_at_before_the_mode_and_the_mode_before_the_blob() {
    let world = World::new(&[("AGENT_OPERATION_MAX_DEADLINE", "60")]).await;
    let mut body = body("put");
    body["deadline_seconds"] = json!(61);
    let text =
        "deadline_seconds must not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of 60 seconds";
    assert_eq!(refusal(&world.ask("put", body.clone()).await), (400, text));
    body["deadline_seconds"] = json!(60);
    assert_eq!(refusal(&world.ask("put", body.clone()).await), (406, "invalid mode: what"));
    body["mode"] = json!("a+r");
    assert_eq!(refusal(&world.ask("put", body).await), (404, "blob not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_are_found_by_those_who_see_the_instance() {
    let world = World::new(&[]).await;
    let operation = world.run("echo secret").await;
    let at = format!("/agentoperations/{}", id(&operation));
    let (cluster, absent) = (&world.cluster, (404, "agent operation not found"));
    cluster.create_namespace("other").await;
    let other = cluster.token("other").await;
    for path in [at.clone(), format!("{at}/events")] {
        assert_eq!(refusal(&get(cluster, &other, &path).await), absent);
        assert_eq!(get(cluster, &world.token, &path).await.status, 200);
        assert_eq!(get(cluster, &cluster.token("system").await, &path).await.status, 200);
    }
    assert_eq!(refusal(&cluster.call(&other, Method::DELETE, &at, None).await), absent);
    let list = format!("/instances/{}/agentoperations", world.instance);
    assert_eq!(refusal(&get(cluster, &other, &list).await), (404, "instance not found"));
    for path in ["/agentoperations/no-uuid", "/agentoperations/00000000-0000-4000-8000-000000000000"] {
        assert_eq!(refusal(&get(cluster, &world.token, path).await), absent);
        assert_eq!(refusal(&cluster.call(&world.token, Method::DELETE, path, None).await), absent);
    }
    // Whoever is trusted reads, and no more.
    muster_control::objects::trust::add(&cluster.app, &caller(), "ci", "other").await.unwrap();
    assert_eq!(get(cluster, &other, &at).await.body, operation);
    assert_eq!(get(cluster, &other, &format!("{list}?all=true")).await.body, json!([operation]));
    assert_eq!(refusal(&cluster.call(&other, Method::DELETE, &at, None).await), absent);
    let run = format!("/instances/{}/agent/execute", world.instance);
    let refused = post(cluster, &other, &run, json!({"command_line": "true"})).await;
    assert_eq!(refusal(&refused), (404, "instance not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_need_a_scope_of_their_own() {
    let world = World::new(&[]).await;
    let token = async |scopes: &[&str]| scoped(&world.cluster, "ci", scopes).await;
    let run = format!("/instances/{}/agent/execute", world.instance);
    let file = format!("/instances/{}/agent/get", world.instance);
    let (line, path) = (json!({"command_line": "true"}), json!({"path": "/etc/hostname"}));
    let writer = token(&["instance.write", "instance.read"]).await;
    let refused = post(&world.cluster, &writer, &run, line.clone()).await;
    assert_eq!(refusal(&refused), (403, "token is not scoped for this operation"));
    let begun = post(&world.cluster, &writer, &file, path.clone()).await;
    assert_eq!(begun.status, 200, "{}", begun.text);
    let helper = format!("/instances/{}/vdiconsolehelper", world.instance);
    assert_eq!(get(&world.cluster, &writer, &helper).await.status, 403, "a keyboard is more than a look");
    let at = format!("/agentoperations/{}", id(&begun.body));
    assert_eq!(get(&world.cluster, &writer, &at).await.status, 403);

    let runner = token(&["instance.execute", "agentoperation.read"]).await;
    assert_eq!(post(&world.cluster, &runner, &run, line).await.status, 200);
    assert_eq!(post(&world.cluster, &runner, &file, path).await.status, 403);
    assert_eq!(get(&world.cluster, &runner, &at).await.status, 200);
    assert_eq!(world.cluster.call(&runner, Method::DELETE, &at, None).await.status, 403);
    let all = token(&["instance.*"]).await;
    assert_eq!(get(&world.cluster, &all, &helper).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_has_so_much_to_do_and_no_more() {
    let world = World::new(&[]).await;
    world.begin("execute", json!({"command_line": "sleep 600"})).await;
    let mut last = Value::Null;
    for _ in 1..100 {
        last = world.begin("execute", json!({"command_line": "true"})).await;
    }
    for (verb, body) in
        [("execute", json!({"command_line": "true"})), ("get", json!({"path": "/etc/hostname"}))]
    {
        let answer = world.ask(verb, body).await;
        let text = "the agent queue of the instance is full: it can hold 100 agent operations and 256 KiB of command lines and \
                    paths";
        assert_eq!(refusal(&answer), (409, text));
    }
    assert_eq!(world.list(false).await.len(), 100);
    // What has ended does not count.
    world.delete(&last).await;
    world.begin("execute", json!({"command_line": "true"})).await;
    assert_eq!((world.list(false).await.len(), world.list(true).await.len()), (100, 101));
    assert_eq!(world.ask("execute", json!({"command_line": "true"})).await.status, 409);

    // Nor may few of them be very long.
    let other = World::new(&[]).await;
    other.begin("execute", json!({"command_line": "sleep 600"})).await;
    let long = json!({"command_line": format!("echo {}", "x".repeat(60_000))});
    for _ in 0..4 {
        other.begin("execute", long.clone()).await;
    }
    assert_eq!(other.ask("execute", long).await.status, 409);
}
