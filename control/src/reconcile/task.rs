//! The type of a periodic task. `tasks.rs` lists the tasks.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::Result;
use muster_types::settings::Settings;
use tokio::sync::watch;

use crate::app::App;

/// Where a task runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunsOn {
    /// On every daemon, for its own nodes, until the daemon stops accepting work.
    EveryDaemon,
    /// On every daemon, also while it finishes the work it accepted.
    EveryDaemonWhileDraining,
    /// Only on the daemon that owns the maintainer lease.
    Maintainer,
}

/// A future returned by a task.
pub type TaskFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The code of a task.
#[derive(Clone, Copy)]
pub enum Run {
    /// A loop that also reacts to notifications.
    Loop(fn(Arc<App>, watch::Receiver<bool>) -> TaskFuture<'static, ()>),
    /// One pass. Returns whether there is more to do right away.
    Pass(for<'a> fn(&'a App) -> TaskFuture<'a, Result<bool>>),
    /// One long pass of the maintainer that runs concurrently with the others and may be cancelled at any point.
    CancellablePass(for<'a> fn(&'a App) -> TaskFuture<'a, Result<bool>>),
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loop(_) => "Loop",
            Self::Pass(_) => "Pass",
            Self::CancellablePass(_) => "CancellablePass",
        })
    }
}

/// A periodic task. It takes no input and may run at any time, any number of times.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    pub name: &'static str,
    pub runs_on: RunsOn,
    /// The time between two passes.
    pub interval: fn(&Settings) -> Duration,
    /// The key under which the database keeps the time of the last pass of the whole cluster. `None` if each maintainer
    /// counts from its own last pass.
    pub last_run: Option<&'static str>,
    /// Why the task exists.
    pub purpose: &'static str,
    pub run: Run,
}

impl Task {
    /// Runs a task of every daemon until `stop` is set.
    pub fn start(&self, app: Arc<App>, stop: watch::Receiver<bool>) -> TaskFuture<'static, ()> {
        let task = *self;
        match task.run {
            Run::Loop(run) => run(app, stop),
            Run::Pass(pass) | Run::CancellablePass(pass) => Box::pin(repeat(task, pass, app, stop)),
        }
    }
}

/// Measures a pass.
pub(super) async fn measured<T>(app: &App, task: &Task, pass: impl Future<Output = Result<T>>) -> Result<T> {
    let started = Instant::now();
    let outcome = pass.await;
    app.metrics.passed(task.name, started, outcome.is_ok());
    outcome
}

/// Runs a pass after each interval until `stop` is set. Tasks with the same interval run at the same time, so that their events are
/// written in one transaction.
async fn repeat(
    task: Task,
    pass: for<'a> fn(&'a App) -> TaskFuture<'a, Result<bool>>,
    app: Arc<App>,
    mut stop: watch::Receiver<bool>,
) {
    let mut next = Instant::now();
    while !*stop.borrow() {
        let interval = (task.interval)(&app.settings);
        next += interval;
        if next < Instant::now() {
            // The last pass took longer than the interval.
            next = Instant::now() + interval;
        }
        tokio::select! {
            () = tokio::time::sleep_until(next.into()) => {}
            _ = stop.changed() => return,
        }
        if let Err(error) = measured(&app, &task, pass(&app)).await {
            tracing::warn!(task = task.name, %error, "failed to run a periodic task");
        }
    }
}
