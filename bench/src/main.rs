//! Measures a real `muster serve` on this machine and prints one table.
//!
//! What counts is the processor time that the server uses for a call, not how long the call takes: the load
//! generator and whatever else runs here share the cores. `GET /livez` does nothing but HTTP and is the floor
//! that other calls are multiples of. A round measures the rows in turns, a slice of each at a time, so that a
//! noisy moment meets all of them; the median of the rounds is shown.
//!
//! The cost of a call includes that of writing its events to the database later. A second server that only spools
//! its events tells what answering alone costs.

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
use muster_store::{Retry, Store, Tx, TxError};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use server::Server;
use table::{Row, Table};
use tokio::signal::unix::{SignalKind, signal};

const CONNECTIONS: usize = 64;
const ROUNDS: usize = 3;
/// Parts that a round measures each row in.
const SLICES: usize = 10;
const CALLS: usize = 20_000;
const NAMESPACES: usize = 10_000;
/// Seconds of recording events.
const RECORDING: usize = 10;
/// Events a second that must be recorded and drained.
const EVENT_RATE: f64 = 10_000.0;
/// Events that a read leaves when reads are recorded: received, token used, answered.
const EVENTS_PER_READ: usize = 3;
const IDLE: Duration = Duration::from_secs(5);

#[derive(Debug, Parser)]
#[command(about = "Measures muster and prints one table; ends with 1 if a target is missed")]
struct Arguments {
    /// A tenth of the calls
    #[arg(long)]
    quick: bool,
    /// Only how images go in and out
    #[arg(long)]
    images: bool,
    /// Only instances: many on simulated nodes, and real ones on this machine
    #[arg(long)]
    instances: bool,
    /// Only exchanges of identity tokens for keys
    #[arg(long)]
    exchanges: bool,
    /// Only what agents in real guests do
    #[arg(long)]
    agent: bool,
    /// Only with SQLite
    #[arg(long)]
    sqlite: bool,
    /// The disk that real instances boot from
    #[arg(long, value_name = "PATH", default_value = "target/image/tiny.qcow2")]
    image: PathBuf,
    /// Only the networks of this machine, in whose network namespace nothing else is
    #[arg(long, hide = true)]
    real_networks: bool,
    /// Only real instances, with everything in this folder; in a network namespace as above
    #[arg(long, hide = true, value_name = "FOLDER")]
    real_instances: Option<PathBuf>,
    /// Only real agents, as above
    #[arg(long, hide = true, value_name = "FOLDER")]
    real_agents: Option<PathBuf>,
    /// The server to measure [default: muster next to this program]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

impl Arguments {
    /// Whether another run of this program prints what is measured here.
    fn is_inner(&self) -> bool {
        self.real_networks || self.real_instances.is_some() || self.real_agents.is_some()
    }
}

type Settings = Vec<(String, String)>;

/// A database to measure with.
struct Engine {
    name: &'static str,
    settings: Settings,
    /// Settings of the server that only spools.
    spooling: Settings,
    /// Whether the targets are meant for it; otherwise its numbers inform.
    has_targets: bool,
}

/// How much to do.
#[derive(Clone, Copy)]
struct Scale {
    calls: usize,
    namespaces: usize,
    seconds: usize,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(table) if arguments.is_inner() => {
            println!("{}", table.to_json());
            ExitCode::SUCCESS
        }
        Ok(table) => {
            println!("{table}");
            match table.missed() {
                0 => ExitCode::SUCCESS,
                missed => {
                    eprintln!("{missed} missed");
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
        // What was started is killed as it is dropped.
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("terminated"),
    }
}

async fn measure_all(arguments: &Arguments) -> anyhow::Result<Table> {
    let program = match &arguments.server {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("muster"),
    };
    let part = if arguments.quick { 10 } else { 1 };
    let scale = Scale { calls: CALLS / part, namespaces: NAMESPACES / part, seconds: RECORDING / part };
    let mut table = Table::default();
    if arguments.real_networks {
        networks::measure_real(&program, part, &mut table).await?;
        return Ok(table);
    }

    if let Some(folder) = &arguments.real_instances {
        instances_real::measure(&program, folder, &arguments.image, arguments.quick, &mut table).await?;
        return Ok(table);
    }

    if let Some(folder) = &arguments.real_agents {
        agents::measure(&program, folder, &arguments.image, arguments.quick, &mut table).await?;
        return Ok(table);
    }

    if arguments.agent {
        agents::measure_in_namespace(arguments, &program, &mut table).await.context("agents")?;
        return Ok(table);
    }
    if arguments.exchanges {
        exchanges::measure(&program, arguments.quick, &mut table).await.context("exchanges")?;
        return Ok(table);
    }
    if arguments.instances {
        instances::measure(&program, arguments.quick, &mut table).await.context("simulated instances")?;
        instances_real::measure_in_namespace(arguments, &program, &mut table)
            .await
            .context("real instances")?;
        return Ok(table);
    }
    if arguments.images {
        images::measure(&program, if arguments.quick { 8 } else { 1 }, &mut table).await.context("images")?;
        return Ok(table);
    }

    let folder = tempfile::tempdir()?;
    let sqlite = Engine { name: "SQLite", settings: vec![], spooling: vec![], has_targets: true };
    measure(&program, folder.path(), &sqlite, scale, &mut table).await.context("with SQLite")?;
    drop(folder);
    exchanges::measure(&program, arguments.quick, &mut table).await.context("exchanges")?;
    images::measure(&program, if arguments.quick { 8 } else { 1 }, &mut table).await.context("images")?;
    allocation::measure(arguments.quick, &mut table).await.context("allocating addresses")?;
    networks::measure_in_namespace(arguments, &program, &mut table).await.context("real networks")?;
    instances::measure(&program, arguments.quick, &mut table).await.context("simulated instances")?;
    instances_real::measure_in_namespace(arguments, &program, &mut table).await.context("real instances")?;
    agents::measure_in_namespace(arguments, &program, &mut table).await.context("agents")?;
    if arguments.sqlite {
        return Ok(table);
    }

    let folder = tempfile::tempdir()?;
    progress("starting MariaDB");
    let Some(mariadb) = MariaDb::start(folder.path()).await? else {
        table.section("MariaDB");
        table.add(Row::new("not measured", "mariadbd is not installed"));
        return Ok(table);
    };
    let [settings, spooling] = mariadb.urls.clone().map(|url| vec![("MUSTER_DATABASE_URL".to_owned(), url)]);
    let engine = Engine { name: "MariaDB", settings, spooling, has_targets: false };
    let measured = measure(&program, folder.path(), &engine, scale, &mut table).await;
    mariadb.stop().await?;
    measured.context("with MariaDB")?;
    Ok(table)
}

/// Measures everything on one engine.
async fn measure(
    program: &Path,
    folder: &Path,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section(engine.name);
    let data = folder.join("data");
    progress(&format!("{}: start and idle", engine.name));
    let server = Server::start(program, &data, &engine.settings).await?;
    let began = server.cpu()?;
    tokio::time::sleep(IDLE).await;
    let idle = (server.cpu()? - began).as_secs_f64() / IDLE.as_secs_f64();
    let start = format!("{:.0} ms", server.started_in.as_secs_f64() * 1e3);

    // Its first look at the queue is its last in this hour, and the queue has no end.
    let mut spooling = engine.spooling.clone();
    spooling.push(("MUSTER_DRAIN_POLL_INTERVAL".into(), "3600".into()));
    spooling.push(("MUSTER_SPOOL_HIGH_WATER_MARK".into(), "10000000".into()));
    let spooling = Server::start(program, &folder.join("spooling"), &spooling).await?;
    measure_calls(&server, &spooling, engine, scale, table).await?;
    networks::measure(&server, engine, scale, table).await?;
    // Killed, because a clean end would drain the queue.
    drop(spooling);
    let after_calls = server.memory()?;
    server.stop().await?;

    progress(&format!("{}: events", engine.name));
    let mut settings = engine.settings.clone();
    settings.push(("MUSTER_API_REQUEST_EVENTS_FOR_READS".into(), "true".into()));
    let server = Server::start(program, &data, &settings).await?;
    measure_events(&server, engine, scale, table).await?;
    // The longest answer once more, so that this server too has done everything.
    list(&server, scale.namespaces, &server.token().await?).await?;
    let memory = server.memory()?.max(after_calls);
    server.stop().await?;

    table.add(Row::new("resident memory after all of that", format!("{memory:.1} MB")).target_if(
        engine.has_targets,
        "< 60 MB",
        memory < 60.0,
    ));
    table.add(Row::new("start to /readyz", start));
    table.add(Row::new("idle", format!("{:.2} % of a core", idle * 100.0)));
    Ok(())
}

/// What calls cost. `spooling` is a server that does not drain its events.
async fn measure_calls(
    server: &Server,
    spooling: &Server,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    let Scale { calls, namespaces, .. } = scale;
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
    let created = Caller::new(server).await?.cost_with_events(namespaces, create).await?;
    let created_in = began.elapsed();

    let livez = request("GET", "/livez", None, None);
    let get = request("GET", &format!("/auth/namespaces/{}", name(namespaces / 2)), Some(&token), None);
    let (mut floors, mut gets, mut logins, mut answers, mut lists) = (vec![], vec![], vec![], vec![], vec![]);
    for round in 1..=ROUNDS {
        progress(&format!("{}: calls, round {round} of {ROUNDS}", engine.name));
        let (mut caller, mut spooler) = (Caller::new(server).await?, Caller::new(spooling).await?);
        let slice = calls / SLICES;
        let mut sums = [Duration::ZERO; 4];
        for _ in 0..SLICES {
            sums[0] += caller.cost(slice, same(&livez)).await?;
            sums[1] += caller.cost(slice, same(&get)).await?;
            sums[2] += caller.cost_with_events(slice, same(&server.login())).await?;
            sums[3] += spooler.cost(slice, same(&spooling.login())).await?;
        }
        for (all, sum) in [&mut floors, &mut gets, &mut logins, &mut answers].into_iter().zip(sums) {
            all.push(micros(sum, calls));
        }
        let began = server.cpu()?;
        list(server, namespaces, &token).await?;
        lists.push((server.cpu()? - began).as_secs_f64() * 1e3);
    }
    // Each call is compared with the floor of its own round.
    let times = |calls: &[f64]| median(calls.iter().zip(&floors).map(|(call, floor)| call / floor).collect());
    let row = |what: &str, calls: &[f64]| {
        Row::new(what, format!("{:.1} µs CPU", median(calls.to_vec()))).times(times(calls))
    };
    let (get_times, login_times) = (times(&gets), times(&logins));
    let (listed, limit) = (median(lists), namespaces / 100);
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let short = listed < limit as f64;

    table.add(row("GET /livez: the floor", &floors));
    table.add(row("GET /auth/namespaces/{ns}", &gets).target_if(
        engine.has_targets,
        "<= 5 x",
        get_times <= 5.0,
    ));
    table.add(row("POST /auth, generated secret", &logins).target_if(
        engine.has_targets,
        "<= 6 x",
        login_times <= 6.0,
    ));
    table.add(row("  without draining its events", &answers));
    table.add(
        Row::new(format!("GET /auth/namespaces, {namespaces} of them"), format!("{listed:.1} ms CPU"))
            .target_if(engine.has_targets, format!("< {limit} ms"), short),
    );
    table.add(row("POST /auth/namespaces", &[micros(created, namespaces); ROUNDS]));
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let rate = namespaces as f64 / created_in.as_secs_f64();
    table.add(Row::new("  at 64 connections", format!("{rate:.0} per second")));
    Ok(())
}

/// Whether events are recorded and drained fast enough, and none is lost.
async fn measure_events(
    server: &Server,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    let token = server.token().await?;
    server.drained().await?;
    let inserted = server.metric("database_events_inserted_total").await?;
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let rate = EVENT_RATE * 1.02 / EVENTS_PER_READ as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
    let reads = (rate * scale.seconds as f64) as usize;
    let get = request("GET", &format!("/auth/namespaces/{}", name(0)), Some(&token), None);
    let mut pool = Pool::open(server.address, CONNECTIONS).await?;
    let took = pool.run(reads, Some(rate), same(&get)).await?;
    let waiting = server.metric("eventlog_spool_depth").await?;
    let ended = Instant::now();
    server.drained().await?;
    let drain = ended.elapsed();

    #[expect(clippy::cast_precision_loss, reason = "a count of events")]
    let recorded = (reads * EVENTS_PER_READ) as f64;
    let arrived = server.metric("database_events_inserted_total").await? - inserted;
    let dropped = server.metric("eventlog_spool_dropped_total").await?;
    let reached = recorded / took.as_secs_f64();
    table.add(
        Row::new(
            format!("events recorded for {:.1} s", took.as_secs_f64()),
            format!("{reached:.0} per second"),
        )
        .target_if(engine.has_targets, ">= 10000 per second", reached >= EVENT_RATE),
    );
    table.add(
        Row::new(
            "of those dropped, and missing in the database",
            format!("{dropped:.0} and {:.0}", (recorded - arrived).max(0.0)),
        )
        .target("0 and 0", dropped == 0.0 && arrived >= recorded),
    );
    table.add(Row::new(
        "waiting at the end, and until all were drained",
        format!("{waiting:.0}, {:.0} ms", drain.as_secs_f64() * 1e3),
    ));
    Ok(())
}

/// Calls a server on all connections and says what that cost it.
struct Caller<'a> {
    server: &'a Server,
    pool: Pool,
}

impl<'a> Caller<'a> {
    /// Opens the connections, and uses them once so that the server has accepted them all.
    async fn new(server: &'a Server) -> anyhow::Result<Self> {
        let mut pool = Pool::open(server.address, CONNECTIONS).await?;
        pool.run(CONNECTIONS * 10, None, same(&request("GET", "/livez", None, None))).await?;
        Ok(Self { server, pool })
    }

    /// Processor time of the server for `count` calls.
    async fn cost<R>(&mut self, count: usize, call: R) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let began = self.server.cpu()?;
        self.pool.run(count, None, call).await?;
        Ok(self.server.cpu()? - began)
    }

    /// The same, until the events that they left are in the database.
    async fn cost_with_events<R>(&mut self, count: usize, call: R) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let began = self.server.cpu()?;
        self.pool.run(count, None, call).await?;
        self.server.drained().await?;
        Ok(self.server.cpu()? - began)
    }
}

/// Microseconds a call.
fn micros(total: Duration, calls: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let calls = calls as f64;
    total.as_secs_f64() * 1e6 / calls
}

/// Lists every namespace and checks that all are there, in one streamed answer.
async fn list(server: &Server, count: usize, token: &str) -> anyhow::Result<()> {
    let answer = load::call(server.address, &request("GET", "/auth/namespaces", Some(token), None)).await?;
    let streamed = answer.chunked;
    let listed: Vec<Value> = serde_json::from_slice(&answer.ok()?)?;
    ensure!(listed.len() == count + 1, "{} namespaces are listed instead of {}", listed.len(), count + 1);
    ensure!(streamed, "the list is not streamed");
    Ok(())
}

fn name(number: usize) -> String {
    format!("bench-{number:05}")
}

/// The same request whatever its number.
fn same(request: &Arc<[u8]>) -> impl Fn(usize) -> Arc<[u8]> + Send + Sync + 'static {
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

/// What this process has used of the processors so far.
fn processor_time() -> anyhow::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

/// One transaction, as the control plane makes them.
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
