//! A cluster of several daemons on one MariaDB.

use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::json;

use crate::{setup, wait_for};

pub(crate) fn member(directory: &std::path::Path, name: &str, url: &str) -> DaemonSetup {
    let directory = directory.join(name);
    std::fs::create_dir_all(&directory).unwrap();
    setup(&directory)
        .arguments(&[])
        .set("NODE_NAME", name)
        .set("DATABASE_URL", url)
        .set("AUTH_SECRET_SEED", "the seed of the whole cluster")
        .set("SYSTEM_KEY", "the first key")
        .set("CLUSTER_OP_LEASE", "1")
        .set("NODE_CHECKIN_INTERVAL", "0.2")
        .set("NODE_CHECKIN_MAXIMUM", "2")
        .set("CLEANER_DELAY", "2")
}

async fn maintainer(daemon: &Daemon, token: &str) -> Option<String> {
    let (_, nodes) = daemon.call(token, Method::GET, "/nodes", None).await;
    let nodes = nodes.as_array()?.clone();
    nodes
        .iter()
        .find(|node| node["is_cluster_maintainer"] == true)
        .map(|node| node["name"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_node_becomes_maintainer_after_kill() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let mut members: Vec<(String, Daemon)> =
        ["n1", "n2", "n3"].map(|name| (name.to_owned(), member(directory.path(), name, &url).start())).into();
    let token = members[0].1.log_in("system", "the first key").await;

    // Changes and tokens of one daemon are valid on all.
    assert_eq!(
        members[0].1.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await.0,
        200
    );
    assert_eq!(members[2].1.call(&token, Method::GET, "/auth/namespaces/ci", None).await.0, 200);
    let first = wait_for("a maintainer", async || maintainer(&members[0].1, &token).await).await;

    let at = members.iter().position(|(name, _)| *name == first).unwrap();
    members.remove(at).1.kill();
    let survivor = &members[0].1;
    let second = wait_for("another maintainer", async || {
        maintainer(survivor, &token).await.filter(|name| *name != first)
    })
    .await;
    assert_ne!(second, first);
    wait_for("the killed node to be missing", async || {
        let (_, node) = survivor.call(&token, Method::GET, &format!("/nodes/{first}"), None).await;
        (node["state"] == "missing").then_some(())
    })
    .await;
    // The new maintainer runs the cleaner.
    assert_eq!(survivor.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await.0, 200);
    wait_for("the cleaner", async || {
        let body = json!({"namespace": "ci"});
        (survivor.call(&token, Method::POST, "/auth/namespaces", Some(body)).await.0 == 200).then_some(())
    })
    .await;
    // The killed node rejoins with its name and ID.
    let rejoined = member(directory.path(), &first, &url).start();
    let (_, node) = rejoined.call(&token, Method::GET, &format!("/nodes/{first}"), None).await;
    assert_eq!(node["state"], "created");
    let (_, nodes) = rejoined.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(nodes.as_array().unwrap().len(), 3);
}

#[test]
fn refuses_to_join_with_other_seed_or_existing_name() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let _first = member(directory.path(), "n1", &url).start();
    let other = member(directory.path(), "n2", &url).set("AUTH_SECRET_SEED", "another seed altogether");
    let output = other.command().output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains("AUTH_SECRET_SEED differs"), "{stderr}");
    let duplicate = member(directory.path(), "n3", &url).set("NODE_NAME", "n1");
    let stderr = String::from_utf8(duplicate.command().output().unwrap().stderr).unwrap();
    assert!(stderr.contains("a node named n1 exists"), "{stderr}");
}
