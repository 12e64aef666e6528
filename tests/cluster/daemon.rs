//! The daemon itself: settings, credentials, TLS, signals, metrics, logs.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;

use muster_testing::{DaemonSetup, free_port};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// Runs a daemon that must fail to start and returns its standard error.
fn startup_error(setup: &DaemonSetup) -> String {
    let Output { status, stderr, .. } = setup.command().output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

#[test]
fn refuses_to_start_with_invalid_settings() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("muster.conf");
    std::fs::write(&config, "# ours\nCLEANER_DELAY = 5\nCLEANER_DELY = 6\n").unwrap();
    let config = config.to_str().unwrap();
    let empty = directory.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let empty = empty.to_str().unwrap();
    let base = || setup(directory.path());
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
        (
            base().set("TLS_CERTIFICATE", empty).set("TLS_PRIVATE_KEY", empty),
            "TLS_CERTIFICATE contains no PEM certificate",
        ),
        (base().set("AUTH_SECRET_SEED", "~~unconfigured~~"), "AUTH_SECRET_SEED"),
        (base().arguments(&["--config", config]), "line 3: unknown setting \"CLEANER_DELY\""),
        (base().arguments(&["--config", "/nonexistent"]), "/nonexistent"),
        (base().arguments(&["--simulate", "0"]), "--simulate"),
    ] {
        let stderr = startup_error(&setup);
        assert!(stderr.contains(expected), "{stderr}");
        assert!(!stderr.contains("hunter2") && !stderr.contains("panicked"), "{stderr}");
        assert!(stderr.lines().filter(|line| line.starts_with("error")).count() == 1, "{stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stores_generated_system_key_privately_and_reuses_it() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    let path = daemon.data.join("credentials.json");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let credentials: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&credentials["namespace"], &credentials["apiurl"]), (&json!("system"), &json!(daemon.url)));
    let key = daemon.system_key();
    assert!(key.starts_with("sfk_"));
    assert!(!daemon.log().contains(&key), "the log contains the key");
    assert!(daemon.stop().success());

    // After a restart on another port: the same key with the new address.
    let daemon = setup(directory.path()).start();
    assert_eq!(daemon.system_key(), key);
    daemon.log_in("system", &key).await;
    assert!(std::fs::read_to_string(&path).unwrap().contains(&daemon.url));
    let second = startup_error(&setup(directory.path()));
    assert!(second.contains("in use by another muster"), "{second}");
}

#[tokio::test(flavor = "multi_thread")]
async fn does_not_store_configured_system_key() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("SYSTEM_KEY", "a given secret").start();
    let token = daemon.log_in("system", "a given secret").await;
    let (_, keys) = daemon.call(&token, Method::GET, "/auth/namespaces/system/keys", None).await;
    assert_eq!(keys, json!(["deploy"]));
    assert!(!daemon.data.join("credentials.json").exists());
    assert!(!daemon.log().contains("a given secret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_system_key_stays_deleted_until_recovery() {
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path()).set("SYSTEM_KEY", "a leaked secret");
    let daemon = setup.start();
    let token = daemon.log_in("system", "a leaked secret").await;
    let (status, _) = daemon.call(&token, Method::DELETE, "/auth/namespaces/system/keys/deploy", None).await;
    assert_eq!(status, 200);
    assert!(daemon.stop().success());
    let daemon = setup.start();
    let login = json!({"namespace": "system", "key": "a leaked secret"});
    assert_eq!(daemon.call("", Method::POST, "/auth", Some(login)).await.0, 401);

    let recover = || {
        let data = directory.path().join("data");
        std::process::Command::new(env!("CARGO_BIN_EXE_muster"))
            .args(["db", "recover-key", "--data-dir"])
            .arg(data)
            .output()
            .unwrap()
    };
    assert!(!recover().status.success(), "recovered the key while the daemon runs");
    assert!(daemon.stop().success());
    let recovered = recover();
    assert!(recovered.status.success(), "{}", String::from_utf8_lossy(&recovered.stderr));
    let daemon = setup.start();
    daemon.log_in("system", &daemon.system_key()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simulates_requested_number_of_nodes() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).arguments(&["--simulate", "5"]).start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let (_, nodes) = daemon.call(&token, Method::GET, "/nodes", None).await;
    let nodes = nodes.as_array().unwrap();
    assert_eq!(nodes.len(), 5);
    assert!(nodes.iter().all(|node| node["simulated"] == true && node["is_hypervisor"] == true));
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_real_resources_of_this_host() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).arguments(&[]).set("NODE_NAME", "here").start();
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
async fn serves_but_is_not_ready_during_shutdown_grace() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("API_DRAIN_GRACE", "600").start();
    daemon.signal(Signal::SIGTERM);
    wait_for("the daemon to drain", async || {
        (daemon.call("", Method::GET, "/readyz", None).await.0 == 503).then_some(())
    })
    .await;
    assert_eq!(daemon.call("", Method::GET, "/livez", None).await.0, 200);
    let key = daemon.system_key();
    daemon.log_in("system", &key).await;
    // The second signal ends the grace period.
    assert!(daemon.stop().success());
    let spools = std::fs::read_dir(directory.path().join("data/spool/eventlog")).unwrap().count();
    assert_eq!(spools, 0, "events were not drained");
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_metrics_on_separate_port() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let daemon = setup(directory.path()).set("MARIADB_GATEWAY_METRICS_PORT", &port.to_string()).start();
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
    assert!(text.contains("# TYPE eventlog_spool_dropped_total counter\n"), "{text}");
    assert_eq!(
        daemon.call("", Method::GET, "/metrics", None).await.0,
        404,
        "metrics are served on the API's port"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_metrics_of_nodes_and_cluster_with_tls_and_token() {
    let directory = tempfile::tempdir().unwrap();
    let certified_key = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let (certificate, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    std::fs::write(&certificate, certified_key.cert.pem()).unwrap();
    std::fs::write(&key, certified_key.signing_key.serialize_pem()).unwrap();
    let (nodes, cluster) = (free_port(), free_port());
    let _daemon = setup(directory.path())
        .set("TLS_CERTIFICATE", certificate.to_str().unwrap())
        .set("TLS_PRIVATE_KEY", key.to_str().unwrap())
        .set("RESOURCES_METRICS_PORT", &nodes.to_string())
        .set("CLUSTER_METRICS_PORT", &cluster.to_string())
        .set("METRICS_TOKEN", "t0ken")
        .start();
    let root = reqwest::Certificate::from_pem(certified_key.cert.pem().as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let read = async |port: u16, token: &str| {
        let request = client.get(format!("https://127.0.0.1:{port}/metrics")).bearer_auth(token);
        wait_for("the metrics", async || request.try_clone().unwrap().send().await.ok()).await
    };
    assert_eq!(read(nodes, "wrong").await.status(), 401);
    let text = read(nodes, "t0ken").await.text().await.unwrap();
    for line in ["# TYPE cpu_max gauge\n", "cpu_max{node=\"sim-1\"}", "updated_at{node=\"sim-2\"}"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let text = read(cluster, "t0ken").await.text().await.unwrap();
    assert!(text.contains("cluster_nodes{state=\"created\"} 2\n"), "{text}");
    assert!(reqwest::get(format!("http://127.0.0.1:{cluster}/metrics")).await.is_err(), "served without TLS");
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_without_metrics_if_port_is_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let daemon = setup(directory.path()).set("MARIADB_GATEWAY_METRICS_PORT", &port).start();
    wait_for("the warning", async || daemon.log().contains("MARIADB_GATEWAY_METRICS_PORT").then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_tls_with_configured_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let certified_key =
        rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    let (certificate, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    std::fs::write(&certificate, certified_key.cert.pem()).unwrap();
    std::fs::write(&key, certified_key.signing_key.serialize_pem()).unwrap();
    let daemon = setup(directory.path())
        .set("TLS_CERTIFICATE", certificate.to_str().unwrap())
        .set("TLS_PRIVATE_KEY", key.to_str().unwrap())
        .start();
    let root = reqwest::Certificate::from_pem(certified_key.cert.pem().as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let response = client.get(format!("{}/livez", daemon.url)).send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "ok");
    assert!(
        reqwest::get(daemon.url.replace("https", "http")).await.is_err(),
        "the TLS port accepts plain HTTP"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_log_as_json() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("LOG_FORMAT", "json").start();
    let log = wait_for("the log", async || Some(daemon.log()).filter(|log| log.contains("serving"))).await;
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn namespace_name_is_reusable_after_cleaner_delay() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("CLEANER_DELAY", "1").start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let create = async || {
        daemon.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await.0
    };
    assert_eq!(create().await, 200);
    assert_eq!(daemon.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await.0, 200);
    assert_eq!(create().await, 403);
    wait_for("the cleaner", async || (create().await == 200).then_some(())).await;
}
