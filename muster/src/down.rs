//! `muster down`: stops the cluster that `muster up` started.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use muster_client::{message, timed_out};
use nix::fcntl::Flock;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::running::{ClusterDir, muster};

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The part of the time-out in which instances must be powered off. The rest is for the daemon.
const POWER_OFF_SHARE: u32 = 2;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The VMs of a cluster that runs as root keep running unless --guests is given, and the next `muster up` re-attaches \
                  to them. The VMs of a rootless cluster end with it."
)]
pub(crate) struct Arguments {
    /// Data directory of the cluster
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Power off all instances first
    #[arg(long)]
    guests: bool,
    /// Seconds to wait until the cluster has stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(..=86_400))]
    timeout: u64,
}

/// An instance by its id and name.
type NamedInstance = (String, String);

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let dir = ClusterDir::new(&arguments.data_dir);
    if !dir.path().exists() {
        message!("no cluster runs with data directory {}", dir.path().display());
        return Ok(());
    }
    let (begin, time) = (Instant::now(), Duration::from_secs(arguments.timeout));
    let deadline = begin + time;
    // A cluster that another process starts meanwhile is stopped once it runs.
    let _lock: Flock<File> = timeout_at(deadline, lock(&dir)).await.unwrap_or_else(|_| {
        let path = dir.path().display();
        Err(timed_out(format!(
            "another `muster up` or `muster down` is in progress with data directory {path}"
        )))
    })?;
    let process = dir.process();
    if process.is_none() && !dir.is_running()? {
        dir.remove_pid_file();
        message!("no cluster runs with data directory {}", dir.path().display());
        return Ok(());
    }
    let Some(pid) = process else {
        bail!(
            "the daemon with data directory {} was not started by `muster up`: stop it where it was started, for example with \
             `systemctl stop muster`",
            dir.path().display()
        );
    };
    let is_rootless = dir.is_rootless();
    let limit = begin + time / POWER_OFF_SHARE;
    let mut running = timeout_at(limit, running_instances(&dir))
        .await
        .unwrap_or_else(|_| Err(anyhow::anyhow!("the API does not respond")));
    let mut failures = Vec::new();
    if is_rootless || arguments.guests {
        match running {
            Ok(instances) => {
                let still_on;
                (still_on, failures) = power_off(&dir, instances, limit).await;
                running = Ok(still_on);
            }
            Err(ref error) => failures.push(format!("failed to list the instances: {error:#}")),
        }
    }
    for failure in &failures {
        message!("warning: {failure}");
    }
    stop(&dir, pid, deadline, arguments.timeout).await?;
    message!("{}", summary(&dir, is_rootless, arguments.guests, running));
    if !is_rootless && !failures.is_empty() {
        bail!("not all instances are powered off");
    }
    Ok(())
}

/// Waits until no other process starts or stops the cluster.
async fn lock(dir: &ClusterDir) -> anyhow::Result<Flock<File>> {
    loop {
        if let Some(lock) = dir.lock()? {
            return Ok(lock);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Stops the daemon.
async fn stop(dir: &ClusterDir, pid: Pid, deadline: Instant, seconds: u64) -> anyhow::Result<()> {
    // Without the grace period of SIGTERM, which is for load balancers in front of several nodes.
    kill(pid, Signal::SIGINT).with_context(|| format!("process {pid}"))?;
    let stopped = async {
        while dir.is_running()? || dir.process() == Some(pid) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        anyhow::Ok(())
    };
    match timeout_at(deadline, stopped).await {
        Ok(stopped) => stopped?,
        Err(_) => {
            let log = dir.log_file();
            let text = format!(
                "the cluster has not stopped after {seconds} s (process {pid}); see {}",
                log.display()
            );
            return Err(timed_out(text));
        }
    }
    dir.remove_process(pid);
    Ok(())
}

/// Powers off instances, concurrently. Returns those that are still on, and why.
async fn power_off(
    dir: &ClusterDir,
    instances: Vec<NamedInstance>,
    limit: Instant,
) -> (Vec<NamedInstance>, Vec<String>) {
    let mut calls = JoinSet::new();
    for instance in instances {
        message!("powering off {}", instance.1);
        let dir = ClusterDir::new(dir.path());
        calls.spawn(async move {
            let done = timeout_at(limit, muster(&dir, &["instance", "poweroff", &instance.0])).await;
            (instance, done.unwrap_or_else(|_| Err(anyhow::anyhow!("it took too long"))))
        });
    }
    let (mut still_on, mut failures) = (Vec::new(), Vec::new());
    while let Some(ended) = calls.join_next().await {
        if let Ok((instance, Err(error))) = ended {
            failures.push(format!("failed to power off {}: {error:#}", instance.1));
            still_on.push(instance);
        }
    }
    (still_on, failures)
}

/// Returns what was stopped and what keeps running.
fn summary(
    dir: &ClusterDir,
    is_rootless: bool,
    guests: bool,
    running: anyhow::Result<Vec<NamedInstance>>,
) -> String {
    let option = dir.option();
    let path = dir.path().display();
    if is_rootless {
        return format!("stopped; nothing of it runs. Its data is in {path}");
    }
    match running {
        Ok(running) if running.is_empty() => {
            format!("stopped; no VMs run. Networks stay on this host. The data is in {path}")
        }
        Ok(running) => {
            let names: Vec<&str> = running.iter().map(|(_, name)| name.as_str()).collect();
            let hint = match guests {
                true => String::new(),
                false => format!("; `muster down --guests{option}` would have powered them off"),
            };
            format!(
                "stopped; these VMs and their networks keep running: {}. The next `muster up{option}` re-attaches to them{hint}",
                names.join(", ")
            )
        }
        Err(error) => format!("stopped; VMs keep running (failed to list them: {error:#})"),
    }
}

/// Returns the ids and the names of the instances that are powered on.
async fn running_instances(dir: &ClusterDir) -> anyhow::Result<Vec<NamedInstance>> {
    let list: Vec<Value> = serde_json::from_str(&muster(dir, &["--json", "instance", "list"]).await?)?;
    Ok(powered_on(&list))
}

fn powered_on(instances: &[Value]) -> Vec<NamedInstance> {
    let text = |instance: &Value, field: &str| instance[field].as_str().unwrap_or_default().to_owned();
    let is_on = |instance: &&Value| matches!(instance["power_state"].as_str(), Some("on" | "paused"));
    let instances = instances.iter().filter(is_on);
    instances.map(|instance| (text(instance, "uuid"), text(instance, "name"))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn says_what_keeps_running() {
        let dir = ClusterDir::new(std::path::Path::new("/nonsense"));
        let list = [
            json!({"uuid": "1", "name": "web", "power_state": "on"}),
            json!({"uuid": "2", "name": "old", "power_state": "off"}),
            json!({"uuid": "3", "name": "lazy", "power_state": "paused"}),
        ];
        let running = powered_on(&list);
        assert_eq!(running, [("1".into(), "web".into()), ("3".into(), "lazy".into())]);
        let text = summary(&dir, false, false, Ok(running));
        assert!(text.contains("these VMs and their networks keep running: web, lazy"), "{text}");
        assert!(text.contains("`muster up --data-dir /nonsense`"), "{text}");
        assert!(summary(&dir, true, false, Ok(Vec::new())).contains("nothing of it runs"));
    }
}
