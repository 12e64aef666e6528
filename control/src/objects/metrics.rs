//! The metrics of this daemon, which are in memory, and those of its nodes and of the cluster, which are read from the database.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use muster_store::nodes::{self, NodeRow};
use muster_store::state_counts::CountedTable;
use muster_types::Result;
use muster_types::node::NodeState;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::app::App;
use crate::exposition::{ExpositionFormat, encode};
use crate::state::ClusterFacts;

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

/// Returns what this daemon has counted and measured. Does not use the database.
#[must_use]
pub fn daemon_metrics(app: &App, format: ExpositionFormat) -> String {
    let (daemon, events) = (app.metrics.text(format), app.events.metrics_text(format));
    match format {
        ExpositionFormat::Prometheus => daemon + &events,
        // Only the end of the document has the marker.
        ExpositionFormat::OpenMetrics => daemon.trim_end_matches("# EOF\n").to_owned() + &events,
    }
}

/// Returns the state of the whole cluster, at most a few seconds old.
pub async fn cluster_metrics(app: &App, format: ExpositionFormat) -> Result<String> {
    let facts = app.state_counts.get(&app.store).await?;
    let mut registry = Registry::default();
    let age = Family::<[(&'static str, String); 1], FloatGauge>::default();
    for state in ["queued", "executing"] {
        let oldest = facts.operation_ages.iter().find(|(found, _)| found == state);
        age.get_or_create(&[("state", state.to_owned())]).set(oldest.map_or(0.0, |(_, seconds)| *seconds));
    }
    registry.register(
        "cluster_operation_age_seconds",
        "Age of the oldest unfinished operation by state",
        age,
    );
    let agents = Family::<[(&'static str, String); 1], Gauge>::default();
    for (state, count) in &facts.agents {
        let state = if state.is_empty() { "none" } else { state.as_str() };
        agents.get_or_create(&[("state", state.to_owned())]).set(*count);
    }
    registry.register("cluster_agents", "Running instances by the state of their agent", agents);
    register_nodes(&mut registry, &facts, app.settings.cpu_overcommit_ratio);
    let created: &[&str] = &["created"];
    let copies: &[&str] = &["whole", "damaged"];
    let unfinished: &[&str] = &["queued", "executing"];
    // States without objects that alerts are about are 0, not absent.
    for (table, name, help, states) in [
        (CountedTable::Nodes, "cluster_nodes", "Nodes by state", &["created", "missing", "error"][..]),
        (CountedTable::Namespaces, "cluster_namespaces", "Namespaces by state", created),
        (CountedTable::Instances, "cluster_instances", "Instances by state", &["created", "error"][..]),
        (CountedTable::Networks, "cluster_networks", "Networks by state", &["created", "error"][..]),
        (CountedTable::Artifacts, "cluster_artifacts", "Artifacts by state", created),
        (CountedTable::Blobs, "cluster_blobs", "Blobs by state", created),
        (CountedTable::BlobLocations, "cluster_blob_copies", "Copies of blobs by state", copies),
        (CountedTable::Operations, "cluster_operations", "Cluster operations by state", unfinished),
        (CountedTable::AgentOperations, "cluster_agent_operations", "Agent operations by state", unfinished),
    ] {
        let gauge = Family::<[(&'static str, String); 1], Gauge>::default();
        for state in states {
            gauge.get_or_create(&[("state", (*state).to_owned())]).set(0);
        }
        for (state, count) in facts.counts.get(&table).into_iter().flatten() {
            gauge.get_or_create(&[("state", state.clone())]).set(*count);
        }
        registry.register(name, help, gauge);
    }
    Ok(encode(&registry, format))
}

/// Adds when nodes have checked in, what is wrong with those that are up, and the capacity of those that run VMs.
fn register_nodes(registry: &mut Registry, facts: &ClusterFacts, cpu_overcommit: f64) {
    let (silence, degraded, skew) = (NodeGauge::default(), NodeGauge::default(), NodeGauge::default());
    let capacity = Family::<[(&'static str, &'static str); 2], FloatGauge>::default();
    for (row, seconds) in facts.nodes.iter().filter(|(row, _)| row.state != NodeState::Deleted) {
        let label = [("node", row.identity.name.clone())];
        // The daemon of a stopped node was shut down: nothing is wrong.
        if row.state != NodeState::Stopped {
            silence.get_or_create(&label).set(*seconds);
        }
        if row.state != NodeState::Created {
            continue;
        }
        degraded.get_or_create(&label).set(f64::from(row.report.degraded.is_some()));
        skew.get_or_create(&label).set(row.clock_skew);
        if !row.identity.is_hypervisor {
            continue;
        }
        // A node that has not reported yet has no capacity.
        let fact = |name: &str| row.report.resources.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        let cpus = fact("cpu_schedulable") * cpu_overcommit;
        for (resource, total, available) in [
            ("cpus", cpus, (cpus - fact("cpu_total_instance_vcpus")).max(0.0)),
            ("memory_mb", fact("memory_max"), fact("memory_available")),
            ("disk_bytes", fact("disk_total"), fact("disk_free")),
        ] {
            capacity.get_or_create(&[("resource", resource), ("kind", "total")]).inc_by(total);
            capacity.get_or_create(&[("resource", resource), ("kind", "available")]).inc_by(available);
        }
    }
    registry.register(
        "cluster_node_silence_seconds",
        "Seconds since the last check-in by node that was not shut down",
        silence,
    );
    registry.register(
        "cluster_node_degraded",
        "Whether a node that is up does not reach its peers",
        degraded,
    );
    registry.register(
        "cluster_node_clock_skew_seconds",
        "Seconds by which the clock of a node that is up is ahead of that of the database",
        skew,
    );
    registry.register("cluster_capacity", "Capacity of the nodes that run VMs", capacity);
}

/// Returns the name of a reported value with characters that metrics allow.
fn metric_name(name: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().map(|c| if is_allowed(c) { c } else { '_' }).collect()
}
