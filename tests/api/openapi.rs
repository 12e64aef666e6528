//! The OpenAPI document, generated from code and committed so that API changes are visible in reviews.

use muster_test_cluster::Cluster;

const COMMITTED_DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");

#[tokio::test(flavor = "multi_thread")]
async fn committed_openapi_document_matches_served_one() {
    let cluster = Cluster::new().await;
    let served = format!("{}\n", cluster.service.openapi().trim_end());
    if std::env::var("MUSTER_TEST_UPDATE").is_ok() {
        std::fs::write(COMMITTED_DOCUMENT, &served).unwrap();
    }
    let committed = std::fs::read_to_string(COMMITTED_DOCUMENT).unwrap_or_default();
    assert!(
        committed == served,
        "docs/openapi.json is stale: run MUSTER_TEST_UPDATE=1 cargo test -p muster --test api openapi"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn document_lists_every_route_with_its_security() {
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
