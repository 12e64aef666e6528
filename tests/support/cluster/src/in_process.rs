//! A cluster in the test's process, without sockets: the API, the store and two simulated nodes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use muster_api::{RouteInfo, Service};
use muster_control::auth::secrets::HashRequester;
use muster_control::auth::{Caller, Origin, RequestDeadline};
use muster_control::events::{Drainer, Events};
use muster_control::objects::interface::{NewInterface, WantedAddress};
use muster_control::objects::key::KeyRequest;
use muster_control::operations::{Implementation, Worker};
use muster_control::reconcile::tasks::TASKS;
use muster_control::{App, objects, reconcile};
use muster_node::SimulatedNode;
use muster_store::interfaces::InterfaceRow;
use muster_store::{Retry, Store, keys};
use muster_types::event::EventRecord;
use muster_types::ids::{InstanceId, InterfaceId, NodeId};
use muster_types::key::Secret;
use muster_types::network::NetworkState;
use muster_types::node::NodeApi;
use muster_types::object::ObjectRef;
use muster_types::settings::Settings;
use muster_types::spec::ValidationMode;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::api_document::{ApiDocument, Exchange};

/// The origin of the logins of tests.
pub const ORIGIN: Origin<'_> = Origin { remote: "127.0.0.1", source: "127.0.0.1", request_id: "test" };

/// A cluster in the test's process.
pub struct Cluster {
    pub app: Arc<App>,
    pub worker: Arc<Worker>,
    pub service: Service,
    pub routes: Vec<RouteInfo>,
    /// The network node.
    pub node: Arc<SimulatedNode>,
    /// The second node.
    pub other: Arc<SimulatedNode>,
    stop: watch::Sender<bool>,
    /// The daemon's periodic tasks.
    tasks: Vec<JoinHandle<()>>,
    directory: tempfile::TempDir,
    runtime: Handle,
    allows_unfinished_operations: AtomicBool,
    allows_undocumented_requests: AtomicBool,
    vms_without_instance: Mutex<Vec<InstanceId>>,
}

/// A response of the API.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiResponse {
    pub status: StatusCode,
    pub headers: axum::http::HeaderMap,
    pub body: Value,
    pub text: String,
}

impl Cluster {
    /// Creates a cluster with default settings.
    pub async fn new() -> Self {
        Self::with(&[], None).await
    }

    /// Creates a cluster with these settings and, if given, these operations in place of the real ones.
    pub async fn with(settings: &[(&str, &str)], implementations: Option<Vec<Implementation>>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("muster.db").display());
        Self::on(&url, directory, settings, implementations).await
    }

    /// Creates a cluster on the database at `url`.
    pub async fn on(
        url: &str,
        directory: tempfile::TempDir,
        settings: &[(&str, &str)],
        implementations: Option<Vec<Implementation>>,
    ) -> Self {
        Self::build(url, directory, settings, implementations, |node| node).await
    }

    /// Creates a cluster whose nodes have this many threads, MB of memory and GB of disk, on the database at `url` if
    /// given.
    pub async fn sized(url: Option<&str>, settings: &[(&str, &str)], size: (u64, u64, u64)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let sqlite = format!("sqlite:{}", directory.path().join("muster.db").display());
        let resize = |node: SimulatedNode| node.with_size(size.0, size.1, size.2);
        Self::build(url.unwrap_or(&sqlite), directory, settings, None, resize).await
    }

    async fn build(
        url: &str,
        directory: tempfile::TempDir,
        settings: &[(&str, &str)],
        implementations: Option<Vec<Implementation>>,
        resize: impl Fn(SimulatedNode) -> SimulatedNode,
    ) -> Self {
        // Check-ins do not run in the background.
        let settings = [&[("NODE_CHECKIN_MAXIMUM", "600")], settings].concat();
        let settings = Settings::from_pairs(&settings).unwrap();
        let store = Arc::new(Store::open(url).await.unwrap());
        let spool = directory.path().join("spool");
        let events = Events::open(&spool, "sim-1", &settings).unwrap();
        let drainer = Drainer::new(&events, &spool, &settings).unwrap();
        let node = |number: usize| {
            let storage = directory.path().join(number.to_string());
            let node = resize(SimulatedNode::new(number, NodeId::new(), &storage));
            let shared = &settings.shared_storage;
            node.set_shared_storage((!shared.is_empty()).then(|| Path::new(shared)));
            Arc::new(node)
        };
        let (node, other) = (node(1), node(2));
        let nodes: Vec<Arc<dyn NodeApi>> = vec![Arc::clone(&node) as _, Arc::clone(&other) as _];
        let app = Arc::new(App::new(Arc::clone(&store), settings, events, &seed(), nodes));
        let worker = Arc::new(match implementations {
            Some(implementations) => Worker::with(Arc::clone(&app), implementations),
            None => Worker::new(Arc::clone(&app)),
        });
        let stop = watch::Sender::new(false);
        tokio::spawn(drainer.run(store, stop.subscribe()));
        objects::key::bootstrap(&app, &Secret::new(""), |_| Ok(())).await.unwrap();
        reconcile::checkin::join(&app).await.unwrap();
        objects::network::bootstrap(&app).await.unwrap();
        let tasks = start_tasks(&app, &stop);
        let (service, routes) = muster_api::service(&app);
        Self {
            app,
            worker,
            service,
            routes,
            node,
            other,
            stop,
            tasks,
            directory,
            runtime: Handle::current(),
            allows_unfinished_operations: AtomicBool::new(false),
            allows_undocumented_requests: AtomicBool::new(false),
            vms_without_instance: Mutex::default(),
        }
    }

    /// Aborts the daemon's periodic tasks, as if it was killed. The VMs of its nodes keep running.
    pub async fn kill(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
            let _ = task.await;
        }
    }

    /// Starts another daemon on the same database and nodes.
    pub fn start(&mut self) {
        let App { store, settings, events, nodes, .. } = &*self.app;
        let app = App::new(store.clone(), settings.clone(), events.clone(), &seed(), nodes.clone());
        self.app = Arc::new(app);
        self.worker = Arc::new(Worker::new(Arc::clone(&self.app)));
        (self.service, self.routes) = muster_api::service(&self.app);
        self.tasks = start_tasks(&self.app, &self.stop);
    }

    /// Creates a key and returns a token for it.
    pub async fn token(&self, namespace: &str) -> String {
        let secret = self.key(&caller(), namespace, "test").await;
        objects::key::log_in(&self.app, namespace, &secret, ORIGIN).await.unwrap()
    }

    /// Creates a key and returns its secret.
    pub async fn key(&self, caller: &Caller, namespace: &str, name: &str) -> Secret {
        let request = KeyRequest { name: Some(name.into()), ..KeyRequest::default() };
        objects::key::put(&self.app, caller, namespace, &request).await.unwrap().unwrap()
    }

    /// Creates a key that expires at a time, which may be in the past.
    pub async fn expiring_key(&self, namespace: &str, name: &str, expiry: f64) -> Secret {
        let secret = Secret::generate();
        let sealed = self.app.secrets.seal(HashRequester::cluster(namespace), &secret).await.unwrap();
        let new = keys::NewKey { secret: sealed, expiry: Some(expiry), scopes: None, provenance: None };
        let mut tx = self.app.store.begin().await.unwrap();
        keys::put(&mut tx, namespace, name, &new).await.unwrap();
        tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
        secret
    }

    pub async fn create_namespace(&self, name: &str) {
        objects::namespace::create(&self.app, &caller(), name, &KeyRequest::default()).await.unwrap();
    }

    /// Calls the API.
    pub async fn call(&self, token: &str, method: Method, path: &str, body: Option<Value>) -> ApiResponse {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        self.send(token, method, path, body.into_bytes()).await
    }

    /// Calls the API with a body that need not be JSON.
    pub async fn send(&self, token: &str, method: Method, path: &str, body: Vec<u8>) -> ApiResponse {
        let mut request = Request::builder().method(method).uri(path);
        if !token.is_empty() {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if !body.is_empty() {
            request = request.header("content-length", body.len());
        }
        self.request(request.body(Body::from(body)).unwrap()).await
    }

    /// Calls the API with a complete request. Fails the test if the response, or a request that succeeds, is not as the
    /// OpenAPI document describes it.
    pub async fn request(&self, request: Request<Body>) -> ApiResponse {
        let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let (parts, mut body) = request.into_parts();
        let mut sent = None;
        // A body without a size is a stream, which the test controls.
        if body.size_hint().exact().is_some() {
            let bytes = body.collect().await.unwrap().to_bytes();
            body = Body::from(bytes.clone());
            sent = Some(bytes);
        }
        let (method, uri) = (parts.method.clone(), parts.uri.clone());
        let request = Request::from_parts(parts, body);
        let (head, body) = self.service.call(request, peer).await.into_parts();
        // A stream of events does not end by itself.
        let is_endless = head.headers.get("content-type").is_some_and(|value| value == "text/event-stream");
        let bytes = if is_endless { Bytes::new() } else { body.collect().await.unwrap().to_bytes() };
        self.check_document(&Exchange {
            method: &method,
            path: uri.path(),
            query: uri.query().unwrap_or_default(),
            request_body: sent.as_deref(),
            status: head.status,
            headers: &head.headers,
            body: &bytes,
        });
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        ApiResponse { status: head.status, headers: head.headers, body, text }
    }

    fn check_document(&self, exchange: &Exchange<'_>) {
        let document = ApiDocument::shared(|| self.service.openapi().to_owned());
        let mut problems = document.check_response(exchange);
        let mode = self.app.settings.api_validation_mode;
        let is_exempt = self.allows_undocumented_requests.load(Ordering::Relaxed);
        if exchange.status.is_success() && mode == ValidationMode::Enforce && !is_exempt {
            problems.extend(document.check_request(exchange));
        }
        problems.truncate(20);
        let Exchange { method, path, status, .. } = exchange;
        assert!(
            problems.is_empty(),
            "the OpenAPI document does not describe {method} {path} with status {status}:\n{}",
            problems.join("\n")
        );
    }

    /// Returns the events of an object, newest first.
    pub async fn events(&self, object: &ObjectRef) -> Vec<EventRecord> {
        wait_for("events to be drained", async || (self.app.events.depth() == 0).then_some(())).await;
        muster_store::events::list(&*self.app.store, object, None, 1000).await.unwrap()
    }

    /// Returns the messages of an object's events, newest first.
    pub async fn messages(&self, object: &ObjectRef) -> Vec<String> {
        self.events(object).await.into_iter().map(|event| event.message).collect()
    }

    /// Runs operations until no network is in state `initial`.
    pub async fn settle_networks(&self) {
        wait_for("networks to be created", async || {
            self.worker.run_once().await.unwrap();
            let rows = muster_store::networks::wanted(&*self.app.store).await.unwrap();
            rows.iter().all(|row| row.state != NetworkState::Initial).then_some(())
        })
        .await;
    }

    /// Creates an interface on a network, as of an instance on the node with this number.
    pub async fn create_interface(
        &self,
        network: &str,
        namespace: &str,
        hostname: &str,
        node: usize,
    ) -> InterfaceRow {
        let new = NewInterface {
            network: network.parse().unwrap(),
            instance: InstanceId::new(),
            namespace: namespace.into(),
            hostname: hostname.into(),
            node: Some(self.app.nodes[node - 1].identity().id),
            mac: None,
            address: WantedAddress::Any,
            float: false,
            model: "virtio".into(),
            order: 0,
        };
        self.try_create_interface(&new).await.unwrap()
    }

    pub async fn try_create_interface(
        &self,
        new: &NewInterface,
    ) -> Result<InterfaceRow, muster_types::Error> {
        let mut retry = Retry::default();
        loop {
            let mut tx = self.app.store.begin().await.unwrap();
            let outcome = objects::interface::create_in(&self.app, &mut tx, new).await;
            if let Some(end) = tx.finish(outcome, &mut retry).await {
                self.app.networks.notify_changed();
                return end;
            }
        }
    }

    pub async fn delete_interface(&self, id: InterfaceId) {
        let mut retry = Retry::default();
        loop {
            let mut tx = self.app.store.begin().await.unwrap();
            let outcome = objects::interface::delete_in(&self.app, &mut tx, id, &[]).await;
            if let Some(end) = tx.finish(outcome, &mut retry).await {
                assert!(end.unwrap(), "the interface does not exist");
                break;
            }
        }
        self.app.networks.notify_changed();
    }

    /// Returns the simulated node with this name.
    pub fn node_named(&self, name: &str) -> &SimulatedNode {
        let all = [&self.node, &self.other];
        all.into_iter().find(|node| node.identity().name == name).unwrap()
    }

    /// Keeps new instances from a node.
    pub async fn start_maintenance(&self, name: &str) {
        objects::node_drain::start_maintenance(&self.app, &caller(), name).await.unwrap();
    }

    /// Makes a node miss its check-ins until [`reconcile::checkin::join`] is called. Its VMs keep running.
    pub async fn lose_node(&self, name: &str) {
        let mut tx = self.app.store.begin().await.unwrap();
        let last_seen = muster_types::time::now() - 1000.0;
        let sql = "UPDATE nodes SET lastseen = ? WHERE name = ?";
        tx.execute(sql, &[last_seen.into(), name.into()]).await.unwrap();
        tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
        reconcile::node_watch::run(&self.app).await.unwrap();
    }

    /// Returns the VMs of all nodes.
    pub fn vms(&self) -> Vec<InstanceId> {
        let mut ids = self.node.vm_ids();
        ids.extend(self.other.vm_ids());
        ids
    }

    /// Returns the committed threads, MB of memory and GB of disk of each node.
    pub async fn committed_capacity(&self) -> BTreeMap<String, (i64, i64, i64)> {
        let ledgers = muster_store::node_ledgers::list(&*self.app.store).await.unwrap();
        let name =
            |id| self.app.nodes.iter().find(|node| node.identity().id == id).unwrap().identity().name.clone();
        let read = |(id, row): (NodeId, muster_types::capacity::CommittedCapacity)| {
            (name(id), (row.cpus, row.memory_mb, row.disk_gb))
        };
        ledgers.into_iter().map(read).collect()
    }

    /// Returns the number of rows of a table that meet a condition.
    pub async fn count_rows(&self, table: &str, condition: &str) -> i64 {
        let sql = format!("SELECT COUNT(*) FROM {table} WHERE {condition}");
        self.app.store.query(&sql, &[]).await.unwrap()[0].scalar().unwrap()
    }

    /// Returns the directory with the files of the nodes.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the names of all files below a directory of the nodes.
    pub fn files_in(&self, directory: &str) -> Vec<String> {
        let mut directories = vec![self.directory().join(directory)];
        let mut files = Vec::new();
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    directories.push(entry.path());
                } else {
                    files.push(entry.file_name().to_string_lossy().into_owned());
                }
            }
        }
        files
    }

    /// Whether a node has a file whose name contains `name`.
    pub fn has_file(&self, name: &str) -> bool {
        self.files_in("").iter().any(|file| file.contains(name))
    }

    /// Flips one bit in a node's copy of a blob.
    pub fn corrupt_blob(&self, node: usize, blob: &str, offset: u64) {
        use std::os::unix::fs::FileExt as _;
        let path = self.directory().join(node.to_string()).join("blobs").join(&blob[..2]).join(blob);
        let mut permissions = std::fs::metadata(&path).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o644);
        std::fs::set_permissions(&path, permissions).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    }

    /// Downloads a blob and returns the bytes up to the first error.
    pub async fn download_until_error(&self, token: &str, blob: &str) -> Vec<u8> {
        let request = Request::builder()
            .uri(format!("/blobs/{blob}/data"))
            .header("authorization", format!("Bearer {token}"));
        let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let mut body = self.service.call(request.body(Body::empty()).unwrap(), peer).await.into_body();
        let mut bytes = Vec::new();
        while let Some(Ok(frame)) = body.frame().await {
            bytes.extend_from_slice(&frame.into_data().unwrap());
        }
        bytes
    }

    /// Runs operations until all are finished.
    pub async fn settle(&self) {
        wait_for("operations to finish", async || {
            self.worker.run_once().await.unwrap();
            let unfinished = muster_store::operations::unfinished(&*self.app.store).await.unwrap();
            (unfinished == 0).then_some(())
        })
        .await;
    }
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the seed of the cluster.
pub fn seed() -> Secret {
    Secret::new("a seed that only tests use")
}

/// The periodic tasks that run in the background. Tests run the others explicitly.
const BACKGROUND_TASKS: &[&str] =
    &["networks", "vms", "agents", "agent operations", "event streams", "console sessions"];

fn start_tasks(app: &Arc<App>, stop: &watch::Sender<bool>) -> Vec<JoinHandle<()>> {
    let find = |name: &&str| TASKS.iter().find(|task| task.name == *name).expect("a name of the table");
    let tasks = BACKGROUND_TASKS.iter().map(find);
    // Nobody competes for the role of the network node.
    app.networks.notify_role_known();
    tasks.map(|task| tokio::spawn(task.start(Arc::clone(app), stop.subscribe()))).collect()
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("directory", &self.directory).finish_non_exhaustive()
    }
}

/// Fails the test when the cluster leaks something. Operations that the test did not wait for are run first.
impl Drop for Cluster {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let leaks = match Handle::try_current() {
                Ok(_) => {
                    tokio::task::block_in_place(|| self.runtime.block_on(self.wait_until_nothing_leaks()))
                }
                Err(_) => self.runtime.block_on(self.wait_until_nothing_leaks()),
            };
            assert!(leaks.is_empty(), "the test ends with:\n{}", leaks.join("\n"));
        }
        self.stop.send_replace(true);
    }
}

impl Cluster {
    /// Lets the test end with unfinished operations.
    pub fn allow_unfinished_operations(&self, _reason: &'static str) {
        self.allows_unfinished_operations.store(true, Ordering::Relaxed);
    }

    /// Lets the test send requests that succeed in a form that the OpenAPI document does not describe.
    pub fn allow_undocumented_requests(&self, _reason: &'static str) {
        self.allows_undocumented_requests.store(true, Ordering::Relaxed);
    }

    /// Lets the test end with a VM whose instance does not exist.
    pub fn allow_vm_without_instance(&self, vm: InstanceId, _reason: &'static str) {
        self.vms_without_instance.lock().unwrap().push(vm);
    }

    /// Returns some of what still leaks after [`WAIT_TIMEOUT`].
    async fn wait_until_nothing_leaks(&self) -> Vec<String> {
        let started = Instant::now();
        loop {
            let Ok(mut leaks) = tokio::time::timeout(2 * WAIT_TIMEOUT, self.leaks()).await else {
                return vec!["an operation that does not return".into()];
            };
            if leaks.is_empty() || started.elapsed() > WAIT_TIMEOUT {
                leaks.truncate(20);
                return leaks;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn leaks(&self) -> Vec<String> {
        let mut leaks = Vec::new();
        if !self.allows_unfinished_operations.load(Ordering::Relaxed) {
            self.worker.run_once().await.unwrap();
            let sql = "SELECT name, target_type, target_id, state FROM operations \
                       WHERE state IN ('queued', 'executing')";
            let rows = self.app.store.query(sql, &[]).await.unwrap();
            leaks.extend(rows.iter().map(|row| format!("an unfinished operation: {:?}", row.0)));
        }
        for task in self.tasks.iter().filter(|task| task.is_finished()) {
            leaks.push(format!("a periodic task that ended early: {}", task.id()));
        }
        let sql = "SELECT uuid FROM instances WHERE state <> 'deleted'";
        let rows = self.app.store.query(sql, &[]).await.unwrap();
        let mut instances: Vec<InstanceId> = rows.iter().map(|row| row.scalar().unwrap()).collect();
        instances.extend(&*self.vms_without_instance.lock().unwrap());
        let vms = self.vms().into_iter().filter(|vm| !instances.contains(vm));
        leaks.extend(vms.map(|vm| format!("a VM without an instance: {vm}")));
        for node in ["1", "2"] {
            let entries = |name: &str| std::fs::read_dir(self.directory().join(node).join(name));
            let jobs = entries("work").into_iter().flatten().flatten();
            leaks.extend(jobs.map(|job| format!("a job directory: {}", job.path().display())));
            for vm in entries("machines").into_iter().flatten().flatten() {
                // A simulated node keeps files whose names start with the instance.
                let name = vm.file_name().to_string_lossy().into_owned();
                let id = name.split('.').next().unwrap_or_default().parse();
                if !id.is_ok_and(|id: InstanceId| instances.contains(&id)) {
                    leaks.push(format!("a file of a VM without an instance: {}", vm.path().display()));
                }
            }
        }
        leaks
    }
}

/// Returns the administrator as the caller of a handler.
pub fn caller() -> Caller {
    Caller {
        namespace: "system".into(),
        key_name: "deploy".into(),
        scopes: None,
        minted: None,
        request_id: "a request".into(),
        method: "POST".into(),
        path: "/".into(),
        remote: "127.0.0.1".into(),
        deadline: RequestDeadline::default(),
        nonce: None,
        token: None,
        trusting: None,
    }
}

/// Polls until `check` returns a value, and returns that.
pub async fn wait_for<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
