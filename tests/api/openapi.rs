//! The OpenAPI document: made from the code, kept in the repository so that a change to the API is seen.

use muster_test_cluster::Cluster;

const KEPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");

#[tokio::test(flavor = "multi_thread")]
async fn the_document_in_the_repository_is_the_one_that_is_served() {
    let cluster = Cluster::new().await;
    let served = format!("{}\n", cluster.service.openapi().trim_end());
    if std::env::var("MUSTER_TEST_UPDATE").is_ok() {
        std::fs::write(KEPT, &served).unwrap();
    }
    let kept = std::fs::read_to_string(KEPT).unwrap_or_default();
    assert!(
        kept == served,
        "docs/openapi.json is old: run MUSTER_TEST_UPDATE=1 cargo test -p muster --test api openapi"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_is_in_the_document_and_guarded_ones_say_so() {
    let cluster = Cluster::new().await;
    let document: serde_json::Value = serde_json::from_str(cluster.service.openapi()).unwrap();
    let mut ids = std::collections::HashSet::new();
    for route in &cluster.routes {
        let path = route.path.replace("{*", "{");
        let operation = &document["paths"][&path][route.method.to_lowercase()];
        assert!(operation.is_object(), "{route:?}");
        let public = route.access == muster_api::Access::Public;
        assert_eq!(operation["security"].is_null(), public, "{route:?}");
        assert!(operation["summary"].is_string(), "{route:?}");
        assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{route:?}");
        for (status, response) in operation["responses"].as_object().unwrap() {
            assert!(!response["description"].as_str().unwrap().is_empty(), "{route:?} {status}");
        }
    }
}
