//! Removes events that are older than their retention, and the oldest ones above the size budget.

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
    let pruned = prune_event(app)?.with("links", links).with("orphans", orphans).with("cut_short", cut_short);
    app.events.record(pruned);
    Ok(())
}

/// The interval between checks of the size of the stored events.
pub(super) const BUDGET_INTERVAL: Duration = Duration::from_secs(300);

/// Removes the oldest events above `EVENT_STORE_MAX_MB`.
pub(super) async fn enforce_budget(app: &App) -> Result<()> {
    let links = app.event_budget.enforce(&app.store, &app.settings, app.events.metrics()).await?;
    if links > 0 {
        let limit = app.settings.event_store_max_mb;
        tracing::warn!(links, limit, "events pruned because they exceeded EVENT_STORE_MAX_MB");
        app.events.record(prune_event(app)?.with("links", links).with("limit_mb", limit));
    }
    Ok(())
}

fn prune_event(app: &App) -> Result<Event> {
    let node = app.nodes.first().ok_or_else(|| Error::Internal("the daemon has no node".into()))?;
    let node = ObjectRef::new(ObjectType::Node, node.identity().id);
    Ok(Event::new(EventType::Prune, node, "events pruned"))
}
