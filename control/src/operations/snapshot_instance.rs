//! Copies disks of an instance, all as they were at one moment, and makes each copy a version of its artifact.

use std::sync::Arc;

use muster_types::artifact::ArtifactState;
use muster_types::blob::BlobState;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::instance::InstanceState;
use muster_types::node::NodeApi;
use muster_types::storage::Draft;
use muster_types::vm::{SnapshotDisk, VmPower};
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::blob::{self, BlobSource};
use crate::objects::instance::snapshot::NVRAM;
use crate::objects::instance::{local_node, object, target_id};
use crate::objects::version;
use crate::queue::{DiskCopy, Operation as _, SnapshotInstance};
use muster_store::instances::{self, InstanceRow};
use muster_store::operations::OperationRow;
use muster_store::{artifacts, blobs, transaction};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    SnapshotInstance::KIND,
    &[Step {
        name: "instance_snapshot",
        run: |app, row| Box::pin(copy(app, row)),
        undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
    }],
);

fn copies(row: &OperationRow) -> Result<Vec<DiskCopy>> {
    Ok(SnapshotInstance::parameters(row)?.copies)
}

async fn copy(app: &App, row: &OperationRow) -> Result<()> {
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    let instance = instance.filter(|row| row.state == InstanceState::Created);
    let instance =
        instance.ok_or_else(|| Error::Conflict("the instance was deleted before it was copied".into()))?;
    let node = local_node(app, instance.node)?;
    let mut left = Vec::new();
    for copy in copies(row)? {
        // An attempt that died may have made some of them.
        if blobs::get(&*app.store, copy.blob).await?.is_none_or(|blob| blob.state != BlobState::Created) {
            left.push(copy);
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    // Says that the drafts are being written, until this ends.
    let here = node.identity().id;
    let marks: Vec<_> = left.iter().map(|copy| app.drafts_in_progress.begin(here, copy.blob)).collect();
    let outcome = copy_all(app, row, node, &instance, &left).await;
    for copy in &left {
        node.storage().remove_draft(Draft::Vm(copy.blob)).await?;
    }
    drop(marks);
    outcome
}

async fn copy_all(
    app: &App,
    row: &OperationRow,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
    copies: &[DiskCopy],
) -> Result<()> {
    let disks: Vec<SnapshotDisk> = copies
        .iter()
        .map(|copy| SnapshotDisk {
            device: copy.device.clone(),
            draft: Draft::Vm(copy.blob),
            thin: copy.base.is_some(),
        })
        .collect();
    let compress = app.settings.compress_snapshots;
    // Nobody may start a machine whose files are being read. One that runs copies by itself, beside all else.
    let turn = app.instance_locks.lock(instance.id).await;
    let running = matches!(node.vms().power(instance.id).await?, Some(VmPower::On | VmPower::Paused));
    let turn = if running {
        drop(turn);
        None
    } else {
        Some(turn)
    };
    node.vms().snapshot(instance.id, &disks, compress).await.map_err(|error| match error {
        // There may be room later.
        Error::Insufficient(why) => Error::Unavailable(why),
        other => other,
    })?;
    drop(turn);
    for copy in copies {
        keep(app, row, node, instance, copy).await?;
    }
    Ok(())
}

/// Makes a copy a blob, and that a version of its artifact.
async fn keep(
    app: &App,
    row: &OperationRow,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
    copy: &DiskCopy,
) -> Result<()> {
    let draft = Draft::Vm(copy.blob);
    let coming = BlobSource { draft, is_image: copy.device != NVRAM, modified: None };
    let prepared = blob::prepare_as(app, node, &coming, copy.blob).await?;
    let outcome = transaction!(app.store, |tx| {
        blob::commit_with_id_in(tx, &prepared, copy.base).await?;
        let artifact = artifacts::get(&mut *tx, copy.artifact).await?;
        let artifact = artifact.ok_or_else(|| Error::not_found("artifact"))?;
        version::add_in(tx, &artifact, copy.blob).await
    });
    match outcome {
        Ok(index) => {
            blob::finish_commit(app, &prepared, copy.blob).await;
            app.events.record(version::added_event(copy.artifact, index.unwrap_or(0), copy.blob));
            let mut event = Event::new(EventType::Status, object(instance.id), EventMessage::DiskCopied)
                .with("device", copy.device.clone())
                .with("blob_uuid", copy.blob.to_string())
                .with("artifact_uuid", copy.artifact.to_string());
            event.request_id.clone_from(&row.request_id);
            app.events.record(event);
            Ok(())
        }
        Err(error) => {
            blob::discard(app, &prepared).await;
            Err(error)
        }
    }
}

/// What could not be copied is told of; an artifact that has nothing else is in error.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let id = target_id(&row.target.id)?;
    let report = row.error_report.as_ref();
    let reason = report.map_or_else(|| "unknown".to_owned(), |report| report.message.clone());
    for copy in copies(row)? {
        transaction!(app.store, |tx| {
            artifacts::set_error(tx, copy.artifact, Some(&reason)).await?;
            let (from, to) = (ArtifactState::Initial, ArtifactState::Error);
            Ok(artifacts::set_state(tx, copy.artifact, from, to).await?)
        })?;
    }
    let event = Event::new(EventType::Status, object(id), "disks could not be copied");
    app.events.record(event.with("reason", reason));
    Ok(())
}
