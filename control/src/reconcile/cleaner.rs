//! Removes for good what was soft-deleted, and what is finished, `CLEANER_DELAY` seconds ago.

use muster_types::Result;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use crate::app::App;
use crate::operations::Order;
use crate::operations::clean_namespace::{self, clear_events};
use crate::store::{keys, namespaces, operations, transaction};

/// Objects of a kind handled in one pass.
const PASS: i64 = 500;

/// One pass. Says whether there is more to do at once.
pub async fn run(app: &App) -> Result<bool> {
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let before = now() - app.settings.cleaner_delay as f64;
    let mut queued = false;
    let mut seen = 0usize;
    for row in namespaces::deleted_before(&*app.store, before, PASS).await? {
        seen += 1;
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
    let mut most = seen;
    let old_keys = keys::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_keys.len());
    for key in old_keys {
        clear_events(app, &ObjectRef::new(ObjectType::NamespaceKey, key.id)).await?;
        transaction!(app.store, |tx| { Ok(keys::remove_deleted(tx, key.id).await?) })?;
    }
    let finished = operations::finished_before(&*app.store, before, PASS).await?;
    most = most.max(finished.len());
    for id in finished {
        clear_events(app, &ObjectRef::new(ObjectType::ClusterOperation, id)).await?;
        transaction!(app.store, |tx| { Ok(operations::remove(tx, id).await?) })?;
    }
    Ok(i64::try_from(most).is_ok_and(|most| most >= PASS))
}
