//! Node check-ins: each daemon reports that its nodes are alive, and their resources.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::node::{NodeReport, NodeState};
use muster_types::object::{ObjectRef, ObjectType};

use crate::app::App;
use crate::objects::node;
use muster_store::{node_networks, nodes, transaction};

/// Registers the nodes of this daemon, or marks them as running again.
pub async fn join(app: &App) -> Result<()> {
    for node in &app.nodes {
        node::join(app, node.identity()).await?;
        let id = node.identity().id;
        transaction!(app.store, |tx| { Ok(node_networks::reset_generations(tx, id).await?) })?;
    }
    check_in(app, true).await
}

/// Checks in periodically until the daemon exits.
pub async fn run(app: Arc<App>) {
    let interval = Duration::from_secs_f64(app.settings.node_checkin_interval);
    let event_interval = Duration::from_secs(app.settings.usage_event_frequency);
    let mut last_event = Instant::now();
    loop {
        tokio::time::sleep(interval).await;
        let with_event = last_event.elapsed() >= event_interval;
        match check_in(&app, with_event).await {
            Ok(()) if with_event => last_event = Instant::now(),
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "failed to check in"),
        }
    }
}

/// Checks in for every node of this daemon in one transaction.
async fn check_in(app: &App, with_event: bool) -> Result<()> {
    let mut reports: Vec<(_, NodeReport)> = Vec::with_capacity(app.nodes.len());
    for node in &app.nodes {
        reports.push((node.identity().id, node.report().await?));
    }
    // Reviving takes a transaction for each node, so only nodes that need it are revived.
    let inactive = transaction!(app.store, |tx| {
        let mut inactive = HashSet::new();
        for (id, report) in &reports {
            nodes::set_report(tx, *id, report).await?;
            if nodes::state(&mut *tx, *id).await? != Some(NodeState::Created) {
                inactive.insert(*id);
            }
        }
        Ok(inactive)
    })?;
    for (id, report) in reports {
        if inactive.contains(&id) {
            node::revive(app, id).await?;
        }
        if with_event {
            let mut event = Event::new(
                EventType::Resources,
                ObjectRef::new(ObjectType::Node, id),
                "updated node resources",
            );
            event.extra = report.resources;
            app.events.record(event);
        }
    }
    Ok(())
}

/// Marks every node of this daemon as stopped.
pub async fn leave(app: &App) {
    for node in &app.nodes {
        for state in [NodeState::Stopping, NodeState::Stopped] {
            if let Err(error) = node::move_to(app, node.identity().id, state, "daemon stopped").await {
                tracing::warn!(%error, "failed to mark a node as stopped");
                return;
            }
        }
    }
}
