//! Metrics of this daemon's nodes and of the cluster, read from the database when they are requested.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use muster_store::nodes::{self, NodeRow};
use muster_store::state_counts::CountedTable;
use muster_types::Result;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::app::App;
use crate::exposition::{ExpositionFormat, encode};

type FloatGauge = Gauge<f64, AtomicU64>;
type NodeGauge = Family<[(&'static str, String); 1], FloatGauge>;

/// Returns the resources that this daemon's nodes reported at their last check-in, one gauge for each numeric value.
pub async fn node_metrics(app: &App, format: ExpositionFormat) -> Result<String> {
    let mut gauges: BTreeMap<String, NodeGauge> = BTreeMap::new();
    let is_own = |row: &NodeRow| app.nodes.iter().any(|node| node.identity().id == row.identity.id);
    for row in nodes::list(&*app.store).await?.into_iter().filter(is_own) {
        let label = [("node", row.identity.name)];
        let updated = ("updated_at".to_owned(), row.lastseen);
        let resources = row.report.resources.iter().filter_map(|(name, value)| {
            let value = value.as_f64().or_else(|| value.as_bool().map(f64::from))?;
            Some((metric_name(name), value))
        });
        for (name, value) in resources.chain([updated]) {
            gauges.entry(name).or_default().get_or_create(&label).set(value);
        }
    }
    let mut registry = Registry::default();
    for (name, gauge) in gauges {
        let help =
            if name == "updated_at" { "Unix time of the last check-in" } else { "Reported by the node" };
        registry.register(name, help, gauge);
    }
    Ok(encode(&registry, format))
}

/// Returns the number of objects of the cluster by state, at most a few seconds old.
pub async fn cluster_metrics(app: &App, format: ExpositionFormat) -> Result<String> {
    let counts = app.state_counts.get(&app.store).await?;
    let mut registry = Registry::default();
    for (table, name, help) in [
        (CountedTable::Nodes, "cluster_nodes", "Nodes by state"),
        (CountedTable::Namespaces, "cluster_namespaces", "Namespaces by state"),
        (CountedTable::Instances, "cluster_instances", "Instances by state"),
        (CountedTable::Networks, "cluster_networks", "Networks by state"),
        (CountedTable::Artifacts, "cluster_artifacts", "Artifacts by state"),
        (CountedTable::Blobs, "cluster_blobs", "Blobs by state"),
        (CountedTable::Operations, "cluster_operations", "Cluster operations by state"),
        (CountedTable::AgentOperations, "cluster_agent_operations", "Agent operations by state"),
    ] {
        let gauge = Family::<[(&'static str, String); 1], Gauge>::default();
        for (state, count) in counts.get(&table).into_iter().flatten() {
            gauge.get_or_create(&[("state", state.clone())]).set(*count);
        }
        registry.register(name, help, gauge);
    }
    Ok(encode(&registry, format))
}

/// Returns the name of a reported value with characters that metrics allow.
fn metric_name(name: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().map(|c| if is_allowed(c) { c } else { '_' }).collect()
}
