//! Notices instances whose operation ended without bringing them where they were going.

use muster_types::Result;
use muster_types::instance::InstanceState;
use serde_json::json;

use crate::app::App;
use crate::objects::instance::{delete, object, order};
use crate::operations::release_instance;
use crate::store::{instances, operations, transaction};

/// One pass.
pub async fn run(app: &App) -> Result<()> {
    for (node, name) in instances::on_deleted_nodes(&*app.store).await? {
        delete::forsake(app, node, &name).await?;
    }
    for row in instances::abandoned(&*app.store).await? {
        if matches!(row.state, InstanceState::DeleteWait | InstanceState::DeleteWaitError) {
            // Whatever was in the way of the last attempt may be gone.
            transaction!(app.store, |tx| { delete::enqueue(tx, row.id, None).await })?;
        } else {
            let ended = operations::of_target(&*app.store, &object(row.id)).await?;
            let report = ended.iter().find_map(|operation| operation.error_report.as_ref());
            let reason =
                report.map_or("its creation ended without a result", |report| report.message.as_str());
            transaction!(app.store, |tx| {
                if operations::is_pending(&mut *tx, &object(row.id), release_instance::KIND.name).await? {
                    return Ok(());
                }
                let order = order(&row, json!({ "reason": reason }), None);
                release_instance::KIND.enqueue(tx, order).await?;
                Ok(())
            })?;
        }
        app.queue.wake();
    }
    Ok(())
}
