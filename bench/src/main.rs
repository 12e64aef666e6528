//! Benchmarks a real `muster serve` on this host and prints one table.
//!
//! The cost of a request is the server's CPU time, not the latency: the load generator shares the cores with the server.
//! `GET /livez` does nothing but HTTP and is the baseline of other requests. A round interleaves its measurements in
//! slices, so that noise affects all of them alike; the table has the median of the rounds.
//!
//! The cost of a request includes writing its events to the database later. A second server that only spools its events
//! shows the cost of the request alone.

mod agents;
mod allocation;
mod bare;
mod exchanges;
mod images;
mod instances;
mod instances_real;
mod load;
mod mariadb;
mod namespace;
mod networks;
mod port;
mod server;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Parser;
use load::{Pool, request};
use mariadb::MariaDb;
use muster_control::store::{Retry, Store, Tx, TxError};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use server::Server;
use table::{Row, Table};
use tokio::signal::unix::{SignalKind, signal};

const CONNECTIONS: usize = 64;
const ROUNDS: usize = 3;
/// The number of interleaved slices of a round.
const SLICES: usize = 10;
const CALLS: usize = 20_000;
const NAMESPACES: usize = 10_000;
/// How long events are recorded, in seconds.
const RECORDING_SECONDS: usize = 10;
/// The target rate of recorded and drained events per second.
const EVENT_RATE: f64 = 10_000.0;
/// The events of a read if reads are recorded: request received, token used, response sent.
const EVENTS_PER_READ: usize = 3;
/// How long the idle server is observed.
const IDLE_PERIOD: Duration = Duration::from_secs(5);

#[derive(Debug, Parser)]
#[command(about = "Benchmarks muster and prints one table; exits with 1 if a target is missed")]
struct Arguments {
    /// Make a tenth of the requests
    #[arg(long)]
    quick: bool,
    /// Run only the benchmarks of uploads and downloads
    #[arg(long)]
    images: bool,
    /// Run only the benchmarks of instances, on simulated nodes and on this host
    #[arg(long)]
    instances: bool,
    /// Run only the benchmarks of identity token exchanges
    #[arg(long)]
    exchanges: bool,
    /// Run only the benchmarks of the agent in real guests
    #[arg(long)]
    agent: bool,
    /// Skip MariaDB
    #[arg(long)]
    sqlite: bool,
    /// The disk image of real instances
    #[arg(long, value_name = "PATH", default_value = "target/image/tiny.qcow2")]
    image: PathBuf,
    /// Benchmark real networks, in a network namespace of its own
    #[arg(long, hide = true)]
    real_networks: bool,
    /// Benchmark real instances, with all data in this directory, in a network namespace of its own
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    real_instances: Option<PathBuf>,
    /// Benchmark real agents, with all data in this directory, in a network namespace of its own
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    real_agents: Option<PathBuf>,
    /// The server program [default: muster next to this program]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

impl Arguments {
    /// Returns whether this is a child process in a namespace, whose parent prints the table.
    fn is_child(&self) -> bool {
        self.real_networks || self.real_instances.is_some() || self.real_agents.is_some()
    }
}

type Settings = Vec<(String, String)>;

/// A database engine to benchmark.
struct Engine {
    name: &'static str,
    settings: Settings,
    /// Settings of the server that only spools its events.
    spooling: Settings,
    /// Whether the targets apply to it.
    has_targets: bool,
}

/// The size of the benchmark.
#[derive(Clone, Copy)]
struct Scale {
    calls: usize,
    namespaces: usize,
    seconds: usize,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(table) if arguments.is_child() => {
            println!("{}", table.to_json());
            ExitCode::SUCCESS
        }
        Ok(table) => {
            println!("{table}");
            match table.missed_targets() {
                0 => ExitCode::SUCCESS,
                missed => {
                    eprintln!("{missed} targets missed");
                    ExitCode::FAILURE
                }
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(arguments: &Arguments) -> anyhow::Result<Table> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        table = measure_all(arguments) => table,
        // Child processes are killed on drop.
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("terminated"),
    }
}

async fn measure_all(arguments: &Arguments) -> anyhow::Result<Table> {
    let program = match &arguments.server {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("muster"),
    };
    let mut table = Table::default();
    if !measure_selected(arguments, &program, &mut table).await? {
        measure_everything(arguments, &program, &mut table).await?;
    }
    Ok(table)
}

/// Runs the benchmarks that the arguments select. Returns false if they select none.
async fn measure_selected(arguments: &Arguments, program: &Path, table: &mut Table) -> anyhow::Result<bool> {
    let quick = arguments.quick;
    if arguments.real_networks {
        networks::measure_real(program, if quick { 10 } else { 1 }, table).await?;
    } else if let Some(directory) = &arguments.real_instances {
        instances_real::measure(program, directory, &arguments.image, quick, table).await?;
    } else if let Some(directory) = &arguments.real_agents {
        agents::measure(program, directory, &arguments.image, quick, table).await?;
    } else if arguments.agent {
        agents::measure_in_namespace(arguments, program, table).await.context("agents")?;
    } else if arguments.exchanges {
        exchanges::measure(program, quick, table).await.context("exchanges")?;
    } else if arguments.instances {
        instances::measure(program, quick, table).await.context("simulated instances")?;
        instances_real::measure_in_namespace(arguments, program, table).await.context("real instances")?;
    } else if arguments.images {
        images::measure(program, quick, table).await.context("images")?;
    } else {
        return Ok(false);
    }
    Ok(true)
}

async fn measure_everything(arguments: &Arguments, program: &Path, table: &mut Table) -> anyhow::Result<()> {
    let quick = arguments.quick;
    let divisor = if quick { 10 } else { 1 };
    let scale = Scale {
        calls: CALLS / divisor,
        namespaces: NAMESPACES / divisor,
        seconds: RECORDING_SECONDS / divisor,
    };
    let directory = tempfile::tempdir()?;
    let sqlite = Engine { name: "SQLite", settings: vec![], spooling: vec![], has_targets: true };
    measure(program, directory.path(), &sqlite, scale, table).await.context("with SQLite")?;
    drop(directory);
    exchanges::measure(program, quick, table).await.context("exchanges")?;
    images::measure(program, quick, table).await.context("images")?;
    allocation::measure(quick, table).await.context("address allocation")?;
    networks::measure_in_namespace(arguments, program, table).await.context("real networks")?;
    instances::measure(program, quick, table).await.context("simulated instances")?;
    instances_real::measure_in_namespace(arguments, program, table).await.context("real instances")?;
    agents::measure_in_namespace(arguments, program, table).await.context("agents")?;
    if arguments.sqlite {
        return Ok(());
    }

    let directory = tempfile::tempdir()?;
    progress("starting MariaDB");
    let Some(mariadb) = MariaDb::start(directory.path()).await? else {
        table.section("MariaDB");
        table.add(Row::new("not measured", "mariadbd is not installed"));
        return Ok(());
    };
    let [settings, spooling] = mariadb.urls.clone().map(|url| vec![("MUSTER_DATABASE_URL".to_owned(), url)]);
    let engine = Engine { name: "MariaDB", settings, spooling, has_targets: false };
    let result = measure(program, directory.path(), &engine, scale, table).await;
    mariadb.stop().await?;
    result.context("with MariaDB")
}

/// Runs all benchmarks of one engine.
async fn measure(
    program: &Path,
    directory: &Path,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section(engine.name);
    let data = directory.join("data");
    progress(&format!("{}: start and idle", engine.name));
    let server = Server::start(program, &data, &engine.settings).await?;
    let idle = server.idle_load(IDLE_PERIOD).await?;
    let start = format!("{:.0} ms", server.startup_time.as_secs_f64() * 1e3);

    // It drains the queue only at its start, and never drops events.
    let mut spooling = engine.spooling.clone();
    spooling.push(("MUSTER_DRAIN_POLL_INTERVAL".into(), "3600".into()));
    spooling.push(("MUSTER_SPOOL_HIGH_WATER_MARK".into(), "10000000".into()));
    let spooling = Server::start(program, &directory.join("spooling"), &spooling).await?;
    measure_calls(&server, &spooling, engine, scale, table).await?;
    networks::measure(&server, engine, scale, table).await?;
    // Killed, because a graceful shutdown would drain the queue.
    drop(spooling);
    let after_calls = server.memory()?;
    server.stop().await?;

    progress(&format!("{}: events", engine.name));
    let mut settings = engine.settings.clone();
    settings.push(("MUSTER_API_REQUEST_EVENTS_FOR_READS".into(), "true".into()));
    let server = Server::start(program, &data, &settings).await?;
    measure_events(&server, engine, scale, table).await?;
    // The longest response once more: memory is compared after the same requests.
    list(&server, scale.namespaces, &server.token().await?).await?;
    let memory = server.memory()?.max(after_calls);
    server.stop().await?;

    table.add(Row::new("resident memory afterwards", format!("{memory:.1} MB")).target_if(
        engine.has_targets,
        "< 60 MB",
        memory < 60.0,
    ));
    table.add(Row::new("process start to /readyz", start));
    table.add(Row::new("idle", format!("{:.2} % of a core", idle * 100.0)));
    Ok(())
}

/// Measures the cost of requests. `spooling` is a server that does not drain its events.
async fn measure_calls(
    server: &Server,
    spooling: &Server,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    let namespaces = scale.namespaces;
    progress(&format!("{}: creating {namespaces} namespaces", engine.name));
    let token = server.token().await?;
    let create = {
        let token = token.clone();
        move |number: usize| {
            let body = json!({ "namespace": name(number) });
            request("POST", "/auth/namespaces", Some(&token), Some(&body))
        }
    };
    let began = Instant::now();
    let created = LoadGenerator::new(server).await?.cost_with_events(namespaces, create).await?;
    let created_in = began.elapsed();

    let costs = sample_costs(server, spooling, engine, scale, &token).await?;
    // Each request is compared with the baseline of its own round.
    let multiple = |calls: &[f64]| {
        median(calls.iter().zip(&costs.baselines).map(|(call, baseline)| call / baseline).collect())
    };
    let row = |label: &str, calls: &[f64]| {
        Row::new(label, format!("{:.1} µs CPU", median(calls.to_vec()))).multiple(multiple(calls))
    };
    let (get_multiple, login_multiple) = (multiple(&costs.gets), multiple(&costs.logins));
    let (listed, limit) = (median(costs.lists), namespaces / 100);
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let is_met = listed < limit as f64;

    table.add(row("GET /livez (baseline)", &costs.baselines));
    table.add(row("GET /auth/namespaces/{ns}", &costs.gets).target_if(
        engine.has_targets,
        "<= 5 x",
        get_multiple <= 5.0,
    ));
    table.add(row("POST /auth, generated secret", &costs.logins).target_if(
        engine.has_targets,
        "<= 6 x",
        login_multiple <= 6.0,
    ));
    table.add(row("  without draining events", &costs.spooled_logins));
    table.add(
        Row::new(format!("GET /auth/namespaces with {namespaces} namespaces"), format!("{listed:.1} ms CPU"))
            .target_if(engine.has_targets, format!("< {limit} ms"), is_met),
    );
    table.add(row("POST /auth/namespaces", &[micros(created, namespaces); ROUNDS]));
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let rate = namespaces as f64 / created_in.as_secs_f64();
    table.add(Row::new("  rate with 64 connections", format!("{rate:.0} per second")));
    Ok(())
}

/// The CPU time of requests, one value per round: microseconds, and milliseconds for lists.
#[derive(Default)]
struct RequestCosts {
    baselines: Vec<f64>,
    gets: Vec<f64>,
    logins: Vec<f64>,
    spooled_logins: Vec<f64>,
    lists: Vec<f64>,
}

async fn sample_costs(
    server: &Server,
    spooling: &Server,
    engine: &Engine,
    scale: Scale,
    token: &str,
) -> anyhow::Result<RequestCosts> {
    let Scale { calls, namespaces, .. } = scale;
    let livez = request("GET", "/livez", None, None);
    let get = request("GET", &format!("/auth/namespaces/{}", name(namespaces / 2)), Some(token), None);
    let mut costs = RequestCosts::default();
    for round in 1..=ROUNDS {
        progress(&format!("{}: calls, round {round} of {ROUNDS}", engine.name));
        let (mut load, mut spooling_load) =
            (LoadGenerator::new(server).await?, LoadGenerator::new(spooling).await?);
        let slice = calls / SLICES;
        let mut sums = [Duration::ZERO; 4];
        for _ in 0..SLICES {
            sums[0] += load.cost(slice, repeat(&livez)).await?;
            sums[1] += load.cost(slice, repeat(&get)).await?;
            sums[2] += load.cost_with_events(slice, repeat(&server.login())).await?;
            sums[3] += spooling_load.cost(slice, repeat(&spooling.login())).await?;
        }
        let series = [&mut costs.baselines, &mut costs.gets, &mut costs.logins, &mut costs.spooled_logins];
        for (all, sum) in series.into_iter().zip(sums) {
            all.push(micros(sum, calls));
        }
        let began = server.cpu()?;
        list(server, namespaces, token).await?;
        costs.lists.push((server.cpu()? - began).as_secs_f64() * 1e3);
    }
    Ok(costs)
}

/// Measures whether events are recorded and drained at the target rate without loss.
async fn measure_events(
    server: &Server,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    let token = server.token().await?;
    server.wait_until_drained().await?;
    let inserted = server.metric("database_events_inserted_total").await?;
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let rate = EVENT_RATE * 1.02 / EVENTS_PER_READ as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
    let reads = (rate * scale.seconds as f64) as usize;
    let get = request("GET", &format!("/auth/namespaces/{}", name(0)), Some(&token), None);
    let mut pool = Pool::open(server.address, CONNECTIONS).await?;
    let elapsed = pool.run(reads, Some(rate), repeat(&get)).await?;
    let queued = server.metric("eventlog_spool_depth").await?;
    let ended = Instant::now();
    server.wait_until_drained().await?;
    let drain = ended.elapsed();

    #[expect(clippy::cast_precision_loss, reason = "a count of events")]
    let recorded = (reads * EVENTS_PER_READ) as f64;
    let arrived = server.metric("database_events_inserted_total").await? - inserted;
    let dropped = server.metric("eventlog_spool_dropped_total").await?;
    let reached = recorded / elapsed.as_secs_f64();
    table.add(
        Row::new(
            format!("event rate over {:.1} s", elapsed.as_secs_f64()),
            format!("{reached:.0} per second"),
        )
        .target_if(engine.has_targets, ">= 10000 per second", reached >= EVENT_RATE),
    );
    table.add(
        Row::new(
            "events dropped, and missing in the database",
            format!("{dropped:.0} and {:.0}", (recorded - arrived).max(0.0)),
        )
        .target("0 and 0", dropped == 0.0 && arrived >= recorded),
    );
    table.add(Row::new(
        "events queued at the end, and time to drain them",
        format!("{queued:.0}, {:.0} ms", drain.as_secs_f64() * 1e3),
    ));
    Ok(())
}

/// Sends requests on all connections and measures the CPU time of the server.
struct LoadGenerator<'a> {
    server: &'a Server,
    pool: Pool,
}

impl<'a> LoadGenerator<'a> {
    /// Opens the connections and uses them, so that the server has accepted all of them.
    async fn new(server: &'a Server) -> anyhow::Result<Self> {
        let mut pool = Pool::open(server.address, CONNECTIONS).await?;
        pool.run(CONNECTIONS * 10, None, repeat(&request("GET", "/livez", None, None))).await?;
        Ok(Self { server, pool })
    }

    /// Returns the CPU time of the server for `count` requests.
    async fn cost<R>(&mut self, count: usize, call: R) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let began = self.server.cpu()?;
        self.pool.run(count, None, call).await?;
        Ok(self.server.cpu()? - began)
    }

    /// Like [`Self::cost`], including the CPU time for draining the events.
    async fn cost_with_events<R>(&mut self, count: usize, call: R) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let began = self.server.cpu()?;
        self.pool.run(count, None, call).await?;
        self.server.wait_until_drained().await?;
        Ok(self.server.cpu()? - began)
    }
}

/// Returns the microseconds per request.
fn micros(total: Duration, calls: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let calls = calls as f64;
    total.as_secs_f64() * 1e6 / calls
}

/// Lists all namespaces and checks that the response is complete and streamed.
async fn list(server: &Server, count: usize, token: &str) -> anyhow::Result<()> {
    let response = load::call(server.address, &request("GET", "/auth/namespaces", Some(token), None)).await?;
    let streamed = response.chunked;
    let listed: Vec<Value> = serde_json::from_slice(&response.ok()?)?;
    ensure!(listed.len() == count + 1, "{} namespaces listed instead of {}", listed.len(), count + 1);
    ensure!(streamed, "the response is not streamed");
    Ok(())
}

fn name(number: usize) -> String {
    format!("bench-{number:05}")
}

/// Returns a function that repeats one request.
fn repeat(request: &Arc<[u8]>) -> impl Fn(usize) -> Arc<[u8]> + Send + Sync + 'static {
    let request = Arc::clone(request);
    move |_| Arc::clone(&request)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn progress(what: &str) {
    eprintln!("… {what}");
}

/// Returns the CPU time of this process.
fn process_cpu_time() -> anyhow::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

/// Runs a transaction, with retries as in the control plane.
async fn transaction<T>(
    store: &Store,
    body: impl AsyncFn(&mut Tx) -> Result<T, TxError>,
) -> anyhow::Result<T> {
    let mut retry = Retry::default();
    loop {
        let mut tx = store.begin().await?;
        let outcome = body(&mut tx).await;
        if let Some(end) = tx.finish(outcome, &mut retry).await {
            return Ok(end?);
        }
    }
}
