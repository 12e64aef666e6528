//! Calls to the API of any host, from a namespace of their own.

use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

use muster_testing::NetworkNamespace;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::host::API_PORT;

/// How long a caller waits for a response. Longer than any promise, so that the daemon's own timeouts are tested.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What a caller was told.
#[derive(Debug, Clone)]
pub(crate) enum Told {
    Done(Value),
    /// The request failed: it must have no effect later.
    Failed(String),
    /// There was no response, or one that says that the outcome is unknown.
    Unknown,
}

impl Told {
    fn new(response: Result<(u16, Value), String>) -> Self {
        match response {
            Ok((200 | 202, value)) => Self::Done(value),
            Ok((_, value))
                if value["error"].as_str().is_some_and(|text| text.contains("it is unknown whether")) =>
            {
                Self::Unknown
            }
            Ok((status, value)) => Self::Failed(format!("{status} {value}")),
            Err(_) => Self::Unknown,
        }
    }
}

/// The hosts' API, for threads in the client's namespace.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    addresses: Vec<String>,
    token: String,
}

impl Api {
    /// Calls the API of a host. An error means that there was no response.
    fn respond(
        &self,
        host: usize,
        method: Method,
        path: &str,
        prepare: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Result<(u16, Vec<u8>), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let url = format!("http://{}:{API_PORT}{path}", self.addresses[host]);
            let mut request = prepare(http_client().request(method, url));
            if !self.token.is_empty() {
                request = request.bearer_auth(&self.token);
            }
            let response = request.send().await.map_err(|error| format!("{error:?}"))?;
            let status = response.status().as_u16();
            let body = response.bytes().await.map_err(|error| format!("{error:?}"))?;
            Ok((status, body.to_vec()))
        })
    }

    /// Calls the API of a host with JSON. An error means that there was no response.
    pub(crate) fn call(
        &self,
        host: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), String> {
        let prepare = |request: RequestBuilder| match body {
            Some(body) => request.json(body),
            None => request,
        };
        let (status, body) = self.respond(host, method, path, prepare)?;
        Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
    }

    /// Like [`call`](Self::call), and returns what the caller was told.
    pub(crate) fn request(&self, host: usize, method: Method, path: &str, body: Option<&Value>) -> Told {
        Told::new(self.call(host, method, path, body))
    }

    /// Sends bytes to the API of a host.
    pub(crate) fn send(&self, host: usize, path: &str, bytes: Vec<u8>) -> Told {
        let response = self.respond(host, Method::POST, path, |request| {
            request.header("content-type", "application/octet-stream").body(bytes)
        });
        Told::new(
            response.map(|(status, body)| (status, serde_json::from_slice(&body).unwrap_or(Value::Null))),
        )
    }

    pub(crate) fn hosts(&self) -> usize {
        self.addresses.len()
    }
}

/// Returns the client of all threads. Connections are not reused: they end with the runtime that opened them.
fn http_client() -> &'static reqwest::Client {
    static CLIENT: OnceLock<reqwest::Client> = OnceLock::new();
    CLIENT.get_or_init(|| {
        reqwest::Client::builder().timeout(CALL_TIMEOUT).pool_max_idle_per_host(0).build().unwrap()
    })
}

/// A client in its own network namespace.
#[derive(Debug)]
pub(crate) struct Client {
    namespace: NetworkNamespace,
    api: Api,
}

impl Client {
    pub(crate) fn new(namespace: NetworkNamespace, addresses: Vec<String>) -> Self {
        Self { namespace, api: Api { addresses, token: String::new() } }
    }

    pub(crate) fn log_in(&mut self, key: &str) {
        let (status, response) = self.try_log_in(0, key).unwrap();
        assert_eq!(status, 200, "{response}");
        self.api.token = response["access_token"].as_str().unwrap().to_owned();
    }

    /// Requests a token from a host.
    pub(crate) fn try_log_in(&self, host: usize, key: &str) -> Result<(u16, Value), String> {
        let body = json!({ "namespace": "system", "key": key });
        self.call(host, Method::POST, "/auth", Some(&body))
    }

    /// Calls the API of a host. An error means that there was no response.
    pub(crate) fn call(
        &self,
        host: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), String> {
        let (api, path, body) = (self.api.clone(), path.to_owned(), body.cloned());
        self.namespace.run(move || api.call(host, method, &path, body.as_ref()))
    }

    /// Reads an object; the error is what the caller got instead.
    pub(crate) fn get(&self, host: usize, path: &str) -> Result<Value, String> {
        match self.call(host, Method::GET, path, None)? {
            (200, value) => Ok(value),
            (status, value) => Err(format!("{status} {value}")),
        }
    }

    /// Reads data; the error is what the caller got instead.
    pub(crate) fn data(&self, host: usize, path: &str) -> Result<Vec<u8>, String> {
        let (api, path) = (self.api.clone(), path.to_owned());
        match self.namespace.run(move || api.respond(host, Method::GET, &path, |request| request))? {
            (200, data) => Ok(data),
            (status, data) => Err(format!("{status} {}", String::from_utf8_lossy(&data))),
        }
    }

    /// Creates or changes an object; the error is what the caller got instead.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        match self.call(0, Method::POST, path, Some(body))? {
            (200, value) => Ok(value),
            (status, value) => Err(format!("{status} {value}")),
        }
    }

    /// Deletes an object that may be deleted already; the error is what the caller got instead.
    pub(crate) fn delete(&self, path: &str) -> Result<(), String> {
        match self.call(0, Method::DELETE, path, None)? {
            (200 | 202 | 404, _) => Ok(()),
            (status, value) => Err(format!("{status} {value}")),
        }
    }

    /// Runs a function on a thread in the namespace.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        function: impl FnOnce(Api) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let api = self.api.clone();
        self.namespace.run(move || std::thread::spawn(move || function(api)))
    }
}
