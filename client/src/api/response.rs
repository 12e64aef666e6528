//! Responses of the server: decoded on demand, so that fields of newer servers survive `--json`.

use std::fmt;
use std::marker::PhantomData;

use reqwest::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::{Error, Result};
use crate::output::escape_control;

/// The maximum number of characters of an unexpected response that an error message quotes.
const MAX_EXCERPT: usize = 200;

/// A successful response: its JSON, and on request the record that it encodes.
pub struct ApiResponse<T> {
    json: Value,
    record: PhantomData<fn() -> T>,
}

impl<T> ApiResponse<T> {
    pub(super) fn new(json: Value) -> Self {
        Self { json, record: PhantomData }
    }

    /// Creates a response from a part of another one.
    pub(crate) fn from_json(json: Value) -> Self {
        Self::new(json)
    }

    /// Returns the JSON, including fields that this client does not know.
    #[must_use]
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// Returns the part of the response at a JSON pointer.
    #[must_use]
    pub fn part<U>(&self, pointer: &str) -> Option<ApiResponse<U>> {
        self.json.pointer(pointer).cloned().map(ApiResponse::new)
    }
}

impl<T: DeserializeOwned> ApiResponse<T> {
    /// Decodes the record.
    pub fn value(self) -> Result<T> {
        serde_json::from_value(self.json).map_err(|error| {
            Error::UnknownFormat(format!("the response has a format that this client does not know: {error}"))
        })
    }
}

// Not derived: the record type need not be `Clone`.
impl<T> Clone for ApiResponse<T> {
    fn clone(&self) -> Self {
        Self::new(self.json.clone())
    }
}

impl<T> fmt::Debug for ApiResponse<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The JSON may contain a generated secret.
        f.write_str("ApiResponse(…)")
    }
}

/// A response before its status is checked.
pub(super) struct RawResponse {
    pub(super) status: StatusCode,
    pub(super) body: Vec<u8>,
    /// The path of the request.
    pub(super) path: String,
    /// Where the next page of a list starts, if there may be one.
    pub(super) next_cursor: Option<String>,
}

impl RawResponse {
    pub(super) fn new(path: &str, status: StatusCode, body: Vec<u8>) -> Self {
        Self { status, body, path: path.to_owned(), next_cursor: None }
    }

    /// Returns the refusal that the body describes.
    pub(super) fn refusal(&self) -> Error {
        let (status, message) = (self.status.as_u16(), self.refusal_message());
        let json = self.json_or_null();
        match json.get("stage").and_then(Value::as_str) {
            Some(stage) => {
                let transient = json.get("transient").and_then(Value::as_bool).unwrap_or(false);
                Error::NotPlaced { status, message, stage: escape_control(stage), transient }
            }
            None if self.status == StatusCode::NOT_FOUND => {
                Error::NotFound { path: self.path.clone(), message }
            }
            None => Error::Refused { status, message },
        }
    }

    /// Returns the server's reason in one line, with the id of the request if the server returns it.
    pub(super) fn refusal_message(&self) -> String {
        let json = self.json_or_null();
        let reason = self.refusal_reason(&json);
        match json.get("request_id").and_then(Value::as_str) {
            Some(id) => format!("{reason} (request {})", escape_control(id)),
            None => reason,
        }
    }

    fn refusal_reason(&self, json: &Value) -> String {
        let message = ["error", "message"].iter().find_map(|name| json.get(name)?.as_str());
        let text = match message {
            Some(text) => text.to_owned(),
            None => String::from_utf8_lossy(&self.body).trim().chars().take(MAX_EXCERPT).collect(),
        };
        if text.is_empty() {
            format!("the server responded with {}", self.status)
        } else {
            escape_control(&text)
        }
    }

    /// Returns the body as JSON. A refusal by a proxy is not JSON, which is not an error here.
    pub(super) fn json_or_null(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_contains_the_request_id_if_the_body_does() {
        let message =
            |body: &str| RawResponse::new("/", StatusCode::NOT_FOUND, body.into()).refusal().to_string();
        assert_eq!(message(r#"{"error": "not here", "request_id": "5d5e"}"#), "not here (request 5d5e)");
        assert_eq!(message(r#"{"error": "not here"}"#), "not here");
        assert_eq!(message("a proxy"), "a proxy");
    }
}
