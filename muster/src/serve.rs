//! `muster serve`: starts the parts of the daemon, and stops them in order.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
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
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::state::{DataDir, TAKEOVER_TIMEOUT};
use crate::{config, logging, memory, metrics, node_port};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Directory for the data of the cluster
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Address to serve the API on [default: 127.0.0.1 with the port API_PORT]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Serve the API on the listening socket that is standard input
    #[arg(long, hide = true, conflicts_with = "listen")]
    listen_stdin: bool,
    /// Run this many simulated nodes instead of this host; needs neither root nor QEMU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    simulate: Option<u16>,
    /// Number of the first simulated node; daemons with one database need different ones
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "simulate", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    simulate_from: u16,
    /// Publish a disk image to all namespaces as sf://upload/system/NAME with the label NAME
    #[arg(long, value_name = "NAME=FILE", value_parser = parse_image)]
    image: Vec<(String, PathBuf)>,
    /// Settings file with one NAME = value per line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

fn parse_image(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text.split_once('=').ok_or("must be NAME=FILE")?;
    Ok((name.to_owned(), PathBuf::from(file)))
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let settings = config::load(arguments.config.as_deref())?;
    logging::init(&settings);
    raise_file_limit();
    let mut signals =
        Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let mut daemon = tokio::select! {
        daemon = start(arguments, settings) => daemon?,
        () = signals.any() => bail!("interrupted during startup"),
    };
    let (app, stop_work) = (Arc::clone(&daemon.app), daemon.stop_work.clone());
    let failure = tokio::select! {
        () = signals.wait_and_drain(&app) => None,
        task = daemon.ended.recv() => task.map(|task| format!("task {task} ended unexpectedly; see the log")),
        reason = lost(&app, &stop_work) => {
            tracing::error!(reason, "stopping, because this daemon is not a member of the cluster any longer");
            if let Err(error) = reconcile::checkin::stop_deleted_nodes(&app).await {
                tracing::error!(%error, "failed to stop the VMs of a deleted node");
            }
            // Until the end, the API responds with the reason.
            signals.drain(&app, app.settings.api_drain_grace).await;
            Some(format!(
                "{reason}: its VMs keep running unless the node was deleted; in that case, run `muster node adopt --data-dir {}` before the \
                 next start, to let this host join as a new node",
                daemon.data.path().display()
            ))
        }
    };
    daemon.shut_down().await;
    failure.map_or(Ok(()), |failure| Err(anyhow!(failure)))
}

/// Waits until the last node of this daemon is fenced, stops all work, and returns the reason.
async fn lost(app: &App, stop_work: &watch::Sender<bool>) -> String {
    let mut lost = app.store.membership.lost();
    let reason = lost.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    stop_work.send_replace(true);
    reason.unwrap_or_default()
}

/// How long a daemon that cannot join waits for its events to be written.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Raises the limit of open files to its maximum, because connections and transfers need many.
fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "failed to raise the limit of open files");
    }
}

/// Binds the socket, waiting briefly for a killed daemon to release the port.
pub(crate) async fn bind(listen: SocketAddr) -> io::Result<TcpListener> {
    let started = Instant::now();
    loop {
        match TcpListener::bind(listen).await {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && started.elapsed() < TAKEOVER_TIMEOUT =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            bound => return bound,
        }
    }
}

/// Takes the listening socket that is standard input, which is closed.
fn inherited_socket() -> anyhow::Result<TcpListener> {
    let socket = std::net::TcpListener::from(io::stdin().as_fd().try_clone_to_owned()?);
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from_std(socket)?)
}

/// Starts all parts in order.
async fn start(arguments: Arguments, settings: Settings) -> anyhow::Result<Daemon> {
    let tls = load_tls(&settings)?;
    let listen = arguments.listen.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, settings.api_port).into());
    let socket = match arguments.listen_stdin {
        true => inherited_socket().context("standard input")?,
        false => bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?,
    };
    let address = socket.local_addr()?;
    let data = DataDir::open(&arguments.data_dir).await?;

    let database_url = database_url(&settings, data.path());
    let is_shared = !database_url.expose().starts_with("sqlite:");
    let node_socket = node_port::bind(&settings, &database_url, address.ip()).await?;
    let (store, secret_seed) = open_store(&settings, &data).await?;
    let store = Arc::new(store);

    let scheme = if tls.is_some() { "https" } else { "http" };
    let nodes = create_nodes(&arguments, &settings, &data, scheme, address)?;
    let Some(first) = nodes.first() else { bail!("the daemon has no node") };
    let name = first.identity().name.clone();
    let spool = data.path().join("spool/eventlog");
    let events = Events::open(&spool, &name, &settings).with_context(|| spool.display().to_string())?;
    let drainer = Drainer::new(&events, &spool, &settings).with_context(|| spool.display().to_string())?;
    let app =
        App::new(store, settings, events, &secret_seed, nodes).with_lock_file(data.lock_file(is_shared)?);
    let app = Arc::new(app);

    let apiurl = format!("{scheme}://{}", local_address(address));
    let mut saved = false;
    let save = |key: &Secret| {
        saved = true;
        data.write_credentials(key, &apiurl).map_err(|error| format!("{error:#}"))
    };
    let first_start = objects::key::bootstrap(&app, &app.settings.system_key, save).await?;
    match (first_start, saved) {
        (true, true) => tracing::info!(file = %data.credentials().display(), "wrote the first key"),
        (false, true) => data.remove_credentials()?,
        (false, false) if !app.settings.system_key.expose().is_empty() => {
            tracing::info!("ignoring SYSTEM_KEY: the cluster already has its first key");
        }
        _ => {}
    }
    data.update_credentials(&apiurl)?;
    objects::network::bootstrap(&app).await?;
    let node_listener = match node_socket {
        Some(socket) => Some(node_port::listener(&app, socket).await?),
        None => None,
    };
    if let Err(error) = reconcile::checkin::join(&app).await {
        // The events say what happened to the VMs of a deleted node.
        let (_, stopped) = watch::channel(true);
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, drainer.run(Arc::clone(&app.store), stopped)).await;
        return Err(error.into());
    }
    data.finish_move()?;

    let (service, _) = muster_api::service(&app);
    let listener = Listener {
        socket,
        tls,
        timeout: Duration::from_secs(app.settings.api_timeout),
        max_connections: usize::try_from(app.settings.api_max_connections)?,
    };
    publish_images(Arc::clone(&app), arguments.image);
    let daemon = Daemon::start(app, data, drainer, (listener, node_listener), address.ip(), service);
    tracing::info!(url = apiurl, node = name, data = %daemon.data.path().display(), "serving");
    // The daemon serves from here on, so a signal must shut it down in order instead of interrupting its start.
    let app = Arc::clone(&daemon.app);
    tokio::spawn(async move { print_login_url(&app, &apiurl).await });
    Ok(daemon)
}

/// Prints the URL of the web UI, with a ticket for the first key if that exists. The log has no ticket.
async fn print_login_url(app: &App, apiurl: &str) {
    let ticket = objects::session::create_first_ticket(app).await.unwrap_or_else(|error| {
        tracing::warn!(%error, "failed to create a login ticket");
        None
    });
    let text = match ticket {
        Some(ticket) => {
            format!("web UI, for one login within a minute: {apiurl}/ui/#ticket={}\n", ticket.ticket)
        }
        None => format!("web UI: {apiurl}/ui/\n"),
    };
    if let Err(error) = crate::stdout::print(text.as_bytes()) {
        tracing::debug!(%error, "failed to print the URL of the web UI");
    }
}

/// Imports the images of the operator in the background.
fn publish_images(app: Arc<App>, images: Vec<(String, PathBuf)>) {
    tokio::spawn(async move {
        for (name, file) in images {
            match objects::import::run(&app, &name, &file).await {
                Ok(artifact) => tracing::info!(name, artifact = %artifact.uuid, "published image"),
                Err(error) => {
                    tracing::error!(name, file = %file.display(), %error, "failed to publish image");
                }
            }
        }
    });
}

/// Opens the configured database and checks its secret seed.
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
        bail!("AUTH_SECRET_SEED differs from that of the cluster: set the same value on every node");
    }
    Ok((store, seed))
}

/// A running daemon: its tasks, in groups that are stopped separately.
struct Daemon {
    app: Arc<App>,
    data: DataDir,
    stop_api: watch::Sender<bool>,
    stop_work: watch::Sender<bool>,
    stop_drain: watch::Sender<bool>,
    /// Receives the names of tasks that end. No task should end before it is stopped.
    ended: mpsc::Receiver<&'static str>,
    api: Vec<JoinHandle<()>>,
    workers: Vec<JoinHandle<()>>,
    monitors: Vec<JoinHandle<()>>,
    event_drainer: JoinHandle<()>,
}

impl Daemon {
    fn start(
        app: Arc<App>,
        data: DataDir,
        drainer: Drainer,
        (listener, node_listener): (Listener, Option<Listener>),
        api_address: IpAddr,
        service: muster_api::Service,
    ) -> Self {
        let (stop_api, stop_work, stop_drain) =
            (watch::Sender::new(false), watch::Sender::new(false), watch::Sender::new(false));
        let handle = move |request, peer| {
            let service = service.clone();
            async move { service.call(request, peer).await }
        };
        let (report, ended) = mpsc::channel(8);
        let run = |name, task: Pin<Box<dyn Future<Output = ()> + Send>>| {
            let report = report.clone();
            tokio::spawn(async move {
                // Dropped when the task ends, also by a panic.
                let _guard = TaskEndGuard { name, report };
                task.await;
            })
        };
        let start_tasks = |runs_on, stop: &watch::Sender<bool>| {
            let tasks = TASKS.iter().filter(move |task| task.runs_on == runs_on);
            let (app, run, stop) = (Arc::clone(&app), &run, stop.subscribe());
            tasks.map(move |task| run(task.name, task.start(Arc::clone(&app), stop.clone())))
        };
        let worker = Arc::new(Worker::new(Arc::clone(&app)));
        let metrics_server =
            metrics::serve(Arc::clone(&app), api_address, listener.tls.clone(), stop_api.subscribe());
        Self {
            api: [("api", Some(listener)), ("node calls", node_listener)]
                .into_iter()
                .filter_map(|(name, listener)| Some((name, listener?)))
                .map(|(name, listener)| {
                    run(name, Box::pin(muster_api::serve(listener, handle.clone(), stop_api.subscribe())))
                })
                .collect(),
            workers: start_tasks(RunsOn::EveryDaemon, &stop_work)
                .chain([run("operations", worker.run(stop_work.subscribe()))])
                .collect(),
            monitors: start_tasks(RunsOn::EveryDaemonWhileDraining, &stop_work)
                .chain([tokio::spawn(metrics_server), tokio::spawn(memory::release_freed())])
                .collect(),
            event_drainer: run(
                "events",
                Box::pin(drainer.run(Arc::clone(&app.store), stop_drain.subscribe())),
            ),
            app,
            data,
            ended,
            stop_api,
            stop_work,
            stop_drain,
        }
    }

    /// Stops the API first, then the workers, and last the event drainer, which writes the events of both.
    async fn shut_down(self) {
        let app = &self.app;
        let timeout = Duration::from_secs(10);
        self.stop_api.send_replace(true);
        for server in self.api {
            let _ = tokio::time::timeout(timeout, server).await;
        }
        // A change continues after its caller disconnects.
        let _ = tokio::time::timeout(timeout, app.changes_ended()).await;
        self.stop_work.send_replace(true);
        for task in self.workers {
            let _ = tokio::time::timeout(timeout, task).await;
        }
        self.monitors.iter().for_each(JoinHandle::abort);
        reconcile::checkin::leave(app).await;
        self.stop_drain.send_replace(true);
        if tokio::time::timeout(timeout, self.event_drainer).await.is_err() {
            tracing::warn!(events = app.events.depth(), "unwritten events remain for the next start");
        }
        app.traces.close().await;
        app.store.close().await;
        tracing::info!("stopped");
    }
}

/// Reports the end of a task when dropped.
struct TaskEndGuard {
    name: &'static str,
    report: mpsc::Sender<&'static str>,
}

impl Drop for TaskEndGuard {
    fn drop(&mut self) {
        // A full channel already contains a report.
        let _ = self.report.try_send(self.name);
    }
}

/// The signals that stop the daemon.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Waits for any of the signals.
    async fn any(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Waits for a signal and drains the daemon. After SIGTERM the API stays up for a grace period, so that load
    /// balancers notice; SIGINT or a second signal ends it immediately.
    async fn wait_and_drain(&mut self, app: &App) {
        let grace = tokio::select! {
            _ = self.interrupt.recv() => 0,
            _ = self.terminate.recv() => app.settings.api_drain_grace,
        };
        self.drain(app, grace).await;
    }

    /// Makes the daemon not ready, and waits for `grace` seconds or a signal.
    async fn drain(&mut self, app: &App, grace: u64) {
        app.health.drain();
        tracing::info!(seconds = grace, "draining");
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(grace)) => {}
            () = self.any() => {}
        }
    }
}

/// Creates the nodes that this daemon runs: the host, or simulated ones.
fn create_nodes(
    arguments: &Arguments,
    settings: &Settings,
    data: &DataDir,
    scheme: &str,
    listen_address: SocketAddr,
) -> anyhow::Result<Vec<Arc<dyn NodeApi>>> {
    if let Some(count) = arguments.simulate {
        let first = usize::from(arguments.simulate_from);
        let numbers: Vec<usize> = (first..first + usize::from(count)).collect();
        let names: Vec<String> = numbers.iter().map(|number| format!("sim-{number}")).collect();
        let ids = data.node_ids(&names)?;
        let node = |(number, id): (usize, _)| -> Arc<dyn NodeApi> {
            let storage = data.path().join("simulated").join(number.to_string());
            let node = SimulatedNode::new(number, id, &storage);
            let shared = &settings.shared_storage;
            node.set_shared_storage((!shared.is_empty()).then(|| Path::new(shared)));
            Arc::new(node.with_api_url(format!("{scheme}://{}", local_address(listen_address))))
        };
        return Ok(numbers.into_iter().zip(ids).map(node).collect());
    }
    let id = if settings.node_uuid.is_empty() {
        data.host_node_id()?
    } else {
        settings.node_uuid.parse().map_err(|_| anyhow!("NODE_UUID is not a UUID"))?
    };
    let storage =
        if settings.storage_path.is_empty() { data.path() } else { Path::new(&settings.storage_path) };
    let node = LocalNode::new(id, settings, storage, listen_address.ip());
    // The address at which other nodes reach this daemon.
    let ip =
        if listen_address.ip().is_unspecified() { node.identity().ip.into() } else { listen_address.ip() };
    let url = format!("{scheme}://{}", SocketAddr::new(ip, listen_address.port()));
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

/// Returns the URL of the configured database.
pub(crate) fn database_url(settings: &Settings, data: &Path) -> Secret {
    if !settings.database_url.expose().is_empty() {
        return settings.database_url.clone();
    }
    Secret::new(format!("sqlite:{}", data.join("muster.db").display()))
}

/// Returns the address at which this host reaches the API.
pub(crate) fn local_address(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    let loopback: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(loopback, address.port())
}
