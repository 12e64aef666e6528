//! `muster cluster`.

use std::collections::BTreeMap;

use clap::Subcommand;
use muster_types::cluster_upgrade::{ClusterUpgradeRecord, NodeUpgradeRecord};

use super::instance_tables::format_megabytes;
use super::rebalance;
use super::session::Session;
use crate::api::{ClusterResources, LeaseOwner, NodeResources};
use crate::output::{self, Table, escape_control, format_size};
use crate::time::format_utc;

/// Commands for the cluster as a whole.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Move instances from full nodes to empty ones: shows the plan, asks, and waits until they have moved
    Rebalance(rebalance::Arguments),
    /// Show the capacity of each node that new instances can use
    Resources,
    /// Show the cluster-wide leases and their owners
    Locks,
    /// Print the certificate authorities of the nodes' displays, in PEM
    Cacert,
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
        Command::Resources => session.show(session.client.cluster_resources().await?, resources),
        Command::Locks => session.show(session.client.leases().await?, locks),
        Command::Cacert => {
            let pem = session.client.display_authorities().await?;
            // Escaped, because the lines may be printed to a terminal.
            output::print(&pem.lines().map(|line| escape_control(line) + "\n").collect::<String>())
        }
        Command::Upgrade(UpgradeCommand::Status) => {
            session.show(session.client.cluster_upgrade().await?, status)
        }
    }
}

/// Formats an amount that the API returns as a float.
fn whole(amount: f64) -> i64 {
    amount.round() as i64
}

/// Lists the capacity of the nodes.
pub(super) fn resources(resources: ClusterResources) -> Table {
    let table = Table::new(&["NODE", "CPUS FREE", "CPUS", "LOAD", "MEMORY FREE", "MEMORY", "DISK FREE"], &[]);
    let nodes = resources.per_node.into_iter().map(|(name, node)| node_row(name, &node));
    let total = [
        "total".to_owned(),
        whole(resources.total.cpu_available).to_string(),
        "-".to_owned(),
        "-".to_owned(),
        format_megabytes(whole(resources.total.ram_available)),
        "-".to_owned(),
        "-".to_owned(),
    ];
    table.rows(nodes.chain([total]))
}

fn node_row(name: String, node: &NodeResources) -> [String; 7] {
    [
        name,
        whole(node.cpu_available).to_string(),
        whole(node.cpu_max).to_string(),
        format!("{:.2} {:.2} {:.2}", node.cpu_load_1, node.cpu_load_5, node.cpu_load_15),
        format_megabytes(whole(node.ram_available)),
        format_megabytes(whole(node.ram_max)),
        format_size(whole(node.disk_available)),
    ]
}

fn locks(leases: BTreeMap<String, LeaseOwner>) -> Table {
    Table::new(&["LEASE", "NODE", "PID", "EXPIRES"], &[]).rows(
        leases
            .into_iter()
            .map(|(name, owner)| [name, owner.node, owner.pid.to_string(), format_utc(owner.expires)]),
    )
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
    fn shows_capacity_by_node_and_in_total() {
        let node = json!({
            "cpu_max": 8.0, "cpu_max_per_instance": 8.0, "cpu_available": 6.0, "cpu_load_1": 0.5, "cpu_load_5": 0.25,
            "cpu_load_15": 0.0, "ram_max": 2048.0, "ram_max_per_instance": 1.0, "ram_available": 1024.0,
            "disk_available": 1_073_741_824.0
        });
        let record =
            json!({ "total": { "cpu_available": 6.0, "ram_available": 1024.0 }, "per_node": { "a": node } });
        let text = resources(from_value(record).unwrap()).render(None);
        assert_eq!(
            text,
            "NODE   CPUS FREE  CPUS  LOAD            MEMORY FREE  MEMORY   DISK FREE\n\
             a      6          8     0.50 0.25 0.00  1.0 GiB      2.0 GiB  1.0 GiB\n\
             total  6          -     -               1.0 GiB      -        -\n"
        );
    }

    #[test]
    fn shows_the_owners_of_leases() {
        let lease = json!({ "node": "a", "pid": 7, "operation": "maintainer", "expires": 1_767_225_600.0 });
        let text = locks(from_value(json!({ "maintainer": lease })).unwrap()).render(None);
        assert!(text.ends_with("maintainer  a     7    2026-01-01T00:00:00.000Z\n"), "{text}");
    }

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
