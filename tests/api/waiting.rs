//! `wait`: responses that wait until an object has reached a state.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use muster_test_cluster::Cluster;
use muster_types::time::now;
use serde_json::json;

async fn create_network(cluster: &Cluster, token: &str) -> String {
    let body = json!({"name": "n", "netblock": "10.0.0.0/24"});
    let created = cluster.call(token, Method::POST, "/networks", Some(body)).await;
    assert_eq!(created.body["state"], "initial", "{}", created.text);
    format!("/networks/{}", created.body["uuid"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn responds_when_the_state_is_reached() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let waiting = format!("{path}?wait=created,error");
    let (response, ()) =
        tokio::join!(cluster.call(&token, Method::GET, &waiting, None), cluster.settle_networks());
    assert_eq!(
        (response.status.as_u16(), &response.body["state"]),
        (200, &json!("created")),
        "{}",
        response.text
    );
    assert!(response.headers.contains_key("etag"));
    let immediately = cluster.call(&token, Method::GET, &format!("{path}?wait=created"), None).await;
    assert_eq!(immediately.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_the_present_state_at_the_deadline_of_the_caller() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let request = Request::builder()
        .uri(format!("{path}?wait=created"))
        .header("authorization", format!("Bearer {token}"))
        .header("x-muster-deadline", (now() + 2.0).to_string());
    let response = cluster.request(request.body(Body::empty()).unwrap()).await;
    assert_eq!(response.status, 408, "{}", response.text);
    assert!(response.text.contains("the state is initial, not created"), "{}", response.text);
    assert!(response.headers.contains_key("retry-after"));
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_unknown_states_and_those_that_will_not_be_reached() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    cluster.settle_networks().await;
    for state in ["running", "", "created,x", "CREATED", &"x".repeat(5000)] {
        let response = cluster.call(&token, Method::GET, &format!("{path}?wait={state}"), None).await;
        assert_eq!(response.status, 400, "{state}");
        let error = response.body["error"].as_str().unwrap();
        assert!(error.starts_with("wait: unknown state") && error.len() < 300, "{error}");
    }
    let absent = cluster.call(&token, Method::GET, "/networks/absent?wait=created", None).await;
    assert_eq!(absent.status, 404);
    assert_eq!(cluster.call("", Method::GET, &format!("{path}?wait=created"), None).await.status, 401);
    assert_eq!(cluster.call(&token, Method::DELETE, &path, None).await.status, 202);
    let waiting = format!("{path}?wait=deleted");
    let deleting = async {
        loop {
            cluster.worker.run_once().await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let response = tokio::select! {
        response = cluster.call(&token, Method::GET, &waiting, None) => response,
        () = deleting => unreachable!(),
    };
    assert_eq!(
        (response.status.as_u16(), &response.body["state"]),
        (200, &json!("deleted")),
        "{}",
        response.text
    );
    let response = cluster.call(&token, Method::GET, &format!("{path}?wait=created"), None).await;
    assert_eq!(response.status, 409, "{}", response.text);
    assert!(response.text.contains("the state is deleted and will not become created"), "{}", response.text);
}
