//! Fails artifacts whose fetch ended without a result, and deletes blobs that are not referenced.

use muster_types::Result;
use muster_types::artifact::ArtifactState;
use muster_types::event::{Event, EventType};
use muster_types::time::now;

use crate::app::App;
use crate::objects::{artifact, blob};
use muster_store::{artifacts, blobs, operations, references, transaction};

/// How long an artifact may be without an operation, in seconds. A new one gets its operation immediately.
const OPERATION_GRACE: f64 = 60.0;
/// The maximum number of blobs deleted in one pass.
const BATCH: i64 = 500;

/// Fails artifacts whose fetch ended without a result.
pub async fn run(app: &App) -> Result<()> {
    for row in artifacts::without_operation(&*app.store, now() - OPERATION_GRACE).await? {
        let target = artifact::object(row.id);
        let ended = operations::of_target(&*app.store, &target).await?;
        let report = ended.iter().find_map(|operation| operation.error_report.as_ref());
        let reason = report.map_or("its fetch ended without a result", |report| report.message.as_str());
        let failed = transaction!(app.store, |tx| {
            artifacts::set_error(tx, row.id, Some(reason)).await?;
            let (from, to) = (ArtifactState::Initial, ArtifactState::Error);
            Ok(artifacts::set_state(tx, row.id, from, to).await?)
        })?;
        if failed {
            let event = Event::new(EventType::Mutate, target, "state is now error");
            app.events.record(event.with("reason", reason));
        }
    }
    Ok(())
}

/// Deletes blobs that were not referenced for `BLOB_DELETION_DELAY` seconds. The storage reconciler removes their
/// files. See docs/decisions/0015.
pub async fn delete_unused(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let before = now() - app.settings.blob_deletion_delay as f64;
    for row in blobs::unused(&*app.store, before, BATCH).await? {
        if transaction!(app.store, |tx| {
            let deleted = blobs::delete(tx, &row).await?;
            if deleted {
                // Its base is no longer needed.
                references::remove_from(tx, &blob::object(row.id)).await?;
            }
            Ok(deleted)
        })? {
            app.events.record(
                Event::new(EventType::Mutate, blob::object(row.id), "state is now deleted")
                    .with("reason", "it is not referenced"),
            );
        }
    }
    Ok(())
}
