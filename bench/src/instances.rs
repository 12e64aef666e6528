//! What instances cost when there are many: on simulated nodes, whose machines cost nothing.
//!
//! The data is in memory, so that the disk is not what is measured. What the server does by the clock for so many
//! nodes is measured while nobody calls, and taken off the calls by the time that they took.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use muster_control::scheduler::{self, Facts, Policy, Wish};
use muster_store::{Store, node_ledgers, nodes};
use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;
use muster_types::node::NodeState;
use muster_types::settings::Settings;
use muster_types::time::now;
use serde_json::{Value, json};

use crate::load::{self, request};
use crate::server::Server;
use crate::table::{Row, Table};
use crate::{Caller, ROUNDS, SLICES, median, micros, processor_time, progress, same, transaction};

const NODES: usize = 1000;
const INSTANCES: usize = 20_000;
/// Instances of the namespace whose list is measured.
const CROWD: usize = 1000;
/// Instances made before the next look at the clock.
const BATCH: usize = 1000;
const CALLS: usize = 20_000;
const PLACEMENTS: usize = 300;
/// Candidates whose ledgers the server looks into.
const MOST_CANDIDATES: usize = 32;
const IDLE: Duration = Duration::from_secs(20);
/// How long the work that was queued may take.
const PATIENCE: Duration = Duration::from_secs(900);
/// Files that need no disk, where there are such.
const IN_MEMORY: &str = "/dev/shm";

/// Milliseconds of processor time that a placement may take, and a list; a call as a multiple of the floor.
const PLACEMENT: f64 = 2.0;
const LIST: f64 = 30.0;
const GET: f64 = 6.0;

pub(crate) async fn measure(program: &Path, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    let part = if quick { 10 } else { 1 };
    let (nodes, count) = (NODES / part, INSTANCES / part);
    table.section(&format!("{count} instances on {nodes} simulated nodes"));
    let folder = match Path::new(IN_MEMORY).is_dir() {
        true => tempfile::tempdir_in(IN_MEMORY)?,
        false => tempfile::tempdir()?,
    };
    let data = folder.path().join("data");
    let server = Server::start_with(program, &data, &[], &["--simulate", &nodes.to_string()]).await?;
    let store = Store::open(&format!("sqlite:{}", data.join("muster.db").display())).await?;
    let token = server.token().await?;
    let crowd = server.new_namespace(&token, "crowd").await?;
    let before = idle(&server).await?;
    let rest = make(&server, &store, "rest", &token, count - CROWD).await?;
    let made = make(&server, &store, "crowd", &crowd, CROWD).await?;
    let after = idle(&server).await?;
    let calls = measure_calls(&server, &crowd, CALLS / part, after).await?;
    let listed = list(&server, &token).await?;
    ensure!(listed.len() == count, "{} instances are listed instead of {count}", listed.len());
    let memory = server.memory()?;
    server.stop().await?;
    let placed = place(&store).await?;
    store.close().await;

    table.add(
        Row::new("a placement: candidates and claim", format!("{:.2} ms CPU", placed.known)).target_if(
            !quick,
            format!("< {PLACEMENT} ms"),
            placed.known < PLACEMENT,
        ),
    );
    table.add(Row::new("  of that the scheduler", format!("{:.2} ms CPU", placed.scheduler)));
    table.add(Row::new(
        "  when the nodes are looked at afresh, once in 5 s",
        format!("{:.2} ms CPU", placed.afresh),
    ));
    table.add(Row::new("GET /livez: the floor", format!("{:.1} µs CPU", calls.floor)).times(1.0));
    table.add(
        Row::new("GET /instances/{ref}", format!("{:.1} µs CPU", calls.get)).times(calls.times).target_if(
            !quick,
            format!("<= {GET} x"),
            calls.times <= GET,
        ),
    );
    table.add(
        Row::new(format!("GET /instances, {CROWD} of them"), format!("{:.1} ms CPU", calls.list)).target_if(
            !quick,
            format!("< {LIST} ms"),
            calls.list < LIST,
        ),
    );
    for (what, made) in [("first", &rest), ("last", &made)] {
        table.add(Row::new(
            format!("POST /instances, the {what} {}, 64 at a time", made.count),
            format!("{:.0} per second, {:.2} ms CPU", made.rate(made.answered), made.cpu_answered),
        ));
        table.add(Row::new(
            "  until all are created and told of",
            format!("{:.0} per second, {:.2} ms CPU", made.rate(made.settled), made.cpu_settled),
        ));
    }
    table.add(Row::new(
        "idle without instances, and with all",
        format!("{:.1} and {:.1} % of a core", before * 100.0, after * 100.0),
    ));
    table.add(Row::new("resident memory with all", format!("{memory:.1} MB")));
    Ok(())
}

/// The share of a core that the server takes for itself.
async fn idle(server: &Server) -> anyhow::Result<f64> {
    progress("what simulated nodes cost by themselves");
    let began = (server.cpu()?, Instant::now());
    tokio::time::sleep(IDLE).await;
    Ok((server.cpu()? - began.0).as_secs_f64() / began.1.elapsed().as_secs_f64())
}

/// How instances were made.
struct Made {
    count: usize,
    /// Until the last was answered, and until nothing was left to do.
    answered: Duration,
    settled: Duration,
    /// Milliseconds of processor time for each.
    cpu_answered: f64,
    cpu_settled: f64,
}

impl Made {
    fn rate(&self, took: Duration) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a count of instances")]
        let count = self.count as f64;
        count / took.as_secs_f64()
    }
}

/// Makes instances with one blank disk and no network, and waits until they are.
async fn make(server: &Server, store: &Store, name: &str, token: &str, count: usize) -> anyhow::Result<Made> {
    let mut caller = Caller::new(server).await?;
    let (cpu, began) = (server.cpu()?, Instant::now());
    for from in (0..count).step_by(BATCH) {
        progress(&format!(
            "{from} of {count} instances asked for after {:.0} s",
            began.elapsed().as_secs_f64()
        ));
        let (name, token) = (name.to_owned(), token.to_owned());
        let new = move |number: usize| {
            let body = json!({
                "name": format!("{name}-{}", from + number), "cpus": 1, "memory": 1024,
                "disk": [{ "size": 1 }], "network": [],
            });
            request("POST", "/instances", Some(&token), Some(&body))
        };
        caller.cost(BATCH.min(count - from), new).await?;
    }
    let (answered, cpu_answered) = (began.elapsed(), server.cpu()? - cpu);
    settle(store).await?;
    server.drained().await?;
    let (settled, cpu_settled) = (began.elapsed(), server.cpu()? - cpu);
    let millis = |total| micros(total, count) / 1e3;
    Ok(Made {
        count,
        answered,
        settled,
        cpu_answered: millis(cpu_answered),
        cpu_settled: millis(cpu_settled),
    })
}

/// Waits until no operation is left to do, and every instance is made.
async fn settle(store: &Store) -> anyhow::Result<()> {
    let number = async |sql: &str| {
        let row = store.query_one(sql, &[]).await?.context("no count")?;
        anyhow::Ok(row.scalar::<i64>()?)
    };
    let began = Instant::now();
    let mut said = Instant::now();
    loop {
        let left = number("SELECT COUNT(*) FROM operations WHERE state IN ('queued', 'executing')").await?;
        if left == 0 {
            break;
        }
        if said.elapsed() > Duration::from_secs(10) {
            progress(&format!("{left} operations are left"));
            said = Instant::now();
        }
        ensure!(began.elapsed() < PATIENCE, "{left} operations are not done in time");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let failed = number("SELECT COUNT(*) FROM instances WHERE state <> 'created'").await?;
    ensure!(failed == 0, "{failed} instances are not made");
    Ok(())
}

/// What reading costs, in microseconds of processor time, and for the list in milliseconds.
struct Calls {
    floor: f64,
    get: f64,
    times: f64,
    list: f64,
}

/// Calls in turns with the floor. `idle` is what the server uses anyway.
async fn measure_calls(server: &Server, token: &str, calls: usize, idle: f64) -> anyhow::Result<Calls> {
    let one = list(server, token).await?.swap_remove(CROWD / 2);
    let livez = request("GET", "/livez", None, None);
    let path = format!("/instances/{}", one["uuid"].as_str().context("no id")?);
    let get = request("GET", &path, Some(token), None);
    let all = request("GET", "/instances", Some(token), None);
    let (mut floors, mut gets, mut times, mut lists) = (vec![], vec![], vec![], vec![]);
    for round in 1..=ROUNDS {
        progress(&format!("instances read, round {round} of {ROUNDS}"));
        let mut caller = Caller::new(server).await?;
        let mut sums = [0.0; 3];
        for _ in 0..SLICES {
            for (at, call, count) in [(0, &livez, calls / SLICES), (1, &get, calls / SLICES), (2, &all, 1)] {
                let began = Instant::now();
                let cost = caller.cost(count, same(call)).await?;
                sums[at] += micros(cost, 1) - idle * micros(began.elapsed(), 1);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
        let [floor, get, list] = [sums[0] / calls as f64, sums[1] / calls as f64, sums[2] / SLICES as f64];
        floors.push(floor);
        gets.push(get);
        times.push(get / floor);
        lists.push(list / 1e3);
    }
    Ok(Calls { floor: median(floors), get: median(gets), times: median(times), list: median(lists) })
}

async fn list(server: &Server, token: &str) -> anyhow::Result<Vec<Value>> {
    let answer = load::call(server.address, &request("GET", "/instances", Some(token), None)).await?;
    Ok(serde_json::from_slice(&answer.ok()?)?)
}

/// Milliseconds of processor time for a placement, at the median.
struct Placed {
    /// With what is known of the nodes: the scheduler, and the ledger's transaction.
    known: f64,
    scheduler: f64,
    /// With all nodes and ledgers read before.
    afresh: f64,
}

/// Places instances in this process, with the functions and the database of the server.
async fn place(store: &Store) -> anyhow::Result<Placed> {
    progress("placing instances");
    let policy = Policy::from(&Settings::defaults());
    let wish = Wish { cpus: 1, memory_mb: 1024, disk_gb: 1, ..Wish::default() };
    let neighbours = HashMap::new();
    let (mut known, mut scheduled, mut afresh) = (vec![], vec![], vec![]);
    // With the server its nodes have stopped. They are taken as they were before.
    let time = now();
    for _ in 0..PLACEMENTS {
        let began = processor_time()?;
        let mut ledgers = node_ledgers::list(store).await?;
        let rows = nodes::list(store).await?;
        let known_nodes: Vec<(Box<Facts>, CommittedCapacity)> = rows
            .iter()
            .map(|row| {
                let facts = Facts { state: NodeState::Created, lastseen: time, ..Facts::read(row) };
                (Box::new(facts), ledgers.remove(&row.identity.id).unwrap_or_default())
            })
            .collect();
        let looked = processor_time()?;
        let mut dice = || f64::from(u32::try_from(known.len()).unwrap_or(0)).sin().abs();
        let outcome = scheduler::candidates(&wish, &known_nodes, &neighbours, &policy, time, &mut dice);
        let found =
            outcome.result.map_err(|refusal| anyhow::anyhow!("nothing was placed: {}", refusal.text))?;
        let ordered = processor_time()?;
        ensure!(found.len() == rows.len(), "{} of {} nodes are candidates", found.len(), rows.len());
        let facts: HashMap<NodeId, &Facts> =
            known_nodes.iter().map(|(facts, _)| (facts.id, &**facts)).collect();
        let claimed = transaction(store, async |tx| {
            for heed_demand in [true, false] {
                for node in found.iter().take(MOST_CANDIDATES) {
                    let ledger = node_ledgers::lock(tx, *node).await?;
                    nodes::state(&mut *tx, *node).await?;
                    let claimed = scheduler::claim(&wish, facts[node], &ledger, &policy, time, heed_demand);
                    if let Ok(committed) = claimed {
                        node_ledgers::set(tx, *node, &committed).await?;
                        return Ok(true);
                    }
                }
            }
            Ok(false)
        });
        ensure!(claimed.await?, "no candidate had room");
        let ended = processor_time()?;
        let millis = |from: Duration, to: Duration| micros(to.saturating_sub(from), 1) / 1e3;
        known.push(millis(looked, ended));
        scheduled.push(millis(looked, ordered));
        afresh.push(millis(began, ended));
    }
    Ok(Placed { known: median(known), scheduler: median(scheduled), afresh: median(afresh) })
}
