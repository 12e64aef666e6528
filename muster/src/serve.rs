//! `muster serve`: puts the parts together, runs them, and takes them apart in order.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use muster_api::{Listener, Tls};
use muster_control::events::{Drainer, Events};
use muster_control::operations::Worker;
use muster_control::reconcile::task::RunsOn;
use muster_control::reconcile::tasks::TASKS;
use muster_control::{App, objects, reconcile};
use muster_node::{LocalNode, SimulatedNode};
use muster_store::{Store, seed};
use muster_types::key::Secret;
use muster_types::node::NodeApi;
use muster_types::settings::{Settings, mask_password};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::state::{DataDir, LINGER};
use crate::{config, logging};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Where the cluster's data is kept
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Address of the API [default: 127.0.0.1 and the port of API_PORT]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Run this many simulated nodes instead of this machine: no root and no QEMU needed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    simulate: Option<u16>,
    /// Offer this disk image to everybody as sf://upload/system/NAME, with the label NAME
    #[arg(long, value_name = "NAME=FILE", value_parser = parse_image)]
    image: Vec<(String, PathBuf)>,
    /// File of settings, one NAME = value a line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

fn parse_image(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text.split_once('=').ok_or("must be NAME=FILE")?;
    Ok((name.to_owned(), PathBuf::from(file)))
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let settings = config::load(arguments.config.as_deref())?;
    logging::start(&settings);
    allow_many_files();
    let mut signals =
        Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let daemon = tokio::select! {
        daemon = start(arguments, settings) => daemon?,
        () = signals.any() => bail!("stopped before it served"),
    };
    let mut daemon = daemon;
    let failed = tokio::select! {
        () = signals.wait_and_drain(&daemon.app) => None,
        task = daemon.ended.recv() => task,
    };
    daemon.end().await;
    match failed {
        Some(task) => bail!("the task {task} ended by itself; see the log"),
        None => Ok(()),
    }
}

/// Takes all the file descriptors that the machine grants: every connection, and every content on its way, needs some.
fn allow_many_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "the number of open files was not raised");
    }
}

/// Listens, as soon as the port is free.
async fn bind(listen: SocketAddr) -> io::Result<TcpListener> {
    let began = Instant::now();
    loop {
        match TcpListener::bind(listen).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && began.elapsed() < LINGER => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            bound => return bound,
        }
    }
}

/// Brings everything up, in order.
async fn start(arguments: Arguments, settings: Settings) -> anyhow::Result<Daemon> {
    let tls = load_tls(&settings)?;
    let listen =
        arguments.listen.unwrap_or_else(|| (std::net::Ipv4Addr::LOCALHOST, settings.api_port).into());
    let socket = bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    let address = socket.local_addr()?;
    let data = DataDir::open(&arguments.data_dir).await?;

    let (store, secret_seed) = open_store(&settings, &data).await?;
    let store = Arc::new(store);

    let scheme = if tls.is_some() { "https" } else { "http" };
    let nodes = nodes(&arguments, &settings, &data, scheme, address)?;
    let Some(first) = nodes.first() else { bail!("a daemon needs a node") };
    let name = first.identity().name.clone();
    let spool = data.path().join("spool/eventlog");
    let events = Events::open(&spool, &name, &settings).with_context(|| spool.display().to_string())?;
    let drainer = Drainer::new(&events, &spool, &settings).with_context(|| spool.display().to_string())?;
    let app = Arc::new(App::new(store, settings, events, &secret_seed, nodes));

    let apiurl = format!("{scheme}://{}", reachable(address));
    let mut kept = false;
    let keep = |key: &Secret| {
        kept = true;
        data.write_credentials(key, &apiurl).map_err(|error| format!("{error:#}"))
    };
    let first_start = objects::key::bootstrap(&app, &app.settings.system_key, keep).await?;
    match (first_start, kept) {
        (true, true) => tracing::info!(file = %data.credentials().display(), "first key written"),
        (false, true) => data.remove_credentials()?,
        (false, false) if !app.settings.system_key.expose().is_empty() => {
            tracing::info!("SYSTEM_KEY is not used: the cluster has had its first key");
        }
        _ => {}
    }
    data.update_credentials(&apiurl)?;
    objects::network::bootstrap(&app).await?;
    reconcile::checkin::join(&app).await?;

    let (service, _) = muster_api::service(&app);
    let listener = Listener {
        socket,
        tls,
        patience: Duration::from_secs(app.settings.api_timeout),
        most_connections: usize::try_from(app.settings.api_max_connections)?,
    };
    import(Arc::clone(&app), arguments.image);
    let daemon = Daemon::start(app, data, drainer, listener, service);
    tracing::info!(url = apiurl, node = name, data = %daemon.data.path().display(), "serving");
    Ok(daemon)
}

/// Takes in the images that the operator offers, while the daemon already serves.
fn import(app: Arc<App>, images: Vec<(String, PathBuf)>) {
    tokio::spawn(async move {
        for (name, file) in images {
            match objects::import::run(&app, &name, &file).await {
                Ok(artifact) => tracing::info!(name, artifact = %artifact.uuid, "image offered"),
                Err(error) => tracing::error!(name, file = %file.display(), %error, "image not offered"),
            }
        }
    });
}

/// The database that the settings name, and the seed that belongs to it.
pub(crate) async fn open_store(settings: &Settings, data: &DataDir) -> anyhow::Result<(Store, Secret)> {
    let url = database_url(settings, data.path());
    let store = Store::open(url.expose())
        .await
        .with_context(|| format!("database {}", mask_password(url.expose())))?;
    let seed = if settings.auth_secret_seed.expose().is_empty() {
        data.seed()?
    } else {
        settings.auth_secret_seed.clone()
    };
    if !seed::matches_cluster(&store, &seed).await? {
        bail!("AUTH_SECRET_SEED differs from the one this cluster was made with: set the same on every node");
    }
    Ok((store, seed))
}

/// A running daemon: its tasks, each group with its own word to stop.
struct Daemon {
    app: Arc<App>,
    data: DataDir,
    stop_api: watch::Sender<bool>,
    stop_work: watch::Sender<bool>,
    stop_drain: watch::Sender<bool>,
    /// Names tasks that end, which none should before it is told to.
    ended: mpsc::Receiver<&'static str>,
    serving: JoinHandle<()>,
    working: Vec<JoinHandle<()>>,
    watching: Vec<JoinHandle<()>>,
    draining: JoinHandle<()>,
}

impl Daemon {
    fn start(
        app: Arc<App>,
        data: DataDir,
        drainer: Drainer,
        listener: Listener,
        service: muster_api::Service,
    ) -> Self {
        let (stop_api, stop_work, stop_drain) =
            (watch::Sender::new(false), watch::Sender::new(false), watch::Sender::new(false));
        let address = listener.socket.local_addr().map_or(std::net::Ipv4Addr::LOCALHOST.into(), |a| a.ip());
        let answer = move |request, peer| {
            let service = service.clone();
            async move { service.call(request, peer).await }
        };
        let (report, ended) = mpsc::channel(8);
        let run = |name, task: Pin<Box<dyn Future<Output = ()> + Send>>| {
            let report = report.clone();
            tokio::spawn(async move {
                // Sent on the way out, also when the task panics.
                let _ended = Ended { name, report };
                task.await;
            })
        };
        let start_tasks = |runs_on, stop: &watch::Sender<bool>| {
            let tasks = TASKS.iter().filter(move |task| task.runs_on == runs_on);
            let (app, run, stop) = (Arc::clone(&app), &run, stop.subscribe());
            tasks.map(move |task| run(task.name, task.start(Arc::clone(&app), stop.clone())))
        };
        let worker = Arc::new(Worker::new(Arc::clone(&app)));
        let metrics = serve_metrics(Arc::clone(&app), address, stop_api.subscribe());
        Self {
            serving: run("api", Box::pin(muster_api::serve(listener, answer, stop_api.subscribe()))),
            working: start_tasks(RunsOn::EveryDaemon, &stop_work)
                .chain([run("operations", Box::pin(worker.run(stop_work.subscribe())))])
                .collect(),
            watching: start_tasks(RunsOn::EveryDaemonToTheEnd, &stop_work)
                .chain([tokio::spawn(metrics)])
                .collect(),
            draining: run("events", Box::pin(drainer.run(Arc::clone(&app.store), stop_drain.subscribe()))),
            app,
            data,
            ended,
            stop_api,
            stop_work,
            stop_drain,
        }
    }

    /// Takes the daemon apart: first the callers, then the work, last the events that both left.
    async fn end(self) {
        let app = &self.app;
        let patience = Duration::from_secs(10);
        self.stop_api.send_replace(true);
        let _ = tokio::time::timeout(patience, self.serving).await;
        // A caller who hung up does not end the change that it asked for.
        let _ = tokio::time::timeout(patience, app.changes_ended()).await;
        self.stop_work.send_replace(true);
        for task in self.working {
            let _ = tokio::time::timeout(patience, task).await;
        }
        self.watching.iter().for_each(JoinHandle::abort);
        reconcile::checkin::leave(app).await;
        self.stop_drain.send_replace(true);
        if tokio::time::timeout(patience, self.draining).await.is_err() {
            tracing::warn!(events = app.events.depth(), "events are left for the next start");
        }
        app.store.close().await;
        tracing::info!("stopped");
    }
}

/// Says that a task has ended when it is dropped.
struct Ended {
    name: &'static str,
    report: mpsc::Sender<&'static str>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        // A full channel means that somebody has said so already.
        let _ = self.report.try_send(self.name);
    }
}

/// The signals that end a daemon.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Waits for any.
    async fn any(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Waits for one. After SIGTERM the API goes on for a while so that others notice; a second signal, or
    /// SIGINT, ends the wait.
    async fn wait_and_drain(&mut self, app: &App) {
        let grace = tokio::select! {
            _ = self.interrupt.recv() => 0,
            _ = self.terminate.recv() => app.settings.api_drain_grace,
        };
        app.health.drain();
        tracing::info!(seconds = grace, "draining");
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(grace)) => {}
            () = self.any() => {}
        }
    }
}

/// Serves the metrics next to the API. A taken port is no reason not to run.
async fn serve_metrics(app: Arc<App>, ip: std::net::IpAddr, stop: watch::Receiver<bool>) {
    let port = app.settings.mariadb_gateway_metrics_port;
    if port == 0 {
        return;
    }
    let mut said = false;
    let socket = loop {
        match TcpListener::bind((ip, port)).await {
            Ok(socket) => break socket,
            Err(error) if !said => {
                tracing::warn!(port, %error, "metrics wait for MARIADB_GATEWAY_METRICS_PORT to be free");
                said = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
    };
    let listener = Listener { socket, tls: None, patience: Duration::from_secs(10), most_connections: 64 };
    let answer = move |request, _| {
        let app = Arc::clone(&app);
        async move { muster_api::metrics(&app, &request) }
    };
    muster_api::serve(listener, answer, stop).await;
}

fn nodes(
    arguments: &Arguments,
    settings: &Settings,
    data: &DataDir,
    scheme: &str,
    listens: SocketAddr,
) -> anyhow::Result<Vec<Arc<dyn NodeApi>>> {
    if let Some(count) = arguments.simulate {
        let numbers: Vec<usize> = (1..=usize::from(count)).collect();
        let names: Vec<String> = numbers.iter().map(|number| format!("sim-{number}")).collect();
        let ids = data.node_ids(&names)?;
        let node = |(number, id): (usize, _)| -> Arc<dyn NodeApi> {
            let storage = data.path().join("simulated").join(number.to_string());
            let node = SimulatedNode::new(number, id, &storage);
            Arc::new(node.with_api_url(format!("{scheme}://{}", reachable(listens))))
        };
        return Ok(numbers.into_iter().zip(ids).map(node).collect());
    }
    let id = match settings.node_uuid.parse() {
        Ok(id) => id,
        Err(_) => data.node_ids(&["this machine".to_owned()])?[0],
    };
    let storage =
        if settings.storage_path.is_empty() { data.path() } else { Path::new(&settings.storage_path) };
    let node = LocalNode::new(id, settings, storage);
    // Where the other nodes reach this daemon.
    let ip =
        if listens.ip().is_unspecified() { node.identity().ip.clone() } else { listens.ip().to_string() };
    let host = if ip.contains(':') { format!("[{ip}]") } else { ip };
    let url = format!("{scheme}://{host}:{}", listens.port());
    Ok(vec![Arc::new(node.with_api_url(url))])
}

fn load_tls(settings: &Settings) -> anyhow::Result<Option<Tls>> {
    if settings.tls_certificate.is_empty() {
        return Ok(None);
    }
    Tls::load(Path::new(&settings.tls_certificate), Path::new(&settings.tls_private_key))
        .map(Some)
        .map_err(anyhow::Error::msg)
        .context("TLS_CERTIFICATE and TLS_PRIVATE_KEY")
}

fn database_url(settings: &Settings, data: &Path) -> Secret {
    if !settings.database_url.expose().is_empty() {
        return settings.database_url.clone();
    }
    if settings.mariadb_host.is_empty() {
        return Secret::new(format!("sqlite:{}", data.join("muster.db").display()));
    }
    let Settings { mariadb_host, mariadb_port, mariadb_user, mariadb_password, mariadb_database, .. } =
        settings;
    let [user, password, database] = [mariadb_user, mariadb_password.expose(), mariadb_database]
        .map(|text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string());
    Secret::new(format!("mysql://{user}:{password}@{mariadb_host}:{mariadb_port}/{database}"))
}

/// The address by which this machine reaches the API.
fn reachable(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    let loopback: std::net::IpAddr = match address {
        SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(loopback, address.port())
}
