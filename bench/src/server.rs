//! A `muster serve` process for benchmarks.

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

/// The timeout for starting and stopping.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A running server, killed on drop.
#[derive(Debug)]
pub(crate) struct Server {
    process: Child,
    pid: Pid,
    pub(crate) address: SocketAddr,
    metrics: SocketAddr,
    /// The secret of the namespace `system`.
    pub(crate) key: String,
    /// The time from the start of the process to `/readyz`.
    pub(crate) startup_time: Duration,
}

impl Server {
    /// Starts `program` with one simulated node on free loopback ports and with its data in `data`.
    pub(crate) async fn start(
        program: &Path,
        data: &Path,
        settings: &[(String, String)],
    ) -> anyhow::Result<Self> {
        Self::start_with(program, data, settings, &["--simulate", "1"]).await
    }

    /// Like [`Self::start`], with this host as the node.
    pub(crate) async fn start_real(
        program: &Path,
        data: &Path,
        settings: &[(String, String)],
    ) -> anyhow::Result<Self> {
        Self::start_with(program, data, settings, &[]).await
    }

    /// Like [`Self::start`], with arguments that define the nodes.
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
            .env("MUSTER_RESOURCES_METRICS_PORT", "0")
            .env("MUSTER_CLUSTER_METRICS_PORT", "0")
            .env("MUSTER_API_DRAIN_GRACE", "0")
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true);
        let began = Instant::now();
        let mut process = command.spawn().with_context(|| program.display().to_string())?;
        let pid = process.id().context("the server has exited")?;
        let log_text = || std::fs::read_to_string(&log).unwrap_or_default();
        wait_for(&mut process, address, "/readyz").await.with_context(log_text)?;
        let startup_time = began.elapsed();
        wait_for(&mut process, metrics, "/metrics").await.with_context(log_text)?;
        let key = match settings.iter().find(|(name, _)| name == "MUSTER_SYSTEM_KEY") {
            Some((_, key)) => key.clone(),
            None => {
                let credentials: Value =
                    serde_json::from_slice(&std::fs::read(data.join("credentials.json"))?)?;
                credentials["key"].as_str().context("no key in credentials.json")?.to_owned()
            }
        };
        Ok(Self { process, pid: Pid::from_raw(i32::try_from(pid)?), address, metrics, key, startup_time })
    }

    /// Returns the login request of the namespace `system`.
    pub(crate) fn login(&self) -> std::sync::Arc<[u8]> {
        request("POST", "/auth", None, Some(&json!({ "namespace": "system", "key": self.key })))
    }

    /// Returns a token for the namespace `system`.
    pub(crate) async fn token(&self) -> anyhow::Result<String> {
        self.log_in(&self.login()).await
    }

    /// Creates a namespace with a key and returns a token for it. `token` authorizes the creation.
    pub(crate) async fn new_namespace(&self, token: &str, name: &str) -> anyhow::Result<String> {
        let create = request("POST", "/auth/namespaces", Some(token), Some(&json!({ "namespace": name })));
        load::call(self.address, &create).await?.ok()?;
        self.token_of(token, name, "bench").await
    }

    /// Creates a key of a namespace, and returns a token of it.
    pub(crate) async fn token_of(&self, token: &str, namespace: &str, key: &str) -> anyhow::Result<String> {
        let path = format!("/auth/namespaces/{namespace}/keys");
        let create = request("POST", &path, Some(token), Some(&json!({ "key_name": key })));
        let key: Value = serde_json::from_slice(&load::call(self.address, &create).await?.ok()?)?;
        let body = json!({ "namespace": namespace, "key": key["key"] });
        self.log_in(&request("POST", "/auth", None, Some(&body))).await
    }

    async fn log_in(&self, login: &[u8]) -> anyhow::Result<String> {
        let response: Value = serde_json::from_slice(&load::call(self.address, login).await?.ok()?)?;
        Ok(response["access_token"].as_str().context("no token")?.to_owned())
    }

    /// Returns the CPU time of all threads, including those that have exited, with nanosecond resolution.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        cpu_of(self.pid)
    }

    /// Returns the share of a core that the server uses without requests, measured over a period.
    pub(crate) async fn idle_load(&self, period: Duration) -> anyhow::Result<f64> {
        let began = (self.cpu()?, Instant::now());
        tokio::time::sleep(period).await;
        Ok((self.cpu()? - began.0).as_secs_f64() / began.1.elapsed().as_secs_f64())
    }

    /// Returns the resident memory in MB.
    pub(crate) fn memory(&self) -> anyhow::Result<f64> {
        self.status("VmRSS:")
    }

    /// Returns the peak of the resident memory in MB.
    pub(crate) fn peak_memory(&self) -> anyhow::Result<f64> {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        let kibibytes: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kibibytes * 1024.0 / 1e6)
    }

    /// Returns the sum of a metric over its labels.
    pub(crate) async fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let text = load::call(self.metrics, &request("GET", "/metrics", None, None)).await?.ok()?;
        let text = String::from_utf8(text)?;
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name).filter(|rest| rest.starts_with([' ', '{']))?;
            rest.rsplit(' ').next()?.parse::<f64>().ok()
        });
        Ok(values.sum())
    }

    /// Waits until all recorded events are in the database.
    pub(crate) async fn wait_until_drained(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + 5 * TIMEOUT;
        while self.metric("eventlog_spool_depth").await? > 0.0 {
            if Instant::now() > deadline {
                bail!("timed out draining events after {:?}", 5 * TIMEOUT);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Ends the process as a power failure would.
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.process.kill().await?)
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        stop(self.process).await.context("failed to stop the server")
    }
}

/// Returns the CPU time of a process.
pub(crate) fn cpu_of(pid: Pid) -> anyhow::Result<Duration> {
    Ok(ClockId::pid_cpu_clock_id(pid)?.now()?.into())
}

/// Stops a process by SIGTERM, or by SIGKILL after a timeout.
pub(crate) async fn stop(mut process: Child) -> anyhow::Result<()> {
    if let Some(pid) = process.id() {
        kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM)?;
    }
    if tokio::time::timeout(TIMEOUT, process.wait()).await.is_err() {
        process.kill().await?;
        bail!("killed, because it did not stop within {TIMEOUT:?}");
    }
    Ok(())
}

/// Returns an unused loopback address.
pub(crate) fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}

/// Waits until the server responds to `path` with 200.
async fn wait_for(process: &mut Child, address: SocketAddr, path: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let request = request("GET", path, None, None);
    loop {
        if let Ok(response) = load::call(address, &request).await
            && response.status == 200
        {
            return Ok(());
        }
        if let Some(status) = process.try_wait()? {
            bail!("the server exited: {status}");
        }
        if Instant::now() > deadline {
            bail!("timed out waiting for {path} after {TIMEOUT:?}");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
