//! The page of all calls of the API, from `docs/openapi.json`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::text::{NOTICE, cell, code};

/// The document, which a test compares with the served one.
const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");

pub(super) fn page() -> String {
    let document: Value = serde_json::from_str(&std::fs::read_to_string(DOCUMENT).unwrap()).unwrap();
    let mut by_tag: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let tag = operation["tags"][0].as_str().unwrap();
            let row = row(&method.to_uppercase(), path, operation, &document);
            by_tag.entry(tag).or_default().push(row);
        }
    }
    let mut page = format!(
        "# API\n\n{NOTICE} Each daemon describes its API with all fields, types and responses at `/apidocs`, and for programs at \
         `/openapi.json`. Here is the list of its calls. `name*` is a required field of the body; fields of calls with `GET` are in \
         the query. Parts of lists and repeated requests are described in \
         [Automation](../automation.md).\n"
    );
    for (tag, rows) in by_tag {
        page.push_str(&format!(
            "\n## {tag}\n\n| call | purpose | access | fields |\n|---|---|---|---|\n{}",
            rows.concat()
        ));
    }
    page
}

fn row(method: &str, path: &str, operation: &Value, document: &Value) -> String {
    let summary = operation["summary"].as_str().unwrap();
    let description = operation["description"].as_str().unwrap();
    format!(
        "| `{method} {path}` | {} | {} | {} |\n",
        cell(summary).trim_end_matches('.'),
        access(description),
        fields(operation, document)
    )
}

/// Returns who may call an operation, from the sentence that its description ends with.
fn access(description: &str) -> String {
    let (_, sentence) = description.rsplit_once("Requires ").unwrap_or_else(|| panic!("{description:?}"));
    let scopes: Vec<&str> = sentence.split('`').skip(1).step_by(2).filter(|word| *word != "system").collect();
    let scopes = scopes.iter().map(|scope| code(scope)).collect::<Vec<_>>().join(", ");
    match sentence {
        _ if sentence.starts_with("no token") => "public".into(),
        _ if sentence.contains("namespace `system`") => format!("`system`: {scopes}"),
        _ if scopes.is_empty() => "any token".into(),
        _ => scopes,
    }
}

/// Returns the names of the parameters in the query and of the fields of the body.
fn fields(operation: &Value, document: &Value) -> String {
    let mut names = Vec::new();
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        if parameter["in"] == "query" {
            names.push(code(parameter["name"].as_str().unwrap()));
        }
    }
    let content = &operation["requestBody"]["content"];
    if let Some(schema) = content.pointer("/application~1json/schema") {
        let schema = match schema["$ref"].as_str() {
            Some(reference) => document.pointer(reference.trim_start_matches('#')).unwrap(),
            None => schema,
        };
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for name in schema["properties"].as_object().into_iter().flat_map(|properties| properties.keys()) {
            let mark = if required.contains(&name.as_str()) { "*" } else { "" };
            names.push(code(&format!("{name}{mark}")));
        }
    } else if content.is_object() {
        names.push("bytes".into());
    }
    names.join(", ")
}
