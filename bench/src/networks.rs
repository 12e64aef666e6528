//! What networks cost: reading them on a simulated node, and making them on the real data plane.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::load::{self, Connection, request};
use crate::server::Server;
use crate::table::{Row, Table};
use crate::{Arguments, Caller, Engine, ROUNDS, SLICES, Scale, median, micros, namespace, progress, same};

/// Networks in the list that is measured.
const NETWORKS: usize = 1000;
/// How long a network may take to be made.
const PATIENCE: Duration = Duration::from_secs(60);
/// Networks made one after the other, and eight at a time.
const SINGLE: usize = 50;
const PARALLEL: usize = 160;
/// Networks that one daemon looks after while its idle cost is measured.
const IDLE: Duration = Duration::from_secs(6);

/// Reading networks, as multiples of the floor.
pub(crate) async fn measure(
    server: &Server,
    engine: &Engine,
    scale: Scale,
    table: &mut Table,
) -> anyhow::Result<()> {
    progress(&format!("{}: creating {NETWORKS} networks", engine.name));
    let token = server.token().await?;
    let new = {
        let token = token.clone();
        move |number: usize| {
            let body =
                json!({"name": format!("net-{number:04}"), "netblock": "10.0.0.0/24", "provide_nat": false});
            request("POST", "/networks", Some(&token), Some(&body))
        }
    };
    let began = Instant::now();
    let mut caller = Caller::new(server).await?;
    caller.cost(NETWORKS, new).await?;
    let last = wait_created(server, &token).await?;
    let created_in = began.elapsed();
    server.drained().await?;

    let livez = request("GET", "/livez", None, None);
    let get = request("GET", &format!("/networks/{last}"), Some(&token), None);
    let (mut floors, mut gets, mut lists) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        let slice = scale.calls / SLICES;
        let mut sums = [Duration::ZERO; 2];
        for _ in 0..SLICES {
            sums[0] += caller.cost(slice, same(&livez)).await?;
            sums[1] += caller.cost(slice, same(&get)).await?;
        }
        floors.push(micros(sums[0], scale.calls));
        gets.push(micros(sums[1], scale.calls));
        let began = server.cpu()?;
        let listed = list(server, &token).await?;
        lists.push((server.cpu()? - began).as_secs_f64() * 1e3);
        ensure!(listed.len() == NETWORKS, "{} networks are listed", listed.len());
    }
    let times = median(gets.iter().zip(&floors).map(|(get, floor)| get / floor).collect());
    table.add(Row::new("GET /networks/{ref}", format!("{:.1} µs CPU", median(gets))).times(times).target_if(
        engine.has_targets,
        "<= 5 x",
        times <= 5.0,
    ));
    let listed = median(lists);
    table.add(
        Row::new(format!("GET /networks, {NETWORKS} of them"), format!("{listed:.1} ms CPU")).target_if(
            engine.has_targets,
            "< 15 ms",
            listed < 15.0,
        ),
    );
    #[expect(clippy::cast_precision_loss, reason = "a count of networks")]
    let rate = NETWORKS as f64 / created_in.as_secs_f64();
    table.add(Row::new("networks made on a simulated node", format!("{rate:.0} per second")));
    let began = server.cpu()?;
    tokio::time::sleep(IDLE).await;
    let idle = (server.cpu()? - began).as_secs_f64() / IDLE.as_secs_f64();
    table.add(Row::new(format!("idle with {NETWORKS} networks"), format!("{:.2} % of a core", idle * 100.0)));
    Ok(())
}

async fn list(server: &Server, token: &str) -> anyhow::Result<Vec<Value>> {
    let answer = load::call(server.address, &request("GET", "/networks", Some(token), None)).await?;
    Ok(serde_json::from_slice(&answer.ok()?)?)
}

/// Waits until no network is on its way, and names one.
async fn wait_created(server: &Server, token: &str) -> anyhow::Result<String> {
    let deadline = Instant::now() + 5 * PATIENCE;
    loop {
        let listed = list(server, token).await?;
        if let Some(bad) = listed.iter().find(|network| network["state"] == "error") {
            bail!("a network is in error: {}", bad["error_message"]);
        }
        if listed.iter().all(|network| network["state"] == "created") {
            let one = listed.first().and_then(|network| network["uuid"].as_str()).context("no network")?;
            return Ok(one.to_owned());
        }
        ensure!(Instant::now() < deadline, "networks are not made in time");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Measures in a network namespace where the server is the only one who makes networks.
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

/// Makes networks on the kernel of this machine, and takes them apart again.
pub(crate) async fn measure_real(program: &Path, part: usize, table: &mut Table) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let settings: Vec<(String, String)> =
        [("MUSTER_NODE_MESH_IP", "127.0.0.1"), ("MUSTER_FLOATING_NETWORK", "172.29.0.0/16")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec();
    let server = Server::start_real(program, &folder.path().join("data"), &settings).await?;
    let token = server.token().await?;
    for (what, at_once, count) in
        [("1 at a time", 1, SINGLE / part.min(5)), ("8 at a time", 8, PARALLEL / part.min(5))]
    {
        let began = (server.cpu()?, Instant::now());
        let mut took = make(&server, &token, at_once, count).await?;
        took.sort_by(f64::total_cmp);
        let at = |share: f64| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "an index"
            )]
            let index = (took.len() as f64 * share) as usize;
            took[index.min(took.len() - 1)] * 1e3
        };
        #[expect(clippy::cast_precision_loss, reason = "a count of networks")]
        let rate = count as f64 / began.1.elapsed().as_secs_f64();
        table.add(Row::new(
            format!("network create to created, {what}"),
            format!("median {:.0} ms, p99 {:.0} ms, {rate:.1} per second", at(0.5), at(0.99)),
        ));
        table.add(Row::new(
            "  in the server itself",
            format!("{:.1} ms CPU", micros(server.cpu()? - began.0, count) / 1e3),
        ));
    }
    let began = server.cpu()?;
    tokio::time::sleep(IDLE).await;
    let idle = (server.cpu()? - began).as_secs_f64() / IDLE.as_secs_f64();
    let count = list(&server, &token).await?.len();
    table
        .add(Row::new(format!("looking after {count} networks"), format!("{:.2} % of a core", idle * 100.0)));
    let began = Instant::now();
    let all = request("DELETE", "/networks", Some(&token), Some(&json!({"confirm": true})));
    ensure!(load::call(server.address, &all).await?.status == 202, "the networks are not deleted");
    while !list(&server, &token).await?.is_empty() {
        ensure!(began.elapsed() < 5 * PATIENCE, "networks are not gone in time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of networks")]
    let rate = count as f64 / began.elapsed().as_secs_f64();
    table.add(Row::new("networks deleted", format!("{rate:.1} per second")));
    server.stop().await
}

/// Makes `count` networks, some at once. Seconds that each took.
async fn make(server: &Server, token: &str, at_once: usize, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut workers = JoinSet::new();
    for worker in 0..at_once {
        let (address, token) = (server.address, token.to_owned());
        let share = count / at_once;
        workers.spawn(async move {
            let mut connection = Connection::open(address).await?;
            let mut took = Vec::new();
            for number in 0..share {
                let body = json!({"name": format!("{at_once}-{worker}-{number}"), "netblock": "10.0.0.0/24",
                                  "provide_dns": true});
                let began = Instant::now();
                let made =
                    connection.call(&request("POST", "/networks", Some(&token), Some(&body))).await?.ok()?;
                let made: Value = serde_json::from_slice(&made)?;
                let path = format!("/networks/{}", made["uuid"].as_str().context("no id")?);
                let get = request("GET", &path, Some(&token), None);
                loop {
                    let now: Value = serde_json::from_slice(&connection.call(&get).await?.ok()?)?;
                    match now["state"].as_str() {
                        Some("created") => break,
                        Some("initial") => {}
                        _ => bail!("a network is not made: {now}"),
                    }
                    ensure!(began.elapsed() < PATIENCE, "a network is not made in time");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                took.push(began.elapsed().as_secs_f64());
            }
            anyhow::Ok(took)
        });
    }
    let mut all = Vec::new();
    while let Some(worker) = workers.join_next().await {
        all.extend(worker??);
    }
    Ok(all)
}
