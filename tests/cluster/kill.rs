//! `kill -9` at any moment loses nothing that was acknowledged, and every operation ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// What a caller was told is done.
#[derive(Debug)]
enum Done {
    Metadata(usize),
    Key(usize, String),
    Deleted(usize),
}

const WRITES: usize = 1000;
const CALLERS: usize = 50;

/// Callers write until the daemon dies under them; each answers what it was told is done.
async fn write_until_killed(daemon: Daemon, token: &str, after: usize, round: usize) -> Vec<Done> {
    let daemon = Arc::new(daemon);
    let (next, acknowledged) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let callers: Vec<_> = (0..CALLERS)
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
                    let answer = match n % 3 {
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
                    // No answer means no promise.
                    let Ok((status, body)) = answer else { return done };
                    assert_eq!(status, 200, "{body}");
                    acknowledged.fetch_add(1, Ordering::Relaxed);
                    done.push(match n % 3 {
                        0 => Done::Metadata(n),
                        1 => Done::Key(n, body["key"].as_str().unwrap_or_default().to_owned()),
                        _ => Done::Deleted(n),
                    });
                }
            })
        })
        .collect();
    wait_for("some writes", async || (acknowledged.load(Ordering::Relaxed) >= after).then_some(())).await;
    daemon.signal(nix::sys::signal::Signal::SIGKILL);
    let mut done = Vec::new();
    for caller in callers {
        done.extend(caller.await.unwrap());
    }
    done
}

async fn check(daemon: &Daemon, token: &str, done: &[Done]) {
    let (_, metadata) = daemon.call(token, Method::GET, "/auth/namespaces/tenant/metadata", None).await;
    let (_, keys) = daemon.call(token, Method::GET, "/auth/namespaces/tenant/keys", None).await;
    let keys: std::collections::HashSet<&str> =
        keys.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for write in done {
        match write {
            Done::Metadata(n) => assert_eq!(metadata[format!("m{n}")], json!(n + 1), "metadata {n} was lost"),
            Done::Key(n, _) => assert!(keys.contains(format!("k{n}").as_str()), "key {n} was lost"),
            Done::Deleted(n) => {
                let path = format!("/auth/namespaces/ns{n}");
                assert_eq!(daemon.call(token, Method::GET, &path, None).await.0, 404, "ns{n} came back");
            }
        }
    }
    for write in done.iter().filter(|write| matches!(write, Done::Key(..))).take(20) {
        if let Done::Key(_, secret) = write {
            daemon.log_in("tenant", secret).await;
        }
    }
    for write in done {
        if let Done::Deleted(n) = write {
            let path = format!("/clusteroperations?target_object_type=namespace&target_uuid=ns{n}");
            wait_for("an operation to end", async || {
                let (status, list) = daemon.call(token, Method::GET, &path, None).await;
                let list = list.as_array().expect("a list");
                assert!(status == 200 && !list.is_empty(), "the deletion of ns{n} queued nothing");
                assert!(list.iter().all(|operation| operation["state"] != "error"), "{list:?}");
                list.iter().all(|operation| operation["state"] == "complete").then_some(())
            })
            .await;
        }
    }
}

async fn survives(setup: DaemonSetup) {
    let setup = setup.set("CLUSTER_OP_LEASE", "1").set("SYSTEM_KEY", "the first key");
    let daemon = setup.start();
    let token = daemon.log_in("system", "the first key").await;
    let (status, _) =
        daemon.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "tenant"}))).await;
    assert_eq!(status, 200);
    let mut done = write_until_killed(daemon, &token, 150, 0).await;
    assert!(done.len() >= 150);

    let daemon = setup.start();
    check(&daemon, &token, &done).await;
    done.extend(write_until_killed(daemon, &token, 400, 1).await);
    let daemon = setup.start();
    check(&daemon, &token, &done).await;
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    survives(setup(folder.path())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_on_mariadb() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    survives(setup(folder.path()).set("DATABASE_URL", &url)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_the_queue_of_a_killed_daemon_are_recovered_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let setup = setup(folder.path());
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
    let found = wait_for("the events of the killed daemon", async || {
        let (_, list) =
            daemon.call(&token, Method::GET, "/auth/namespaces/system/events?limit=1000", None).await;
        let list = list.as_array().unwrap().clone();
        let set =
            list.iter().filter(|event| event["message"] == "set metadata key request from REST API").count();
        (set >= 150).then_some(set)
    })
    .await;
    assert_eq!(found, 150, "each exactly once");
    let spools = std::fs::read_dir(daemon.data.join("spool/eventlog")).unwrap().count();
    assert_eq!(spools, 1, "the dead daemon's queue is gone");
}
