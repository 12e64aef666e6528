//! Artifacts, blobs, labels and uploads, on simulated nodes with real files.

mod blob_copies;

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Method, Request};
use muster_control::{objects, reconcile};
use muster_test_cluster::{ApiResponse, Cluster, caller, wait_for};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::networks::{delete, get, post};

/// Uploads bytes as a version of the named artifact and returns its record.
pub(crate) async fn upload(cluster: &Cluster, token: &str, name: &str, bytes: &[u8]) -> Value {
    let response = try_upload(cluster, token, name, bytes, json!({})).await;
    assert_eq!(response.status, 200, "{}", response.text);
    response.body
}

pub(crate) async fn try_upload(
    cluster: &Cluster,
    token: &str,
    name: &str,
    bytes: &[u8],
    fields: Value,
) -> ApiResponse {
    let id = begin_upload(cluster, token).await;
    let path = format!("/upload/{id}");
    let response = cluster.send(token, Method::POST, &path, bytes.to_vec()).await;
    assert_eq!((response.status.as_u16(), response.body), (200, json!(bytes.len())));
    let mut body = fields;
    body["upload_uuid"] = json!(id);
    cluster.call(token, Method::POST, &format!("/artifacts/upload/{name}"), Some(body)).await
}

async fn begin_upload(cluster: &Cluster, token: &str) -> String {
    let response = cluster.call(token, Method::POST, "/upload", None).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["state"]),
        (200, &json!("created")),
        "{}",
        response.text
    );
    response.body["uuid"].as_str().unwrap().to_owned()
}

async fn cluster(settings: &[(&str, &str)]) -> (Cluster, String) {
    crate::networks::cluster(settings).await
}

fn text<'a>(record: &'a Value, key: &str) -> &'a str {
    record[key].as_str().unwrap()
}

async fn data(cluster: &Cluster, token: &str, blob: &str, query: &str) -> ApiResponse {
    get(cluster, token, &format!("/blobs/{blob}/data{query}")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_artifact_and_reads_it_back() {
    let (cluster, token) = cluster(&[]).await;
    let artifact = upload(&cluster, &token, "notes", b"hello muster").await;
    assert_eq!((text(&artifact, "state"), text(&artifact, "artifact_type")), ("created", "image"));
    assert_eq!((text(&artifact, "name"), text(&artifact, "source_url")), ("notes", "sf://upload/ci/notes"));
    assert_eq!(
        (&artifact["index"], &artifact["max_versions"], &artifact["shared"]),
        (&json!(1), &json!(3), &json!(false))
    );
    let blob = text(&artifact, "blob_uuid");
    assert_eq!(artifact["blobs"]["1"]["uuid"], blob);
    assert_eq!(artifact["blobs"]["1"]["size"], 12);
    assert_eq!(artifact["blobs"]["1"]["reference_count"], 1);

    let record = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    assert_eq!((text(&record, "state"), &record["size"]), ("created", &json!(12)));
    assert_eq!((&record["locations"], &record["instances"]), (&json!(["sim-1"]), &json!([])));
    assert_eq!((&record["transcodes"], &record["depends_on"]), (&json!({}), &Value::Null));
    assert_eq!(record["references_to"]["version"][0]["source_uuid"], artifact["uuid"]);
    assert_eq!(text(&record, "file format"), "raw");
    for (algorithm, digits) in [("sha1", 40), ("sha256", 64), ("sha512", 128), ("xxh128", 32)] {
        let checksum = get(&cluster, &token, &format!("/blobs/{blob}/checksum/{algorithm}")).await.body;
        assert_eq!(checksum, record["checksums"][algorithm]);
        assert_eq!(checksum.as_str().unwrap().len(), digits);
    }
    assert_eq!(text(&record["checksums"], "sha1"), sha1(b"hello muster"));

    let whole = data(&cluster, &token, blob, "").await;
    assert_eq!((whole.status.as_u16(), whole.text.as_str()), (200, "hello muster"));
    assert_eq!(whole.headers["content-type"], "text/plain");
    assert_eq!(whole.headers["content-length"], "12");
    assert_eq!(data(&cluster, &token, blob, "?offset=6").await.text, "muster");
    assert_eq!(data(&cluster, &token, blob, "?offset=6&limit=3").await.text, "mus");
    let end = data(&cluster, &token, blob, "?offset=12&limit=536870912").await;
    assert_eq!((end.status.as_u16(), end.text.as_str()), (200, ""));
    let beyond = data(&cluster, &token, blob, "?offset=99").await;
    assert_eq!((beyond.status.as_u16(), beyond.text.as_str()), (200, ""));
    for (query, error) in
        [("?offset=-1", "offset cannot be negative"), ("?limit=-1", "limit cannot be negative")]
    {
        let response = data(&cluster, &token, blob, query).await;
        assert_eq!((response.status.as_u16(), text(&response.body, "error")), (400, error));
    }
    let used = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    assert!(used["last_used"].is_number());
}

fn sha1(bytes: &[u8]) -> String {
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, bytes);
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_byte_ranges() {
    let (cluster, token) = cluster(&[]).await;
    let artifact = upload(&cluster, &token, "notes", b"0123456789").await;
    let path = format!("/blobs/{}/data", text(&artifact, "blob_uuid"));
    let request_range = async |range: &str, extra_header: Option<(&str, &str)>| {
        let mut request = Request::builder().uri(&path).header("authorization", format!("Bearer {token}"));
        request = request.header("range", range);
        if let Some((name, value)) = extra_header {
            request = request.header(name, value);
        }
        cluster.request(request.body(Body::empty()).unwrap()).await
    };
    let part = request_range("bytes=2-4", None).await;
    assert_eq!((part.status.as_u16(), part.text.as_str()), (206, "234"));
    assert_eq!(part.headers["content-range"], "bytes 2-4/10");
    let tag = part.headers["etag"].to_str().unwrap().to_owned();
    assert_eq!(request_range("bytes=-3", Some(("if-range", &tag))).await.text, "789");
    let whole = request_range("bytes=2-4", Some(("if-range", "\"other\""))).await;
    assert_eq!((whole.status.as_u16(), whole.text.as_str()), (200, "0123456789"));
    let beyond = request_range("bytes=10-", None).await;
    assert_eq!(
        (beyond.status.as_u16(), beyond.headers["content-range"].to_str().unwrap()),
        (416, "bytes */10")
    );
    assert_eq!(request_range("bytes=0-1,4-5", None).await.text, "0123456789");
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_and_truncates_upload() {
    let (cluster, token) = cluster(&[]).await;
    let id = begin_upload(&cluster, &token).await;
    let path = format!("/upload/{id}");
    let send = async |query: &str, bytes: &[u8]| {
        cluster.send(&token, Method::POST, &format!("{path}{query}"), bytes.to_vec()).await
    };
    let truncate =
        async |offset: &str| post(&cluster, &token, &format!("{path}/truncate/{offset}"), json!({})).await;
    assert_eq!(truncate("0").await.status, 200, "truncating an empty upload to zero is allowed");
    assert_eq!(truncate("1").await.body["error"], "upload has no data");
    // Content that looks like JSON is stored as bytes.
    assert_eq!(send("", br#"{"a": 1}"#).await.body, json!(8));
    assert_eq!(send("?offset=8", b"tail").await.body, json!(12));
    let again = send("?offset=8", b"tail").await;
    assert_eq!(again.status, 409, "{}", again.text);
    assert_eq!(get(&cluster, &token, &path).await.body["size"], 12);
    assert_eq!(truncate("13").await.body["error"], "offset is beyond the end of the upload");
    assert_eq!(truncate("-1").await.status, 404);
    assert_eq!(truncate("x").await.status, 404);
    assert_eq!((truncate("8").await.status.as_u16(), truncate("8").await.body), (200, Value::Null));
    assert_eq!(send("", b"TAIL").await.body, json!(12));
    assert_eq!(send("?offset=x", b"").await.status, 400);
    assert_eq!(send("?other=1", b"").await.status, 400);
    let body = json!({"upload_uuid": id, "artifact_type": "other"});
    let created = post(&cluster, &token, "/artifacts/upload/x", body.clone()).await;
    assert_eq!((created.status.as_u16(), text(&created.body, "artifact_type")), (200, "other"));
    assert_eq!(data(&cluster, &token, text(&created.body, "blob_uuid"), "").await.text, r#"{"a": 1}TAIL"#);
    // The upload is consumed.
    for response in [send("", b"more").await, truncate("0").await, get(&cluster, &token, &path).await] {
        assert_eq!((response.status.as_u16(), text(&response.body, "error")), (404, "upload not found"));
    }
    assert_eq!(post(&cluster, &token, "/artifacts/upload/x", body).await.body["error"], "upload not found");
    for path in ["/upload/nonsense", "/upload/1d6ff04e-0000-4000-8000-000000000000"] {
        assert_eq!(send_to(&cluster, &token, path).await.status, 404);
    }
}

async fn send_to(cluster: &Cluster, token: &str, path: &str) -> ApiResponse {
    cluster.send(token, Method::POST, path, b"x".to_vec()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_upload_to_maximum_image_size() {
    let (cluster, token) = cluster(&[("MAX_IMAGE_SIZE_GB", "0.002")]).await;
    let id = begin_upload(&cluster, &token).await;
    let path = format!("/upload/{id}");
    let piece = vec![7u8; 1_500_000];
    assert_eq!(cluster.send(&token, Method::POST, &path, piece.clone()).await.body, json!(1_500_000));
    let second = cluster.send(&token, Method::POST, &path, piece).await;
    assert_eq!(second.status, 413, "{}", second.text);
    assert_eq!(get(&cluster, &token, &path).await.body["size"], 1_500_000, "the upload is unchanged");
}

#[tokio::test(flavor = "multi_thread")]
async fn deduplicates_content_without_revealing_other_users() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let other = cluster.token("other").await;
    let system = cluster.token("system").await;
    let mine = upload(&cluster, &token, "mine", b"a secret that others may have").await;
    let blob = text(&mine, "blob_uuid").to_owned();
    let record = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    let checksum = text(&record, "sha512").to_owned();
    let search =
        async |token: &str| get(&cluster, token, &format!("/blob_checksums/sha512/{checksum}")).await;
    assert_eq!(search(&token).await.body["uuid"], blob);
    assert_eq!(search(&system).await.body["uuid"], blob);
    let unknown = search(&other).await;
    assert_eq!(
        (unknown.status.as_u16(), unknown.body),
        (200, Value::Null),
        "knowing a checksum does not prove possession of the content"
    );
    // A caller who uploaded the same bytes can find the blob.
    let theirs = upload(&cluster, &other, "theirs", b"a secret that others may have").await;
    assert_eq!(text(&theirs, "blob_uuid"), blob);
    assert_eq!(search(&other).await.body["uuid"], blob);
    let seen = get(&cluster, &other, &format!("/blobs/{blob}")).await.body;
    assert_eq!(seen["reference_count"], 1, "uses by other namespaces are hidden");
    assert_eq!(get(&cluster, &system, &format!("/blobs/{blob}")).await.body["reference_count"], 2);
    let references = seen["references_to"]["version"].as_array().unwrap();
    assert_eq!(references.len(), 1, "references of other namespaces are hidden");
    assert_eq!(references[0]["source_uuid"], theirs["uuid"]);
    let files = std::fs::read_dir(cluster.directory().join("1/blobs")).unwrap().count();
    assert_eq!(files, 1);
    // Trust makes the blob visible as well.
    cluster.create_namespace("third").await;
    let third = cluster.token("third").await;
    assert_eq!(search(&third).await.body, Value::Null);
    objects::trust::add(&cluster.app, &caller(), "ci", "third").await.unwrap();
    assert_eq!(search(&third).await.body["uuid"], blob);
    for (path, error) in [("md5/00", "unknown hash algorithm"), ("sha256/", "you must specify a hash")] {
        let response = get(&cluster, &token, &format!("/blob_checksums/{path}")).await;
        assert_eq!(text(&response.body, "error"), error);
    }
    assert_eq!(get(&cluster, &token, &format!("/blobs/{blob}/checksum/md5")).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_trims_and_deletes_versions() {
    let (cluster, token) = cluster(&[]).await;
    cluster.allow_undocumented_requests("released clients send the number of versions as a string");
    for number in 1..=5 {
        let artifact = upload(&cluster, &token, "v", format!("version {number}").as_bytes()).await;
        assert_eq!(artifact["index"], number);
    }
    let same = upload(&cluster, &token, "v", b"version 5").await;
    assert_eq!(same["index"], 5, "identical to the newest version");
    let keys = |record: &Value| record["blobs"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&same), ["3", "4", "5"]);
    let list = get(&cluster, &token, "/artifacts/v/versions").await.body;
    let indexes: Vec<i64> = list.as_array().unwrap().iter().map(|v| v["index"].as_i64().unwrap()).collect();
    assert_eq!(indexes, [3, 4, 5]);
    assert_eq!((&list[0]["state"], &list[0]["instances"]), (&json!("created"), &json!([])));

    let set_max_versions = async |value: Value| {
        post(&cluster, &token, "/artifacts/v/versions", json!({"max_versions": value})).await
    };
    assert_eq!(set_max_versions(json!("many")).await.body["error"], "max version is not an integer");
    assert_eq!(set_max_versions(json!(-1)).await.body["error"], "max version cannot be negative");
    assert_eq!(
        (set_max_versions(json!(2)).await.status.as_u16(), set_max_versions(json!("2")).await.body),
        (200, Value::Null)
    );
    assert_eq!(keys(&get(&cluster, &token, "/artifacts/v").await.body), ["4", "5"]);
    assert_eq!(
        delete(&cluster, &token, "/artifacts/v/versions/x").await.body["error"],
        "version index is not an integer"
    );
    assert_eq!(
        delete(&cluster, &token, "/artifacts/v/versions/3").await.body["error"],
        "artifact index not found"
    );
    let remaining = delete(&cluster, &token, "/artifacts/v/versions/5").await.body;
    assert_eq!((keys(&remaining), &remaining["index"]), (vec!["4".to_owned()], &json!(4)));
    // Version numbers are not reused.
    assert_eq!(upload(&cluster, &token, "v", b"version 6").await["index"], 6);
    delete(&cluster, &token, "/artifacts/v/versions/6").await;
    let deleted = delete(&cluster, &token, "/artifacts/v/versions/4").await.body;
    assert_eq!(
        (text(&deleted, "state"), &deleted["index"], &deleted["blobs"]),
        ("deleted", &json!(0), &json!({}))
    );
    assert_eq!(get(&cluster, &token, "/artifacts/v").await.status, 404);
    let id = text(&deleted, "uuid");
    assert_eq!(get(&cluster, &token, &format!("/artifacts/{id}")).await.body["state"], "deleted");
    assert_eq!(delete(&cluster, &token, &format!("/artifacts/{id}")).await.body, Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_shares_and_deletes_artifacts() {
    let (cluster, token) = cluster(&[]).await;
    let system = cluster.token("system").await;
    let shared = try_upload(&cluster, &system, "tiny", b"for all", json!({"shared": true})).await.body;
    assert_eq!(shared["shared"], true);
    upload(&cluster, &token, "mine", b"for me").await;
    let names = async |token: &str| {
        let list = get(&cluster, token, "/artifacts").await.body;
        let mut names: Vec<String> =
            list.as_array().unwrap().iter().map(|a| text(a, "name").to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&token).await, ["mine", "tiny"]);
    let response = try_upload(&cluster, &token, "mine", b"x", json!({"shared": true})).await;
    assert_eq!(text(&response.body, "error"), "only the system namespace can create shared artifacts");
    assert_eq!(get(&cluster, &token, "/artifacts/tiny").await.body["uuid"], shared["uuid"]);
    assert_eq!(
        delete(&cluster, &token, "/artifacts/tiny").await.status,
        404,
        "read access does not allow deletion"
    );
    let id = text(&shared, "uuid");
    assert_eq!(delete(&cluster, &token, &format!("/artifacts/{id}")).await.status, 404);
    assert_eq!(get(&cluster, &token, &format!("/artifacts/{id}/metadata")).await.status, 404);
    let response = post(&cluster, &system, "/artifacts/tiny/unshare", json!({})).await;
    assert_eq!(response.body["shared"], false);
    assert_eq!(
        post(&cluster, &system, "/artifacts/tiny/unshare", json!({})).await.body["error"],
        "artifact not shared"
    );
    assert_eq!(names(&token).await, ["mine"]);
    assert_eq!(get(&cluster, &token, &format!("/artifacts/{id}")).await.status, 404);
    assert_eq!(post(&cluster, &system, "/artifacts/tiny/share", json!({})).await.body["shared"], true);
    let error_of = |response: ApiResponse| text(&response.body, "error").to_owned();
    assert_eq!(
        error_of(post(&cluster, &token, "/artifacts/mine/share", json!({})).await),
        "only artifacts in the system namespace can be shared"
    );
    // A label of the same name does not make the reference ambiguous.
    let label = json!({"blob_uuid": shared["blob_uuid"]});
    assert_eq!(post(&cluster, &system, "/label/tiny", label).await.status, 200);
    assert_eq!(get(&cluster, &system, "/artifacts/tiny").await.body["uuid"], shared["uuid"]);
    // Names resolve to the caller's own artifact first.
    upload(&cluster, &token, "tiny", b"my own").await;
    assert_eq!(get(&cluster, &token, "/artifacts/tiny").await.body["namespace"], "ci");
    assert_eq!(get(&cluster, &system, "/artifacts/tiny").await.body["namespace"], "system");
    assert_eq!(get(&cluster, &system, "/artifacts/mine").await.body["namespace"], "ci");
    let within =
        cluster.call(&system, Method::GET, "/artifacts/tiny", Some(json!({"namespace": "ci"}))).await;
    assert_eq!(within.body["namespace"], "ci");

    let delete_all =
        async |token: &str, body: Value| cluster.call(token, Method::DELETE, "/artifacts", Some(body)).await;
    assert_eq!(error_of(delete_all(&token, json!({})).await), "parameter confirm is not set true");
    assert_eq!(
        error_of(delete_all(&system, json!({"confirm": true})).await),
        "system user must specify parameter namespace"
    );
    let response = delete_all(&token, json!({"confirm": true, "namespace": "system"})).await;
    assert_eq!(
        (response.status.as_u16(), error_of(response)),
        (401, "you cannot delete other namespaces".into())
    );
    assert_eq!(delete_all(&token, json!({"confirm": true})).await.body.as_array().unwrap().len(), 2);
    assert_eq!(names(&token).await, ["tiny"], "the shared artifact remains");
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_namespace_adds_only_first_version() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("friend").await;
    let friend = cluster.token("friend").await;
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let fields = json!({"namespace": "ci", "source_url": "sf://upload/ci/gift"});
    let first = try_upload(&cluster, &friend, "gift", b"one", fields.clone()).await;
    assert_eq!((first.status.as_u16(), text(&first.body, "namespace")), (200, "ci"));
    let blob = text(&first.body, "blob_uuid");
    let second = try_upload(&cluster, &friend, "gift", b"two", fields.clone()).await;
    assert_eq!((second.status.as_u16(), text(&second.body, "error")), (404, "namespace not found"));
    // A different artifact type makes no difference.
    let mut other = fields.clone();
    other["artifact_type"] = json!("other");
    assert_eq!(try_upload(&cluster, &friend, "gift", b"two", other).await.status, 404);
    assert_eq!(try_upload(&cluster, &token, "gift", b"two", json!({})).await.body["index"], 2);
    // The same applies to labels.
    let label = json!({"blob_uuid": blob});
    assert_eq!(
        post(&cluster, &friend, "/label/ci/best", label.clone()).await.body["source_url"],
        "sf://label/ci/best"
    );
    let again = post(&cluster, &friend, "/label/ci/best", label.clone()).await;
    assert_eq!((again.status.as_u16(), text(&again.body, "error")), (404, "namespace not found"));
    assert_eq!(post(&cluster, &token, "/label/best", label.clone()).await.status, 200);
    assert_eq!(get(&cluster, &friend, "/label/ci/best").await.status, 200);
    assert_eq!(delete(&cluster, &friend, "/label/ci/best").await.body["error"], "label ci/best not found");
    assert_eq!(post(&cluster, &friend, "/label/system/best", label.clone()).await.status, 404);
    assert_eq!(post(&cluster, &friend, "/label/a/b/c", label).await.status, 400);
    assert_eq!(
        post(&cluster, &token, "/label/best", json!({})).await.body["error"],
        "blob_uuid: Missing data for required field."
    );
    let unknown_blob = json!({"blob_uuid": "1d6ff04e-0000-4000-8000-000000000000"});
    assert_eq!(post(&cluster, &token, "/label/best", unknown_blob).await.body["error"], "blob not found");
    // Trust does not allow deletion.
    let id = text(&first.body, "uuid");
    assert_eq!(delete(&cluster, &friend, &format!("/artifacts/{id}")).await.status, 404);
    assert_eq!(delete(&cluster, &token, "/label/best").await.body["state"], "deleted");
    assert_eq!(get(&cluster, &token, "/label/best").await.body["error"], "label best not found");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_input_without_side_effects() {
    let (cluster, token) = cluster(&[]).await;
    let artifact = upload(&cluster, &token, "x", b"x").await;
    let blob = text(&artifact, "blob_uuid");
    let id = begin_upload(&cluster, &token).await;
    let path = "/artifacts/upload/y";
    for (body, status, error) in [
        (json!({}), 400, "specify one of upload_uuid and blob_uuid"),
        (json!({"upload_uuid": id, "blob_uuid": blob}), 400, "only specify one of upload_uuid and blob_uuid"),
        (json!({"upload_uuid": "x"}), 404, "upload not found"),
        (json!({"blob_uuid": "x"}), 404, "blob not found"),
        (json!({"blob_uuid": blob, "artifact_type": "snapshot"}), 403, "invalid artifact type specified"),
        (json!({"blob_uuid": blob, "namespace": "absent"}), 404, "namespace not found"),
        (json!({"blob_uuid": blob, "namespace": "system"}), 404, "namespace not found"),
        (
            json!({"blob_uuid": blob, "source_url": "a\nb"}),
            400,
            "source_url: must not contain control characters",
        ),
        (json!({"blob_uuid": 7}), 400, "blob_uuid: Not a valid string."),
        (json!({"blob": blob}), 400, "blob: not declared by this endpoint"),
    ] {
        let response = post(&cluster, &token, path, body.clone()).await;
        assert_eq!((response.status.as_u16(), text(&response.body, "error")), (status, error), "{body}");
    }
    assert_eq!(get(&cluster, &token, "/artifacts").await.body.as_array().unwrap().len(), 1);
    for (body, error) in [
        (json!({}), "url: Missing data for required field."),
        (json!({"url": "nonsense"}), "url: is neither a URL nor the name of a known image"),
        (
            json!({"url": "http://127.0.0.1/x"}),
            "url: 127.0.0.1 is at a loopback address, which IMAGE_FETCH_ALLOWED_NETWORKS does not allow",
        ),
        (
            json!({"url": "http://[::1]/x"}),
            "url: [::1] is at a loopback address, which IMAGE_FETCH_ALLOWED_NETWORKS does not allow",
        ),
        (
            json!({"url": "http://0x7f.1/x"}),
            "url: 127.0.0.1 is at a loopback address, which IMAGE_FETCH_ALLOWED_NETWORKS does not allow",
        ),
    ] {
        let response = post(&cluster, &token, "/artifacts", body).await;
        assert_eq!((response.status.as_u16(), text(&response.body, "error")), (400, error));
    }
}

/// Returns a qcow2 image whose backing file is a file of the host.
fn image_with_backing_file() -> Vec<u8> {
    let name = b"/etc/hostname";
    let mut bytes = vec![0u8; 1 << 17];
    bytes[..4].copy_from_slice(b"QFI\xfb");
    bytes[4..8].copy_from_slice(&2u32.to_be_bytes());
    bytes[8..16].copy_from_slice(&1024u64.to_be_bytes());
    bytes[16..20].copy_from_slice(&13u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&16u32.to_be_bytes());
    bytes[24..32].copy_from_slice(&(1u64 << 20).to_be_bytes());
    bytes[1024..1024 + name.len()].copy_from_slice(name);
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_image_with_backing_file_but_stores_it_as_other() {
    let (cluster, token) = cluster(&[]).await;
    let refused = try_upload(&cluster, &token, "evil", &image_with_backing_file(), json!({})).await;
    assert_eq!(refused.status, 400, "{}", refused.text);
    assert!(text(&refused.body, "error").contains("backing file"), "{}", refused.text);
    assert!(!refused.text.contains("hostname"));
    assert_eq!(get(&cluster, &token, "/artifacts").await.body, json!([]));
    let stored =
        try_upload(&cluster, &token, "evil", &image_with_backing_file(), json!({"artifact_type": "other"}))
            .await;
    assert_eq!(stored.status, 200, "{}", stored.text);
    let blob = json!({"blob_uuid": text(&stored.body, "blob_uuid")});
    let response = post(&cluster, &token, "/artifacts/upload/evil", blob).await;
    assert_eq!(response.status, 400, "images are inspected however they are added: {}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_abandoned_upload() {
    let (cluster, token) = cluster(&[("UPLOAD_MAXIMUM_IDLE_TIME", "1")]).await;
    let id = begin_upload(&cluster, &token).await;
    let path = format!("/upload/{id}");
    cluster.send(&token, Method::POST, &path, b"half a content".to_vec()).await;
    reconcile::storage::run_once(&cluster.app).await.unwrap();
    assert_eq!(get(&cluster, &token, &path).await.status, 200, "not yet");
    wait_for("the upload to be deleted", async || {
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        (get(&cluster, &token, &path).await.status == 404).then_some(())
    })
    .await;
    assert!(!cluster.has_file(&id));
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_namespace_deletes_its_artifacts() {
    let (cluster, token) = cluster(&[]).await;
    let artifact = upload(&cluster, &token, "a", b"x").await;
    let upload_id = begin_upload(&cluster, &token).await;
    objects::namespace::delete(&cluster.app, &caller(), "ci").await.unwrap();
    let system = cluster.token("system").await;
    // A later namespace of the same name does not inherit unfinished uploads.
    assert_eq!(get(&cluster, &system, &format!("/upload/{upload_id}")).await.status, 404);
    let id = text(&artifact, "uuid");
    assert_eq!(get(&cluster, &system, &format!("/artifacts/{id}")).await.body["state"], "deleted");
    let messages = cluster.messages(&ObjectRef::new(ObjectType::Artifact, id)).await;
    assert!(
        messages.iter().any(|m| m == "deletion request via namespace deletion from REST API"),
        "{messages:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_uploads_of_same_content_share_one_blob() {
    let (cluster, token) = cluster(&[]).await;
    let (cluster, token) = (Arc::new(cluster), Arc::new(token));
    let tasks: Vec<_> = (0..8)
        .map(|number| {
            let (cluster, token) = (Arc::clone(&cluster), Arc::clone(&token));
            tokio::spawn(async move {
                let id = begin_upload(&cluster, &token).await;
                cluster.send(&token, Method::POST, &format!("/upload/{id}"), b"the same".to_vec()).await;
                let path = format!("/artifacts/upload/n{number}");
                loop {
                    let response = post(&cluster, &token, &path, json!({"upload_uuid": id})).await;
                    if response.status == 200 {
                        break text(&response.body, "blob_uuid").to_owned();
                    }
                    assert_eq!(
                        response.status, 503,
                        "another caller stores the same content: {}",
                        response.text
                    );
                }
            })
        })
        .collect();
    let mut blobs = Vec::new();
    for task in tasks {
        blobs.push(task.await.unwrap());
    }
    blobs.dedup();
    assert_eq!(blobs.len(), 1, "{blobs:?}");
    cluster.settle().await;
    reconcile::storage::run_once(&cluster.app).await.unwrap();
    let rows = cluster.app.store.query("SELECT COUNT(*) FROM blobs", &[]).await.unwrap();
    assert_eq!(rows[0].scalar::<i64>().unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_artifact_keeps_its_versions_without_references() {
    let (cluster, token) = cluster(&[]).await;
    let first = upload(&cluster, &token, "a", b"one").await;
    let second = upload(&cluster, &token, "a", b"three").await;
    let path = format!("/artifacts/{}", text(&first, "uuid"));
    assert_eq!(first["uuid"], second["uuid"]);
    let before = get(&cluster, &token, &path).await.body;
    assert_eq!(before["blobs"]["1"]["reference_count"], 1);
    let deleted = delete(&cluster, &token, &path).await.body;
    assert_eq!(deleted, get(&cluster, &token, &path).await.body);
    assert_eq!((&deleted["state"], &deleted["index"]), (&json!("deleted"), &before["index"]));
    assert_eq!(deleted["blob_uuid"], before["blob_uuid"]);
    for (index, size) in [("1", 3), ("2", 5)] {
        let version = &deleted["blobs"][index];
        assert_eq!(version["uuid"], before["blobs"][index]["uuid"]);
        assert_eq!((&version["size"], &version["reference_count"]), (&json!(size), &json!(0)), "{deleted}");
        assert_eq!(version["instances"], json!([]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sender_deletes_unused_blob_immediately() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let other = cluster.token("other").await;
    let uploads =
        [upload(&cluster, &token, "a", &[7; 5000]).await, upload(&cluster, &token, "b", &[8; 5000]).await];
    upload(&cluster, &other, "same", &[8; 5000]).await;
    for (uploaded, is_deleted) in uploads.iter().zip([true, false]) {
        let blob = text(uploaded, "blob_uuid");
        let path = format!("/blobs/{blob}");
        let delete =
            async |token: &str| cluster.call(token, Method::DELETE, &path, None).await.status.as_u16();
        assert_eq!(delete(&token).await, 200);
        assert_eq!(data(&cluster, &token, blob, "").await.status, 200, "it is in use");
        let artifact = format!("/artifacts/{}", text(uploaded, "uuid"));
        assert_eq!(cluster.call(&token, Method::DELETE, &artifact, None).await.status, 200);
        assert_eq!(delete(&other).await, if is_deleted { 404 } else { 200 });
        assert_eq!(delete(&token).await, 200);
        let expected = if is_deleted { 404 } else { 200 };
        assert_eq!(data(&cluster, &other, blob, "").await.status, expected, "kept only for another sender");
    }
}
