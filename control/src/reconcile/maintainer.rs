//! The cluster maintainer: the daemon that owns the maintainer lease runs the tasks that only one daemon should run.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::leases::{self, Lease};
use muster_store::{cluster_values, transaction};
use muster_types::Result;
use muster_types::time::now;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::changes::MAX_SUMMARY_AGE;
use super::task::{Run, RunsOn, Task, TaskFuture, measured};
use crate::app::App;
use crate::objects::node::MAINTAINER_LEASE;

/// How often the maintainer checks which of its tasks are due.
pub(super) const TICK_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum interval between reads of the last pass of a task.
const MAX_DUE_CHECK_INTERVAL: Duration = Duration::from_secs(300);

/// Competes for the lease and runs the maintainer's tasks while owning it.
pub(super) async fn run(app: Arc<App>, tasks: &'static [Task], mut stop: watch::Receiver<bool>) {
    let elected = watch::Sender::new(false);
    // Aborted when this returns.
    let mut background = JoinSet::new();
    background.spawn(renew_lease(Arc::clone(&app), elected.clone()));
    let mut passes = Vec::new();
    for task in tasks.iter().filter(|task| task.runs_on == RunsOn::Maintainer) {
        match task.run {
            Run::Loop(_) => {}
            Run::Pass(pass) => passes.push((task, pass)),
            Run::CancellablePass(pass) => {
                background.spawn(run_while_elected(Arc::clone(&app), task, pass, elected.subscribe()));
            }
        }
    }
    let mut last_passes: HashMap<&str, Instant> = HashMap::new();
    let mut next_checks: HashMap<&str, Instant> = HashMap::new();
    while !*stop.borrow() {
        for (task, pass) in &passes {
            // Another daemon may be elected during the pass.
            if !*elected.borrow() || next_checks.get(task.name).is_some_and(|next| *next > Instant::now()) {
                continue;
            }
            if task.last_run.is_some() {
                next_checks.insert(task.name, Instant::now() + due_check_interval(&app, task));
            }
            if !is_due(&app, task, last_passes.get(task.name)).await {
                continue;
            }
            last_passes.insert(task.name, Instant::now());
            if log_failure(task, measured(&app, task, pass(&app)).await) {
                last_passes.remove(task.name);
            }
        }
        tokio::select! {
            () = tokio::time::sleep(TICK_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
    background.shutdown().await;
    if app.store.membership.require().is_err() {
        return;
    }
    if let Err(error) = app.leases.release(&app.store, MAINTAINER_LEASE, &app.lease_owner).await {
        tracing::warn!(%error, "failed to release the maintainer lease");
    }
}

/// Acquires the lease and renews it, independently of the tasks.
async fn renew_lease(app: Arc<App>, elected: watch::Sender<bool>) {
    let lease = lease_length(&app);
    let mut renewed: Option<Instant> = None;
    loop {
        match acquire_lease(&app, lease, renewed.is_some()).await {
            // Counted from before the request, so that another daemon, which counts from when it has seen the renewal, acquires the
            // lease only after this one stops.
            Ok(requested) => renewed = requested,
            Err(error) => tracing::warn!(%error, "failed to renew the maintainer lease"),
        }
        elected.send_replace(renewed.is_some_and(|renewed| renewed.elapsed() < lease));
        // Whether the lease is vacant costs no statement.
        let is_owner = *elected.borrow();
        tokio::time::sleep(if is_owner { lease / 3 } else { TICK_INTERVAL.min(lease / 3) }).await;
    }
}

/// Returns the length of the maintainer lease: shorter than NODE_CHECKIN_MAXIMUM, so that nodes become missing in time even
/// if the maintainer is one of them.
fn lease_length(app: &App) -> Duration {
    let settings = &app.settings;
    #[expect(clippy::cast_precision_loss, reason = "leases are seconds")]
    let (operation, check_in) = (settings.cluster_op_lease as f64, settings.node_checkin_maximum as f64);
    Duration::from_secs_f64((operation * 2.0).min(check_in * 0.6))
}

/// Acquires or renews the lease, unless another daemon owns it or this one must not acquire leases.
/// Returns when the request that acquired or renewed it began.
async fn acquire_lease(app: &App, lease: Duration, is_owned: bool) -> Result<Option<Instant>> {
    let membership = &app.store.membership;
    if membership.require().is_err() || membership.require_clock().is_err() {
        app.leases.forget(MAINTAINER_LEASE, &app.lease_owner);
        return Ok(None);
    }
    let mut unrenewed = None;
    if !is_owned && let Some(other) = lease_of_other(app).await? {
        // No transaction while another daemon is the maintainer.
        unrenewed = app.lease_observations.unrenewed(&other, lease);
        if unrenewed.is_none() {
            return Ok(None);
        }
    }
    // Half of the interval of renewals.
    let (seconds, max_age) = (lease.as_secs_f64(), lease / 6);
    app.leases.acquire(&app.store, MAINTAINER_LEASE, &app.lease_owner, seconds, max_age, unrenewed).await
}

/// Returns the lease if another daemon owns it, also if it has expired by the clock of the database. This costs no statement unless
/// the summary of changes is late.
async fn lease_of_other(app: &App) -> Result<Option<Lease>> {
    let leases = match app.cluster_changes.recent(MAX_SUMMARY_AGE) {
        Some(summary) => summary.leases.clone(),
        None => {
            let leases = leases::all(&app.store).await?;
            app.lease_observations.observe(&leases, Instant::now());
            leases
        }
    };
    let is_other = |lease: &Lease| lease.name == MAINTAINER_LEASE && lease.owner != app.lease_owner.id;
    Ok(leases.into_iter().find(is_other))
}

/// Runs a long task, and cancels it when another daemon is elected.
async fn run_while_elected(
    app: Arc<App>,
    task: &'static Task,
    pass: for<'a> fn(&'a App) -> TaskFuture<'a, Result<bool>>,
    mut elected: watch::Receiver<bool>,
) {
    let mut last_pass = None;
    while elected.wait_for(|elected| *elected).await.is_ok() {
        if is_due(&app, task, last_pass.as_ref()).await {
            last_pass = Some(Instant::now());
            tokio::select! {
                outcome = measured(&app, task, pass(&app)) => { log_failure(task, outcome); }
                _ = elected.wait_for(|elected| !*elected) => {
                    last_pass = None;
                    continue;
                }
            }
        }
        tokio::time::sleep(due_check_interval(&app, task)).await;
    }
}

/// Returns how often to check whether a task is due. One whose last pass is in the database costs a read.
fn due_check_interval(app: &App, task: &Task) -> Duration {
    match task.last_run {
        None => TICK_INTERVAL,
        Some(_) => (task.interval)(&app.settings).div_f64(10.0).clamp(TICK_INTERVAL, MAX_DUE_CHECK_INTERVAL),
    }
}

/// Returns whether a task is due. If the database keeps its last pass, records one at the current time.
async fn is_due(app: &App, task: &Task, last_pass: Option<&Instant>) -> bool {
    let interval = (task.interval)(&app.settings);
    match task.last_run {
        // Not configured.
        _ if interval == Duration::MAX => false,
        None => last_pass.is_none_or(|last| last.elapsed() >= interval),
        Some(key) => match is_due_in_cluster(app, key, interval).await {
            Ok(due) => due,
            Err(error) => {
                tracing::warn!(task = task.name, %error, "failed to read the last run of a periodic task");
                false
            }
        },
    }
}

async fn is_due_in_cluster(app: &App, key: &str, interval: Duration) -> Result<bool> {
    match cluster_values::get(&*app.store, key).await?.map(|text| text.parse::<f64>()) {
        Some(Ok(last)) if now() - last < interval.as_secs_f64() => return Ok(false),
        Some(Ok(_)) | None => {}
        // Due, which replaces the invalid value.
        Some(Err(error)) => tracing::warn!(key, %error, "the last run of a periodic task is not a time"),
    }
    transaction!(app.store, |tx| { Ok(cluster_values::set(tx, key, &now().to_string()).await?) })?;
    Ok(true)
}

/// Logs the error of a pass. Returns whether there is more to do right away.
fn log_failure(task: &Task, outcome: Result<bool>) -> bool {
    outcome.unwrap_or_else(|error| {
        tracing::warn!(task = task.name, %error, "failed to run a periodic task");
        false
    })
}
