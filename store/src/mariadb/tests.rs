use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_testing::{MariaDb, skipped};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::*;

/// Two servers that are not replicas of each other, with the same tables.
struct Pair {
    first: MariaDb,
    second: MariaDb,
    url: String,
}

impl Pair {
    async fn start() -> Option<Self> {
        let (first, second) = (MariaDb::start()?, MariaDb::start()?);
        for server in [&first, &second] {
            assert!(server.run("CREATE DATABASE muster"));
            Store::open(&server.url("muster")).await.unwrap().close().await;
        }
        let url = format!("mysql://root@{},{}/muster", first.address(), second.address());
        Some(Self { first, second, url })
    }

    /// Makes the data of both servers equally new, as replication would.
    fn set_failovers(&self, count: i64) {
        let sql = format!(
            "REPLACE INTO muster.cluster_values (name, value, version) VALUES ('database_failovers', '{count}', 1)"
        );
        assert!(self.first.run(&sql) && self.second.run(&sql));
    }
}

fn signal(server: &MariaDb, signal: Signal) {
    kill(Pid::from_raw(server.pid().unwrap()), signal).unwrap();
}

/// Writes a row, which must succeed within the time that a failover may take.
async fn write(store: &Store, name: &str) {
    let started = Instant::now();
    transaction!(store, |tx| { Ok(cluster_values::set(tx, name, "x").await?) }).unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{name}: {:?}", started.elapsed());
}

async fn has(url: &str, name: &str) -> bool {
    let store = Store::open(url).await.unwrap();
    let found = cluster_values::get(&store, name).await.unwrap().is_some();
    store.close().await;
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn uses_the_next_server_when_one_is_frozen_or_killed() {
    let Some(pair) = Pair::start().await else { return skipped("mariadb-server") };
    let store = Store::open(&pair.url).await.unwrap();
    write(&store, "before").await;
    assert!(!has(&pair.second.url("muster"), "before").await);

    // A transaction in progress is repeated on the second server.
    signal(&pair.first, Signal::SIGSTOP);
    write(&store, "frozen").await;
    let started = Instant::now();
    assert!(
        cluster_values::get(&store, "before").await.unwrap().is_none(),
        "it was written to the other server"
    );
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(has(&pair.second.url("muster"), "frozen").await);

    // The first server lacks what was written meanwhile, so it is not used, not even by a new process.
    signal(&pair.first, Signal::SIGCONT);
    let restarted = Store::open(&pair.url).await.unwrap();
    write(&restarted, "stale").await;
    restarted.close().await;
    assert!(has(&pair.second.url("muster"), "stale").await);

    // When it has the data, all use it again.
    pair.set_failovers(10);
    let started = Instant::now();
    while cluster_values::get(&store, "before").await.unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(10), "the first server is not used again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    pair.set_failovers(20);
    signal(&pair.first, Signal::SIGKILL);
    let started = Instant::now();
    assert!(cluster_values::get(&store, "frozen").await.unwrap().is_some());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_for_the_server_in_use_while_all_servers_are_slow() {
    let Some(pair) = Pair::start().await else { return skipped("mariadb-server") };
    let store = Store::open(&pair.url).await.unwrap();
    write(&store, "before").await;

    for server in [&pair.first, &pair.second] {
        signal(server, Signal::SIGSTOP);
    }
    let resume = async {
        // Longer than it takes to notice that no server responds and to wait for another one.
        tokio::time::sleep(Duration::from_secs(8)).await;
        for server in [&pair.first, &pair.second] {
            signal(server, Signal::SIGCONT);
        }
    };
    let (read, ()) = tokio::join!(cluster_values::get(&store, "before"), resume);
    assert!(read.unwrap().is_some());
    write(&store, "after").await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uses_the_first_server_that_is_writable() {
    let Some(pair) = Pair::start().await else { return skipped("mariadb-server") };
    assert!(pair.first.run("CREATE USER muster@'%'; GRANT ALL ON muster.* TO muster@'%'"));
    assert!(pair.second.run("CREATE USER muster@'%'; GRANT ALL ON muster.* TO muster@'%'"));
    assert!(pair.second.run("SET GLOBAL read_only = 1"));
    let url = pair.url.replace("root@", "muster@");
    let store = Store::open(&url).await.unwrap();
    write(&store, "first").await;
    assert!(has(&pair.first.url("muster"), "first").await);

    // A switchover: the operator exchanges the roles. A statement of its own finds the new server, like a transaction.
    assert!(pair.first.run("SET GLOBAL read_only = 1") && pair.second.run("SET GLOBAL read_only = 0"));
    let sql = "INSERT INTO cluster_values (name, value, version) VALUES (?, ?, 1)";
    store.execute(sql, &["statement".into(), "x".into()]).await.unwrap();
    assert!(has(&pair.second.url("muster"), "statement").await);
    write(&store, "second").await;
    assert!(has(&pair.second.url("muster"), "second").await);
    store.close().await;

    // A process that starts with the second server writes to it, so the first one lacks writes when it is writable again.
    pair.set_failovers(10);
    let started = Store::open(&url).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let sql = "SELECT value FROM muster.cluster_values WHERE name = 'database_failovers'";
    while pair.second.query(sql).as_deref() != Some("11") {
        assert!(Instant::now() < deadline, "the failover is not recorded");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    started.close().await;
    assert!(pair.first.run("SET GLOBAL read_only = 0"));
    let restarted = Store::open(&url).await.unwrap();
    write(&restarted, "third").await;
    assert!(has(&pair.second.url("muster"), "third").await);
    restarted.close().await;
}

#[test]
fn no_error_of_an_overloaded_or_full_server_is_a_bug() {
    for code in
        [3, 20, 1021, 1026, 1030, 1114, 1290, 1792, 1836, 1205, 1213, 1047, 1040, 1053, 1180, 1317, 1927]
    {
        let error = super::classify(code, String::new());
        let error = muster_types::Error::from(error);
        assert!(
            matches!(error, muster_types::Error::Unavailable(_) | muster_types::Error::Contended),
            "{code}: {error:?}"
        );
    }
}

/// Forwards connections to a server, and closes those that commit before the response while `is_active`. Returns its
/// address.
async fn lose_responses_to_commits(server: String, is_active: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&server).await.unwrap();
            let is_active = Arc::clone(&is_active);
            tokio::spawn(async move {
                let (mut request, mut response) = ([0; 65536], [0; 65536]);
                loop {
                    tokio::select! {
                        Ok(length @ 1..) = client.read(&mut request) => {
                            server.write_all(&request[..length]).await.unwrap();
                            if request[..length].ends_with(b"COMMIT") && is_active.load(Ordering::Relaxed) {
                                // The transaction is committed when the server responds.
                                let _ = server.read(&mut response).await;
                                return;
                            }
                        }
                        Ok(length @ 1..) = server.read(&mut response) => {
                            client.write_all(&response[..length]).await.unwrap();
                        }
                        else => return,
                    }
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn says_that_the_outcome_of_a_commit_without_response_is_unknown() {
    let Some(server) = MariaDb::start() else { return skipped("mariadb-server") };
    assert!(server.run("CREATE DATABASE muster"));
    let direct = Store::open(&server.url("muster")).await.unwrap();
    let is_active = Arc::<AtomicBool>::default();
    let proxy = lose_responses_to_commits(server.address(), Arc::clone(&is_active)).await;
    let store = Store::open(&server.url("muster").replace(&server.address(), &proxy)).await.unwrap();
    is_active.store(true, Ordering::Relaxed);
    let result = transaction!(store, |tx| { Ok(cluster_values::set(tx, "committed", "x").await?) });
    let text = result.unwrap_err().to_string();
    assert!(text.contains("it is unknown whether the change was made"), "{text}");
    assert!(cluster_values::get(&direct, "committed").await.unwrap().is_some());
    store.close().await;
    direct.close().await;
}

/// Starts a proxy of a server that delays responses. Returns its address.
async fn delay_responses(server: String, delays: Arc<Mutex<VecDeque<Duration>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut requests, mut client) = client.into_split();
            let (mut responses, mut server) = TcpStream::connect(&server).await.unwrap().into_split();
            tokio::spawn(async move { tokio::io::copy(&mut requests, &mut server).await });
            let delays = Arc::clone(&delays);
            tokio::spawn(async move {
                let mut response = [0; 65536];
                while let Ok(length @ 1..) = responses.read(&mut response).await {
                    let delay = delays.lock().unwrap().pop_front();
                    tokio::time::sleep(delay.unwrap_or_default()).await;
                    if client.write_all(&response[..length]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn late_response_is_not_taken_for_that_of_another_statement() {
    let Some(server) = MariaDb::start() else { return skipped("mariadb-server") };
    assert!(server.run("CREATE DATABASE muster"));
    let delays = Arc::<Mutex<VecDeque<Duration>>>::default();
    let proxy = delay_responses(server.address(), Arc::clone(&delays)).await;
    let store = Store::open(&server.url("muster").replace(&server.address(), &proxy)).await.unwrap();
    // The statements are prepared, so that each is one command and has one response.
    write(&store, "name").await;
    write(&store, "name").await;
    assert!(cluster_values::get(&store, "name").await.unwrap().is_some());
    // The response to the statement arrives while the transaction is rolled back, and that to the rollback later.
    let late = transaction!(store, |tx| {
        delays.lock().unwrap().extend([10_300, 1_000].map(Duration::from_millis));
        Ok(cluster_values::set(tx, "name", "y").await?)
    });
    assert!(matches!(late, Err(muster_types::Error::Unavailable(_))), "{late:?}");
    assert!(cluster_values::get(&store, "name").await.unwrap().is_some());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn says_that_the_outcome_is_unknown_if_the_database_fails_after_a_commit() {
    let Some(mut server) = MariaDb::start() else { return skipped("mariadb-server") };
    assert!(server.run("CREATE DATABASE muster"));
    let store = Store::open(&server.url("muster")).await.unwrap();
    let response = run_change(|| Ok(()), async {
        transaction!(store, |tx| { Ok(cluster_values::set(tx, "committed", "x").await?) })?;
        server.kill();
        Ok::<_, muster_types::Error>(cluster_values::get(&store, "committed").await?)
    });
    let text = response.await.unwrap_err().to_string();
    assert!(text.contains("it is unknown whether the change was made"), "{text}");
    let rejected = run_change(|| Ok(()), async { cluster_values::get(&store, "committed").await });
    let text = muster_types::Error::from(rejected.await.unwrap_err()).to_string();
    assert!(text.ends_with("please retry") && !text.contains("unknown"), "{text}");
}
