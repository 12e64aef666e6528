//! Ends agent operations.

use muster_types::Result;
use muster_types::agent_operation::{AgentOperationState, ExpiryReason};
use muster_types::time::now;

use super::{AGENT_INPUT, audit, object};
use crate::app::App;
use muster_store::agent_operations::{self, AgentOperationOutcome, AgentOperationRow};
use muster_store::{StoreError, Tx, TxError, references, transaction};

/// The number of seconds that the daemon of an operation's node has to notice its expiry.
const EXPIRY_GRACE: f64 = 5.0;
/// The maximum number of operations that one pass expires.
const MAX_EXPIRED_PER_PASS: i64 = 500;

/// Ends an operation as part of a transaction and releases its references. Fails with a conflict if its state is not
/// that of the row.
pub(super) async fn end_in(
    tx: &mut Tx,
    row: &AgentOperationRow,
    to: AgentOperationState,
    end: &AgentOperationOutcome<'_>,
) -> Result<(), TxError> {
    if try_end_in(tx, row, to, end).await? {
        Ok(())
    } else {
        Err(StoreError::Conflict("the agent operation changed".into()).into())
    }
}

/// Like [`end_in`], but returns `false` if its state is not that of the row.
pub(crate) async fn try_end_in(
    tx: &mut Tx,
    row: &AgentOperationRow,
    to: AgentOperationState,
    end: &AgentOperationOutcome<'_>,
) -> Result<bool, StoreError> {
    if !agent_operations::set_state(tx, row.id, row.state, to, end).await? {
        return Ok(false);
    }
    if to == AgentOperationState::Deleted {
        references::remove_from(tx, &object(row.id)).await?;
    } else {
        references::remove_relationship(tx, &object(row.id), AGENT_INPUT).await?;
    }
    Ok(true)
}

/// Returns when an unfinished operation expires. One without any budget expires too, so that it does not block the
/// queue forever.
#[expect(clippy::cast_precision_loss, reason = "budgets are seconds")]
pub(crate) fn expires_at(row: &AgentOperationRow, max_deadline: u64) -> Option<f64> {
    if row.deadline > 0.0 {
        Some(row.deadline)
    } else {
        (row.progress_timeout <= 0.0).then_some(row.updated + max_deadline as f64)
    }
}

/// Expires an operation. Returns `false` if its state is not that of the row.
pub(crate) async fn expire(app: &App, row: &AgentOperationRow, reason: ExpiryReason) -> Result<bool> {
    let to = AgentOperationState::Expired;
    let end = AgentOperationOutcome { expiry: Some(reason), ..AgentOperationOutcome::default() };
    let ended = transaction!(app.store, |tx| { Ok(try_end_in(tx, row, to, &end).await?) })?;
    if ended {
        app.events.record(
            audit(row, "agent operation expired")
                .with("reason", reason.as_str())
                .with("state", row.state.as_str())
                .with("attempts", row.attempts),
        );
    }
    Ok(ended)
}

/// Fails an operation. Returns `false` if its state is not that of the row.
pub(crate) async fn fail(app: &App, row: &AgentOperationRow, reason: &str) -> Result<bool> {
    let to = AgentOperationState::Error;
    let end = AgentOperationOutcome { error: Some(reason), ..AgentOperationOutcome::default() };
    let ended = transaction!(app.store, |tx| { Ok(try_end_in(tx, row, to, &end).await?) })?;
    if ended {
        app.events.record(audit(row, "agent operation failed").with("reason", reason));
    }
    Ok(ended)
}

/// Expires operations whose daemon has not done so.
pub(crate) async fn expire_overdue(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "budgets are seconds")]
    let max_deadline = app.settings.agent_operation_max_deadline as f64;
    for row in
        agent_operations::overdue(&*app.store, now() - EXPIRY_GRACE, max_deadline, MAX_EXPIRED_PER_PASS)
            .await?
    {
        expire(app, &row, ExpiryReason::Deadline).await?;
    }
    Ok(())
}
