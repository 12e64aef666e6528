//! Results of commands and file transfers.

use muster_types::time::now;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn records_command_result() {
    let fixture = Fixture::new(&[]).await;
    let before = now();
    let queued = fixture.queue("execute", json!({"command_line": "echo hello; echo oh >&2; exit 3"})).await;
    assert_eq!(
        (&queued["state"], &queued["results"], &queued["attempts"]),
        (&json!("queued"), &json!({}), &json!(0))
    );
    let operation = fixture.wait_until_ended(&queued).await;
    assert_eq!(operation["state"], "complete", "{operation}");
    let command = "echo hello; echo oh >&2; exit 3";
    let commands = json!([{"command": "execute", "commandline": command, "block-for-result": true}]);
    assert_eq!(operation["commands"], commands);
    let result = json!({"command-line": command, "result": true, "return-code": 3, "stdout": "hello\n", "stderr": "oh\n"});
    assert_eq!(operation["results"], json!({"0": result}));
    assert_eq!(
        (&operation["instance_uuid"], &operation["namespace"]),
        (&json!(fixture.instance), &json!("ci"))
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
    let (own_events, instance_events) = fixture.event_messages(&operation).await;
    assert!(own_events.contains(&"agent execute request from REST API".to_owned()), "{own_events:?}");
    assert!(
        instance_events.contains(&"agent execute request from REST API".to_owned()),
        "{instance_events:?}"
    );
    let path = format!("/agentoperations/{}/events?limit=1", operation_id(&operation));
    let events = get(&fixture.cluster, &fixture.token, &path).await.body;
    assert_eq!(events.as_array().unwrap().len(), 1);

    let unknown_command = fixture.run_command("frobnicate").await;
    let result = &unknown_command["results"]["0"];
    assert_eq!(
        (&unknown_command["state"], &result["return-code"]),
        (&json!("complete"), &json!(127)),
        "{unknown_command}"
    );
    assert_eq!(result["stderr"], "sh: frobnicate: not found\n");
    // The instance can also be addressed by name.
    let by_name = post(
        &fixture.cluster,
        &fixture.token,
        "/instances/www/agent/execute",
        json!({"command_line": "true"}),
    );
    assert_eq!(fixture.wait_until_ended(&by_name.await.body).await["results"]["0"]["return-code"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stores_long_or_binary_output_as_blob() {
    let fixture = Fixture::new(&[]).await;
    let short = fixture.run_command("yes 5120").await;
    assert_eq!(short["results"]["0"]["stdout"].as_str().unwrap().len(), 10240, "10 KiB are returned inline");
    assert_eq!(short["references_from"], json!({}));
    let numbers: String = (1..=50_000).map(|number| format!("{number}\n")).collect();
    let binary: Vec<u8> = (0..=u8::MAX).rev().cycle().take(300).collect();
    for (command, name, expected) in [
        ("yes 5121", "stdout", "y\n".repeat(5121).into_bytes()),
        ("yes 5121 >&2", "stderr", "y\n".repeat(5121).into_bytes()),
        ("seq 1 50000", "stdout", numbers.into_bytes()),
        ("bytes 300", "stdout", binary.clone()),
        ("bytes 300 >&2", "stderr", binary),
    ] {
        let operation = fixture.run_command(command).await;
        let result = &operation["results"]["0"];
        assert_eq!(
            (&operation["state"], &result["return-code"]),
            (&json!("complete"), &json!(0)),
            "{operation}"
        );
        assert_eq!(result.get(name), None, "{command}");
        let other = if name == "stdout" { "stderr" } else { "stdout" };
        assert_eq!(result[other], "", "{command}");
        let blob = &result[format!("{name}_blob")];
        assert_eq!(fixture.blob_data(blob).await, expected, "{command}");
        let reference = &operation["references_from"]["agent_output"];
        assert_eq!(reference.as_array().unwrap().len(), 1, "{operation}");
        let reference = &reference[0];
        assert_eq!((&reference["relationship_value"], &reference["target_uuid"]), (&json!(name), blob));
        assert_eq!(
            (&reference["source_object_type"], &reference["source_uuid"], &reference["target_object_type"]),
            (&json!("agentoperation"), &operation["uuid"], &json!("blob"))
        );
    }
    let both = fixture.run_command("bytes 20000; seq 1 20000 >&2").await;
    let values: Vec<&Value> = both["references_from"]["agent_output"].as_array().unwrap().iter().collect();
    assert_eq!(values.len(), 2, "{both}");
}

#[tokio::test(flavor = "multi_thread")]
async fn puts_and_gets_file() {
    let fixture = Fixture::new(&[]).await;
    let content: Vec<u8> = (0..=u8::MAX).cycle().take(3 << 20).collect();
    let blob = fixture.upload_blob(&content).await;
    let body = json!({"blob_uuid": blob, "path": "/srv/it's here", "mode": 33261});
    let queued = fixture.queue("put", body).await;
    assert_eq!(queued["progress_timeout"], json!(30.0));
    let put = fixture.wait_until_ended(&queued).await;
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
    assert_eq!(put["references_from"], json!({}), "the uploaded blob is no longer referenced");
    assert!(put["last_progress"].is_f64(), "{put}");

    let got = fixture.run_operation("get", json!({"path": "/srv/it's here"})).await;
    assert_eq!(got["state"], "complete", "{got}");
    assert_eq!(got["commands"], json!([{"command": "get-file", "path": "/srv/it's here"}]));
    let result = &got["results"]["0"];
    assert_eq!((&result["path"], &result["result"]), (&json!("/srv/it's here"), &json!(true)));
    let stat = &result["stat_result"];
    assert_eq!((&stat["mode"], &stat["size"]), (&json!(0o100_755), &json!(3 << 20)));
    for name in ["uid", "gid", "atime", "mtime", "ctime"] {
        assert!(stat[name].is_number(), "{name}: {stat}");
    }
    assert_eq!(fixture.blob_data(&result["content_blob"]).await, content);
    let reference = &got["references_from"]["agent_output"][0];
    assert_eq!(reference["target_uuid"], result["content_blob"]);
    // Empty files are transferred as well.
    assert_eq!(fixture.run_command("touch /srv/empty").await["state"], "complete");
    let got = fixture.run_operation("get", json!({"path": "/srv/empty"})).await;
    let size = &got["results"]["0"]["stat_result"]["size"];
    assert_eq!((&got["state"], size), (&json!("complete"), &json!(0)), "{got}");
    let empty = &got["results"]["0"]["content_blob"];
    assert_eq!(fixture.blob_data(empty).await, b"");
    let put = fixture.run_operation("put", json!({"blob_uuid": empty, "path": "/srv/other"})).await;
    assert_eq!(put["state"], "complete", "{put}");
    assert_eq!(fixture.run_command("cat /srv/other").await["results"]["0"]["return-code"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn accepts_decimal_and_symbolic_modes() {
    let fixture = Fixture::new(&[]).await;
    let blob = fixture.upload_blob(b"#!/bin/sh\n").await;
    for (mode, recorded, permissions) in [
        (json!(33188), json!(33188), 0o644),
        (json!("33261"), json!(33261), 0o755),
        (json!(384), json!(384), 0o600),
        (json!("420"), json!(420), 0o644),
        (json!("u+x"), json!("u+x"), 0o744),
        (json!("u=rw,go="), json!("u=rw,go="), 0o600),
        (json!("ugo+r"), json!("ugo+r"), 0o644),
    ] {
        let put =
            fixture.run_operation("put", json!({"blob_uuid": blob, "path": "/run/it", "mode": mode})).await;
        assert_eq!((&put["state"], &put["commands"][1]["mode"]), (&json!("complete"), &recorded), "{put}");
        assert_eq!(put["results"]["1"], json!({"path": "/run/it"}));
        let got = fixture.run_operation("get", json!({"path": "/run/it"})).await;
        let actual = got["results"]["0"]["stat_result"]["mode"].as_u64().unwrap();
        assert_eq!(actual, 0o100_000 | permissions, "{mode}");
    }
    for without_mode in [json!({}), json!({"mode": null})] {
        let mut body = without_mode;
        body["blob_uuid"] = json!(blob);
        body["path"] = json!("/run/it");
        let put = fixture.run_operation("put", body).await;
        assert_eq!(
            (&put["state"], put["commands"].as_array().unwrap().len()),
            (&json!("complete"), 1),
            "{put}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_guest_errors_verbatim() {
    let fixture = Fixture::new(&[]).await;
    let got = fixture.run_operation("get", json!({"path": "/no/such"})).await;
    assert_eq!(got["state"], "error", "{got}");
    let result = &got["results"]["0"];
    assert_eq!((&result["result"], &result["path"]), (&json!(false), &json!("/no/such")));
    assert_eq!(result["message"], "No such file or directory: /no/such");
    let message = got["error_message"].as_str().unwrap();
    assert!(message.contains("No such file or directory: /no/such"), "{got}");
    assert_eq!((&got["expiry_reason"], &got["references_from"]), (&Value::Null, &json!({})));
    let blob = fixture.upload_blob(b"x").await;
    let put =
        fixture.run_operation("put", json!({"blob_uuid": blob, "path": "/is/a/folder/", "mode": 420})).await;
    assert_eq!(put["state"], "error", "{put}");
    assert!(put["error_message"].as_str().unwrap().contains("Is a directory: /is/a/folder/"), "{put}");
    assert_eq!(put["references_from"], json!({}), "the blob is no longer referenced");
    // The guest still runs operations.
    assert_eq!(fixture.run_command("true").await["state"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn returns_guest_facts() {
    let fixture = Fixture::new(&[]).await;
    let facts =
        get(&fixture.cluster, &fixture.token, &format!("/instances/{}/agent/facts", fixture.instance)).await;
    assert_eq!((facts.status.as_u16(), &facts.body["distribution"]["id"]), (200, &json!("simulated")));
    assert!(facts.body["mounts"].is_array() && facts.body["ssh-host-keys"].is_object(), "{}", facts.text);
    let record = get(&fixture.cluster, &fixture.token, "/instances/www").await.body;
    assert!(record["agent_system_boot_time"].is_f64() && record["agent_start_time"].is_f64(), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn facts_request_times_out() {
    let mut fixture = Fixture::new(&[("API_ASYNC_WAIT", "1")]).await;
    // No daemon notices that the agent is unresponsive.
    fixture.cluster.kill().await;
    fixture.set_guest_script(GuestScript { unresponsive: true, ..GuestScript::default() });
    let facts = get(&fixture.cluster, &fixture.token, "/instances/www/agent/facts").await;
    assert_eq!(status_and_error(&facts), (503, "the agent of the instance does not respond"));
}
