//! Exchanges of identity tokens for keys with real daemons: raw requests, several daemons, database failures.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use muster_testing::issuer::Mode;
use muster_testing::{Daemon, DaemonSetup, Issuer, MariaDb};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::multi_node::member;
use crate::{setup, wait_for};

/// Makes a daemon trust the CA of an issuer on this host.
fn trusting(setup: DaemonSetup, directory: &Path, issuer: &Issuer) -> DaemonSetup {
    let bundle = directory.join("authorities.pem");
    issuer.write_ca(&bundle);
    setup
        .set("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap())
        .set("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1")
        .set("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "60")
}

/// Creates the issuer `forge`, the namespace `ci` and the rule `deploy`. Returns a token of the administrator.
async fn set_up_federation(daemon: &Daemon, key: &str, issuer: &Issuer) -> String {
    let admin = daemon.log_in("system", key).await;
    let forge = json!({"name": "forge", "issuer_url": issuer.url(), "jwks_uri": issuer.jwks_uri(), "audience": "cloud"});
    let rule = json!({"name": "deploy", "issuer": "forge", "bound_claims": {"sub": "repo:x"},
                      "scopes": ["artifact.*"], "key_ttl": 600, "key_name_prefix": "robot"});
    for (path, body) in [
        ("/auth/issuers", forge),
        ("/auth/namespaces", json!({"namespace": "ci"})),
        ("/auth/namespaces/ci/rules", rule),
    ] {
        let (status, response) = daemon.call(&admin, Method::POST, path, Some(body)).await;
        assert_eq!(status, 200, "{path}: {response}");
    }
    admin
}

async fn exchange(daemon: &Daemon, token: &str) -> (u16, Value) {
    let body = json!({"token": token, "namespace": "ci", "rule": "deploy"});
    let (status, response) = daemon.call("", Method::POST, "/auth/federated", Some(body)).await;
    (status.as_u16(), response)
}

/// Returns the names of the minted keys.
async fn minted_keys(daemon: &Daemon, admin: &str) -> Vec<Value> {
    let (status, keys) = daemon.call(admin, Method::GET, "/auth/namespaces/ci/keys", None).await;
    assert_eq!(status, 200, "{keys}");
    keys.as_array().unwrap().clone()
}

/// Waits until at least 25 seconds of the current minute are left.
async fn wait_for_early_in_minute() {
    let time = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    wait_for("the beginning of a minute", async || (time().as_secs() % 60 < 35).then_some(())).await;
}

/// Sends raw bytes and returns the response.
async fn send_raw(daemon: &Daemon, request: &str) -> String {
    let mut stream = TcpStream::connect(daemon.url.strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    let read = stream.read_to_end(&mut response);
    let _ = tokio::time::timeout(Duration::from_secs(30), read).await.expect("the response ends");
    String::from_utf8_lossy(&response).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn exchange_leaves_no_secrets_in_logs_or_files() {
    let directory = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let setup = trusting(setup(directory.path()), directory.path(), &issuer);
    let daemon = setup.set("LOGLEVEL_API", "trace").set("LOGLEVEL_MAIN", "trace").start();
    let admin = set_up_federation(&daemon, &daemon.system_key(), &issuer).await;
    let token = issuer.token(issuer.claims("cloud"));
    let (status, response) = exchange(&daemon, &token).await;
    assert_eq!(status, 200, "{response}");
    assert_eq!(minted_keys(&daemon, &admin).await, [response["key_name"].clone()]);
    let own = daemon.log_in("ci", response["key"].as_str().unwrap()).await;
    assert_eq!(daemon.call(&own, Method::GET, "/artifacts", None).await.0, 200);
    assert_eq!(daemon.call(&own, Method::GET, "/instances", None).await.0, 403);
    let refused = issuer.token(json!({"iss": issuer.url(), "aud": "other", "exp": 1}));
    assert_eq!(exchange(&daemon, &refused).await.0, 401);
    assert_eq!(exchange(&daemon, &token).await.0, 401);

    let events = wait_for("the events", async || {
        let (_, events) = daemon.call(&admin, Method::GET, "/auth/namespaces/ci/events", None).await;
        events.to_string().contains("federated exchange minted a key").then_some(events)
    })
    .await;
    let log = daemon.log();
    let data = daemon.data.clone();
    assert!(daemon.stop().success());
    let mut texts = vec![("the log".to_owned(), log), ("the events".to_owned(), events.to_string())];
    let mut directories = vec![data];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                directories.push(entry.path());
            } else if entry.path().is_file() {
                let bytes = std::fs::read(entry.path()).unwrap();
                texts
                    .push((entry.path().display().to_string(), String::from_utf8_lossy(&bytes).into_owned()));
            }
        }
    }
    let key = response["key"].as_str().unwrap();
    let parts = [&token, &refused].into_iter().flat_map(|token| token.split('.').skip(1));
    for secret in parts.chain([key, &key[4..36]]) {
        for (source, text) in &texts {
            assert!(!text.contains(secret), "{source} contains {secret}");
        }
    }
    assert!(texts.iter().any(|(source, text)| source.contains("muster.db") && text.contains("robot-")));
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_invalid_ca_bundle_and_recovers_without_restart() {
    let directory = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let setup = trusting(setup(directory.path()), directory.path(), &issuer);
    let bundle = directory.path().join("authorities.pem");
    std::fs::write(&bundle, "not PEM").unwrap();
    let daemon = setup.start();
    let warning = "failed to load FEDERATION_JWKS_CA_BUNDLE";
    wait_for("the warning", async || daemon.log().contains(warning).then_some(())).await;
    set_up_federation(&daemon, &daemon.system_key(), &issuer).await;
    let token = issuer.token(issuer.claims("cloud"));
    let (status, body) = exchange(&daemon, &token).await;
    assert_eq!((status, &body["error"]), (503, &json!("federated exchange is unavailable, please retry")));
    issuer.write_ca(&bundle);
    assert_eq!(exchange(&daemon, &token).await.0, 200, "the new bundle needs a restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn exchange_requires_content_length() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    let head = "POST /auth/federated HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    let response = send_raw(&daemon, &format!("{head}\r\n")).await;
    assert!(
        response.starts_with("HTTP/1.1 411 ") && response.contains("a content-length is required"),
        "{response}"
    );
    let response =
        send_raw(&daemon, &format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n")).await;
    assert!(response.starts_with("HTTP/1.1 411 "), "{response}");
    // A body that is too large is rejected by its header alone.
    let response = send_raw(&daemon, &format!("{head}Content-Length: 16385\r\n\r\n")).await;
    assert!(
        response.starts_with("HTTP/1.1 413 ") && response.contains("request body too large"),
        "{response}"
    );
    let response = send_raw(&daemon, &format!("{head}Content-Length: 0\r\n\r\n")).await;
    assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limit_is_shared_by_all_daemons() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let start = |name| {
        let setup = trusting(member(directory.path(), name, &url), directory.path(), &issuer);
        setup.set("FEDERATION_RATE_LIMIT_PER_MINUTE", "20").start()
    };
    let daemons = Arc::new([start("n1"), start("n2")]);
    set_up_federation(&daemons[0], "the first key", &issuer).await;
    wait_for_early_in_minute().await;
    let gate = Arc::new(tokio::sync::Barrier::new(60));
    let all: Vec<_> = (0..60)
        .map(|number| {
            let (daemons, gate) = (Arc::clone(&daemons), Arc::clone(&gate));
            // Valid tokens, tokens with the wrong audience, and garbage.
            let token = match number % 3 {
                0 => issuer.token(issuer.claims("cloud")),
                1 => issuer.token(issuer.claims("other")),
                _ => "rubbish".to_owned(),
            };
            tokio::spawn(async move {
                gate.wait().await;
                exchange(&daemons[number % 2], &token).await
            })
        })
        .collect();
    let mut admitted = 0;
    for exchange in all {
        let (status, response) = exchange.await.unwrap();
        if status == 429 {
            assert_eq!(response["error"], "too many federated exchange attempts");
        } else {
            assert!(status == 200 || status == 401, "{response}");
            admitted += 1;
        }
    }
    assert_eq!(admitted, 20);
    for daemon in daemons.iter() {
        assert_eq!(exchange(daemon, "rubbish").await.0, 429);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_accepted_by_only_one_daemon() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let start = |name| {
        let setup = trusting(member(directory.path(), name, &url), directory.path(), &issuer);
        setup.set("FEDERATION_RATE_LIMIT_PER_MINUTE", "0").start()
    };
    let daemons = Arc::new([start("n1"), start("n2")]);
    let admin = set_up_federation(&daemons[0], "the first key", &issuer).await;
    let token = issuer.token(issuer.claims("cloud"));
    let gate = Arc::new(tokio::sync::Barrier::new(50));
    let all: Vec<_> = (0..50)
        .map(|number| {
            let (daemons, gate, token) = (Arc::clone(&daemons), Arc::clone(&gate), token.clone());
            tokio::spawn(async move {
                gate.wait().await;
                exchange(&daemons[number % 2], &token).await
            })
        })
        .collect();
    let mut accepted = Vec::new();
    for exchange in all {
        let (status, response) = exchange.await.unwrap();
        if status == 200 {
            accepted.push(response["key_name"].clone());
        } else {
            assert_eq!(
                (status, &response["error"]),
                (401, &json!("federated exchange refused: token already used"))
            );
        }
    }
    assert_eq!(accepted.len(), 1);
    assert_eq!(minted_keys(&daemons[1], &admin).await, accepted);
}

#[tokio::test(flavor = "multi_thread")]
async fn mints_no_key_while_database_is_unavailable() {
    let Some(server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let setup = setup(directory.path()).set("DATABASE_URL", &server.fresh_database());
    let daemon = Arc::new(trusting(setup, directory.path(), &issuer).start());
    let admin = set_up_federation(&daemon, &daemon.system_key(), &issuer).await;
    let pid = Pid::from_raw(server.pid().unwrap());
    let unavailable = (503, json!("database unavailable, please retry"));
    let error = |(status, response): (u16, Value)| (status, response["error"].clone());

    // The database stops while the daemon fetches the issuer's keys.
    let token = issuer.token(issuer.claims("cloud"));
    issuer.serve(Mode::Hang);
    let (exchanging, exchanged) = (Arc::clone(&daemon), token.clone());
    let pending = tokio::spawn(async move { exchange(&exchanging, &exchanged).await });
    wait_for("the fetch", async || (issuer.fetches() > 0).then_some(())).await;
    kill(pid, Signal::SIGSTOP).unwrap();
    issuer.serve(Mode::Keys);
    let interrupted = pending.await.unwrap();
    // The database is already stopped when the exchange starts.
    let while_stopped = exchange(&daemon, &token).await;
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(error(interrupted), unavailable);
    assert_eq!(error(while_stopped), unavailable);

    wait_for("the database to be back", async || {
        (daemon.call(&admin, Method::GET, "/auth/namespaces", None).await.0 == 200).then_some(())
    })
    .await;
    assert_eq!(minted_keys(&daemon, &admin).await, Vec::<Value>::new());
    let (status, response) = exchange(&daemon, &token).await;
    assert_eq!(status, 200, "the token was consumed: {response}");

    kill(pid, Signal::SIGKILL).unwrap();
    assert_eq!(error(exchange(&daemon, &issuer.token(issuer.claims("cloud"))).await), unavailable);
}
