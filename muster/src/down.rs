//! `muster down`: stops the cluster that `muster up` started.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::running::{ClusterDir, is_alive, muster};

const POLL_INTERVAL: Duration = Duration::from_millis(50);

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
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let dir = ClusterDir::new(&arguments.data_dir);
    if !dir.is_running() {
        dir.remove_pid();
        eprintln!("no cluster runs with data directory {}", dir.path().display());
        return Ok(());
    }
    let Some(pid) = dir.pid() else {
        bail!(
            "the daemon with data directory {} was not started by `muster up`: stop it where it was started, for example with \
             `systemctl stop muster`",
            dir.path().display()
        );
    };
    let is_rootless = dir.forward_socket().exists();
    let mut running = running_instances(&dir).await;
    if is_rootless || arguments.guests {
        for (id, name) in running.as_deref().unwrap_or_default() {
            eprintln!("powering off {name}");
            muster(&dir, &["instance", "poweroff", id]).await?;
        }
        running = Ok(Vec::new());
    }
    // Without the grace period of SIGTERM, which is for load balancers in front of several nodes.
    kill(pid, Signal::SIGINT).with_context(|| format!("process {pid}"))?;
    let stopped = async {
        while dir.is_running() || is_alive(pid) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(arguments.timeout), stopped).await.is_err() {
        bail!("the cluster has not stopped after {} s; see {}", arguments.timeout, dir.log_file().display());
    }
    dir.remove_pid();
    eprintln!("{}", summary(&dir, is_rootless, running));
    Ok(())
}

/// Returns what was stopped and what keeps running.
fn summary(dir: &ClusterDir, is_rootless: bool, running: anyhow::Result<Vec<(String, String)>>) -> String {
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
            format!(
                "stopped; these VMs and their networks keep running: {}. The next `muster up{option}` re-attaches to them; \
                 `muster down --guests{option}` would have powered them off",
                names.join(", ")
            )
        }
        Err(error) => format!("stopped; VMs keep running (failed to list them: {error:#})"),
    }
}

/// Returns the ids and the names of the instances that are powered on.
async fn running_instances(dir: &ClusterDir) -> anyhow::Result<Vec<(String, String)>> {
    let list: Vec<Value> = serde_json::from_str(&muster(dir, &["--json", "instance", "list"]).await?)?;
    Ok(powered_on(&list))
}

fn powered_on(instances: &[Value]) -> Vec<(String, String)> {
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
        let text = summary(&dir, false, Ok(running));
        assert!(text.contains("these VMs and their networks keep running: web, lazy"), "{text}");
        assert!(text.contains("`muster up --data-dir /nonsense`"), "{text}");
        assert!(summary(&dir, true, Ok(Vec::new())).contains("nothing of it runs"));
    }
}
