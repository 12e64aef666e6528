//! The database: copied by `muster db copy`, and temporarily unavailable.

use std::process::Command;

use muster_testing::MariaDb;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::json;

use crate::{setup, wait_for};

fn copy(from: &str, to: &str) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_muster"))
        .args(["db", "copy", "--from", from, "--to", to])
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn db_copy_moves_cluster_from_sqlite_to_mariadb() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path());
    let daemon = setup.start();
    let key = daemon.system_key();
    let token = daemon.log_in("system", &key).await;
    let (status, _) =
        daemon.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "moved"}))).await;
    assert_eq!(status, 200);
    let sqlite = format!("sqlite:{}", daemon.data.join("muster.db").display());
    wait_for("the maintainer", async || {
        let (_, locks) = daemon.call(&token, Method::GET, "/admin/locks", None).await;
        locks.get("maintainer").is_some().then_some(())
    })
    .await;
    let (success, output) = copy(&sqlite, &url);
    assert!(!success && output.contains("stop it first"), "{output}");
    assert!(daemon.stop().success());

    let (success, output) = copy(&sqlite, &url);
    assert!(success && output.contains("verified"), "{output}");
    let (success, output) = copy(&sqlite, &url);
    assert!(!success && output.contains("the target is not empty"), "{output}");
    let (success, output) = copy("sqlite:/nonexistent/muster.db", &url);
    assert!(!success && output.contains("no such database"), "{output}");

    let daemon = setup.set("DATABASE_URL", &url).start();
    let token = daemon.log_in("system", &key).await;
    assert_eq!(daemon.call(&token, Method::GET, "/auth/namespaces/moved", None).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_get_503_while_database_is_unavailable() {
    let Some(server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("DATABASE_URL", &server.fresh_database()).start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let pid = Pid::from_raw(server.pid().unwrap());

    kill(pid, Signal::SIGSTOP).unwrap();
    let (status, body) = daemon.call(&token, Method::GET, "/auth/namespaces", None).await;
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!((status.as_u16(), &body["error"]), (503, &json!("database unavailable, please retry")));
    wait_for("the database to be back", async || {
        (daemon.call(&token, Method::GET, "/auth/namespaces", None).await.0 == 200).then_some(())
    })
    .await;

    kill(pid, Signal::SIGKILL).unwrap();
    let (status, body) = daemon.call(&token, Method::GET, "/auth/namespaces", None).await;
    assert_eq!((status.as_u16(), &body["error"]), (503, &json!("database unavailable, please retry")));
    let (status, _) =
        daemon.call("", Method::POST, "/auth", Some(json!({"namespace": "system", "key": "x"}))).await;
    assert_eq!(status, 503, "must be neither 401 nor 404");
    wait_for("the daemon not to be ready", async || {
        (daemon.call("", Method::GET, "/readyz", None).await.0 == 503).then_some(())
    })
    .await;
    assert_eq!(daemon.call("", Method::GET, "/livez", None).await.0, 200);
}

/// Starts a primary and a replica that does not accept writes, with the same database and user.
fn start_replicated() -> Option<(MariaDb, MariaDb)> {
    let primary = MariaDb::start_with(&["--log-bin=binlog", "--server-id=1"])?;
    let replica = MariaDb::start_with(&["--log-bin=binlog", "--server-id=2", "--read-only"])?;
    let (_, port) =
        primary.address().rsplit_once(':').map(|(host, port)| (host.to_owned(), port.to_owned()))?;
    assert!(replica.run(&format!(
        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, MASTER_USER = 'root', \
         MASTER_USE_GTID = slave_pos; START SLAVE"
    )));
    assert!(primary.run(
        "CREATE DATABASE muster; CREATE USER muster@localhost IDENTIFIED BY 'pw'; \
         CREATE USER muster@'127.0.0.1' IDENTIFIED BY 'pw'; \
         GRANT ALL ON muster.* TO muster@localhost; GRANT ALL ON muster.* TO muster@'127.0.0.1'"
    ));
    Some((primary, replica))
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_continues_on_the_promoted_replica_of_a_frozen_database() {
    let Some((primary, replica)) = start_replicated() else {
        return muster_testing::skipped("mariadb-server");
    };
    let url = format!("mysql://muster:pw@{},{}/muster", primary.address(), replica.address());
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("DATABASE_URL", &url).start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let create = async |name: &str| {
        daemon.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": name}))).await.0
    };
    assert_eq!(create("before").await, 200);
    wait_for("the replica", async || {
        let found = replica.query("SELECT COUNT(*) FROM muster.namespaces WHERE name = 'before'");
        (found.as_deref() == Some("1")).then_some(())
    })
    .await;

    kill(Pid::from_raw(primary.pid().unwrap()), Signal::SIGSTOP).unwrap();
    assert!(replica.run("SET GLOBAL read_only = 0"));
    let started = std::time::Instant::now();
    assert_eq!(create("after").await, 200);
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
    for name in ["before", "after"] {
        let path = format!("/auth/namespaces/{name}");
        assert_eq!(daemon.call(&token, Method::GET, &path, None).await.0, 200, "{name}");
    }
    assert!(daemon.log().contains("left database server"), "{}", daemon.log());

    // The former primary lacks "after" and returns writable.
    kill(Pid::from_raw(primary.pid().unwrap()), Signal::SIGCONT).unwrap();
    assert!(replica.run("STOP SLAVE"));
    // Longer than the daemon takes to look for an earlier server again, and to probe it.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(6);
    for number in 0.. {
        assert_eq!(create(&format!("later-{number}")).await, 200);
        assert_eq!(daemon.call(&token, Method::GET, "/auth/namespaces/after", None).await.0, 200);
        if std::time::Instant::now() > deadline {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}
