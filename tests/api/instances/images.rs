//! Base images of disks and NVRAM templates.

use axum::http::Method;
use muster_control::{objects, reconcile};
use muster_test_cluster::caller;
use muster_testing::web_server::{Reply, WebServer};
use serde_json::{Value, json};

use super::{create, create_and_settle, id, path, show, status_and_error, text, try_create};
use crate::artifacts::upload;
use crate::networks::{cluster, delete, get, post};

const FAST_SETTINGS: &[(&str, &str)] = &[
    ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"),
    ("IMAGE_STALL_TIMEOUT", "1"),
    ("CLUSTER_OP_LEASE", "1"),
    ("CLUSTER_OP_MAX_ATTEMPTS", "1"),
    ("BLOB_DELETION_DELAY", "0"),
];

fn with_base(base: &str) -> Value {
    json!({"disk": [{"base": base}]})
}

#[tokio::test(flavor = "multi_thread")]
async fn resolves_uploaded_image_by_every_reference_and_keeps_it_while_used() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    let image = upload(&cluster, &token, "img", &[1; 70_000]).await;
    let (artifact, blob) = (text(&image, "uuid"), text(&image, "blob_uuid"));
    assert_eq!(post(&cluster, &token, "/label/lab", json!({"blob_uuid": blob})).await.status, 200);
    let mut created = Vec::new();
    for (number, base) in [
        "sf://upload/ci/img".to_owned(),
        format!("sf://artifact/{artifact}"),
        format!("sf://blob/{blob}"),
        "label:lab".to_owned(),
        "sf://label/ci/lab".to_owned(),
    ]
    .iter()
    .enumerate()
    {
        let record = create(&cluster, &token, &format!("n{number}"), &with_base(base)).await;
        assert_eq!(
            record["disk_spec"][0],
            json!({"size": null, "base": base, "bus": "virtio", "type": "disk", "blob_uuid": blob})
        );
        assert_eq!(
            (&record["disks"][0]["blob_uuid"], &record["disks"][0]["size"]),
            (&json!(blob), &json!(1))
        );
        let reference = &record["references_from"]["disk"][0];
        assert_eq!(
            (text(reference, "source_object_type"), &reference["source_uuid"]),
            ("instance", &record["uuid"])
        );
        assert_eq!((text(reference, "target_object_type"), text(reference, "target_uuid")), ("blob", blob));
        assert_eq!((text(reference, "relationship"), text(reference, "relationship_value")), ("disk", "0"));
        created.push(record);
    }
    let fetched = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    assert_eq!(fetched["instances"].as_array().unwrap().len(), 5, "{fetched}");
    let delete_unused = async || reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    delete(&cluster, &token, &format!("/artifacts/{artifact}")).await;
    delete(&cluster, &token, "/label/lab").await;
    delete_unused().await;
    assert_eq!(
        get(&cluster, &token, &format!("/blobs/{blob}")).await.body["state"],
        "created",
        "instances use it"
    );
    for record in &created {
        delete(&cluster, &token, &path(record, "")).await;
    }
    cluster.settle().await;
    delete_unused().await;
    assert_eq!(get(&cluster, &token, &format!("/blobs/{blob}")).await.body["state"], "deleted");
    assert_eq!(
        status_and_error(
            &try_create(&cluster, &token, "late", &with_base(&format!("sf://blob/{blob}"))).await
        ),
        (404, "blob not found")
    );
    assert_eq!(
        status_and_error(
            &try_create(&cluster, &token, "late", &with_base(&format!("sf://artifact/{artifact}"))).await
        ),
        (404, "artifact not found")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn uses_images_of_others_only_if_shared_or_trusted() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    cluster.create_namespace("beta").await;
    let (beta, system) = (cluster.token("beta").await, cluster.token("system").await);
    let beta_image = upload(&cluster, &beta, "img", &[1; 5000]).await;
    let shared = upload(&cluster, &system, "img", &[2; 5000]).await;
    let hidden = with_base("sf://upload/beta/img");
    assert_eq!(
        status_and_error(&try_create(&cluster, &token, "no", &hidden).await),
        (404, "artifact not found")
    );
    assert_eq!(
        status_and_error(
            &try_create(
                &cluster,
                &token,
                "no",
                &with_base(&format!("sf://artifact/{}", text(&beta_image, "uuid")))
            )
            .await
        ),
        (404, "artifact not found")
    );
    assert_eq!(
        status_and_error(&try_create(&cluster, &token, "no", &with_base("sf://upload/system/img")).await),
        (404, "artifact not found")
    );
    objects::trust::add(&cluster.app, &caller(), "beta", "ci").await.unwrap();
    create(&cluster, &token, "trusted", &hidden).await;
    assert_eq!(
        post(&cluster, &system, &format!("/artifacts/{}/share", text(&shared, "uuid")), json!({}))
            .await
            .status,
        200
    );
    create(&cluster, &token, "shared", &with_base("sf://upload/system/img")).await;
    // Anyone who knows a blob's id may use it.
    create(&cluster, &token, "known", &with_base(&format!("sf://blob/{}", text(&beta_image, "blob_uuid"))))
        .await;
    // Labels resolve in the caller's namespace, whichever namespace the instance belongs to.
    post(&cluster, &token, "/label/mine", json!({"blob_uuid": beta_image["blob_uuid"]})).await;
    let in_beta = json!({"namespace": "beta", "disk": [{"base": "label:mine"}]});
    let in_beta = create(&cluster, &token, "there", &in_beta).await;
    assert_eq!(in_beta["namespace"], "beta");
    assert_eq!(try_create(&cluster, &beta, "here", &with_base("label:mine")).await.status, 404);
    // The instances that use an image are listed only for callers who may see them.
    cluster.create_namespace("gamma").await;
    let stranger = cluster.token("gamma").await;
    let blob_path = format!("/blobs/{}", text(&beta_image, "blob_uuid"));
    for (caller_token, users) in [(&token, 3), (&system, 3), (&beta, 1), (&stranger, 0)] {
        let fetched = get(&cluster, caller_token, &blob_path).await.body;
        assert_eq!(fetched["instances"].as_array().unwrap().len(), users, "{fetched}");
    }
    let fetched = get(&cluster, &beta, &format!("/artifacts/{}", text(&beta_image, "uuid"))).await.body;
    assert_eq!(fetched["blobs"]["1"]["instances"], json!([in_beta["uuid"]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn label_of_system_is_used_if_it_is_shared_and_the_namespace_has_none() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    let system = cluster.token("system").await;
    let image = upload(&cluster, &system, "img", &[1; 70_000]).await;
    let label = post(&cluster, &system, "/label/tiny", json!({"blob_uuid": image["blob_uuid"]})).await.body;
    assert_eq!(try_create(&cluster, &token, "no", &with_base("label:tiny")).await.status, 404);
    assert_eq!(get(&cluster, &token, "/label/tiny").await.status, 404);
    post(&cluster, &system, &format!("/artifacts/{}/share", text(&label, "uuid")), json!({})).await;
    let record = create(&cluster, &token, "shared", &with_base("label:tiny")).await;
    assert_eq!(record["disks"][0]["blob_uuid"], image["blob_uuid"]);
    assert_eq!(get(&cluster, &token, "/label/tiny").await.body["uuid"], label["uuid"]);
    let own = upload(&cluster, &token, "own", &[2; 70_000]).await;
    post(&cluster, &token, "/label/tiny", json!({"blob_uuid": own["blob_uuid"]})).await;
    let record = create(&cluster, &token, "own", &with_base("label:tiny")).await;
    assert_eq!(record["disks"][0]["blob_uuid"], own["blob_uuid"], "its own comes first");
    assert_eq!(delete(&cluster, &token, "/label/tiny").await.status, 200);
    let record = create(&cluster, &token, "again", &with_base("label:tiny")).await;
    assert_eq!(record["disks"][0]["blob_uuid"], image["blob_uuid"]);
    assert_eq!(delete(&cluster, &token, "/label/tiny").await.status, 404, "only its own can be deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn fetches_image_for_instance_and_revalidates_it_for_the_next() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    let web = WebServer::new(|request, _| match request.header("if-none-match") {
        Some(_) => Reply::status(304),
        None => Reply::ok(&[3; 90_000]).with("ETag", "\"one\""),
    })
    .await;
    let url = web.url("/images/small.img");
    let response = try_create(&cluster, &token, "first", &with_base(&url)).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["disk_spec"][0].get("blob_uuid")),
        (200, &None),
        "{}",
        response.text
    );
    cluster.settle().await;
    let record = show(&cluster, &token, &response.body).await;
    assert_eq!(text(&record, "state"), "created", "{record}");
    let artifact = get(&cluster, &token, "/artifacts/small.img").await.body;
    assert_eq!(
        (&artifact["blob_uuid"], text(&artifact, "source_url")),
        (&record["disks"][0]["blob_uuid"], url.as_str())
    );
    assert_eq!(record["references_from"]["disk"][0]["target_uuid"], artifact["blob_uuid"]);
    let second =
        create(&cluster, &token, "second", &json!({"disk": [{"base": url, "size": 4}, {"base": url}]})).await;
    assert_eq!(
        (&second["disks"][0]["size"], &second["disks"][2]["blob_uuid"]),
        (&json!(4), &artifact["blob_uuid"])
    );
    assert_eq!(get(&cluster, &token, "/artifacts").await.body.as_array().unwrap().len(), 1);
    assert!(web.requests().len() >= 2);
    assert_eq!(web.requests().iter().filter(|request| request.header("if-none-match").is_none()).count(), 1);

    // Another namespace fetches its own, even if it may read the artifact.
    cluster.create_namespace("friend").await;
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let friend = cluster.token("friend").await;
    create(&cluster, &friend, "third", &with_base(&url)).await;
    let fetched = get(&cluster, &friend, "/artifacts/small.img").await.body;
    assert_eq!((&fetched["namespace"], &fetched["blob_uuid"]), (&json!("friend"), &artifact["blob_uuid"]));
    // An artifact that `system` shares is used without revalidation.
    let (system, shared) = (cluster.token("system").await, web.url("/images/shared.img"));
    let response = post(&cluster, &system, "/artifacts", json!({"url": shared, "shared": true})).await;
    assert_eq!(response.status, 200, "{}", response.text);
    cluster.settle().await;
    let before = web.requests().len();
    create(&cluster, &friend, "fourth", &with_base(&shared)).await;
    assert_eq!(web.requests().len(), before);
    assert_eq!(get(&cluster, &friend, "/artifacts/shared.img").await.body["namespace"], "system");
}

#[tokio::test(flavor = "multi_thread")]
async fn resolves_well_known_name_at_download_site() {
    let web = WebServer::new(|_, _| Reply::ok(&[4; 5000])).await;
    let mut settings = FAST_SETTINGS.to_vec();
    let site = web.url("/site");
    settings.push(("IMAGE_DOWNLOAD_URL", &site));
    let (cluster, token) = cluster(&settings).await;
    let record = create(&cluster, &token, "www", &with_base("debian:12")).await;
    assert_eq!(record["disk_spec"][0]["base"], "debian:12");
    let paths: Vec<String> = web.requests().into_iter().map(|paths| paths.path).collect();
    assert_eq!(paths, ["/site/debian:12/latest.qcow2"]);
    let artifact = get(&cluster, &token, "/artifacts").await.body[0].clone();
    assert_eq!(artifact["blob_uuid"], record["disks"][0]["blob_uuid"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_image_puts_instance_into_error_with_reason() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    // A sparse disk of 3 GB.
    let origin = create(&cluster, &token, "origin", &json!({"disk": [{"size": 3}]})).await;
    let snapshot = super::post_action(&cluster, &token, &origin, "snapshot").await.body["vda"].clone();
    cluster.settle().await;
    let large = cluster.download_until_error(&token, text(&snapshot, "blob_uuid")).await;
    let web = WebServer::new(move |request, _| match request.path.as_str() {
        "/large" => Reply::ok(&large),
        "/vmdk" => Reply::ok(b"KDMV of some other house"),
        _ => Reply::status(404),
    })
    .await;
    for (name, url_path, size, reason) in [
        ("absent", "/absent", None, "could not be fetched"),
        ("odd", "/vmdk", None, "VMDK"),
        ("small", "/large", Some(1), "disk[0].size: 1 GB is smaller than the image, which needs 3 GB"),
    ] {
        let overrides = json!({"disk": [{"base": web.url(url_path), "size": size}]});
        let record = create_and_settle(&cluster, &token, name, &overrides).await;
        assert_eq!(text(&record, "state"), "error", "{record}");
        assert!(text(&record, "error_message").contains(reason), "{record}");
        assert_eq!(record["references_from"], json!({}));
    }
    assert_eq!(cluster.vms(), [id(&origin)]);
    assert_eq!(cluster.count_rows("instances", "claimed_cpus > 0").await, 1);
    for forbidden in ["http://169.254.169.254/latest", "file:///etc/passwd", "ftp://x.example/y"] {
        let response = try_create(&cluster, &token, "forbidden", &with_base(forbidden)).await;
        assert_eq!(response.status, 400, "{forbidden}: {}", response.text);
    }
    assert_eq!(get(&cluster, &token, "/instances/forbidden").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn attaches_iso_image_as_cdrom() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    let mut iso = vec![0; 40_000];
    iso[0x8001..0x8006].copy_from_slice(b"CD001");
    upload(&cluster, &token, "disc", &iso).await;
    let record =
        create(&cluster, &token, "www", &json!({"disk": [{"size": 1}, {"base": "sf://upload/ci/disc"}]}))
            .await;
    assert_eq!(
        (text(&record["disk_spec"][1], "type"), text(&record["disk_spec"][1], "base")),
        ("cdrom", "sf://upload/ci/disc")
    );
    let disc = &record["disks"][2];
    assert_eq!(
        (text(disc, "device"), text(disc, "bus"), &disc["snapshot_ignores"]),
        ("sdc", "usb", &json!(true))
    );
    let plan = cluster.node_named(text(&record, "node")).vm_plan(id(&record)).unwrap();
    assert_eq!(plan.disks[2].kind, muster_types::vm::DiskKind::Cdrom);
}

#[tokio::test(flavor = "multi_thread")]
async fn initializes_nvram_from_template() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    let uploaded = upload(&cluster, &token, "vars", &[9; 1000]).await;
    let blob = text(&uploaded, "blob_uuid");
    post(&cluster, &token, "/label/vars", json!({"blob_uuid": blob})).await;
    for (name, template) in [("by-label", "label:vars".to_owned()), ("by-blob", format!("sf://blob/{blob}"))]
    {
        let record = create(&cluster, &token, name, &json!({"uefi": true, "nvram_template": template})).await;
        assert_eq!(text(&record, "nvram_template"), blob);
        assert_eq!(record["references_from"]["nvram_template"][0]["target_uuid"], blob);
        let plan = cluster.node_named(text(&record, "node")).vm_plan(id(&record)).unwrap();
        assert_eq!(plan.nvram_template.unwrap().to_string(), blob);
    }
    let response = cluster.call(&token, Method::GET, &format!("/blobs/{blob}"), None).await.body;
    assert_eq!(response["instances"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn blob_is_in_use_as_long_as_its_instance() {
    let (cluster, token) = cluster(FAST_SETTINGS).await;
    let image = upload(&cluster, &token, "base", &[7; 4096]).await;
    let blob = format!("/blobs/{}", text(&image, "blob_uuid"));
    let last_used = async || get(&cluster, &token, &blob).await.body["last_used"].as_f64();
    assert_eq!(last_used().await, None);
    let record = create(&cluster, &token, "www", &with_base("sf://upload/ci/base")).await;
    let first = last_used().await.unwrap();
    let now = muster_types::time::now();
    assert!(last_used().await.unwrap() >= now, "it is used now, not only since {first}");
    let deleting = muster_types::time::now();
    delete(&cluster, &token, &path(&record, "")).await;
    cluster.settle().await;
    let last = last_used().await.unwrap();
    assert!(last >= deleting && last <= muster_types::time::now(), "until the deletion: {last}");
    assert_eq!(last_used().await, Some(last));
}
