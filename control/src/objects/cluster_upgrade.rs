//! Rolling upgrades: what the nodes run, and what to do next. See docs/decisions/0072.

#[cfg(test)]
mod tests;

use muster_store::nodes::{self, NodeRelease};
use muster_store::schema::{self, Schema};
use muster_types::Result;
use muster_types::cluster_upgrade::{ClusterUpgradeRecord, HeldMigrationRecord, NodeUpgradeRecord};
use muster_types::node::NodeState;

use crate::app::App;

/// Returns the progress of an upgrade.
pub async fn get(app: &App) -> Result<ClusterUpgradeRecord> {
    let database = schema::get(&*app.store).await?;
    let held = schema::held_migrations(&app.store, database);
    Ok(record(database, &held, &nodes::releases(&*app.store).await?))
}

/// The age of a program: its schema version, then its release.
type Age = (i64, Vec<u64>);

fn age(node: &NodeRelease) -> Age {
    (node.schema_version.unwrap_or(0), version(&node.release))
}

/// Returns the numbers of the version in a text such as `muster 0.1.0 (simulated)`.
fn version(release: &str) -> Vec<u64> {
    let is_version = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    let version = release.split_whitespace().find(is_version).unwrap_or_default();
    version.split(['.', '-', '+']).map_while(|number| number.parse().ok()).collect()
}

/// Whether a daemon of the node may be running.
fn may_run(node: &NodeRelease) -> bool {
    match node.state {
        NodeState::Created | NodeState::Stopping | NodeState::Missing => true,
        NodeState::Stopped | NodeState::Error | NodeState::Deleted => false,
    }
}

fn record(database: Schema, held: &[i64], releases: &[NodeRelease]) -> ClusterUpgradeRecord {
    let newest = releases.iter().filter(|node| may_run(node)).max_by_key(|node| age(node));
    let is_outdated = |node: &NodeRelease| newest.is_some_and(|newest| age(node) < age(newest));
    let nodes = releases.iter().map(|node| NodeUpgradeRecord {
        name: node.name.clone(),
        state: node.state,
        release: node.release.clone(),
        schema_version: node.schema_version,
        is_outdated: is_outdated(node),
    });
    let waits_for = |number: i64| {
        let older = releases.iter().filter(|node| may_run(node) && node.schema_version < Some(number));
        older.map(|node| node.name.clone()).collect()
    };
    let held_migrations: Vec<_> = held
        .iter()
        .map(|number| HeldMigrationRecord { number: *number, waits_for: waits_for(*number) })
        .collect();
    let outdated: Vec<&NodeRelease> = releases.iter().filter(|node| is_outdated(node)).collect();
    ClusterUpgradeRecord {
        schema_version: database.version,
        minimum_schema_version: database.minimum,
        nodes: nodes.collect(),
        next_step: next_step(database, newest, &outdated, &held_migrations),
        held_migrations,
    }
}

/// Returns a program in words.
fn describe(node: &NodeRelease) -> String {
    match node.schema_version {
        Some(schema) => format!("{}, schema version {schema}", node.release),
        None => format!("{}, unknown schema version", node.release),
    }
}

fn next_step(
    database: Schema,
    newest: Option<&NodeRelease>,
    outdated: &[&NodeRelease],
    held: &[HeldMigrationRecord],
) -> String {
    let Some(newest) = newest else { return "start a node".to_owned() };
    let is_up = |node: &&&NodeRelease| matches!(node.state, NodeState::Created | NodeState::Stopping);
    let mut up = outdated.iter().filter(is_up);
    if let Some(node) = up.next() {
        let rest: Vec<&str> = up.map(|node| node.name.as_str()).collect();
        let then = if rest.is_empty() { String::new() } else { format!("; then {}", rest.join(", ")) };
        return format!(
            "upgrade node {} ({}) to the release of node {} ({}): install it and restart the daemon, guests keep \
             running{then}",
            node.name,
            describe(node),
            newest.name,
            describe(newest)
        );
    }
    if let Some(node) = outdated.iter().find(|node| may_run(node)) {
        return format!(
            "node {} ({}) does not check in: upgrade it to {}, or delete it",
            node.name,
            describe(node),
            newest.release
        );
    }
    if let Some(migration) = held.first() {
        return format!(
            "wait: all nodes support migration {}, which is applied within seconds",
            migration.number
        );
    }
    let cannot_start = outdated.iter().filter(|node| node.schema_version < Some(database.minimum));
    let names: Vec<&str> = cannot_start.map(|node| node.name.as_str()).collect();
    let done = format!("all nodes that are up run {}: nothing to do", describe(newest));
    if names.is_empty() {
        return done;
    }
    format!("{done}, but upgrade these nodes before you start them: {}", names.join(", "))
}
