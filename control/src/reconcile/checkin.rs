//! Every node reports in: what it is, that it lives, what it has left.

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

/// Makes the nodes of this daemon known, or known again.
pub async fn join(app: &App) -> Result<()> {
    for node in &app.nodes {
        node::join(app, node.identity()).await?;
        let id = node.identity().id;
        transaction!(app.store, |tx| { Ok(node_networks::reset_generations(tx, id).await?) })?;
    }
    once(app, true).await
}

/// Reports for as long as the daemon lives.
pub async fn run(app: Arc<App>) {
    let pause = Duration::from_secs_f64(app.settings.node_checkin_interval);
    let between_events = Duration::from_secs(app.settings.usage_event_frequency);
    let mut last_event = Instant::now();
    loop {
        tokio::time::sleep(pause).await;
        let due = last_event.elapsed() >= between_events;
        match once(&app, due).await {
            Ok(()) if due => last_event = Instant::now(),
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "check-in failed"),
        }
    }
}

/// Reports for every node of this daemon in one transaction.
async fn once(app: &App, with_event: bool) -> Result<()> {
    let mut reports: Vec<(_, NodeReport)> = Vec::with_capacity(app.nodes.len());
    for node in &app.nodes {
        reports.push((node.identity().id, node.report().await?));
    }
    // Each revival is a transaction, and a thousand of them would wait behind everybody else's.
    let asleep = transaction!(app.store, |tx| {
        let mut asleep = HashSet::new();
        for (id, report) in &reports {
            nodes::set_report(tx, *id, report).await?;
            if nodes::state(&mut *tx, *id).await? != Some(NodeState::Created) {
                asleep.insert(*id);
            }
        }
        Ok(asleep)
    })?;
    for (id, report) in reports {
        if asleep.contains(&id) {
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

/// Says goodbye for every node of this daemon.
pub async fn leave(app: &App) {
    for node in &app.nodes {
        for state in [NodeState::Stopping, NodeState::Stopped] {
            if let Err(error) = node::move_to(app, node.identity().id, state, "daemon stopped").await {
                tracing::warn!(%error, "the node's record was not updated");
                return;
            }
        }
    }
}
