//! The cluster maintainer: whoever holds the lease does the jobs that only one daemon should do.

use std::sync::Arc;
use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use muster_types::{Error, Result};
use tokio::sync::watch;

use super::{cleaner, key_sweep, node_watch};
use crate::app::App;
use crate::events;
use crate::store::{leases, transaction, values};

/// The lease that makes a daemon the maintainer.
pub const LEASE: &str = "maintainer";
const TICK: Duration = Duration::from_secs(1);
/// When the events were last pruned, cluster-wide.
const PRUNE_STAMP: &str = "SCHEDULED_TASK_LAST_RUN_PRUNE_EVENTS";
const SWEEP_STAMP: &str = "SCHEDULED_TASK_LAST_RUN_KEY_SWEEP";

/// Competes for the lease and does the jobs while holding it.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    // Twice an operation's lease: losing the maintainer hurts less than two of them.
    #[expect(clippy::cast_precision_loss, reason = "leases are seconds")]
    let lease = app.settings.cluster_op_lease as f64 * 2.0;
    let mut renewed = f64::MIN;
    let mut cleaned = f64::MIN;
    let mut sampled = f64::MIN;
    let mut pruning: Option<tokio::task::JoinHandle<()>> = None;
    // A short delay is meant to be noticed soon; a long one need not be looked at every second.
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let clean_every = (app.settings.cleaner_delay as f64 / 4.0).clamp(1.0, 60.0);
    while !*stop.borrow() {
        if now() - renewed > lease / 3.0 {
            match leases::take(&app.store, LEASE, &app.holder, lease).await {
                Ok(true) => renewed = now(),
                Ok(false) => renewed = f64::MIN,
                Err(error) => tracing::warn!(%error, "the maintainer's lease was not renewed"),
            }
        }
        if now() - renewed < lease {
            if now() - cleaned > clean_every {
                cleaned = now();
                note("cleaner", cleaner::run(&app).await);
                note("node watch", node_watch::run(&app).await);
            }
            note("key sweep", sweep_if_due(&app).await);
            if pruning.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
                let app = Arc::clone(&app);
                pruning = Some(tokio::spawn(async move { note("event prune", prune_if_due(&app).await) }));
            }
        }
        if now() - sampled > 60.0 {
            sampled = now();
            if let Ok(rows) = app.store.estimate_rows("events").await {
                app.events.metrics().rows.set(rows);
            }
        }
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            _ = stop.changed() => {}
        }
    }
    if let Some(pruning) = pruning {
        pruning.abort();
    }
    if let Err(error) = leases::release(&app.store, LEASE, &app.holder).await {
        tracing::warn!(%error, "the maintainer's lease was not given back");
    }
}

fn note(job: &str, outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(job, %error, "a maintenance job failed");
    }
}

/// Whether a job's time has come; if so, stamps it as run now.
async fn is_due(app: &App, stamp: &str, interval: u64) -> Result<bool> {
    let last = values::get(&*app.store, stamp).await?.and_then(|text| text.parse::<f64>().ok());
    #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
    if last.is_some_and(|last| now() - last < interval as f64) {
        return Ok(false);
    }
    transaction!(app.store, |tx| { Ok(values::set(tx, stamp, &now().to_string()).await?) })?;
    Ok(true)
}

async fn sweep_if_due(app: &App) -> Result<()> {
    if is_due(app, SWEEP_STAMP, app.settings.key_sweep_interval).await? {
        key_sweep::run(app).await?;
    }
    Ok(())
}

async fn prune_if_due(app: &App) -> Result<()> {
    if !is_due(app, PRUNE_STAMP, app.settings.event_prune_interval).await? {
        return Ok(());
    }
    let budget = Duration::from_secs(app.settings.event_prune_budget);
    let outcome = events::prune(&app.store, &app.settings, app.events.metrics(), budget).await?;
    tracing::info!(
        links = outcome.links,
        orphans = outcome.orphans,
        cut_short = outcome.cut_short,
        "events pruned"
    );
    let node = app.nodes.first().ok_or_else(|| Error::Internal("a daemon without a node".into()))?;
    app.events.record(
        Event::new(EventType::Prune, ObjectRef::new(ObjectType::Node, node.identity().id), "events pruned")
            .with("links", outcome.links)
            .with("orphans", outcome.orphans)
            .with("cut_short", outcome.cut_short),
    );
    Ok(())
}
