//! The REST API as methods. Logs in when first needed, keeps the token, and never shows a secret.

use std::error::Error as _;
use std::fmt;
use std::fs;
use std::io;
use std::marker::PhantomData;
use std::path::Path;
use std::time::Duration;

use muster_types::event::EventRecord;
use muster_types::key::Secret;
use muster_types::namespace::NamespaceRecord;
use muster_types::node::NodeRecord;
use muster_types::operation::OperationRecord;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::LOCATION;
use reqwest::{Certificate, Method, StatusCode, Url, redirect};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;

use crate::credentials::Credentials;
use crate::output::visible;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest part of an unexpected answer that an error shows.
const LONGEST_EXCERPT: usize = 200;
/// Everything but the characters that mean themselves anywhere in a URL.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The call cannot even be made.
    #[error("{0}")]
    Unusable(String),
    /// No answer came.
    #[error("cannot reach {url}: {why}")]
    Unreachable { url: String, why: String },
    /// The answer is not one of this API.
    #[error("{url} does not answer as a muster API: {why}")]
    Unreadable { url: String, why: String },
    /// The credentials were not accepted.
    #[error("cannot log in to {url} as namespace {namespace}: {text}")]
    LoginRefused { url: String, namespace: String, status: u16, text: String },
    /// The credentials are good, but not for this call.
    #[error("namespace {namespace} may not do this: {text}")]
    NotAllowed { namespace: String, text: String },
    /// The server said no; the text is its own.
    #[error("{text}")]
    Refused { status: u16, text: String },
}

impl Error {
    /// The HTTP status, where the server gave one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Unusable(_) | Self::Unreachable { .. } | Self::Unreadable { .. } => None,
            Self::LoginRefused { status, .. } | Self::Refused { status, .. } => Some(*status),
            Self::NotAllowed { .. } => Some(StatusCode::UNAUTHORIZED.as_u16()),
        }
    }
}

/// The result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the server answered: its JSON as it came, and on request what that means.
pub struct Answer<T> {
    json: Value,
    meaning: PhantomData<fn() -> T>,
}

impl<T> Answer<T> {
    fn new(json: Value) -> Self {
        Self { json, meaning: PhantomData }
    }

    /// The JSON, with fields that this client may not know.
    #[must_use]
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// The part of the answer at a JSON pointer.
    #[must_use]
    pub fn part<U>(&self, pointer: &str) -> Option<Answer<U>> {
        self.json.pointer(pointer).cloned().map(Answer::new)
    }
}

impl<T: DeserializeOwned> Answer<T> {
    /// The meaning of the answer.
    pub fn value(self) -> Result<T> {
        serde_json::from_value(self.json).map_err(|error| {
            Error::Unusable(format!("the answer is of a form this client does not know: {error}"))
        })
    }
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The JSON may hold a generated secret.
        f.write_str("Answer(…)")
    }
}

/// The answer to a new key.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum AddedKey {
    /// The server made the secret, and shows it only here.
    Generated {
        key_name: String,
        #[serde(deserialize_with = "secret")]
        key: Secret,
    },
    /// The secret was the caller's; this is the key's name.
    Supplied(String),
}

fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Secret, D::Error> {
    String::deserialize(deserializer).map(Secret::new)
}

/// What metadata and events belong to.
#[derive(Debug, Clone, Copy)]
pub enum Object<'a> {
    /// A namespace by its name.
    Namespace(&'a str),
    /// A node by its name or id.
    Node(&'a str),
}

impl Object<'_> {
    fn path(self, rest: &[&str]) -> Result<String> {
        let start = match self {
            Self::Namespace(name) => path(&["auth", "namespaces", name])?,
            Self::Node(node) => path(&["nodes", node])?,
        };
        Ok(start + &path(rest)?)
    }
}

/// Which events to answer.
#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// How many at most; the server's own limit when absent.
    pub limit: Option<u32>,
    /// Only those of this type.
    pub event_type: Option<String>,
}

/// A cluster as one namespace sees it.
#[derive(Debug)]
pub struct Client {
    http: reqwest::Client,
    /// The API's address without a slash at its end.
    base: String,
    credentials: Credentials,
    token: Mutex<Option<Secret>>,
}

impl Client {
    /// A client that trusts, for HTTPS, whom this machine trusts. Nothing is sent yet.
    pub fn new(credentials: Credentials) -> Result<Self> {
        Self::build(credentials, None)
    }

    /// A client that trusts, for HTTPS, only the certificates in a PEM file. Nothing is sent yet.
    pub fn with_cacert(credentials: Credentials, file: &Path) -> Result<Self> {
        let bad = |why: &dyn fmt::Display| Error::Unusable(format!("certificates {}: {why}", file.display()));
        let pem = fs::read(file).map_err(|error| bad(&io_text(&error)))?;
        let certificates = Certificate::from_pem_bundle(&pem).map_err(|error| bad(&innermost(&error)))?;
        if certificates.is_empty() {
            return Err(bad(&"no certificate in PEM form is in the file"));
        }
        Self::build(credentials, Some(certificates))
    }

    fn build(credentials: Credentials, trusted: Option<Vec<Certificate>>) -> Result<Self> {
        let bad = |why: &dyn fmt::Display| {
            Error::Unusable(format!("api url {:?}: {why}", visible(&credentials.apiurl)))
        };
        let url = Url::parse(&credentials.apiurl).map_err(|error| bad(&error))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(bad(&"must start with http:// or https:// and a host"));
        }
        if !url.username().is_empty()
            || url.password().is_some()
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(bad(&"must be only a scheme, a host, a port and a path"));
        }
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT)
            // A token must not follow a redirect, and the API has none.
            .redirect(redirect::Policy::none());
        if let Some(certificates) = trusted {
            http = http.tls_certs_only(certificates);
        } else if url.scheme() == "http" {
            // The machine's certificates are not needed, and a small one may have none.
            http = http.tls_certs_only([]);
        }
        let http = http
            .build()
            .map_err(|error| Error::Unusable(format!("cannot prepare for HTTPS: {}", innermost(&error))))?;
        let base = url.as_str().trim_end_matches('/').to_owned();
        Ok(Self { http, base, credentials, token: Mutex::new(None) })
    }

    /// Logs in now rather than with the first call.
    pub async fn log_in(&self) -> Result<()> {
        self.token(None).await.map(drop)
    }

    /// The namespaces that can be reached, by name.
    pub async fn namespaces(&self) -> Result<Answer<Vec<NamespaceRecord>>> {
        self.get(path(&["auth", "namespaces"])?).await
    }

    /// One namespace.
    pub async fn namespace(&self, name: &str) -> Result<Answer<NamespaceRecord>> {
        self.get(path(&["auth", "namespaces", name])?).await
    }

    /// Makes a namespace, with a first key if a name and a secret are given.
    pub async fn create_namespace(
        &self,
        name: &str,
        first_key: Option<(&str, &Secret)>,
    ) -> Result<Answer<NamespaceRecord>> {
        let mut body = json!({ "namespace": name });
        if let Some((key_name, key)) = first_key {
            body["key_name"] = key_name.into();
            body["key"] = key.expose().into();
        }
        self.call(Method::POST, path(&["auth", "namespaces"])?, Some(body)).await
    }

    /// Deletes a namespace.
    pub async fn delete_namespace(&self, name: &str) -> Result<Answer<()>> {
        self.delete(path(&["auth", "namespaces", name])?).await
    }

    /// The names of a namespace's keys.
    pub async fn keys(&self, namespace: &str) -> Result<Answer<Vec<String>>> {
        self.get(path(&["auth", "namespaces", namespace, "keys"])?).await
    }

    /// Adds a key, or replaces the one of that name. Without a secret the server makes one. `expiry` is Unix time.
    pub async fn add_key(
        &self,
        namespace: &str,
        name: &str,
        secret: Option<&Secret>,
        expiry: Option<f64>,
    ) -> Result<Answer<AddedKey>> {
        let body = json!({ "key_name": name, "key": secret.map(Secret::expose), "expiry": expiry });
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "keys"])?, Some(body)).await
    }

    /// Replaces the secret of a key that exists; without `expiry` it never expires. The answer is its name.
    pub async fn update_key(
        &self,
        namespace: &str,
        name: &str,
        secret: &Secret,
        expiry: Option<f64>,
    ) -> Result<Answer<String>> {
        let body = json!({ "key": secret.expose(), "expiry": expiry });
        self.call(Method::PUT, path(&["auth", "namespaces", namespace, "keys", name])?, Some(body)).await
    }

    /// Deletes a key.
    pub async fn delete_key(&self, namespace: &str, name: &str) -> Result<Answer<()>> {
        self.delete(path(&["auth", "namespaces", namespace, "keys", name])?).await
    }

    /// Makes a namespace trust another.
    pub async fn add_trust(&self, namespace: &str, other: &str) -> Result<Answer<NamespaceRecord>> {
        let body = json!({ "external_namespace": other });
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "trust"])?, Some(body)).await
    }

    /// Takes a trust back.
    pub async fn remove_trust(&self, namespace: &str, other: &str) -> Result<Answer<NamespaceRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "trust", other])?).await
    }

    /// Every node.
    pub async fn nodes(&self) -> Result<Answer<Vec<NodeRecord>>> {
        self.get(path(&["nodes"])?).await
    }

    /// One node by name or id.
    pub async fn node(&self, node: &str) -> Result<Answer<NodeRecord>> {
        self.get(path(&["nodes", node])?).await
    }

    /// Deletes a node.
    pub async fn delete_node(&self, node: &str) -> Result<Answer<NodeRecord>> {
        self.delete(path(&["nodes", node])?).await
    }

    /// Processor use of a node's daemon.
    pub async fn process_metrics(&self, node: &str) -> Result<Answer<Map<String, Value>>> {
        self.get(path(&["nodes", node, "processmetrics"])?).await
    }

    /// The metadata of an object.
    pub async fn metadata(&self, object: Object<'_>) -> Result<Answer<Map<String, Value>>> {
        self.get(object.path(&["metadata"])?).await
    }

    /// Creates or replaces one metadata key.
    pub async fn set_metadata(&self, object: Object<'_>, key: &str, value: &Value) -> Result<Answer<()>> {
        self.call(Method::PUT, object.path(&["metadata", key])?, Some(json!({ "value": value }))).await
    }

    /// Deletes one metadata key, if it is there.
    pub async fn delete_metadata(&self, object: Object<'_>, key: &str) -> Result<Answer<()>> {
        self.delete(object.path(&["metadata", key])?).await
    }

    /// Events of an object, newest first.
    pub async fn events(&self, object: Object<'_>, query: &EventQuery) -> Result<Answer<Vec<EventRecord>>> {
        let limit = query.limit.map(|limit| limit.to_string());
        let pairs = [("limit", limit.as_deref()), ("event_type", query.event_type.as_deref())];
        self.get(with_query(object.path(&["events"])?, &pairs)).await
    }

    /// One operation.
    pub async fn operation(&self, operation_type: &str, id: &str) -> Result<Answer<OperationRecord>> {
        self.get(path(&["clusteroperations", operation_type, id])?).await
    }

    /// An operation and all that it depends on, newest first.
    pub async fn operation_chain(&self, id: &str) -> Result<Answer<Vec<OperationRecord>>> {
        self.get(path(&["clusteroperations", id, "chain"])?).await
    }

    /// The operations on an object, newest first.
    pub async fn operations(&self, target_type: &str, target: &str) -> Result<Answer<Vec<OperationRecord>>> {
        let pairs = [("target_object_type", Some(target_type)), ("target_uuid", Some(target))];
        self.get(with_query(path(&["clusteroperations"])?, &pairs)).await
    }

    async fn get<T>(&self, path: String) -> Result<Answer<T>> {
        self.call(Method::GET, path, None).await
    }

    async fn delete<T>(&self, path: String) -> Result<Answer<T>> {
        self.call(Method::DELETE, path, None).await
    }

    async fn call<T>(&self, method: Method, path: String, body: Option<Value>) -> Result<Answer<T>> {
        let (token, fresh) = self.token(None).await?;
        let mut reply = self.send(method.clone(), &path, Some(&token), body.as_ref()).await?;
        // A refusal of a token that was made just now is not about its age.
        if reply.status == StatusCode::UNAUTHORIZED && !fresh {
            let (token, _) = self.token(Some(&token)).await?;
            reply = self.send(method, &path, Some(&token), body.as_ref()).await?;
        }
        match reply.status {
            StatusCode::OK | StatusCode::ACCEPTED => self.parse(&reply.body).map(Answer::new),
            StatusCode::UNAUTHORIZED => Err(Error::NotAllowed {
                namespace: self.credentials.namespace.clone(),
                text: reply.refusal(),
            }),
            status => Err(Error::Refused { status: status.as_u16(), text: reply.refusal() }),
        }
    }

    /// The token, and whether it was made just now. One that was `refused` is replaced, unless another
    /// call has done so already.
    async fn token(&self, refused: Option<&Secret>) -> Result<(Secret, bool)> {
        let mut held = self.token.lock().await;
        if let Some(token) = held.as_ref().filter(|token| Some(*token) != refused) {
            return Ok((token.clone(), false));
        }
        let token = self.fetch_token().await?;
        *held = Some(token.clone());
        Ok((token, true))
    }

    async fn fetch_token(&self) -> Result<Secret> {
        let body = json!({ "namespace": self.credentials.namespace, "key": self.credentials.key.expose() });
        let reply = self.send(Method::POST, "/auth", None, Some(&body)).await?;
        if reply.status != StatusCode::OK {
            return Err(Error::LoginRefused {
                url: self.base.clone(),
                namespace: self.credentials.namespace.clone(),
                status: reply.status.as_u16(),
                text: reply.refusal(),
            });
        }
        let answer = self.parse(&reply.body)?;
        let token = answer.get("access_token").and_then(Value::as_str);
        token.map(Secret::new).ok_or_else(|| self.unreadable("a login without a token"))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        token: Option<&Secret>,
        body: Option<&Value>,
    ) -> Result<Reply> {
        let mut request = self.http.request(method, format!("{}{path}", self.base));
        if let Some(token) = token {
            request = request.bearer_auth(token.expose());
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        if status.is_redirection() {
            let to = response.headers().get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("nowhere");
            return Err(self.unreadable(&format!("a redirection to {}", visible(to))));
        }
        let body = response.bytes().await.map_err(|error| self.unreachable(&error))?.to_vec();
        Ok(Reply { status, body })
    }

    fn parse(&self, body: &[u8]) -> Result<Value> {
        serde_json::from_slice(body).map_err(|error| self.unreadable(&format!("not JSON, {error}")))
    }

    fn unreadable(&self, why: &str) -> Error {
        Error::Unreadable { url: self.base.clone(), why: why.to_owned() }
    }

    fn unreachable(&self, error: &reqwest::Error) -> Error {
        let mut why = if error.is_timeout() { "no answer in time".to_owned() } else { innermost(error) };
        if is_refused(error) {
            why.push_str("; is `muster serve` running?");
        } else if why.contains("UnknownIssuer") {
            why.push_str("; name its certificate authority with --cacert");
        }
        Error::Unreachable { url: self.base.clone(), why }
    }
}

/// What came back.
struct Reply {
    status: StatusCode,
    body: Vec<u8>,
}

impl Reply {
    /// The server's reason, in one line.
    fn refusal(&self) -> String {
        let json: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let said = ["error", "message"].iter().find_map(|name| json.get(name)?.as_str());
        let text = match said {
            Some(text) => text.to_owned(),
            None => String::from_utf8_lossy(&self.body).trim().chars().take(LONGEST_EXCERPT).collect(),
        };
        if text.is_empty() { format!("the server answered {}", self.status) } else { visible(&text) }
    }
}

/// A path of segments, each encoded, so that a slash in a name stays part of the name.
fn path(segments: &[&str]) -> Result<String> {
    let mut path = String::new();
    for segment in segments {
        // Dot segments are resolved, even encoded ones, by every parser of URLs: `keys/..` is not a key.
        if matches!(*segment, "" | "." | "..") {
            return Err(Error::Unusable(format!("{segment:?} cannot be the name or key of anything")));
        }
        path.push('/');
        path.extend(utf8_percent_encode(segment, RESERVED));
    }
    Ok(path)
}

fn with_query(path: String, pairs: &[(&str, Option<&str>)]) -> String {
    let given = pairs.iter().filter_map(|(name, value)| value.map(|value| (name, value)));
    given.enumerate().fold(path, |path, (at, (name, value))| {
        let sign = if at == 0 { '?' } else { '&' };
        format!("{path}{sign}{name}={}", utf8_percent_encode(value, RESERVED))
    })
}

fn causes<'a>(error: &'a reqwest::Error) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |cause| (*cause).source())
}

fn is_refused(error: &reqwest::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::ConnectionRefused)
}

/// The text of what lies at the bottom of an error: the layers above only repeat that something failed.
fn innermost(error: &reqwest::Error) -> String {
    match causes(error).last() {
        Some(cause) => match cause.downcast_ref::<io::Error>() {
            Some(cause) => io_text(cause),
            None => cause.to_string(),
        },
        None => error.to_string(),
    }
}

/// An operating system's error in the style of ours: lower case, without its number.
pub(crate) fn io_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| first.to_lowercase().chain(characters).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn credentials(apiurl: &str) -> Credentials {
        Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl: apiurl.into() }
    }

    /// A server that gives these answers, one per connection, and hands back the heads of the requests.
    async fn server(answers: Vec<(u16, &'static str)>) -> (Client, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let heads = Arc::new(Mutex::new(vec![]));
        let seen = Arc::clone(&heads);
        tokio::spawn(async move {
            for (status, body) in answers {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !whole(&request) {
                    let mut bytes = [0; 1024];
                    let count = socket.read(&mut bytes).await.unwrap();
                    assert!(count > 0, "the request ended early");
                    request.extend_from_slice(&bytes[..count]);
                }
                let request = String::from_utf8(request).unwrap();
                seen.lock().await.push(request.lines().next().unwrap().to_owned());
                let answer = format!(
                    "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                    body.len()
                );
                socket.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        (Client::new(credentials(&url)).unwrap(), heads)
    }

    fn whole(request: &[u8]) -> bool {
        let request = String::from_utf8_lossy(request);
        let Some((head, body)) = request.split_once("\r\n\r\n") else { return false };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        body.len() == length.map_or(0, |length| length.parse().unwrap())
    }

    const TOKEN: (u16, &str) = (200, r#"{"access_token": "t0ken"}"#);

    #[tokio::test]
    async fn the_first_call_logs_in_and_later_ones_use_its_token() {
        let (client, heads) = server(vec![TOKEN, (200, r#"["a"]"#), (200, r#"["b"]"#)]).await;
        assert_eq!(client.keys("ci").await.unwrap().value().unwrap(), ["a"]);
        assert_eq!(client.keys("ci").await.unwrap().value().unwrap(), ["b"]);
        let keys = "GET /auth/namespaces/ci/keys HTTP/1.1";
        assert_eq!(*heads.lock().await, ["POST /auth HTTP/1.1", keys, keys]);
    }

    #[tokio::test]
    async fn a_token_that_is_no_longer_good_is_replaced_once() {
        let old = (401, r#"{"error": "Signature has expired", "status": 401}"#);
        let (client, heads) = server(vec![TOKEN, (200, "[]"), old, TOKEN, (200, r#"["b"]"#)]).await;
        client.keys("ci").await.unwrap();
        assert_eq!(client.keys("ci").await.unwrap().value().unwrap(), ["b"]);
        assert_eq!(heads.lock().await.len(), 5);
    }

    #[tokio::test]
    async fn a_fresh_token_that_is_refused_means_no() {
        let (client, heads) = server(vec![TOKEN, (401, r#"{"error": "unauthorized"}"#)]).await;
        let error = client.nodes().await.unwrap_err();
        assert_eq!(error.to_string(), "namespace ci may not do this: unauthorized");
        assert_eq!((error.status(), heads.lock().await.len()), (Some(401), 2));
    }

    #[tokio::test]
    async fn a_refused_login_names_the_namespace_and_the_reason() {
        let (client, _) = server(vec![(404, r#"{"error": "namespace not found"}"#)]).await;
        let error = client.log_in().await.unwrap_err();
        assert!(error.to_string().ends_with(" as namespace ci: namespace not found"), "{error}");
        assert_eq!(error.status(), Some(404));
    }

    #[tokio::test]
    async fn an_error_carries_the_text_and_the_status_of_the_server() {
        let (client, _) = server(vec![TOKEN, (409, r#"{"error": "not\nnow"}"#)]).await;
        let error = client.delete_namespace("ci").await.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.status()), (r"not\nnow", Some(409)));
    }

    #[tokio::test]
    async fn an_answer_that_is_not_json_is_said_to_be_none() {
        let (client, _) = server(vec![(200, "<html>hello</html>")]).await;
        let error = client.log_in().await.unwrap_err();
        assert!(error.to_string().contains("does not answer as a muster API"), "{error}");
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_said_plainly() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let error = Client::new(credentials(&url)).unwrap().log_in().await.unwrap_err();
        let expected = format!("cannot reach {url}: connection refused; is `muster serve` running?");
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn every_segment_of_a_path_is_encoded() {
        assert_eq!(path(&["nodes", "a/b ?#%é"]).unwrap(), "/nodes/a%2Fb%20%3F%23%25%C3%A9");
        assert_eq!(path(&["nodes", "a-b.c_d~e"]).unwrap(), "/nodes/a-b.c_d~e");
    }

    #[test]
    fn a_name_that_would_climb_the_path_is_refused() {
        for name in ["", ".", ".."] {
            assert!(path(&["auth", "namespaces", "ci", "keys", name]).is_err(), "{name:?}");
        }
        assert!(Object::Node("sim-1").path(&["metadata", ".."]).is_err());
    }

    #[test]
    fn a_query_holds_only_what_was_given() {
        let pairs = |limit, kind| with_query("/events".into(), &[("limit", limit), ("event_type", kind)]);
        assert_eq!(pairs(None, None), "/events");
        assert_eq!(pairs(None, Some("a&b")), "/events?event_type=a%26b");
        assert_eq!(pairs(Some("7"), Some("audit")), "/events?limit=7&event_type=audit");
    }

    #[test]
    fn an_address_that_cannot_be_one_is_refused() {
        for url in ["localhost:13000", "ftp://host", "http://", "http://me:pass@host", "http://host/?x", ""] {
            assert!(Client::new(credentials(url)).is_err(), "{url}");
        }
        assert_eq!(Client::new(credentials("https://host/api/")).unwrap().base, "https://host/api");
    }

    #[test]
    fn debug_output_never_shows_a_secret() {
        let client = Client::new(credentials("http://host")).unwrap();
        let answer: Answer<AddedKey> = Answer::new(json!({ "key_name": "deploy", "key": "hunter2" }));
        let shown = format!("{client:?} {answer:?} {:?}", answer.part::<()>("").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
        let added = answer.value().unwrap();
        assert!(!format!("{added:?}").contains("hunter2"));
        assert!(matches!(added, AddedKey::Generated { key, .. } if key.expose() == "hunter2"));
    }

    #[test]
    fn an_unusable_file_of_certificates_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.pem");
        let refused = || Client::with_cacert(credentials("https://host"), &file).unwrap_err().to_string();
        assert!(refused().ends_with("ca.pem: no such file or directory"), "{}", refused());
        fs::write(&file, "hello").unwrap();
        assert!(refused().ends_with("no certificate in PEM form is in the file"), "{}", refused());
    }
}
