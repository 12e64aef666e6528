//! Benchmarks many instances on simulated nodes, whose VMs cost nothing.
//!
//! The data is in memory, so that the disk does not matter. The cost of periodic tasks for so many nodes is measured on
//! the idle server and subtracted from that of requests.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use muster_control::scheduler::{self, NodeFacts, PlacementRequest, SchedulerPolicy};
use muster_store::{Store, node_ledgers, nodes};
use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;
use muster_types::node::NodeState;
use muster_types::settings::Settings;
use muster_types::time::now;
use serde_json::{Value, json};

use crate::load::{self, request};
use crate::sampling::{
    LoadGenerator, ROUNDS, SLICES, median, micros, process_cpu_time, progress, repeat, transaction,
};
use crate::server::Server;
use crate::table::{Row, Table};

const NODES: usize = 1000;
const INSTANCES: usize = 20_000;
/// Instances in the namespace that is listed.
const LISTED: usize = 1000;
/// Instances created between two progress messages.
const BATCH: usize = 1000;
const CALLS: usize = 20_000;
const PLACEMENTS: u32 = 300;
/// The maximum number of candidates that the server tries.
const MAX_CANDIDATES: usize = 32;
/// How long the idle server is observed.
const IDLE_PERIOD: Duration = Duration::from_secs(20);
/// The timeout for queued operations.
const TIMEOUT: Duration = Duration::from_secs(900);
/// A file system in memory, used if it exists.
const MEMORY_DIRECTORY: &str = "/dev/shm";

/// The target for a placement in milliseconds of CPU time.
const MAX_PLACEMENT_COST: f64 = 2.0;
/// The target for a list in milliseconds of CPU time.
const MAX_LIST_COST: f64 = 30.0;
/// The target for reading an instance as a multiple of the baseline.
const MAX_GET_MULTIPLE: f64 = 6.0;

pub(crate) async fn measure(program: &Path, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    let divisor = if quick { 10 } else { 1 };
    let (nodes, count) = (NODES / divisor, INSTANCES / divisor);
    table.section(&format!("{count} instances on {nodes} simulated nodes"));
    let directory = match Path::new(MEMORY_DIRECTORY).is_dir() {
        true => tempfile::tempdir_in(MEMORY_DIRECTORY)?,
        false => tempfile::tempdir()?,
    };
    let data = directory.path().join("data");
    let server = Server::start_with(program, &data, &[], &["--simulate", &nodes.to_string()]).await?;
    let store = Store::open(&format!("sqlite:{}", data.join("muster.db").display())).await?;
    let token = server.token().await?;
    let listed_token = server.new_namespace(&token, "listed").await?;
    progress("idle cost of simulated nodes");
    let idle_before = server.idle_load(IDLE_PERIOD).await?;
    let first = create(&server, &store, "first", &token, count - LISTED).await?;
    let last = create(&server, &store, "listed", &listed_token, LISTED).await?;
    progress("idle cost of simulated nodes with instances");
    let idle_after = server.idle_load(IDLE_PERIOD).await?;
    let calls = measure_calls(&server, &listed_token, CALLS / divisor, idle_after).await?;
    let listed = list(&server, &token).await?;
    ensure!(listed.len() == count, "{} instances listed instead of {count}", listed.len());
    let memory = server.memory()?;
    server.stop().await?;
    let placement = place(&store).await?;
    store.close().await;

    add_costs(&placement, &calls, quick, table);
    for (which, creation) in [("first", &first), ("last", &last)] {
        table.add(Row::new(
            format!("POST /instances, the {which} {}, 64 connections", creation.count),
            format!(
                "{:.0} per second, {:.2} ms CPU",
                creation.rate(creation.accepted),
                creation.cpu_accepted
            ),
        ));
        table.add(Row::new(
            "  until created, with events",
            format!("{:.0} per second, {:.2} ms CPU", creation.rate(creation.settled), creation.cpu_settled),
        ));
    }
    table.add(Row::new(
        "idle without instances, and with all instances",
        format!("{:.1} and {:.1} % of a core", idle_before * 100.0, idle_after * 100.0),
    ));
    table.add(Row::new("resident memory with all instances", format!("{memory:.1} MB")));
    Ok(())
}

fn add_costs(placement: &PlacementCosts, calls: &ReadCosts, quick: bool, table: &mut Table) {
    table.add(
        Row::new("placement: candidates and capacity claim", format!("{:.2} ms CPU", placement.cached))
            .target_if(!quick, format!("< {MAX_PLACEMENT_COST} ms"), placement.cached < MAX_PLACEMENT_COST),
    );
    table.add(Row::new("  of which scheduler", format!("{:.2} ms CPU", placement.scheduler)));
    table.add(Row::new(
        "  with an expired node cache, every 5 s",
        format!("{:.2} ms CPU", placement.uncached),
    ));
    table.add(Row::new("GET /livez (baseline)", format!("{:.1} µs CPU", calls.baseline)).multiple(1.0));
    table.add(
        Row::new("GET /instances/{ref}", format!("{:.1} µs CPU", calls.get))
            .multiple(calls.multiple)
            .target_if(!quick, format!("<= {MAX_GET_MULTIPLE} x"), calls.multiple <= MAX_GET_MULTIPLE),
    );
    table.add(
        Row::new(format!("GET /instances with {LISTED} instances"), format!("{:.1} ms CPU", calls.list))
            .target_if(!quick, format!("< {MAX_LIST_COST} ms"), calls.list < MAX_LIST_COST),
    );
}

/// The result of creating instances.
struct Creation {
    count: usize,
    /// The time until the server accepted the last request.
    accepted: Duration,
    /// The time until all operations were done and all events drained.
    settled: Duration,
    /// Milliseconds of CPU time per instance.
    cpu_accepted: f64,
    cpu_settled: f64,
}

impl Creation {
    fn rate(&self, elapsed: Duration) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a count of instances")]
        let count = self.count as f64;
        count / elapsed.as_secs_f64()
    }
}

/// Creates instances with one blank disk and no network, and waits until they exist.
async fn create(
    server: &Server,
    store: &Store,
    name: &str,
    token: &str,
    count: usize,
) -> anyhow::Result<Creation> {
    let mut load = LoadGenerator::new(server).await?;
    let (cpu, began) = (server.cpu()?, Instant::now());
    for from in (0..count).step_by(BATCH) {
        progress(&format!(
            "{from} of {count} instances requested after {:.0} s",
            began.elapsed().as_secs_f64()
        ));
        let (name, token) = (name.to_owned(), token.to_owned());
        let new_instance = move |number: usize| {
            let body = json!({
                "name": format!("{name}-{}", from + number), "cpus": 1, "memory": 1024,
                "disk": [{ "size": 1 }], "network": [],
            });
            request("POST", "/instances", Some(&token), Some(&body))
        };
        load.cost(BATCH.min(count - from), new_instance).await?;
    }
    let (accepted, cpu_accepted) = (began.elapsed(), server.cpu()? - cpu);
    wait_until_settled(store).await?;
    server.wait_until_drained().await?;
    let (settled, cpu_settled) = (began.elapsed(), server.cpu()? - cpu);
    let millis = |total| micros(total, count) / 1e3;
    Ok(Creation {
        count,
        accepted,
        settled,
        cpu_accepted: millis(cpu_accepted),
        cpu_settled: millis(cpu_settled),
    })
}

/// Waits until all operations have ended and all instances are created.
pub(crate) async fn wait_until_settled(store: &Store) -> anyhow::Result<()> {
    let count = async |sql: &str| {
        let row = store.query_one(sql, &[]).await?.context("no count")?;
        anyhow::Ok(row.scalar::<i64>()?)
    };
    let began = Instant::now();
    let mut last_progress = Instant::now();
    loop {
        let left = count("SELECT COUNT(*) FROM operations WHERE state IN ('queued', 'executing')").await?;
        if left == 0 {
            break;
        }
        if last_progress.elapsed() > Duration::from_secs(10) {
            progress(&format!("{left} operations pending"));
            last_progress = Instant::now();
        }
        ensure!(began.elapsed() < TIMEOUT, "timed out with {left} operations pending");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let failed = count("SELECT COUNT(*) FROM instances WHERE state <> 'created'").await?;
    ensure!(failed == 0, "{failed} instances are not created");
    Ok(())
}

/// The CPU time of reads.
struct ReadCosts {
    /// Microseconds.
    baseline: f64,
    /// Microseconds.
    get: f64,
    /// `get` as a multiple of the baseline.
    multiple: f64,
    /// Milliseconds.
    list: f64,
}

/// Measures reads, interleaved with the baseline. `idle` is the share of a core that the idle server uses.
async fn measure_calls(server: &Server, token: &str, calls: usize, idle: f64) -> anyhow::Result<ReadCosts> {
    let one = list(server, token).await?.swap_remove(LISTED / 2);
    let livez = request("GET", "/livez", None, None);
    let path = format!("/instances/{}", one["uuid"].as_str().context("no id")?);
    let get = request("GET", &path, Some(token), None);
    let all = request("GET", "/instances", Some(token), None);
    let (mut baselines, mut gets, mut multiples, mut lists) = (vec![], vec![], vec![], vec![]);
    for round in 1..=ROUNDS {
        progress(&format!("reading instances, round {round} of {ROUNDS}"));
        let mut load = LoadGenerator::new(server).await?;
        let mut sums = [0.0; 3];
        for _ in 0..SLICES {
            for (at, call, count) in [(0, &livez, calls / SLICES), (1, &get, calls / SLICES), (2, &all, 1)] {
                let began = Instant::now();
                let cost = load.cost(count, repeat(call)).await?;
                sums[at] += micros(cost, 1) - idle * micros(began.elapsed(), 1);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
        let [baseline, get, list] = [sums[0] / calls as f64, sums[1] / calls as f64, sums[2] / SLICES as f64];
        baselines.push(baseline);
        gets.push(get);
        multiples.push(get / baseline);
        lists.push(list / 1e3);
    }
    Ok(ReadCosts {
        baseline: median(baselines),
        get: median(gets),
        multiple: median(multiples),
        list: median(lists),
    })
}

async fn list(server: &Server, token: &str) -> anyhow::Result<Vec<Value>> {
    let response = load::call(server.address, &request("GET", "/instances", Some(token), None)).await?;
    Ok(serde_json::from_slice(&response.ok()?)?)
}

/// The median CPU time of a placement in milliseconds.
struct PlacementCosts {
    /// The scheduler and the transaction, with cached nodes.
    cached: f64,
    scheduler: f64,
    /// Including reading all nodes and their claims.
    uncached: f64,
}

/// Places instances in this process, with the code and the database of the server.
async fn place(store: &Store) -> anyhow::Result<PlacementCosts> {
    progress("placing instances");
    let policy = SchedulerPolicy::from(&Settings::defaults());
    let request = PlacementRequest { cpus: 1, memory_mb: 1024, disk_gb: 1, ..PlacementRequest::default() };
    let neighbours = HashMap::new();
    let (mut cached, mut scheduled, mut uncached) = (vec![], vec![], vec![]);
    // The simulated nodes have stopped with the server. They are treated as if they were running.
    let time = now();
    for placement in 0..PLACEMENTS {
        let began = process_cpu_time()?;
        let mut ledgers = node_ledgers::list(store).await?;
        let rows = nodes::list(store).await?;
        let cached_nodes: Vec<(Box<NodeFacts>, CommittedCapacity)> = rows
            .iter()
            .map(|row| {
                let facts = NodeFacts { state: NodeState::Created, ..NodeFacts::from_row(row, 0.0) };
                (Box::new(facts), ledgers.remove(&row.identity.id).unwrap_or_default())
            })
            .collect();
        let read = process_cpu_time()?;
        let mut random = || f64::from(placement).sin().abs();
        let outcome = scheduler::candidates(&request, &cached_nodes, &neighbours, &policy, &mut random);
        let candidates =
            outcome.result.map_err(|refusal| anyhow::anyhow!("placement failed: {}", refusal.text))?;
        let scheduled_at = process_cpu_time()?;
        ensure!(
            candidates.len() == rows.len(),
            "{} of {} nodes are candidates",
            candidates.len(),
            rows.len()
        );
        let facts: HashMap<NodeId, &NodeFacts> =
            cached_nodes.iter().map(|(facts, _)| (facts.id, &**facts)).collect();
        let claimed = transaction(store, async |tx| {
            for heed_demand in [true, false] {
                for node in candidates.iter().take(MAX_CANDIDATES) {
                    let ledger = node_ledgers::lock_with_state(tx, *node).await?.committed;
                    let claimed = scheduler::commit_capacity(
                        &request,
                        facts[node],
                        &ledger,
                        &policy,
                        time,
                        heed_demand,
                    );
                    if let Ok(committed) = claimed {
                        node_ledgers::set(tx, *node, &committed).await?;
                        return Ok(true);
                    }
                }
            }
            Ok(false)
        });
        ensure!(claimed.await?, "no candidate has capacity");
        let ended = process_cpu_time()?;
        let millis = |from: Duration, to: Duration| micros(to.saturating_sub(from), 1) / 1e3;
        cached.push(millis(read, ended));
        scheduled.push(millis(read, scheduled_at));
        uncached.push(millis(began, ended));
    }
    Ok(PlacementCosts { cached: median(cached), scheduler: median(scheduled), uncached: median(uncached) })
}
