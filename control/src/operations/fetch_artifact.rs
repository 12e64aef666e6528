//! Fetches an artifact from its source: its first version, or a new version if the source changed.
//!
//! This is a single step, because the bytes are on the disk of the node that fetches them. Another attempt resumes the
//! download.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_types::artifact::ArtifactState;
use muster_types::event::{Event, EventType};
use muster_types::ids::{ArtifactId, NodeId};
use muster_types::operation::OperationProgress;
use muster_types::storage::Draft;
use muster_types::{Error, Result};
use parking_lot::Mutex;

use super::step::{Implementation, Step, Undo, failure_message, parse_target_id};
use crate::app::App;
use crate::fetch::{Fetch, FetchOutcome, FetchProgress, ResumeState, resolve};
use crate::objects::artifact::{enqueue_conversion, lock_namespace, object};
use crate::objects::blob::{self, BlobSource};
use crate::objects::node_location::storage_node;
use crate::objects::{instance, upload, version};
use crate::queue::{FetchArtifact, Operation as _};
use muster_store::artifacts::{self, ArtifactRow, Validators};
use muster_store::operations::{self, OperationRow};
use muster_store::{instances, transaction};

/// The interval at which progress is recorded in the operation.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Progress is also recorded as an event after this many percent of the total, or after [`MAX_INTERVALS_PER_EVENT`].
const PERCENT_PER_EVENT: u64 = 10;
const MAX_INTERVALS_PER_EVENT: u32 = 15;

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    FetchArtifact::KIND,
    &[Step {
        name: "image_fetch",
        run: |app, row| Box::pin(fetch(app, row)),
        undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
    }],
);

/// Returns the artifact, or `None` if it was deleted.
async fn target(app: &App, row: &OperationRow) -> Result<Option<ArtifactRow>> {
    let id: ArtifactId = parse_target_id(row)?;
    Ok(artifacts::get(&*app.store, id).await?.filter(|row| row.state != ArtifactState::Deleted))
}

async fn fetch(app: &App, row: &OperationRow) -> Result<()> {
    let Some(artifact) = target(app, row).await? else { return Ok(()) };
    let url = resolve(&app.settings, &artifact.source_url)
        .map_err(|reason| Error::Invalid(format!("url: {reason}")))?;
    let (node, draft) = (storage_node(app)?, Draft::Fetch(row.id));
    let meter = Arc::new(FetchProgress::default());
    let known = if artifact.state == ArtifactState::Created {
        artifact.source.clone()
    } else {
        Validators::default()
    };
    let node_id = node.identity().id;
    // Only the node that fetched a part can resume it.
    let progress = row.progress.clone().filter(|progress| progress.node == Some(node_id));
    let validator = Mutex::new(progress.and_then(|progress| progress.validator));
    let part = PartialFetch { app, row, node_id, validator };
    let max_bytes = upload::max_content_bytes(app);
    let fetching = Fetch::new(&app.settings, node.storage(), draft, max_bytes, Arc::clone(&meter))?;
    let outcome = tokio::select! {
        outcome = fetching.run(&url, &known, &part) => outcome?,
        () = record_progress(&part, &artifact, &meter) => return node.storage().remove_draft(draft).await,
    };
    match outcome {
        FetchOutcome::Unchanged => {
            let event = Event::new(EventType::Status, object(artifact.id), "the source has nothing new");
            app.events.record(event.with("url", url.as_str()));
            transaction!(app.store, |tx| { Ok(artifacts::set_error(tx, artifact.id, None).await?) })?;
        }
        FetchOutcome::Fetched(validators) => {
            // The draft is complete: without a validator, no attempt appends to it.
            part.save(None).await?;
            add_version(app, row, &artifact, &validators).await?;
        }
    }
    node.storage().remove_draft(draft).await
}

/// Adds the fetched content to the artifact as a version.
async fn add_version(
    app: &App,
    row: &OperationRow,
    artifact: &ArtifactRow,
    validators: &Validators,
) -> Result<()> {
    let (node, draft) = (storage_node(app)?, Draft::Fetch(row.id));
    let compression = node.storage().decompress(&artifact.namespace, draft).await?;
    let (namespace, modified) = (artifact.namespace.clone(), validators.modified.clone());
    let source = BlobSource { draft, namespace, is_image: true, modified };
    let prepared = blob::prepare(app, node, &source).await?;
    let outcome = transaction!(app.store, |tx| {
        lock_namespace(tx, &artifact.namespace).await?;
        let blob_id = blob::commit_in(tx, &prepared).await?;
        let added = version::add_in(app, tx, artifact, blob_id).await?;
        artifacts::set_fetched(tx, artifact.id, validators).await?;
        if added.is_some() {
            enqueue_conversion(tx, blob_id, artifact, row.request_id.as_deref()).await?;
        }
        Ok((blob_id, added))
    });
    let (blob_id, added) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            blob::discard(app, &prepared).await;
            // Not an error if the artifact was deleted meanwhile.
            return if target(app, row).await?.is_none() { Ok(()) } else { Err(error) };
        }
    };
    blob::finish_commit(app, &prepared, blob_id).await;
    app.queue.wake();
    match added {
        Some(index) => {
            let mut event = version::added_event(artifact.id, index, blob_id);
            if let Some(compression) = compression {
                event = event.with("unpacked", compression.as_str());
            }
            app.events.record(event);
        }
        None => app.events.record(Event::new(
            EventType::Status,
            object(artifact.id),
            "the source has the same content as the newest version",
        )),
    }
    Ok(())
}

/// The state of an incomplete download, kept in the operation so that another attempt can resume it.
struct PartialFetch<'a> {
    app: &'a App,
    row: &'a OperationRow,
    node_id: NodeId,
    validator: Mutex<Option<String>>,
}

impl ResumeState for PartialFetch<'_> {
    fn validator(&self) -> Option<String> {
        self.validator.lock().clone()
    }

    async fn save(&self, validator: Option<String>) -> Result<()> {
        self.validator.lock().clone_from(&validator);
        self.write(0, None, validator).await
    }
}

impl PartialFetch<'_> {
    async fn write(&self, done: u64, total: Option<u64>, validator: Option<String>) -> Result<()> {
        let column = |bytes: u64| {
            i64::try_from(bytes).map_err(|_| Error::Internal(format!("{bytes} bytes are out of range")))
        };
        let (done, total) = (column(done)?, total.map(column).transpose()?);
        let progress = OperationProgress { done, total, validator, node: Some(self.node_id) };
        transaction!(self.app.store, |tx| { Ok(operations::set_progress(tx, self.row, &progress).await?) })
    }
}

/// Records the progress of a fetch, in the operation and less often as an event. Returns when the artifact is deleted.
async fn record_progress(part: &PartialFetch<'_>, artifact: &ArtifactRow, meter: &FetchProgress) {
    let (mut recorded, mut last_percent, mut intervals) = (0, 0, 0);
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        let (done, total) = (meter.done.load(Ordering::Relaxed), meter.total.load(Ordering::Relaxed));
        let total = Some(total).filter(|total| *total > 0);
        intervals += 1;
        match target(part.app, part.row).await {
            Ok(Some(_)) => {}
            Ok(None) => return,
            Err(error) => tracing::warn!(artifact = %artifact.id, %error, "failed to read an artifact"),
        }
        if done == recorded {
            continue;
        }
        recorded = done;
        if let Err(error) = part.write(done, total, part.validator()).await {
            tracing::warn!(artifact = %artifact.id, %error, "failed to record the progress of a fetch");
        }
        let percent = total.map(|total| done.saturating_mul(100) / total);
        if percent.is_some_and(|percent| percent >= last_percent + PERCENT_PER_EVENT)
            || intervals >= MAX_INTERVALS_PER_EVENT
        {
            (last_percent, intervals) = (percent.unwrap_or(0), 0);
            let mut event = Event::new(EventType::Status, object(artifact.id), "fetching")
                .with("bytes", done)
                .with("total", total)
                .with("percent", percent);
            event.request_id.clone_from(&part.row.request_id);
            match instances::awaiting(&*part.app.store, artifact.id).await {
                Ok(waiting) => {
                    event =
                        waiting.into_iter().fold(event, |event, id| event.with_object(instance::object(id)));
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to read the instances that wait for an artifact");
                }
            }
            part.app.events.record(event);
        }
    }
}

/// Records the reason, and puts an artifact without a version in error.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    storage_node(app)?.storage().remove_draft(Draft::Fetch(row.id)).await?;
    let Some(artifact) = target(app, row).await? else { return Ok(()) };
    let reason = failure_message(row);
    let (from, to) = (ArtifactState::Initial, ArtifactState::Error);
    let failed = transaction!(app.store, |tx| {
        artifacts::set_error(tx, artifact.id, Some(reason)).await?;
        Ok(artifacts::set_state(tx, artifact.id, from, to).await?)
    })?;
    let message = if failed {
        "state is now error"
    } else {
        "failed to fetch the source, existing versions are unchanged"
    };
    app.events.record(Event::new(EventType::Mutate, object(artifact.id), message).with("reason", reason));
    Ok(())
}
