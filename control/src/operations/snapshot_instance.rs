//! Copies disks of an instance at one point in time, and adds each copy to its artifact as a version.

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

use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::artifact::{self, lock_namespace};
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
        instance.ok_or_else(|| Error::Conflict("the instance was deleted before the snapshot".into()))?;
    let node = local_node(app, instance.node)?;
    let mut pending = Vec::new();
    for copy in copies(row)? {
        // An attempt that was interrupted may have completed some of them.
        if blobs::get(&*app.store, copy.blob).await?.is_none_or(|blob| blob.state != BlobState::Created) {
            pending.push(copy);
        }
    }
    if pending.is_empty() {
        return Ok(());
    }
    // The storage reconciler must not remove these drafts.
    let node_id = node.identity().id;
    let marks: Vec<_> = pending.iter().map(|copy| app.drafts_in_progress.begin(node_id, copy.blob)).collect();
    let outcome = copy_all(app, row, node, &instance, &pending).await;
    for copy in &pending {
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
    for copy in copies {
        add_version(app, row, node, instance, copy).await?;
    }
    Ok(())
}

/// Stores a copy as a blob and adds it to its artifact as a version.
async fn add_version(
    app: &App,
    row: &OperationRow,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
    copy: &DiskCopy,
) -> Result<()> {
    let draft = Draft::Vm(copy.blob);
    let (namespace, is_image) = (instance.namespace.clone(), copy.device != NVRAM);
    let source = BlobSource { draft, namespace, is_image, modified: None };
    let prepared = blob::prepare_as(app, node, &source, copy.blob).await?;
    let outcome = transaction!(app.store, |tx| {
        lock_namespace(tx, &instance.namespace).await?;
        blob::commit_with_id_in(tx, &prepared, copy.base).await?;
        let artifact = artifacts::get(&mut *tx, copy.artifact).await?;
        let artifact = artifact.ok_or_else(|| Error::not_found("artifact"))?;
        version::add_in(app, tx, &artifact, copy.blob).await
    });
    match outcome {
        Ok(index) => {
            blob::finish_commit(app, &prepared, copy.blob).await;
            if let Some(index) = index {
                app.events.record(version::added_event(copy.artifact, index, copy.blob));
            }
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
