//! Benchmarks requests and events with one database engine.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

use crate::engine::{Engine, Scale};
use crate::load::{self, Pool, request};
use crate::networks;
use crate::sampling::{CONNECTIONS, LoadGenerator, ROUNDS, SLICES, median, micros, progress, repeat};
use crate::server::Server;
use crate::table::{Row, Table};

/// The target rate of recorded and drained events per second.
const EVENT_RATE: f64 = 10_000.0;
/// The events of a read if reads are recorded: request received, token used, response sent.
const EVENTS_PER_READ: usize = 3;
/// How long the idle server is observed.
const IDLE_PERIOD: Duration = Duration::from_secs(5);

/// Runs all benchmarks of one engine.
pub(crate) async fn measure(
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
