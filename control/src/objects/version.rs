//! Versions of artifacts: references to blobs, each with an index that is never reused.

use std::collections::{BTreeMap, HashMap};

use muster_types::artifact::{ArtifactRecord, ArtifactState, VersionRecord};
use muster_types::event::{Event, EventType};
use muster_types::ids::{ArtifactId, BlobId};
use muster_types::quota::QuotaName;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::artifact::{delete_in, find, find_own, get, object};
use crate::objects::{blob, quota};
use muster_store::artifacts::{self, ArtifactRow};
use muster_store::references::{self, References};
use muster_store::{Read, StoreError, Tx, TxError, blobs, transaction};

/// The relationship between an artifact and a blob; the value is the index of the version.
pub(crate) const VERSION_OF: &str = "version";

pub(crate) fn added_event(id: ArtifactId, index: i64, blob: BlobId) -> Event {
    // Not an event of the blob: its readers would learn who else uses the same content.
    Event::new(EventType::Mutate, object(id), "version added")
        .with("index", index)
        .with("blob_uuid", blob.to_string())
}

/// Returns the versions of an artifact by index, from its references.
pub(super) fn versions(references: &References) -> BTreeMap<i64, BlobId> {
    let list = references.get(VERSION_OF).map(Vec::as_slice).unwrap_or_default();
    let parse = |value: &Option<String>| value.as_ref()?.parse::<i64>().ok();
    list.iter().filter_map(|r| Some((parse(&r.relationship_value)?, r.target_uuid.parse().ok()?))).collect()
}

pub(super) async fn versions_in(db: impl Read, id: ArtifactId) -> Result<BTreeMap<i64, BlobId>, StoreError> {
    Ok(versions(&references::of_object(db, &object(id)).await?.from))
}

/// Returns how many versions of an artifact are kept by default.
pub(super) fn default_max_versions(app: &App) -> i64 {
    i64::try_from(app.settings.artifact_max_versions_default).expect("the settings bound it")
}

/// Returns the blob of the newest version of an artifact.
pub(crate) async fn newest(db: impl Read, id: ArtifactId) -> Result<Option<BlobId>, StoreError> {
    Ok(versions_in(db, id).await?.last_key_value().map(|(_, blob)| *blob))
}

/// Adds a version as part of a transaction that locks the namespace and the blob, and drops the oldest versions beyond
/// the maximum. Returns the index of the version, `None` if the newest version has the same content.
pub(crate) async fn add_in(
    app: &App,
    tx: &mut Tx,
    row: &ArtifactRow,
    blob: BlobId,
) -> Result<Option<i64>, TxError> {
    if !artifacts::lock(tx, row.id).await? {
        return Err(Error::not_found("artifact").into());
    }
    let current = artifacts::get(&mut *tx, row.id).await?.ok_or_else(|| Error::not_found("artifact"))?;
    let versions = versions_in(&mut *tx, row.id).await?;
    let added = if versions.last_key_value().is_some_and(|(_, newest)| *newest == blob) {
        None
    } else {
        let index = artifacts::next_index(tx, row.id).await?;
        let (source, value) = (object(row.id), index.to_string());
        references::insert(tx, &source, VERSION_OF, Some(&value), &blob::object(blob)).await?;
        Some(index)
    };
    trim_in(tx, row.id, current.max_versions).await?;
    if added.is_some() {
        let size = blobs::get(&mut *tx, blob).await?.map_or(0, |blob| blob.size);
        quota::require_within_in(app, tx, &row.namespace, QuotaName::ArtifactBytes, size).await?;
    }
    artifacts::set_error(tx, row.id, None).await?;
    // A fetch sets it again for the new version.
    artifacts::clear_fetched(tx, row.id).await?;
    if current.state != ArtifactState::Created {
        artifacts::set_state(tx, row.id, current.state, ArtifactState::Created).await?;
    }
    Ok(added)
}

/// Drops the oldest versions beyond the maximum.
async fn trim_in(tx: &mut Tx, id: ArtifactId, max: i64) -> Result<(), StoreError> {
    let versions = versions_in(&mut *tx, id).await?;
    let surplus = versions.len().saturating_sub(usize::try_from(max.max(1)).expect("positive"));
    for (index, blob) in versions.into_iter().take(surplus) {
        drop_in(tx, id, index, blob).await?;
    }
    Ok(())
}

pub(super) async fn drop_in(tx: &mut Tx, id: ArtifactId, index: i64, blob: BlobId) -> Result<(), StoreError> {
    // Marks the blob as changed, which delays its deletion.
    blobs::lock(tx, blob).await?;
    references::remove(tx, &object(id), VERSION_OF, &index.to_string()).await
}

/// Returns the versions of an artifact, oldest first.
pub async fn list(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<Vec<VersionRecord>> {
    let row = find(app, caller, reference, namespace).await?;
    let versions = versions_in(&*app.store, row.id).await?;
    let ids: Vec<BlobId> = versions.values().copied().collect();
    let rows = blobs::by_ids(&*app.store, &ids).await?.into_values().collect();
    let records = blob::records(&*app.store, Some(caller), rows).await?;
    let by_id: HashMap<BlobId, _> = records.into_iter().map(|record| (record.uuid, record)).collect();
    let version = |(index, blob)| Some(VersionRecord { index, blob: by_id.get(&blob)?.clone() });
    Ok(versions.into_iter().filter_map(version).collect())
}

/// Sets how many versions are kept; 0 means the default.
pub async fn set_max_versions(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
    max: i64,
) -> Result<()> {
    let row = find_own(app, caller, reference, namespace).await?;
    let max = if max == 0 { default_max_versions(app) } else { max };
    transaction!(app.store, |tx| {
        if !artifacts::lock(tx, row.id).await? {
            return Err(Error::not_found("artifact").into());
        }
        artifacts::set_max_versions(tx, row.id, max).await?;
        Ok(trim_in(tx, row.id, max).await?)
    })?;
    app.record(
        caller,
        Event::audit(object(row.id), "set max versions request from REST API").with("max_versions", max),
    );
    Ok(())
}

/// Deletes a version. Deleting the last one deletes the artifact.
pub async fn delete(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
    index: &str,
) -> Result<ArtifactRecord> {
    let index: i64 = index.parse().map_err(|_| Error::Invalid("version index is not an integer".into()))?;
    let row = find_own(app, caller, reference, namespace).await?;
    transaction!(app.store, |tx| {
        let absent = || Error::NotFound("artifact index not found".into());
        if !artifacts::lock(tx, row.id).await? {
            return Err(absent().into());
        }
        let versions = versions_in(&mut *tx, row.id).await?;
        let blob = *versions.get(&index).ok_or_else(absent)?;
        drop_in(tx, row.id, index, blob).await?;
        artifacts::clear_fetched(tx, row.id).await?;
        if versions.len() == 1 {
            delete_in(tx, row.id).await?;
        }
        Ok(())
    })?;
    app.record(
        caller,
        Event::audit(object(row.id), "delete version request from REST API").with("index", index),
    );
    get(app, caller, &row.id.to_string(), None).await
}
