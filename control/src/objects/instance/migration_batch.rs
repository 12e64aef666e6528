//! Several migrations of one operation: their forecast, and how they are started. Used to drain nodes and to rebalance them.

use std::future::Future;

use muster_store::instances::InstanceRow;
use muster_store::operations::{self, OperationRow};
use muster_store::{dry_run, transaction};
use muster_types::ids::InstanceId;
use muster_types::operation::OperationState;
use muster_types::{Error, Result};

use super::migrate::MigrationPlan;
use super::object;
use super::placement::{Allocation, RefusedNodes};
use crate::app::App;
use crate::queue::{MigrateInstance, Operation as _};

/// The maximum number of migrations at the same time.
const MAX_MIGRATIONS: usize = 2;

/// Forecasts migrations one after the other: the real allocation of each, rolled back. Returns where each instance goes, or which
/// nodes have no capacity.
pub(crate) async fn forecast(
    app: &App,
    planned: &[(&InstanceRow, &MigrationPlan)],
) -> Result<Vec<Result<Allocation, RefusedNodes>>> {
    let forecasts = async {
        transaction!(app.store, |tx| {
            let mut forecasts = Vec::new();
            for (row, plan) in planned {
                forecasts.push(plan.forecast_in(app, tx, row).await?);
            }
            Ok(forecasts)
        })
    };
    dry_run(forecasts).await
}

/// Returns whether an instance can be migrated later.
pub(crate) fn is_temporary(error: &Error) -> bool {
    matches!(error, Error::NotReady(_) | Error::Unavailable(_) | Error::Contended)
}

/// Returns the migrations of an instance that failed or were cancelled since a time, newest first.
pub(crate) async fn failed_since(app: &App, id: InstanceId, since: f64) -> Result<Vec<OperationRow>> {
    let mut rows = operations::of_target(&*app.store, &object(id)).await?;
    rows.retain(|row| {
        row.name == MigrateInstance::KIND.name
            && row.created >= since
            && matches!(row.state, OperationState::Error | OperationState::Abort)
    });
    Ok(rows)
}

/// Returns why a migration failed.
pub(crate) fn failure(row: &OperationRow) -> &str {
    row.error_report.as_ref().map_or("it was cancelled", |report| report.message.as_str())
}

/// One pass of an operation that migrates instances. It stores nothing: the next pass finds out what remains to be done.
#[derive(Debug, Default)]
pub(crate) struct MigrationBatch {
    running: usize,
    /// Whether another pass is needed.
    is_waiting: bool,
    blocked: Vec<String>,
}

impl MigrationBatch {
    /// Creates a pass while some migrations are running.
    pub(crate) fn new(running: usize) -> Self {
        Self { running, ..Self::default() }
    }

    /// Requires another pass.
    pub(crate) fn wait(&mut self) {
        self.is_waiting = true;
    }

    /// Reports that an instance cannot be migrated.
    pub(crate) fn block(&mut self, row: &InstanceRow, reason: &str) {
        self.blocked.push(format!("{} ({}): {reason}", row.name, row.id));
    }

    /// Starts the migration of an instance, unless enough are running. `migration` returns whether it was necessary.
    pub(crate) async fn start(&mut self, row: &InstanceRow, migration: impl Future<Output = Result<bool>>) {
        if self.running >= MAX_MIGRATIONS {
            return self.wait();
        }
        match migration.await {
            Ok(true) => {
                self.running += 1;
                self.wait();
            }
            Ok(false) => {}
            Err(error) if is_temporary(&error) => self.wait(),
            Err(error) => self.block(row, &error.to_string()),
        }
    }

    /// Ends the pass. Returns [`Error::NotReady`] if another one is needed, or an error if instances stay.
    pub(crate) fn finish(self) -> Result<()> {
        if self.is_waiting {
            return Err(Error::NotReady("instances are being migrated".into()));
        }
        if self.blocked.is_empty() {
            return Ok(());
        }
        let (count, list) = (self.blocked.len(), self.blocked.join("; "));
        Err(Error::Conflict(format!("{count} instances stay on their node: {list}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_with_blocked_instances_fails_only_when_nothing_else_is_running() {
        let blocked = || vec!["web: no".to_owned()];
        let waiting = MigrationBatch { is_waiting: true, blocked: blocked(), ..MigrationBatch::new(1) };
        assert!(matches!(waiting.finish(), Err(Error::NotReady(_))));
        let ended = MigrationBatch { blocked: blocked(), ..MigrationBatch::new(0) };
        assert!(matches!(ended.finish(), Err(Error::Conflict(text)) if text.contains("web: no")));
        assert!(MigrationBatch::new(0).finish().is_ok());
    }
}
