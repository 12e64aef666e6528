//! The OpenAPI document, generated from code and committed so that API changes are visible in reviews. That it describes
//! requests and responses correctly is checked by [`Cluster::request`], in every test.

use muster_test_cluster::{ApiDocument, Cluster};
use serde_json::Value;

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
    let document: Value = serde_json::from_str(cluster.service.openapi()).unwrap();
    let mut ids = std::collections::HashSet::new();
    for route in &cluster.routes {
        let path = route.path.replace("{*", "{");
        let operation = &document["paths"][&path][route.method.to_lowercase()];
        assert!(operation.is_object(), "{route:?}");
        let public = route.access == muster_api::Access::Public;
        assert_eq!(operation["security"].is_null(), public, "{route:?}");
        assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{route:?}");
    }
}

/// Returns the operations of a document with their names.
fn operations(document: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let item = item.as_object().unwrap().iter();
        found
            .extend(item.map(|(method, operation)| (format!("{} {path}", method.to_uppercase()), operation)));
    }
    found
}

fn has_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.trim().is_empty())
}

/// Adds the properties of a schema that have no meaning. A reference has its own description or that of one alternative,
/// and a property with one possible value, which tells alternatives apart, needs none.
fn undescribed(schema: &Value, at: &str, missing: &mut Vec<String>) {
    if !schema.is_object() {
        return;
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let at = format!("{at}.{name}");
        let alternatives = property["oneOf"].as_array().into_iter().flatten();
        let is_constant = property["enum"].as_array().is_some_and(|values| values.len() == 1);
        let mut described = alternatives.chain([property]).map(|schema| &schema["description"]);
        if !is_constant && !described.any(has_text) {
            missing.push(at.clone());
        }
        undescribed(property, &at, missing);
    }
    for keyword in ["items", "additionalProperties"] {
        undescribed(&schema[keyword], at, missing);
    }
    for keyword in ["oneOf", "anyOf", "allOf"] {
        for part in schema[keyword].as_array().into_iter().flatten() {
            undescribed(part, at, missing);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_parameter_response_and_property_is_described() {
    let cluster = Cluster::new().await;
    let document: Value = serde_json::from_str(cluster.service.openapi()).unwrap();
    let mut missing = Vec::new();
    for (name, operation) in operations(&document) {
        for field in ["summary", "description"] {
            if !has_text(&operation[field]) {
                missing.push(format!("{name}: {field}"));
            }
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            if !has_text(&parameter["description"]) {
                missing.push(format!("{name}: parameter {}", parameter["name"]));
            }
        }
        for (status, response) in operation["responses"].as_object().unwrap() {
            if !has_text(&response["description"]) {
                missing.push(format!("{name}: status {status}"));
            }
        }
    }
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        if !has_text(&schema["description"]) {
            missing.push(format!("schema {name}"));
        }
        undescribed(schema, name, &mut missing);
    }
    assert!(missing.is_empty(), "without a description:\n{}", missing.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_body_has_a_valid_example() {
    let cluster = Cluster::new().await;
    let text = cluster.service.openapi();
    let document: Value = serde_json::from_str(text).unwrap();
    let schemas = ApiDocument::parse(text);
    let mut problems = Vec::new();
    for (name, operation) in operations(&document) {
        let Some(schema) = operation["requestBody"]["content"].pointer("/application~1json/schema") else {
            continue;
        };
        let reference =
            schema["$ref"].as_str().unwrap_or_else(|| panic!("{name}: the body has no named schema"));
        let example = &document.pointer(reference.trim_start_matches('#')).unwrap()["example"];
        if example.is_null() {
            problems.push(format!("{name}: no example"));
        } else {
            schemas.validate(schema, example, &name, &mut problems);
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
