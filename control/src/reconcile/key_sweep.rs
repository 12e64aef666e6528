//! Soft-deletes keys that expired `NAMESPACE_KEY_REAP_GRACE` seconds ago. They are rejected from their expiry on.

use muster_types::Result;
use muster_types::event::Event;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use crate::app::App;
use muster_store::{keys, transaction};

/// The maximum number of keys read at a time.
const BATCH: i64 = 500;

/// Runs one pass and returns the number of deleted keys.
pub async fn run(app: &App) -> Result<usize> {
    if app.settings.namespace_key_reap_grace <= 0 {
        return Ok(0);
    }
    #[expect(clippy::cast_precision_loss, reason = "the grace is seconds")]
    let before = now() - app.settings.namespace_key_reap_grace as f64;
    let mut count = 0;
    loop {
        let expired = keys::expired_before(&*app.store, before, BATCH).await?;
        for key in &expired {
            let deleted =
                transaction!(app.store, |tx| { Ok(keys::soft_delete_expired(tx, key.id, before).await?) })?;
            if deleted {
                count += 1;
                app.events.record(
                    Event::audit(ObjectRef::namespace(&key.namespace), "expired key deleted")
                        .with_object(ObjectRef::new(ObjectType::NamespaceKey, key.id))
                        .with("keyname", key.name.clone()),
                );
            }
        }
        if i64::try_from(expired.len()).expect("at most BATCH") < BATCH {
            return Ok(count);
        }
    }
}
