//! Notices artifacts whose fetch ended without bringing them anything, and blobs that nothing uses any more.

use muster_types::Result;
use muster_types::artifact::ArtifactState;
use muster_types::event::{Event, EventType};
use muster_types::time::now;

use crate::app::App;
use crate::objects::{artifact, blob};
use muster_store::{artifacts, blobs, operations, references, transaction};

/// Seconds that an artifact may be without an operation: one that was just made gets it at once.
const PATIENCE: f64 = 60.0;
/// Blobs deleted in one pass.
const PASS: i64 = 500;

/// One pass over artifacts.
pub async fn run(app: &App) -> Result<()> {
    for row in artifacts::without_operation(&*app.store, now() - PATIENCE).await? {
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

/// One pass over blobs: those that nothing has used for `BLOB_DELETION_DELAY` seconds are deleted. Their files
/// follow.
pub async fn delete_unused(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let before = now() - app.settings.blob_deletion_delay as f64;
    for row in blobs::unused(&*app.store, before, PASS).await? {
        if transaction!(app.store, |tx| {
            let gone = blobs::delete(tx, &row).await?;
            if gone {
                // What it was only whole with is no longer needed for it.
                references::remove_from(tx, &blob::object(row.id)).await?;
            }
            Ok(gone)
        })? {
            app.events.record(
                Event::new(EventType::Mutate, blob::object(row.id), "state is now deleted")
                    .with("reason", "nothing uses it any more"),
            );
        }
    }
    Ok(())
}
