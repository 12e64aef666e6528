//! Identity tokens exchanged for keys by real daemons: on the wire, several at once, without a database.

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

use crate::several::member;
use crate::{setup, wait_for};

/// A daemon that believes an issuer on this machine.
fn believing(setup: DaemonSetup, folder: &Path, issuer: &Issuer) -> DaemonSetup {
    let bundle = folder.join("authorities.pem");
    issuer.write_ca(&bundle);
    setup
        .set("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap())
        .set("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1")
        .set("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "60")
}

/// Makes the issuer `forge`, the namespace `ci` and the rule `deploy`; answers the administrator's token.
async fn federate(daemon: &Daemon, key: &str, issuer: &Issuer) -> String {
    let admin = daemon.log_in("system", key).await;
    let forge = json!({"name": "forge", "issuer_url": issuer.url(), "jwks_uri": issuer.jwks_uri(), "audience": "cloud"});
    let rule = json!({"name": "deploy", "issuer": "forge", "bound_claims": {"sub": "repo:x"},
                      "scopes": ["artifact.*"], "key_ttl": 600, "key_name_prefix": "robot"});
    for (path, body) in [
        ("/auth/issuers", forge),
        ("/auth/namespaces", json!({"namespace": "ci"})),
        ("/auth/namespaces/ci/rules", rule),
    ] {
        let (status, answer) = daemon.call(&admin, Method::POST, path, Some(body)).await;
        assert_eq!(status, 200, "{path}: {answer}");
    }
    admin
}

async fn exchange(daemon: &Daemon, token: &str) -> (u16, Value) {
    let body = json!({"token": token, "namespace": "ci", "rule": "deploy"});
    let (status, answer) = daemon.call("", Method::POST, "/auth/federated", Some(body)).await;
    (status.as_u16(), answer)
}

/// The names of the minted keys.
async fn minted(daemon: &Daemon, admin: &str) -> Vec<Value> {
    let (status, keys) = daemon.call(admin, Method::GET, "/auth/namespaces/ci/keys", None).await;
    assert_eq!(status, 200, "{keys}");
    keys.as_array().unwrap().clone()
}

/// Waits until a minute has some of its time left.
async fn early_in_a_minute() {
    let time = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    wait_for("the beginning of a minute", async || (time().as_secs() % 60 < 35).then_some(())).await;
}

/// What a daemon answers to bytes on the wire.
async fn raw(daemon: &Daemon, request: &str) -> String {
    let mut stream = TcpStream::connect(daemon.url.strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let _ = tokio::time::timeout(Duration::from_secs(30), read).await.expect("the end of the answer");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_exchanges_a_token_and_forgets_it() {
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let setup = believing(setup(folder.path()), folder.path(), &issuer);
    let daemon = setup.set("LOGLEVEL_API", "trace").set("LOGLEVEL_MAIN", "trace").start();
    let admin = federate(&daemon, &daemon.system_key(), &issuer).await;
    let token = issuer.token(issuer.claims("cloud"));
    let (status, answer) = exchange(&daemon, &token).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(minted(&daemon, &admin).await, [answer["key_name"].clone()]);
    let own = daemon.log_in("ci", answer["key"].as_str().unwrap()).await;
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
    let mut folders = vec![data];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if entry.path().is_file() {
                let bytes = std::fs::read(entry.path()).unwrap();
                texts
                    .push((entry.path().display().to_string(), String::from_utf8_lossy(&bytes).into_owned()));
            }
        }
    }
    let key = answer["key"].as_str().unwrap();
    let parts = [&token, &refused].into_iter().flat_map(|token| token.split('.').skip(1));
    for secret in parts.chain([key, &key[4..36]]) {
        for (place, text) in &texts {
            assert!(!text.contains(secret), "{place} holds {secret}");
        }
    }
    assert!(texts.iter().any(|(place, text)| place.contains("muster.db") && text.contains("robot-")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_says_at_once_that_its_authorities_are_no_good() {
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let setup = believing(setup(folder.path()), folder.path(), &issuer);
    let bundle = folder.path().join("authorities.pem");
    std::fs::write(&bundle, "not PEM").unwrap();
    let daemon = setup.start();
    let complaint = "FEDERATION_JWKS_CA_BUNDLE cannot be used";
    wait_for("the complaint", async || daemon.log().contains(complaint).then_some(())).await;
    federate(&daemon, &daemon.system_key(), &issuer).await;
    let token = issuer.token(issuer.claims("cloud"));
    let expected = json!({"error": "federated exchange is unavailable, please retry", "status": 503});
    assert_eq!(exchange(&daemon, &token).await, (503, expected));
    issuer.write_ca(&bundle);
    assert_eq!(exchange(&daemon, &token).await.0, 200, "without a restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_on_the_wire_must_say_how_long_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).start();
    let head = "POST /auth/federated HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    let answer = raw(&daemon, &format!("{head}\r\n")).await;
    assert!(
        answer.starts_with("HTTP/1.1 411 ") && answer.contains("a content-length is required"),
        "{answer}"
    );
    let answer =
        raw(&daemon, &format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 411 "), "{answer}");
    // Of what is too large only the head is needed.
    let answer = raw(&daemon, &format!("{head}Content-Length: 16385\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("request body too large"), "{answer}");
    let answer = raw(&daemon, &format!("{head}Content-Length: 0\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_holds_for_all_daemons_together() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let start = |name| {
        let setup = believing(member(folder.path(), name, &url), folder.path(), &issuer);
        setup.set("FEDERATION_RATE_LIMIT_PER_MINUTE", "20").start()
    };
    let daemons = Arc::new([start("n1"), start("n2")]);
    federate(&daemons[0], "the first key", &issuer).await;
    early_in_a_minute().await;
    let gate = Arc::new(tokio::sync::Barrier::new(60));
    let all: Vec<_> = (0..60)
        .map(|number| {
            let (daemons, gate) = (Arc::clone(&daemons), Arc::clone(&gate));
            // Good ones, bad ones, strangers.
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
    let mut through = 0;
    for exchange in all {
        let (status, answer) = exchange.await.unwrap();
        if status == 429 {
            assert_eq!(answer["error"], "too many federated exchange attempts");
        } else {
            assert!(status == 200 || status == 401, "{answer}");
            through += 1;
        }
    }
    assert_eq!(through, 20);
    for daemon in daemons.iter() {
        assert_eq!(exchange(daemon, "rubbish").await.0, 429);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_good_for_one_of_all_daemons() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let start = |name| {
        let setup = believing(member(folder.path(), name, &url), folder.path(), &issuer);
        setup.set("FEDERATION_RATE_LIMIT_PER_MINUTE", "0").start()
    };
    let daemons = Arc::new([start("n1"), start("n2")]);
    let admin = federate(&daemons[0], "the first key", &issuer).await;
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
    let mut won = Vec::new();
    for exchange in all {
        let (status, answer) = exchange.await.unwrap();
        if status == 200 {
            won.push(answer["key_name"].clone());
        } else {
            assert_eq!(
                (status, &answer["error"]),
                (401, &json!("federated exchange refused: token already used"))
            );
        }
    }
    assert_eq!(won.len(), 1);
    assert_eq!(minted(&daemons[1], &admin).await, won);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_goes_away_in_the_middle_mints_nothing() {
    let Some(server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let issuer = Issuer::start();
    let setup = setup(folder.path()).set("DATABASE_URL", &server.fresh_database());
    let daemon = Arc::new(believing(setup, folder.path(), &issuer).start());
    let admin = federate(&daemon, &daemon.system_key(), &issuer).await;
    let pid = Pid::from_raw(server.pid().unwrap());
    let away = (503, json!("database unavailable, please retry"));
    let error = |(status, answer): (u16, Value)| (status, answer["error"].clone());

    // While the keys of the issuer are awaited.
    let token = issuer.token(issuer.claims("cloud"));
    issuer.serve(Mode::Hang);
    let (asking, asked) = (Arc::clone(&daemon), token.clone());
    let answer = tokio::spawn(async move { exchange(&asking, &asked).await });
    wait_for("the fetch", async || (issuer.fetches() > 0).then_some(())).await;
    kill(pid, Signal::SIGSTOP).unwrap();
    issuer.serve(Mode::Keys);
    let in_the_middle = answer.await.unwrap();
    // From the beginning.
    let at_once = exchange(&daemon, &token).await;
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(error(in_the_middle), away);
    assert_eq!(error(at_once), away);

    wait_for("the database to be back", async || {
        (daemon.call(&admin, Method::GET, "/auth/namespaces", None).await.0 == 200).then_some(())
    })
    .await;
    assert_eq!(minted(&daemon, &admin).await, Vec::<Value>::new());
    let (status, answer) = exchange(&daemon, &token).await;
    assert_eq!(status, 200, "not used up: {answer}");

    kill(pid, Signal::SIGKILL).unwrap();
    assert_eq!(error(exchange(&daemon, &issuer.token(issuer.claims("cloud"))).await), away);
}
