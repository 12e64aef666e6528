//! The cluster maintainer: whoever holds the lease does the jobs that only one daemon should do.

use std::sync::Arc;
use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use muster_types::{Error, Result};
use tokio::sync::watch;

use super::{address_rest, artifact_watch, cleaner, instance_watch, key_sweep, network_watch, node_watch};
use crate::app::App;
use crate::events;
use crate::objects::agent_operation::end;
use crate::store::{leases, transaction, values};

/// The lease that makes a daemon the maintainer.
pub const LEASE: &str = "maintainer";
const TICK: Duration = Duration::from_secs(1);
/// When the events were last pruned, cluster-wide.
const PRUNE_STAMP: &str = "SCHEDULED_TASK_LAST_RUN_PRUNE_EVENTS";
const SWEEP_STAMP: &str = "SCHEDULED_TASK_LAST_RUN_KEY_SWEEP";

/// Competes for the lease and does the jobs while holding it.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let elected = watch::Sender::new(false);
    let campaign = tokio::spawn(campaign(Arc::clone(&app), elected.clone()));
    let pruning = tokio::spawn(prune_while_elected(Arc::clone(&app), elected.subscribe()));
    // A short delay is meant to be noticed soon; a long one need not be looked at every second.
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let clean_every = (app.settings.cleaner_delay as f64 / 4.0).clamp(1.0, 60.0);
    let (mut cleaned, mut sampled) = (f64::MIN, f64::MIN);
    while !*stop.borrow() {
        if *elected.borrow() {
            if now() - cleaned > clean_every {
                cleaned = now();
                match cleaner::run(&app).await {
                    // More is waiting: the next tick goes on.
                    Ok(true) => cleaned = f64::MIN,
                    outcome => note("cleaner", outcome.map(|_| ())),
                }
                note("node watch", node_watch::run(&app).await);
                note("network watch", network_watch::run(&app).await);
                note("instance watch", instance_watch::run(&app).await);
                note("artifact watch", artifact_watch::run(&app).await);
                note("unused blobs", artifact_watch::delete_unused(&app).await);
            }
            note("agent operations", end::expire_overdue(&app).await);
            note("address rest", address_rest::run(&app).await.map(|_| ()));
            note("key sweep", sweep_if_due(&app).await);
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
    campaign.abort();
    pruning.abort();
    if let Err(error) = leases::release(&app.store, LEASE, &app.holder).await {
        tracing::warn!(%error, "the maintainer's lease was not given back");
    }
}

/// Takes the lease, and keeps it whatever the jobs are busy with.
async fn campaign(app: Arc<App>, elected: watch::Sender<bool>) {
    // Twice an operation's lease: losing the maintainer hurts less than two of them.
    #[expect(clippy::cast_precision_loss, reason = "leases are seconds")]
    let lease = app.settings.cluster_op_lease as f64 * 2.0;
    let mut renewed = f64::MIN;
    loop {
        match leases::take(&app.store, LEASE, &app.holder, lease).await {
            Ok(true) => renewed = now(),
            Ok(false) => renewed = f64::MIN,
            Err(error) => tracing::warn!(%error, "the maintainer's lease was not renewed"),
        }
        elected.send_replace(now() - renewed < lease);
        let pause = if *elected.borrow() { lease / 3.0 } else { TICK.as_secs_f64() };
        tokio::time::sleep(Duration::from_secs_f64(pause)).await;
    }
}

/// Prunes the events when it is time, and stops when another daemon is elected.
async fn prune_while_elected(app: Arc<App>, mut elected: watch::Receiver<bool>) {
    while elected.wait_for(|elected| *elected).await.is_ok() {
        tokio::select! {
            outcome = prune_if_due(&app) => note("event prune", outcome),
            _ = elected.wait_for(|elected| !*elected) => continue,
        }
        tokio::time::sleep(TICK).await;
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
