//! Does what callers want done inside the guests of this daemon's nodes: for each instance one operation at a time, in
//! the order in which they came. Whoever wants something writes a row and rings the [`AgentNotifier`].
//!
//! Nothing is remembered here that is not in the database or in the guest: whoever comes next goes on with it.

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

/// How often the database is asked what others wrote, and how far a transfer is is written down.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);
/// How often what was given up is looked for in guests.
const SWEEP: Duration = Duration::from_secs(10);
/// How long somebody stays at an instance that has nothing to do.
const LINGER: Duration = Duration::from_secs(5);
/// How long the next operation waits for a command to be ended.
const ENDING: Duration = Duration::from_secs(3);
/// How often a transfer that stalls is begun.
const MOST_ATTEMPTS: i64 = 3;
/// Blobs that are brought to a node at a time for one instance, which can use them one after the other only.
const COPIES_AHEAD: usize = 2;
/// How long one waits before a blob is asked for again: at first, and at most.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A task that ends when it is dropped.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Task {
    /// Ends it, and waits until nothing of it is under way.
    async fn end(mut self) {
        self.0.abort();
        let _ = tokio::time::timeout(ENDING, &mut self.0).await;
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Does what is wanted until told to stop. What is under way then goes on with the next daemon.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let nodes: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
    let mut lines: HashMap<InstanceId, (Arc<Notify>, Task)> = HashMap::new();
    let _sweeper = Task(tokio::spawn(sweep(Arc::clone(&app), nodes.clone())));
    let mut look_at = Instant::now();
    while !*stop.borrow() {
        let mut there = app.agents.take_changed();
        if Instant::now() >= look_at {
            look_at = Instant::now() + RECONCILE_INTERVAL;
            lines.retain(|_, (_, task)| !task.0.is_finished());
            match agent_operations::instances_with_unfinished(&*app.store, &nodes).await {
                // Those that are attended look for themselves.
                Ok(found) => there.extend(found.into_iter().filter(|id| !lines.contains_key(id))),
                Err(error) => tracing::warn!(%error, "agent operations were not looked for"),
            }
        }
        for id in there {
            if let Some((wake, task)) = lines.get(&id)
                && !task.0.is_finished()
            {
                wake.notify_one();
                continue;
            }
            let wake = Arc::new(Notify::new());
            let task = tokio::spawn(attend(Arc::clone(&app), id, Arc::clone(&wake)));
            lines.insert(id, (wake, Task(task)));
        }
        tokio::select! {
            () = app.agents.wait_changed() => {}
            () = tokio::time::sleep_until(look_at.into()) => {}
            _ = stop.changed() => {}
        }
    }
    for (_, (_, task)) in lines {
        task.end().await;
    }
}

/// Stays at one instance as long as there is something to do.
async fn attend(app: Arc<App>, instance: InstanceId, wake: Arc<Notify>) {
    let mut line = Line { app, instance, wake, copying: HashMap::new(), current: None, is_clear: false };
    loop {
        let pause = match line.step().await {
            Ok(Some(pause)) => pause,
            Ok(None) => {
                if tokio::time::timeout(LINGER, line.wake.notified()).await.is_err() {
                    return;
                }
                continue;
            }
            Err(error) => {
                tracing::warn!(%instance, %error, "agent operations were not looked after");
                RECONCILE_INTERVAL
            }
        };
        let _ = tokio::time::timeout(pause, line.wake.notified()).await;
    }
}

/// The operations of one instance.
struct Line {
    app: Arc<App>,
    instance: InstanceId,
    wake: Arc<Notify>,
    /// Those whose blob is on its way.
    copying: HashMap<AgentOperationId, Task>,
    current: Option<Current>,
    /// Whether nothing runs in the guest that was given up, as far as it could be told.
    is_clear: bool,
}

/// The operation that is under way.
struct Current {
    row: AgentOperationRow,
    node: Arc<dyn NodeApi>,
    task: Task,
    ended: Arc<AtomicBool>,
    clock: Arc<ProgressClock>,
    /// When its progress was last written down, and what.
    written: (Instant, Option<f64>),
}

impl Current {
    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.task.0.is_finished()
    }
}

impl Line {
    /// Looks at what is to be done, and sees to it. Says when to look again; nothing if there is nothing to do.
    async fn step(&mut self) -> Result<Option<Duration>> {
        if self.current.as_ref().is_some_and(Current::has_ended) {
            self.current = None;
        }
        let found = agent_operations::queue_of(&*self.app.store, self.instance).await?;
        let node = self.app.nodes.iter().find(|own| Some(own.identity().id) == found.node).cloned();
        let is_unfinished = |id| found.rows.iter().any(|row| row.id == id);
        self.copying.retain(|id, _| is_unfinished(*id));
        if let Some(current) = &self.current
            && !is_unfinished(current.row.id)
        {
            self.leave().await?;
        }
        let Some(node) = node else {
            // One that has just ended tidies up, and rings.
            return Ok(self.current.as_ref().map(|_| RECONCILE_INTERVAL));
        };
        if !found.is_created {
            // It is being deleted, and its operations with it.
            self.current = None;
            self.copying.clear();
            return Ok(Some(RECONCILE_INTERVAL));
        }
        let mut rows = found.rows;
        self.expire(&mut rows).await?;
        self.watch_progress(&mut rows).await?;
        let waiting = rows.iter().filter(|row| row.state == AgentOperationState::Preflight);
        for row in waiting.take(COPIES_AHEAD) {
            if !self.copying.contains_key(&row.id) {
                let copy =
                    copy(Arc::clone(&self.app), Arc::clone(&node), row.clone(), Arc::clone(&self.wake));
                self.copying.insert(row.id, Task(tokio::spawn(copy)));
            }
        }
        if self.current.is_none()
            && let Some(head) = rows.first()
            && may_begin(head, &node)
        {
            if !self.is_clear {
                // Left by a daemon that died: it does not run beside the next one.
                let here = [node.identity().id];
                end_given_up(&self.app, &here, Some(self.instance)).await?;
                self.is_clear = true;
            }
            self.begin(&node, head.clone());
        }
        Ok(Some(self.pause(&rows)))
    }

    fn begin(&mut self, node: &Arc<dyn NodeApi>, row: AgentOperationRow) {
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
            // A task that rings has not quite ended.
            end.store(true, Ordering::Release);
            wake.notify_one();
        });
        let (node, written) = (Arc::clone(node), (Instant::now(), None));
        self.current = Some(Current { row, node, task: Task(task), ended, clock, written });
    }

    /// Ends what is under way, here and in the guest.
    async fn stop(&mut self) -> Result<()> {
        let Some(current) = self.current.take() else { return Ok(()) };
        current.task.end().await;
        if is_command_line(&current.row) {
            cancel(&self.app, &current.node, &current.row).await?;
        }
        Ok(())
    }

    /// Somebody ended what is under way: a caller, a budget, or itself just now.
    async fn leave(&mut self) -> Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        let row = agent_operations::get(&*self.app.store, current.row.id).await?;
        match row.map(|row| row.state) {
            // It has but to tidy up.
            Some(AgentOperationState::Complete | AgentOperationState::Error) => Ok(()),
            _ => self.stop().await,
        }
    }

    /// Ends those whose time is over, wherever they stand in the line.
    async fn expire(&mut self, rows: &mut Vec<AgentOperationRow>) -> Result<()> {
        let most = self.app.settings.agent_operation_max_deadline;
        let over = |row: &AgentOperationRow| end::expires_at(row, most).is_some_and(|time| time <= now());
        for row in rows.iter().filter(|row| over(row)) {
            let mut gone = end::expire(&self.app, row, ExpiryReason::Deadline).await?;
            if !gone {
                // It may have moved on meanwhile, but its time is over all the same.
                let fresh = agent_operations::get(&*self.app.store, row.id).await?;
                if let Some(fresh) = fresh.filter(|fresh| !fresh.state.is_final()) {
                    gone = end::expire(&self.app, &fresh, ExpiryReason::Deadline).await?;
                }
            }
            self.copying.remove(&row.id);
            if self.current.as_ref().is_some_and(|current| current.row.id == row.id) {
                if gone {
                    self.stop().await?;
                }
            } else if row.state == AgentOperationState::Executing {
                self.is_clear = false;
            }
        }
        rows.retain(|row| !over(row));
        Ok(())
    }

    /// Writes down how far a transfer is, and notices when it stands still.
    async fn watch_progress(&mut self, rows: &mut Vec<AgentOperationRow>) -> Result<()> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let id = current.row.id;
        let stalls_at = current.clock.stalls_at(current.row.progress_timeout);
        if stalls_at.is_none_or(|at| at > Instant::now()) {
            let time = current.clock.last_progress();
            if current.written.0.elapsed() >= RECONCILE_INTERVAL
                && time.is_some()
                && time != current.written.1
            {
                current.written = (Instant::now(), time);
                let time = time.unwrap_or_default();
                transaction!(self.app.store, |tx| {
                    Ok(agent_operations::set_progress(tx, id, time).await?)
                })?;
            }
            return Ok(());
        }
        self.stop().await?;
        // The next step sees what there is to do then.
        rows.clear();
        self.wake.notify_one();
        let row = agent_operations::get(&*self.app.store, id).await?;
        let Some(row) = row.filter(|row| row.state == AgentOperationState::Executing) else { return Ok(()) };
        if row.attempts >= MOST_ATTEMPTS {
            end::expire(&self.app, &row, ExpiryReason::Progress).await?;
        } else {
            let (from, to) = (AgentOperationState::Executing, AgentOperationState::Queued);
            let again = transaction!(self.app.store, |tx| {
                Ok(agent_operations::set_state(tx, id, from, to, &AgentOperationOutcome::default()).await?)
            })?;
            if again {
                let event = audit(&row, "agent operation stalled, it is begun again");
                self.app.events.record(event.with("attempts", row.attempts));
            }
        }
        Ok(())
    }

    /// How long there is nothing to do unless somebody rings.
    fn pause(&self, rows: &[AgentOperationRow]) -> Duration {
        let most = self.app.settings.agent_operation_max_deadline;
        let (time, mut pause) = (now(), RECONCILE_INTERVAL);
        for over in rows.iter().filter_map(|row| end::expires_at(row, most)) {
            pause = pause.min(Duration::try_from_secs_f64(over - time).unwrap_or_default());
        }
        if let Some(current) = &self.current
            && let Some(at) = current.clock.stalls_at(current.row.progress_timeout)
        {
            pause = pause.min(at.saturating_duration_since(Instant::now()));
        }
        pause.max(Duration::from_millis(1))
    }
}

/// Whether the first operation of a line may be begun, or gone on with.
fn may_begin(row: &AgentOperationRow, node: &Arc<dyn NodeApi>) -> bool {
    match row.state {
        // Another attempt of what stalled is not spared by a guest that is away.
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

/// Brings the blob of an operation to its node.
async fn copy(app: Arc<App>, node: Arc<dyn NodeApi>, row: AgentOperationRow, wake: Arc<Notify>) {
    let mut pause = SHORTEST_PAUSE;
    loop {
        let outcome = match bring(&app, &node, &row).await {
            Err(
                error @ (Error::NotReady(_) | Error::Unavailable(_) | Error::Contended | Error::Timeout(_)),
            ) => Err(error),
            Err(Error::Internal(why)) => {
                tracing::error!(operation = %row.id, %why, "a blob was not brought to its node");
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
            Err(error) => tracing::debug!(operation = %row.id, %error, "a blob is not there yet"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    wake.notify_one();
}

async fn bring(app: &App, node: &Arc<dyn NodeApi>, row: &AgentOperationRow) -> Result<()> {
    match input_blob(&row.commands) {
        Some(blob) => blob_copy::ensure_local(app, node, blob).await,
        None => Ok(()),
    }
}

/// Ends a command in its guest, and writes down that this was done. `false`: the guest could not be told.
async fn cancel(app: &App, node: &Arc<dyn NodeApi>, row: &AgentOperationRow) -> Result<bool> {
    let cancelled = node.guests().cancel(row.instance, command_key(row));
    match tokio::time::timeout(ENDING, cancelled).await {
        Ok(Err(GuestError::Unreachable(_) | GuestError::HostFailed(_))) | Err(_) => {
            tracing::info!(operation = %row.id, "a command was not ended yet");
            Ok(false)
        }
        Ok(_) => {
            transaction!(app.store, |tx| { Ok(agent_operations::clear_sent(tx, row.id).await?) })?;
            Ok(true)
        }
    }
}

/// Ends commands that were given up while nobody could tell their guest.
async fn sweep(app: Arc<App>, nodes: Vec<NodeId>) {
    loop {
        if let Err(error) = end_given_up(&app, &nodes, None).await {
            tracing::warn!(%error, "commands that were given up were not looked for");
        }
        tokio::time::sleep(SWEEP).await;
    }
}

/// The same, once, in all guests of some nodes or in one of them.
async fn end_given_up(app: &App, nodes: &[NodeId], instance: Option<InstanceId>) -> Result<()> {
    let mut deaf = HashSet::new();
    for (row, place) in agent_operations::cancelled_in_flight(&*app.store, nodes, instance).await? {
        let Some(node) = app.nodes.iter().find(|node| node.identity().id == place) else { continue };
        match node.guests().report(row.instance) {
            Some(report) if report.state.is_ready() && report.boot_id == row.sent_boot => {
                // One that does not answer holds up nobody else.
                if !deaf.contains(&row.instance) && !cancel(app, node, &row).await? {
                    deaf.insert(row.instance);
                }
            }
            // It may come back.
            Some(report) if !report.state.is_ready() => {}
            // Its guest was switched off or started again, and the command ended with that.
            _ => transaction!(app.store, |tx| { Ok(agent_operations::clear_sent(tx, row.id).await?) })?,
        }
    }
    Ok(())
}
