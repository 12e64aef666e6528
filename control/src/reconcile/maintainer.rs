//! The cluster maintainer: the daemon that owns the maintainer lease runs the tasks that only one daemon should run.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::{cluster_values, leases, transaction};
use muster_types::Result;
use muster_types::time::now;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::task::{Run, RunsOn, Task, TaskFuture};
use crate::app::App;
use crate::objects::node::MAINTAINER_LEASE;

/// How often the maintainer checks which of its tasks are due.
pub(super) const TICK_INTERVAL: Duration = Duration::from_secs(1);

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
    while !*stop.borrow() {
        for (task, pass) in &passes {
            // Another daemon may be elected during the pass.
            if !*elected.borrow() || !is_due(&app, task, last_passes.get(task.name)).await {
                continue;
            }
            last_passes.insert(task.name, Instant::now());
            if log_failure(task, pass(&app).await) {
                last_passes.remove(task.name);
            }
        }
        tokio::select! {
            () = tokio::time::sleep(TICK_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
    background.shutdown().await;
    if let Err(error) = leases::release(&app.store, MAINTAINER_LEASE, &app.lease_owner).await {
        tracing::warn!(%error, "failed to release the maintainer lease");
    }
}

/// Acquires the lease and renews it, independently of the tasks.
async fn renew_lease(app: Arc<App>, elected: watch::Sender<bool>) {
    // Twice as long as the lease of an operation: a cluster without a maintainer is better than one with two.
    #[expect(clippy::cast_precision_loss, reason = "leases are seconds")]
    let lease = app.settings.cluster_op_lease as f64 * 2.0;
    let mut renewed = f64::MIN;
    loop {
        match leases::acquire(&app.store, MAINTAINER_LEASE, &app.lease_owner, lease).await {
            Ok(true) => renewed = now(),
            Ok(false) => renewed = f64::MIN,
            Err(error) => tracing::warn!(%error, "failed to renew the maintainer lease"),
        }
        elected.send_replace(now() - renewed < lease);
        let pause = if *elected.borrow() { lease / 3.0 } else { TICK_INTERVAL.as_secs_f64() };
        tokio::time::sleep(Duration::from_secs_f64(pause)).await;
    }
}

/// Runs a long task, and cancels it when another daemon is elected.
async fn run_while_elected(
    app: Arc<App>,
    task: &'static Task,
    pass: for<'a> fn(&'a App) -> TaskFuture<'a, Result<bool>>,
    mut elected: watch::Receiver<bool>,
) {
    while elected.wait_for(|elected| *elected).await.is_ok() {
        tokio::select! {
            () = run_if_due(&app, task, pass) => {}
            _ = elected.wait_for(|elected| !*elected) => continue,
        }
        tokio::time::sleep(TICK_INTERVAL).await;
    }
}

async fn run_if_due(app: &App, task: &Task, pass: for<'a> fn(&'a App) -> TaskFuture<'a, Result<bool>>) {
    if is_due(app, task, None).await {
        log_failure(task, pass(app).await);
    }
}

/// Returns whether a task is due. If the database keeps its last pass, records one at the current time.
async fn is_due(app: &App, task: &Task, last_pass: Option<&Instant>) -> bool {
    let interval = (task.interval)(&app.settings);
    match task.last_run {
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
