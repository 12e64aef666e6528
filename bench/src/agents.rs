//! Benchmarks agent operations.
//!
//! The baseline is a guest of a QEMU without Muster, whose agent this program uses directly. Both are measured
//! alternately.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::arguments::Arguments;
use crate::bare::{self, BareQemu, RunningQemu};
use crate::images;
use crate::instances_real::{Api, POLL_INTERVAL, ServerHome, TIMEOUT, millis, spread, start_server, vms_cpu};
use crate::namespace;
use crate::port::Port;
use crate::sampling::{median, progress};
use crate::server::Server;
use crate::table::{Row, Table};

const MEMORY_MB: u64 = 256;
const COMMANDS: usize = 30;
const ROUNDS: usize = 3;
const MEBIBYTES: usize = 32;
const GUEST_FILE: &str = "/tmp/bench";

/// The target for the latency of a command beyond the baseline, in milliseconds.
const MAX_OVERHEAD: f64 = 30.0;
/// The target for the rate of transfers as a share of the baseline.
const MIN_TRANSFER_SHARE: f64 = 0.7;

/// Runs the benchmark in its own namespaces.
pub(crate) async fn measure_in_namespace(
    arguments: &Arguments,
    program: &Path,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section("agent operations");
    if let Some(requirement) = bare::missing_requirement(&arguments.image).await {
        table.add(Row::new("not measured", requirement));
        return Ok(());
    }
    let home =
        ServerHome(tempfile::tempdir_in(program.parent().context("the program has no parent directory")?)?);
    let image = arguments.image.canonicalize()?;
    let child_arguments =
        ["--real-agents".as_ref(), home.0.path().as_os_str(), "--image".as_ref(), image.as_os_str()];
    namespace::measure(arguments, program, &child_arguments, table).await
}

pub(crate) async fn measure(
    program: &Path,
    directory: &Path,
    image: &Path,
    quick: bool,
    table: &mut Table,
) -> anyhow::Result<()> {
    let server = start_server(program, directory, image).await?;
    let mut api = Api::open(&server).await?;
    api.wait_for_image().await?;
    let kvm = api.node_has_kvm().await?;
    table.add(Row::new("virtualization", if kvm { "KVM" } else { "emulation (TCG)" }));
    progress("booting an instance");
    let instance = json!({
        "name": "bench", "cpus": 1, "memory": MEMORY_MB, "disk": [{ "base": "label:tiny" }], "network": [],
        "side_channels": ["sf-agent"],
    });
    let began = Instant::now();
    let path = api.create(&instance).await?;
    while !api.get(&path).await?["agent_state"].as_str().is_some_and(|state| state.starts_with("ready")) {
        ensure!(began.elapsed() < TIMEOUT, "timed out waiting for the agent");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let booted = began.elapsed();
    progress("booting a guest without Muster");
    let began = Instant::now();
    let qemu = BareQemu::new(directory, image, MEMORY_MB, kvm)?.prepare(0).await?.boot().await?;
    let port = Port::open(&qemu.port).await?;
    table.add(Row::new("guest of QEMU alone, start to agent ready (baseline)", seconds(began.elapsed())));
    table.add(Row::new("instance, POST to agent ready", seconds(booted)));

    let mut setup = Setup { server: &server, api, path, directory, qemu, port };
    setup.measure_commands(if quick { 10 } else { COMMANDS }, table).await?;
    setup.measure_files(if quick { 1 } else { ROUNDS }, if quick { 8 } else { MEBIBYTES }, table).await?;
    let Setup { mut api, path, qemu, .. } = setup;
    qemu.kill().await?;
    api.delete(&path).await?;
    server.stop().await
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// An instance, and a guest of QEMU alone.
struct Setup<'a> {
    server: &'a Server,
    api: Api,
    /// The path of the instance in the API.
    path: String,
    directory: &'a Path,
    qemu: RunningQemu,
    port: Port,
}

/// The durations of repeated operations.
#[derive(Debug, Default)]
struct Samples {
    millis: Vec<f64>,
    /// The CPU load of QEMU during each operation.
    qemu_load: Vec<f64>,
}

impl Samples {
    fn add(&mut self, elapsed: Duration, qemu_cpu: Duration) {
        self.millis.push(millis(elapsed));
        self.qemu_load.push(qemu_cpu.as_secs_f64() / elapsed.as_secs_f64());
    }

    fn median(&self) -> f64 {
        median(self.millis.clone())
    }

    fn qemu_load(&self) -> String {
        format!("{:.0} %", median(self.qemu_load.clone()) * 100.0)
    }

    fn rate(&self, mebibytes: usize) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let megabytes = (mebibytes << 20) as f64 / 1e6;
        megabytes / (self.median() / 1e3)
    }
}

impl Setup<'_> {
    /// Runs an agent operation in the instance and returns its results.
    async fn run_operation(&mut self, kind: &str, body: &Value) -> anyhow::Result<Value> {
        let operation = self.api.send("POST", &format!("{}/agent/{kind}", self.path), Some(body)).await?;
        let path = format!("/agentoperations/{}", operation["uuid"].as_str().context("no id")?);
        let began = Instant::now();
        loop {
            let record = self.api.get(&path).await?;
            match record["state"].as_str() {
                Some("complete") => return Ok(record["results"].clone()),
                Some("preflight" | "queued" | "executing") => {}
                _ => anyhow::bail!("{path} is {}: {}", record["state"], record["error_message"]),
            }
            ensure!(began.elapsed() < TIMEOUT, "timed out waiting for {path}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Measures an agent operation in the instance.
    async fn sample_instance(
        &mut self,
        kind: &str,
        body: &Value,
        samples: &mut Samples,
    ) -> anyhow::Result<Value> {
        let began = (Instant::now(), vms_cpu(self.directory));
        let results = self.run_operation(kind, body).await?;
        samples.add(began.0.elapsed(), vms_cpu(self.directory).saturating_sub(began.1));
        Ok(results)
    }

    /// Measures work in the guest of QEMU alone.
    async fn sample_baseline(
        &mut self,
        work: impl AsyncFnOnce(&mut Port) -> anyhow::Result<()>,
        samples: &mut Samples,
    ) -> anyhow::Result<()> {
        let began = (Instant::now(), self.qemu.cpu()?);
        work(&mut self.port).await?;
        samples.add(began.0.elapsed(), self.qemu.cpu()? - began.1);
        Ok(())
    }

    /// Measures the shortest command.
    async fn measure_commands(&mut self, count: usize, table: &mut Table) -> anyhow::Result<()> {
        progress(&format!("{count} commands, through Muster and directly"));
        let (mut baseline, mut instance) = (Samples::default(), Samples::default());
        let body = json!({ "command_line": "true" });
        // Warm up: the first commands read programs from the disk.
        self.run_operation("execute", &body).await?;
        self.port.execute("true").await?;
        let server_cpu = self.server.cpu()?;
        for _ in 0..count {
            self.sample_baseline(async |port| port.execute("true").await, &mut baseline).await?;
            let results = self.sample_instance("execute", &body, &mut instance).await?;
            ensure!(results["0"]["return-code"] == 0, "unexpected results: {results}");
        }
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let server_cpu = millis(self.server.cpu()? - server_cpu) / count as f64;
        let differences =
            instance.millis.iter().zip(&baseline.millis).map(|(instance, baseline)| instance - baseline);
        let overhead = median(differences.collect());
        table.add(Row::new("execute true, directly (baseline)", spread(&mut baseline.millis)));
        table.add(Row::new("  CPU load of QEMU", baseline.qemu_load()));
        table.add(
            Row::new("execute true, POST to complete", spread(&mut instance.millis))
                .multiple(instance.median() / baseline.median()),
        );
        table.add(Row::new("  overhead over the baseline", format!("{overhead:.0} ms")).target_if(
            count == COMMANDS,
            format!("<= {MAX_OVERHEAD} ms"),
            overhead <= MAX_OVERHEAD,
        ));
        table.add(Row::new("  CPU load of QEMU", instance.qemu_load()));
        table.add(Row::new("  CPU time of the server, including polling", format!("{server_cpu:.1} ms CPU")));
        Ok(())
    }

    /// Measures file transfers.
    async fn measure_files(
        &mut self,
        rounds: usize,
        mebibytes: usize,
        table: &mut Table,
    ) -> anyhow::Result<()> {
        let source = self.directory.join("content");
        let content = random_bytes(mebibytes << 20);
        std::fs::write(&source, &content)?;
        let token = self.server.token().await?;
        let upload = images::begin_upload(self.server, &token).await?;
        images::upload_part(self.server, &token, &upload, &source, 0, None)?;
        let blob = images::finish_upload(self.server, &token, &upload).await?;
        let (put, get) =
            (json!({ "blob_uuid": blob, "path": GUEST_FILE, "mode": 420 }), json!({ "path": GUEST_FILE }));
        let mut samples = [const { Samples { millis: vec![], qemu_load: vec![] } }; 4];
        for round in 0..rounds {
            progress(&format!("transferring {mebibytes} MiB, round {} of {rounds}", round + 1));
            let [put_baseline, put_instance, get_baseline, get_instance] = &mut samples;
            self.sample_baseline(async |port| port.put(GUEST_FILE, &content).await, put_baseline).await?;
            self.sample_instance("put", &put, put_instance).await?;
            let read = async |port: &mut Port| {
                let size = port.get(GUEST_FILE).await?;
                ensure!(size == (mebibytes << 20) as u64, "the file has {size} bytes");
                Ok(())
            };
            self.sample_baseline(read, get_baseline).await?;
            let results = self.sample_instance("get", &get, get_instance).await?;
            ensure!(results["0"]["content_blob"].is_string(), "unexpected results: {results}");
            // The file is in the memory of the guest, which is small.
            self.port.execute(&format!("rm {GUEST_FILE}")).await?;
            self.run_operation("execute", &json!({ "command_line": format!("rm {GUEST_FILE}") })).await?;
        }
        for (kind, [baseline, instance]) in
            [("put", [&samples[0], &samples[1]]), ("get", [&samples[2], &samples[3]])]
        {
            let rate = baseline.rate(mebibytes);
            table.add(Row::new(
                format!("{kind} {mebibytes} MiB, directly (baseline)"),
                format!("{rate:.1} MB/s, {} CPU load of QEMU", baseline.qemu_load()),
            ));
            let share = instance.rate(mebibytes) / rate;
            table.add(
                Row::new(
                    format!("{kind} {mebibytes} MiB, POST to complete"),
                    format!("{:.1} MB/s = {:.0} %", instance.rate(mebibytes), share * 100.0),
                )
                .target_if(
                    mebibytes == MEBIBYTES,
                    format!(">= {:.0} %", MIN_TRANSFER_SHARE * 100.0),
                    share >= MIN_TRANSFER_SHARE,
                ),
            );
            table.add(Row::new("  CPU load of QEMU", instance.qemu_load()));
        }
        Ok(())
    }
}

/// Returns incompressible bytes, the same in each run.
fn random_bytes(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        // An xorshift generator.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
