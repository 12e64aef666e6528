//! What instances cost on this machine, with QEMU.
//!
//! How long QEMU itself takes is measured in turns with the instances, and taken off: what is left is ours.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::time::ClockId;
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::bare::{self, Bare};
use crate::load::{Connection, request};
use crate::server::Server;
use crate::table::{Row, Table};
use crate::{Arguments, median, namespace, progress};

const MEMORY_MB: u64 = 128;
/// Instances made one after the other, each with a network and without.
const SINGLE: usize = 15;
const AT_ONCE: usize = 10;
const ROUNDS: usize = 3;
/// GuestApi that idle, and how many boot at a time.
const GUESTS: usize = 30;
const BOOTING: usize = 3;
const IDLE: Duration = Duration::from_secs(20);
/// How long the last guest may take to come to rest.
const REST: Duration = Duration::from_secs(10);
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// Between two looks at one instance, and at several.
pub(crate) const LOOK: Duration = Duration::from_millis(2);
const LOOK_AT_MANY: Duration = Duration::from_millis(10);

/// Milliseconds that an instance may take longer than its QEMU.
const OURS: f64 = 200.0;
/// What must be busy of the machine while ten are made.
const BUSY: f64 = 0.85;
/// What the daemon may use while guests idle: megabytes, and a share of a core.
const MEMORY: f64 = 100.0;
const AWAKE: f64 = 0.02;

/// Measures in a network namespace where the server is the only one who makes networks.
pub(crate) async fn measure_in_namespace(
    arguments: &Arguments,
    program: &Path,
    table: &mut Table,
) -> anyhow::Result<()> {
    table.section("real instances");
    if let Some(why) = bare::missing(&arguments.image).await {
        table.add(Row::new("not measured", why));
        return Ok(());
    }
    let home = Home(tempfile::tempdir_in(program.parent().context("a program without a folder")?)?);
    let image = arguments.image.canonicalize()?;
    let what =
        ["--real-instances".as_ref(), home.0.path().as_os_str(), "--image".as_ref(), image.as_os_str()];
    namespace::measure(arguments, program, &what, table).await
}

/// Where a server keeps everything. The resource groups of machines are the whole host's, and would stay.
pub(crate) struct Home(pub(crate) tempfile::TempDir);

impl Drop for Home {
    fn drop(&mut self) {
        let machines =
            std::fs::read_dir(data(self.0.path()).join("machines")).into_iter().flatten().flatten();
        for machine in machines {
            for hierarchy in ["", "cpu", "memory", "pids"] {
                let ours = Path::new("/sys/fs/cgroup").join(hierarchy).join("muster");
                let _ = std::fs::remove_dir(ours.join(machine.file_name()));
            }
        }
    }
}

fn data(folder: &Path) -> PathBuf {
    folder.join("data")
}

/// The machines that run, with the numbers of their processes.
fn machines(folder: &Path) -> Vec<(String, Pid)> {
    let entries = std::fs::read_dir(data(folder).join("machines")).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let machine = entry.file_name().into_string().ok()?;
        let pid: i32 = std::fs::read_to_string(entry.path().join("pid")).ok()?.trim().parse().ok()?;
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        line.contains(&machine).then(|| (machine, Pid::from_raw(pid)))
    });
    found.collect()
}

/// What the machines have used of the processors so far.
pub(crate) fn machines_cpu(folder: &Path) -> Duration {
    let used = |(_, pid): (String, Pid)| ClockId::pid_cpu_clock_id(pid).ok()?.now().ok().map(Duration::from);
    machines(folder).into_iter().filter_map(used).sum()
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
    progress("a real instance, so that its image is ready");
    let world = World { folder, network: prepare(&mut api).await? };
    let kvm = api.node_has_kvm().await?;
    table.add(Row::new("the processor of guests", if kvm { "KVM" } else { "emulated (TCG)" }));
    let bare = Bare::new(folder, image, MEMORY_MB, kvm)?;
    let first = api.create(&world.wanted("first", true)).await?;
    api.delete(&first).await?;

    one_at_a_time(&server, &mut api, &world, &bare, if quick { 5 } else { SINGLE }, table).await?;
    many_at_once(&server, &mut api, &world, &bare, if quick { 1 } else { ROUNDS }, table).await?;
    idle(&server, &world, quick, table).await?;
    server.stop().await
}

/// Starts a server with this machine as its node, and an image to boot from.
pub(crate) async fn start(program: &Path, folder: &Path, image: &Path) -> anyhow::Result<Server> {
    let settings = [
        ("MUSTER_NODE_MESH_IP", "127.0.0.1"),
        ("MUSTER_FLOATING_NETWORK", "172.29.0.0/16"),
        ("MUSTER_CPU_OVERCOMMIT_RATIO", "100"),
        ("MUSTER_NODE_CPU_RESERVATION_THREADS", "0"),
        ("MUSTER_NODE_DISK_RESERVATION_GB", "0"),
        ("MUSTER_NODE_RAM_RESERVATION_GB", "0.5"),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let offer = format!("tiny={}", image.display());
    Server::start_with(program, &data(folder), &settings, &["--image", &offer]).await
}

/// Waits for the image to be offered, and makes a network.
async fn prepare(api: &mut Api) -> anyhow::Result<String> {
    api.wait_for_image().await?;
    let body = json!({"name": "lan", "netblock": "10.0.0.0/24", "provide_dhcp": true});
    let network = api.send("POST", "/networks", Some(&body)).await?;
    let network = network["uuid"].as_str().context("no id")?.to_owned();
    api.wait(&format!("/networks/{network}"), "created", LOOK_AT_MANY).await?;
    Ok(network)
}

/// What instances are made of.
struct World<'a> {
    folder: &'a Path,
    network: String,
}

impl World<'_> {
    fn wanted(&self, name: &str, connected: bool) -> Value {
        let network = if connected { json!([{ "network_uuid": self.network }]) } else { json!([]) };
        json!({
            "name": name, "cpus": 1, "memory": MEMORY_MB, "disk": [{ "base": "label:tiny" }], "network": network,
        })
    }
}

/// A connection to the API, of one who may do everything.
pub(crate) struct Api {
    connection: Connection,
    token: String,
}

impl Api {
    pub(crate) async fn open(server: &Server) -> anyhow::Result<Self> {
        Ok(Self { connection: Connection::open(server.address).await?, token: server.token().await? })
    }

    /// Waits until the image can be booted from.
    pub(crate) async fn wait_for_image(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let artifacts = self.get("/artifacts").await?;
            let mut artifacts = artifacts.as_array().context("no list")?.iter();
            if artifacts.any(|artifact| artifact["source_url"] == "sf://label/system/tiny") {
                return Ok(());
            }
            ensure!(began.elapsed() < PATIENCE, "the image is not offered in time");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn send(
        &mut self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let answer = self.connection.call(&request(method, path, Some(&self.token), body)).await?;
        let answer = answer.ok().with_context(|| format!("{method} {path}"))?;
        Ok(serde_json::from_slice(&answer)?)
    }

    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<Value> {
        self.send("GET", path, None).await
    }

    /// Waits until an object is in a state.
    async fn wait(&mut self, path: &str, state: &str, look: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let record = self.get(path).await?;
            if record["state"] == state {
                return Ok(());
            }
            if record["state"].as_str().is_none_or(|state| state.ends_with("error")) {
                bail!("{path} is {}: {}", record["state"], record["error_message"]);
            }
            ensure!(began.elapsed() < PATIENCE, "{path} is not {state} in time");
            tokio::time::sleep(look).await;
        }
    }

    /// Makes an instance, and waits until it runs.
    pub(crate) async fn create(&mut self, wanted: &Value) -> anyhow::Result<String> {
        let made = self.send("POST", "/instances", Some(wanted)).await?;
        let path = format!("/instances/{}", made["uuid"].as_str().context("no id")?);
        self.wait(&path, "created", LOOK).await?;
        Ok(path)
    }

    pub(crate) async fn delete(&mut self, path: &str) -> anyhow::Result<()> {
        self.send("DELETE", path, None).await?;
        self.wait(path, "deleted", LOOK_AT_MANY).await
    }

    /// Deletes every instance.
    async fn delete_all(&mut self) -> anyhow::Result<()> {
        let all = json!({ "confirm": true, "namespace": "system" });
        self.send("DELETE", "/instances", Some(&all)).await?;
        let began = Instant::now();
        while !self.get("/instances").await?.as_array().context("no list")?.is_empty() {
            ensure!(began.elapsed() < PATIENCE, "instances are not gone in time");
            tokio::time::sleep(LOOK_AT_MANY).await;
        }
        Ok(())
    }

    /// Whether the node says that it uses the processor's own virtualisation.
    pub(crate) async fn node_has_kvm(&mut self) -> anyhow::Result<bool> {
        let nodes = self.get("/nodes").await?;
        let node = nodes.as_array().and_then(|nodes| nodes.first()).context("no node")?;
        Ok(node["limits"].get("kvm").is_none_or(Value::is_null))
    }

    /// Waits until the console of an instance asks who is there.
    async fn wait_for_login(&mut self, path: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let ask = request("GET", &format!("{path}/consoledata?length=-1"), Some(&self.token), None);
        loop {
            let text = self.connection.call(&ask).await?.ok()?;
            if text.windows(7).any(|part| part == b" login:") {
                return Ok(());
            }
            ensure!(began.elapsed() < 2 * PATIENCE, "{path} has no login in time");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

/// Instances one after the other, in turns with QEMU alone.
async fn one_at_a_time(
    server: &Server,
    api: &mut Api,
    world: &World<'_>,
    bare: &Bare,
    count: usize,
    table: &mut Table,
) -> anyhow::Result<()> {
    let mut alone = Vec::new();
    let (mut took, mut ours, mut cpu) = ([vec![], vec![]], [vec![], vec![]], [vec![], vec![]]);
    for number in 0..count {
        progress(&format!("real instances one at a time, {} of {count}", number + 1));
        let ready = bare.prepare(0).await?.start().await?;
        let floor = millis(ready.took);
        ready.end().await?;
        alone.push(floor);
        for (at, connected) in [(0, true), (1, false)] {
            let wanted = world.wanted(&format!("single-{number}-{at}"), connected);
            let began = (Instant::now(), server.cpu()?);
            let path = api.create(&wanted).await?;
            let whole = millis(began.0.elapsed());
            cpu[at].push(millis(server.cpu()? - began.1));
            took[at].push(whole);
            ours[at].push(whole - floor);
            api.delete(&path).await?;
        }
    }
    table.add(Row::new("QEMU alone, from start to answer", spread(&mut alone)));
    for (at, what) in [(0, "with a network"), (1, "without")] {
        table.add(Row::new(format!("POST to created, one at a time, {what}"), spread(&mut took[at])));
        let middle = median(ours[at].clone());
        table.add(
            Row::new("  less QEMU alone", spread(&mut ours[at]))
                .target(format!("<= {OURS} ms"), middle <= OURS),
        );
        table.add(Row::new("  in the server itself", format!("{:.0} ms CPU", median(cpu[at].clone()))));
    }
    Ok(())
}

/// Several instances at once, and as many of QEMU alone.
async fn many_at_once(
    server: &Server,
    api: &mut Api,
    world: &World<'_>,
    bare: &Bare,
    rounds: usize,
    table: &mut Table,
) -> anyhow::Result<()> {
    let (mut alone, mut took, mut busy, mut ours, mut guests) = (vec![], vec![], vec![], vec![], vec![]);
    for round in 0..rounds {
        progress(&format!("{AT_ONCE} real instances at once, round {} of {rounds}", round + 1));
        alone.push(millis(bare_at_once(bare).await?));
        let mut posts = JoinSet::new();
        for number in 0..AT_ONCE {
            let mut api = Api::open(server).await?;
            let wanted = world.wanted(&format!("many-{round}-{number}"), true);
            posts.spawn(async move { api.send("POST", "/instances", Some(&wanted)).await });
        }
        let began = (Instant::now(), Processors::now()?, server.cpu()?);
        while let Some(posted) = posts.join_next().await {
            posted??;
        }
        loop {
            let listed = api.get("/instances").await?;
            let listed = listed.as_array().context("no list")?;
            if let Some(bad) = listed.iter().find(|one| one["state"] == "error") {
                bail!("an instance is in error: {}", bad["error_message"]);
            }
            if listed.len() == AT_ONCE && listed.iter().all(|one| one["state"] == "created") {
                break;
            }
            ensure!(began.0.elapsed() < PATIENCE, "instances are not made in time");
            tokio::time::sleep(LOOK_AT_MANY).await;
        }
        let now = Processors::now()?;
        let there_was = began.0.elapsed().as_secs_f64() * now.count;
        took.push(millis(began.0.elapsed()));
        busy.push(now.busy_since(&began.1));
        ours.push((server.cpu()? - began.2).as_secs_f64() / there_was);
        guests.push(machines_cpu(world.folder).as_secs_f64() / there_was);
        api.delete_all().await?;
    }
    table.add(Row::new(format!("QEMU alone, {AT_ONCE} at once"), spread(&mut alone)));
    table.add(Row::new(format!("POST to created, {AT_ONCE} at once"), spread(&mut took)));
    let share = median(busy);
    table.add(
        Row::new("  what was busy of the processors meanwhile", format!("{:.0} %", share * 100.0)).target_if(
            rounds > 1,
            format!(">= {:.0} %", BUSY * 100.0),
            share >= BUSY,
        ),
    );
    table.add(Row::new(
        "  of them with the server, and with its QEMUs",
        format!("{:.0} % and {:.0} %", median(ours) * 100.0, median(guests) * 100.0),
    ));
    Ok(())
}

/// How long it takes until several that were started together have answered.
async fn bare_at_once(bare: &Bare) -> anyhow::Result<Duration> {
    let mut prepared = Vec::new();
    for number in 0..AT_ONCE {
        prepared.push(bare.prepare(number).await?);
    }
    let began = Instant::now();
    let mut starts: JoinSet<_> = prepared.into_iter().map(bare::Prepared::start).collect();
    let mut ready = Vec::new();
    while let Some(one) = starts.join_next().await {
        ready.push(one??);
    }
    let took = began.elapsed();
    for one in ready {
        one.end().await?;
    }
    Ok(took)
}

/// What the server does while guests do nothing.
async fn idle(server: &Server, world: &World<'_>, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    let count = if quick { GUESTS / 5 } else { GUESTS };
    let (next, began) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let mut workers = JoinSet::new();
    for _ in 0..BOOTING {
        let (next, mut api) = (Arc::clone(&next), Api::open(server).await?);
        let wanted: Vec<Value> =
            (0..count).map(|number| world.wanted(&format!("guest-{number}"), true)).collect();
        workers.spawn(async move {
            while let Some(wanted) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                let path = api.create(wanted).await?;
                api.wait_for_login(&path).await?;
                progress(&format!("{} is up after {:.0} s", wanted["name"], began.elapsed().as_secs_f64()));
            }
            anyhow::Ok(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    let booted = began.elapsed().as_secs_f64();
    progress("real instances idle");
    tokio::time::sleep(REST).await;
    let before = (Instant::now(), server.cpu()?, machines_cpu(world.folder));
    tokio::time::sleep(IDLE).await;
    let seconds = before.0.elapsed().as_secs_f64();
    let awake = (server.cpu()? - before.1).as_secs_f64() / seconds;
    let guests = machines_cpu(world.folder).saturating_sub(before.2).as_secs_f64() / seconds;
    let memory = server.memory()?;
    ensure!(machines(world.folder).len() == count, "a guest is gone");
    table.add(Row::new(
        format!("{count} guests of {MEMORY_MB} MB, {BOOTING} at a time, to their logins"),
        format!("{booted:.0} s"),
    ));
    table.add(Row::new("  the server's memory while they idle", format!("{memory:.1} MB")).target_if(
        !quick,
        format!("< {MEMORY} MB"),
        memory < MEMORY,
    ));
    table.add(Row::new("  its processor time", format!("{:.2} % of a core", awake * 100.0)).target_if(
        !quick,
        format!("< {:.0} %", AWAKE * 100.0),
        awake < AWAKE,
    ));
    table.add(Row::new("  that of the guests", format!("{:.0} % of a core", guests * 100.0)));
    let began = Instant::now();
    // An old connection is closed by now.
    Api::open(server).await?.delete_all().await?;
    table.add(Row::new("  until all are deleted", format!("{:.1} s", began.elapsed().as_secs_f64())));
    Ok(())
}

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The median, and from where to where it went.
pub(crate) fn spread(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    let (least, most) = (values[0], values[values.len() - 1]);
    format!("median {:.0} ms ({least:.0} to {most:.0})", values[values.len() / 2])
}

/// What the processors have done since the machine started, in ticks.
struct Processors {
    count: f64,
    idle: f64,
    all: f64,
}

impl Processors {
    fn now() -> anyhow::Result<Self> {
        let text = std::fs::read_to_string("/proc/stat")?;
        let line = text.lines().next().and_then(|line| line.strip_prefix("cpu ")).context("no processors")?;
        let ticks: Vec<f64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        // The time of guests, which is behind the first eight, is in that of users already.
        let all = ticks.iter().take(8).sum();
        let idle = ticks.iter().skip(3).take(2).sum();
        #[expect(clippy::cast_precision_loss, reason = "a few")]
        let count = std::thread::available_parallelism()?.get() as f64;
        Ok(Self { count, idle, all })
    }

    /// The share of them that was not waiting.
    fn busy_since(&self, before: &Self) -> f64 {
        1.0 - (self.idle - before.idle) / (self.all - before.all).max(1.0)
    }
}
