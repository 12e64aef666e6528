//! A whole cluster in the test's own process, without sockets: the router, the store, a simulated node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use muster_api::{RouteInfo, Service};
use muster_control::auth::Caller;
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
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) struct Cluster {
    pub(crate) app: Arc<App>,
    pub(crate) worker: Arc<Worker>,
    pub(crate) service: Service,
    pub(crate) routes: Vec<RouteInfo>,
    /// The network node, and a second one.
    pub(crate) node: Arc<SimulatedNode>,
    pub(crate) other: Arc<SimulatedNode>,
    stop: watch::Sender<bool>,
    /// What the daemon does besides answering.
    tasks: Vec<JoinHandle<()>>,
    folder: tempfile::TempDir,
}

/// An answer of the API.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: axum::http::HeaderMap,
    pub(crate) body: Value,
    pub(crate) text: String,
}

impl Cluster {
    pub(crate) async fn new() -> Self {
        Self::with(&[], None).await
    }

    /// A cluster with settings of its own and, if given, other operations than the real ones.
    pub(crate) async fn with(
        settings: &[(&str, &str)],
        implementations: Option<Vec<Implementation>>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("muster.db").display());
        Self::on(&url, folder, settings, implementations).await
    }

    /// The same on a database of the test's choice.
    pub(crate) async fn on(
        url: &str,
        folder: tempfile::TempDir,
        settings: &[(&str, &str)],
        implementations: Option<Vec<Implementation>>,
    ) -> Self {
        Self::made_of(url, folder, settings, implementations, |node| node).await
    }

    /// A cluster whose nodes have so many threads, so many megabytes of memory and so many gigabytes of disk, on a
    /// database of its own if none is given.
    pub(crate) async fn sized(url: Option<&str>, settings: &[(&str, &str)], size: (u64, u64, u64)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let own = format!("sqlite:{}", folder.path().join("muster.db").display());
        let shape = |node: SimulatedNode| node.with_size(size.0, size.1, size.2);
        Self::made_of(url.unwrap_or(&own), folder, settings, None, shape).await
    }

    async fn made_of(
        url: &str,
        folder: tempfile::TempDir,
        settings: &[(&str, &str)],
        implementations: Option<Vec<Implementation>>,
        shape: impl Fn(SimulatedNode) -> SimulatedNode,
    ) -> Self {
        let settings = Settings::from_pairs(settings).unwrap();
        let store = Arc::new(Store::open(url).await.unwrap());
        let spool = folder.path().join("spool");
        let events = Events::open(&spool, "sim-1", &settings).unwrap();
        let drainer = Drainer::new(&events, &spool, &settings).unwrap();
        let make = |number: usize| {
            let storage = folder.path().join(number.to_string());
            Arc::new(shape(SimulatedNode::new(number, NodeId::new(), &storage)))
        };
        let (node, other) = (make(1), make(2));
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
        Self { app, worker, service, routes, node, other, stop, tasks, folder }
    }

    /// Ends what the daemon does besides answering, as if it was killed. The machines of its nodes go on.
    pub(crate) async fn kill(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
            let _ = task.await;
        }
    }

    /// Starts the next daemon, on the same database and nodes.
    pub(crate) fn start(&mut self) {
        let App { store, settings, events, nodes, .. } = &*self.app;
        let app = App::new(store.clone(), settings.clone(), events.clone(), &seed(), nodes.clone());
        self.app = Arc::new(app);
        self.worker = Arc::new(Worker::new(Arc::clone(&self.app)));
        (self.service, self.routes) = muster_api::service(&self.app);
        self.tasks = start_tasks(&self.app, &self.stop);
    }

    /// A token for a key that is made for it.
    pub(crate) async fn token(&self, namespace: &str) -> String {
        let secret = self.key(&caller(), namespace, "test").await;
        objects::key::log_in(&self.app, namespace, &secret, "test").await.unwrap()
    }

    /// A generated key.
    pub(crate) async fn key(&self, caller: &Caller, namespace: &str, name: &str) -> Secret {
        let request = KeyRequest { name: Some(name.into()), ..KeyRequest::default() };
        objects::key::put(&self.app, caller, namespace, &request).await.unwrap().unwrap()
    }

    /// A key that expires, or has expired, at a time.
    pub(crate) async fn expiring_key(&self, namespace: &str, name: &str, expiry: f64) -> Secret {
        let secret = Secret::generate();
        let sealed = self.app.secrets.seal(namespace, &secret).await.unwrap();
        let new = keys::NewKey { secret: sealed, expiry: Some(expiry), scopes: None, provenance: None };
        let mut tx = self.app.store.begin().await.unwrap();
        keys::put(&mut tx, namespace, name, &new).await.unwrap();
        tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
        secret
    }

    pub(crate) async fn create_namespace(&self, name: &str) {
        objects::namespace::create(&self.app, &caller(), name, &KeyRequest::default()).await.unwrap();
    }

    /// Makes a call.
    pub(crate) async fn call(&self, token: &str, method: Method, path: &str, body: Option<Value>) -> Answer {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        self.send(token, method, path, body.into_bytes()).await
    }

    /// Makes a call with a body that need not be JSON.
    pub(crate) async fn send(&self, token: &str, method: Method, path: &str, body: Vec<u8>) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        if !token.is_empty() {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if !body.is_empty() {
            request = request.header("content-length", body.len());
        }
        self.request(request.body(Body::from(body)).unwrap()).await
    }

    pub(crate) async fn request(&self, request: Request<Body>) -> Answer {
        let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let answer = self.service.call(request, peer).await;
        let (head, body) = answer.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answer { status: head.status, headers: head.headers, body, text }
    }

    /// Everything recorded of an object so far, newest first.
    pub(crate) async fn events(&self, object: &ObjectRef) -> Vec<EventRecord> {
        wait_for("events to be drained", async || (self.app.events.depth() == 0).then_some(())).await;
        muster_store::events::list(&*self.app.store, object, None, 1000).await.unwrap()
    }

    pub(crate) async fn messages(&self, object: &ObjectRef) -> Vec<String> {
        self.events(object).await.into_iter().map(|event| event.message).collect()
    }

    /// Works until no network is on its way into being.
    pub(crate) async fn settle_networks(&self) {
        wait_for("networks to be made", async || {
            self.worker.run_once().await.unwrap();
            let rows = muster_store::networks::wanted(&*self.app.store).await.unwrap();
            rows.iter().all(|row| row.state != NetworkState::Initial).then_some(())
        })
        .await;
    }

    /// An interface on a network, as an instance on the node of that number would have it.
    pub(crate) async fn interface(
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
        self.try_interface(&new).await.unwrap()
    }

    pub(crate) async fn try_interface(
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

    pub(crate) async fn delete_interface(&self, id: InterfaceId) {
        let mut retry = Retry::default();
        loop {
            let mut tx = self.app.store.begin().await.unwrap();
            let outcome = objects::interface::delete_in(&self.app, &mut tx, id).await;
            if let Some(end) = tx.finish(outcome, &mut retry).await {
                assert!(end.unwrap(), "the interface was there");
                break;
            }
        }
        self.app.networks.notify_changed();
    }

    /// The simulated node of that name.
    pub(crate) fn node_named(&self, name: &str) -> &SimulatedNode {
        let all = [&self.node, &self.other];
        all.into_iter().find(|node| node.identity().name == name).unwrap()
    }

    /// The machines that the nodes have something of.
    pub(crate) fn vms(&self) -> Vec<InstanceId> {
        let mut ids = self.node.vm_ids();
        ids.extend(self.other.vm_ids());
        ids
    }

    /// What every node has promised: threads, megabytes, gigabytes.
    pub(crate) async fn promised(&self) -> BTreeMap<String, (i64, i64, i64)> {
        let ledgers = muster_store::node_ledgers::list(&*self.app.store).await.unwrap();
        let name =
            |id| self.app.nodes.iter().find(|node| node.identity().id == id).unwrap().identity().name.clone();
        let read = |(id, row): (NodeId, muster_types::capacity::CommittedCapacity)| {
            (name(id), (row.cpus, row.memory_mb, row.disk_gb))
        };
        ledgers.into_iter().map(read).collect()
    }

    /// How many rows a table has for which something is so.
    pub(crate) async fn count(&self, table: &str, condition: &str) -> i64 {
        let sql = format!("SELECT COUNT(*) FROM {table} WHERE {condition}");
        self.app.store.query(&sql, &[]).await.unwrap()[0].scalar().unwrap()
    }

    /// Where the nodes keep their files.
    pub(crate) fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// Names of the files below a folder of the nodes.
    pub(crate) fn files_in(&self, folder: &str) -> Vec<String> {
        let mut folders = vec![self.folder().join(folder)];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else {
                    files.push(entry.file_name().to_string_lossy().into_owned());
                }
            }
        }
        files
    }

    /// Whether any node has a file with this in its name.
    pub(crate) fn has_file(&self, name: &str) -> bool {
        self.files_in("").iter().any(|file| file.contains(name))
    }

    /// Flips one bit in the copy of a blob that a node has.
    pub(crate) fn damage(&self, node: usize, blob: &str, offset: u64) {
        use std::os::unix::fs::FileExt as _;
        let path = self.folder().join(node.to_string()).join("blobs").join(&blob[..2]).join(blob);
        let mut permissions = std::fs::metadata(&path).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o644);
        std::fs::set_permissions(&path, permissions).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    }

    /// The bytes of a blob, as far as they come.
    pub(crate) async fn try_data(&self, token: &str, blob: &str) -> Vec<u8> {
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

    /// Works until no operation is left unfinished.
    pub(crate) async fn settle(&self) {
        wait_for("operations to end", async || {
            self.worker.run_once().await.unwrap();
            let left = muster_store::operations::unfinished(&*self.app.store).await.unwrap();
            (left == 0).then_some(())
        })
        .await;
    }
}

fn seed() -> Secret {
    Secret::new("a seed that only tests use")
}

/// The tasks that a test cluster runs by itself. Tests run the others when they need them.
const BACKGROUND_TASKS: &[&str] = &["networks", "vms", "agents", "agent operations"];

fn start_tasks(app: &Arc<App>, stop: &watch::Sender<bool>) -> Vec<JoinHandle<()>> {
    let tasks = TASKS.iter().filter(|task| BACKGROUND_TASKS.contains(&task.name));
    tasks.map(|task| tokio::spawn(task.start(Arc::clone(app), stop.subscribe()))).collect()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// The administrator, as handlers see it.
pub(crate) fn caller() -> Caller {
    Caller {
        namespace: "system".into(),
        key_name: "deploy".into(),
        scopes: None,
        minted: None,
        request_id: "a request".into(),
        method: "POST".into(),
        path: "/".into(),
        remote: "127.0.0.1".into(),
    }
}

/// Looks again and again until there is something, for as long as anyone would wait.
pub(crate) async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
