//! Invitations of new hosts.

use std::process::Command;

use axum::http::Method;
use muster_store::{cluster_values, transaction};
use muster_test_cluster::{Cluster, seed};
use muster_types::invitation::InvitationToken;
use serde_json::{Value, json};

use crate::instances::consoles::serve;
use crate::networks::cluster;

const DATABASE_URL: &str = "mysql://muster:secret@db.example/muster";

async fn invite(cluster: &Cluster) -> InvitationToken {
    let token = cluster.token("system").await;
    let created = cluster.call(&token, Method::POST, "/admin/invitations", Some(json!({}))).await;
    assert_eq!(created.status, 200, "{}", created.text);
    InvitationToken::parse(created.body["token"].as_str().unwrap()).unwrap()
}

async fn redeem(cluster: &Cluster, body: Value) -> u16 {
    let response = cluster.call("", Method::POST, "/admin/invitations/redeem", Some(body)).await;
    response.status.as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn invited_host_gets_settings_once() {
    let (cluster, _) = cluster(&[("DATABASE_URL", DATABASE_URL)]).await;
    let invited = invite(&cluster).await;
    // The simulated node has no URL.
    let token = InvitationToken::new(&serve(&cluster).await, &invited.id, &seed());
    let forged = json!({"invitation": token.id, "proof": "forged"});
    assert_eq!(redeem(&cluster, forged).await, 404);

    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("muster.conf");
    std::fs::write(&config, "NODE_NAME = new").unwrap();
    let join = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(["node", "join", &token.to_text(), "--config"]).arg(&config).output().unwrap()
    };
    // A file that cannot be written does not use the invitation up.
    let unwritable = Command::new(env!("CARGO_BIN_EXE_muster"))
        .args(["node", "join", &token.to_text(), "--config", "/proc/muster.conf"])
        .output()
        .unwrap();
    let why = String::from_utf8(unwritable.stderr).unwrap();
    assert!(why.contains("cannot write /proc/muster.conf"), "{why}");

    let joined = join();
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let written = std::fs::read_to_string(&config).unwrap();
    let expected = [
        "NODE_NAME = new",
        "# Written by `muster node join`.",
        "DATABASE_URL = \"mysql://muster:secret@db.example/muster\"",
        "AUTH_SECRET_SEED = \"a seed that only tests use\"",
    ];
    assert_eq!(written.lines().collect::<Vec<_>>(), expected);

    let error = |output: std::process::Output| String::from_utf8(output.stderr).unwrap();
    assert!(error(join()).contains("already sets DATABASE_URL"));
    std::fs::remove_file(&config).unwrap();
    assert!(error(join()).contains("was used"));
    assert_eq!(redeem(&cluster, json!({"invitation": token.id, "proof": token.proof()})).await, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_with_settings_of_the_mariadb_invites_hosts() {
    let (cluster, _) = cluster(&[("MARIADB_HOST", "db.example"), ("MARIADB_PASSWORD", "secret")]).await;
    let token = invite(&cluster).await;
    let body = json!({"invitation": token.id, "proof": token.proof()});
    let redeemed = cluster.call("", Method::POST, "/admin/invitations/redeem", Some(body)).await;
    let settings = token.open(redeemed.body["sealed"].as_str().unwrap()).unwrap();
    assert_eq!(settings.database_url.expose(), "mysql://shakenfist:secret@db.example:3306/shakenfist");
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_invitation_is_refused() {
    let (cluster, _) = cluster(&[("DATABASE_URL", DATABASE_URL)]).await;
    let token = invite(&cluster).await;
    let name = format!("NODE_INVITATION_{}", token.id);
    transaction!(cluster.app.store, |tx| { Ok(cluster_values::set(tx, &name, "1").await?) }).unwrap();
    assert_eq!(redeem(&cluster, json!({"invitation": token.id, "proof": token.proof()})).await, 404);
}
