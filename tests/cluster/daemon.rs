//! The daemon itself: settings, credentials, TLS, signals, metrics, logs.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;

use muster_testing::{DaemonSetup, free_port};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// Runs a daemon that must not start, and answers what it says.
fn refused(setup: &DaemonSetup) -> String {
    let Output { status, stderr, .. } = setup.command().output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

#[test]
fn unusable_settings_stop_the_start_with_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("muster.conf");
    std::fs::write(&config, "# ours\nCLEANER_DELAY = 5\nCLEANER_DELY = 6\n").unwrap();
    let config = config.to_str().unwrap();
    let base = || setup(folder.path());
    for (setup, expected) in [
        (base().set("CLEANER_DELAY", "soon"), "CLEANER_DELAY"),
        (base().set("DATABASE_URL", "postgres://x"), "must start with sqlite: or mysql:"),
        (
            base().set("DATABASE_URL", "mysql://root:hunter2@127.0.0.1:1/x"),
            "database mysql://root:********@127.0.0.1:1/x",
        ),
        (
            base().set("TLS_CERTIFICATE", "/nonexistent").set("TLS_PRIVATE_KEY", "/nonexistent"),
            "/nonexistent",
        ),
        (base().set("AUTH_SECRET_SEED", "~~unconfigured~~"), "AUTH_SECRET_SEED"),
        (base().arguments(&["--config", config]), "line 3: unknown setting \"CLEANER_DELY\""),
        (base().arguments(&["--config", "/nonexistent"]), "/nonexistent"),
        (base().arguments(&["--simulate", "0"]), "--simulate"),
    ] {
        let said = refused(&setup);
        assert!(said.contains(expected), "{said}");
        assert!(!said.contains("hunter2") && !said.contains("panicked"), "{said}");
        assert!(said.lines().filter(|line| line.starts_with("error")).count() == 1, "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_key_is_written_for_its_owner_only_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).start();
    let path = daemon.data.join("credentials.json");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let credentials: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&credentials["namespace"], &credentials["apiurl"]), (&json!("system"), &json!(daemon.url)));
    let key = daemon.system_key();
    assert!(key.starts_with("sfk_"));
    assert!(!daemon.log().contains(&key), "the log shows no secret");
    assert!(daemon.stop().success());

    // Another port, another start: the same key, the new address.
    let daemon = setup(folder.path()).start();
    assert_eq!(daemon.system_key(), key);
    daemon.log_in("system", &key).await;
    assert!(std::fs::read_to_string(&path).unwrap().contains(&daemon.url));
    let second = refused(&setup(folder.path()));
    assert!(second.contains("in use by another muster"), "{second}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_given_first_key_is_not_written_down() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).set("SYSTEM_KEY", "a given secret").start();
    let token = daemon.log_in("system", "a given secret").await;
    let (_, keys) = daemon.call(&token, Method::GET, "/auth/namespaces/system/keys", None).await;
    assert_eq!(keys, json!(["deploy"]));
    assert!(!daemon.data.join("credentials.json").exists());
    assert!(!daemon.log().contains("a given secret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_first_key_stays_deleted_until_it_is_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let setup = setup(folder.path()).set("SYSTEM_KEY", "a leaked secret");
    let daemon = setup.start();
    let token = daemon.log_in("system", "a leaked secret").await;
    let (status, _) = daemon.call(&token, Method::DELETE, "/auth/namespaces/system/keys/deploy", None).await;
    assert_eq!(status, 200);
    assert!(daemon.stop().success());
    let daemon = setup.start();
    let login = json!({"namespace": "system", "key": "a leaked secret"});
    assert_eq!(daemon.call("", Method::POST, "/auth", Some(login)).await.0, 401);

    let recover = || {
        let data = folder.path().join("data");
        std::process::Command::new(env!("CARGO_BIN_EXE_muster"))
            .args(["db", "recover-key", "--data-dir"])
            .arg(data)
            .output()
            .unwrap()
    };
    assert!(!recover().status.success(), "not while the daemon runs");
    assert!(daemon.stop().success());
    let recovered = recover();
    assert!(recovered.status.success(), "{}", String::from_utf8_lossy(&recovered.stderr));
    let daemon = setup.start();
    daemon.log_in("system", &daemon.system_key()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_simulated_cluster_has_as_many_nodes_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).arguments(&["--simulate", "5"]).start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let (_, nodes) = daemon.call(&token, Method::GET, "/nodes", None).await;
    let nodes = nodes.as_array().unwrap();
    assert_eq!(nodes.len(), 5);
    assert!(nodes.iter().all(|node| node["simulated"] == true && node["is_hypervisor"] == true));
}

#[tokio::test(flavor = "multi_thread")]
async fn this_machine_is_a_node_with_real_resources() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).arguments(&[]).set("NODE_NAME", "here").start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let (_, nodes) = daemon.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(
        (nodes.as_array().unwrap().len(), &nodes[0]["name"], &nodes[0]["simulated"]),
        (1, &json!("here"), &json!(false))
    );
    wait_for("the maintainer", async || {
        let (_, node) = daemon.call(&token, Method::GET, "/nodes/here", None).await;
        (node["is_cluster_maintainer"] == true).then_some(())
    })
    .await;
    let (_, resources) = daemon.call(&token, Method::GET, "/admin/resources", None).await;
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(resources["per_node"]["here"]["cpu_max"].as_f64(), Some(cores as f64));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_signal_the_daemon_is_not_ready_but_serves_until_its_grace_ends() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).set("API_DRAIN_GRACE", "600").start();
    daemon.signal(Signal::SIGTERM);
    wait_for("the drain", async || {
        (daemon.call("", Method::GET, "/readyz", None).await.0 == 503).then_some(())
    })
    .await;
    assert_eq!(daemon.call("", Method::GET, "/livez", None).await.0, 200);
    let key = daemon.system_key();
    daemon.log_in("system", &key).await;
    // The second signal ends the grace.
    assert!(daemon.stop().success());
    let spools = std::fs::read_dir(folder.path().join("data/spool/eventlog")).unwrap().count();
    assert_eq!(spools, 0, "everything was drained");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_on_their_own_port() {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let daemon = setup(folder.path()).set("MARIADB_GATEWAY_METRICS_PORT", &port.to_string()).start();
    daemon.log_in("system", &daemon.system_key()).await;
    let text = wait_for("the metrics", async || {
        let text = reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.ok()?.text().await.ok()?;
        text.contains("database_events_inserted_total{event_type=\"audit\"}").then_some(text)
    })
    .await;
    for name in [
        "database_events_rows",
        "eventlog_spool_depth",
        "eventlog_spool_dropped_total",
        "database_orphan_events_pruned_total",
    ] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert_eq!(daemon.call("", Method::GET, "/metrics", None).await.0, 404, "not on the API's port");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_metrics_port_is_no_reason_not_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let daemon = setup(folder.path()).set("MARIADB_GATEWAY_METRICS_PORT", &port).start();
    wait_for("the warning", async || daemon.log().contains("MARIADB_GATEWAY_METRICS_PORT").then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_speaks_tls_when_it_has_a_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let made =
        rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let daemon = setup(folder.path())
        .set("TLS_CERTIFICATE", certificate.to_str().unwrap())
        .set("TLS_PRIVATE_KEY", key.to_str().unwrap())
        .start();
    let root = reqwest::Certificate::from_pem(made.cert.pem().as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let answer = client.get(format!("{}/livez", daemon.url)).send().await.unwrap();
    assert_eq!(answer.text().await.unwrap(), "ok");
    assert!(reqwest::get(daemon.url.replace("https", "http")).await.is_err(), "no plain HTTP on that port");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_can_be_json() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).set("LOG_FORMAT", "json").start();
    let log = wait_for("the log", async || Some(daemon.log()).filter(|log| log.contains("serving"))).await;
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_namespace_s_name_is_free_after_the_cleaners_delay() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).set("CLEANER_DELAY", "1").start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let create = async || {
        daemon.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await.0
    };
    assert_eq!(create().await, 200);
    assert_eq!(daemon.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await.0, 200);
    assert_eq!(create().await, 403);
    wait_for("the cleaner", async || (create().await == 200).then_some(())).await;
}
