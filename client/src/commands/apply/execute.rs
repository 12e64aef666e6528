//! Executes a plan: each object after those it depends on, independent ones at the same time.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::anyhow;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::manifest::Identity;
use super::ownership::ObjectSet;
use super::plan::{Action, Plan, Step};
use super::schema::Kind;
use crate::commands::session::Session;
use crate::commands::wait::PollTimer;
use crate::exit_code::{self, Outcome, error_with_outcome};
use crate::output::{escape_control, status};

/// The maximum number of objects that are changed at the same time.
const MAX_CONCURRENT: usize = 8;

/// A part of a step: an object that is replaced is deleted first and created later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Delete,
    Change,
}

#[derive(Debug)]
struct Task {
    step: usize,
    part: Part,
    /// The tasks that must be completed before.
    after: Vec<usize>,
    /// Whether another task needs the object to be usable.
    is_needed: bool,
}

/// What the tasks of a run share.
pub(super) struct Run<'a> {
    pub(super) session: &'a Session,
    pub(super) set: &'a ObjectSet,
    /// `None` does not wait for objects that no other one needs.
    pub(super) timer: Option<PollTimer>,
    /// The ids of objects by identity, for references to them.
    pub(super) ids: RefCell<BTreeMap<Identity, String>>,
    stop: watch::Receiver<bool>,
}

impl Run<'_> {
    /// Waits for a condition unless the command is interrupted.
    pub(super) async fn unless_stopped<T>(
        &self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut stop = self.stop.clone();
        tokio::select! {
            result = work => result,
            _ = stop.wait_for(|is_stopping| *is_stopping) => Err(anyhow!("interrupted")),
        }
    }

    /// Returns the timer of a wait for an object.
    pub(super) fn timer(&self, is_needed: bool) -> Option<PollTimer> {
        match &self.timer {
            None if is_needed => Some(PollTimer::unlimited()),
            timer => timer.clone(),
        }
    }
}

/// Executes a plan. Returns an error if something failed; everything that does not depend on it is done nevertheless.
pub(super) async fn execute(
    session: &Session,
    set: &ObjectSet,
    plan: &Plan,
    timer: Option<PollTimer>,
) -> anyhow::Result<()> {
    let tasks = tasks(plan);
    let (stop, stopped) = watch::channel(false);
    let ids = plan.steps.iter().filter_map(|step| {
        let object = step.observed.as_ref()?;
        Some((step.identity.clone(), object.id.clone()))
    });
    let run = Run { session, set, timer, ids: RefCell::new(ids.collect()), stop: stopped };
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    if !tasks.is_empty() {
        status(&format!("applying {} {}", tasks.len(), if tasks.len() == 1 { "change" } else { "changes" }));
    }
    let mut running = FuturesUnordered::new();
    let (mut started, mut done) = (BTreeSet::new(), BTreeSet::new());
    let mut failures: Vec<(Outcome, String)> = vec![];
    loop {
        for (number, task) in tasks.iter().enumerate() {
            let is_ready = task.after.iter().all(|before| done.contains(before));
            if !*stop.borrow() && running.len() < MAX_CONCURRENT && is_ready && started.insert(number) {
                let run = &run;
                running.push(async move {
                    (
                        number,
                        super::requests::perform(run, &plan.steps[task.step], task.part, task.is_needed)
                            .await,
                    )
                });
            }
        }
        tokio::select! {
            result = running.next() => match result {
                None => break,
                Some((number, Ok(text))) => {
                    done.insert(number);
                    status(&text);
                }
                Some((number, Err(error))) => {
                    let step = &plan.steps[tasks[number].step];
                    failures.push((Outcome::of(&error), describe_failure(step, &error)));
                }
            },
            _ = interrupt.recv() => interrupted(&stop)?,
            _ = terminate.recv() => interrupted(&stop)?,
        }
    }
    let remaining = tasks.len() - done.len() - failures.len();
    if *stop.borrow() {
        let count = failures.len() + remaining;
        return Err(exit_code::interrupted(format!(
            "interrupted; {count} of {} changes are not complete: run the same command again to continue",
            tasks.len()
        )));
    }
    let Some((outcome, _)) = failures.first() else { return Ok(()) };
    let mut text = format!("{} of {} changes failed", failures.len(), tasks.len());
    if remaining > 0 {
        text.push_str(&format!(", and {remaining} that depend on them were not started"));
    }
    for (_, failure) in &failures {
        text.push_str(&format!("\n  {failure}"));
    }
    Err(error_with_outcome(*outcome, text))
}

/// Stops starting and waiting. Requests in progress are completed, so that every created object gets its mark.
fn interrupted(stop: &watch::Sender<bool>) -> anyhow::Result<()> {
    if stop.send_replace(true) {
        let text = "interrupted twice; a created object may lack its mark and is adopted by the next run";
        return Err(exit_code::interrupted(text));
    }
    status("interrupted: completing the requests in progress");
    Ok(())
}

fn describe_failure(step: &Step, error: &anyhow::Error) -> String {
    let title = step.identity.title();
    match &step.declared {
        Some(declared) => format!("{}: {title}: {error:#}", escape_control(&declared.location)),
        None => format!("{title}: {error:#}"),
    }
}

/// Returns the tasks of a plan and their order.
fn tasks(plan: &Plan) -> Vec<Task> {
    let mut tasks: Vec<Task> = vec![];
    let new = |step, part| Task { step, part, after: vec![], is_needed: false };
    for (at, step) in plan.steps.iter().enumerate() {
        match step.action {
            Action::Create | Action::Update | Action::Adopt | Action::Wait | Action::Release => {
                tasks.push(new(at, Part::Change));
            }
            Action::Replace => tasks.extend([new(at, Part::Delete), new(at, Part::Change)]),
            Action::Delete => tasks.push(new(at, Part::Delete)),
            Action::Unchanged | Action::Blocked => {}
        }
    }
    let mut orders = vec![vec![]; tasks.len()];
    let mut needed = BTreeSet::new();
    for (number, task) in tasks.iter().enumerate() {
        for (other, before) in tasks.iter().enumerate().filter(|(other, _)| *other != number) {
            match (is_last(plan, before), is_last(plan, task)) {
                // Objects that were removed from the files are deleted after everything else has succeeded.
                (false, true) => orders[number].push(other),
                (true, false) => {}
                (true, true) | (false, false) => {
                    if must_precede(plan, before, task) {
                        orders[number].push(other);
                        needed.insert(other);
                    }
                }
            }
        }
    }
    for (number, (task, after)) in tasks.iter_mut().zip(orders).enumerate() {
        task.after = after;
        task.is_needed = needed.contains(&number);
    }
    tasks
}

/// Returns whether a task deletes an object that was removed from the files. An instance that prevents the replacement of its
/// network is deleted earlier.
fn is_last(plan: &Plan, task: &Task) -> bool {
    let step = &plan.steps[task.step];
    let is_blocking = || {
        let replaced = plan.steps.iter().filter(|other| other.action == Action::Replace);
        replaced.into_iter().any(|other| other.identity.kind == Kind::Network && depends_on(step, other))
    };
    step.action == Action::Delete && !is_blocking()
}

/// Returns whether a task must be completed before another one.
fn must_precede(plan: &Plan, before: &Task, task: &Task) -> bool {
    let (first, second) = (&plan.steps[before.step], &plan.steps[task.step]);
    match (before.part, task.part) {
        (Part::Delete, Part::Change) => before.step == task.step,
        (Part::Delete, Part::Delete) => depends_on(first, second),
        (Part::Change, Part::Change) => depends_on(second, first),
        (Part::Change, Part::Delete) => false,
    }
}

/// Returns whether an object needs another one.
fn depends_on(step: &Step, other: &Step) -> bool {
    let (object, needed) = (&step.identity, &other.identity);
    let fields = step.declared.as_ref().map(|declared| &declared.fields);
    let names = |field: &str, name: &str| {
        let items = fields.and_then(|fields| fields.get(field)).and_then(Value::as_array);
        items.into_iter().flatten().any(|item| item[name].as_str() == Some(needed.name.as_str()))
    };
    match needed.kind {
        Kind::Namespace => object.namespace.as_deref() == Some(needed.name.as_str()),
        Kind::Issuer => {
            let issuer = fields.and_then(|fields| fields.get("issuer")).and_then(Value::as_str);
            object.kind == Kind::Rule && issuer.is_none_or(|issuer| issuer == needed.name)
        }
        Kind::Network => {
            let uses =
                step.observed.as_ref().zip(other.observed.as_ref()).is_some_and(|(instance, network)| {
                    let interfaces = instance.record["interfaces"].as_array();
                    interfaces
                        .into_iter()
                        .flatten()
                        .any(|interface| interface["network_uuid"] == network.id.as_str())
                });
            object.kind == Kind::Instance && (uses || names("network", "network_uuid"))
        }
        Kind::Artifact => object.kind == Kind::Instance && names("disk", "base"),
        Kind::Rule | Kind::Instance => false,
    }
}
