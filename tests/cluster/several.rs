//! Several daemons on one MariaDB are one cluster.

use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::json;

use crate::{setup, wait_for};

pub(crate) fn member(folder: &std::path::Path, name: &str, url: &str) -> DaemonSetup {
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    setup(&folder)
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
async fn a_cluster_goes_on_when_its_maintainer_is_killed() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let mut members: Vec<(String, Daemon)> =
        ["n1", "n2", "n3"].map(|name| (name.to_owned(), member(folder.path(), name, &url).start())).into();
    let token = members[0].1.log_in("system", "the first key").await;

    // One daemon's change and token are every daemon's.
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
    wait_for("the dead node to be missed", async || {
        let (_, node) = survivor.call(&token, Method::GET, &format!("/nodes/{first}"), None).await;
        (node["state"] == "missing").then_some(())
    })
    .await;
    // The new maintainer cleans, too.
    assert_eq!(survivor.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await.0, 200);
    wait_for("the cleaner", async || {
        let body = json!({"namespace": "ci"});
        (survivor.call(&token, Method::POST, "/auth/namespaces", Some(body)).await.0 == 200).then_some(())
    })
    .await;
    // The dead one comes back under its own name and id.
    let back = member(folder.path(), &first, &url).start();
    let (_, node) = back.call(&token, Method::GET, &format!("/nodes/{first}"), None).await;
    assert_eq!(node["state"], "created");
    let (_, nodes) = back.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(nodes.as_array().unwrap().len(), 3);
}

#[test]
fn a_daemon_with_another_seed_may_not_join() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let _first = member(folder.path(), "n1", &url).start();
    let other = member(folder.path(), "n2", &url).set("AUTH_SECRET_SEED", "another seed altogether");
    let output = other.command().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("AUTH_SECRET_SEED differs"), "{said}");
    let twin = member(folder.path(), "n3", &url).set("NODE_NAME", "n1");
    let said = String::from_utf8(twin.command().output().unwrap().stderr).unwrap();
    assert!(said.contains("a node named n1 exists"), "{said}");
}
