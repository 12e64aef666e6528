//! The demo: a network, an instance from the small image, and its console.

use anyhow::Context as _;
use muster_client::message;

use super::EndSignals;
use super::welcome::StartedCluster;
use crate::running::{ClusterDir, muster};

/// The name of both the network and the instance.
const NAME: &str = "demo";
const NETBLOCK: &str = "10.77.0.0/24";

/// Creates what does not exist yet.
pub(super) async fn create(cluster: &StartedCluster<'_>) -> anyhow::Result<()> {
    let dir = cluster.dir;
    if muster(dir, &["network", "show", NAME]).await.is_err() {
        message!("$ muster network create {NAME} {NETBLOCK} --dns");
        muster(dir, &["network", "create", NAME, NETBLOCK, "--dns"]).await?;
    }
    if muster(dir, &["instance", "show", NAME]).await.is_err() {
        let create =
            ["instance", "create", NAME, "--cpus", "1", "--memory", "256", "--disk", cluster.first_disk()];
        let create = [&create[..], &["--network", NAME]].concat();
        message!("$ muster {}", create.join(" "));
        muster(dir, &create).await?;
    }
    match cluster.is_simulated {
        true => message!("simulated guests have no console; see `muster why {NAME}`"),
        false => message!("open its console with `muster console {NAME}`"),
    }
    Ok(())
}

/// Opens the console on the terminal. Signals end only the console.
pub(super) async fn open_console(dir: &ClusterDir, signals: &mut EndSignals) -> anyhow::Result<()> {
    let mut console = tokio::process::Command::from(dir.command(&["console", NAME])?);
    let mut console = console.spawn().context("muster console")?;
    loop {
        tokio::select! {
            status = console.wait() => {
                status.context("muster console")?;
                return Ok(());
            }
            received = signals.recv() => super::forward(&console, received),
        }
    }
}
