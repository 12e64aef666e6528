use serde_json::json;

use super::*;

fn document() -> ApiDocument {
    let base = json!({"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}});
    let thing = json!({"allOf": [
        {"$ref": "#/components/schemas/Base"},
        {"type": "object", "required": ["size"], "properties": {"size": {"type": ["integer", "null"]}}}
    ]});
    let error = json!({"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}});
    let content = json!({"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}});
    let get = json!({
        "parameters": [{"name": "all", "in": "query", "required": false, "schema": {"type": "boolean"}}],
        "responses": {"200": {"content": content}}
    });
    ApiDocument::parse(
        &json!({
            "paths": {"/things/{id}": {"get": get}},
            "components": {"schemas": {"Base": base, "Thing": thing, "Error": error}}
        })
        .to_string(),
    )
}

fn problems(method: &Method, target: &str, status: u16, body: &Value) -> Vec<String> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let body = body.to_string();
    let exchange = Exchange {
        method,
        path,
        query,
        request_body: Some(b""),
        status: StatusCode::from_u16(status).unwrap(),
        headers: &headers,
        body: body.as_bytes(),
    };
    let mut problems = document().check_response(&exchange);
    problems.extend(document().check_request(&exchange));
    problems
}

#[test]
fn reports_whatever_the_document_does_not_describe() {
    let id = "0b4c5e9e-6f5b-4a58-9c27-6f0f5b1d8a11";
    let valid = json!({"id": id, "size": null});
    assert!(problems(&Method::GET, "/things/7/?all=true", 200, &valid).is_empty());
    assert!(problems(&Method::POST, "/things/7", 405, &json!({"error": "x"})).is_empty());
    for (method, target, status, body, problem) in [
        (Method::GET, "/things/7", 202, valid.clone(), "status 202 is not documented"),
        (Method::GET, "/things/7?all=x", 200, valid.clone(), "all: \"x\" does not have the type \"boolean\""),
        (Method::GET, "/things/7?x=1", 200, valid.clone(), "query parameter x is not documented"),
        (Method::GET, "/things/7", 200, json!({"id": id}), "response.size is absent"),
        (Method::GET, "/things/7", 200, json!({"size": 1, "more": 1}), "response.more is not documented"),
        (
            Method::GET,
            "/things/7",
            200,
            json!({"size": 1, "id": "7"}),
            "response.id: \"7\" does not have the format \"uuid\"",
        ),
        (Method::GET, "/things", 200, valid.clone(), "200 OK for something that is not documented"),
        (
            Method::POST,
            "/things/7",
            405,
            json!({"error": {}}),
            "response.error: {} does not have the type \"string\"",
        ),
    ] {
        assert_eq!(problems(&method, target, status, &body), [problem]);
    }
}
