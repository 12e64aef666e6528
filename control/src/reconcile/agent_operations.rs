//! Runs agent operations in the guests of this daemon's nodes: for each instance one at a time, in the order in which
//! they were queued. A request writes a row and notifies the [`AgentNotifier`].
//!
//! All state is in the database or in the guest, so the next daemon can continue. See docs/decisions/0022.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muster_types::agent_operation::{AgentOperationState, ExpiryReason};
use muster_types::guest::GuestError;
use muster_types::ids::{AgentOperationId, InstanceId, NodeId};
use muster_types::node::NodeApi;
use muster_types::time::now;
use muster_types::{Error, Result};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::app::App;
use crate::objects::agent_operation::clock::ProgressClock;
use crate::objects::agent_operation::perform::{AgentOperationRun, command_key, is_command_line};
use crate::objects::agent_operation::{audit, end, input_blob};
use crate::objects::blob_copy;
use crate::state::AgentNotifier;
use muster_store::agent_operations::{self, AgentOperationOutcome, AgentOperationRow};
use muster_store::transaction;

/// The interval at which the database is read without a notification and the progress of transfers is recorded.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);
/// The interval at which orphaned commands are cancelled in guests.
const CANCEL_INTERVAL: Duration = Duration::from_secs(10);
/// The interval while the cluster has no unfinished agent operations.
const IDLE_CANCEL_INTERVAL: Duration = Duration::from_secs(60);
/// How long the task of an instance without operations stays alive.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for a command to be cancelled before the next operation starts.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(3);
/// The maximum number of attempts of a transfer that stalls.
const MAX_ATTEMPTS: i64 = 3;
/// The maximum number of blobs copied concurrently for one instance, which uses them one after the other.
const MAX_CONCURRENT_COPIES: usize = 2;
/// The delay before a failed copy of a blob is retried. It doubles up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// A task that is aborted when dropped.
#[derive(Debug)]
struct AbortOnDrop(JoinHandle<()>);

impl AbortOnDrop {
    /// Aborts the task and waits until it has ended.
    async fn abort(mut self) {
        self.0.abort();
        let _ = tokio::time::timeout(CANCEL_TIMEOUT, &mut self.0).await;
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs agent operations until `stop` is set. The next daemon continues those in progress.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let nodes: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
    let mut instances: HashMap<InstanceId, (Arc<Notify>, AbortOnDrop)> = HashMap::new();
    let _canceller = AbortOnDrop(tokio::spawn(cancel_periodically(Arc::clone(&app), nodes.clone())));
    let mut next_poll = Instant::now();
    while !*stop.borrow() {
        let mut changed = app.agents.take_changed();
        if Instant::now() >= next_poll {
            next_poll = Instant::now() + RECONCILE_INTERVAL;
            instances.retain(|_, (_, task)| !task.0.is_finished());
            if app.cluster_changes.may_have_agent_operations() {
                match agent_operations::instances_with_unfinished(&*app.store, &nodes).await {
                    // The tasks of the other instances poll for themselves.
                    Ok(found) => changed.extend(found.into_iter().filter(|id| !instances.contains_key(id))),
                    Err(error) => tracing::warn!(%error, "failed to read agent operations"),
                }
            }
        }
        for id in changed {
            if let Some((wake, task)) = instances.get(&id)
                && !task.0.is_finished()
            {
                wake.notify_one();
                continue;
            }
            let wake = Arc::new(Notify::new());
            let task = tokio::spawn(run_instance(Arc::clone(&app), id, Arc::clone(&wake)));
            instances.insert(id, (wake, AbortOnDrop(task)));
        }
        tokio::select! {
            () = app.agents.wait_changed() => {}
            () = tokio::time::sleep_until(next_poll.into()) => {}
            _ = stop.changed() => {}
        }
    }
    for (_, (_, task)) in instances {
        task.abort().await;
    }
}

/// Runs the operations of one instance until there are none for [`IDLE_TIMEOUT`].
async fn run_instance(app: Arc<App>, instance: InstanceId, wake: Arc<Notify>) {
    let mut queue = InstanceQueue {
        app,
        instance,
        wake,
        copying: HashMap::new(),
        current: None,
        orphans_cancelled: false,
    };
    loop {
        let delay = match queue.step().await {
            Ok(Some(delay)) => delay,
            Ok(None) => {
                if tokio::time::timeout(IDLE_TIMEOUT, queue.wake.notified()).await.is_err() {
                    return;
                }
                continue;
            }
            Err(error) => {
                tracing::warn!(%instance, %error, "failed to run agent operations");
                RECONCILE_INTERVAL
            }
        };
        let _ = tokio::time::timeout(delay, queue.wake.notified()).await;
    }
}

/// The operations of one instance.
struct InstanceQueue {
    app: Arc<App>,
    instance: InstanceId,
    wake: Arc<Notify>,
    /// The operations whose blob is being copied to the node.
    copying: HashMap<AgentOperationId, AbortOnDrop>,
    current: Option<CurrentOperation>,
    /// Whether commands that a previous daemon left running were cancelled.
    orphans_cancelled: bool,
}

/// The operation in progress.
struct CurrentOperation {
    row: AgentOperationRow,
    node: Arc<dyn NodeApi>,
    task: AbortOnDrop,
    ended: Arc<AtomicBool>,
    clock: Arc<ProgressClock>,
    /// When its progress was last recorded, and the recorded value.
    recorded: (Instant, Option<f64>),
}

impl CurrentOperation {
    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.task.0.is_finished()
    }
}

impl InstanceQueue {
    /// Advances the queue. Returns the delay before the next step, or `None` if there is nothing to do.
    async fn step(&mut self) -> Result<Option<Duration>> {
        if self.current.as_ref().is_some_and(CurrentOperation::has_ended) {
            self.current = None;
        }
        let found = agent_operations::queue_of(&*self.app.store, self.instance).await?;
        let node = self.app.nodes.iter().find(|own| Some(own.identity().id) == found.node).cloned();
        let is_unfinished = |id| found.rows.iter().any(|row| row.id == id);
        self.copying.retain(|id, _| is_unfinished(*id));
        if let Some(current) = &self.current
            && !is_unfinished(current.row.id)
        {
            self.stop_if_ended().await?;
        }
        let Some(node) = node else {
            // An operation that has just ended is cleaning up, and notifies.
            return Ok(self.current.as_ref().map(|_| RECONCILE_INTERVAL));
        };
        if !found.is_created {
            // The instance is being deleted, and its operations with it.
            self.current = None;
            self.copying.clear();
            return Ok(Some(RECONCILE_INTERVAL));
        }
        let mut rows = found.rows;
        self.expire(&mut rows).await?;
        self.watch_progress(&mut rows).await?;
        let waiting = rows.iter().filter(|row| row.state == AgentOperationState::Preflight);
        for row in waiting.take(MAX_CONCURRENT_COPIES) {
            if !self.copying.contains_key(&row.id) {
                let copy =
                    copy_input(Arc::clone(&self.app), Arc::clone(&node), row.clone(), Arc::clone(&self.wake));
                self.copying.insert(row.id, AbortOnDrop(tokio::spawn(copy)));
            }
        }
        if self.current.is_none()
            && let Some(first) = rows.first()
            && may_start(first, &node)
        {
            if !self.orphans_cancelled {
                // A command of a previous daemon must not run concurrently with the next one.
                let nodes = [node.identity().id];
                cancel_orphans(&self.app, &nodes, Some(self.instance)).await?;
                self.orphans_cancelled = true;
            }
            self.start(&node, first.clone());
        }
        Ok(Some(self.next_delay(&rows)))
    }

    fn start(&mut self, node: &Arc<dyn NodeApi>, row: AgentOperationRow) {
        let clock = Arc::new(ProgressClock::default());
        let work = AgentOperationRun {
            app: Arc::clone(&self.app),
            node: Arc::clone(node),
            row: row.clone(),
            clock: Arc::clone(&clock),
        };
        let (wake, ended) = (Arc::clone(&self.wake), Arc::new(AtomicBool::new(false)));
        let end = Arc::clone(&ended);
        let task = tokio::spawn(async move {
            work.run().await;
            // The task that notifies has not ended yet.
            end.store(true, Ordering::Release);
            wake.notify_one();
        });
        let (node, recorded) = (Arc::clone(node), (Instant::now(), None));
        self.current = Some(CurrentOperation { row, node, task: AbortOnDrop(task), ended, clock, recorded });
    }

    /// Stops the current operation, here and in the guest.
    async fn stop(&mut self) -> Result<()> {
        let Some(current) = self.current.take() else { return Ok(()) };
        current.task.abort().await;
        if is_command_line(&current.row) {
            cancel(&self.app, &current.node, &current.row).await?;
        }
        Ok(())
    }

    /// Stops the current operation if a request or a deadline ended it.
    async fn stop_if_ended(&mut self) -> Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        let row = agent_operations::get(&*self.app.store, current.row.id).await?;
        match row.map(|row| row.state) {
            // It ended by itself and is only cleaning up.
            Some(AgentOperationState::Complete | AgentOperationState::Error) => Ok(()),
            _ => self.stop().await,
        }
    }

    /// Expires operations whose deadline has passed, anywhere in the queue.
    async fn expire(&mut self, rows: &mut Vec<AgentOperationRow>) -> Result<()> {
        let max_deadline = self.app.settings.agent_operation_max_deadline;
        let is_overdue =
            |row: &AgentOperationRow| end::expires_at(row, max_deadline).is_some_and(|time| time <= now());
        for row in rows.iter().filter(|row| is_overdue(row)) {
            let mut expired = end::expire(&self.app, row, ExpiryReason::Deadline).await?;
            if !expired {
                // Its state changed meanwhile, but it is overdue nevertheless.
                let current = agent_operations::get(&*self.app.store, row.id).await?;
                if let Some(current) = current.filter(|current| !current.state.is_final()) {
                    expired = end::expire(&self.app, &current, ExpiryReason::Deadline).await?;
                }
            }
            self.copying.remove(&row.id);
            if self.current.as_ref().is_some_and(|current| current.row.id == row.id) {
                if expired {
                    self.stop().await?;
                }
            } else if row.state == AgentOperationState::Executing {
                self.orphans_cancelled = false;
            }
        }
        rows.retain(|row| !is_overdue(row));
        Ok(())
    }

    /// Records the progress of a transfer, and restarts or expires one that stalls.
    async fn watch_progress(&mut self, rows: &mut Vec<AgentOperationRow>) -> Result<()> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let id = current.row.id;
        let stalls_at = current.clock.stalls_at(current.row.progress_timeout);
        if stalls_at.is_none_or(|at| at > Instant::now()) {
            if current.recorded.0.elapsed() >= RECONCILE_INTERVAL
                && let Some(time) = current.clock.last_progress()
                && Some(time) != current.recorded.1
            {
                current.recorded = (Instant::now(), Some(time));
                transaction!(self.app.store, |tx| {
                    Ok(agent_operations::set_progress(tx, id, time).await?)
                })?;
            }
            return Ok(());
        }
        self.stop().await?;
        // The next step reads the queue again.
        rows.clear();
        self.wake.notify_one();
        let row = agent_operations::get(&*self.app.store, id).await?;
        let Some(row) = row.filter(|row| row.state == AgentOperationState::Executing) else { return Ok(()) };
        if row.attempts >= MAX_ATTEMPTS {
            end::expire(&self.app, &row, ExpiryReason::Progress).await?;
        } else {
            let (from, to) = (AgentOperationState::Executing, AgentOperationState::Queued);
            let requeued = transaction!(self.app.store, |tx| {
                Ok(agent_operations::set_state(tx, id, from, to, &AgentOperationOutcome::default()).await?)
            })?;
            if requeued {
                let event = audit(&row, "agent operation stalled, restarting it");
                self.app.events.record(event.with("attempts", row.attempts));
            }
        }
        Ok(())
    }

    /// Returns how long to wait for a notification before the next step.
    fn next_delay(&self, rows: &[AgentOperationRow]) -> Duration {
        let max_deadline = self.app.settings.agent_operation_max_deadline;
        let (time, mut delay) = (now(), RECONCILE_INTERVAL);
        for deadline in rows.iter().filter_map(|row| end::expires_at(row, max_deadline)) {
            // Overdue operations have a delay of zero.
            delay = Duration::from_secs_f64((deadline - time).max(0.0).min(delay.as_secs_f64()));
        }
        if let Some(current) = &self.current
            && let Some(at) = current.clock.stalls_at(current.row.progress_timeout)
        {
            delay = delay.min(at.saturating_duration_since(Instant::now()));
        }
        delay.max(Duration::from_millis(1))
    }
}

/// Returns whether the first operation of a queue may start or continue.
fn may_start(row: &AgentOperationRow, node: &Arc<dyn NodeApi>) -> bool {
    match row.state {
        // A retry of a stalled transfer starts even if the guest is unreachable, so that its attempts are used up.
        AgentOperationState::Queued => {
            (row.attempts > 0 && row.progress_timeout > 0.0) || AgentNotifier::is_ready(node, row.instance)
        }
        AgentOperationState::Executing => true,
        AgentOperationState::Preflight
        | AgentOperationState::Complete
        | AgentOperationState::Error
        | AgentOperationState::Expired
        | AgentOperationState::Deleted => false,
    }
}

/// Copies the blob of an operation to its node, with retries.
async fn copy_input(app: Arc<App>, node: Arc<dyn NodeApi>, row: AgentOperationRow, wake: Arc<Notify>) {
    let mut backoff = MIN_BACKOFF;
    loop {
        let outcome = match ensure_input(&app, &node, &row).await {
            Err(
                error @ (Error::NotReady(_) | Error::Unavailable(_) | Error::Contended | Error::Timeout(_)),
            ) => Err(error),
            Err(Error::Internal(why)) => {
                tracing::error!(operation = %row.id, error = why, "failed to copy a blob to its node");
                end::fail(&app, &row, "server error").await
            }
            Err(error) => end::fail(&app, &row, &error.to_string()).await,
            Ok(()) => {
                let (from, to) = (AgentOperationState::Preflight, AgentOperationState::Queued);
                transaction!(app.store, |tx| {
                    Ok(agent_operations::set_state(tx, row.id, from, to, &AgentOperationOutcome::default())
                        .await?)
                })
            }
        };
        match outcome {
            Ok(_) => break,
            Err(error) => {
                tracing::debug!(operation = %row.id, %error, "failed to copy a blob to its node, retrying");
            }
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
    wake.notify_one();
}

async fn ensure_input(app: &App, node: &Arc<dyn NodeApi>, row: &AgentOperationRow) -> Result<()> {
    match input_blob(&row.commands) {
        Some(blob) => blob_copy::ensure_local(app, node, blob).await,
        None => Ok(()),
    }
}

/// Cancels a command in its guest and records that. Returns `false` if the guest is unreachable.
async fn cancel(app: &App, node: &Arc<dyn NodeApi>, row: &AgentOperationRow) -> Result<bool> {
    let cancelled = node.guests().cancel(row.instance, command_key(row));
    match tokio::time::timeout(CANCEL_TIMEOUT, cancelled).await {
        Ok(Err(GuestError::Unreachable(_) | GuestError::HostFailed(_))) | Err(_) => {
            tracing::info!(operation = %row.id, "failed to cancel a command, its guest is unreachable");
            Ok(false)
        }
        Ok(_) => {
            transaction!(app.store, |tx| { Ok(agent_operations::clear_sent(tx, row.id).await?) })?;
            Ok(true)
        }
    }
}

/// Periodically cancels commands that ended while their guest was unreachable.
async fn cancel_periodically(app: Arc<App>, nodes: Vec<NodeId>) {
    // Commands are only orphaned by operations that were unfinished before.
    let mut may_have_orphans = true;
    let mut last_pass = Instant::now();
    loop {
        let may_have_operations = app.cluster_changes.may_have_agent_operations();
        if may_have_orphans || may_have_operations || last_pass.elapsed() >= IDLE_CANCEL_INTERVAL {
            last_pass = Instant::now();
            match cancel_orphans(&app, &nodes, None).await {
                Ok(found) => may_have_orphans = found > 0 || may_have_operations,
                Err(error) => tracing::warn!(%error, "failed to cancel orphaned commands"),
            }
        }
        tokio::time::sleep(CANCEL_INTERVAL).await;
    }
}

/// Cancels orphaned commands in all guests of some nodes, or in one guest. Returns their number.
async fn cancel_orphans(app: &App, nodes: &[NodeId], instance: Option<InstanceId>) -> Result<usize> {
    let mut unresponsive = HashSet::new();
    let orphans = agent_operations::cancelled_in_flight(&*app.store, nodes, instance).await?;
    let count = orphans.len();
    for (row, node_id) in orphans {
        let Some(node) = app.nodes.iter().find(|node| node.identity().id == node_id) else { continue };
        match node.guests().report(row.instance) {
            Some(report) if report.state.is_ready() && report.boot_id == row.sent_boot => {
                // An unresponsive guest must not delay others.
                if !unresponsive.contains(&row.instance) && !cancel(app, node, &row).await? {
                    unresponsive.insert(row.instance);
                }
            }
            // It may become ready again.
            Some(report) if !report.state.is_ready() => {}
            // The guest was switched off or rebooted, which ended the command.
            _ => transaction!(app.store, |tx| { Ok(agent_operations::clear_sent(tx, row.id).await?) })?,
        }
    }
    Ok(count)
}
