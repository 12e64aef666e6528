//! Images that the operator hands to the daemon at its start.

use reqwest::Method;
use serde_json::json;

use super::{Caller, Content, MIB, sha512, text};
use crate::{setup, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn an_image_given_at_the_start_is_offered_to_everybody_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.img");
    let image = format!("tiny={}", file.display());
    let setup = setup(folder.path()).arguments(&["--image", &image]);
    let offered = |log: &str| log.matches("published image").count();
    let (first, second) = (Content::new(1, MIB + 5).bytes(), Content::new(2, MIB).bytes());
    for (start, (content, versions)) in [(&first, 1), (&first, 1), (&second, 2)].into_iter().enumerate() {
        std::fs::write(&file, content).unwrap();
        let daemon = setup.start();
        wait_for("the offer", async || (offered(&daemon.log()) == start + 1).then_some(())).await;
        let caller = Caller::new(&daemon, &daemon.system_key()).await;
        if start == 0 {
            caller.post("/auth/namespaces", json!({"namespace": "ci"})).await;
            caller.post("/auth/namespaces/ci/keys", json!({"key_name": "k", "key": "the key of ci"})).await;
        }
        let tenant = Caller { token: daemon.log_in("ci", "the key of ci").await, ..caller.clone() };
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
        assert_eq!(list.len(), 2, "nothing else is there: {list:?}");
        assert_eq!(sha512(&tenant.data(&text(image, "blob_uuid")).await), sha512(content));
        let refused = tenant.call(Method::DELETE, &format!("/artifacts/{}", text(image, "uuid")), None).await;
        assert_eq!(refused.0, 404, "{}", refused.1);
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_not_there_keeps_the_daemon_from_nothing_but_offering_it() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).arguments(&["--simulate", "1", "--image", "tiny=/nonexistent"]).start();
    wait_for("the reason", async || {
        let log = daemon.log();
        (log.contains("failed to publish image") && log.contains("/nonexistent")).then_some(())
    })
    .await;
    let caller = Caller::new(&daemon, &daemon.system_key()).await;
    assert_eq!(caller.get("/artifacts").await, json!([]));
}
