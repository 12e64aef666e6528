//! Benchmarks ten daemons with many simulated nodes on one MariaDB. Each scale starts from an empty database.
//!
//! Work that concerns one object, or one page of a list, must cost the same with 10 and with 1 000 nodes. All processes share
//! the cores of this host, so rates and times are lower bounds of what ten hosts reach.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use muster_store::Store;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::instances::wait_until_settled;
use crate::load::{self, Connection, request};
use crate::mariadb::MariaDb;
use crate::sampling::progress;
use crate::server::Server;
use crate::table::{Row, Table};

const DAEMONS: usize = 10;
const SCALES: [usize; 3] = [10, 100, 1000];
const INSTANCES_PER_NODE: usize = 20;
/// Instances whose creation in one namespace is timed.
const TIMED_CREATIONS: usize = 100;
/// Instances of the namespace that is listed, at every scale.
const LISTED: usize = 100;
/// Connections to each daemon.
const CONNECTIONS: usize = 4;
const CALLS: usize = 2000;
const LISTS: usize = 200;
/// How long the idle daemons are observed.
const IDLE_PERIOD: Duration = Duration::from_secs(20);
/// The timeout for nodes to join, and to be noticed as lost.
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The target for placements per second in one namespace.
const MIN_PLACEMENT_RATE: f64 = 200.0;
/// The setting after which a silent node is missing, and the time within which that must be noticed, in seconds.
const MISSING_AFTER: f64 = 15.0;
const MAX_DETECTION_DELAY: f64 = 5.0;

/// What is measured at one scale.
struct ScaleFigures {
    nodes: usize,
    instances: usize,
    /// Statements per second of all daemons.
    idle_statements: f64,
    /// Cores that all daemons use, and that MariaDB uses.
    idle_daemons: f64,
    idle_database: f64,
    /// Placements per second in one namespace.
    placements: f64,
    create: Latency,
    get: Latency,
    list: Latency,
    node_list: Latency,
    /// Seconds from the death of a daemon until its nodes are missing.
    detection: f64,
    /// Megabytes of the largest daemon.
    memory: f64,
}

/// Response times in milliseconds.
#[derive(Clone, Copy)]
struct Latency {
    median: f64,
    p99: f64,
}

impl Latency {
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: usize| times[(times.len() - 1) * share / 100];
        Self { median: at(50), p99: at(99) }
    }
}

impl std::fmt::Display for Latency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1}, {:.1} ms", self.median, self.p99)
    }
}

/// Measures every scale, or all but the largest one if `quick`. Writes a plot to a file if a path is given.
pub(crate) async fn measure(
    program: &Path,
    quick: bool,
    plot: Option<&Path>,
    table: &mut Table,
) -> anyhow::Result<()> {
    let mut figures = Vec::new();
    for nodes in &SCALES[..if quick { 2 } else { 3 }] {
        let measured = measure_scale(program, *nodes).await.with_context(|| format!("{nodes} nodes"))?;
        add_rows(&measured, table);
        figures.push(measured);
    }
    if let Some(path) = plot {
        std::fs::write(path, draw(&figures)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

async fn measure_scale(program: &Path, nodes: usize) -> anyhow::Result<ScaleFigures> {
    let directory = tempfile::tempdir()?;
    progress(&format!("starting MariaDB and {DAEMONS} daemons with {nodes} nodes"));
    let mariadb = MariaDb::start(directory.path()).await?.context("mariadbd is not installed")?;
    let mut daemons = Vec::new();
    for number in 0..DAEMONS {
        daemons.push(start_daemon(program, directory.path(), &mariadb, number, nodes / DAEMONS).await?);
    }
    let store = Store::open(&mariadb.urls[0]).await?;
    let joined = "SELECT COUNT(*) FROM nodes WHERE state = 'created'";
    wait_for_count(&store, joined, nodes).await.context("nodes join")?;
    let token = daemons[0].token().await?;

    let instances = nodes * INSTANCES_PER_NODE;
    let addresses: Vec<SocketAddr> = daemons.iter().map(|daemon| daemon.address).collect();
    let mut created = 0;
    for (namespace, count) in [("filled", instances - TIMED_CREATIONS - LISTED), ("listed", LISTED)] {
        progress(&format!("creating {count} instances"));
        let token = daemons[0].new_namespace(&token, namespace).await?;
        run(&addresses, count, create_instance(&token, created)).await?;
        created += count;
        wait_until_settled(&store).await?;
    }
    progress("idle load");
    let idle = idle_load(&daemons, &mariadb, &store).await?;
    progress("creating instances in one namespace");
    let timed_token = daemons[0].new_namespace(&token, "timed").await?;
    let (create, elapsed) = run(&addresses, TIMED_CREATIONS, create_instance(&timed_token, created)).await?;
    wait_until_settled(&store).await?;

    progress("reading");
    let listed_token = daemons[0].token_of(&token, "listed", "list").await?;
    let all = request("GET", "/instances", Some(&listed_token), None);
    let records: Vec<Value> = serde_json::from_slice(&load::call(addresses[0], &all).await?.ok()?)?;
    ensure!(records.len() == LISTED, "{} instances listed instead of {LISTED}", records.len());
    let gets: Vec<Arc<[u8]>> = records
        .iter()
        .map(|record| {
            let id = record["uuid"].as_str().context("no id")?;
            Ok(request("GET", &format!("/instances/{id}"), Some(&listed_token), None))
        })
        .collect::<anyhow::Result<_>>()?;
    let (get, _) = run(&addresses, CALLS, move |number| Arc::clone(&gets[number % gets.len()])).await?;
    let (list, _) = run(&addresses, LISTS, move |_| Arc::clone(&all)).await?;
    let all_nodes = request("GET", "/nodes", Some(&token), None);
    let (node_list, _) = run(&addresses, LISTS, move |_| Arc::clone(&all_nodes)).await?;
    let mut memory = 0f64;
    for daemon in &daemons {
        memory = memory.max(daemon.memory()?);
    }

    progress("killing a daemon");
    let lost = daemons.pop().context("no daemon")?;
    lost.kill().await?;
    let began = Instant::now();
    let missing = "SELECT COUNT(*) FROM nodes WHERE state = 'missing'";
    wait_for_count(&store, missing, nodes / DAEMONS).await.context("nodes become missing")?;
    let detection = began.elapsed().as_secs_f64();

    store.close().await;
    for daemon in daemons {
        daemon.stop().await?;
    }
    mariadb.stop().await?;
    Ok(ScaleFigures {
        nodes,
        instances,
        idle_statements: idle.statements,
        idle_daemons: idle.daemons,
        idle_database: idle.database,
        placements: per_second(TIMED_CREATIONS, elapsed),
        create: Latency::of(create),
        get: Latency::of(get),
        list: Latency::of(list),
        node_list: Latency::of(node_list),
        detection,
        memory,
    })
}

async fn start_daemon(
    program: &Path,
    directory: &Path,
    mariadb: &MariaDb,
    number: usize,
    nodes: usize,
) -> anyhow::Result<Server> {
    let data = directory.join(format!("daemon-{number}"));
    std::fs::create_dir_all(&data)?;
    let settings = [
        ("DATABASE_URL", mariadb.urls[0].as_str()),
        ("AUTH_SECRET_SEED", "the seed of the benchmark"),
        ("SYSTEM_KEY", "the key of the benchmark"),
        ("NODE_PORT", "0"),
        ("NODE_CHECKIN_MAXIMUM", &MISSING_AFTER.to_string()),
    ];
    let settings = settings.map(|(name, value)| (format!("MUSTER_{name}"), value.to_owned()));
    let first = (number * nodes + 1).to_string();
    let arguments = ["--simulate", &nodes.to_string(), "--simulate-from", &first];
    Server::start_with(program, &data, &settings, &arguments).await
}

fn create_instance(token: &str, from: usize) -> impl Fn(usize) -> Arc<[u8]> + Send + Sync + 'static {
    let token = token.to_owned();
    move |number| {
        let body = json!({
            "name": format!("i{}", from + number), "cpus": 1, "memory": 1024, "disk": [{ "size": 1 }], "network": [],
        });
        request("POST", "/instances", Some(&token), Some(&body))
    }
}

/// Sends requests through all daemons. Returns the response times in milliseconds, and the time that all took.
async fn run<R>(addresses: &[SocketAddr], count: usize, call: R) -> anyhow::Result<(Vec<f64>, Duration)>
where
    R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
{
    let (call, next, began) = (Arc::new(call), Arc::new(AtomicUsize::new(0)), Instant::now());
    let mut callers = JoinSet::new();
    for address in addresses.iter().flat_map(|address| [*address; CONNECTIONS]) {
        let (call, next) = (Arc::clone(&call), Arc::clone(&next));
        callers.spawn(async move {
            let mut connection = Connection::open(address).await?;
            let mut times = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return anyhow::Ok(times);
                }
                let began = Instant::now();
                connection.call(&call(number)).await?.ok()?;
                times.push(began.elapsed().as_secs_f64() * 1e3);
            }
        });
    }
    let mut times = Vec::with_capacity(count);
    while let Some(caller) = callers.join_next().await {
        times.extend(caller??);
    }
    Ok((times, began.elapsed()))
}

/// The load without requests.
struct IdleLoad {
    statements: f64,
    daemons: f64,
    database: f64,
}

async fn idle_load(daemons: &[Server], mariadb: &MariaDb, store: &Store) -> anyhow::Result<IdleLoad> {
    let cpu = || daemons.iter().map(Server::cpu).sum::<anyhow::Result<Duration>>();
    let statements = "SELECT CAST(VARIABLE_VALUE AS SIGNED) FROM information_schema.GLOBAL_STATUS \
                      WHERE VARIABLE_NAME = 'QUESTIONS'";
    for daemon in daemons {
        daemon.wait_until_drained().await?;
    }
    let began = (Instant::now(), count(store, statements).await?, cpu()?, mariadb.cpu()?);
    tokio::time::sleep(IDLE_PERIOD).await;
    let (sent, daemons, database) = (count(store, statements).await?, cpu()?, mariadb.cpu()?);
    let seconds = began.0.elapsed().as_secs_f64();
    Ok(IdleLoad {
        statements: per_second(sent - began.1, began.0.elapsed()),
        daemons: (daemons - began.2).as_secs_f64() / seconds,
        database: (database - began.3).as_secs_f64() / seconds,
    })
}

async fn count(store: &Store, sql: &str) -> anyhow::Result<usize> {
    let row = store.query_one(sql, &[]).await?.context("no count")?;
    Ok(usize::try_from(row.scalar::<i64>()?)?)
}

async fn wait_for_count(store: &Store, sql: &str, expected: usize) -> anyhow::Result<()> {
    let began = Instant::now();
    loop {
        let found = count(store, sql).await?;
        if found == expected {
            return Ok(());
        }
        ensure!(began.elapsed() < TIMEOUT, "{found} instead of {expected} after {TIMEOUT:?}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are small")]
fn per_second(count: usize, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}

fn add_rows(figures: &ScaleFigures, table: &mut Table) {
    let ScaleFigures { nodes, instances, .. } = figures;
    table.section(&format!("{DAEMONS} daemons, {nodes} simulated nodes, {instances} instances on MariaDB"));
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let per_node = figures.idle_statements / *nodes as f64;
    table.add(Row::new(
        "idle: statements, and per node",
        format!("{:.1} and {per_node:.2} per second", figures.idle_statements),
    ));
    table.add(Row::new(
        "idle: all daemons, and MariaDB",
        format!("{:.1} and {:.1} % of a core", figures.idle_daemons * 100.0, figures.idle_database * 100.0),
    ));
    table.add(
        Row::new("POST /instances in one namespace", format!("{:.0} per second", figures.placements))
            .target(format!(">= {MIN_PLACEMENT_RATE}"), figures.placements >= MIN_PLACEMENT_RATE),
    );
    for (label, latency) in [
        ("  median and 99th percentile".to_owned(), figures.create),
        ("GET /instances/{ref}, median and 99th percentile".to_owned(), figures.get),
        (format!("GET /instances with {LISTED} instances"), figures.list),
        ("GET /nodes".to_owned(), figures.node_list),
    ] {
        table.add(Row::new(label, latency.to_string()));
    }
    let limit = MISSING_AFTER + MAX_DETECTION_DELAY;
    table.add(
        Row::new("killed daemon: its nodes are missing after", format!("{:.1} s", figures.detection))
            .target(format!("<= {limit} s"), figures.detection <= limit),
    );
    table.add(Row::new("resident memory of the largest daemon", format!("{:.0} MB", figures.memory)));
}

/// Draws how figures grow with the number of nodes, as multiples of the smallest scale. Both axes are logarithmic.
fn draw(figures: &[ScaleFigures]) -> String {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 320.0;
    const LEFT: f64 = 60.0;
    const TOP: f64 = 20.0;
    const PLOT_WIDTH: f64 = 330.0;
    const PLOT_HEIGHT: f64 = 250.0;
    /// The largest multiple that is shown.
    const MAX: f64 = 100.0;
    type Series = (&'static str, &'static str, fn(&ScaleFigures) -> f64);
    let series: [Series; 5] = [
        ("#1f77b4", "idle statements", |figures| figures.idle_statements),
        ("#ff7f0e", "time of a creation", |figures| figures.create.median),
        ("#2ca02c", "GET of one instance", |figures| figures.get.median),
        ("#d62728", "list of 100 instances", |figures| figures.list.median),
        ("#9467bd", "list of all nodes", |figures| figures.node_list.median),
    ];
    let last = figures.len().saturating_sub(1).max(1);
    #[expect(clippy::cast_precision_loss, reason = "at most three scales")]
    let x = |at: usize| LEFT + PLOT_WIDTH * at as f64 / last as f64;
    let y = |multiple: f64| {
        let share = (multiple.clamp(1.0 / MAX, MAX).log10() - MAX.log10()) / (-2.0 * MAX.log10());
        TOP + PLOT_HEIGHT * share
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    // Writing to a string does not fail.
    for multiple in [0.01, 0.1, 1.0, 10.0, 100.0] {
        let (at, right) = (y(multiple), LEFT + PLOT_WIDTH);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#ccc\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{multiple} x</text>",
            LEFT - 8.0,
            at + 4.0
        );
    }
    for (at, scale) in figures.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} nodes</text>",
            x(at),
            TOP + PLOT_HEIGHT + 20.0,
            scale.nodes
        );
    }
    for (number, (color, label, value)) in (0u8..).zip(series) {
        let base = figures.first().map_or(1.0, value);
        let points: Vec<String> = figures
            .iter()
            .enumerate()
            .map(|(at, scale)| format!("{:.1},{:.1}", x(at), y(value(scale) / base)))
            .collect();
        let legend = TOP + 20.0 + 22.0 * f64::from(number);
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\n\
             <text x=\"{:.1}\" y=\"{legend:.1}\" fill=\"{color}\">{label}</text>",
            points.join(" "),
            LEFT + PLOT_WIDTH + 30.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}
