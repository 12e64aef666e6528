//! `muster node drain`: moves the instances of a node to other nodes.

use anyhow::bail;
use clap::Args;
use muster_types::node::DrainRecord;

use super::operation;
use super::session::Session;
use super::wait::LongWaitOptions;
use crate::output::{Table, or_dash};
use crate::transfer::unless_interrupted;

/// Arguments of `muster node drain`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name or id of the node
    node: String,
    /// Only show what would happen to each instance
    #[arg(long)]
    dry_run: bool,
    /// Power instances off that cannot be migrated while they run, and start them on their new nodes
    #[arg(long)]
    stop: bool,
    #[command(flatten)]
    wait: LongWaitOptions,
}

/// Drains a node, and waits until it has no instances.
pub(super) async fn drain(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { node, dry_run, stop, wait } = arguments;
    let client = &session.client;
    let response = client.drain_node(&node, stop, dry_run).await?;
    let started = response.clone().value()?;
    session.show(response, forecast)?;
    let (Some(handle), Some(timer)) = (started.operation, wait.timer()) else { return Ok(()) };
    let consequence = format!("the drain continues: cancel it with `muster node undrain {node}`");
    let ended = operation::wait_until_complete(client, &handle, timer, &consequence);
    if let Some(error) = unless_interrupted(ended, || consequence.clone()).await? {
        bail!("node {node} is not empty: {error}");
    }
    let record = client.node(&node).await?;
    session.confirm(&record, &format!("node {node} is drained"))
}

fn forecast(record: DrainRecord) -> Table {
    Table::new(&["INSTANCE", "NAMESPACE", "OUTCOME", "NODE"], &["REASON"]).rows(
        record.instances.into_iter().map(|instance| {
            let (outcome, node) = (instance.outcome.to_string(), or_dash(instance.node.unwrap_or_default()));
            [instance.name, instance.namespace, outcome, node, or_dash(instance.reason.unwrap_or_default())]
        }),
    )
}
