//! SIGKILL at any moment loses no acknowledged write, and every operation ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// A write that the daemon acknowledged.
#[derive(Debug)]
enum AcknowledgedWrite {
    Metadata(usize),
    Key(usize, String),
    Deleted(usize),
}

const WRITES: usize = 1000;
const CLIENTS: usize = 50;

/// Writes with concurrent clients until the daemon is killed. Returns the acknowledged writes.
async fn write_until_killed(
    daemon: Daemon,
    token: &str,
    after: usize,
    round: usize,
) -> Vec<AcknowledgedWrite> {
    let daemon = Arc::new(daemon);
    let (next, acknowledged) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (daemon, token) = (Arc::clone(&daemon), token.to_owned());
            let (next, acknowledged) = (Arc::clone(&next), Arc::clone(&acknowledged));
            tokio::spawn(async move {
                let mut done = Vec::new();
                loop {
                    let n = round * WRITES + next.fetch_add(1, Ordering::Relaxed);
                    if n >= (round + 1) * WRITES {
                        return done;
                    }
                    let response = match n % 3 {
                        0 => {
                            let path = format!("/auth/namespaces/tenant/metadata/m{n}");
                            daemon.try_call(&token, Method::PUT, &path, Some(json!({"value": n + 1}))).await
                        }
                        1 => {
                            let body = json!({"key_name": format!("k{n}")});
                            daemon
                                .try_call(&token, Method::POST, "/auth/namespaces/tenant/keys", Some(body))
                                .await
                        }
                        _ => {
                            let body = json!({"namespace": format!("ns{n}")});
                            match daemon.try_call(&token, Method::POST, "/auth/namespaces", Some(body)).await
                            {
                                Ok((status, _)) if status == 200 => {
                                    let path = format!("/auth/namespaces/ns{n}");
                                    daemon.try_call(&token, Method::DELETE, &path, None).await
                                }
                                other => other,
                            }
                        }
                    };
                    // A write without a response may or may not have been done.
                    let Ok((status, body)) = response else { return done };
                    assert_eq!(status, 200, "{body}");
                    acknowledged.fetch_add(1, Ordering::Relaxed);
                    done.push(match n % 3 {
                        0 => AcknowledgedWrite::Metadata(n),
                        1 => AcknowledgedWrite::Key(n, body["key"].as_str().unwrap_or_default().to_owned()),
                        _ => AcknowledgedWrite::Deleted(n),
                    });
                }
            })
        })
        .collect();
    wait_for("acknowledged writes", async || (acknowledged.load(Ordering::Relaxed) >= after).then_some(()))
        .await;
    daemon.signal(nix::sys::signal::Signal::SIGKILL);
    let mut done = Vec::new();
    for client in clients {
        done.extend(client.await.unwrap());
    }
    done
}

async fn assert_writes_kept(daemon: &Daemon, token: &str, done: &[AcknowledgedWrite]) {
    let (_, metadata) = daemon.call(token, Method::GET, "/auth/namespaces/tenant/metadata", None).await;
    let (_, keys) = daemon.call(token, Method::GET, "/auth/namespaces/tenant/keys", None).await;
    let keys: std::collections::HashSet<&str> =
        keys.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for write in done {
        match write {
            AcknowledgedWrite::Metadata(n) => {
                assert_eq!(metadata[format!("m{n}")], json!(n + 1), "metadata {n} was lost");
            }
            AcknowledgedWrite::Key(n, _) => {
                assert!(keys.contains(format!("k{n}").as_str()), "key {n} was lost");
            }
            AcknowledgedWrite::Deleted(n) => {
                let path = format!("/auth/namespaces/ns{n}");
                assert_eq!(daemon.call(token, Method::GET, &path, None).await.0, 404, "ns{n} exists again");
            }
        }
    }
    for write in done.iter().filter(|write| matches!(write, AcknowledgedWrite::Key(..))).take(20) {
        if let AcknowledgedWrite::Key(_, secret) = write {
            daemon.log_in("tenant", secret).await;
        }
    }
    for write in done {
        if let AcknowledgedWrite::Deleted(n) = write {
            let path = format!("/clusteroperations?target_object_type=namespace&target_uuid=ns{n}");
            wait_for("an operation to end", async || {
                let (status, list) = daemon.call(token, Method::GET, &path, None).await;
                let list = list.as_array().expect("a list");
                assert!(status == 200 && !list.is_empty(), "the deletion of ns{n} queued no operation");
                assert!(list.iter().all(|operation| operation["state"] != "error"), "{list:?}");
                list.iter().all(|operation| operation["state"] == "complete").then_some(())
            })
            .await;
        }
    }
}

async fn kill_during_writes(setup: DaemonSetup) {
    let setup = setup.set("CLUSTER_OP_LEASE", "1").set("SYSTEM_KEY", "the first key");
    let daemon = setup.start();
    let token = daemon.log_in("system", "the first key").await;
    let (status, _) =
        daemon.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "tenant"}))).await;
    assert_eq!(status, 200);
    let mut done = write_until_killed(daemon, &token, 150, 0).await;
    assert!(done.len() >= 150);

    let daemon = setup.start();
    assert_writes_kept(&daemon, &token, &done).await;
    done.extend(write_until_killed(daemon, &token, 400, 1).await);
    let daemon = setup.start();
    assert_writes_kept(&daemon, &token, &done).await;
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_sigkill_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    kill_during_writes(setup(directory.path())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_sigkill_on_mariadb() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    kill_during_writes(setup(directory.path()).set("DATABASE_URL", &url)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn next_daemon_recovers_spooled_events_of_killed_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path());
    let daemon = setup.clone().set("DRAIN_POLL_INTERVAL", "3600").start();
    let key = daemon.system_key();
    let token = daemon.log_in("system", &key).await;
    for n in 0..150 {
        let path = format!("/auth/namespaces/system/metadata/m{n}");
        assert_eq!(daemon.call(&token, Method::PUT, &path, Some(json!({"value": 1}))).await.0, 200);
    }
    daemon.kill();
    let daemon = setup.start();
    let token = daemon.log_in("system", &key).await;
    let count = wait_for("the events of the killed daemon", async || {
        let (_, list) =
            daemon.call(&token, Method::GET, "/auth/namespaces/system/events?limit=1000", None).await;
        let list = list.as_array().unwrap().clone();
        let set =
            list.iter().filter(|event| event["message"] == "set metadata key request from REST API").count();
        (set >= 150).then_some(set)
    })
    .await;
    assert_eq!(count, 150, "events were duplicated");
    let spools = std::fs::read_dir(daemon.data.join("spool/eventlog")).unwrap().count();
    assert_eq!(spools, 1, "the spool of the killed daemon was not deleted");
}
