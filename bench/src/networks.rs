//! Benchmarks networks: reads on a simulated node, and creation on the real data plane.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::arguments::Arguments;
use crate::engine::{Engine, Scale};
use crate::load::{self, Connection, request};
use crate::namespace;
use crate::sampling::{LoadGenerator, ROUNDS, SLICES, median, micros, progress, repeat};
use crate::server::Server;
use crate::table::{Row, Table};

/// Networks in the list.
const NETWORKS: usize = 1000;
/// The timeout for creating a network.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Networks created sequentially.
const SEQUENTIAL: usize = 50;
/// Networks created by eight concurrent clients.
const CONCURRENT: usize = 160;
/// How long the idle server is observed.
const IDLE_PERIOD: Duration = Duration::from_secs(6);

/// Measures reads of networks.
pub(crate) async fn measure(
    server: &Server,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    progress(&format!("{}: creating {NETWORKS} networks", engine.name));
    let token = server.token().await?;
    let began = Instant::now();
    let mut load = LoadGenerator::new(server).await?;
    load.cost(NETWORKS, new_network(token.clone())).await?;
    let network = wait_until_created(server, &token).await?;
    let created_in = began.elapsed();
    server.wait_until_drained().await?;

    let livez = request("GET", "/livez", None, None);
    let get = request("GET", &format!("/networks/{network}"), Some(&token), None);
    let (mut baselines, mut gets, mut lists) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        let slice = scale.calls / SLICES;
        let mut sums = [Duration::ZERO; 2];
        for _ in 0..SLICES {
            sums[0] += load.cost(slice, repeat(&livez)).await?;
            sums[1] += load.cost(slice, repeat(&get)).await?;
        }
        baselines.push(micros(sums[0], scale.calls));
        gets.push(micros(sums[1], scale.calls));
        let began = server.cpu()?;
        let listed = list(server, &token).await?;
        lists.push((server.cpu()? - began).as_secs_f64() * 1e3);
        ensure!(listed.len() == NETWORKS, "{} networks listed instead of {NETWORKS}", listed.len());
    }
    let multiple = median(gets.iter().zip(&baselines).map(|(get, baseline)| get / baseline).collect());
    table.add(
        Row::new("GET /networks/{ref}", format!("{:.1} µs CPU", median(gets))).multiple(multiple).target_if(
            engine.has_targets,
            "<= 5 x",
            multiple <= 5.0,
        ),
    );
    let listed = median(lists);
    table.add(
        Row::new(format!("GET /networks with {NETWORKS} networks"), format!("{listed:.1} ms CPU")).target_if(
            engine.has_targets,
            "< 15 ms",
            listed < 15.0,
        ),
    );
    #[expect(clippy::cast_precision_loss, reason = "a count of networks")]
    let rate = NETWORKS as f64 / created_in.as_secs_f64();
    table.add(Row::new("creating networks on a simulated node", format!("{rate:.0} per second")));
    let idle = server.idle_load(IDLE_PERIOD).await?;
    table.add(Row::new(format!("idle with {NETWORKS} networks"), format!("{:.2} % of a core", idle * 100.0)));
    Ok(())
}

/// Returns a function that returns the requests for new networks.
fn new_network(token: String) -> impl Fn(usize) -> Arc<[u8]> + Send + Sync + 'static {
    move |number| {
        let body =
            json!({"name": format!("net-{number:04}"), "netblock": "10.0.0.0/24", "provide_nat": false});
        request("POST", "/networks", Some(&token), Some(&body))
    }
}

async fn list(server: &Server, token: &str) -> anyhow::Result<Vec<Value>> {
    let response = load::call(server.address, &request("GET", "/networks", Some(token), None)).await?;
    Ok(serde_json::from_slice(&response.ok()?)?)
}

/// Waits until all networks are created and returns the ID of one.
async fn wait_until_created(server: &Server, token: &str) -> anyhow::Result<String> {
    let deadline = Instant::now() + 5 * TIMEOUT;
    loop {
        let listed = list(server, token).await?;
        if let Some(bad) = listed.iter().find(|network| network["state"] == "error") {
            bail!("a network is in error: {}", bad["error_message"]);
        }
        if listed.iter().all(|network| network["state"] == "created") {
            let one = listed.first().and_then(|network| network["uuid"].as_str()).context("no network")?;
            return Ok(one.to_owned());
        }
        ensure!(Instant::now() < deadline, "timed out creating networks");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Runs the benchmark in its own network namespace.
pub(crate) async fn measure_in_namespace(
    arguments: &Arguments,
    program: &Path,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section("real networks");
    if !nix::unistd::geteuid().is_root() {
        table.add(Row::new("not measured", "needs root"));
        return Ok(());
    }
    progress("networks on the real data plane");
    namespace::measure(arguments, program, &["--real-networks".as_ref()], table).await
}

/// Creates and deletes networks on the data plane of this host.
pub(crate) async fn measure_real(program: &Path, divisor: usize, table: &mut Table) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let settings: Vec<(String, String)> =
        [("MUSTER_NODE_MESH_IP", "127.0.0.1"), ("MUSTER_FLOATING_NETWORK", "172.29.0.0/16")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec();
    let server = Server::start_real(program, &directory.path().join("data"), &settings).await?;
    let token = server.token().await?;
    for (label, concurrency, count) in
        [("sequential", 1, SEQUENTIAL / divisor.min(5)), ("8 concurrently", 8, CONCURRENT / divisor.min(5))]
    {
        let began = (server.cpu()?, Instant::now());
        let mut durations = create(&server, &token, concurrency, count).await?;
        durations.sort_by(f64::total_cmp);
        let quantile = |share: f64| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "an index"
            )]
            let index = (durations.len() as f64 * share) as usize;
            durations[index.min(durations.len() - 1)] * 1e3
        };
        #[expect(clippy::cast_precision_loss, reason = "a count of networks")]
        let rate = count as f64 / began.1.elapsed().as_secs_f64();
        table.add(Row::new(
            format!("network, POST to created, {label}"),
            format!("median {:.0} ms, p99 {:.0} ms, {rate:.1} per second", quantile(0.5), quantile(0.99)),
        ));
        table.add(Row::new(
            "  CPU time of the server",
            format!("{:.1} ms CPU", micros(server.cpu()? - began.0, count) / 1e3),
        ));
    }
    let idle = server.idle_load(IDLE_PERIOD).await?;
    let count = list(&server, &token).await?.len();
    table.add(Row::new(format!("idle with {count} networks"), format!("{:.2} % of a core", idle * 100.0)));
    let began = Instant::now();
    let all = request("DELETE", "/networks", Some(&token), Some(&json!({"confirm": true})));
    ensure!(
        load::call(server.address, &all).await?.status == 202,
        "the server rejected the deletion of networks"
    );
    while !list(&server, &token).await?.is_empty() {
        ensure!(began.elapsed() < 5 * TIMEOUT, "timed out deleting networks");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of networks")]
    let rate = count as f64 / began.elapsed().as_secs_f64();
    table.add(Row::new("deleting networks", format!("{rate:.1} per second")));
    server.stop().await
}

/// Creates `count` networks and returns how many seconds each took.
async fn create(server: &Server, token: &str, concurrency: usize, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut workers = JoinSet::new();
    for worker in 0..concurrency {
        let (address, token) = (server.address, token.to_owned());
        let share = count / concurrency;
        workers.spawn(async move {
            let mut connection = Connection::open(address).await?;
            let mut durations = Vec::new();
            for number in 0..share {
                let body = json!({"name": format!("{concurrency}-{worker}-{number}"), "netblock": "10.0.0.0/24",
                                  "provide_dns": true});
                let began = Instant::now();
                let network =
                    connection.call(&request("POST", "/networks", Some(&token), Some(&body))).await?.ok()?;
                let network: Value = serde_json::from_slice(&network)?;
                let path = format!("/networks/{}", network["uuid"].as_str().context("no id")?);
                let get = request("GET", &path, Some(&token), None);
                loop {
                    let now: Value = serde_json::from_slice(&connection.call(&get).await?.ok()?)?;
                    match now["state"].as_str() {
                        Some("created") => break,
                        Some("initial") => {}
                        _ => bail!("failed to create a network: {now}"),
                    }
                    ensure!(began.elapsed() < TIMEOUT, "timed out creating a network");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                durations.push(began.elapsed().as_secs_f64());
            }
            anyhow::Ok(durations)
        });
    }
    let mut all = Vec::new();
    while let Some(worker) = workers.join_next().await {
        all.extend(worker??);
    }
    Ok(all)
}
