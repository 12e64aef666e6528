//! Disk snapshots.

use muster_control::reconcile;
use muster_store::transaction;
use muster_test_cluster::{ApiResponse, Cluster};
use serde_json::{Value, json};

use super::{create, create_and_settle, object, path, post_action, status_and_error, text, try_create};
use crate::networks::{cluster, delete, get, post};

async fn snapshot(cluster: &Cluster, token: &str, record: &Value, body: Value) -> ApiResponse {
    post(cluster, token, &path(record, "/snapshot"), body).await
}

/// Returns the list entry of a snapshot.
async fn listed(cluster: &Cluster, token: &str, record: &Value, blob: &Value) -> Value {
    let list = get(cluster, token, &path(record, "/snapshot")).await.body;
    list.as_array().unwrap().iter().find(|item| item["blob_uuid"] == *blob).cloned().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_first_disk_by_default() {
    let (cluster, token) = cluster(&[]).await;
    let disks = json!({"uefi": true, "disk": [{"size": 1}, {"size": 2, "bus": "sata"}, {"size": 1, "type": "cdrom"}]});
    let record = create(&cluster, &token, "www", &disks).await;
    let response = post_action(&cluster, &token, &record, "snapshot").await;
    assert_eq!(response.status, 200, "{}", response.text);
    let first = &response.body["vda"];
    assert_eq!(response.body.as_object().unwrap().len(), 1);
    let url = format!("sf://instance/{}/vda", text(&record, "uuid"));
    assert_eq!(first["source_url"], url);
    assert_eq!(
        listed(&cluster, &token, &record, &first["blob_uuid"]).await,
        Value::Null,
        "not listed before it is created"
    );
    let artifact = get(&cluster, &token, &format!("/artifacts/{}", text(first, "artifact_uuid"))).await.body;
    assert_eq!((text(&artifact, "state"), &artifact["index"]), ("initial", &json!(0)));
    assert_eq!((text(&artifact, "artifact_type"), text(&artifact, "namespace")), ("snapshot", "ci"));
    assert_eq!(text(&artifact, "name"), format!("{}/vda", text(&record, "uuid")));
    cluster.settle().await;

    let entry = listed(&cluster, &token, &record, &first["blob_uuid"]).await;
    assert_eq!((text(&entry, "state"), &entry["uuid"]), ("created", &first["artifact_uuid"]), "{entry}");
    assert_eq!((text(&entry, "device"), text(&entry, "source_url")), ("vda", url.as_str()));
    assert!(entry["created"].as_f64().unwrap() > 1e9 && entry["size"].as_u64().unwrap() > 0);
    assert_eq!((&entry["virtual size"], &entry["instances"]), (&json!(1 << 30), &json!([])));
    assert!(entry.get("blobs").is_none() && entry.get("index").is_none());

    let all = snapshot(&cluster, &token, &record, json!({"all": true})).await.body;
    assert_eq!(
        all.as_object().unwrap().keys().collect::<Vec<_>>(),
        ["nvram", "sdc", "vda"],
        "read-only drives are not included"
    );
    assert_eq!(all["vda"]["artifact_uuid"], first["artifact_uuid"], "another version of the same artifact");
    cluster.settle().await;
    for device in ["vda", "sdc", "nvram"] {
        let entry = listed(&cluster, &token, &record, &all[device]["blob_uuid"]).await;
        assert_eq!((text(&entry, "state"), text(&entry, "device")), ("created", device));
    }
    let single = snapshot(&cluster, &token, &record, json!({"device": "sdc"})).await.body;
    assert_eq!(single.as_object().unwrap().keys().collect::<Vec<_>>(), ["sdc"]);
    cluster.settle().await;
    let before = cluster.count_rows("operations", "1 = 1").await;
    for device in ["vdz", "vdb", "sdd"] {
        let none = snapshot(&cluster, &token, &record, json!({"device": device})).await;
        assert_eq!((none.status.as_u16(), none.body), (200, json!({})), "{device}");
    }
    assert_eq!(cluster.count_rows("operations", "1 = 1").await, before);
    assert!(cluster.files_in("1/drafts").is_empty() && cluster.files_in("2/drafts").is_empty());
    let messages = cluster.messages(&object(&record)).await;
    assert_eq!(messages.iter().filter(|message| *message == "disk was copied").count(), 5, "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshot_of_several_disks_adds_all_versions_or_none() {
    let (cluster, token) = cluster(&[("CLUSTER_OP_MAX_ATTEMPTS", "1")]).await;
    let disks = json!({"disk": [{"size": 1}, {"size": 1}]});
    let record = create(&cluster, &token, "www", &disks).await;
    let all = snapshot(&cluster, &token, &record, json!({"all": true})).await.body;
    let artifacts: Vec<String> =
        ["vda", "vdc"].map(|device| format!("/artifacts/{}", text(&all[device], "artifact_uuid"))).into();
    // The last artifact is gone when its version is added.
    let last = text(&all["vdc"], "artifact_uuid").to_owned();
    let sql = format!("DELETE FROM artifacts WHERE uuid = '{last}'");
    transaction!(cluster.app.store, |tx| { Ok(tx.execute(&sql, &[]).await?) }).unwrap();
    cluster.settle().await;
    let first = get(&cluster, &token, &artifacts[0]).await.body;
    assert_eq!((text(&first, "state"), &first["index"]), ("error", &json!(0)), "{first}");
    for device in ["vda", "vdc"] {
        let path = format!("/blobs/{}", text(&all[device], "blob_uuid"));
        assert_eq!(get(&cluster, &token, &path).await.status, 404, "{device}");
    }
    assert!(cluster.files_in("1/drafts").is_empty() && cluster.files_in("2/drafts").is_empty());
    // The next one is complete.
    let all = snapshot(&cluster, &token, &record, json!({"all": true})).await.body;
    cluster.settle().await;
    for device in ["vda", "vdc"] {
        let entry = listed(&cluster, &token, &record, &all[device]["blob_uuid"]).await;
        assert_eq!((text(&entry, "state"), text(&entry, "device")), ("created", device));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_are_versions_and_outlive_their_instance() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "0")]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    for (body, error) in [
        (json!({"max_versions": -1}), "max version cannot be negative"),
        (json!({"max_versions": "many"}), "max version is not an integer"),
        (json!({"device": 7}), "device: Not a valid string."),
    ] {
        assert_eq!(status_and_error(&snapshot(&cluster, &token, &record, body).await), (400, error));
        assert_eq!(
            post(&cluster, &token, "/instances/absent/snapshot", json!({"max_versions": -1})).await.status,
            400
        );
    }
    let mut snapshots = Vec::new();
    for number in 0..3 {
        if number == 2 {
            post_action(&cluster, &token, &record, "poweroff").await;
        }
        let response = snapshot(&cluster, &token, &record, json!({"max_versions": 2})).await;
        assert_eq!(response.status, 200, "{}", response.text);
        snapshots.push(response.body["vda"].clone());
        cluster.settle().await;
    }
    let list = get(&cluster, &token, &path(&record, "/snapshot")).await.body;
    let listed_blobs: Vec<&Value> = list.as_array().unwrap().iter().map(|item| &item["blob_uuid"]).collect();
    assert_eq!(listed_blobs, [&snapshots[1]["blob_uuid"], &snapshots[2]["blob_uuid"]]);
    let artifact = format!("/artifacts/{}", text(&snapshots[0], "artifact_uuid"));
    let fetched = get(&cluster, &token, &artifact).await.body;
    assert_eq!((&fetched["index"], &fetched["max_versions"]), (&json!(3), &json!(2)));
    delete(&cluster, &token, &path(&record, "")).await;
    cluster.settle().await;
    reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    assert_eq!(get(&cluster, &token, &artifact).await.body["state"], "created");
    assert_eq!(
        get(&cluster, &token, &path(&record, "/snapshot")).await.body,
        list,
        "listed as long as the instance record exists"
    );
    let error = format!("instance {} is not ready (deleted)", text(&record, "uuid"));
    assert_eq!(
        status_and_error(&snapshot(&cluster, &token, &record, json!({})).await),
        (406, error.as_str())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn boots_new_instance_from_snapshot_by_every_reference() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "0")]).await;
    let record = create(&cluster, &token, "www", &json!({"disk": [{"size": 3}]})).await;
    let snapshot_entry = post_action(&cluster, &token, &record, "snapshot").await.body["vda"].clone();
    let (artifact, blob) = (text(&snapshot_entry, "artifact_uuid"), text(&snapshot_entry, "blob_uuid"));
    let early = json!({"disk": [{"base": format!("sf://snapshot/{artifact}")}]});
    assert_eq!(
        status_and_error(&try_create(&cluster, &token, "early", &early).await),
        (404, "artifact not ready (state=initial)")
    );
    cluster.settle().await;
    assert_eq!(post(&cluster, &token, "/label/golden", json!({"blob_uuid": blob})).await.status, 200);
    for (number, base) in [
        format!("sf://snapshot/{artifact}"),
        format!("sf://artifact/{artifact}"),
        format!("sf://blob/{blob}"),
        "label:golden".to_owned(),
        "sf://label/ci/golden".to_owned(),
    ]
    .into_iter()
    .enumerate()
    {
        let created = create(
            &cluster,
            &token,
            &format!("n{number}"),
            &json!({"disk": [{"base": base}, {"base": base, "size": 5}]}),
        )
        .await;
        assert_eq!(
            (&created["disk_spec"][0]["base"], &created["disk_spec"][0]["blob_uuid"]),
            (&json!(base), &json!(blob))
        );
        assert_eq!(
            (&created["disks"][0]["size"], &created["disks"][2]["size"]),
            (&json!(3), &json!(5)),
            "{base}"
        );
        assert_eq!(created["disks"][0]["blob_uuid"], blob);
    }
    let small = json!({"disk": [{"size": 1}, {"base": "label:golden", "size": 2}]});
    let failed = create_and_settle(&cluster, &token, "small", &small).await;
    assert_eq!(text(&failed, "state"), "error");
    let reason = "disk[1].size: 2 GB is smaller than the image, which needs 3 GB";
    assert!(text(&failed, "error_message").contains(reason), "{failed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn thin_snapshot_depends_on_its_base_and_keeps_it() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "0")]).await;
    let image = crate::artifacts::upload(&cluster, &token, "base", &[7; 4096]).await;
    cluster.settle().await;
    let base = text(&image, "blob_uuid");
    let record = create(&cluster, &token, "www", &json!({"disk": [{"base": "sf://upload/ci/base"}]})).await;
    let thin_copy = snapshot(&cluster, &token, &record, json!({"thin": true})).await.body["vda"].clone();
    let full_copy = snapshot(&cluster, &token, &record, json!({"thin": false})).await.body["vda"].clone();
    cluster.settle().await;
    let blob_record =
        async |blob: &Value| get(&cluster, &token, &format!("/blobs/{}", blob.as_str().unwrap())).await.body;
    assert_eq!(blob_record(&thin_copy["blob_uuid"]).await["depends_on"], base);
    assert_eq!(blob_record(&full_copy["blob_uuid"]).await["depends_on"], Value::Null);
    // Neither the artifact nor the instance references the base any longer.
    delete(&cluster, &token, "/artifacts/base").await;
    delete(&cluster, &token, &path(&record, "")).await;
    cluster.settle().await;
    reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    assert_eq!(blob_record(&json!(base)).await["state"], "created");
    let again = create_and_settle(
        &cluster,
        &token,
        "again",
        &json!({"disk": [{"base": format!("sf://blob/{}", text(&thin_copy, "blob_uuid"))}]}),
    )
    .await;
    assert_eq!(text(&again, "state"), "created", "{again}");
    let thin_by_default = crate::networks::cluster(&[("SNAPSHOTS_DEFAULT_TO_THIN", "true")]).await;
    let (other, token) = (&thin_by_default.0, &thin_by_default.1);
    crate::artifacts::upload(other, token, "base", &[7; 4096]).await;
    other.settle().await;
    let record = create(other, token, "www", &json!({"disk": [{"base": "sf://upload/ci/base"}]})).await;
    let thin_copy = post_action(other, token, &record, "snapshot").await.body["vda"].clone();
    other.settle().await;
    let blob = get(other, token, &format!("/blobs/{}", text(&thin_copy, "blob_uuid"))).await.body;
    assert!(blob["depends_on"].is_string(), "{blob}");
}
