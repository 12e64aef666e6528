//! What comes of commands and files.

use muster_types::time::now;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_command_leaves_its_result() {
    let world = World::new(&[]).await;
    let before = now();
    let begun = world.begin("execute", json!({"command_line": "echo hello; echo oh >&2; exit 3"})).await;
    assert_eq!(
        (&begun["state"], &begun["results"], &begun["attempts"]),
        (&json!("queued"), &json!({}), &json!(0))
    );
    let operation = world.ended(&begun).await;
    assert_eq!(operation["state"], "complete", "{operation}");
    let line = "echo hello; echo oh >&2; exit 3";
    let commands = json!([{"command": "execute", "commandline": line, "block-for-result": true}]);
    assert_eq!(operation["commands"], commands);
    let result = json!({"command-line": line, "result": true, "return-code": 3, "stdout": "hello\n", "stderr": "oh\n"});
    assert_eq!(operation["results"], json!({"0": result}));
    assert_eq!(
        (&operation["instance_uuid"], &operation["namespace"]),
        (&json!(world.instance), &json!("ci"))
    );
    assert_eq!((&operation["attempts"], &operation["version"]), (&json!(1), &json!(3)));
    assert_eq!(operation["progress_timeout"], json!(0.0));
    let deadline = operation["deadline"].as_f64().unwrap();
    assert!((before + 600.0..=now() + 600.0).contains(&deadline), "{operation}");
    for empty in ["expiry_reason", "error_message"] {
        assert_eq!(operation[empty], Value::Null, "{empty}");
    }
    for empty in ["metadata", "references_to", "references_from"] {
        assert_eq!(operation[empty], json!({}), "{empty}");
    }
    let (own, of_instance) = world.audits(&operation).await;
    assert!(own.contains(&"agent execute request from REST API".to_owned()), "{own:?}");
    assert!(of_instance.contains(&"agent execute request from REST API".to_owned()), "{of_instance:?}");
    let path = format!("/agentoperations/{}/events?limit=1", id(&operation));
    let events = get(&world.cluster, &world.token, &path).await.body;
    assert_eq!(events.as_array().unwrap().len(), 1);

    let nothing = world.run("frobnicate").await;
    let result = &nothing["results"]["0"];
    assert_eq!((&nothing["state"], &result["return-code"]), (&json!("complete"), &json!(127)), "{nothing}");
    assert_eq!(result["stderr"], "sh: frobnicate: not found\n");
    // By name, as well.
    let by_name =
        post(&world.cluster, &world.token, "/instances/www/agent/execute", json!({"command_line": "true"}));
    assert_eq!(world.ended(&by_name.await.body).await["results"]["0"]["return-code"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn output_that_is_long_or_no_text_becomes_a_blob() {
    let world = World::new(&[]).await;
    let short = world.run("yes 5120").await;
    assert_eq!(short["results"]["0"]["stdout"].as_str().unwrap().len(), 10240, "10 KiB fit");
    assert_eq!(short["references_from"], json!({}));
    let numbers: String = (1..=50_000).map(|number| format!("{number}\n")).collect();
    let binary: Vec<u8> = (0..=u8::MAX).rev().cycle().take(300).collect();
    for (line, name, expected) in [
        ("yes 5121", "stdout", "y\n".repeat(5121).into_bytes()),
        ("yes 5121 >&2", "stderr", "y\n".repeat(5121).into_bytes()),
        ("seq 1 50000", "stdout", numbers.into_bytes()),
        ("bytes 300", "stdout", binary.clone()),
        ("bytes 300 >&2", "stderr", binary),
    ] {
        let operation = world.run(line).await;
        let result = &operation["results"]["0"];
        assert_eq!(
            (&operation["state"], &result["return-code"]),
            (&json!("complete"), &json!(0)),
            "{operation}"
        );
        assert_eq!(result.get(name), None, "{line}");
        let other = if name == "stdout" { "stderr" } else { "stdout" };
        assert_eq!(result[other], "", "{line}");
        let blob = &result[format!("{name}_blob")];
        assert_eq!(world.data(blob).await, expected, "{line}");
        let reference = &operation["references_from"]["agent_output"];
        assert_eq!(reference.as_array().unwrap().len(), 1, "{operation}");
        let reference = &reference[0];
        assert_eq!((&reference["relationship_value"], &reference["target_uuid"]), (&json!(name), blob));
        assert_eq!(
            (&reference["source_object_type"], &reference["source_uuid"], &reference["target_object_type"]),
            (&json!("agentoperation"), &operation["uuid"], &json!("blob"))
        );
    }
    let both = world.run("bytes 20000; seq 1 20000 >&2").await;
    let values: Vec<&Value> = both["references_from"]["agent_output"].as_array().unwrap().iter().collect();
    assert_eq!(values.len(), 2, "{both}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_goes_in_and_comes_out_again() {
    let world = World::new(&[]).await;
    let content: Vec<u8> = (0..=u8::MAX).cycle().take(3 << 20).collect();
    let blob = world.blob(&content).await;
    let body = json!({"blob_uuid": blob, "path": "/srv/it's here", "mode": 33261});
    let begun = world.begin("put", body).await;
    assert_eq!(begun["progress_timeout"], json!(30.0));
    let put = world.ended(&begun).await;
    assert_eq!(put["state"], "complete", "{put}");
    let commands = json!([
        {"command": "put-blob", "blob_uuid": blob, "path": "/srv/it's here"},
        {"command": "chmod", "path": "/srv/it's here", "mode": 33261},
    ]);
    assert_eq!(put["commands"], commands);
    assert_eq!(
        (&put["results"]["0"]["path"], &put["results"]["1"]["path"]),
        (&json!("/srv/it's here"), &json!("/srv/it's here"))
    );
    assert_eq!(put["references_from"], json!({}), "what went in is not needed any more");
    assert!(put["last_progress"].is_f64(), "{put}");

    let got = world.done("get", json!({"path": "/srv/it's here"})).await;
    assert_eq!(got["state"], "complete", "{got}");
    assert_eq!(got["commands"], json!([{"command": "get-file", "path": "/srv/it's here"}]));
    let result = &got["results"]["0"];
    assert_eq!((&result["path"], &result["result"]), (&json!("/srv/it's here"), &json!(true)));
    let facts = &result["stat_result"];
    assert_eq!((&facts["mode"], &facts["size"]), (&json!(0o100_755), &json!(3 << 20)));
    for name in ["uid", "gid", "atime", "mtime", "ctime"] {
        assert!(facts[name].is_number(), "{name}: {facts}");
    }
    assert_eq!(world.data(&result["content_blob"]).await, content);
    let reference = &got["references_from"]["agent_output"][0];
    assert_eq!(reference["target_uuid"], result["content_blob"]);
    // Nothing is a content, too.
    assert_eq!(world.run("touch /srv/empty").await["state"], "complete");
    let got = world.done("get", json!({"path": "/srv/empty"})).await;
    let size = &got["results"]["0"]["stat_result"]["size"];
    assert_eq!((&got["state"], size), (&json!("complete"), &json!(0)), "{got}");
    let empty = &got["results"]["0"]["content_blob"];
    assert_eq!(world.data(empty).await, b"");
    let put = world.done("put", json!({"blob_uuid": empty, "path": "/srv/other"})).await;
    assert_eq!(put["state"], "complete", "{put}");
    assert_eq!(world.run("cat /srv/other").await["results"]["0"]["return-code"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn modes_are_decimal_numbers_or_words() {
    let world = World::new(&[]).await;
    let blob = world.blob(b"#!/bin/sh\n").await;
    for (mode, recorded, permissions) in [
        (json!(33188), json!(33188), 0o644),
        (json!("33261"), json!(33261), 0o755),
        (json!(384), json!(384), 0o600),
        (json!("420"), json!(420), 0o644),
        (json!("u+x"), json!("u+x"), 0o744),
        (json!("u=rw,go="), json!("u=rw,go="), 0o600),
        (json!("ugo+r"), json!("ugo+r"), 0o644),
    ] {
        let put = world.done("put", json!({"blob_uuid": blob, "path": "/run/it", "mode": mode})).await;
        assert_eq!((&put["state"], &put["commands"][1]["mode"]), (&json!("complete"), &recorded), "{put}");
        assert_eq!(put["results"]["1"], json!({"path": "/run/it"}));
        let got = world.done("get", json!({"path": "/run/it"})).await;
        let found = got["results"]["0"]["stat_result"]["mode"].as_u64().unwrap();
        assert_eq!(found, 0o100_000 | permissions, "{mode}");
    }
    for none in [json!({}), json!({"mode": null})] {
        let mut body = none;
        body["blob_uuid"] = json!(blob);
        body["path"] = json!("/run/it");
        let put = world.done("put", body).await;
        assert_eq!(
            (&put["state"], put["commands"].as_array().unwrap().len()),
            (&json!("complete"), 1),
            "{put}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_guest_refuses_is_an_error_with_its_words() {
    let world = World::new(&[]).await;
    let got = world.done("get", json!({"path": "/no/such"})).await;
    assert_eq!(got["state"], "error", "{got}");
    let result = &got["results"]["0"];
    assert_eq!((&result["result"], &result["path"]), (&json!(false), &json!("/no/such")));
    assert_eq!(result["message"], "No such file or directory: /no/such");
    let message = got["error_message"].as_str().unwrap();
    assert!(message.contains("No such file or directory: /no/such"), "{got}");
    assert_eq!((&got["expiry_reason"], &got["references_from"]), (&Value::Null, &json!({})));
    let blob = world.blob(b"x").await;
    let put = world.done("put", json!({"blob_uuid": blob, "path": "/is/a/folder/", "mode": 420})).await;
    assert_eq!(put["state"], "error", "{put}");
    assert!(put["error_message"].as_str().unwrap().contains("Is a directory: /is/a/folder/"), "{put}");
    assert_eq!(put["references_from"], json!({}), "the blob is not held any more");
    // The guest goes on working.
    assert_eq!(world.run("true").await["state"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_tells_of_itself() {
    let world = World::new(&[]).await;
    let facts =
        get(&world.cluster, &world.token, &format!("/instances/{}/agent/facts", world.instance)).await;
    assert_eq!((facts.status.as_u16(), &facts.body["distribution"]["id"]), (200, &json!("simulated")));
    assert!(facts.body["mounts"].is_array() && facts.body["ssh-host-keys"].is_object(), "{}", facts.text);
    let record = get(&world.cluster, &world.token, "/instances/www").await.body;
    assert!(record["agent_system_boot_time"].is_f64() && record["agent_start_time"].is_f64(), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_ever_for_what_a_guest_says() {
    let mut world = World::new(&[("API_ASYNC_WAIT", "1")]).await;
    // Nobody notices that the agent is silent.
    world.cluster.kill().await;
    world.script(GuestScript { unresponsive: true, ..GuestScript::default() });
    let facts = get(&world.cluster, &world.token, "/instances/www/agent/facts").await;
    assert_eq!(refusal(&facts), (503, "the agent of the instance does not respond"));
}
