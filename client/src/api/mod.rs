//! The REST API as methods, one file per noun. Logs in when first needed, keeps the token, and never shows a
//! secret.

mod agent_operations;
mod artifacts;
mod blobs;
mod claims;
mod events;
mod exchanges;
mod instances;
mod interfaces;
mod issuers;
mod keys;
mod labels;
mod metadata;
mod namespaces;
mod networks;
mod nodes;
mod operations;
mod rules;
mod trusts;
mod uploads;

use std::error::Error as _;
use std::fmt;
use std::fs;
use std::io;
use std::marker::PhantomData;
use std::path::Path;
use std::time::Duration;

use muster_types::key::Secret;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::LOCATION;
use reqwest::{Certificate, Method, RequestBuilder, Response, StatusCode, Url, redirect};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::credentials::Credentials;
use crate::output::visible;
pub use agent_operations::Budgets;
pub use artifacts::{ArtifactRef, NewVersion, VersionSource};
pub use blobs::BlobData;
pub use claims::ClaimLimits;
pub use events::EventQuery;
pub use exchanges::ExchangedKey;
pub use instances::{
    NewInstance, NewInterface, NewSnapshot, PowerCall, ScreenLink, SnapshotHandle, SnapshotRecord,
};
pub use keys::AddedKey;
pub use networks::{DeletedNetworks, NetworkDeletion, NewNetwork};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// The longest that one request with much data may take. Whether it still moves is looked at apart.
const STREAM_TIMEOUT: Duration = Duration::from_secs(86_400);
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
    /// No node can take it; the text is the server's own.
    #[error("{text}")]
    NotPlaced { status: u16, text: String, stage: String, transient: bool },
}

impl Error {
    /// The HTTP status, where the server gave one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Unusable(_) | Self::Unreachable { .. } | Self::Unreadable { .. } => None,
            Self::LoginRefused { status, .. }
            | Self::Refused { status, .. }
            | Self::NotPlaced { status, .. } => Some(*status),
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

// Not derived: what the answer means need not be `Clone`.
impl<T> Clone for Answer<T> {
    fn clone(&self) -> Self {
        Self::new(self.json.clone())
    }
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The JSON may hold a generated secret.
        f.write_str("Answer(…)")
    }
}

/// What metadata and events belong to.
#[derive(Debug, Clone, Copy)]
pub enum Object<'a> {
    /// A namespace by its name.
    Namespace(&'a str),
    /// A claim by its namespace and its id.
    Claim(&'a str, &'a str),
    /// A trusted issuer by its name.
    Issuer(&'a str),
    /// A mapping rule by its namespace and its name.
    Rule(&'a str, &'a str),
    /// A node by its name or id.
    Node(&'a str),
    /// A network by its name or id.
    Network(&'a str),
    /// An interface by its id.
    Interface(&'a str),
    /// An instance by its name or id.
    Instance(&'a str),
    /// An artifact by its name or id.
    Artifact(&'a str),
    /// A blob by its id.
    Blob(&'a str),
    /// What is done inside a guest, by its id.
    AgentOperation(&'a str),
}

impl Object<'_> {
    fn path(self, rest: &[&str]) -> Result<String> {
        let start = match self {
            Self::Namespace(name) => path(&["auth", "namespaces", name])?,
            Self::Claim(namespace, claim) => path(&["auth", "namespaces", namespace, "claims", claim])?,
            Self::Issuer(issuer) => path(&["auth", "issuers", issuer])?,
            Self::Rule(namespace, rule) => path(&["auth", "namespaces", namespace, "rules", rule])?,
            Self::Node(node) => path(&["nodes", node])?,
            Self::Network(network) => path(&["networks", network])?,
            Self::Interface(interface) => path(&["interfaces", interface])?,
            Self::Instance(instance) => path(&["instances", instance])?,
            Self::Artifact(artifact) => path(&["artifacts", artifact])?,
            Self::Blob(blob) => path(&["blobs", blob])?,
            Self::AgentOperation(operation) => path(&["agentoperations", operation])?,
        };
        Ok(start + &path(rest)?)
    }
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

    /// Address of the API.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.base
    }

    /// The namespace to act as.
    #[must_use]
    pub fn acts_as(&self) -> &str {
        &self.credentials.namespace
    }

    /// Logs in now rather than with the first call.
    pub async fn log_in(&self) -> Result<()> {
        self.token(None).await.map(drop)
    }

    async fn get<T>(&self, path: String) -> Result<Answer<T>> {
        self.call(Method::GET, path, None).await
    }

    async fn delete<T>(&self, path: String) -> Result<Answer<T>> {
        self.call(Method::DELETE, path, None).await
    }

    async fn call<T>(&self, method: Method, path: String, body: Option<Value>) -> Result<Answer<T>> {
        let reply = self.ask(method, &path, body).await?;
        self.answer(&reply)
    }

    /// Calls with a token, whatever comes back.
    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<Reply> {
        let (token, fresh) = self.token(None).await?;
        let mut reply = self.send(method.clone(), path, Some(&token), body.as_ref()).await?;
        // A refusal of a token that was made just now is not about its age.
        if reply.status == StatusCode::UNAUTHORIZED && !fresh {
            let (token, _) = self.token(Some(&token)).await?;
            reply = self.send(method, path, Some(&token), body.as_ref()).await?;
        }
        Ok(reply)
    }

    /// The answer that a reply holds, or the refusal.
    fn answer<T>(&self, reply: &Reply) -> Result<Answer<T>> {
        match reply.status {
            StatusCode::OK | StatusCode::ACCEPTED => self.parse(&reply.body).map(Answer::new),
            StatusCode::UNAUTHORIZED => Err(Error::NotAllowed {
                namespace: self.credentials.namespace.clone(),
                text: reply.refusal(),
            }),
            status => Err(reply.refused(status.as_u16())),
        }
    }

    /// What a call answers that is not JSON.
    async fn content(&self, path: String) -> Result<Vec<u8>> {
        let reply = self.ask(Method::GET, &path, None).await?;
        if reply.status == StatusCode::OK {
            return Ok(reply.body);
        }
        let refusal = self.answer::<()>(&reply).err();
        Err(refusal.unwrap_or_else(|| self.unreadable(&format!("{} instead of content", reply.status))))
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
        let mut request = self.request(method, path, token);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.receive(request).await
    }

    fn request(&self, method: Method, path: &str, token: Option<&Secret>) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match token {
            Some(token) => request.bearer_auth(token.expose()),
            None => request,
        }
    }

    async fn receive(&self, request: RequestBuilder) -> Result<Reply> {
        let response = self.respond(request).await?;
        let status = response.status();
        let body = response.bytes().await.map_err(|error| self.unreachable(&error))?.to_vec();
        Ok(Reply { status, body })
    }

    /// Sends a request. What is answered begins with a response, whose body is still to be read.
    async fn respond(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        if response.status().is_redirection() {
            let to = response.headers().get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("nowhere");
            return Err(self.unreadable(&format!("a redirection to {}", visible(to))));
        }
        Ok(response)
    }

    fn parse(&self, body: &[u8]) -> Result<Value> {
        serde_json::from_slice(body).map_err(|error| self.unreadable(&format!("not JSON, {error}")))
    }

    fn unreadable(&self, why: &str) -> Error {
        Error::Unreadable { url: self.base.clone(), why: why.to_owned() }
    }

    /// The error of a connection on which nothing has moved for a time.
    pub(crate) fn stalled(&self, patience: Duration) -> Error {
        let why = format!("nothing moved for {} seconds", patience.as_secs());
        Error::Unreachable { url: self.base.clone(), why }
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
    fn refused(&self, status: u16) -> Error {
        let json: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let text = self.refusal();
        match json.get("stage").and_then(Value::as_str) {
            Some(stage) => {
                let transient = json.get("transient").and_then(Value::as_bool).unwrap_or(false);
                Error::NotPlaced { status, text, stage: visible(stage), transient }
            }
            None => Error::Refused { status, text },
        }
    }

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
pub(crate) fn innermost(error: &reqwest::Error) -> String {
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
    async fn a_refusal_of_the_scheduler_carries_its_stage() {
        let full =
            (507, r#"{"error": "no room", "status": 507, "stage": "capacity_guard", "transient": true}"#);
        let (client, _) = server(vec![TOKEN, full]).await;
        let error = client.instance("web").await.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.status()), ("no room", Some(507)));
        assert!(
            matches!(error, Error::NotPlaced { stage, transient: true, .. } if stage == "capacity_guard")
        );
    }

    #[tokio::test]
    async fn what_a_console_showed_is_not_json() {
        let (client, heads) = server(vec![TOKEN, (200, "login: "), (404, r#"{"error": "no"}"#)]).await;
        assert_eq!(client.console_data("web", None).await.unwrap(), b"login: ");
        assert_eq!(client.console_data("web", Some(7)).await.unwrap_err().to_string(), "no");
        let heads = heads.lock().await;
        assert_eq!(heads[1], "GET /instances/web/consoledata?length=-1 HTTP/1.1");
        assert_eq!(heads[2], "GET /instances/web/consoledata?length=7 HTTP/1.1");
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

    #[tokio::test]
    async fn networks_that_were_left_are_an_answer_and_any_other_refusal_is_none() {
        let left = r#"{"error": {"deleted": [], "unable": ["5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]}, "status": 403}"#;
        let no = (403, r#"{"error": "not now", "status": 403}"#);
        let (client, _) = server(vec![TOKEN, (403, left), no, (202, "[]")]).await;
        let outcome = client.delete_networks(None, false).await.unwrap().value().unwrap();
        assert!(matches!(outcome, DeletedNetworks::Partly { unable, .. } if unable.len() == 1));
        assert_eq!(client.delete_networks(None, false).await.unwrap_err().to_string(), "not now");
        let outcome = client.delete_networks(None, false).await.unwrap().value().unwrap();
        assert!(matches!(outcome, DeletedNetworks::All(deleted) if deleted.is_empty()));
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
