//! Checks that requests and responses are as the OpenAPI document describes them.
//!
//! The schemas are interpreted here, because a general validator of JSON schemas would add two dozen crates and another
//! feature of `serde_json` to every test. A keyword that is not supported fails the test.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use axum::http::{HeaderMap, Method, StatusCode, header};
use serde_json::Value;

/// The parsed document.
#[derive(Debug)]
pub struct ApiDocument {
    document: Value,
    /// The segments of each path, and the path as it is in the document.
    paths: Vec<(Vec<String>, String)>,
}

/// A request that was answered.
#[derive(Debug, Clone, Copy)]
pub struct Exchange<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    pub query: &'a str,
    /// Absent if the test sent it as a stream.
    pub request_body: Option<&'a [u8]>,
    pub status: StatusCode,
    pub headers: &'a HeaderMap,
    pub body: &'a [u8],
}

impl ApiDocument {
    /// Returns the document, which is the same for all clusters of a process.
    pub(crate) fn shared(text: impl FnOnce() -> String) -> &'static Self {
        static DOCUMENT: OnceLock<ApiDocument> = OnceLock::new();
        DOCUMENT.get_or_init(|| Self::parse(&text()))
    }

    pub fn parse(text: &str) -> Self {
        let document: Value = serde_json::from_str(text).unwrap();
        let paths = document["paths"].as_object().unwrap().keys();
        let paths = paths.map(|path| (segments(path), path.clone())).collect();
        Self { document, paths }
    }

    /// Returns what the document does not describe about a response.
    pub fn check_response(&self, exchange: &Exchange<'_>) -> Vec<String> {
        let status = exchange.status.as_u16();
        // Answered for every path, without a body.
        if exchange.method == Method::OPTIONS {
            return Vec::new();
        }
        let Some(item) = self.path_item(exchange.path) else {
            return self.check_error(exchange, StatusCode::NOT_FOUND);
        };
        let Some(operation) = operation(item, exchange.method) else {
            return self.check_error(exchange, StatusCode::METHOD_NOT_ALLOWED);
        };
        let response = &operation["responses"][status.to_string()];
        if !response.is_object() {
            return vec![format!("status {status} is not documented")];
        }
        // It has no body.
        if exchange.status == StatusCode::NOT_MODIFIED {
            return Vec::new();
        }
        let Some(content_type) = content_type(exchange.headers) else {
            return vec![format!("status {status} has no content type")];
        };
        let Some(content) = response["content"].get(content_type) else {
            return vec![format!("content type {content_type} of status {status} is not documented")];
        };
        match (exchange.method, content_type) {
            (&Method::HEAD, _) => Vec::new(),
            (_, "application/json") => self.check_json(&content["schema"], exchange.body, "response"),
            _ => Vec::new(),
        }
    }

    /// Returns what the document does not describe about a request that succeeded.
    pub fn check_request(&self, exchange: &Exchange<'_>) -> Vec<String> {
        let item = self.path_item(exchange.path);
        let Some(operation) = item.and_then(|item| operation(item, exchange.method)) else {
            return Vec::new();
        };
        let mut problems = Vec::new();
        let given: BTreeMap<_, _> = pairs(exchange.query).into_iter().collect();
        for (name, text) in &given {
            match query_parameter(operation, name) {
                None => problems.push(format!("query parameter {name} is not documented")),
                Some(parameter) => {
                    let value = self.typed(&parameter["schema"], text);
                    self.validate(&parameter["schema"], &value, name, &mut problems);
                }
            }
        }
        let Some(body) = exchange.request_body else { return problems };
        let documented = &operation["requestBody"];
        if documented["content"].get("application/octet-stream").is_some() {
            return problems;
        }
        if documented.is_object() {
            if !body.is_empty() || documented["required"] == true {
                let schema = &documented["content"]["application/json"]["schema"];
                problems.extend(self.check_json(
                    schema,
                    &without_path_parameters(operation, body),
                    "request",
                ));
            }
        } else if !body.is_empty() {
            problems.extend(self.check_arguments(operation, body));
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let name = parameter["name"].as_str().unwrap();
            let in_body = || serde_json::from_slice::<Value>(body).is_ok_and(|body| body.get(name).is_some());
            let required = parameter["in"] == "query" && parameter["required"] == true;
            if required && !given.contains_key(name) && !in_body() {
                problems.push(format!("query parameter {name} is required"));
            }
        }
        problems
    }

    /// Checks query parameters that are sent in a body.
    fn check_arguments(&self, operation: &Value, body: &[u8]) -> Vec<String> {
        let Ok(Value::Object(members)) = serde_json::from_slice(body) else {
            return vec!["the operation has no request body".into()];
        };
        let mut problems = Vec::new();
        for (name, value) in &members {
            match query_parameter(operation, name) {
                None => problems.push(format!("{name} in the request body is not documented")),
                Some(parameter) => self.validate(&parameter["schema"], value, name, &mut problems),
            }
        }
        problems
    }

    fn check_error(&self, exchange: &Exchange<'_>, expected: StatusCode) -> Vec<String> {
        // A token may be checked before the method.
        if exchange.status != expected {
            return vec![format!("{} for something that is not documented", exchange.status)];
        }
        if exchange.method == Method::HEAD {
            return Vec::new();
        }
        self.check_json(&serde_json::json!({"$ref": "#/components/schemas/Error"}), exchange.body, "response")
    }

    fn check_json(&self, schema: &Value, body: &[u8], name: &str) -> Vec<String> {
        let Ok(value) = serde_json::from_slice(body) else { return vec![format!("the {name} is not JSON")] };
        let mut problems = Vec::new();
        self.validate(schema, &value, name, &mut problems);
        problems
    }

    /// Returns the entry of the document for the path of a request, which may have duplicate slashes at its ends.
    fn path_item(&self, path: &str) -> Option<&Value> {
        let given = segments(path);
        let matching = self.paths.iter().filter(|(template, _)| matches(template, &given));
        // As in the router, a fixed segment wins over a parameter.
        let (_, path) = matching.min_by_key(|(template, _)| {
            template.iter().map(|segment| segment.starts_with('{')).collect::<Vec<_>>()
        })?;
        Some(&self.document["paths"][path])
    }

    fn resolve<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        while let Some(reference) = schema["$ref"].as_str() {
            schema = self.document.pointer(reference.trim_start_matches('#')).expect(reference);
        }
        schema
    }

    /// Converts the text of a query parameter to the type of its schema.
    fn typed(&self, schema: &Value, text: &str) -> Value {
        let types = types(&self.resolve(schema)["type"]);
        if types.contains(&"array") {
            return Value::Array(vec![Value::String(text.to_owned())]);
        }
        let parsed = serde_json::from_str::<Value>(text).ok();
        let is_text = types.is_empty() || types.contains(&"string");
        parsed
            .filter(|value| !is_text && !value.is_string())
            .unwrap_or_else(|| Value::String(text.to_owned()))
    }

    /// Adds the differences between a value and its schema. Members that the schema does not list are differences too.
    pub fn validate(&self, schema: &Value, value: &Value, at: &str, problems: &mut Vec<String>) {
        let schema = self.resolve(schema);
        self.validate_own(schema, value, at, problems);
        let Value::Object(members) = value else { return };
        let Some(declared) = self.declared(schema) else { return };
        for name in members.keys().filter(|name| !declared.contains(&name.as_str())) {
            problems.push(format!("{at}.{name} is not documented"));
        }
    }

    /// Validates everything but the names of members, which a part of `allOf` does not know completely.
    fn validate_own(&self, schema: &Value, value: &Value, at: &str, problems: &mut Vec<String>) {
        let schema = self.resolve(schema);
        let members =
            schema.as_object().unwrap_or_else(|| panic!("{at}: the schema {schema} is not an object"));
        for (keyword, expected) in members {
            let valid = match keyword.as_str() {
                "type" => has_type(expected, value),
                "enum" => expected.as_array().unwrap().contains(value),
                "minimum" => value.as_f64().is_none_or(|number| number >= expected.as_f64().unwrap()),
                "format" => has_format(expected.as_str().unwrap(), value),
                "required" => {
                    let absent = expected.as_array().unwrap().iter().filter_map(Value::as_str);
                    let absent = absent.filter(|name| value.is_object() && value.get(name).is_none());
                    problems.extend(absent.map(|name| format!("{at}.{name} is absent")));
                    true
                }
                "properties" => {
                    for (name, schema) in expected.as_object().unwrap() {
                        if let Some(value) = value.get(name) {
                            self.validate(schema, value, &format!("{at}.{name}"), problems);
                        }
                    }
                    true
                }
                "items" => {
                    for (index, value) in value.as_array().into_iter().flatten().enumerate() {
                        self.validate(expected, value, &format!("{at}[{index}]"), problems);
                    }
                    true
                }
                "additionalProperties" => {
                    for (name, value) in value.as_object().into_iter().flatten() {
                        if schema["properties"].get(name).is_none() {
                            self.validate(expected, value, &format!("{at}.{name}"), problems);
                        }
                    }
                    true
                }
                "allOf" => {
                    for part in expected.as_array().unwrap() {
                        self.validate_own(part, value, at, problems);
                    }
                    true
                }
                "oneOf" => {
                    self.validate_one_of(expected.as_array().unwrap(), value, at, problems);
                    true
                }
                "propertyNames" | "description" | "example" | "default" => true,
                other => panic!("{at}: the keyword {other} is not supported"),
            };
            if !valid {
                problems.push(format!("{at}: {value} does not have the {keyword} {expected}"));
            }
        }
    }

    fn validate_one_of(&self, schemas: &[Value], value: &Value, at: &str, problems: &mut Vec<String>) {
        let results: Vec<Vec<String>> = schemas
            .iter()
            .map(|schema| {
                let mut problems = Vec::new();
                self.validate(schema, value, at, &mut problems);
                problems
            })
            .collect();
        match results.iter().filter(|problems| problems.is_empty()).count() {
            1 => {}
            0 => problems.extend(results.into_iter().next().unwrap_or_default()),
            count => problems.push(format!("{at}: {value} matches {count} alternatives")),
        }
    }

    /// Returns the names of the members that a schema lists, or `None` if it allows others.
    fn declared<'a>(&'a self, schema: &'a Value) -> Option<Vec<&'a str>> {
        let schema = self.resolve(schema);
        if schema.get("additionalProperties").is_some() || schema.get("oneOf").is_some() {
            return None;
        }
        if let Some(parts) = schema["allOf"].as_array() {
            let parts: Option<Vec<_>> = parts.iter().map(|part| self.declared(part)).collect();
            return Some(parts?.concat());
        }
        Some(schema["properties"].as_object()?.keys().map(String::as_str).collect())
    }
}

fn segments(path: &str) -> Vec<String> {
    path.trim_matches('/').split('/').map(str::to_owned).collect()
}

fn matches(template: &[String], given: &[String]) -> bool {
    let fits = |(template, given): (&String, &String)| template.starts_with('{') || template == given;
    // The only parameter that may contain slashes.
    let open = template.last().is_some_and(|last| last == "{path}") && given.len() >= template.len();
    (open || template.len() == given.len()) && template.iter().zip(given).all(fits)
}

fn operation<'a>(item: &'a Value, method: &Method) -> Option<&'a Value> {
    let method = if method == Method::HEAD { "get".to_owned() } else { method.as_str().to_lowercase() };
    item.get(method)
}

fn query_parameter<'a>(operation: &'a Value, name: &str) -> Option<&'a Value> {
    let mut parameters = operation["parameters"].as_array()?.iter();
    parameters.find(|parameter| parameter["in"] == "query" && parameter["name"] == name)
}

/// Removes the members of a body that repeat a parameter of the path, which every operation accepts.
fn without_path_parameters(operation: &Value, body: &[u8]) -> Vec<u8> {
    let Ok(Value::Object(mut members)) = serde_json::from_slice(body) else { return body.to_vec() };
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        if parameter["in"] == "path" {
            members.remove(parameter["name"].as_str().unwrap());
        }
    }
    Value::Object(members).to_string().into_bytes()
}

fn content_type(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    value.split(';').next().map(str::trim)
}

fn pairs(query: &str) -> Vec<(String, String)> {
    reqwest::Url::parse(&format!("http://localhost/?{query}"))
        .map(|url| url.query_pairs().into_owned().collect())
        .unwrap_or_default()
}

fn types(expected: &Value) -> Vec<&str> {
    match expected {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().into_iter().collect(),
    }
}

fn has_type(expected: &Value, value: &Value) -> bool {
    types(expected).into_iter().any(|name| match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the type {other} is not supported"),
    })
}

fn has_format(expected: &str, value: &Value) -> bool {
    match (expected, value) {
        ("uuid", Value::String(text)) => {
            let is_valid = |(index, byte)| match index {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
            };
            text.len() == 36 && text.bytes().enumerate().all(is_valid)
        }
        ("int32", value) => value.as_i64().is_none_or(|number| i32::try_from(number).is_ok()),
        ("int64" | "double" | "uuid" | "binary", _) => true,
        (other, _) => panic!("the format {other} is not supported"),
    }
}
