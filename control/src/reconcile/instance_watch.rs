//! Repairs instances whose operation ended without a result, or whose node was deleted, and ends migrations without an
//! operation.

use muster_types::Result;
use muster_types::instance::InstanceState;

use crate::app::App;
use crate::objects::instance::{delete, migrate, object, operation_on};
use crate::queue::{Operation as _, ReleaseInstance};
use muster_store::{instances, operations, transaction};

/// Runs one pass.
pub async fn run(app: &App) -> Result<()> {
    for node in instances::on_deleted_nodes(&*app.store).await? {
        delete::release_deleted_node(app, &node).await?;
    }
    migrate::end_orphaned(app).await?;
    for row in instances::without_operation(&*app.store).await? {
        if matches!(row.state, InstanceState::DeleteWait | InstanceState::DeleteWaitError) {
            // Retry: the cause of the last failure may no longer exist.
            transaction!(app.store, |tx| { delete::enqueue(tx, row.id, None).await })?;
        } else {
            let operations = operations::of_target(&*app.store, &object(row.id)).await?;
            let report = operations.iter().find_map(|operation| operation.error_report.as_ref());
            let reason =
                report.map_or("its creation ended without a result", |report| report.message.as_str());
            transaction!(app.store, |tx| {
                if operations::is_pending(&mut *tx, &object(row.id), ReleaseInstance::KIND.name).await? {
                    return Ok(());
                }
                let release = ReleaseInstance { reason: reason.to_owned() };
                operation_on(&row, release, None).enqueue(tx).await?;
                Ok(())
            })?;
        }
        app.queue.wake();
    }
    Ok(())
}
