//! The worker: leases due operations, runs their steps, and records the outcome.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use muster_store::operations::{self, ExecutableOperations, OperationRow};
use muster_store::transaction;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::NodeId;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{ErrorReport, OperationState};
use muster_types::time::now;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use serde_json::{Map, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::implementations::IMPLEMENTATIONS;
use super::lane_slots::{LaneSlot, LaneSlots};
use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::queue::Lane;
use crate::traces::{self, Span, SpanKind};

/// The maximum interval between reads of the queue while an operation of it is going to be due.
const MAX_PAUSE: f64 = 1.0;
/// The interval between reads of an empty queue. The task `changes` wakes it when another daemon queued an operation.
const IDLE_INTERVAL: Duration = Duration::from_secs(300);
/// The shortest time between two reads of the queue.
const MIN_POLL_INTERVAL: f64 = 0.02;
/// The delay in seconds before an operation that waits for something is tried again.
const NOT_READY_DELAY: f64 = 1.0;
/// The maximum delay in seconds before another attempt.
const MAX_BACKOFF: f64 = 60.0;

/// A fault that a test injects into a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The step fails instead of running.
    Fail,
    /// The worker stops after the step, before it records that the step is complete.
    Die,
}

/// Operations that this worker owns, each with the slot that it occupies.
type LeasedOperations = Vec<(OperationRow, LaneSlot)>;

type FaultInjector = Box<dyn FnMut(&OperationRow, &str) -> Option<Fault> + Send>;

/// Runs the queued operations of one daemon.
pub struct Worker {
    app: Arc<App>,
    implementations: Vec<Implementation>,
    faults: Mutex<Option<FaultInjector>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("implementations", &self.implementations).finish_non_exhaustive()
    }
}

impl Worker {
    /// Creates a worker for every operation.
    #[must_use]
    pub fn new(app: Arc<App>) -> Self {
        Self::with(app, IMPLEMENTATIONS.to_vec())
    }

    /// Creates a worker for the given operations.
    #[must_use]
    pub fn with(app: Arc<App>, implementations: Vec<Implementation>) -> Self {
        Self { app, implementations, faults: Mutex::new(None) }
    }

    /// Injects faults into steps, for tests of the recovery.
    pub fn inject(&self, faults: impl FnMut(&OperationRow, &str) -> Option<Fault> + Send + 'static) {
        *self.faults.lock() = Some(Box::new(faults));
    }

    fn fault(&self, row: &OperationRow, step: &str) -> Option<Fault> {
        self.faults.lock().as_mut().and_then(|faults| faults(row, step))
    }

    fn implementation(&self, row: &OperationRow) -> Option<&Implementation> {
        self.implementations.iter().find(|implementation| implementation.kind.name == row.name)
    }

    /// Runs operations until `stop` is set, then finishes those in progress. Boxed, so that the operations are compiled
    /// with this crate and not again with its caller.
    pub fn run(self: Arc<Self>, mut stop: watch::Receiver<bool>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            tokio::select! {
                () = self.app.networks.wait_role_known() => {}
                _ = stop.changed() => {}
            }
            let [quick, fetch, convert, vm] =
                Lane::ALL.map(|lane| Arc::clone(&self).run_lane(lane, stop.clone()));
            tokio::join!(quick, fetch, convert, vm);
        })
    }

    async fn run_lane(self: Arc<Self>, lane: Lane, mut stop: watch::Receiver<bool>) {
        let slots = LaneSlots::new(lane);
        let mut running = JoinSet::new();
        while !*stop.borrow() {
            while running.try_join_next().is_some() {}
            let pause = match self.lease_due(lane, &slots).await {
                Ok((leased, next_due)) if leased.is_empty() => next_due.map_or(IDLE_INTERVAL, |due| {
                    Duration::from_secs_f64(due.clamp(MIN_POLL_INTERVAL, MAX_PAUSE))
                }),
                Ok((leased, _)) => {
                    for (row, slot) in leased {
                        let worker = Arc::clone(&self);
                        running.spawn(async move {
                            worker.work(row).await;
                            drop(slot);
                            worker.app.queue.wake();
                        });
                    }
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to read the operation queue");
                    Duration::from_secs_f64(MAX_PAUSE)
                }
            };
            tokio::select! {
                () = self.app.queue.woken(lane) => {}
                () = tokio::time::sleep(pause) => {}
                _ = stop.changed() => {}
            }
        }
        while running.join_next().await.is_some() {}
    }

    /// Runs all operations that are due, one after the other, and returns their number.
    pub async fn run_once(&self) -> Result<usize> {
        let mut count = 0;
        for lane in Lane::ALL {
            for (row, _slot) in self.lease_due(lane, &LaneSlots::new(lane)).await?.0 {
                count += 1;
                self.work(row).await;
            }
        }
        Ok(count)
    }

    /// Returns the operations of a lane that this daemon can run, or `None` if there are none or it must not lease any.
    fn executable(&self, lane: Lane) -> Option<ExecutableOperations> {
        let membership = &self.app.store.membership;
        membership.require().and_then(|()| membership.require_clock()).ok()?;
        let is_member = |id: &NodeId| membership.is_member(*id);
        let nodes = self.app.nodes.iter().map(|node| node.identity().id).filter(is_member).collect();
        let kinds = self.implementations.iter().map(|implementation| implementation.kind);
        let names: Vec<&str> = kinds.filter(|kind| kind.lane == lane).map(|kind| kind.name).collect();
        Some(ExecutableOperations { names, nodes }).filter(|executable| !executable.names.is_empty())
    }

    /// Leases due operations whose dependencies are complete, each for the namespace with the fewest running ones, as
    /// long as there are slots. Also returns the seconds until the first operation is due that may have a slot. The end of an
    /// operation, which frees a slot, wakes the lane.
    async fn lease_due(&self, lane: Lane, slots: &Arc<LaneSlots>) -> Result<(LeasedOperations, Option<f64>)> {
        let mut leased = Vec::new();
        let Some(executable) = self.executable(lane) else { return Ok((leased, None)) };
        let waiting = operations::waiting(&self.app.store, &executable).await?;
        let admitted = waiting.iter().filter(|(namespace, _)| slots.admits(namespace.as_deref()));
        let next_due = admitted.map(|(_, due)| *due).min_by(f64::total_cmp);
        let due = waiting.into_iter().filter(|(namespace, due)| {
            // Without a slot, the operations need not be read.
            *due <= 0.0 && slots.admits(namespace.as_deref())
        });
        let mut queues = Vec::new();
        for (namespace, first_due) in due {
            let limit = i64::from(lane.workers());
            let rows = operations::due(&self.app.store, &executable, namespace.as_deref(), limit).await?;
            queues.push(NamespaceQueue { namespace, first_due, rows: rows.into() });
        }
        loop {
            queues.retain(|queue| !queue.rows.is_empty());
            let running = |queue: &NamespaceQueue| slots.occupied_by(queue.namespace.as_deref());
            let next = queues
                .iter_mut()
                .min_by(|a, b| running(a).cmp(&running(b)).then(a.first_due.total_cmp(&b.first_due)));
            let Some(next) = next else { return Ok((leased, next_due)) };
            let Some(slot) = slots.occupy(next.namespace.as_deref()) else { return Ok((leased, next_due)) };
            let Some(row) = next.rows.pop_front() else { continue };
            if let Some(row) = self.lease_if_ready(&row).await? {
                leased.push((row, slot));
            }
        }
    }

    /// Leases an operation if its dependencies are complete.
    async fn lease_if_ready(&self, row: &OperationRow) -> Result<Option<OperationRow>> {
        let app = &*self.app;
        match dependencies(app, row).await? {
            Dependencies::Complete => operations::lease(&app.store, row, lease_seconds(app)).await,
            Dependencies::Pending => {
                transaction!(app.store, |tx| {
                    operations::postpone(tx, row, NOT_READY_DELAY).await?;
                    Ok(())
                })?;
                Ok(None)
            }
            Dependencies::Failed(report) => {
                let ended = transaction!(app.store, |tx| { Ok(operations::abort(tx, row, &report).await?) })?;
                if ended {
                    self.announce(row, OperationState::Abort, Some(&report));
                }
                Ok(None)
            }
        }
    }

    /// Runs an operation while this worker owns its lease.
    async fn work(&self, row: OperationRow) {
        tokio::select! {
            () = self.attempt(&row) => {}
            () = renew_lease(&self.app, &row) => {}
        }
    }

    async fn attempt(&self, row: &OperationRow) {
        let failed = |error| Outcome::Failed { step: row.name.clone(), error };
        // Only operations that this worker implements are leased.
        let Some(implementation) = self.implementation(row) else { return };
        if i128::from(row.attempts) > max_attempts(&self.app) {
            let crashes = row.attempts - 1;
            let error = Error::Unavailable(format!("{crashes} workers stopped during this operation"));
            return self.settle(row, implementation, failed(error)).await;
        }
        let limit = Duration::from_secs(self.app.settings.cluster_op_stuck_threshold);
        let span = self.app.traces.begin_attempt(row.trace.as_deref());
        let steps = traces::within(span.as_ref().map(Span::context), self.run_steps(implementation, row));
        let outcome = tokio::time::timeout(limit, steps).await.unwrap_or_else(|_| {
            failed(Error::Unavailable(format!("not complete after {} seconds", limit.as_secs())))
        });
        if let Some(span) = span {
            self.end_attempt(span, row, &outcome);
        }
        self.settle(row, implementation, outcome).await;
    }

    async fn run_steps(&self, implementation: &Implementation, row: &OperationRow) -> Outcome {
        let store = &self.app.store;
        for (step, number) in
            implementation.steps.iter().zip(1i64..).skip_while(|(_, number)| *number <= row.step)
        {
            let fault = self.fault(row, step.name);
            let result = match fault {
                Some(Fault::Fail) => Err(Error::Unavailable("fault injected by a test".into())),
                Some(Fault::Die) | None => self.run_step(step, row).await,
            };
            if fault == Some(Fault::Die) {
                return Outcome::LeaseLost;
            }
            match result {
                Ok(()) => {}
                Err(Error::NotReady(reason)) => {
                    return Outcome::NotReady { reason, has_progressed: number > row.step + 1 };
                }
                Err(Error::StaleEpoch(_)) => return Outcome::LeaseLost,
                Err(error) => return Outcome::Failed { step: step.name.to_owned(), error },
            }
            match transaction!(store, |tx| { Ok(operations::set_step(tx, row, number).await?) }) {
                Ok(true) => {}
                Ok(false) | Err(Error::StaleEpoch(_)) => return Outcome::LeaseLost,
                Err(error) => return Outcome::Failed { step: step.name.to_owned(), error },
            }
        }
        Outcome::Complete
    }

    /// Runs a step as a part of the current span.
    async fn run_step(&self, step: &Step, row: &OperationRow) -> Result<()> {
        let traces = &self.app.traces;
        let span = traces.begin_child(SpanKind::Internal, step.name);
        let result = traces::within(span.as_ref().map(Span::context), (step.run)(&self.app, row)).await;
        match (span, &result) {
            // It is tried again every second.
            (None, _) | (_, Err(Error::NotReady(_))) => {}
            (Some(span), Ok(())) => traces.end(span),
            (Some(mut span), Err(error)) => {
                span.fail(&error.to_string());
                traces.end(span);
            }
        }
        result
    }

    /// Ends the span of an attempt, unless it only found that the operation has to wait.
    fn end_attempt(&self, mut span: Span, row: &OperationRow, outcome: &Outcome) {
        match outcome {
            Outcome::NotReady { has_progressed: false, .. } => return,
            Outcome::NotReady { .. } | Outcome::Complete => {}
            Outcome::LeaseLost => span.fail("lost the lease of the operation"),
            Outcome::Failed { error, .. } => span.fail(&error.to_string()),
        }
        span.rename(format!("attempt {}", row.attempts));
        span.set_text("muster.operation", &row.name);
        span.set_text("muster.operation_uuid", &row.id.to_string());
        self.app.traces.end(span);
    }

    /// Records how an attempt ended.
    async fn settle(&self, row: &OperationRow, implementation: &Implementation, outcome: Outcome) {
        let app = &*self.app;
        let (state, delay, report) = match outcome {
            Outcome::LeaseLost => return,
            Outcome::Complete => (OperationState::Complete, 0.0, None),
            Outcome::NotReady { reason, .. } => {
                tracing::debug!(operation = %row.id, reason, "operation is not ready");
                return requeue(app, row).await;
            }
            Outcome::Failed { step, error } => {
                let report = report(&step, row, &error);
                if i128::from(row.attempts) < max_attempts(app) && is_retryable(&error) {
                    (OperationState::Queued, backoff(app, row.attempts), Some(report))
                } else {
                    // Another worker, or an evacuation, may have taken over meanwhile.
                    match operations::renew(&app.store, row, lease_seconds(app)).await {
                        Ok(true) => {}
                        Ok(false) => return,
                        Err(error) => {
                            tracing::warn!(operation = %row.id, %error, "failed to renew the lease of an operation");
                            return;
                        }
                    }
                    let failed = OperationRow { error_report: Some(report.clone()), ..row.clone() };
                    undo(app, implementation, &failed).await;
                    (OperationState::Error, 0.0, Some(report))
                }
            }
        };
        let settled = transaction!(app.store, |tx| {
            Ok(operations::release(tx, row, state, delay, report.as_ref()).await?)
        });
        match settled {
            Ok(true) => self.announce(row, state, report.as_ref()),
            Ok(false) => tracing::warn!(operation = %row.id, "another worker took over the operation"),
            // The lease expires and another worker takes over.
            Err(error) => {
                tracing::warn!(operation = %row.id, %error, "failed to record the end of an operation");
            }
        }
    }

    /// Records an event about the new state of an operation.
    fn announce(&self, row: &OperationRow, state: OperationState, report: Option<&ErrorReport>) {
        let message = EventMessage::OperationState(state);
        let object = ObjectRef::new(ObjectType::ClusterOperation, row.id);
        let mut event = Event::new(EventType::Status, object, message)
            .with("operation", row.name.clone())
            .with("operation_uuid", row.id.to_string());
        // A new object of the same name must not inherit the events about the removal of the old one.
        let removed =
            self.implementation(row).is_some_and(|implementation| implementation.kind.removes_target);
        if !removed || state == OperationState::Error {
            event = event.with_object(row.target.clone());
        }
        if let Some(report) = report {
            event = event.with("error", json!(report));
        }
        event.request_id.clone_from(&row.request_id);
        let seconds = (now() - row.created).max(0.0);
        event.duration = Some(seconds);
        self.app.metrics.operation_ended(&row.name, state, seconds);
        if state.is_final() {
            self.app.traces.end_operation(row.trace.as_deref(), &row.name, row.created, |span| {
                span.set_text("muster.operation_uuid", &row.id.to_string());
                span.set_text("muster.target", &format!("{} {}", row.target.object_type, row.target.id));
                span.set_text("muster.operation_state", state.as_str());
                if let Some(report) = report {
                    span.fail(&report.message);
                }
            });
        }
        self.app.events.record(event);
    }
}

#[expect(clippy::cast_precision_loss, reason = "leases are seconds")]
fn lease_seconds(app: &App) -> f64 {
    app.settings.cluster_op_lease as f64
}

/// Returns the maximum number of attempts, in a type that can be compared with the column.
fn max_attempts(app: &App) -> i128 {
    app.settings.cluster_op_max_attempts.into()
}

/// The due operations of a namespace, first ones first.
struct NamespaceQueue {
    namespace: Option<String>,
    first_due: f64,
    rows: VecDeque<OperationRow>,
}

enum Dependencies {
    Complete,
    Pending,
    Failed(ErrorReport),
}

async fn dependencies(app: &App, row: &OperationRow) -> Result<Dependencies> {
    for parent in &row.depends_on {
        // The cleaner removes only finished operations, and a failed one aborts its children long before.
        let Some(parent) = operations::get(&*app.store, parent.op_uuid).await? else { continue };
        match parent.state {
            OperationState::Complete => {}
            OperationState::Queued | OperationState::Executing => return Ok(Dependencies::Pending),
            OperationState::Error | OperationState::Abort => {
                let mut details = Map::new();
                details.insert("operation".into(), json!(parent.id));
                let message = format!("operation {} that this one depends on failed", parent.id);
                let code = "dependency.failed".into();
                return Ok(Dependencies::Failed(ErrorReport { code, message, details }));
            }
        }
    }
    Ok(Dependencies::Complete)
}

/// How an attempt ended.
enum Outcome {
    Complete,
    Failed {
        step: String,
        error: Error,
    },
    /// The operation waits for something outside of it, maybe after it has completed a step.
    NotReady {
        reason: String,
        has_progressed: bool,
    },
    /// Another worker owns the lease, this daemon was fenced, or a test stopped this worker: record nothing.
    LeaseLost,
}

/// Renews the lease of an operation, and returns when it is lost.
async fn renew_lease(app: &App, row: &OperationRow) {
    loop {
        tokio::time::sleep(Duration::from_secs_f64(lease_seconds(app) / 3.0)).await;
        match operations::renew(&app.store, row, lease_seconds(app)).await {
            Ok(true) => {}
            // The attempt is about to return.
            Ok(false) if is_settled(app, row).await => std::future::pending().await,
            Ok(false) => {
                tracing::warn!(operation = %row.id, "lost the lease of an operation");
                return;
            }
            // If the lease expires, another worker repeats the step, which is idempotent.
            Err(error) => {
                tracing::warn!(operation = %row.id, %error, "failed to renew the lease of an operation");
            }
        }
    }
}

/// Returns whether the attempt itself has ended its lease by recording its outcome.
async fn is_settled(app: &App, row: &OperationRow) -> bool {
    use OperationState as S;
    let current = operations::get(&*app.store, row.id).await;
    matches!(current, Ok(Some(current)) if matches!(current.state, S::Complete | S::Error | S::Queued))
}

/// Requeues an operation that waits for something, without counting an attempt.
async fn requeue(app: &App, row: &OperationRow) {
    let outcome = transaction!(app.store, |tx| { Ok(operations::requeue(tx, row, NOT_READY_DELAY).await?) });
    if let Err(error) = outcome {
        tracing::warn!(operation = %row.id, %error, "failed to requeue an operation that is not ready");
    }
}

/// Returns whether another attempt may succeed.
pub(super) fn is_retryable(error: &Error) -> bool {
    matches!(
        error,
        Error::Internal(_)
            | Error::Unavailable(_)
            | Error::PortInUse(_)
            | Error::Contended
            | Error::Timeout(_)
    )
}

/// Returns the delay in seconds before the next attempt: 1, 2, 4 … up to [`MAX_BACKOFF`], scaled with the lease, so that
/// a cluster with short leases also retries quickly.
fn backoff(app: &App, attempts: i64) -> f64 {
    let exponent = i32::try_from(attempts.clamp(1, 10)).expect("at most 10");
    2f64.powi(exponent - 1).min(MAX_BACKOFF) * (lease_seconds(app) / 15.0).min(1.0)
}

/// Reverts the steps of an operation, last step first. The reconcilers repair what fails here.
async fn undo(app: &App, implementation: &Implementation, row: &OperationRow) {
    for step in implementation.steps.iter().rev() {
        if let Undo::Run(revert) = step.undo
            && let Err(error) = revert(app, row).await
        {
            tracing::error!(operation = %row.id, step = step.name, %error, "failed to undo a step");
        }
    }
}

/// Returns the report of a failure for the API. Internal errors are only logged.
fn report(step: &str, row: &OperationRow, error: &Error) -> ErrorReport {
    tracing::warn!(operation = %row.id, step, attempt = row.attempts, %error, "failed to run a step of an operation");
    let (code, message) = match error {
        Error::Internal(_) => ("internal.unknown", "internal error, see the log of the node".to_owned()),
        Error::Unavailable(_) | Error::Contended => ("internal.unavailable", error.to_string()),
        other => ("operation.refused", other.to_string()),
    };
    let mut details = Map::new();
    details.insert("step".into(), json!(step));
    details.insert("attempt".into(), json!(row.attempts));
    ErrorReport { code: code.into(), message, details }
}
