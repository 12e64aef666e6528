//! Calls to the API of each host, checked against the OpenAPI document.

use std::time::{Duration, Instant};

use muster_test_cluster::{ApiDocument, Exchange};
use reqwest::{Method, StatusCode, header};
use serde_json::{Value, json};

use crate::cluster::{HEAL_TIMEOUT, SYSTEM_KEY};
use crate::host::API_PORT;

const CALL_TIMEOUT: Duration = Duration::from_secs(60);
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What went wrong, for the reader of the table.
pub(super) type Problem = String;

/// The body of a request.
#[derive(Debug, Clone)]
pub(super) enum RequestBody {
    None,
    Json(Value),
    Bytes(Vec<u8>),
}

/// One request.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) method: Method,
    /// With its query.
    pub(super) path: String,
    pub(super) body: RequestBody,
    /// The protocol that the connection is to change to.
    pub(super) upgrade: Option<&'static str>,
    /// The ticket of a WebSocket.
    pub(super) ticket: Option<String>,
}

/// A response and its body, which is empty if the connection has changed its protocol.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
    /// What the OpenAPI document does not describe.
    pub(super) undocumented: Vec<String>,
    /// The connection, if it has changed its protocol.
    pub(super) upgraded: Option<reqwest::Upgraded>,
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

/// The hosts and the token of the caller.
#[derive(Debug)]
pub(super) struct Session {
    client: reqwest::Client,
    addresses: Vec<String>,
    token: String,
    document: ApiDocument,
    pub(super) names: Vec<String>,
    /// The OpenAPI document of the first host.
    pub(super) openapi: Value,
}

impl Session {
    /// Logs in at the first host.
    pub(super) async fn start(names: Vec<String>, addresses: Vec<String>) -> Self {
        let client = reqwest::Client::builder().timeout(CALL_TIMEOUT).build().unwrap();
        let mut session = Self {
            client,
            addresses,
            names,
            token: String::new(),
            document: ApiDocument::parse(r#"{"paths": {}}"#),
            openapi: Value::Null,
        };
        session.openapi = session.get(0, "/openapi.json").await.unwrap();
        session.document = ApiDocument::parse(&session.openapi.to_string());
        let login = json!({ "namespace": "system", "key": SYSTEM_KEY });
        let login = session.post(0, "/auth", login).await.unwrap();
        login["access_token"].as_str().unwrap().clone_into(&mut session.token);
        session
    }

    /// Sends a request to a host.
    pub(super) async fn send(&self, host: usize, call: &Call) -> Result<Answer, Problem> {
        let url = format!("http://{}:{API_PORT}{}", self.addresses[host], call.path);
        let mut request = self.client.request(call.method.clone(), url);
        if !self.token.is_empty() {
            request = request.bearer_auth(&self.token);
        }
        let mut sent = Vec::new();
        request = match &call.body {
            RequestBody::None => request,
            RequestBody::Json(value) => {
                sent = value.to_string().into_bytes();
                request.header(header::CONTENT_TYPE, "application/json").body(sent.clone())
            }
            RequestBody::Bytes(bytes) => request.body(bytes.clone()),
        };
        if let Some(protocol) = call.upgrade {
            request = request.header(header::CONNECTION, "upgrade").header(header::UPGRADE, protocol);
        }
        if let Some(ticket) = &call.ticket {
            request = request
                .header(header::SEC_WEBSOCKET_VERSION, "13")
                .header(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==")
                .header(header::SEC_WEBSOCKET_PROTOCOL, format!("binary, muster-ticket.{ticket}"));
        }
        let mut response = request.send().await.map_err(|error| format!("{error:?}"))?;
        let (status, headers) = (response.status(), response.headers().clone());
        if status == StatusCode::SWITCHING_PROTOCOLS {
            let upgraded = response.upgrade().await.map_err(|error| format!("{error:?}"))?;
            return Ok(Answer { status: 101, body: vec![], undocumented: vec![], upgraded: Some(upgraded) });
        }
        let is_endless = headers.get(header::CONTENT_TYPE).is_some_and(|value| value == "text/event-stream");
        let body = if is_endless {
            response.chunk().await.map_err(|error| format!("{error:?}"))?.unwrap_or_default()
        } else {
            response.bytes().await.map_err(|error| format!("{error:?}"))?
        };
        let body = body.to_vec();
        let (path, query) = call.path.split_once('?').unwrap_or((&call.path, ""));
        let request_body = (!matches!(call.body, RequestBody::Bytes(_))).then_some(sent.as_slice());
        let exchange = Exchange {
            method: &call.method,
            path,
            query,
            request_body,
            status,
            headers: &headers,
            body: &body,
        };
        let mut undocumented = self.document.check_response(&exchange);
        if status.is_success() {
            undocumented.extend(self.document.check_request(&exchange));
        }
        Ok(Answer { status: status.as_u16(), body, undocumented, upgraded: None })
    }

    /// Sends a request that must succeed, and returns the JSON of its response.
    pub(super) async fn call(
        &self,
        host: usize,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<Value, Problem> {
        let call = Call { method, path: path.to_owned(), body, upgrade: None, ticket: None };
        let answer = self.send(host, &call).await?;
        if answer.status >= 300 {
            return Err(format!("{} {path}: {} {}", call.method, answer.status, answer.json()));
        }
        Ok(answer.json())
    }

    pub(super) async fn get(&self, host: usize, path: &str) -> Result<Value, Problem> {
        self.call(host, Method::GET, path, RequestBody::None).await
    }

    pub(super) async fn post(&self, host: usize, path: &str, body: Value) -> Result<Value, Problem> {
        self.call(host, Method::POST, path, RequestBody::Json(body)).await
    }

    /// Sends a request without a body.
    pub(super) async fn act(&self, host: usize, method: Method, path: &str) -> Result<Value, Problem> {
        self.call(host, method, path, RequestBody::None).await
    }

    /// Reads an object until its field has a value.
    pub(super) async fn wait_for(
        &self,
        host: usize,
        path: &str,
        field: &str,
        value: &str,
    ) -> Result<Value, Problem> {
        let started = Instant::now();
        loop {
            let record = self.get(host, path).await?;
            if record[field] == value {
                return Ok(record);
            }
            if record[field] == "error" || started.elapsed() > HEAL_TIMEOUT {
                return Err(format!("{path}: {field} is not {value}: {record}"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}
