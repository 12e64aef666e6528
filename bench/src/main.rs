//! Measures a real `muster serve` on this machine and prints one table.
//!
//! What counts is the processor time that the server uses for a call, not how long the call takes: the load
//! generator and whatever else runs here share the cores. `GET /livez` does nothing but HTTP and is the floor
//! that other calls are multiples of. Rows are measured in turns and the median is taken, so that a noisy
//! moment meets all of them.

mod load;
mod mariadb;
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
use serde_json::{Value, json};
use server::Server;
use table::{Row, Table};
use tokio::signal::unix::{SignalKind, signal};

const CONNECTIONS: usize = 64;
const ROUNDS: usize = 3;
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
    /// Only with SQLite
    #[arg(long)]
    sqlite: bool,
    /// The server to measure [default: muster next to this program]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

/// A database to measure with.
struct Engine {
    name: &'static str,
    settings: Vec<(String, String)>,
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

    let folder = tempfile::tempdir()?;
    let sqlite = Engine { name: "SQLite", settings: vec![], has_targets: true };
    measure(&program, folder.path(), &sqlite, scale, &mut table).await.context("with SQLite")?;
    drop(folder);
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
    let settings = vec![("MUSTER_DATABASE_URL".to_owned(), mariadb.url.clone())];
    let engine = Engine { name: "MariaDB", settings, has_targets: false };
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

    measure_calls(&server, engine, scale, table).await?;
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

/// What calls cost.
async fn measure_calls(
    server: &Server,
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
    let created = sample(server, namespaces, create).await?;

    let livez = request("GET", "/livez", None, None);
    let get = request("GET", &format!("/auth/namespaces/{}", name(namespaces / 2)), Some(&token), None);
    let login = server.login();
    sample(server, calls / 10, same(&livez)).await?;
    let (mut floors, mut gets, mut logins, mut lists) = (vec![], vec![], vec![], vec![]);
    for round in 1..=ROUNDS {
        progress(&format!("{}: calls, round {round} of {ROUNDS}", engine.name));
        floors.push(sample(server, calls, same(&livez)).await?.micros);
        gets.push(sample(server, calls, same(&get)).await?.micros);
        logins.push(sample(server, calls, same(&login)).await?.micros);
        let began = server.cpu()?;
        list(server, namespaces, &token).await?;
        lists.push((server.cpu()? - began).as_secs_f64() * 1e3);
    }
    // Each call is compared with the floor of its own round.
    let times = |calls: &[f64]| median(calls.iter().zip(&floors).map(|(call, floor)| call / floor).collect());
    let (get_times, login_times) = (times(&gets), times(&logins));
    let micros = |value: f64| format!("{value:.1} µs CPU");

    table.add(Row::new("GET /livez: the floor", micros(median(floors.clone()))).times(1.0));
    table.add(Row::new("GET /auth/namespaces/{ns}", micros(median(gets))).times(get_times).target_if(
        engine.has_targets,
        "<= 5 x",
        get_times <= 5.0,
    ));
    table.add(
        Row::new("POST /auth, generated secret, events drained", micros(median(logins)))
            .times(login_times)
            .target_if(engine.has_targets, "<= 6 x", login_times <= 6.0),
    );
    let (listed, limit) = (median(lists), namespaces / 100);
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let short = listed < limit as f64;
    table.add(
        Row::new(format!("GET /auth/namespaces, {namespaces} of them"), format!("{listed:.1} ms CPU"))
            .target_if(engine.has_targets, format!("< {limit} ms"), short),
    );
    table.add(
        Row::new("POST /auth/namespaces, events drained", micros(created.micros))
            .times(created.micros / median(floors)),
    );
    table.add(Row::new("the same at 64 connections", format!("{:.0} per second", created.rate)));
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
    let pool = Pool::open(server.address, CONNECTIONS).await?;
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

/// What one load cost.
struct Sample {
    /// Processor time of the server per call.
    micros: f64,
    /// Calls per second.
    rate: f64,
}

/// Makes `count` calls on all connections, and waits until the events that they left are drained.
async fn sample<R>(server: &Server, count: usize, call: R) -> anyhow::Result<Sample>
where
    R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
{
    let pool = Pool::open(server.address, CONNECTIONS).await?;
    let began = server.cpu()?;
    let took = pool.run(count, None, call).await?;
    server.drained().await?;
    let used = server.cpu()? - began;
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let count = count as f64;
    Ok(Sample { micros: used.as_secs_f64() * 1e6 / count, rate: count / took.as_secs_f64() })
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
