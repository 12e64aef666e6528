//! A `muster serve` of our own: starts it, asks it and the kernel about it, stops it.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::time::ClockId;
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::load::{self, request};

const PATIENCE: Duration = Duration::from_secs(60);

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Server {
    process: Child,
    pid: Pid,
    pub(crate) address: SocketAddr,
    metrics: SocketAddr,
    /// The secret of the namespace `system`.
    pub(crate) key: String,
    /// From the start of the process to `/readyz`.
    pub(crate) started_in: Duration,
}

impl Server {
    /// Starts `program` with a simulated node on free ports of loopback, with its data in `data`.
    pub(crate) async fn start(
        program: &Path,
        data: &Path,
        settings: &[(String, String)],
    ) -> anyhow::Result<Self> {
        Self::start_with(program, data, settings, &["--simulate", "1"]).await
    }

    /// The same with this machine as the node.
    pub(crate) async fn start_real(
        program: &Path,
        data: &Path,
        settings: &[(String, String)],
    ) -> anyhow::Result<Self> {
        Self::start_with(program, data, settings, &[]).await
    }

    /// The same with arguments that say which nodes there are.
    pub(crate) async fn start_with(
        program: &Path,
        data: &Path,
        settings: &[(String, String)],
        nodes: &[&str],
    ) -> anyhow::Result<Self> {
        let (address, metrics) = (free_address()?, free_address()?);
        let log = data.with_extension("log");
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MUSTER_") {
                command.env_remove(name);
            }
        }
        command
            .args(["serve", "--listen", &address.to_string(), "--data-dir"])
            .arg(data)
            .args(nodes)
            .env("MUSTER_MARIADB_GATEWAY_METRICS_PORT", metrics.port().to_string())
            .env("MUSTER_API_DRAIN_GRACE", "0")
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true);
        let began = Instant::now();
        let mut process = command.spawn().with_context(|| program.display().to_string())?;
        let pid = process.id().context("the server is gone")?;
        let said = || std::fs::read_to_string(&log).unwrap_or_default();
        wait_for(&mut process, address, "/readyz").await.with_context(said)?;
        let started_in = began.elapsed();
        wait_for(&mut process, metrics, "/metrics").await.with_context(said)?;
        let credentials: Value = serde_json::from_slice(&std::fs::read(data.join("credentials.json"))?)?;
        let key = credentials["key"].as_str().context("no key in credentials.json")?.to_owned();
        Ok(Self { process, pid: Pid::from_raw(i32::try_from(pid)?), address, metrics, key, started_in })
    }

    /// The request that logs in to the namespace `system`.
    pub(crate) fn login(&self) -> std::sync::Arc<[u8]> {
        request("POST", "/auth", None, Some(&json!({ "namespace": "system", "key": self.key })))
    }

    /// A token for the namespace `system`.
    pub(crate) async fn token(&self) -> anyhow::Result<String> {
        self.log_in(&self.login()).await
    }

    /// A namespace with a key of its own, made by whoever has `token`, and a token for it.
    pub(crate) async fn new_namespace(&self, token: &str, name: &str) -> anyhow::Result<String> {
        let make = request("POST", "/auth/namespaces", Some(token), Some(&json!({ "namespace": name })));
        load::call(self.address, &make).await?.ok()?;
        let path = format!("/auth/namespaces/{name}/keys");
        let make = request("POST", &path, Some(token), Some(&json!({ "key_name": "bench" })));
        let made: Value = serde_json::from_slice(&load::call(self.address, &make).await?.ok()?)?;
        self.log_in(&request("POST", "/auth", None, Some(&json!({ "namespace": name, "key": made["key"] }))))
            .await
    }

    async fn log_in(&self, login: &[u8]) -> anyhow::Result<String> {
        let answer: Value = serde_json::from_slice(&load::call(self.address, login).await?.ok()?)?;
        Ok(answer["access_token"].as_str().context("no token")?.to_owned())
    }

    /// What all threads have used of the processors so far, dead ones too: utime + stime of `/proc/PID/stat`, but
    /// in nanoseconds instead of ticks.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        Ok(ClockId::pid_cpu_clock_id(self.pid)?.now()?.into())
    }

    /// Resident memory in megabytes.
    pub(crate) fn memory(&self) -> anyhow::Result<f64> {
        self.status("VmRSS:")
    }

    /// The most that it ever was.
    pub(crate) fn peak(&self) -> anyhow::Result<f64> {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        let kibibytes: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kibibytes * 1024.0 / 1e6)
    }

    /// The sum of a metric over its labels.
    pub(crate) async fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let text = load::call(self.metrics, &request("GET", "/metrics", None, None)).await?.ok()?;
        let text = String::from_utf8(text)?;
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name).filter(|rest| rest.starts_with([' ', '{']))?;
            rest.rsplit(' ').next()?.parse::<f64>().ok()
        });
        Ok(values.sum())
    }

    /// Waits until every recorded event is in the database.
    pub(crate) async fn drained(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + 5 * PATIENCE;
        while self.metric("eventlog_spool_depth").await? > 0.0 {
            if Instant::now() > deadline {
                bail!("events are not drained after {:?}", 5 * PATIENCE);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        stop(self.process).await.context("stopping the server")
    }
}

/// Ends a process by its id: politely, and after a while not.
pub(crate) async fn stop(mut process: Child) -> anyhow::Result<()> {
    if let Some(pid) = process.id() {
        kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM)?;
    }
    if tokio::time::timeout(PATIENCE, process.wait()).await.is_err() {
        process.kill().await?;
        bail!("it did not stop in {PATIENCE:?} and was killed");
    }
    Ok(())
}

/// An address of loopback that nobody listens on.
pub(crate) fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}

/// Waits until `path` answers 200.
async fn wait_for(process: &mut Child, address: SocketAddr, path: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let question = request("GET", path, None, None);
    loop {
        if let Ok(answer) = load::call(address, &question).await
            && answer.status == 200
        {
            return Ok(());
        }
        if let Some(status) = process.try_wait()? {
            bail!("the server ended: {status}");
        }
        if Instant::now() > deadline {
            bail!("{path} is not 200 after {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
