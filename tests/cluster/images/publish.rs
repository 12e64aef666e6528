//! Images that the daemon publishes at startup.

use reqwest::Method;
use serde_json::json;

use super::{Client, Content, MIB, sha512, text};
use crate::{setup, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn publishes_image_to_all_namespaces_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tiny.img");
    let image = format!("tiny={}", file.display());
    let setup = setup(directory.path()).arguments(&["--image", &image]);
    let published = |log: &str| log.matches("published image").count();
    let (first, second) = (Content::new(1, MIB + 5).bytes(), Content::new(2, MIB).bytes());
    for (start, (content, versions)) in [(&first, 1), (&first, 1), (&second, 2)].into_iter().enumerate() {
        std::fs::write(&file, content).unwrap();
        let daemon = setup.start();
        wait_for("the image to be published", async || (published(&daemon.log()) == start + 1).then_some(()))
            .await;
        let client = Client::new(&daemon, &daemon.system_key()).await;
        if start == 0 {
            client.post("/auth/namespaces", json!({"namespace": "ci"})).await;
            client.post("/auth/namespaces/ci/keys", json!({"key_name": "k", "key": "the key of ci"})).await;
        }
        let tenant = Client { token: daemon.log_in("ci", "the key of ci").await, ..client.clone() };
        let list = tenant.get("/artifacts").await;
        let list = list.as_array().unwrap();
        let image = list.iter().find(|record| record["source_url"] == "sf://upload/system/tiny").unwrap();
        assert_eq!(
            (&image["shared"], &image["index"], &image["name"]),
            (&json!(true), &json!(versions), &json!("tiny"))
        );
        let label = tenant.get("/label/system/tiny").await;
        assert_eq!((&label["shared"], &label["index"]), (&json!(true), &json!(versions)));
        assert_eq!(label["blob_uuid"], image["blob_uuid"]);
        assert_eq!(list.len(), 2, "unexpected artifacts: {list:?}");
        assert_eq!(sha512(&tenant.data(&text(image, "blob_uuid")).await), sha512(content));
        let response =
            tenant.call(Method::DELETE, &format!("/artifacts/{}", text(image, "uuid")), None).await;
        assert_eq!(response.0, 404, "{}", response.1);
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_although_image_file_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let daemon =
        setup(directory.path()).arguments(&["--simulate", "1", "--image", "tiny=/nonexistent"]).start();
    wait_for("the error", async || {
        let log = daemon.log();
        (log.contains("failed to publish image") && log.contains("/nonexistent")).then_some(())
    })
    .await;
    let client = Client::new(&daemon, &daemon.system_key()).await;
    assert_eq!(client.get("/artifacts").await, json!([]));
}
