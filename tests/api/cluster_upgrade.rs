//! The progress of a rolling upgrade.

use axum::http::Method;
use muster_store::transaction;
use muster_test_cluster::Cluster;
use serde_json::{Value, json};

async fn change(cluster: &Cluster, sql: &str) {
    transaction!(cluster.app.store, |tx| { Ok(tx.execute(sql, &[]).await?) }).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn status_names_the_node_to_upgrade_next() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let status = async || -> Value {
        let response = cluster.call(&token, Method::GET, "/admin/upgrade", None).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    };
    let current = cluster.app.store.schema_version();
    let found = status().await;
    assert_eq!(found["schema_version"], current, "{found}");
    assert_eq!(found["minimum_schema_version"], 14, "{found}");
    assert_eq!(found["held_migrations"], json!([]), "{found}");
    for (node, name) in found["nodes"].as_array().unwrap().iter().zip(["sim-1", "sim-2"]) {
        let release = format!("muster {} (simulated)", env!("CARGO_PKG_VERSION"));
        let expected = json!({
            "name": name, "state": "created", "release": release, "schema_version": current, "is_outdated": false,
        });
        assert_eq!(*node, expected);
    }
    assert!(found["next_step"].as_str().unwrap().ends_with("nothing to do"), "{found}");

    // As if the daemon of a node were older, and then one of a release that does not record its version.
    let sql = format!("UPDATE nodes SET schema_version = {} WHERE name = 'sim-2'", current - 1);
    change(&cluster, &sql).await;
    let found = status().await;
    assert_eq!(found["nodes"][1]["is_outdated"], true, "{found}");
    assert!(found["next_step"].as_str().unwrap().starts_with("upgrade node sim-2 "), "{found}");
    change(&cluster, "UPDATE nodes SET schema_epoch = epoch - 1 WHERE name = 'sim-2'").await;
    let found = status().await;
    assert_eq!(found["nodes"][1]["schema_version"], Value::Null, "{found}");
    assert!(found["next_step"].as_str().unwrap().contains("unknown schema version"), "{found}");
}
