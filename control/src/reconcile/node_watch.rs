//! Marks nodes that stopped checking in as missing, and later as failed.

use muster_types::Result;
use muster_types::node::NodeState;
use muster_types::time::now;

use crate::app::App;
use crate::objects::node;
use muster_store::nodes;

/// Runs one pass.
pub async fn run(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "the limit is seconds")]
    let limit = app.settings.node_checkin_maximum as f64;
    for row in nodes::list(&*app.store).await? {
        let silent = now() - row.lastseen;
        let next = match row.state {
            NodeState::Created | NodeState::Stopping if silent > limit => NodeState::Missing,
            NodeState::Missing if silent > 10.0 * limit => NodeState::Error,
            _ => continue,
        };
        node::move_to(app, row.identity.id, next, &format!("no check-in for {silent:.0} seconds")).await?;
    }
    Ok(())
}
