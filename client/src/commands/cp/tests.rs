use muster_types::ids::UploadId;
use serde_json::json;

use super::super::agent::tests::example;
use super::super::instance_tables::tests::example as instance;
use super::*;
use crate::fake_server::FakeServer;
use crate::output::Format;

const SHOW: &str = "GET /agentoperations/7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
const ARTIFACT: &str = "3d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

fn arguments(source: &str, destination: &str) -> Arguments {
    Arguments {
        source: parse_location(source.into()).unwrap(),
        destination: parse_location(destination.into()).unwrap(),
        mode: None,
        deadline: None,
        progress_timeout: Some(9.0),
        readiness: ReadinessArguments { wait: 0 },
    }
}

fn blob() -> Value {
    json!({
        "uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "state": "created", "metadata": {}, "version": 6, "size": 9,
        "modified": null, "fetched_at": 0.0, "depends_on": null, "transcodes": {}, "locations": [],
        "reference_count": 1, "sha512": null, "checksums": {}, "last_used": null, "references_to": {},
        "references_from": {}
    })
}

#[test]
fn locations_are_distinguished_by_their_colon() {
    let guest = |instance: &str, path: &str| Location::Guest { instance: instance.into(), path: path.into() };
    for (text, expected) in [
        ("web:/etc/hosts", guest("web", "/etc/hosts")),
        ("web:/a:b", guest("web", "/a:b")),
        ("-", Location::Stream),
        ("./web:/etc", Location::File("./web:/etc".into())),
        ("/tmp/a:b", Location::File("/tmp/a:b".into())),
        (":x", Location::File(":x".into())),
        ("file", Location::File("file".into())),
    ] {
        assert_eq!(parse_location(text.into()), Ok(expected), "{text}");
    }
    for text in ["web:hosts", "web:", "web:/", "web:~/x"] {
        assert!(parse_location(text.into()).is_err(), "{text}");
    }
}

#[test]
fn modes_are_octal_or_symbolic() {
    assert_eq!(parse_mode("0755"), Ok(ChmodMode::Number(0o755)));
    assert_eq!(parse_mode("ugo+r"), Ok(ChmodMode::Symbolic("ugo+r".into())));
    for text in ["", "8", "77777", "0o7", "rw", "u+x;ls"] {
        assert!(parse_mode(text).is_err(), "{text}");
    }
}

#[test]
fn directory_keeps_the_file_name() {
    assert_eq!(guest_path("/tmp/", Some("a")).unwrap(), "/tmp/a");
    assert_eq!(guest_path("/tmp/b", Some("a")).unwrap(), "/tmp/b");
    assert!(guest_path("/tmp/", None).is_err());
    let directory = tempfile::tempdir().unwrap();
    let guest = GuestFile { instance: "web", path: "/etc/hosts" };
    let location = Location::File(directory.path().to_owned());
    assert_eq!(local_target(guest, &location).unwrap(), DownloadTarget::File(directory.path().join("hosts")));
    assert!(local_target(GuestFile { path: "/etc/", ..guest }, &location).is_err());
    assert!(local_target(guest, &Location::File(directory.path().join("absent/"))).is_err());
    assert!(open_local(directory.path()).unwrap_err().to_string().contains("is a directory"));
}

#[tokio::test]
async fn exactly_one_location_is_in_a_guest() {
    for (source, destination, expected) in
        [("a", "b", "neither file is in a guest"), ("web:/a", "db:/a", "both files are in guests")]
    {
        let (client, fake) = FakeServer::start(vec![]).await;
        let error = run(arguments(source, destination), &Session { client, format: Format::Table })
            .await
            .unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(fake.requests().len(), 0);
    }
}

#[tokio::test]
async fn copy_from_a_guest_keeps_content_and_mode() {
    let directory = tempfile::tempdir().unwrap();
    let result = json!({ "0": {
        "path": "/a", "result": true, "content_blob": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "stat_result": { "mode": 0o104_640, "size": 9 }
    } });
    let (client, fake) = FakeServer::start(vec![
        ("POST /instances/web/agent/get", vec![(200, json!(example(&json!({ "state": "queued" }))))]),
        (SHOW, vec![(200, json!(example(&json!({ "results": result }))))]),
        ("GET /blobs/1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, blob())]),
        ("GET /blobs/1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/checksum/sha512", vec![(200, json!(null))]),
        ("GET /blobs/1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/data", vec![(200, json!("content"))]),
    ])
    .await;
    let file = directory.path().join("a");
    fs::write(&file, "old").unwrap();
    let arguments = arguments("web:/a", directory.path().to_str().unwrap());
    run(arguments, &Session { client, format: Format::Table }).await.unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "\"content\"");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & PERMISSION_BITS, 0o640);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    let request = r#"POST /instances/web/agent/get {"path":"/a","progress_timeout_seconds":9.0}"#;
    assert_eq!(fake.requests()[1], request);
}

#[tokio::test]
async fn refused_copy_leaves_no_local_file() {
    let directory = tempfile::tempdir().unwrap();
    let failed = json!({ "state": "error", "error_message": "no such file", "results": {} });
    let (client, _) = FakeServer::start(vec![
        ("POST /instances/web/agent/get", vec![(200, json!(example(&json!({ "state": "queued" }))))]),
        (SHOW, vec![(200, json!(example(&failed)))]),
    ])
    .await;
    let arguments = arguments("web:/a", directory.path().join("b").to_str().unwrap());
    let error = run(arguments, &Session { client, format: Format::Table }).await.unwrap_err();
    assert_eq!(error.to_string(), "no such file");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn temporary_artifact_is_deleted() {
    let artifact = json!({
        "uuid": ARTIFACT, "name": "cp-x", "namespace": "ci", "artifact_type": "other", "state": "created",
        "error_message": null, "source_url": "x", "shared": false, "max_versions": 3, "index": 1, "blobs": {},
        "metadata": {}, "version": 9, "last_cluster_operation": null, "references_to": {}, "references_from": {}
    });
    let mut version = blob();
    version["index"] = json!(1);
    let upload: UploadId = serde_json::from_value(json!("0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01")).unwrap();
    let (client, fake) = FakeServer::start(vec![
        ("POST /artifacts/upload/cp-0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, artifact.clone())]),
        ("GET /artifacts/3d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/versions", vec![(200, json!([version]))]),
        ("POST /instances/web/agent/put", vec![(200, json!(example(&json!({ "state": "preflight" }))))]),
        ("DELETE /artifacts/3d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, artifact)]),
        ("GET /instances/web", vec![(200, json!(instance(&json!({ "agent_state": "ready" }))))]),
    ])
    .await;
    let session = Session { client, format: Format::Table };
    let (arguments, pending, temporary) =
        (arguments("-", "web:/a"), PendingOperation::default(), Cell::new(None));
    let copy =
        CopyToGuest { session: &session, arguments: &arguments, pending: &pending, temporary: &temporary };
    let uploaded = Uploaded { upload, sha512: "ab".into(), summary: String::new() };
    let blob = create_blob(&session.client, &uploaded, &temporary).await.unwrap();
    let guest = GuestFile { instance: "web", path: "/a" };
    copy.submit_put(&blob, guest, Some(&ChmodMode::Number(0o644))).await.unwrap();
    delete_temporary(&session.client, &temporary).await;
    delete_temporary(&session.client, &temporary).await;
    let calls = fake.requests();
    let put = r#"{"blob_uuid":"1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01","mode":420,"path":"/a","progress_timeout_seconds":9.0}"#;
    assert_eq!(calls[2], format!("POST /instances/web/agent/put {put}"));
    assert_eq!(calls[3..], [format!("DELETE /artifacts/{ARTIFACT}")]);
}
