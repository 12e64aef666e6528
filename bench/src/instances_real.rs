//! Benchmarks instances on this host, with QEMU.
//!
//! The time that QEMU itself takes is measured alternately with the instances and subtracted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::time::ClockId;
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::arguments::Arguments;
use crate::bare::{self, BareQemu};
use crate::load::{Connection, request};
use crate::namespace;
use crate::sampling::{median, progress};
use crate::server::Server;
use crate::table::{Row, Table};

const MEMORY_MB: u64 = 128;
/// Instances created sequentially, with a network and without.
const SEQUENTIAL: usize = 15;
/// Instances created concurrently.
const CONCURRENT: usize = 10;
const ROUNDS: usize = 3;
/// Idle guests.
const GUESTS: usize = 30;
/// Guests that boot concurrently.
const CONCURRENT_BOOTS: usize = 3;
/// How long the server is observed while guests are idle.
const IDLE_PERIOD: Duration = Duration::from_secs(20);
/// How long to wait for the last guest to become idle.
const SETTLE_PERIOD: Duration = Duration::from_secs(10);
/// The timeout of all operations.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);
/// How often one object is polled.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How often several objects are polled.
const LIST_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The target for the time of an instance without that of QEMU, in milliseconds.
const MAX_OVERHEAD: f64 = 200.0;
/// The target for the CPU utilization while instances are created concurrently.
const MIN_UTILIZATION: f64 = 0.85;
/// The target for the memory of the server while guests are idle, in MB.
const MAX_MEMORY: f64 = 100.0;
/// The target for the share of a core that the server uses while guests are idle.
const MAX_IDLE_LOAD: f64 = 0.02;

/// Runs the benchmark in its own network namespace.
pub(crate) async fn measure_in_namespace(
    arguments: &Arguments,
    program: &Path,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section("real instances");
    if let Some(requirement) = bare::missing_requirement(&arguments.image).await {
        table.add(Row::new("not measured", requirement));
        return Ok(());
    }
    let home =
        ServerHome(tempfile::tempdir_in(program.parent().context("the program has no parent directory")?)?);
    let image = arguments.image.canonicalize()?;
    let child_arguments =
        ["--real-instances".as_ref(), home.0.path().as_os_str(), "--image".as_ref(), image.as_os_str()];
    namespace::measure(arguments, program, &child_arguments, table).await
}

/// The temporary directory of a server. On drop, the cgroups of its VMs are removed as well.
pub(crate) struct ServerHome(pub(crate) tempfile::TempDir);

impl Drop for ServerHome {
    fn drop(&mut self) {
        let vms =
            std::fs::read_dir(data_directory(self.0.path()).join("machines")).into_iter().flatten().flatten();
        for vm in vms {
            for hierarchy in ["", "cpu", "memory", "pids"] {
                let parent = Path::new("/sys/fs/cgroup").join(hierarchy).join("muster");
                let _ = std::fs::remove_dir(parent.join(vm.file_name()));
            }
        }
    }
}

fn data_directory(directory: &Path) -> PathBuf {
    directory.join("data")
}

/// Returns the IDs and PIDs of running VMs.
fn running_vms(directory: &Path) -> Vec<(String, Pid)> {
    let entries =
        std::fs::read_dir(data_directory(directory).join("machines")).into_iter().flatten().flatten();
    let vms = entries.filter_map(|entry| {
        let id = entry.file_name().into_string().ok()?;
        let pid: i32 = std::fs::read_to_string(entry.path().join("pid")).ok()?.trim().parse().ok()?;
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        line.contains(&id).then(|| (id, Pid::from_raw(pid)))
    });
    vms.collect()
}

/// Returns the CPU time of all running VMs.
pub(crate) fn vms_cpu(directory: &Path) -> Duration {
    let used = |(_, pid): (String, Pid)| ClockId::pid_cpu_clock_id(pid).ok()?.now().ok().map(Duration::from);
    running_vms(directory).into_iter().filter_map(used).sum()
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
    progress("the first real instance, which prepares the image");
    let setup = Setup { directory, network: create_network(&mut api).await? };
    let kvm = api.node_has_kvm().await?;
    table.add(Row::new("virtualization", if kvm { "KVM" } else { "emulation (TCG)" }));
    let bare = BareQemu::new(directory, image, MEMORY_MB, kvm)?;
    let first = api.create(&setup.instance("first", true)).await?;
    api.delete(&first).await?;

    measure_sequential(&server, &mut api, &setup, &bare, if quick { 5 } else { SEQUENTIAL }, table).await?;
    measure_concurrent(&server, &mut api, &setup, &bare, if quick { 1 } else { ROUNDS }, table).await?;
    measure_idle(&server, &setup, quick, table).await?;
    server.stop().await
}

/// Starts a server with this host as its node and an image to boot from.
pub(crate) async fn start_server(program: &Path, directory: &Path, image: &Path) -> anyhow::Result<Server> {
    let settings = [
        ("MUSTER_NODE_MESH_IP", "127.0.0.1"),
        ("MUSTER_FLOATING_NETWORK", "172.29.0.0/16"),
        ("MUSTER_CPU_OVERCOMMIT_RATIO", "100"),
        ("MUSTER_NODE_CPU_RESERVATION_THREADS", "0"),
        ("MUSTER_NODE_DISK_RESERVATION_GB", "0"),
        ("MUSTER_NODE_RAM_RESERVATION_GB", "0.5"),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let published = format!("tiny={}", image.display());
    Server::start_with(program, &data_directory(directory), &settings, &["--image", &published]).await
}

/// Waits for the image and creates a network. Returns the ID of the network.
async fn create_network(api: &mut Api) -> anyhow::Result<String> {
    api.wait_for_image().await?;
    let body = json!({"name": "lan", "netblock": "10.0.0.0/24", "provide_dhcp": true});
    let network = api.send("POST", "/networks", Some(&body)).await?;
    let network = network["uuid"].as_str().context("no id")?.to_owned();
    api.wait(&format!("/networks/{network}"), "created", LIST_POLL_INTERVAL).await?;
    Ok(network)
}

/// The common properties of the instances.
struct Setup<'a> {
    directory: &'a Path,
    network: String,
}

impl Setup<'_> {
    /// Returns the request body of an instance.
    fn instance(&self, name: &str, connected: bool) -> Value {
        let network = if connected { json!([{ "network_uuid": self.network }]) } else { json!([]) };
        json!({
            "name": name, "cpus": 1, "memory": MEMORY_MB, "disk": [{ "base": "label:tiny" }], "network": network,
        })
    }
}

/// A connection to the API with the rights of the namespace `system`.
pub(crate) struct Api {
    connection: Connection,
    token: String,
}

impl Api {
    pub(crate) async fn open(server: &Server) -> anyhow::Result<Self> {
        Ok(Self { connection: Connection::open(server.address).await?, token: server.token().await? })
    }

    /// Waits until the image is available.
    pub(crate) async fn wait_for_image(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let artifacts = self.get("/artifacts").await?;
            let mut artifacts = artifacts.as_array().context("no list")?.iter();
            if artifacts.any(|artifact| artifact["source_url"] == "sf://label/system/tiny") {
                return Ok(());
            }
            ensure!(began.elapsed() < TIMEOUT, "timed out waiting for the image");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn send(
        &mut self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let response = self.connection.call(&request(method, path, Some(&self.token), body)).await?;
        let body = response.ok().with_context(|| format!("{method} {path}"))?;
        Ok(serde_json::from_slice(&body)?)
    }

    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<Value> {
        self.send("GET", path, None).await
    }

    /// Polls an object until it is in a state.
    async fn wait(&mut self, path: &str, state: &str, interval: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let record = self.get(path).await?;
            if record["state"] == state {
                return Ok(());
            }
            if record["state"].as_str().is_none_or(|state| state.ends_with("error")) {
                bail!("{path} is {}: {}", record["state"], record["error_message"]);
            }
            ensure!(began.elapsed() < TIMEOUT, "timed out waiting for {path} to be {state}");
            tokio::time::sleep(interval).await;
        }
    }

    /// Creates an instance, waits until it runs and returns its path.
    pub(crate) async fn create(&mut self, instance: &Value) -> anyhow::Result<String> {
        let created = self.send("POST", "/instances", Some(instance)).await?;
        let path = format!("/instances/{}", created["uuid"].as_str().context("no id")?);
        self.wait(&path, "created", POLL_INTERVAL).await?;
        Ok(path)
    }

    pub(crate) async fn delete(&mut self, path: &str) -> anyhow::Result<()> {
        self.send("DELETE", path, None).await?;
        self.wait(path, "deleted", LIST_POLL_INTERVAL).await
    }

    /// Deletes every instance.
    async fn delete_all(&mut self) -> anyhow::Result<()> {
        let all = json!({ "confirm": true, "namespace": "system" });
        self.send("DELETE", "/instances", Some(&all)).await?;
        let began = Instant::now();
        while !self.get("/instances").await?.as_array().context("no list")?.is_empty() {
            ensure!(began.elapsed() < TIMEOUT, "timed out deleting instances");
            tokio::time::sleep(LIST_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Returns whether the node uses KVM.
    pub(crate) async fn node_has_kvm(&mut self) -> anyhow::Result<bool> {
        let nodes = self.get("/nodes").await?;
        let node = nodes.as_array().and_then(|nodes| nodes.first()).context("no node")?;
        Ok(node["limits"].get("kvm").is_none_or(Value::is_null))
    }

    /// Waits until the console of an instance shows a login prompt.
    async fn wait_for_login(&mut self, path: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let request = request("GET", &format!("{path}/consoledata?length=-1"), Some(&self.token), None);
        loop {
            let text = self.connection.call(&request).await?.ok()?;
            if text.windows(7).any(|part| part == b" login:") {
                return Ok(());
            }
            ensure!(began.elapsed() < 2 * TIMEOUT, "timed out waiting for the login prompt of {path}");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

/// Creates instances sequentially, alternately with QEMU alone.
async fn measure_sequential(
    server: &Server,
    api: &mut Api,
    setup: &Setup<'_>,
    bare: &BareQemu,
    count: usize,
    table: &mut Table,
) -> anyhow::Result<()> {
    let mut baselines = Vec::new();
    let (mut total, mut overhead, mut cpu) = ([vec![], vec![]], [vec![], vec![]], [vec![], vec![]]);
    for number in 0..count {
        progress(&format!("sequential real instances, {} of {count}", number + 1));
        let qemu = bare.prepare(0).await?.start().await?;
        let baseline = millis(qemu.startup_time);
        qemu.kill().await?;
        baselines.push(baseline);
        for (at, connected) in [(0, true), (1, false)] {
            let instance = setup.instance(&format!("sequential-{number}-{at}"), connected);
            let began = (Instant::now(), server.cpu()?);
            let path = api.create(&instance).await?;
            let elapsed = millis(began.0.elapsed());
            cpu[at].push(millis(server.cpu()? - began.1));
            total[at].push(elapsed);
            overhead[at].push(elapsed - baseline);
            api.delete(&path).await?;
        }
    }
    table.add(Row::new("QEMU alone, start to first response (baseline)", spread(&mut baselines)));
    for (at, kind) in [(0, "with a network"), (1, "without a network")] {
        table.add(Row::new(format!("instance {kind}, POST to created, sequential"), spread(&mut total[at])));
        let median_overhead = median(overhead[at].clone());
        table.add(
            Row::new("  without the time of QEMU", spread(&mut overhead[at]))
                .target(format!("<= {MAX_OVERHEAD} ms"), median_overhead <= MAX_OVERHEAD),
        );
        table.add(Row::new("  CPU time of the server", format!("{:.0} ms CPU", median(cpu[at].clone()))));
    }
    Ok(())
}

/// Creates several instances concurrently, and as many QEMU processes alone.
async fn measure_concurrent(
    server: &Server,
    api: &mut Api,
    setup: &Setup<'_>,
    bare: &BareQemu,
    rounds: usize,
    table: &mut Table,
) -> anyhow::Result<()> {
    let (mut baselines, mut total, mut utilization, mut server_share, mut vm_share) =
        (vec![], vec![], vec![], vec![], vec![]);
    for round in 0..rounds {
        progress(&format!("{CONCURRENT} concurrent real instances, round {} of {rounds}", round + 1));
        baselines.push(millis(start_concurrently(bare).await?));
        let mut posts = JoinSet::new();
        for number in 0..CONCURRENT {
            let mut api = Api::open(server).await?;
            let instance = setup.instance(&format!("concurrent-{round}-{number}"), true);
            posts.spawn(async move { api.send("POST", "/instances", Some(&instance)).await });
        }
        let began = (Instant::now(), CpuTimes::now()?, server.cpu()?);
        while let Some(posted) = posts.join_next().await {
            posted??;
        }
        loop {
            let listed = api.get("/instances").await?;
            let listed = listed.as_array().context("no list")?;
            if let Some(bad) = listed.iter().find(|one| one["state"] == "error") {
                bail!("an instance is in error: {}", bad["error_message"]);
            }
            if listed.len() == CONCURRENT && listed.iter().all(|one| one["state"] == "created") {
                break;
            }
            ensure!(began.0.elapsed() < TIMEOUT, "timed out creating instances");
            tokio::time::sleep(LIST_POLL_INTERVAL).await;
        }
        let now = CpuTimes::now()?;
        let available = began.0.elapsed().as_secs_f64() * now.count;
        total.push(millis(began.0.elapsed()));
        utilization.push(now.busy_since(&began.1));
        server_share.push((server.cpu()? - began.2).as_secs_f64() / available);
        vm_share.push(vms_cpu(setup.directory).as_secs_f64() / available);
        api.delete_all().await?;
    }
    table.add(Row::new(format!("QEMU alone, {CONCURRENT} concurrently (baseline)"), spread(&mut baselines)));
    table.add(Row::new(format!("instances, POST to created, {CONCURRENT} concurrently"), spread(&mut total)));
    let utilization = median(utilization);
    table.add(Row::new("  CPU utilization of the host", format!("{:.0} %", utilization * 100.0)).target_if(
        rounds > 1,
        format!(">= {:.0} %", MIN_UTILIZATION * 100.0),
        utilization >= MIN_UTILIZATION,
    ));
    table.add(Row::new(
        "  of which server, and its QEMU processes",
        format!("{:.0} % and {:.0} %", median(server_share) * 100.0, median(vm_share) * 100.0),
    ));
    Ok(())
}

/// Starts several QEMU processes and returns the time until all have responded.
async fn start_concurrently(bare: &BareQemu) -> anyhow::Result<Duration> {
    let mut prepared = Vec::new();
    for number in 0..CONCURRENT {
        prepared.push(bare.prepare(number).await?);
    }
    let began = Instant::now();
    let mut starts: JoinSet<_> = prepared.into_iter().map(bare::PreparedQemu::start).collect();
    let mut running = Vec::new();
    while let Some(qemu) = starts.join_next().await {
        running.push(qemu??);
    }
    let elapsed = began.elapsed();
    for qemu in running {
        qemu.kill().await?;
    }
    Ok(elapsed)
}

/// Boots guests and returns the time until all show a login prompt.
async fn boot_guests(server: &Server, setup: &Setup<'_>, count: usize) -> anyhow::Result<Duration> {
    let (next, began) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let mut workers = JoinSet::new();
    for _ in 0..CONCURRENT_BOOTS {
        let (next, mut api) = (Arc::clone(&next), Api::open(server).await?);
        let instances: Vec<Value> =
            (0..count).map(|number| setup.instance(&format!("guest-{number}"), true)).collect();
        workers.spawn(async move {
            while let Some(instance) = instances.get(next.fetch_add(1, Ordering::Relaxed)) {
                let path = api.create(instance).await?;
                api.wait_for_login(&path).await?;
                progress(&format!(
                    "{} has booted after {:.0} s",
                    instance["name"],
                    began.elapsed().as_secs_f64()
                ));
            }
            anyhow::Ok(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    Ok(began.elapsed())
}

/// Measures the server while guests are idle.
async fn measure_idle(
    server: &Server,
    setup: &Setup<'_>,
    quick: bool,
    table: &mut Table,
) -> anyhow::Result<()> {
    let count = if quick { GUESTS / 5 } else { GUESTS };
    let booted = boot_guests(server, setup, count).await?.as_secs_f64();
    progress("idle real instances");
    tokio::time::sleep(SETTLE_PERIOD).await;
    let before = (Instant::now(), server.cpu()?, vms_cpu(setup.directory));
    tokio::time::sleep(IDLE_PERIOD).await;
    let seconds = before.0.elapsed().as_secs_f64();
    let server_load = (server.cpu()? - before.1).as_secs_f64() / seconds;
    let vm_load = vms_cpu(setup.directory).saturating_sub(before.2).as_secs_f64() / seconds;
    let memory = server.memory()?;
    ensure!(running_vms(setup.directory).len() == count, "a VM has exited");
    table.add(Row::new(
        format!("booting {count} guests of {MEMORY_MB} MB, {CONCURRENT_BOOTS} concurrently, to login"),
        format!("{booted:.0} s"),
    ));
    table.add(Row::new("  memory of the server while they are idle", format!("{memory:.1} MB")).target_if(
        !quick,
        format!("< {MAX_MEMORY} MB"),
        memory < MAX_MEMORY,
    ));
    table.add(
        Row::new("  CPU load of the server", format!("{:.2} % of a core", server_load * 100.0)).target_if(
            !quick,
            format!("< {:.0} %", MAX_IDLE_LOAD * 100.0),
            server_load < MAX_IDLE_LOAD,
        ),
    );
    table.add(Row::new("  CPU load of the VMs", format!("{:.0} % of a core", vm_load * 100.0)));
    let began = Instant::now();
    // The server has closed the idle connection.
    Api::open(server).await?.delete_all().await?;
    table.add(Row::new("  deleting all of them", format!("{:.1} s", began.elapsed().as_secs_f64())));
    Ok(())
}

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Formats the median and the range.
pub(crate) fn spread(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    let (min, max) = (values[0], values[values.len() - 1]);
    format!("median {:.0} ms ({min:.0} to {max:.0})", values[values.len() / 2])
}

/// The CPU times of the host since boot, in ticks.
struct CpuTimes {
    count: f64,
    idle: f64,
    total: f64,
}

impl CpuTimes {
    fn now() -> anyhow::Result<Self> {
        let text = std::fs::read_to_string("/proc/stat")?;
        let line = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("cpu "))
            .context("/proc/stat has no CPU line")?;
        let ticks: Vec<f64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        // The remaining fields are guest times, which are included in the user times.
        let total = ticks.iter().take(8).sum();
        let idle = ticks.iter().skip(3).take(2).sum();
        #[expect(clippy::cast_precision_loss, reason = "a few")]
        let count = std::thread::available_parallelism()?.get() as f64;
        Ok(Self { count, idle, total })
    }

    /// Returns the CPU utilization since an earlier sample.
    fn busy_since(&self, before: &Self) -> f64 {
        1.0 - (self.idle - before.idle) / (self.total - before.total).max(1.0)
    }
}
