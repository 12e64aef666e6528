//! Benchmarks many open pages of the web UI on many instances, and its first view.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::load::{self, Connection, Pool, request};
use crate::sampling::{CONNECTIONS, ROUNDS, median, progress};
use crate::server::Server;
use crate::table::{Row, Table};

const INSTANCES: usize = 1000;
const PAGES: usize = 200;
/// The number of streams that a key may have.
const PAGES_OF_KEY: usize = 20;
/// How long the server is observed while nothing changes.
const IDLE_PERIOD: Duration = Duration::from_secs(10);
/// How often the delay of an event is measured.
const EVENTS: usize = 20;
const TIMEOUT: Duration = Duration::from_secs(300);
/// The size of the first part of a list that the UI reads.
const FIRST_PAGE: usize = 60;

/// The maximum memory of the server for all pages, in MB.
const MAX_PAGES_MEMORY: f64 = 50.0;
/// The maximum time until an event has reached all pages, in milliseconds.
const MAX_DELAY: f64 = 1000.0;
/// The targets for the first view, in milliseconds and kB.
const MAX_FIRST_VIEW_TIME: f64 = 200.0;
const MAX_FIRST_VIEW_SIZE: f64 = 300.0;

pub(crate) async fn measure(program: &Path, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    let divisor = if quick { 10 } else { 1 };
    let (pages, instances) = (PAGES / divisor, INSTANCES / divisor);
    table.section(&format!("{pages} pages of the web UI, {instances} instances"));
    let directory = tempfile::tempdir()?;
    let server =
        Server::start_with(program, &directory.path().join("data"), &[], &["--simulate", "50"]).await?;
    let token = server.token().await?;
    progress(&format!("creating {instances} instances"));
    let body = json!({ "name": "web", "cpus": 1, "memory": 64, "disk": [{ "size": 1 }], "network": [] });
    let create = request("POST", "/instances", Some(&token), Some(&body));
    let mut pool = Pool::open(server.address, CONNECTIONS).await?;
    pool.run(instances, None, move |_| create.clone()).await?;
    wait_until_created(&server, &token, instances).await?;
    server.wait_until_drained().await?;

    progress("first view of the UI");
    let view = first_view(&server, &token).await?;
    let idle_before = server.idle_load(IDLE_PERIOD).await?;
    let memory_before = server.memory()?;
    progress(&format!("{pages} open pages"));
    let mut streams = Vec::with_capacity(pages);
    for number in 0..pages.div_ceil(PAGES_OF_KEY) {
        let token = server.token_of(&token, "system", &format!("page{number}")).await?;
        for _ in 0..PAGES_OF_KEY.min(pages - streams.len()) {
            streams.push(Stream::open(&server, &token).await?);
        }
    }
    let idle_after = server.idle_load(IDLE_PERIOD).await?;
    let memory = server.memory()? - memory_before;
    let cpu = server.cpu()?;
    let mut delays = Vec::new();
    for number in 0..EVENTS {
        delays.push(delay(&server, &token, number, &mut streams).await?);
    }
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let cpu = (server.cpu()? - cpu).as_secs_f64() * 1e3 / EVENTS as f64;
    drop(streams);
    server.stop().await?;

    let delay = median(delays);
    table.add(Row::new("memory of the server for the pages", format!("{memory:.1} MB")).target_if(
        !quick,
        format!("<= {MAX_PAGES_MEMORY} MB"),
        memory <= MAX_PAGES_MEMORY,
    ));
    table.add(Row::new(
        "idle without pages, and with all pages",
        format!("{:.1} and {:.1} % of a core", idle_before * 100.0, idle_after * 100.0),
    ));
    table.add(Row::new("a change with its events, to all pages", format!("{cpu:.1} ms CPU")));
    table.add(
        Row::new("  until the last page has received it", format!("{delay:.0} ms"))
            .target(format!("<= {MAX_DELAY} ms"), delay <= MAX_DELAY),
    );
    table.add(
        Row::new("first view, one after the other on one connection", format!("{:.0} ms", view.milliseconds))
            .target(format!("<= {MAX_FIRST_VIEW_TIME} ms"), view.milliseconds <= MAX_FIRST_VIEW_TIME),
    );
    table.add(
        Row::new("  size", format!("{:.0} kB", view.kilobytes))
            .target(format!("<= {MAX_FIRST_VIEW_SIZE} kB"), view.kilobytes <= MAX_FIRST_VIEW_SIZE),
    );
    Ok(())
}

/// Waits until no instance is being created.
async fn wait_until_created(server: &Server, token: &str, count: usize) -> anyhow::Result<()> {
    let began = Instant::now();
    let list = request("GET", "/instances", Some(token), None);
    loop {
        let records: Value = serde_json::from_slice(&load::call(server.address, &list).await?.ok()?)?;
        let records = records.as_array().context("not a list")?;
        if records.iter().filter(|record| record["power_state"] == "on").count() == count {
            return Ok(());
        }
        ensure!(began.elapsed() < TIMEOUT, "timed out waiting for the instances");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// What the first view of the UI costs.
struct FirstView {
    milliseconds: f64,
    kilobytes: f64,
}

/// Loads what a browser loads until it shows the first instances: the page, its files, the session and the list.
async fn first_view(server: &Server, token: &str) -> anyhow::Result<FirstView> {
    let page = load::call(server.address, &request("GET", "/ui/", None, None)).await?.ok()?;
    let page = String::from_utf8(page)?;
    let files = page.split(['"', '\'']).filter(|text| {
        !text.starts_with("..") && [".js", ".mjs", ".css", ".svg"].iter().any(|end| text.ends_with(end))
    });
    let mut files: Vec<String> = files.map(|file| format!("/ui/{}", file.trim_start_matches("./"))).collect();
    files.sort();
    files.dedup();
    ensure!(files.len() > 10, "the page refers to {files:?}");
    let records = ["/auth/session".to_owned(), format!("/instances?limit={FIRST_PAGE}")];
    let requests: Vec<Vec<u8>> = ["/ui/".to_owned()]
        .into_iter()
        .chain(files)
        .chain(records)
        .map(|path| {
            format!(
                "GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept-encoding: gzip\r\nauthorization: Bearer {token}\r\n\r\n"
            )
            .into_bytes()
        })
        .collect();
    let (mut times, mut sizes) = (Vec::new(), Vec::new());
    // The first round compresses the files.
    for _ in 0..=ROUNDS {
        let mut connection = Connection::open(server.address).await?;
        let began = Instant::now();
        let mut bytes = 0;
        for request in &requests {
            bytes += connection.call(request).await?.ok()?.len();
        }
        times.push(began.elapsed().as_secs_f64() * 1e3);
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let kilobytes = bytes as f64 / 1e3;
        sizes.push(kilobytes);
    }
    Ok(FirstView { milliseconds: median(times.split_off(1)), kilobytes: median(sizes) })
}

/// The event stream of a page.
struct Stream {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Stream {
    /// Opens a stream and waits until it is complete.
    async fn open(server: &Server, token: &str) -> anyhow::Result<Self> {
        let mut stream = TcpStream::connect(server.address).await?;
        stream.write_all(&request("GET", "/events/stream", Some(token), None)).await?;
        let mut stream = Self { stream, buffer: Vec::new() };
        stream.wait_for(b"event: started").await?;
        Ok(stream)
    }

    /// Waits until the stream contains a text.
    async fn wait_for(&mut self, text: &[u8]) -> anyhow::Result<()> {
        loop {
            if self.buffer.windows(text.len()).any(|window| window == text) {
                self.buffer.clear();
                return Ok(());
            }
            let read = tokio::time::timeout(TIMEOUT, self.stream.read_buf(&mut self.buffer)).await;
            ensure!(read.context("timed out waiting for an event")?? > 0, "the server closed a stream");
        }
    }
}

/// Changes something, and returns the milliseconds until all streams have the event.
async fn delay(
    server: &Server,
    token: &str,
    number: usize,
    streams: &mut Vec<Stream>,
) -> anyhow::Result<f64> {
    let body = json!({ "name": format!("event{number}"), "netblock": "10.0.0.0/24" });
    let create = request("POST", "/networks", Some(token), Some(&body));
    let began = Instant::now();
    let network: Value = serde_json::from_slice(&load::call(server.address, &create).await?.ok()?)?;
    let uuid = network["uuid"].as_str().context("no id")?.to_owned();
    let mut readers = JoinSet::new();
    for mut stream in streams.drain(..) {
        let uuid = uuid.clone();
        readers.spawn(async move { stream.wait_for(uuid.as_bytes()).await.map(|()| stream) });
    }
    while let Some(stream) = readers.join_next().await {
        streams.push(stream??);
    }
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
