//! Node check-ins: each daemon reports that its nodes are alive, and less often their resources. See
//! docs/decisions/0050.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::event::{Event, EventType};
use muster_types::node::{HostFeature, NodeReport, NodeState, RouterGate};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::BootTime;
use muster_types::{Error, Result};

use super::changes::MAX_SUMMARY_AGE;
use crate::app::App;
use crate::objects::instance::{local_node, stale_vms};
use crate::objects::{node, node_join, shared_storage};
use muster_store::membership::{MAX_CLOCK_SKEW, Member};
use muster_store::{node_networks, nodes, schema, transaction};

/// The number of check-ins for each report of the resources.
const CHECK_INS_PER_REPORT: u32 = 5;
/// The age of the rows of the nodes by which a report decides whether the cluster has other hosts.
const NODES_TTL: Duration = Duration::from_secs(60);
/// The clock skew in seconds above which a warning is recorded.
const CLOCK_SKEW_WARNING: f64 = 1.0;

/// Registers the nodes of this daemon, or marks them as running again.
pub async fn join(app: &App) -> Result<()> {
    // Also before the daemon exits because of the deletion.
    stop_deleted_nodes(app).await?;
    for node in &app.nodes {
        node_join::join(app, node.identity()).await?;
        let id = node.identity().id;
        transaction!(app.store, |tx| { Ok(node_networks::reset_generations(tx, id).await?) })?;
    }
    // A migration may have begun since this daemon opened the database.
    if let Some(reason) = schema::unsupported(&app.store).await? {
        return Err(Error::Conflict(reason));
    }
    check_in(app).await?;
    for node in &app.nodes {
        stale_vms::remove_stale_after_return(app, node).await?;
    }
    report(app, true).await
}

/// Stops the VMs of nodes that were deleted, moves their files to `lost+found`, and closes the gate of their routers.
pub async fn stop_deleted_nodes(app: &App) -> Result<()> {
    for node in &app.nodes {
        if node::is_deleted(app, node.identity().id).await? {
            if let Err(error) = node.set_router_gate(RouterGate::Closed).await {
                tracing::warn!(%error, "failed to close the gate of the routers");
            }
            stale_vms::remove_stale_after_return(app, node).await?;
        }
    }
    Ok(())
}

/// Returns whether a node of this daemon was deleted from the cluster.
pub async fn has_deleted_node(app: &App) -> Result<bool> {
    for node in &app.nodes {
        if node::is_deleted(app, node.identity().id).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks in periodically until the daemon exits.
pub async fn run(app: Arc<App>) {
    let interval = Duration::from_secs_f64(app.settings.node_checkin_interval);
    let event_interval = Duration::from_secs(app.settings.usage_event_frequency);
    let mut last_event = Instant::now();
    let mut check_ins = 0;
    let mut was_degraded = false;
    loop {
        tokio::time::sleep(interval).await;
        let started = Instant::now();
        let outcome = check_in_again(&app, interval).await;
        app.metrics.passed("check-in", started, outcome.is_ok());
        if let Err(error) = outcome {
            tracing::warn!(%error, "failed to check in");
            continue;
        }
        check_ins += 1;
        let is_degraded = app.peers.is_degraded();
        if check_ins < CHECK_INS_PER_REPORT && is_degraded == was_degraded {
            continue;
        }
        let with_event = last_event.elapsed() >= event_interval;
        match report(&app, with_event).await {
            Ok(()) => {
                (check_ins, was_degraded) = (0, is_degraded);
                if with_event {
                    last_event = Instant::now();
                }
            }
            Err(error) => tracing::warn!(%error, "failed to report the resources of a node"),
        }
    }
}

/// Checks in by one statement if all nodes are up, and measures the clock skew by the summary of changes.
async fn check_in_again(app: &App, interval: Duration) -> Result<()> {
    // Before the check-in is sent, also if the host is suspended meanwhile.
    let began = BootTime::now();
    let membership = &app.store.membership;
    membership.require()?;
    let members = membership.members();
    let summary = app.cluster_changes.recent(interval.max(MAX_SUMMARY_AGE));
    let Some(summary) = summary.filter(|_| !members.is_empty()) else { return check_in(app).await };
    if nodes::check_in_active(&app.store, &members, membership.clock_skew()).await? < members.len() {
        return check_in(app).await;
    }
    for member in &members {
        local_node(app, Some(member.node))?.renew_fencing_lease(began)?;
    }
    observe_clock(app, summary.queried, summary.time);
    Ok(())
}

/// Checks in for every node of this daemon, records which of them lost their membership, and measures the clock skew.
pub async fn check_in(app: &App) -> Result<()> {
    // Before the check-in is sent, also if the host is suspended meanwhile.
    let began = BootTime::now();
    let membership = &app.store.membership;
    membership.require()?;
    let members = membership.members();
    let check_in = nodes::check_in(&app.store, &members, membership.clock_skew()).await?;
    for member in &check_in.lost {
        membership.lose(*member);
    }
    membership.require()?;
    if !check_in.states.is_empty() {
        observe_clock(app, check_in.queried, check_in.time);
    }
    for (id, state) in check_in.states {
        let node = local_node(app, Some(id))?;
        // Reviving takes a transaction, so only nodes that need it are revived.
        if state != NodeState::Created {
            node::revive(app, id).await?;
            // After it is active, so that no instance can be evacuated from it unnoticed. Before its lease is renewed, so
            // that the watchdog stops what this cannot.
            stale_vms::remove_stale_after_return(app, node).await?;
        }
        node.renew_fencing_lease(began)?;
    }
    Ok(())
}

/// Measures the clock skew by a time of the database, which was queried between two times of this host, and records when it
/// begins or ceases to matter.
fn observe_clock(app: &App, queried: (f64, f64), time: f64) {
    let severity = |skew: f64| {
        [CLOCK_SKEW_WARNING, MAX_CLOCK_SKEW].into_iter().filter(|limit| skew.abs() > *limit).count()
    };
    let before = severity(app.store.membership.clock_skew());
    let skew = app.store.membership.observe_clock(queried.0, time, queried.1);
    if severity(skew) == before {
        return;
    }
    let message = match severity(skew) {
        0 => "the clock agrees with that of the database again",
        1 => "the clock differs from that of the database: synchronize the clocks of both hosts (NTP)",
        _ => {
            "the clock differs too much from that of the database: this daemon acquires no leases and creates no tokens \
             until the clocks of both hosts are synchronized (NTP)"
        }
    };
    tracing::warn!(seconds = skew, "{message}");
    for member in app.store.membership.members() {
        let object = ObjectRef::new(ObjectType::Node, member.node);
        app.events.record(Event::new(EventType::Status, object, message).with("clock_skew", skew));
    }
}

/// Writes the reports of the nodes of this daemon.
pub(super) async fn report(app: &App, with_event: bool) -> Result<()> {
    let mut reports: Vec<(Member, NodeReport)> = Vec::with_capacity(app.nodes.len());
    for member in app.store.membership.members() {
        let node = local_node(app, Some(member.node))?;
        let mut report = node.report().await?;
        app.peers.complete_report(node.identity(), &mut report);
        report.shared_storage = shared_storage::inspect(app, node).await?;
        if !node.identity().simulated && is_loopback(&report.api_url) && has_other_hosts(app).await? {
            report_loopback(app, &mut report);
        }
        reports.push((member, report));
    }
    nodes::report(&app.store, &reports).await?;
    for (member, report) in reports.into_iter().filter(|_| with_event) {
        let object = ObjectRef::new(ObjectType::Node, member.node);
        let mut event = Event::new(EventType::Resources, object, "updated node resources");
        event.extra = report.resources;
        app.events.record(event);
    }
    Ok(())
}

fn is_loopback(url: &str) -> bool {
    let host = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host).trim_matches(['[', ']']);
    host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

async fn has_other_hosts(app: &App) -> Result<bool> {
    let is_own = |row: &nodes::NodeRow| app.nodes.iter().any(|node| node.identity().id == row.identity.id);
    let rows = app.node_cache.get(&app.store, NODES_TTL).await?;
    let mut others = rows.iter().filter(|row| !is_own(row) && !row.identity.simulated);
    Ok(others.any(|row| row.state != NodeState::Deleted))
}

/// Reports that the other nodes cannot reach the API of this daemon.
fn report_loopback(app: &App, report: &mut NodeReport) {
    let reason = format!(
        "{} is reachable only from this host, but the cluster has other nodes: start the daemon with \
         `--listen 0.0.0.0:{}`, or with an address that the other nodes reach",
        report.api_url, app.settings.api_port
    );
    if app.limits_logged.lock().insert(HostFeature::Api) {
        tracing::warn!(reason, "other nodes cannot reach the API of this daemon");
    }
    report.limits.insert(HostFeature::Api, reason);
}

/// Marks every node of this daemon as stopped, except those that it lost.
pub async fn leave(app: &App) {
    let members = app.store.membership.members();
    for node in &app.nodes {
        let id = node.identity().id;
        if !members.iter().any(|member| member.node == id) {
            continue;
        }
        for state in [NodeState::Stopping, NodeState::Stopped] {
            if let Err(error) = node::move_to(app, id, state, "daemon stopped").await {
                tracing::warn!(%error, "failed to mark a node as stopped");
                return;
            }
        }
        // A stopped node is not evacuated automatically, so its VMs may run.
        if let Err(error) = node.end_fencing_lease() {
            tracing::warn!(%error, "failed to end the fencing lease");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[test]
    fn recognizes_urls_that_only_this_host_reaches() {
        for url in ["http://127.0.0.1:13000", "https://127.9.0.1:1", "http://[::1]:13000"] {
            assert!(is_loopback(url), "{url}");
        }
        for url in ["http://10.0.0.1:13000", "https://[fd00::1]:13000", ""] {
            assert!(!is_loopback(url), "{url}");
        }
    }
}
