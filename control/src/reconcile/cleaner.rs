//! Removes for good what was soft-deleted, and what is finished, `CLEANER_DELAY` seconds ago.

use muster_types::Result;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use crate::app::App;
use crate::operations::Order;
use crate::operations::clean_namespace::{self, clear_events};
use crate::store::{keys, namespaces, operations, transaction};

/// Objects handled in one pass.
const PASS: i64 = 200;

/// One pass.
pub async fn run(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let before = now() - app.settings.cleaner_delay as f64;
    let mut queued = false;
    for row in namespaces::deleted_before(&*app.store, before, PASS).await? {
        let target = ObjectRef::namespace(&row.name);
        queued |= transaction!(app.store, |tx| {
            if operations::is_pending(&mut *tx, &target, clean_namespace::KIND.name).await? {
                return Ok(false);
            }
            let order = Order {
                target: target.clone(),
                namespace: Some(row.name.clone()),
                arguments: serde_json::json!({}),
                depends_on: vec![],
                request_id: None,
            };
            clean_namespace::KIND.enqueue(tx, order).await?;
            Ok(true)
        })?;
    }
    if queued {
        app.queue.wake();
    }
    for key in keys::deleted_before(&*app.store, before, PASS).await? {
        clear_events(app, &ObjectRef::new(ObjectType::NamespaceKey, key.id)).await?;
        transaction!(app.store, |tx| { Ok(keys::remove_deleted(tx, key.id).await?) })?;
    }
    for id in operations::finished_before(&*app.store, before, PASS).await? {
        clear_events(app, &ObjectRef::new(ObjectType::ClusterOperation, id)).await?;
        transaction!(app.store, |tx| { Ok(operations::remove(tx, id).await?) })?;
    }
    Ok(())
}
