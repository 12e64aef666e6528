//! Copies of disks.

use muster_control::reconcile;
use muster_test_cluster::{ApiResponse, Cluster};
use serde_json::{Value, json};

use super::{act, create, object, path, refusal, settled, text, try_create};
use crate::networks::{cluster, delete, get, post};

async fn snapshot(cluster: &Cluster, token: &str, record: &Value, body: Value) -> ApiResponse {
    post(cluster, token, &path(record, "/snapshot"), body).await
}

/// What the list says of a copy.
async fn listed(cluster: &Cluster, token: &str, record: &Value, blob: &Value) -> Value {
    let list = get(cluster, token, &path(record, "/snapshot")).await.body;
    list.as_array().unwrap().iter().find(|one| one["blob_uuid"] == *blob).cloned().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_disk_is_copied_unless_others_are_asked_for() {
    let (cluster, token) = cluster(&[]).await;
    let disks = json!({"uefi": true, "disk": [{"size": 1}, {"size": 2, "bus": "sata"}, {"size": 1, "type": "cdrom"}]});
    let record = create(&cluster, &token, "www", &disks).await;
    let answer = act(&cluster, &token, &record, "snapshot").await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let first = &answer.body["vda"];
    assert_eq!(answer.body.as_object().unwrap().len(), 1);
    let url = format!("sf://instance/{}/vda", text(&record, "uuid"));
    assert_eq!(first["source_url"], url);
    assert_eq!(listed(&cluster, &token, &record, &first["blob_uuid"]).await, Value::Null, "it is on its way");
    let artifact = get(&cluster, &token, &format!("/artifacts/{}", text(first, "artifact_uuid"))).await.body;
    assert_eq!((text(&artifact, "state"), &artifact["index"]), ("initial", &json!(0)));
    assert_eq!((text(&artifact, "artifact_type"), text(&artifact, "namespace")), ("snapshot", "ci"));
    assert_eq!(text(&artifact, "name"), format!("{}/vda", text(&record, "uuid")));
    cluster.settle().await;

    let found = listed(&cluster, &token, &record, &first["blob_uuid"]).await;
    assert_eq!((text(&found, "state"), &found["uuid"]), ("created", &first["artifact_uuid"]), "{found}");
    assert_eq!((text(&found, "device"), text(&found, "source_url")), ("vda", url.as_str()));
    assert!(found["created"].as_f64().unwrap() > 1e9 && found["size"].as_u64().unwrap() > 0);
    assert_eq!((&found["virtual size"], &found["instances"]), (&json!(1 << 30), &json!([])));
    assert!(found.get("blobs").is_none() && found.get("index").is_none());

    let all = snapshot(&cluster, &token, &record, json!({"all": true})).await.body;
    assert_eq!(
        all.as_object().unwrap().keys().collect::<Vec<_>>(),
        ["nvram", "sdc", "vda"],
        "no drive that only reads"
    );
    assert_eq!(all["vda"]["artifact_uuid"], first["artifact_uuid"], "another version of the same");
    cluster.settle().await;
    for device in ["vda", "sdc", "nvram"] {
        let found = listed(&cluster, &token, &record, &all[device]["blob_uuid"]).await;
        assert_eq!((text(&found, "state"), text(&found, "device")), ("created", device));
    }
    let one = snapshot(&cluster, &token, &record, json!({"device": "sdc"})).await.body;
    assert_eq!(one.as_object().unwrap().keys().collect::<Vec<_>>(), ["sdc"]);
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
async fn copies_are_versions_and_outlive_their_instance() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "0")]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    for (body, why) in [
        (json!({"max_versions": -1}), "max version cannot be negative"),
        (json!({"max_versions": "many"}), "max version is not an integer"),
        (json!({"device": 7}), "device: Not a valid string."),
    ] {
        assert_eq!(refusal(&snapshot(&cluster, &token, &record, body).await), (400, why));
        assert_eq!(
            post(&cluster, &token, "/instances/absent/snapshot", json!({"max_versions": -1})).await.status,
            400
        );
    }
    let mut blobs = Vec::new();
    for number in 0..3 {
        if number == 2 {
            act(&cluster, &token, &record, "poweroff").await;
        }
        let answer = snapshot(&cluster, &token, &record, json!({"max_versions": 2})).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        blobs.push(answer.body["vda"].clone());
        cluster.settle().await;
    }
    let list = get(&cluster, &token, &path(&record, "/snapshot")).await.body;
    let kept: Vec<&Value> = list.as_array().unwrap().iter().map(|one| &one["blob_uuid"]).collect();
    assert_eq!(kept, [&blobs[1]["blob_uuid"], &blobs[2]["blob_uuid"]]);
    let artifact = format!("/artifacts/{}", text(&blobs[0], "artifact_uuid"));
    let shown = get(&cluster, &token, &artifact).await.body;
    assert_eq!((&shown["index"], &shown["max_versions"]), (&json!(3), &json!(2)));
    delete(&cluster, &token, &path(&record, "")).await;
    cluster.settle().await;
    reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    assert_eq!(get(&cluster, &token, &artifact).await.body["state"], "created");
    assert_eq!(
        get(&cluster, &token, &path(&record, "/snapshot")).await.body,
        list,
        "as long as its record is there"
    );
    let why = format!("instance {} is not ready (deleted)", text(&record, "uuid"));
    assert_eq!(refusal(&snapshot(&cluster, &token, &record, json!({})).await), (406, why.as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_boots_as_a_new_instance_by_every_name_that_it_has() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "0")]).await;
    let record = create(&cluster, &token, "www", &json!({"disk": [{"size": 3}]})).await;
    let copy = act(&cluster, &token, &record, "snapshot").await.body["vda"].clone();
    let (artifact, blob) = (text(&copy, "artifact_uuid"), text(&copy, "blob_uuid"));
    let early = json!({"disk": [{"base": format!("sf://snapshot/{artifact}")}]});
    assert_eq!(
        refusal(&try_create(&cluster, &token, "early", &early).await),
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
        let made = create(
            &cluster,
            &token,
            &format!("n{number}"),
            &json!({"disk": [{"base": base}, {"base": base, "size": 5}]}),
        )
        .await;
        assert_eq!(
            (&made["disk_spec"][0]["base"], &made["disk_spec"][0]["blob_uuid"]),
            (&json!(base), &json!(blob))
        );
        assert_eq!((&made["disks"][0]["size"], &made["disks"][2]["size"]), (&json!(3), &json!(5)), "{base}");
        assert_eq!(made["disks"][0]["blob_uuid"], blob);
    }
    let small = json!({"disk": [{"size": 1}, {"base": "label:golden", "size": 2}]});
    let refused = try_create(&cluster, &token, "small", &small).await;
    assert_eq!(refusal(&refused), (400, "disk[1].size: 2 GB is smaller than the image, which needs 3 GB"));
    assert_eq!(get(&cluster, &token, "/instances/small").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thin_copy_needs_its_base_and_keeps_it() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "0")]).await;
    let image = crate::artifacts::upload(&cluster, &token, "base", &[7; 4096]).await;
    cluster.settle().await;
    let base = text(&image, "blob_uuid");
    let record = create(&cluster, &token, "www", &json!({"disk": [{"base": "sf://upload/ci/base"}]})).await;
    let copy = snapshot(&cluster, &token, &record, json!({"thin": true})).await.body["vda"].clone();
    let whole = snapshot(&cluster, &token, &record, json!({"thin": false})).await.body["vda"].clone();
    cluster.settle().await;
    let shown =
        async |blob: &Value| get(&cluster, &token, &format!("/blobs/{}", blob.as_str().unwrap())).await.body;
    assert_eq!(shown(&copy["blob_uuid"]).await["depends_on"], base);
    assert_eq!(shown(&whole["blob_uuid"]).await["depends_on"], Value::Null);
    // Neither its artifact nor its instance keeps the base any more.
    delete(&cluster, &token, "/artifacts/base").await;
    delete(&cluster, &token, &path(&record, "")).await;
    cluster.settle().await;
    reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    assert_eq!(shown(&json!(base)).await["state"], "created");
    let again = settled(
        &cluster,
        &token,
        "again",
        &json!({"disk": [{"base": format!("sf://blob/{}", text(&copy, "blob_uuid"))}]}),
    )
    .await;
    assert_eq!(text(&again, "state"), "created", "{again}");
    let thick = crate::networks::cluster(&[("SNAPSHOTS_DEFAULT_TO_THIN", "true")]).await;
    let (other, token) = (&thick.0, &thick.1);
    crate::artifacts::upload(other, token, "base", &[7; 4096]).await;
    other.settle().await;
    let record = create(other, token, "www", &json!({"disk": [{"base": "sf://upload/ci/base"}]})).await;
    let copy = act(other, token, &record, "snapshot").await.body["vda"].clone();
    other.settle().await;
    let blob = get(other, token, &format!("/blobs/{}", text(&copy, "blob_uuid"))).await.body;
    assert!(blob["depends_on"].is_string(), "{blob}");
}
