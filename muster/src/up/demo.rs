//! The demo: a network, an instance from the small image, and its console.

use std::time::Duration;

use anyhow::Context as _;

use crate::running::{ClusterDir, muster};

/// The name of both the network and the instance.
const NAME: &str = "demo";
const NETBLOCK: &str = "10.77.0.0/24";
/// How long the image may take to be published.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Creates what does not exist yet, and opens the console on a terminal.
pub(super) async fn run(dir: &ClusterDir, has_terminal: bool) -> anyhow::Result<()> {
    if muster(dir, &["network", "show", NAME]).await.is_err() {
        eprintln!("$ muster network create {NAME} {NETBLOCK} --dns");
        muster(dir, &["network", "create", NAME, NETBLOCK, "--dns"]).await?;
    }
    if muster(dir, &["instance", "show", NAME]).await.is_err() {
        wait_for_image(dir).await?;
        let create = ["instance", "create", NAME, "--cpus", "1", "--memory", "256", "--disk", "2@tiny"];
        let create = [&create[..], &["--network", NAME]].concat();
        eprintln!("$ muster {}", create.join(" "));
        muster(dir, &create).await?;
    }
    if !has_terminal {
        eprintln!("open its console with `muster console {NAME}`");
        return Ok(());
    }
    eprintln!("$ muster console {NAME}");
    let mut console = tokio::process::Command::from(dir.command(&["console", NAME])?);
    console.status().await.context("muster console")?;
    Ok(())
}

async fn wait_for_image(dir: &ClusterDir) -> anyhow::Result<()> {
    let published = async {
        while muster(dir, &["label", "show", "tiny"]).await.is_err() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    let published = tokio::time::timeout(PUBLISH_TIMEOUT, published).await;
    published.context("the image was not published; see the log")
}
