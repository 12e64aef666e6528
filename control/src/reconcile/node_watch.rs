//! Marks nodes that stopped checking in as missing, and later as failed, and the state of their instances as unknown. Places
//! the instances again that they have not begun to create.

use muster_types::Result;
use muster_types::node::NodeState;

use super::changes::MAX_SUMMARY_AGE;
use crate::app::App;
use crate::objects::instance::{evacuate, lost, place_again};
use crate::objects::node;
use muster_store::{nodes, transaction};

/// Returns the number of seconds without a check-in after which a node is observed. As for the scheduler, it is late then.
fn observed_after(app: &App) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "the limit is seconds")]
    let limit = app.settings.node_checkin_maximum as f64;
    limit / 2.0
}

/// Returns whether a node may not have checked in for long enough to be observed. Check-ins since the summary only make it
/// later.
pub(super) fn may_have_silent_nodes(app: &App) -> bool {
    let Some(summary) = app.cluster_changes.recent(MAX_SUMMARY_AGE) else { return true };
    let time = app.store.membership.database_time();
    summary.silent_nodes > 0
        || summary.oldest_checkin.is_some_and(|oldest| oldest < time - observed_after(app))
}

/// Runs one pass.
pub async fn run(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "the limit is seconds")]
    let limit = app.settings.node_checkin_maximum as f64;
    let states =
        [NodeState::Created, NodeState::Stopping, NodeState::Stopped, NodeState::Missing, NodeState::Error];
    let mut silent = nodes::silent(&*app.store, &states, observed_after(app)).await?;
    app.silences.observe(silent.iter().map(|(row, _)| row));
    silent.retain(|(_, silence)| *silence > limit);
    if silent.is_empty() {
        return Ok(());
    }
    for (row, silence) in &silent {
        let next = match row.state {
            NodeState::Created | NodeState::Stopping => NodeState::Missing,
            NodeState::Missing if *silence > 10.0 * limit => NodeState::Error,
            NodeState::Missing | NodeState::Error => {
                place_again::run(app, row).await?;
                continue;
            }
            NodeState::Stopped | NodeState::Deleted => continue,
        };
        // Not if it has checked in since.
        if transaction!(app.store, |tx| { Ok(nodes::set_state(tx, row, next).await?) })? {
            let reason = format!("no check-in for {silence:.0} seconds");
            node::record_state_change(app, row.identity.id, row.state, next, &reason);
        }
    }
    lost::mark_unknown(app).await?;
    evacuate::restart_fenced(app, &silent).await
}
