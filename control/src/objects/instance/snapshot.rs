//! Snapshots of disks, stored as artifacts: one artifact for each disk, one version for each snapshot.

use std::collections::BTreeMap;

use muster_types::artifact::ArtifactType;
use muster_types::event::Event;
use muster_types::ids::{ArtifactId, BlobId, InstanceId};
use muster_types::instance::DiskRecord;
use muster_types::quota::QuotaName;
use muster_types::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{find, find_own, locate, object, operation_on, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::artifact::{self, ArtifactRequest};
use crate::objects::{blob, quota, version};
use crate::queue::{DiskCopy, SnapshotInstance};
use muster_store::instances::InstanceRow;
use muster_store::{artifacts, blobs, instances, transaction};

/// The device name of the NVRAM.
pub(crate) const NVRAM: &str = "nvram";

/// A request for snapshots of an instance.
#[derive(Debug, Clone, Default)]
pub struct SnapshotRequest {
    pub all: bool,
    pub device: Option<String>,
    /// 0 means the default.
    pub max_versions: i64,
    pub thin: bool,
}

/// A queued snapshot of one disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct SnapshotRecord {
    /// The disk that is copied, as the source of the artifact.
    pub source_url: String,
    /// The artifact that the snapshot is a version of.
    pub artifact_uuid: ArtifactId,
    /// The blob that will hold the snapshot.
    pub blob_uuid: BlobId,
}

pub(super) fn source_url(instance: InstanceId, device: &str) -> String {
    format!("sf://instance/{instance}/{device}")
}

/// Returns the disks that a request selects.
fn chosen<'a>(row: &'a InstanceRow, request: &SnapshotRequest) -> Vec<(&'a str, Option<&'a DiskRecord>)> {
    let disks = row.disks.iter().filter(|disk| !disk.snapshot_ignores);
    let disks = disks.map(|disk| (disk.device.as_str(), Some(disk)));
    let nvram = row.spec.uefi.then_some((NVRAM, None));
    match &request.device {
        Some(device) => disks.chain(nvram).filter(|(name, _)| name == device).collect(),
        None if request.all => disks.chain(nvram).collect(),
        None => disks.take(1).collect(),
    }
}

/// Queues snapshots of the disks of an instance.
pub async fn create(
    app: &App,
    caller: &Caller,
    reference: &str,
    request: &SnapshotRequest,
) -> Result<BTreeMap<String, SnapshotRecord>> {
    let row = find_own(app, caller, reference, None).await?;
    require_created(&row)?;
    // A snapshot would wait for its node without a limit.
    locate(app, &row).await?;
    let thin = request.thin || app.settings.snapshots_default_to_thin;
    let chosen = chosen(&row, request);
    if chosen.is_empty() {
        return Ok(BTreeMap::new());
    }
    let copies = transaction!(app.store, |tx| {
        if !instances::lock(tx, row.id, &[muster_types::instance::InstanceState::Created]).await? {
            return Err(super::not_ready(&row).into());
        }
        super::migrate::require_not_migrating(&mut *tx, row.id).await?;
        let mut copies = Vec::new();
        for (device, disk) in &chosen {
            let wanted = ArtifactRequest {
                name: Some(format!("{}/{device}", row.id)),
                namespace: Some(row.namespace.clone()),
                artifact_type: ArtifactType::Snapshot,
                source_url: source_url(row.id, device),
                shared: false,
                max_versions: request.max_versions,
            };
            let (artifact_row, _) = artifact::ensure_in(app, tx, caller, &row.namespace, &wanted).await?;
            // The size is not known yet.
            quota::require_in(app, tx, &row.namespace, &[(QuotaName::ArtifactBytes, 1)]).await?;
            copies.push(DiskCopy {
                device: (*device).to_owned(),
                artifact: artifact_row.id,
                blob: BlobId::new(),
                base: disk.and_then(|disk| disk.blob_uuid).filter(|_| thin),
            });
        }
        let snapshot = SnapshotInstance { copies: copies.clone() };
        let handle = operation_on(&row, snapshot, Some(&caller.request_id)).enqueue(tx).await?;
        instances::set_operation(tx, row.id, &handle).await?;
        Ok(copies)
    })?;
    app.queue.wake();
    let devices: Vec<&str> = copies.iter().map(|copy| copy.device.as_str()).collect();
    let event = Event::audit(object(row.id), "snapshot request from REST API");
    app.record(caller, event.with("devices", json!(devices)).with("thin", thin));
    let record = |copy: DiskCopy| {
        let record = SnapshotRecord {
            source_url: source_url(row.id, &copy.device),
            artifact_uuid: copy.artifact,
            blob_uuid: copy.blob,
        };
        (copy.device, record)
    };
    Ok(copies.into_iter().map(record).collect())
}

/// Returns every snapshot of an instance: the record of its artifact, overlaid with the record of its blob.
pub async fn list(app: &App, caller: &Caller, reference: &str) -> Result<Vec<Map<String, Value>>> {
    let row = find(&*app.store, caller, reference, None).await?;
    let to_internal = |error: serde_json::Error| Error::Internal(error.to_string());
    let mut list = Vec::new();
    for found in artifacts::snapshots_of(&*app.store, &row.id.to_string()).await? {
        let device = found.source_url.rsplit('/').next().unwrap_or_default().to_owned();
        let versions = version::versions_in(&*app.store, found.id).await?;
        let ids: Vec<BlobId> = versions.values().copied().collect();
        let contents = blobs::by_ids(&*app.store, &ids).await?;
        let artifact_fields = serde_json::to_value(artifact::to_record(&*app.store, caller, found).await?)
            .map_err(to_internal)?;
        for id in ids {
            let Some(content) = contents.get(&id).cloned() else { continue };
            let created = content.created;
            let blob_record = blob::records(&*app.store, Some(caller), vec![content]).await?;
            let blob_record = serde_json::to_value(blob_record.first()).map_err(to_internal)?;
            let (Value::Object(mut merged), Value::Object(mut blob_fields)) =
                (artifact_fields.clone(), blob_record)
            else {
                continue;
            };
            merged.remove("index");
            merged.remove("blobs");
            if let Some(id) = blob_fields.remove("uuid") {
                blob_fields.insert("blob_uuid".into(), id);
            }
            merged.extend(blob_fields);
            merged.insert("device".into(), json!(device));
            merged.insert("created".into(), json!(created));
            list.push(merged);
        }
    }
    Ok(list)
}
