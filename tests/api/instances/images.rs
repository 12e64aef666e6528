//! What disks begin as.

use axum::http::Method;
use muster_control::{objects, reconcile};
use muster_test_cluster::caller;
use muster_testing::web_server::{Reply, WebServer};
use serde_json::{Value, json};

use super::{create, id, path, refusal, settled, show, text, try_create};
use crate::artifacts::upload;
use crate::networks::{cluster, delete, get, post};

const QUICK: &[(&str, &str)] = &[
    ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"),
    ("IMAGE_STALL_TIMEOUT", "1"),
    ("CLUSTER_OP_LEASE", "1"),
    ("CLUSTER_OP_MAX_ATTEMPTS", "1"),
    ("BLOB_DELETION_DELAY", "0"),
];

fn from(base: &str) -> Value {
    json!({"disk": [{"base": base}]})
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uploaded_image_is_used_by_every_name_and_kept_while_it_is_used() {
    let (cluster, token) = cluster(QUICK).await;
    let image = upload(&cluster, &token, "img", &[1; 70_000]).await;
    let (artifact, blob) = (text(&image, "uuid"), text(&image, "blob_uuid"));
    assert_eq!(post(&cluster, &token, "/label/lab", json!({"blob_uuid": blob})).await.status, 200);
    let mut users = Vec::new();
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
        let record = create(&cluster, &token, &format!("n{number}"), &from(base)).await;
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
        users.push(record);
    }
    let shown = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    assert_eq!(shown["instances"].as_array().unwrap().len(), 5, "{shown}");
    let sweep = async || reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    delete(&cluster, &token, &format!("/artifacts/{artifact}")).await;
    delete(&cluster, &token, "/label/lab").await;
    sweep().await;
    assert_eq!(
        get(&cluster, &token, &format!("/blobs/{blob}")).await.body["state"],
        "created",
        "instances use it"
    );
    for record in &users {
        delete(&cluster, &token, &path(record, "")).await;
    }
    cluster.settle().await;
    sweep().await;
    assert_eq!(get(&cluster, &token, &format!("/blobs/{blob}")).await.body["state"], "deleted");
    assert_eq!(
        refusal(&try_create(&cluster, &token, "late", &from(&format!("sf://blob/{blob}"))).await),
        (404, "blob not found")
    );
    assert_eq!(
        refusal(&try_create(&cluster, &token, "late", &from(&format!("sf://artifact/{artifact}"))).await),
        (404, "artifact not found")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_others_are_used_if_they_are_shared_or_trusted() {
    let (cluster, token) = cluster(QUICK).await;
    cluster.create_namespace("beta").await;
    let (beta, system) = (cluster.token("beta").await, cluster.token("system").await);
    let theirs = upload(&cluster, &beta, "img", &[1; 5000]).await;
    let shared = upload(&cluster, &system, "img", &[2; 5000]).await;
    let hidden = from("sf://upload/beta/img");
    assert_eq!(refusal(&try_create(&cluster, &token, "no", &hidden).await), (404, "artifact not found"));
    assert_eq!(
        refusal(
            &try_create(&cluster, &token, "no", &from(&format!("sf://artifact/{}", text(&theirs, "uuid"))))
                .await
        ),
        (404, "artifact not found")
    );
    assert_eq!(
        refusal(&try_create(&cluster, &token, "no", &from("sf://upload/system/img")).await),
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
    create(&cluster, &token, "shared", &from("sf://upload/system/img")).await;
    // Who knows a blob may use it.
    create(&cluster, &token, "known", &from(&format!("sf://blob/{}", text(&theirs, "blob_uuid")))).await;
    // A label is that of the caller, wherever the instance is made.
    post(&cluster, &token, "/label/mine", json!({"blob_uuid": theirs["blob_uuid"]})).await;
    let there = json!({"namespace": "beta", "disk": [{"base": "label:mine"}]});
    let there = create(&cluster, &token, "there", &there).await;
    assert_eq!(there["namespace"], "beta");
    assert_eq!(try_create(&cluster, &beta, "here", &from("label:mine")).await.status, 404);
    // Who uses an image is told to those who may know of them.
    cluster.create_namespace("gamma").await;
    let stranger = cluster.token("gamma").await;
    let at = format!("/blobs/{}", text(&theirs, "blob_uuid"));
    for (who, users) in [(&token, 3), (&system, 3), (&beta, 1), (&stranger, 0)] {
        let shown = get(&cluster, who, &at).await.body;
        assert_eq!(shown["instances"].as_array().unwrap().len(), users, "{shown}");
    }
    let shown = get(&cluster, &beta, &format!("/artifacts/{}", text(&theirs, "uuid"))).await.body;
    assert_eq!(shown["blobs"]["1"]["instances"], json!([there["uuid"]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_fetched_for_an_instance_and_asked_for_news_by_the_next() {
    let (cluster, token) = cluster(QUICK).await;
    let web = WebServer::new(|asked, _| match asked.header("if-none-match") {
        Some(_) => Reply::status(304),
        None => Reply::ok(&[3; 90_000]).with("ETag", "\"one\""),
    })
    .await;
    let url = web.url("/images/small.img");
    let answer = try_create(&cluster, &token, "first", &from(&url)).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["disk_spec"][0].get("blob_uuid")),
        (200, &None),
        "{}",
        answer.text
    );
    cluster.settle().await;
    let record = show(&cluster, &token, &answer.body).await;
    assert_eq!(text(&record, "state"), "created", "{record}");
    let artifact = get(&cluster, &token, "/artifacts/small.img").await.body;
    assert_eq!(
        (&artifact["blob_uuid"], text(&artifact, "source_url")),
        (&record["disks"][0]["blob_uuid"], url.as_str())
    );
    assert_eq!(record["references_from"]["disk"][0]["target_uuid"], artifact["blob_uuid"]);
    let again =
        create(&cluster, &token, "second", &json!({"disk": [{"base": url, "size": 4}, {"base": url}]})).await;
    assert_eq!(
        (&again["disks"][0]["size"], &again["disks"][2]["blob_uuid"]),
        (&json!(4), &artifact["blob_uuid"])
    );
    assert_eq!(get(&cluster, &token, "/artifacts").await.body.as_array().unwrap().len(), 1);
    assert!(web.requests().len() >= 2);
    assert_eq!(web.requests().iter().filter(|asked| asked.header("if-none-match").is_none()).count(), 1);

    // Somebody else who may read it uses it as it is.
    cluster.create_namespace("friend").await;
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let (friend, before) = (cluster.token("friend").await, web.requests().len());
    let theirs = create(&cluster, &friend, "third", &from(&url)).await;
    assert_eq!((&theirs["disks"][0]["blob_uuid"], web.requests().len()), (&artifact["blob_uuid"], before));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_well_known_name_stands_for_an_image_of_the_download_site() {
    let web = WebServer::new(|_, _| Reply::ok(&[4; 5000])).await;
    let mut settings = QUICK.to_vec();
    let site = web.url("/site");
    settings.push(("IMAGE_DOWNLOAD_URL", &site));
    let (cluster, token) = cluster(&settings).await;
    let record = create(&cluster, &token, "www", &from("debian:12")).await;
    assert_eq!(record["disk_spec"][0]["base"], "debian:12");
    let asked: Vec<String> = web.requests().into_iter().map(|asked| asked.path).collect();
    assert_eq!(asked, ["/site/debian:12/latest.qcow2"]);
    let artifact = get(&cluster, &token, "/artifacts").await.body[0].clone();
    assert_eq!(artifact["blob_uuid"], record["disks"][0]["blob_uuid"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_cannot_be_fetched_or_used_leaves_an_instance_in_error_that_says_so() {
    let (cluster, token) = cluster(QUICK).await;
    // A disk of 3 GB, of which hardly anything is written.
    let origin = create(&cluster, &token, "origin", &json!({"disk": [{"size": 3}]})).await;
    let copy = super::act(&cluster, &token, &origin, "snapshot").await.body["vda"].clone();
    cluster.settle().await;
    let large = cluster.download_until_error(&token, text(&copy, "blob_uuid")).await;
    let web = WebServer::new(move |asked, _| match asked.path.as_str() {
        "/large" => Reply::ok(&large),
        "/vmdk" => Reply::ok(b"KDMV of some other house"),
        _ => Reply::status(404),
    })
    .await;
    for (name, at, size, why) in [
        ("absent", "/absent", None, "could not be fetched"),
        ("odd", "/vmdk", None, "VMDK"),
        ("small", "/large", Some(1), "smaller than its base"),
    ] {
        let more = json!({"disk": [{"base": web.url(at), "size": size}]});
        let record = settled(&cluster, &token, name, &more).await;
        assert_eq!(text(&record, "state"), "error", "{record}");
        assert!(text(&record, "error_message").contains(why), "{record}");
        assert_eq!(record["references_from"], json!({}));
    }
    assert_eq!(cluster.vms(), [id(&origin)]);
    assert_eq!(cluster.count_rows("instances", "claimed_cpus > 0").await, 1);
    for forbidden in ["http://169.254.169.254/latest", "file:///etc/passwd", "ftp://x.example/y"] {
        let answer = try_create(&cluster, &token, "forbidden", &from(forbidden)).await;
        assert_eq!(answer.status, 400, "{forbidden}: {}", answer.text);
    }
    assert_eq!(get(&cluster, &token, "/instances/forbidden").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_optical_image_is_put_into_a_drive() {
    let (cluster, token) = cluster(QUICK).await;
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
async fn the_memory_of_the_firmware_begins_as_a_template() {
    let (cluster, token) = cluster(QUICK).await;
    let kept = upload(&cluster, &token, "vars", &[9; 1000]).await;
    let blob = text(&kept, "blob_uuid");
    post(&cluster, &token, "/label/vars", json!({"blob_uuid": blob})).await;
    for (name, template) in [("by-label", "label:vars".to_owned()), ("by-blob", format!("sf://blob/{blob}"))]
    {
        let record = create(&cluster, &token, name, &json!({"uefi": true, "nvram_template": template})).await;
        assert_eq!(text(&record, "nvram_template"), blob);
        assert_eq!(record["references_from"]["nvram_template"][0]["target_uuid"], blob);
        let plan = cluster.node_named(text(&record, "node")).vm_plan(id(&record)).unwrap();
        assert_eq!(plan.nvram_template.unwrap().to_string(), blob);
    }
    let answer = cluster.call(&token, Method::GET, &format!("/blobs/{blob}"), None).await.body;
    assert_eq!(answer["instances"].as_array().unwrap().len(), 2);
}
