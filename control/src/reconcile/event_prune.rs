//! Removes events that are older than their retention.

use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};

use crate::app::App;
use crate::events;

/// Prunes for at most `EVENT_PRUNE_BUDGET` seconds. The next run continues where this one stopped.
pub(super) async fn run(app: &App) -> Result<()> {
    let budget = Duration::from_secs(app.settings.event_prune_budget);
    let outcome = events::prune(&app.store, &app.settings, app.events.metrics(), budget).await?;
    let (links, orphans, cut_short) = (outcome.links, outcome.orphans, outcome.cut_short);
    tracing::info!(links, orphans, cut_short, "events pruned");
    let node = app.nodes.first().ok_or_else(|| Error::Internal("the daemon has no node".into()))?;
    app.events.record(
        Event::new(EventType::Prune, ObjectRef::new(ObjectType::Node, node.identity().id), "events pruned")
            .with("links", links)
            .with("orphans", orphans)
            .with("cut_short", cut_short),
    );
    Ok(())
}
