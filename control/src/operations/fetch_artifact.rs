//! Fetches an artifact from its source: as its first version, or as another one if the source has something new.
//!
//! All of it is one step, because the bytes are on the disk of the node that fetches them. Another attempt goes on
//! with what is there.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use muster_types::artifact::ArtifactState;
use muster_types::event::{Event, EventType};
use muster_types::ids::{ArtifactId, NodeId};
use muster_types::operation::Progress;
use muster_types::storage::Draft;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::fetch::{Fetch, Keep, Meter, Outcome, resolve};
use crate::objects::artifact::{enqueue_conversion, object};
use crate::objects::blob::{self, BlobSource};
use crate::objects::node_location::storage_node;
use crate::objects::{instance, upload, version};
use crate::queue::{FetchArtifact, Operation as _};
use muster_store::artifacts::{self, ArtifactRow, Validators};
use muster_store::operations::{self, OperationRow};
use muster_store::{instances, transaction};

/// How often progress is written down.
const TICK: Duration = Duration::from_secs(1);
/// Progress makes an event when this much more of the whole is there, in percent, or after [`SILENCE`] ticks.
const STRIDE: u64 = 10;
const SILENCE: u32 = 15;

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    FetchArtifact::KIND,
    &[Step {
        name: "image_fetch",
        run: |app, row| Box::pin(fetch(app, row)),
        undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
    }],
);

/// The artifact, while it is there.
async fn target(app: &App, row: &OperationRow) -> Result<Option<ArtifactRow>> {
    let id: ArtifactId =
        row.target.id.parse().map_err(|_| Error::Internal("an artifact's id is not one".into()))?;
    Ok(artifacts::get(&*app.store, id).await?.filter(|row| row.state != ArtifactState::Deleted))
}

async fn fetch(app: &App, row: &OperationRow) -> Result<()> {
    let Some(artifact) = target(app, row).await? else { return Ok(()) };
    let url = resolve(&app.settings, &artifact.source_url)
        .map_err(|reason| Error::Invalid(format!("url: {reason}")))?;
    let (node, draft) = (storage_node(app)?, Draft::Fetch(row.id));
    let meter = Arc::new(Meter::default());
    let known = if artifact.state == ArtifactState::Created {
        artifact.source.clone()
    } else {
        Validators::default()
    };
    let here = node.identity().id;
    // What another node has of it is of no use here.
    let kept = row.progress.clone().filter(|part| part.node == Some(here));
    let part = Part { app, row, here, validator: Mutex::new(kept.and_then(|part| part.validator)) };
    let most = upload::max_content_bytes(app);
    let fetching = Fetch::new(&app.settings, node.storage(), draft, most, Arc::clone(&meter))?;
    let outcome = tokio::select! {
        outcome = fetching.run(&url, &known, &part) => outcome?,
        // Deleted while it is fetched: nobody wants it any more.
        () = watch(&part, &artifact, &meter) => return node.storage().remove_draft(draft).await,
    };
    match outcome {
        Outcome::Unchanged => {
            let event = Event::new(EventType::Status, object(artifact.id), "the source has nothing new");
            app.events.record(event.with("url", url.as_str()));
            transaction!(app.store, |tx| { Ok(artifacts::set_error(tx, artifact.id, None).await?) })?;
        }
        Outcome::Fetched(said) => {
            // What is there is the whole from now on: nobody may add to it.
            part.keep(None).await?;
            take_in(app, row, &artifact, &said).await?;
        }
    }
    node.storage().remove_draft(draft).await
}

/// Makes what was fetched a version.
async fn take_in(app: &App, row: &OperationRow, artifact: &ArtifactRow, said: &Validators) -> Result<()> {
    let (node, draft) = (storage_node(app)?, Draft::Fetch(row.id));
    let packing = node.storage().unpack(draft).await?;
    let coming = BlobSource { draft, is_image: true, modified: said.modified.clone() };
    let prepared = blob::prepare(app, node, &coming).await?;
    let outcome = transaction!(app.store, |tx| {
        let holder = blob::commit_in(tx, &prepared).await?;
        let added = version::add_in(tx, artifact, holder).await?;
        artifacts::set_source(tx, artifact.id, said).await?;
        if added.is_some() {
            enqueue_conversion(tx, holder, artifact, row.request_id.as_deref()).await?;
        }
        Ok((holder, added))
    });
    let (holder, added) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            blob::discard(app, &prepared).await;
            // Deleted while it was fetched: nobody wants it any more.
            return if target(app, row).await?.is_none() { Ok(()) } else { Err(error) };
        }
    };
    blob::finish_commit(app, &prepared, holder).await;
    app.queue.wake();
    match added {
        Some(index) => {
            let mut event = version::added_event(artifact.id, index, holder);
            if let Some(packing) = packing {
                event = event.with("unpacked", packing.as_str());
            }
            app.events.record(event);
        }
        None => app.events.record(Event::new(
            EventType::Status,
            object(artifact.id),
            "the source has what the newest version has",
        )),
    }
    Ok(())
}

/// What this operation knows of a part that is there.
struct Part<'a> {
    app: &'a App,
    row: &'a OperationRow,
    here: NodeId,
    validator: Mutex<Option<String>>,
}

impl Keep for Part<'_> {
    fn validator(&self) -> Option<String> {
        self.validator.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn keep(&self, validator: Option<String>) -> Result<()> {
        self.validator.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&validator);
        self.write(0, None, validator).await
    }
}

impl Part<'_> {
    async fn write(&self, done: u64, total: Option<u64>, validator: Option<String>) -> Result<()> {
        let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
        let progress =
            Progress { done: number(done), total: total.map(number), validator, node: Some(self.here) };
        transaction!(self.app.store, |tx| { Ok(operations::set_progress(tx, self.row, &progress).await?) })
    }
}

/// Writes down how far a fetch is, in the operation and now and then as an event. Ends when the artifact is deleted.
async fn watch(part: &Part<'_>, artifact: &ArtifactRow, meter: &Meter) {
    let (mut written, mut told, mut silent) = (0, 0, 0);
    loop {
        tokio::time::sleep(TICK).await;
        let (done, total) = (meter.done.load(Ordering::Relaxed), meter.total.load(Ordering::Relaxed));
        let known = Some(total).filter(|total| *total > 0);
        silent += 1;
        if matches!(target(part.app, part.row).await, Ok(None)) {
            return;
        }
        if done == written {
            continue;
        }
        written = done;
        if let Err(error) = part.write(done, known, part.validator()).await {
            tracing::warn!(%error, "progress was not written");
        }
        let percent = known.map(|total| done.saturating_mul(100) / total);
        if percent.is_some_and(|percent| percent >= told + STRIDE) || silent >= SILENCE {
            (told, silent) = (percent.unwrap_or(0), 0);
            let mut event = Event::new(EventType::Status, object(artifact.id), "fetching")
                .with("bytes", done)
                .with("total", known)
                .with("percent", percent);
            event.request_id.clone_from(&part.row.request_id);
            for instance in instances::awaiting(&*part.app.store, artifact.id).await.unwrap_or_default() {
                event = event.also(instance::object(instance));
            }
            part.app.events.record(event);
        }
    }
}

/// What cannot be fetched keeps the versions that it has; without any it is in error, with the reason.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    storage_node(app)?.storage().remove_draft(Draft::Fetch(row.id)).await?;
    let Some(artifact) = target(app, row).await? else { return Ok(()) };
    let reason =
        row.error_report.as_ref().map_or_else(|| "unknown".to_owned(), |report| report.message.clone());
    let (from, to) = (ArtifactState::Initial, ArtifactState::Error);
    let failed = transaction!(app.store, |tx| {
        artifacts::set_error(tx, artifact.id, Some(&reason)).await?;
        Ok(artifacts::set_state(tx, artifact.id, from, to).await?)
    })?;
    let message = if failed {
        "state is now error"
    } else {
        "the source could not be fetched, the versions stay as they are"
    };
    app.events.record(Event::new(EventType::Mutate, object(artifact.id), message).with("reason", reason));
    Ok(())
}
