//! The workers: claim an operation, do its steps, keep the lease alive, end it one way or the other.

use std::sync::Arc;
use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{ErrorReport, OperationState};
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::{Map, json};
use tokio::sync::{Semaphore, watch};

use super::{Fault, Kind, Lane, Undo};
use crate::app::App;
use crate::store::operations::{self, Able, OperationRow};
use crate::store::transaction;

/// How long a worker sleeps when nothing wakes it: another daemon may have queued something.
const POLL: Duration = Duration::from_secs(1);
/// Pause before a waiting operation looks again, in seconds.
const WAIT: f64 = 1.0;
/// Longest pause before another attempt, in seconds.
const LONGEST_PAUSE: f64 = 60.0;

/// Works until told to stop; then finishes what is under way.
pub async fn run(app: Arc<App>, stop: watch::Receiver<bool>) {
    let [quick, fetch, convert, machine] =
        Lane::ALL.map(|lane| run_lane(Arc::clone(&app), lane, stop.clone()));
    tokio::join!(quick, fetch, convert, machine);
}

async fn run_lane(app: Arc<App>, lane: Lane, mut stop: watch::Receiver<bool>) {
    let slots = Arc::new(Semaphore::new(lane.workers()));
    while !*stop.borrow() {
        match take(&app, lane, slots.available_permits()).await {
            Ok(taken) if taken.is_empty() => {}
            Ok(taken) => {
                for row in taken {
                    let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
                    let app = Arc::clone(&app);
                    tokio::spawn(async move {
                        let _slot = slot;
                        work(&app, row).await;
                        app.queue.wake();
                    });
                }
                continue;
            }
            Err(error) => tracing::warn!(%error, "the operation queue cannot be read"),
        }
        // With every hand busy there is nothing to look for: who finishes wakes us.
        let pause = if slots.available_permits() == 0 { POLL } else { until_next(&app, lane).await };
        tokio::select! {
            () = app.queue.woken(lane) => {}
            () = tokio::time::sleep(pause) => {}
            _ = stop.changed() => {}
        }
    }
    // Every slot free again means that everything has ended.
    let _ = slots.acquire_many(u32::try_from(lane.workers()).unwrap_or(u32::MAX)).await;
}

/// Takes and does everything that is due now, one after the other. Says how many it took.
pub async fn run_once(app: &App) -> Result<usize> {
    let mut count = 0;
    for lane in Lane::ALL {
        for row in take(app, lane, lane.workers()).await? {
            count += 1;
            work(app, row).await;
        }
    }
    Ok(count)
}

/// What this daemon can do in a lane; nothing if no operation runs there.
fn able(app: &App, lane: Lane) -> Option<Able> {
    let nodes = app.nodes.iter().map(|node| node.identity().id).collect();
    Some(Able { names: app.queue.names(lane), nodes }).filter(|able| !able.names.is_empty())
}

async fn until_next(app: &App, lane: Lane) -> Duration {
    let Some(able) = able(app, lane) else { return POLL };
    match operations::next_due(&app.store, &able).await {
        Ok(Some(due)) => Duration::from_secs_f64((due - now()).clamp(0.02, POLL.as_secs_f64())),
        _ => POLL,
    }
}

#[expect(clippy::cast_precision_loss, reason = "leases are seconds")]
fn lease(app: &App) -> f64 {
    app.settings.cluster_op_lease as f64
}

fn most_attempts(app: &App) -> i64 {
    i64::try_from(app.settings.cluster_op_max_attempts).unwrap_or(i64::MAX)
}

/// Claims up to `free` due operations whose parents are done.
async fn take(app: &App, lane: Lane, free: usize) -> Result<Vec<OperationRow>> {
    let mut taken = Vec::new();
    let Some(able) = able(app, lane).filter(|_| free > 0) else { return Ok(taken) };
    for row in operations::due(&app.store, &able, i64::try_from(free).unwrap_or(1)).await? {
        match parents(app, &row).await? {
            Parents::Done => {}
            Parents::Pending => {
                transaction!(app.store, |tx| {
                    operations::put_off(tx, &row, now() + 1.0).await?;
                    Ok(())
                })?;
                continue;
            }
            Parents::Failed(report) => {
                let ended =
                    transaction!(app.store, |tx| { Ok(operations::abort(tx, &row, &report).await?) })?;
                if ended {
                    announce(app, &row, OperationState::Abort, Some(&report));
                }
                continue;
            }
        }
        if let Some(row) = operations::claim(&app.store, &row, lease(app)).await? {
            taken.push(row);
        }
    }
    Ok(taken)
}

enum Parents {
    Done,
    Pending,
    Failed(ErrorReport),
}

async fn parents(app: &App, row: &OperationRow) -> Result<Parents> {
    for parent in &row.depends_on {
        // A parent that the cleaner removed was finished, and a failed one aborts its children long before.
        let Some(parent) = operations::get(&*app.store, parent.op_uuid).await? else { continue };
        match parent.state {
            OperationState::Complete => {}
            OperationState::Queued | OperationState::Executing => return Ok(Parents::Pending),
            OperationState::Error | OperationState::Abort => {
                let mut details = Map::new();
                details.insert("operation".into(), json!(parent.id));
                let message = format!("operation {} that this one depends on failed", parent.id);
                return Ok(Parents::Failed(ErrorReport {
                    code: "dependency.failed".into(),
                    message,
                    details,
                }));
            }
        }
    }
    Ok(Parents::Done)
}

/// How an attempt ended.
enum End {
    Complete,
    /// It failed.
    Failed {
        step: String,
        error: Error,
    },
    /// It waits for something that is not its own work.
    Waits(String),
    /// The claim is lost, or a test killed the worker: say and write nothing more.
    Gone,
}

/// Does an operation for as long as the lease holds.
async fn work(app: &App, row: OperationRow) {
    tokio::select! {
        () = attempt(app, &row) => {}
        () = keep_lease(app, &row) => {}
    }
}

async fn attempt(app: &App, row: &OperationRow) {
    let failed = |error| End::Failed { step: row.name.clone(), error };
    // Only operations with a name that the queue knows are taken.
    let Some(kind) = app.queue.kind(row).copied() else { return };
    if row.attempts > most_attempts(app) {
        let error = Error::Unavailable(format!("given up: {} workers vanished during it", row.attempts - 1));
        return settle(app, row, &kind, failed(error)).await;
    }
    let limit = Duration::from_secs(app.settings.cluster_op_stuck_threshold);
    let end = tokio::time::timeout(limit, steps(app, &kind, row)).await.unwrap_or_else(|_| {
        failed(Error::Unavailable(format!("not done after {} seconds", limit.as_secs())))
    });
    settle(app, row, &kind, end).await;
}

/// Returns only when the lease is lost.
async fn keep_lease(app: &App, row: &OperationRow) {
    loop {
        tokio::time::sleep(Duration::from_secs_f64(lease(app) / 3.0)).await;
        match operations::renew(&app.store, row, lease(app)).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(operation = %row.id, "lost the lease of an operation");
                return;
            }
            // The database is away. Whoever takes over after the lease repeats the step, which is harmless.
            Err(error) => tracing::warn!(operation = %row.id, %error, "lease not renewed"),
        }
    }
}

async fn steps(app: &App, kind: &Kind, row: &OperationRow) -> End {
    let done = usize::try_from(row.step).unwrap_or(0);
    for (at, step) in kind.steps.iter().enumerate().skip(done) {
        let fault = app.queue.fault(row, step.name);
        let outcome = match fault {
            Some(Fault::Fail) => Err(Error::Unavailable("failed on purpose".into())),
            Some(Fault::Die) | None => (step.run)(app, row).await,
        };
        if fault == Some(Fault::Die) {
            return End::Gone;
        }
        match outcome {
            Ok(()) => {}
            Err(Error::NotReady(why)) => return End::Waits(why),
            Err(error) => return End::Failed { step: step.name.to_owned(), error },
        }
        let number = i64::try_from(at + 1).unwrap_or(i64::MAX);
        let kept = transaction!(app.store, |tx| { Ok(operations::set_step(tx, row, number).await?) });
        match kept {
            Ok(true) => {}
            Ok(false) => return End::Gone,
            Err(error) => return End::Failed { step: step.name.to_owned(), error },
        }
    }
    End::Complete
}

/// Writes down how an attempt ended.
async fn settle(app: &App, row: &OperationRow, kind: &Kind, end: End) {
    let (state, run_after, report) = match end {
        End::Gone => return,
        End::Complete => (OperationState::Complete, row.created, None),
        End::Waits(why) => {
            tracing::debug!(operation = %row.id, why, "an operation waits");
            return put_back(app, row).await;
        }
        End::Failed { step, error } => {
            let report = report(&step, row, &error);
            if row.attempts < most_attempts(app) && may_succeed_later(&error) {
                let pause =
                    2f64.powi(i32::try_from(row.attempts).unwrap_or(10).min(10) - 1).min(LONGEST_PAUSE);
                (OperationState::Queued, now() + pause * pace(app), Some(report))
            } else {
                undo(app, kind, &OperationRow { error_report: Some(report.clone()), ..row.clone() }).await;
                (OperationState::Error, row.created, Some(report))
            }
        }
    };
    let settled = transaction!(app.store, |tx| {
        Ok(operations::release(tx, row, state, run_after, report.as_ref()).await?)
    });
    match settled {
        Ok(true) => announce(app, row, state, report.as_ref()),
        Ok(false) => tracing::warn!(operation = %row.id, "another worker has taken the operation over"),
        // The lease runs out and the operation is taken over.
        Err(error) => tracing::warn!(operation = %row.id, %error, "the end of an operation was not written"),
    }
}

/// Gives an operation that waits back to the queue; that was no attempt.
async fn put_back(app: &App, row: &OperationRow) {
    let outcome = transaction!(app.store, |tx| { Ok(operations::put_back(tx, row, now() + WAIT).await?) });
    if let Err(error) = outcome {
        tracing::warn!(operation = %row.id, %error, "a waiting operation was not given back");
    }
}

/// Whether another attempt can end otherwise than this one.
fn may_succeed_later(error: &Error) -> bool {
    matches!(error, Error::Internal(_) | Error::Unavailable(_) | Error::Timeout(_))
}

/// Retries wait in step with the lease: a cluster that takes over quickly also retries quickly.
fn pace(app: &App) -> f64 {
    (lease(app) / 15.0).min(1.0)
}

/// Takes back what was done, newest first. What fails is reported and left to the reconcilers.
async fn undo(app: &App, kind: &Kind, row: &OperationRow) {
    for step in kind.steps.iter().rev() {
        if let Undo::Run(back) = step.undo
            && let Err(error) = back(app, row).await
        {
            tracing::error!(operation = %row.id, step = step.name, %error, "a step could not be undone");
        }
    }
}

/// What callers are told of a failure; internal texts stay in the log.
fn report(step: &str, row: &OperationRow, error: &Error) -> ErrorReport {
    tracing::warn!(operation = %row.id, step, attempt = row.attempts, %error, "an operation's step failed");
    let (code, message) = match error {
        Error::Internal(_) => ("internal.unknown", "an internal error, see the log of the node".to_owned()),
        Error::Unavailable(text) => ("internal.unavailable", text.clone()),
        other => ("operation.refused", other.to_string()),
    };
    let mut details = Map::new();
    details.insert("step".into(), json!(step));
    details.insert("attempt".into(), json!(row.attempts));
    ErrorReport { code: code.into(), message, details }
}

fn announce(app: &App, row: &OperationRow, state: OperationState, report: Option<&ErrorReport>) {
    let message = EventMessage::OperationState(state);
    let mut event =
        Event::new(EventType::Status, ObjectRef::new(ObjectType::ClusterOperation, row.id), message)
            .with("operation", row.name.clone())
            .with("operation_uuid", row.id.to_string());
    // A new object of the same name must not inherit the story of how the old one was removed.
    let removed = app.queue.kind(row).is_some_and(|kind| kind.removes_target);
    if !removed || state == OperationState::Error {
        event = event.also(row.target.clone());
    }
    if let Some(report) = report {
        event = event.with("error", json!(report));
    }
    event.request_id.clone_from(&row.request_id);
    event.duration = Some((now() - row.created).max(0.0));
    app.events.record(event);
}
