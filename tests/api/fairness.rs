//! Fairness: the slow work of one namespace delays only itself.

use std::sync::Arc;

use axum::http::Method;
use muster_control::operations::Worker;
use muster_test_cluster::{Cluster, wait_for};
use muster_testing::web_server::{Reply, WebServer};
use serde_json::json;
use tokio::sync::watch;

use crate::networks::{get, post};

/// Fetches as many images as the queue takes from a server that never responds, then one of another namespace.
async fn assert_hanging_fetches_delay_only_their_namespace(url: Option<&str>) {
    let settings = [("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"), ("IMAGE_STALL_TIMEOUT", "600")];
    let cluster = Cluster::sized(url, &settings, (16, 65536, 1024)).await;
    cluster.create_namespace("slow").await;
    cluster.create_namespace("ci").await;
    let (slow, ci) = (cluster.token("slow").await, cluster.token("ci").await);
    let hanging = WebServer::new(|_, _| Reply { stall: true, ..Reply::ok(&[7; 100]).cut(10) }).await;
    let web = WebServer::new(|_, _| Reply::ok(&[7; 5000])).await;
    for number in 0..60 {
        let request = json!({"url": hanging.url(&format!("/{number}"))});
        assert_eq!(post(&cluster, &slow, "/artifacts", request).await.status, 200);
    }
    let stop = watch::Sender::new(false);
    let workers = tokio::spawn(Worker::run(Arc::clone(&cluster.worker), stop.subscribe()));
    wait_for("all slots to be occupied", async || (hanging.requests().len() >= 8).then_some(())).await;
    for name in ["a", "b", "c"] {
        let request = json!({"url": web.url(&format!("/{name}"))});
        assert_eq!(post(&cluster, &ci, "/artifacts", request).await.status, 200);
    }
    for name in ["a", "b", "c"] {
        wait_for("the image of the other namespace", async || {
            let record = get(&cluster, &ci, &format!("/artifacts/{name}")).await.body;
            (record["state"] == "created").then_some(())
        })
        .await;
    }
    assert_eq!(hanging.requests().len(), 8, "one namespace has only the slots of the lane");
    // Deleting the artifacts ends their operations.
    let deleted = cluster.call(&slow, Method::DELETE, "/artifacts", Some(json!({"confirm": true}))).await;
    assert_eq!(deleted.status, 200, "{}", deleted.text);
    wait_for("operations to finish", async || {
        (muster_store::operations::unfinished(&*cluster.app.store).await.unwrap() == 0).then_some(())
    })
    .await;
    stop.send_replace(true);
    workers.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_fetches_delay_only_their_namespace() {
    assert_hanging_fetches_delay_only_their_namespace(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_fetches_delay_only_their_namespace_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_hanging_fetches_delay_only_their_namespace(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}
