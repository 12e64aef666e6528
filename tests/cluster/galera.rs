//! Daemons on three Galera servers, of which one dies.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_testing::{Daemon, Galera};
use reqwest::Method;
use serde_json::json;

use crate::multi_node::member;
use crate::wait_for;

/// The callers of each daemon.
const CALLERS: usize = 2;

/// What the callers of a daemon were told.
#[derive(Debug, Default)]
struct Responses {
    /// The names of acknowledged namespaces.
    acknowledged: Vec<String>,
    /// When each of them was acknowledged.
    times: Vec<Instant>,
    /// Statuses other than success and 503.
    unexpected: Vec<String>,
}

impl Responses {
    /// Returns the longest time without a success after `since`.
    fn longest_gap(&self, since: Instant) -> Duration {
        let later = self.times.iter().filter(|time| **time > since);
        let times: Vec<Instant> = [since].into_iter().chain(later.copied()).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(Duration::MAX)
    }
}

/// Callers that write through one daemon until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    responses: Arc<Mutex<Responses>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(daemon: &Arc<Daemon>, name: &str, token: &str) -> Self {
        let (stop, responses) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Responses>>::default());
        let tasks = (0..CALLERS)
            .map(|caller| {
                let (daemon, token) = (Arc::clone(daemon), token.to_owned());
                let (stop, responses) = (Arc::clone(&stop), Arc::clone(&responses));
                let prefix = format!("{name}-{caller}");
                tokio::spawn(async move {
                    for number in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        write(&daemon, &token, format!("{prefix}-{number}"), &responses).await;
                    }
                })
            })
            .collect();
        Self { stop, responses, tasks }
    }

    async fn finish(self) -> Responses {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        std::mem::take(&mut *self.responses.lock().unwrap())
    }

    fn successes(&self) -> usize {
        self.responses.lock().unwrap().times.len()
    }
}

/// Creates a namespace, and changes a value that all callers change.
async fn write(daemon: &Daemon, token: &str, name: String, responses: &Mutex<Responses>) {
    let created =
        daemon.call(token, Method::POST, "/auth/namespaces", Some(json!({ "namespace": name }))).await;
    let shared = "/auth/namespaces/system/metadata/shared";
    let changed = daemon.call(token, Method::PUT, shared, Some(json!({ "value": name }))).await;
    let mut responses = responses.lock().unwrap();
    if created.0 == 200 {
        responses.acknowledged.push(name);
        responses.times.push(Instant::now());
    }
    for (status, body) in [created, changed] {
        if ![200, 503].contains(&status.as_u16()) {
            responses.unexpected.push(format!("{status} {body}"));
        }
    }
}

/// Returns how many transactions the servers have rejected because others had changed the same rows.
fn conflicts(galera: &Galera) -> u64 {
    let sql =
        "SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_local_cert_failures', 'wsrep_local_bf_aborts')";
    let of_server = |number: usize| -> u64 {
        let rows = galera.server(number).query(sql).unwrap_or_default();
        rows.lines().filter_map(|row| row.split('\t').nth(1)?.parse::<u64>().ok()).sum()
    };
    (0..galera.count()).map(of_server).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_continue_when_the_preferred_galera_server_dies() {
    let Some(mut galera) = Galera::start("127.0.0.1") else {
        return muster_testing::skipped("galera-4, rsync and lsof");
    };
    assert!(galera.server(0).run("CREATE DATABASE muster"));
    let directory = tempfile::tempdir().unwrap();
    let url = galera.url("muster");
    // The third daemon prefers another server, so that writes of the same rows meet on two servers.
    let (scheme, servers) = url.trim_end_matches("/muster").rsplit_once('@').unwrap();
    let (first, others) = servers.split_once(',').unwrap();
    let other_url = format!("{scheme}@{others},{first}/muster");
    let daemons = [("n1", &url), ("n2", &url), ("n3", &other_url)]
        .map(|(name, url)| Arc::new(member(directory.path(), name, url).start()));
    let token = daemons[0].log_in("system", "the first key").await;
    let load: Vec<Load> = daemons
        .iter()
        .zip(["n1", "n2", "n3"])
        .map(|(daemon, name)| Load::start(daemon, name, &token))
        .collect();

    wait_for("conflicts", async || (conflicts(&galera) > 0).then_some(())).await;
    let killed = Instant::now();
    galera.kill(0);
    let before: Vec<usize> = load.iter().map(Load::successes).collect();
    wait_for("requests to continue", async || {
        let mut continued =
            load.iter().zip(&before).map(|(load, before)| load.successes() > before + CALLERS);
        continued.all(|continued| continued).then_some(())
    })
    .await;
    // docs/promises.md has what was measured; a busy host may take longer.
    let gap = load.iter().map(|load| load.responses.lock().unwrap().longest_gap(killed)).max().unwrap();
    println!("longest time without a success: {gap:?}, conflicts: {}", conflicts(&galera));
    assert!(gap < Duration::from_secs(20), "{gap:?}");

    let mut acknowledged = Vec::new();
    for load in load {
        let responses = load.finish().await;
        assert!(responses.unexpected.is_empty(), "{:?}", responses.unexpected);
        acknowledged.extend(responses.acknowledged);
    }
    println!("{} acknowledged namespaces", acknowledged.len());
    for daemon in &daemons {
        let (status, namespaces) = daemon.call(&token, Method::GET, "/auth/namespaces", None).await;
        assert_eq!(status, 200, "{namespaces}");
        let names: BTreeSet<&str> =
            namespaces.as_array().unwrap().iter().filter_map(|record| record["name"].as_str()).collect();
        let lost: Vec<&String> = acknowledged.iter().filter(|name| !names.contains(name.as_str())).collect();
        assert!(lost.is_empty(), "acknowledged, but lost: {lost:?}");
    }
}
