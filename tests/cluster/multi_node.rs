//! A cluster of several daemons on one MariaDB.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use muster_testing::{Daemon, DaemonSetup, MariaDb};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::json;

use crate::{setup, wait_for};

pub(crate) fn member(directory: &std::path::Path, name: &str, url: &str) -> DaemonSetup {
    let directory = directory.join(name);
    std::fs::create_dir_all(&directory).unwrap();
    setup(&directory)
        .arguments(&[])
        .set("NODE_NAME", name)
        .set("NODE_MESH_IP", &mesh_address(name))
        .set("DATABASE_URL", url)
        .set("AUTH_SECRET_SEED", "the seed of the whole cluster")
        .set("SYSTEM_KEY", "the first key")
        .set("CLUSTER_OP_LEASE", "1")
        .set("NODE_CHECKIN_INTERVAL", "0.2")
        .set("NODE_CHECKIN_MAXIMUM", "2")
        .set("CLEANER_DELAY", "2")
}

/// Returns a loopback address for a node with a name such as `n1`.
fn mesh_address(name: &str) -> String {
    format!("127.0.9.{}", name.trim_start_matches('n'))
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
    let Some(server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let url = server.fresh_database();
    let directory = tempfile::tempdir().unwrap();
    // The owner of a lease of 3.6 seconds renews it in time on a busy host, too.
    let member = |name: &str| {
        let member = member(directory.path(), name, &url);
        member.set("CLUSTER_OP_LEASE", "2").set("NODE_CHECKIN_MAXIMUM", "6").start()
    };
    let mut members: Vec<(String, Daemon)> =
        ["n1", "n2", "n3"].map(|name| (name.to_owned(), member(name))).into();
    let token = members[0].1.log_in("system", "the first key").await;

    // Changes and tokens of one daemon are valid on all.
    assert_eq!(
        members[0].1.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await.0,
        200
    );
    assert_eq!(members[2].1.call(&token, Method::GET, "/auth/namespaces/ci", None).await.0, 200);
    let first = wait_for("a maintainer", async || maintainer(&members[0].1, &token).await).await;

    // The clock of the database is set: its leases seem to have expired long ago.
    let database = url.rsplit('/').next().unwrap();
    let set_expiry = |expires: &str| {
        let sql = format!("UPDATE {database}.leases SET expires = {expires} WHERE name = 'maintainer'");
        assert!(server.run(&sql));
    };
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(3) {
        set_expiry("0.0");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    set_expiry("UNIX_TIMESTAMP() + 60.0");
    assert_eq!(maintainer(&members[1].1, &token).await.as_ref(), Some(&first), "its owner renews it");

    let at = members.iter().position(|(name, _)| *name == first).unwrap();
    members.remove(at).1.kill();
    // The lease of the killed daemon seems to last for hours.
    set_expiry("expires + 10000.0");
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
    let rejoined = member(&first);
    let (_, node) = rejoined.call(&token, Method::GET, &format!("/nodes/{first}"), None).await;
    assert_eq!(node["state"], "created");
    let (_, nodes) = rejoined.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(nodes.as_array().unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_daemons_simulate_nodes_of_one_cluster() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let simulating = |name: &str, first: &str| {
        member(directory.path(), name, &url).arguments(&["--simulate", "2", "--simulate-from", first])
    };
    let [one, other] = [("n1", "1"), ("n2", "3")].map(|(name, first)| simulating(name, first).start());
    let stderr =
        String::from_utf8_lossy(&simulating("n3", "2").command().output().unwrap().stderr).into_owned();
    assert!(stderr.contains("a node named sim-2 exists") && stderr.contains("--simulate-from"), "{stderr}");
    let token = one.log_in("system", "the first key").await;
    // A request through one daemon is executed by the other, which runs the node.
    for number in 1..=4 {
        let node = format!("sim-{number}");
        let body = json!({
            "name": format!("on-{node}"), "cpus": 1, "memory": 256, "disk": [{"size": 1}], "network": [],
            "placed_on": node,
        });
        let (status, record) = one.call(&token, Method::POST, "/instances", Some(body)).await;
        assert_eq!(status, 200, "{record}");
        let path = format!("/instances/{}", record["uuid"].as_str().unwrap());
        wait_for("the instance", async || {
            let (_, record) = other.call(&token, Method::GET, &path, None).await;
            (record["state"] == "created" && record["node"] == node.as_str()).then_some(())
        })
        .await;
        assert_eq!(one.call(&token, Method::POST, &format!("{path}/poweroff"), Some(json!({}))).await.0, 200);
        assert_eq!(other.call(&token, Method::DELETE, &path, None).await.0, 200);
        wait_for("the deletion", async || {
            let (status, record) = one.call(&token, Method::GET, &path, None).await;
            (status == 404 || record["state"] == "deleted").then_some(())
        })
        .await;
    }
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

#[tokio::test(flavor = "multi_thread")]
async fn forwarded_request_acts_for_its_caller() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let [first, second] = ["n1", "n2"].map(|name| member(directory.path(), name, &url).start());
    let token = first.log_in("system", "the first key").await;
    let request = json!({"namespace": "ci", "key_name": "robot", "key": "the second key"});
    assert_eq!(first.call(&token, Method::POST, "/auth/namespaces", Some(request)).await.0, 200);
    let robot = first.log_in("ci", "the second key").await;
    // The first daemon stores the upload.
    let (status, upload) = first.call(&robot, Method::POST, "/upload", None).await;
    assert_eq!(status, 200, "{upload}");
    let path = format!("/upload/{}", upload["uuid"].as_str().unwrap());
    for token in [&robot, &token] {
        let (status, record) = second.call(token, Method::GET, &path, None).await;
        assert_eq!((status.as_u16(), &record["uuid"]), (200, &upload["uuid"]), "{record}");
        let truncate = format!("{path}/truncate/0");
        let (status, response) = second.call(token, Method::POST, &truncate, None).await;
        assert_eq!(status, 200, "{response}");
    }
    let (_, keys) = first.call(&robot, Method::GET, "/auth/namespaces/ci/keys", None).await;
    assert_eq!(keys, json!(["robot"]), "service keys are removed");
    // Both daemons record the request of the robot with its own key.
    let events = "/auth/namespaces/ci/events?limit=100";
    let used = wait_for("the events of both daemons", async || {
        let (_, events) = first.call(&token, Method::GET, events, None).await;
        let used = events.as_array()?.iter().filter(|event| {
            event["message"] == "token used to authenticate request"
                && event["extra"]["path"].as_str().is_some_and(|path| path.ends_with("/truncate/0"))
        });
        let used: Vec<_> = used.map(|event| event["extra"]["keyname"].clone()).collect();
        (used.len() >= 2).then_some(used)
    })
    .await;
    assert_eq!(used, [json!("robot"), json!("robot")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn copied_data_directory_joins_only_with_a_new_identity() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let first = member(directory.path(), "n1", &url).start();
    let adopt = |data: &Path| {
        let mut command = Command::new(muster_testing::daemon_program());
        command.args(["node", "adopt", "--data-dir"]).arg(data).output().unwrap()
    };
    let output = adopt(&first.data);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains("in use by another muster process"), "{stderr}");

    let copy = member(directory.path(), "n2", &url);
    let data = directory.path().join("n2").join(first.data.file_name().unwrap());
    std::fs::create_dir_all(&data).unwrap();
    std::fs::copy(first.data.join("nodes.json"), data.join("nodes.json")).unwrap();
    let output = copy.command().output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{stderr}");
    assert!(
        stderr.contains("another daemon already runs node")
            && stderr.contains(&format!("({}, started", first.url)),
        "{stderr}"
    );
    assert!(adopt(&data).status.success());
    let second = copy.start();
    let token = second.log_in("system", "the first key").await;
    let (_, nodes) = second.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(nodes.as_array().unwrap().len(), 2, "{nodes}");

    // Neither the mesh address of another node.
    let same_address = member(directory.path(), "n3", &url).set("NODE_MESH_IP", "127.0.9.1");
    let stderr = String::from_utf8(same_address.command().output().unwrap().stderr).unwrap();
    assert!(stderr.contains("node n1 already uses the mesh address 127.0.9.1"), "{stderr}");
    // Other nodes do not reach a loopback address.
    let limit = wait_for("the warning about the loopback address", async || {
        let (_, node) = second.call(&token, Method::GET, "/nodes/n1", None).await;
        node["limits"]["api"].as_str().map(str::to_owned)
    })
    .await;
    assert!(limit.contains("--listen 0.0.0.0"), "{limit}");
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_of_a_deleted_node_exits() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let [first, mut second] = ["n1", "n2"].map(|name| member(directory.path(), name, &url).start());
    let token = first.log_in("system", "the first key").await;
    let (status, node) = first.call(&token, Method::POST, "/nodes/n2/drain", None).await;
    assert_eq!(status.as_u16(), 200, "{node}");
    let (status, node) = first.call(&token, Method::DELETE, "/nodes/n2", None).await;
    assert_eq!((status.as_u16(), &node["state"]), (200, &json!("deleted")), "{node}");
    let exited = second.wait_for_exit();
    assert_eq!(exited.code(), Some(9), "{}", second.log());
    let log = second.log();
    assert!(
        log.contains("is not a member of the cluster any longer") && log.contains("muster node adopt"),
        "{log}"
    );
    let (_, node) = first.call(&token, Method::GET, "/nodes/n2", None).await;
    assert_eq!(node["state"], "deleted");
    // A service manager that starts it again gets the same exit code.
    let output = member(directory.path(), "n2", &url).command().output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(9), "{stderr}");
    assert!(stderr.contains("was deleted from the cluster"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_node_leaves_copies_of_blobs_that_only_a_stopped_node_has() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let start = |number: usize| {
        let member = member(directory.path(), &format!("n{number}"), &url);
        let arguments = ["--simulate", "1", "--simulate-from", &number.to_string()];
        member.arguments(&arguments).set("BLOB_REPLICATION_FACTOR", "2").start()
    };
    let [mut first, second, third] = [1, 2, 3].map(start);
    let token = first.log_in("system", "the first key").await;
    let (_, upload) = first.call(&token, Method::POST, "/upload", Some(json!({}))).await;
    let upload = upload["uuid"].as_str().unwrap();
    let content = reqwest::Client::new().post(format!("{}/upload/{upload}", first.url)).bearer_auth(&token);
    assert_eq!(content.body("notes").send().await.unwrap().status(), 200);
    let body = json!({"upload_uuid": upload, "artifact_type": "other"});
    let (status, artifact) = first.call(&token, Method::POST, "/artifacts/upload/notes", Some(body)).await;
    assert_eq!(status, 200, "{artifact}");
    let path = format!("/blobs/{}", artifact["blob_uuid"].as_str().unwrap());
    let locations = async |daemon: &Daemon| {
        let (_, blob) = daemon.call(&token, Method::GET, &path, None).await;
        let names = blob["locations"].as_array().into_iter().flatten();
        let mut names: Vec<String> = names.map(|name| name.as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    let copies = wait_for("two copies", async || {
        let names = locations(&first).await;
        (names.len() == 2).then_some(names)
    })
    .await;
    assert_eq!(copies[0], "sim-1", "the node that received the upload");
    let (holder, other) = if copies[1] == "sim-2" { (second, third) } else { (third, second) };
    assert!(holder.stop().success());

    let (status, drain) = first.call(&token, Method::POST, "/nodes/sim-1/drain", Some(json!({}))).await;
    assert_eq!(status, 200, "{drain}");
    let operation = format!("/clusteroperations/node_op/{}", drain["operation"]["op_uuid"].as_str().unwrap());
    wait_for("the drain", async || {
        let (_, operation) = other.call(&token, Method::GET, &operation, None).await;
        (operation["state"] == "complete").then_some(())
    })
    .await;
    assert_eq!(locations(&other).await, ["sim-1", "sim-2", "sim-3"]);
    let (status, node) = other.call(&token, Method::DELETE, "/nodes/sim-1", None).await;
    assert_eq!(status, 200, "{node}");
    assert_eq!(first.wait_for_exit().code(), Some(9), "{}", first.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_of_a_stopped_daemons_directory_is_rejected() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let first = member(directory.path(), "n1", &url).start();
    let nodes = std::fs::read(first.data.join("nodes.json")).unwrap();
    // Its VMs would keep running.
    let name = first.data.file_name().unwrap().to_owned();
    drop(first);
    let copy = member(&directory.path().join("copy"), "n1", &url);
    let data = directory.path().join("copy/n1").join(name);
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("nodes.json"), nodes).unwrap();
    let stderr = String::from_utf8(copy.command().output().unwrap().stderr).unwrap();
    assert!(
        stderr.contains("this data directory is a copy") && stderr.contains("muster node adopt --moved"),
        "{stderr}"
    );
    let mut adopt = Command::new(muster_testing::daemon_program());
    adopt.args(["node", "adopt", "--moved", "--data-dir"]).arg(&data);
    assert!(adopt.status().unwrap().success());
    let moved = copy.start();
    let token = moved.log_in("system", "the first key").await;
    let (_, nodes) = moved.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(nodes.as_array().unwrap().len(), 1, "{nodes}");
    assert!(!data.join("moved").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_daemon_does_not_execute_abandoned_requests() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let [first, second] = ["n1", "n2"].map(|name| {
        let member = member(directory.path(), name, &url);
        // A frozen daemon must not become missing here: requests for it are still forwarded.
        member.set("NODE_RESPONSE_TIMEOUT", "2").set("NODE_CHECKIN_MAXIMUM", "60").start()
    });
    let token = first.log_in("system", "the first key").await;
    let (_, upload) = first.call(&token, Method::POST, "/upload", None).await;
    let path = format!("/upload/{}", upload["uuid"].as_str().unwrap());
    let append = async |daemon: &Daemon, text: &'static str| {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).build().unwrap();
        let request = client.post(format!("{}{path}", daemon.url)).bearer_auth(&token).body(text).send();
        let response = request.await?;
        Ok::<_, reqwest::Error>((response.status(), response.json::<serde_json::Value>().await?))
    };
    // The second daemon has connections to the first one, which it uses again.
    let (status, size) = append(&second, "1234").await.unwrap();
    assert_eq!((status.as_u16(), size), (200, json!(4)));

    first.freeze();
    let started = Instant::now();
    let request = reqwest::Client::new().post(format!("{}/auth/namespaces", first.url)).bearer_auth(&token);
    let request = request.json(&json!({"namespace": "abandoned"})).timeout(Duration::from_millis(300));
    assert!(request.send().await.unwrap_err().is_timeout());
    let truncate = format!("{path}/truncate/0");
    for _ in 0..2 {
        let (status, body) = second.call(&token, Method::POST, &truncate, None).await;
        assert_eq!(status, 503, "{body}");
        assert!(body["error"].as_str().unwrap().contains("peer node n1 did not answer"), "{body}");
    }
    let (status, body) = append(&second, "5678").await.unwrap();
    assert_eq!(status, 503, "{body}");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    first.signal(Signal::SIGCONT);

    // Requests are processed in the order of their connections, so these come after the abandoned ones.
    for _ in 0..20 {
        let (_, record) = first.call(&token, Method::GET, &path, None).await;
        assert_eq!(record["size"], 4, "{record}");
        let (status, _) = first.call(&token, Method::GET, "/auth/namespaces/abandoned", None).await;
        assert_eq!(status, 404);
    }
    let (status, size) = append(&second, "5678").await.unwrap();
    assert_eq!((status.as_u16(), size), (200, json!(8)));

    // The caller of a forwarded request gives up before the daemon does.
    first.freeze();
    let request = reqwest::Client::new().post(format!("{}{truncate}", second.url)).bearer_auth(&token);
    assert!(request.timeout(Duration::from_millis(300)).send().await.unwrap_err().is_timeout());
    wait_for("the end of the forwarded request", async || {
        let (_, keys) = second.call(&token, Method::GET, "/auth/namespaces/system/keys", None).await;
        (keys == json!(["deploy"])).then_some(())
    })
    .await;
    first.signal(Signal::SIGCONT);
    for _ in 0..20 {
        let (_, record) = first.call(&token, Method::GET, &path, None).await;
        assert_eq!(record["size"], 8, "{record}");
    }
}
