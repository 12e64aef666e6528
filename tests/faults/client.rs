//! Calls to the API of any host, from a namespace of their own.

use std::thread::JoinHandle;
use std::time::Duration;

use muster_testing::NetworkNamespace;
use reqwest::Method;
use serde_json::{Value, json};

use crate::host::API_PORT;

/// How long a caller waits for a response. Longer than any promise, so that the daemon's own timeouts are tested.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The hosts' API, for threads in the client's namespace.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    addresses: Vec<String>,
    token: String,
}

impl Api {
    /// Calls the API of a host. An error means that there was no response.
    pub(crate) fn call(
        &self,
        host: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = reqwest::Client::builder().timeout(CALL_TIMEOUT).build().unwrap();
            let url = format!("http://{}:{API_PORT}{path}", self.addresses[host]);
            let mut request = client.request(method, url);
            if !self.token.is_empty() {
                request = request.bearer_auth(&self.token);
            }
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = request.send().await.map_err(|error| format!("{error:?}"))?;
            Ok((response.status().as_u16(), response.json().await.unwrap_or(Value::Null)))
        })
    }

    pub(crate) fn hosts(&self) -> usize {
        self.addresses.len()
    }
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
        let body = json!({ "namespace": "system", "key": key });
        let (status, response) = self.call(0, Method::POST, "/auth", Some(&body)).unwrap();
        assert_eq!(status, 200, "{response}");
        self.api.token = response["access_token"].as_str().unwrap().to_owned();
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

    /// Runs a function on a thread in the namespace.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        function: impl FnOnce(Api) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let api = self.api.clone();
        self.namespace.run(move || std::thread::spawn(move || function(api)))
    }
}
