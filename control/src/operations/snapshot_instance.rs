//! Copies disks of an instance at one point in time, and adds each copy to its artifact as a version.

use std::sync::Arc;

use muster_types::artifact::ArtifactState;
use muster_types::blob::BlobState;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::BlobId;
use muster_types::instance::InstanceState;
use muster_types::node::NodeApi;
use muster_types::storage::Draft;
use muster_types::vm::{SnapshotDisk, VmPower};
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::artifact::{self, lock_namespace};
use crate::objects::blob::{self, BlobSource, PreparedBlob};
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
        instance.ok_or_else(|| Error::Conflict("the instance was deleted before the snapshot".into()))?;
    let node = local_node(app, instance.node)?;
    let mut copies = copies(row)?;
    let ids: Vec<BlobId> = copies.iter().map(|copy| copy.blob).collect();
    // An attempt that was interrupted has committed all of them or none, unless a daemon of an earlier release made it.
    let found = blobs::by_ids(&*app.store, &ids).await?;
    copies.retain(|copy| found.get(&copy.blob).is_none_or(|blob| blob.state != BlobState::Created));
    if copies.is_empty() {
        return Ok(());
    }
    // The storage reconciler must not remove these drafts.
    let node_id = node.identity().id;
    let marks: Vec<_> = copies.iter().map(|copy| app.drafts_in_progress.begin(node_id, copy.blob)).collect();
    let outcome = copy_all(app, row, node, &instance, &copies).await;
    for copy in &copies {
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
    // A stopped VM must not start while its files are read. A running VM copies its disks itself and needs no lock.
    let lock = app.instance_locks.lock(instance.id).await;
    let running = matches!(node.vms().power(instance.id).await?, Some(VmPower::On | VmPower::Paused));
    let lock = if running {
        drop(lock);
        None
    } else {
        Some(lock)
    };
    node.vms().snapshot(instance.id, &disks, compress).await.map_err(|error| match error {
        // Space may become available later.
        Error::InsufficientCapacity(why) => Error::Unavailable(why),
        other => other,
    })?;
    drop(lock);
    let mut prepared = Vec::with_capacity(copies.len());
    let stored = store_copies(app, node, instance, copies, &mut prepared).await;
    let added = match stored {
        Ok(()) => add_versions(app, instance, copies, &prepared).await,
        Err(error) => Err(error),
    };
    match added {
        Ok(indexes) => {
            for ((copy, prepared), index) in copies.iter().zip(&prepared).zip(indexes) {
                record_version(app, row, instance, copy, prepared, index).await;
            }
            Ok(())
        }
        Err(error) => {
            for prepared in &prepared {
                blob::discard(app, prepared).await;
            }
            Err(error)
        }
    }
}

/// Stores the copies as blobs that are not committed.
async fn store_copies<'a>(
    app: &'a App,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
    copies: &[DiskCopy],
    prepared: &mut Vec<PreparedBlob<'a>>,
) -> Result<()> {
    for copy in copies {
        let draft = Draft::Vm(copy.blob);
        let (namespace, is_image) = (instance.namespace.clone(), copy.device != NVRAM);
        let source = BlobSource { draft, namespace, is_image, modified: None };
        prepared.push(blob::prepare_as(app, node, &source, copy.blob).await?);
    }
    Ok(())
}

/// Commits all copies and adds them to their artifacts as versions, or none: they are of one moment. Returns their indexes.
async fn add_versions(
    app: &App,
    instance: &InstanceRow,
    copies: &[DiskCopy],
    prepared: &[PreparedBlob<'_>],
) -> Result<Vec<Option<i64>>> {
    transaction!(app.store, |tx| {
        lock_namespace(tx, &instance.namespace).await?;
        let mut indexes = Vec::with_capacity(copies.len());
        for (copy, prepared) in copies.iter().zip(prepared) {
            blob::commit_with_id_in(tx, prepared, copy.base).await?;
            let artifact = artifacts::get(&mut *tx, copy.artifact).await?;
            let artifact = artifact.ok_or_else(|| Error::not_found("artifact"))?;
            indexes.push(version::add_in(app, tx, &artifact, copy.blob).await?);
        }
        Ok(indexes)
    })
}

async fn record_version(
    app: &App,
    row: &OperationRow,
    instance: &InstanceRow,
    copy: &DiskCopy,
    prepared: &PreparedBlob<'_>,
    index: Option<i64>,
) {
    blob::finish_commit(app, prepared, copy.blob).await;
    if let Some(index) = index {
        app.events.record(version::added_event(copy.artifact, index, copy.blob));
    }
    let mut event = Event::new(EventType::Status, object(instance.id), EventMessage::DiskCopied)
        .with("device", copy.device.clone())
        .with("blob_uuid", copy.blob.to_string())
        .with("artifact_uuid", copy.artifact.to_string());
    event.request_id.clone_from(&row.request_id);
    app.events.record(event);
}

/// Records the reason in the artifacts, and puts those without a version in error.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let id = target_id(&row.target.id)?;
    let reason = failure_message(row);
    for copy in copies(row)? {
        let failed = transaction!(app.store, |tx| {
            artifacts::set_error(tx, copy.artifact, Some(reason)).await?;
            let (from, to) = (ArtifactState::Initial, ArtifactState::Error);
            Ok(artifacts::set_state(tx, copy.artifact, from, to).await?)
        })?;
        if failed {
            let event = Event::new(EventType::Mutate, artifact::object(copy.artifact), "state is now error");
            app.events.record(event.with("reason", reason));
        }
    }
    let event = Event::new(EventType::Status, object(id), "failed to copy disks");
    app.events.record(event.with("reason", reason));
    Ok(())
}
