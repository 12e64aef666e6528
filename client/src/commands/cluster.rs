//! `muster cluster`.

use clap::Subcommand;
use muster_types::cluster_upgrade::{ClusterUpgradeRecord, NodeUpgradeRecord};

use super::rebalance;
use super::session::Session;
use crate::output::Table;

/// Commands for the cluster as a whole.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Move instances from full nodes to empty ones: shows the plan, asks, and waits until they have moved
    Rebalance(rebalance::Arguments),
    /// Upgrade the nodes one after the other
    #[command(subcommand)]
    Upgrade(UpgradeCommand),
}

/// Commands for rolling upgrades.
#[derive(Debug, Subcommand)]
pub enum UpgradeCommand {
    /// Show what the nodes run, which schema versions the database supports, and the next step
    Status,
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    match command {
        Command::Rebalance(arguments) => rebalance::rebalance(session, arguments).await,
        Command::Upgrade(UpgradeCommand::Status) => {
            session.show(session.client.cluster_upgrade().await?, status)
        }
    }
}

fn status(upgrade: ClusterUpgradeRecord) -> Table {
    let schema =
        format!("{}; daemons need {} or newer", upgrade.schema_version, upgrade.minimum_schema_version);
    let head = [("next step".to_owned(), upgrade.next_step), ("schema version".to_owned(), schema)];
    let held = upgrade.held_migrations.into_iter().map(|migration| {
        let waits_for = match migration.waits_for.as_slice() {
            [] => "is applied next".to_owned(),
            names => format!("is applied when these nodes are upgraded: {}", names.join(", ")),
        };
        (format!("migration {}", migration.number), waits_for)
    });
    let nodes = upgrade.nodes.into_iter().map(|node| (format!("node {}", node.name), describe(&node)));
    Table::key_values(head.into_iter().chain(held).chain(nodes))
}

fn describe(node: &NodeUpgradeRecord) -> String {
    let schema = node.schema_version.map_or_else(|| "unknown".to_owned(), |version| version.to_string());
    let outdated = if node.is_outdated { ", outdated" } else { "" };
    format!("{}, schema version {schema}, {}{outdated}", node.release, node.state)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn shows_the_next_step_first_and_then_what_the_nodes_run() {
        let record = from_value(json!({
            "schema_version": 20, "minimum_schema_version": 17, "next_step": "upgrade node b",
            "nodes": [
                { "name": "a", "state": "created", "release": "muster 0.2.0", "schema_version": 20, "is_outdated": false },
                { "name": "b", "state": "created", "release": "muster 0.1.0", "schema_version": null, "is_outdated": true },
            ],
            "held_migrations": [{ "number": 19, "waits_for": ["b"] }],
        }));
        assert_eq!(
            status(record.unwrap()).render(None),
            "next step       upgrade node b\n\
             schema version  20; daemons need 17 or newer\n\
             migration 19    is applied when these nodes are upgraded: b\n\
             node a          muster 0.2.0, schema version 20, created\n\
             node b          muster 0.1.0, schema version unknown, created, outdated\n"
        );
    }
}
