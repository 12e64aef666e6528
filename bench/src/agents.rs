//! What it costs to have something done inside a guest.
//!
//! The floor is the agent's port without us: another guest, of a QEMU that only this program speaks with. Both are
//! measured in turns.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::bare::{self, Bare, Ready};
use crate::images;
use crate::instances_real::{Api, Home, LOOK, PATIENCE, machines_cpu, millis, spread, start};
use crate::port::Port;
use crate::server::Server;
use crate::table::{Row, Table};
use crate::{Arguments, median, namespace, progress};

const MEMORY_MB: u64 = 256;
const COMMANDS: usize = 30;
const ROUNDS: usize = 3;
const MEBIBYTES: usize = 32;
const FILE: &str = "/tmp/bench";

/// Milliseconds that a command may take longer than over the port alone.
const OURS: f64 = 30.0;
/// How fast files must be moved, as a share of what the port alone can do.
const SHARE: f64 = 0.7;

/// Measures where the server is the only one who starts machines.
pub(crate) async fn measure_in_namespace(
    arguments: &Arguments,
    program: &Path,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section("inside guests");
    if let Some(why) = bare::missing(&arguments.image).await {
        table.add(Row::new("not measured", why));
        return Ok(());
    }
    let home = Home(tempfile::tempdir_in(program.parent().context("a program without a folder")?)?);
    let image = arguments.image.canonicalize()?;
    let what = ["--real-agents".as_ref(), home.0.path().as_os_str(), "--image".as_ref(), image.as_os_str()];
    namespace::measure(arguments, program, &what, table).await
}

pub(crate) async fn measure(
    program: &Path,
    folder: &Path,
    image: &Path,
    quick: bool,
    table: &mut Table,
) -> anyhow::Result<()> {
    let server = start(program, folder, image).await?;
    let mut api = Api::open(&server).await?;
    api.wait_for_image().await?;
    let kvm = api.node_has_kvm().await?;
    table.add(Row::new("the processor of guests", if kvm { "KVM" } else { "emulated (TCG)" }));
    progress("booting a guest with us");
    let wanted = json!({
        "name": "ours", "cpus": 1, "memory": MEMORY_MB, "disk": [{ "base": "label:tiny" }], "network": [],
        "side_channels": ["sf-agent"],
    });
    let began = Instant::now();
    let path = api.create(&wanted).await?;
    while !api.get(&path).await?["agent_state"].as_str().is_some_and(|state| state.starts_with("ready")) {
        ensure!(began.elapsed() < PATIENCE, "the agent is not ready in time");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let booted = began.elapsed();
    progress("booting a guest without us");
    let began = Instant::now();
    let alone = Bare::new(folder, image, MEMORY_MB, kvm)?.prepare(0).await?.boot().await?;
    let port = Port::open(&alone.port).await?;
    table.add(Row::new("a guest alone, from start to its agent", seconds(began.elapsed())));
    table.add(Row::new("an instance, from POST to its agent", seconds(booted)));

    let mut world = World { server: &server, api, path, folder, alone, port };
    world.commands(if quick { 10 } else { COMMANDS }, table).await?;
    world.files(if quick { 1 } else { ROUNDS }, if quick { 8 } else { MEBIBYTES }, table).await?;
    let World { mut api, path, alone, .. } = world;
    alone.end().await?;
    api.delete(&path).await?;
    server.stop().await
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// A guest of ours, and one without us.
struct World<'a> {
    server: &'a Server,
    api: Api,
    /// Of our instance in the API.
    path: String,
    folder: &'a Path,
    alone: Ready,
    port: Port,
}

/// What something took: time, and that of the processors in the guest's QEMU.
#[derive(Debug, Default)]
struct Taken {
    millis: Vec<f64>,
    guest: Vec<f64>,
}

impl Taken {
    fn add(&mut self, whole: Duration, guest: Duration) {
        self.millis.push(millis(whole));
        self.guest.push(guest.as_secs_f64() / whole.as_secs_f64());
    }

    fn median(&self) -> f64 {
        median(self.millis.clone())
    }

    fn guest(&self) -> String {
        format!("{:.0} %", median(self.guest.clone()) * 100.0)
    }

    fn rate(&self, mebibytes: usize) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let megabytes = (mebibytes << 20) as f64 / 1e6;
        megabytes / (self.median() / 1e3)
    }
}

impl World<'_> {
    /// Has something done in our guest, and answers its results.
    async fn ask(&mut self, what: &str, body: &Value) -> anyhow::Result<Value> {
        let asked = self.api.send("POST", &format!("{}/agent/{what}", self.path), Some(body)).await?;
        let path = format!("/agentoperations/{}", asked["uuid"].as_str().context("no id")?);
        let began = Instant::now();
        loop {
            let record = self.api.get(&path).await?;
            match record["state"].as_str() {
                Some("complete") => return Ok(record["results"].clone()),
                Some("preflight" | "queued" | "executing") => {}
                _ => anyhow::bail!("{path} is {}: {}", record["state"], record["error_message"]),
            }
            ensure!(began.elapsed() < PATIENCE, "{path} is not done in time");
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn ours(&mut self, what: &str, body: &Value, taken: &mut Taken) -> anyhow::Result<Value> {
        let began = (Instant::now(), machines_cpu(self.folder));
        let results = self.ask(what, body).await?;
        taken.add(began.0.elapsed(), machines_cpu(self.folder).saturating_sub(began.1));
        Ok(results)
    }

    async fn alone(
        &mut self,
        work: impl AsyncFnOnce(&mut Port) -> anyhow::Result<()>,
        taken: &mut Taken,
    ) -> anyhow::Result<()> {
        let began = (Instant::now(), self.alone.cpu()?);
        work(&mut self.port).await?;
        taken.add(began.0.elapsed(), self.alone.cpu()? - began.1);
        Ok(())
    }

    /// The shortest command there is.
    async fn commands(&mut self, count: usize, table: &mut Table) -> anyhow::Result<()> {
        progress(&format!("{count} commands, with us and without"));
        let (mut alone, mut ours) = (Taken::default(), Taken::default());
        let body = json!({ "command_line": "true" });
        // The first ones read programs from the disk.
        self.ask("execute", &body).await?;
        self.port.execute("true").await?;
        let busy = self.server.cpu()?;
        for _ in 0..count {
            self.alone(async |port| port.execute("true").await, &mut alone).await?;
            let results = self.ours("execute", &body, &mut ours).await?;
            ensure!(results["0"]["return-code"] == 0, "it ended with {results}");
        }
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let busy = millis(self.server.cpu()? - busy) / count as f64;
        let more = median(ours.millis.iter().zip(&alone.millis).map(|(ours, alone)| ours - alone).collect());
        table.add(Row::new("execute true over the port alone", spread(&mut alone.millis)));
        table.add(Row::new("  its share in QEMU and the guest", alone.guest()));
        table.add(
            Row::new("execute true, from POST to complete", spread(&mut ours.millis))
                .times(ours.median() / alone.median()),
        );
        table.add(Row::new("  more than over the port alone", format!("{more:.0} ms")).target_if(
            count == COMMANDS,
            format!("<= {OURS} ms"),
            more <= OURS,
        ));
        table.add(Row::new("  its share in QEMU and the guest", ours.guest()));
        table.add(Row::new("  in the server itself, with being asked", format!("{busy:.1} ms CPU")));
        Ok(())
    }

    /// Files in and out.
    async fn files(&mut self, rounds: usize, mebibytes: usize, table: &mut Table) -> anyhow::Result<()> {
        let source = self.folder.join("content");
        let content = noise(mebibytes << 20);
        std::fs::write(&source, &content)?;
        let token = self.server.token().await?;
        let upload = images::begin(self.server, &token).await?;
        images::send(self.server, &token, &upload, &source, 0, None)?;
        let blob = images::finish(self.server, &token, &upload).await?;
        let (put, get) = (json!({ "blob_uuid": blob, "path": FILE, "mode": 420 }), json!({ "path": FILE }));
        let mut taken = [const { Taken { millis: vec![], guest: vec![] } }; 4];
        for round in 0..rounds {
            progress(&format!("{mebibytes} MiB in and out, round {} of {rounds}", round + 1));
            let [put_alone, put_ours, get_alone, get_ours] = &mut taken;
            self.alone(async |port| port.put(FILE, &content).await, put_alone).await?;
            self.ours("put", &put, put_ours).await?;
            let read = async |port: &mut Port| {
                let size = port.get(FILE).await?;
                ensure!(size == (mebibytes << 20) as u64, "the file has {size} bytes");
                Ok(())
            };
            self.alone(read, get_alone).await?;
            let results = self.ours("get", &get, get_ours).await?;
            ensure!(results["0"]["content_blob"].is_string(), "it ended with {results}");
            // Memory is scarce in there.
            self.port.execute(&format!("rm {FILE}")).await?;
            self.ask("execute", &json!({ "command_line": format!("rm {FILE}") })).await?;
        }
        for (what, [alone, ours]) in [("put", [&taken[0], &taken[1]]), ("get", [&taken[2], &taken[3]])] {
            let rate = alone.rate(mebibytes);
            table.add(Row::new(
                format!("{what} {mebibytes} MiB over the port alone"),
                format!("{rate:.1} MB/s, {} in the guest", alone.guest()),
            ));
            let share = ours.rate(mebibytes) / rate;
            table.add(
                Row::new(
                    format!("{what} {mebibytes} MiB, from POST to complete"),
                    format!("{:.1} MB/s = {:.0} %", ours.rate(mebibytes), share * 100.0),
                )
                .target_if(
                    mebibytes == MEBIBYTES,
                    format!(">= {:.0} %", SHARE * 100.0),
                    share >= SHARE,
                ),
            );
            table.add(Row::new("  its share in QEMU and the guest", ours.guest()));
        }
        Ok(())
    }
}

/// Bytes that nothing can be left out of.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        // An xorshift generator: the same bytes in each run.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
