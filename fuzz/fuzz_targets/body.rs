//! Fuzzes the whole API with a database: arbitrary methods, paths, queries, headers and bodies. No response is a server
//! error, and every response with the content type JSON is valid JSON.

#![no_main]

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt as _;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::{Corpus, fuzz_target};
use muster_control::events::Events;
use muster_api::{RouteInfo, Service};
use muster_store::Store;
use muster_control::{App, objects, reconcile};
use muster_node::SimulatedNode;
use muster_types::ids::NodeId;
use muster_types::key::Secret;
use muster_types::settings::Settings;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

/// Requests per database: lists stay short, and a finding depends on few earlier requests.
const MAX_REQUESTS: u32 = 2000;

const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

const METHODS: &[&str] = &["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"];

/// Words that pass more validation than random text.
const WORDS: &[&str] = &[
    "namespace",
    "key",
    "key_name",
    "expiry",
    "value",
    "limit",
    "event_type",
    "external_namespace",
    "system",
    "fuzz",
    "tenant",
    "sim-1",
    "audit",
    "all",
    "name",
    "service_key",
    "_service_key",
    "sfk_",
    "..",
    "a/b",
    "\u{0}",
    "é",
    " ",
];

#[derive(Debug, Arbitrary)]
struct Call<'a> {
    method: Option<u8>,
    path: Path<'a>,
    query: Vec<(Word<'a>, Word<'a>)>,
    token: Token<'a>,
    length: Length,
    headers: Vec<(&'a str, &'a [u8])>,
    body: Payload<'a>,
}

#[derive(Debug, Arbitrary)]
enum Path<'a> {
    /// A route with values for its parameters.
    Route {
        number: u8,
        parameters: [Word<'a>; 2],
        slash: bool,
    },
    Text(&'a str),
}

#[derive(Debug, Arbitrary)]
enum Word<'a> {
    Known(u8),
    Text(&'a str),
}

#[derive(Debug, Arbitrary)]
enum Token<'a> {
    System,
    Tenant,
    None,
    Text(&'a [u8]),
}

#[derive(Debug, Arbitrary)]
enum Length {
    Correct,
    Absent,
    Arbitrary(u64),
}

#[derive(Debug, Arbitrary)]
enum Payload<'a> {
    Nothing,
    Bytes(&'a [u8]),
    Object(Vec<(Word<'a>, Json<'a>)>),
    Json(Json<'a>),
}

#[derive(Debug, Arbitrary)]
enum Json<'a> {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    /// A generated secret, which is fast to hash.
    Generated,
    Word(Word<'a>),
    List(Vec<Json<'a>>),
    Object(Vec<(Word<'a>, Json<'a>)>),
}

impl Word<'_> {
    fn text(&self) -> &str {
        match self {
            Self::Known(number) => WORDS[usize::from(*number) % WORDS.len()],
            Self::Text(text) => text,
        }
    }
}

impl Json<'_> {
    fn value(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(value) => json!(value),
            Self::Integer(number) => json!(number),
            Self::Float(number) => json!(number),
            Self::Generated => json!(Secret::generate().expose()),
            Self::Word(word) => json!(word.text()),
            Self::List(items) => items.iter().map(Self::value).collect(),
            Self::Object(members) => object(members),
        }
    }
}

fn object(members: &[(Word, Json)]) -> Value {
    Value::Object(
        members.iter().map(|(name, value)| (name.text().to_owned(), value.value())).collect::<Map<_, _>>(),
    )
}

/// A control plane with one simulated node, and tokens of an administrator and of a tenant.
struct Cluster {
    service: Service,
    routes: Vec<RouteInfo>,
    system: String,
    tenant: String,
    calls: u32,
    /// Whether a request has deleted the key or namespace of a token.
    is_token_invalid: bool,
    _directory: tempfile::TempDir,
}

impl Cluster {
    async fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let settings = [("API_TOKEN_DURATION", "10000"), ("SPOOL_HIGH_WATER_MARK", "1000")];
        let settings = Settings::from_pairs(&settings).expect("settings");
        let store =
            Store::open(&format!("sqlite:{}", directory.path().join("db").display())).await.expect("store");
        let events = Events::open(&directory.path().join("spool"), "sim-1", &settings).expect("events");
        let seed = Secret::new("a seed that only this fuzzer uses");
        let node = Arc::new(SimulatedNode::new(1, NodeId::new(), &directory.path().join("node")));
        let app = Arc::new(App::new(Arc::new(store), settings, events, &seed, vec![node]));
        let key = Secret::generate();
        objects::key::bootstrap(&app, &key, |_| Ok(())).await.expect("namespace system");
        reconcile::checkin::join(&app).await.expect("a node");
        let (service, routes) = muster_api::service(&app);

        let system = log_in(&service, "system", &json!(key.expose())).await;
        call(&service, "/auth/namespaces", &system, &json!({ "namespace": "tenant" })).await;
        let key =
            call(&service, "/auth/namespaces/tenant/keys", &system, &json!({ "key_name": "fuzz" })).await;
        let tenant = log_in(&service, "tenant", &key["key"]).await;
        Self { service, routes, system, tenant, calls: 0, is_token_invalid: false, _directory: directory }
    }

    /// Returns the request, or `None` if it is not valid HTTP.
    fn request(&self, call: &Call) -> Option<Request<Body>> {
        let (path, route_method) = match &call.path {
            Path::Text(text) => (format!("/{text}"), None),
            Path::Route { number, parameters, slash } => {
                let route = &self.routes[usize::from(*number) % self.routes.len()];
                let mut parameters = parameters.iter();
                let segments = route.path.split('/').map(|segment| match segment.starts_with('{') {
                    true => percent_encoded(parameters.next().map_or("x", Word::text)),
                    false => segment.to_owned(),
                });
                let path = segments.collect::<Vec<_>>().join("/") + if *slash { "/" } else { "" };
                (path, Some(route.method.as_str()))
            }
        };
        let query: Vec<_> = call
            .query
            .iter()
            .map(|(name, value)| {
                format!("{}={}", percent_encoded(name.text()), percent_encoded(value.text()))
            })
            .collect();
        let uri = if query.is_empty() { path } else { format!("{path}?{}", query.join("&")) };
        let method = call.method.map(|number| METHODS[usize::from(number) % METHODS.len()]);
        let body = match &call.body {
            Payload::Nothing => vec![],
            Payload::Bytes(bytes) => bytes.to_vec(),
            Payload::Object(members) => object(members).to_string().into_bytes(),
            Payload::Json(json) => json.value().to_string().into_bytes(),
        };
        let mut request = Request::builder().method(method.or(route_method).unwrap_or("GET")).uri(uri);
        for (name, value) in &call.headers {
            request = request.header(*name, *value);
        }
        match call.length {
            Length::Correct => request = request.header(header::CONTENT_LENGTH, body.len()),
            Length::Arbitrary(length) => request = request.header(header::CONTENT_LENGTH, length),
            Length::Absent => {}
        }
        match &call.token {
            Token::System => {
                request = request.header(header::AUTHORIZATION, format!("Bearer {}", self.system))
            }
            Token::Tenant => {
                request = request.header(header::AUTHORIZATION, format!("Bearer {}", self.tenant))
            }
            Token::Text(bytes) => request = request.header(header::AUTHORIZATION, *bytes),
            Token::None => {}
        }
        request.body(Body::from(body)).ok()
    }

    /// Sends the request and checks the response.
    async fn check(&mut self, call: &Call<'_>, request: Request<Body>) {
        let head = format!("{} {}", request.method(), request.uri());
        let response = self.service.call(request, PEER).await;
        let (status, headers) = (response.status(), response.headers().clone());
        // No task checks the health of the database, so the server is not ready.
        let is_health = status == StatusCode::SERVICE_UNAVAILABLE
            && (head.contains("/readyz") || head.contains("/healthz"));
        assert!(!status.is_server_error() || is_health, "{head}: {status}");
        let body = response.into_body().collect().await.expect("a whole body").to_bytes();
        let is_json = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
        if is_json && !head.starts_with("HEAD ") {
            serde_json::from_slice::<Value>(&body).unwrap_or_else(|e| panic!("{head}: {e}: {body:?}"));
        }
        if status == StatusCode::UNAUTHORIZED && matches!(call.token, Token::System | Token::Tenant) {
            self.is_token_invalid = true;
        }
        self.calls += 1;
    }
}

/// Sends a request that must succeed.
async fn call(service: &Service, path: &str, token: &str, body: &Value) -> Value {
    let body = body.to_string();
    let request = Request::post(path)
        .header(header::CONTENT_LENGTH, body.len())
        .header(header::AUTHORIZATION, format!("Bearer {token}"))
        .body(Body::from(body))
        .expect("a request");
    let response = service.call(request, PEER).await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    serde_json::from_slice(&body).expect("JSON")
}

async fn log_in(service: &Service, namespace: &str, key: &Value) -> String {
    let response = call(service, "/auth", "", &json!({ "namespace": namespace, "key": key })).await;
    response["access_token"].as_str().expect("a token").to_owned()
}

fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

thread_local! {
    static RUNTIME: Runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    static CLUSTER: RefCell<Option<Cluster>> = const { RefCell::new(None) };
}

fuzz_target!(|call: Call| -> Corpus {
    RUNTIME.with(|runtime| {
        CLUSTER.with_borrow_mut(|cluster| {
            runtime.block_on(async {
                if cluster
                    .as_ref()
                    .is_some_and(|cluster| cluster.is_token_invalid || cluster.calls >= MAX_REQUESTS)
                {
                    *cluster = None;
                }
                if cluster.is_none() {
                    *cluster = Some(Cluster::new().await);
                }
                let Some(cluster) = cluster else { return Corpus::Reject };
                let Some(request) = cluster.request(&call) else { return Corpus::Reject };
                cluster.check(&call, request).await;
                Corpus::Keep
            })
        })
    })
});
