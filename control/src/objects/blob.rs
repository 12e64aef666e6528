//! Blobs: created from drafts, found, read, verified, removed.
//!
//! Knowing a blob's id implies access to it. So an id is only disclosed to callers that may read an artifact of the
//! blob or have sent its content, and a search by checksum finds nothing else. See docs/decisions/0014.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use muster_types::blob::{BlobRecord, BlobState, ContentDigest, CopyState, HashAlgorithm, ImageFacts};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, InstanceId, NodeId};
use muster_types::node::{NodeApi, NodeState};
use muster_types::object::{ObjectRef, ObjectType, Reference};
use muster_types::storage::Draft;
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::metadata;
use crate::objects::node_location::NodeLocation;
use crate::state::BlobInProgress;
use muster_store::blob_namespaces::{self, BlobReceiptRow};
use muster_store::blobs::{self, BlobRow, NewBlob};
use muster_store::nodes::{self, NodeRow};
use muster_store::references::References;
use muster_store::{Read, StoreError, Tx, TxError, blob_locations, references, transaction};

/// The version of the record's format.
const VERSION: i64 = 6;
/// The number of blobs in a page of a list.
const PAGE_SIZE: i64 = 500;

/// The relationship between a blob and the one that it is based on.
const DEPENDS_ON: &str = "depends_on";

/// Returns the blob as the subject of events.
pub fn object(id: BlobId) -> ObjectRef {
    ObjectRef::new(ObjectType::Blob, id)
}

/// A blob whose content is on disk but which is not committed yet. See docs/decisions/0015.
pub(crate) struct PreparedBlob<'a> {
    blob: BlobId,
    content: ContentDigest,
    image: Option<ImageFacts>,
    namespace: String,
    modified: Option<String>,
    node: Arc<dyn NodeApi>,
    /// Whether no other blob has this content.
    is_new: bool,
    /// Marks the blob as being written by this daemon, if this node had no copy.
    in_progress: Option<BlobInProgress<'a>>,
}

impl PreparedBlob<'_> {
    fn new(node: &Arc<dyn NodeApi>, source: &BlobSource, blob: BlobId, content: ContentDigest) -> Self {
        Self {
            blob,
            content,
            image: None,
            namespace: source.namespace.clone(),
            modified: source.modified.clone(),
            node: Arc::clone(node),
            is_new: true,
            in_progress: None,
        }
    }

    async fn receive_in(&self, tx: &mut Tx, blob: BlobId) -> Result<(), StoreError> {
        blob_namespaces::receive(tx, blob, &self.namespace, self.modified.as_deref()).await
    }
}

impl fmt::Debug for PreparedBlob<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedBlob")
            .field("blob", &self.blob)
            .field("fresh", &self.is_new)
            .finish_non_exhaustive()
    }
}

/// A draft that becomes a blob.
#[derive(Debug)]
pub(crate) struct BlobSource {
    pub(crate) draft: Draft,
    /// The namespace that sent or fetched it.
    pub(crate) namespace: String,
    /// Whether it is a disk image, which must pass inspection.
    pub(crate) is_image: bool,
    /// When the source was last modified, according to the source.
    pub(crate) modified: Option<String>,
}

/// Stores a draft as a blob: as the existing one with the same content, or as a new one. An image is inspected once it
/// can no longer change.
pub(crate) async fn prepare<'a>(
    app: &'a App,
    node: &Arc<dyn NodeApi>,
    source: &BlobSource,
) -> Result<PreparedBlob<'a>> {
    let content = node.storage().digest(source.draft).await?;
    let existing = blobs::by_content(&*app.store, &content.checksums.sha512).await?;
    let (blob, is_new) = existing.map_or_else(|| (BlobId::new(), true), |blob| (blob, false));
    let mut prepared = PreparedBlob::new(node, source, blob, content);
    prepared.is_new = is_new;
    if !has_local_copy(app, &prepared).await? {
        prepared.in_progress =
            Some(app.blobs_in_progress.begin_after_others(node.identity().id, blob).await?);
        if has_local_copy(app, &prepared).await? {
            // The task that was writing it has completed.
            prepared.in_progress = None;
        }
    }
    match store_draft(app, source, &mut prepared).await {
        Ok(()) => Ok(prepared),
        Err(error) => {
            discard(app, &prepared).await;
            Err(error)
        }
    }
}

/// Stores a draft as a new blob with the given id, even if another blob has the same content.
pub(crate) async fn prepare_as<'a>(
    app: &'a App,
    node: &Arc<dyn NodeApi>,
    source: &BlobSource,
    blob: BlobId,
) -> Result<PreparedBlob<'a>> {
    let content = node.storage().digest(source.draft).await?;
    // Removes what a failed attempt left behind.
    remove_incomplete(app, node, blob).await?;
    let mut prepared = PreparedBlob::new(node, source, blob, content);
    prepared.in_progress = Some(app.blobs_in_progress.begin_after_others(node.identity().id, blob).await?);
    match store_draft(app, source, &mut prepared).await {
        Ok(()) => Ok(prepared),
        Err(error) => {
            discard(app, &prepared).await;
            Err(error)
        }
    }
}

/// Returns whether the node has a complete copy.
async fn has_local_copy(app: &App, prepared: &PreparedBlob<'_>) -> Result<bool> {
    let node_id = prepared.node.identity().id;
    let copies = blob_locations::of_blob(&*app.store, prepared.blob).await?;
    Ok(copies.iter().any(|copy| copy.node == node_id && copy.state == CopyState::Complete))
}

async fn store_draft(app: &App, source: &BlobSource, prepared: &mut PreparedBlob<'_>) -> Result<()> {
    let (blob, node_id) = (prepared.blob, prepared.node.identity().id);
    let storage = prepared.node.storage();
    if prepared.in_progress.is_some() {
        // The rows come first, so that they account for the file whatever happens next.
        transaction!(app.store, |tx| {
            if prepared.is_new {
                let (content, modified) = (prepared.content.clone(), source.modified.clone());
                blobs::insert(tx, &NewBlob { id: blob, content, modified, image: None }).await?;
            } else if !blobs::lock(tx, blob).await? {
                return Err(content_deleted().into());
            }
            Ok(blob_locations::set(tx, blob, node_id, CopyState::Copying).await?)
        })?;
        if storage.commit(source.draft, blob).await? != prepared.content {
            return Err(Error::Conflict("the content changed while it was stored".into()));
        }
    }
    if source.is_image {
        let existing = blobs::get(&*app.store, blob).await?.and_then(|row| row.image);
        prepared.image = match existing {
            Some(existing) => Some(existing),
            None => Some(storage.inspect(&source.namespace, blob).await?),
        };
    }
    Ok(())
}

fn content_deleted() -> Error {
    Error::Unavailable("a blob with this content was just deleted, please retry".into())
}

/// Commits a prepared blob, as part of the transaction that adds its users. Returns the blob with this content, which
/// may be one that was committed concurrently. Call [`finish_commit`] afterwards.
pub(crate) async fn commit_in(tx: &mut Tx, prepared: &PreparedBlob<'_>) -> Result<BlobId, TxError> {
    let node = prepared.node.identity().id;
    let sha512 = &prepared.content.checksums.sha512;
    let committed = match blobs::by_content(&mut *tx, sha512).await? {
        Some(committed) => {
            if !blobs::lock(tx, committed).await? {
                return Err(StoreError::Conflict("the blob changed".into()).into());
            }
            committed
        }
        None if prepared.is_new => {
            match blobs::insert_content(tx, sha512, prepared.blob).await {
                Err(StoreError::Duplicate(reason)) => return Err(StoreError::Conflict(reason).into()),
                inserted => inserted?,
            }
            if !blobs::set_created(tx, prepared.blob).await? {
                return Err(Error::Internal(format!("blob {} is not being created", prepared.blob)).into());
            }
            prepared.blob
        }
        None => return Err(content_deleted().into()),
    };
    if committed == prepared.blob && prepared.in_progress.is_some() {
        blob_locations::set(tx, committed, node, CopyState::Complete).await?;
    }
    if let Some(image) = &prepared.image {
        blobs::set_image(tx, committed, image).await?;
    }
    prepared.receive_in(tx, committed).await?;
    Ok(committed)
}

/// Commits a blob of [`prepare_as`], as part of the transaction that adds its users. `base` is the blob that it is
/// based on. Call [`finish_commit`] afterwards.
pub(crate) async fn commit_with_id_in(
    tx: &mut Tx,
    prepared: &PreparedBlob<'_>,
    base: Option<BlobId>,
) -> Result<(), TxError> {
    let blob = prepared.blob;
    let sha512 = &prepared.content.checksums.sha512;
    if blobs::by_content(&mut *tx, sha512).await?.is_none() && base.is_none() {
        match blobs::insert_content(tx, sha512, blob).await {
            Err(StoreError::Duplicate(reason)) => return Err(StoreError::Conflict(reason).into()),
            inserted => inserted?,
        }
    }
    if !blobs::set_created(tx, blob).await? {
        return Err(Error::Internal(format!("blob {blob} is not being created")).into());
    }
    blob_locations::set(tx, blob, prepared.node.identity().id, CopyState::Complete).await?;
    prepared.receive_in(tx, blob).await?;
    if let Some(image) = &prepared.image {
        blobs::set_image(tx, blob, image).await?;
    }
    if let Some(base) = base {
        if !blobs::lock(tx, base).await? {
            return Err(Error::not_found("blob").into());
        }
        blobs::set_depends_on(tx, blob, base).await?;
        references::insert(tx, &object(blob), DEPENDS_ON, None, &object(base)).await?;
    }
    Ok(())
}

/// Finishes a blob after the transaction of [`commit_in`] is committed.
pub(crate) async fn finish_commit(app: &App, prepared: &PreparedBlob<'_>, committed: BlobId) {
    if prepared.is_new && committed != prepared.blob {
        discard(app, prepared).await;
    }
    // Recorded for content that others sent before, too: the namespace must not see a difference.
    let mut created =
        Event::audit(object(committed), "db record created").with("size", prepared.content.size);
    created.namespace = Some(prepared.namespace.clone());
    app.events.record(created);
}

/// Removes a prepared blob that was not committed.
pub(crate) async fn discard(app: &App, prepared: &PreparedBlob<'_>) {
    if !prepared.is_new {
        // The blob existed before. The storage reconciler verifies this copy and keeps or removes it.
        return;
    }
    let outcome = remove_incomplete(app, &prepared.node, prepared.blob).await;
    if let Err(error) = outcome {
        tracing::warn!(blob = %prepared.blob, %error, "failed to remove incomplete blob");
    }
}

/// Removes an incomplete blob: the file first, because only the rows refer to it.
pub(crate) async fn remove_incomplete(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<()> {
    let initial = blobs::get(&*app.store, id).await?.is_none_or(|row| row.state == BlobState::Initial);
    if !initial {
        return Ok(());
    }
    node.storage().remove(id).await?;
    transaction!(app.store, |tx| {
        let row = blobs::get(&mut *tx, id).await?;
        if row.is_none_or(|row| row.state == BlobState::Initial) {
            blob_locations::remove(tx, id, node.identity().id).await?;
            blobs::remove(tx, id).await?;
        }
        Ok(())
    })
}

/// Returns a blob by its id.
pub async fn find(app: &App, id: &str) -> Result<BlobRow> {
    let id: BlobId = id.parse().map_err(|_| Error::not_found("blob"))?;
    blobs::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("blob"))
}

pub async fn get(app: &App, caller: &Caller, id: &str) -> Result<BlobRecord> {
    let row = find(app, id).await?;
    to_record(app, caller, row).await
}

/// Deletes a blob that the caller has sent, now instead of after `BLOB_DELETION_DELAY`. It is kept if it is in use or if
/// another namespace has sent the same content, which the caller does not learn.
pub async fn delete(app: &App, caller: &Caller, id: &str) -> Result<()> {
    let absent = || Error::not_found("blob");
    let id = find(app, id).await?.id;
    let deleted = transaction!(app.store, |tx| {
        let receivers = blob_namespaces::receivers(&mut *tx, id).await?;
        if !caller.is_system() && !receivers.contains(&caller.namespace) {
            return Err(absent().into());
        }
        let is_foreign = receivers.iter().any(|receiver| *receiver != caller.namespace);
        if is_foreign || blobs::is_used(&mut *tx, id).await? {
            return Ok(false);
        }
        let row = blobs::get(&mut *tx, id).await?.ok_or_else(absent)?;
        let deleted = blobs::delete(tx, &row).await?;
        if deleted {
            references::remove_from(tx, &object(id)).await?;
        }
        Ok(deleted)
    })?;
    if deleted {
        let event = Event::new(EventType::Mutate, object(id), "state is now deleted");
        app.record(caller, event.with("reason", "request from REST API"));
    }
    Ok(())
}

/// Returns the next page of the blobs, by id; with `node`, only those on that node.
pub async fn list_page(
    app: &App,
    node: Option<NodeId>,
    after: Option<BlobId>,
) -> Result<(Vec<BlobRecord>, Option<BlobId>)> {
    let rows = blobs::page(&*app.store, node, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.id);
    let mut records = records(&*app.store, None, rows).await?;
    records.iter_mut().for_each(|record| record.instances = None);
    Ok((records, next))
}

/// Returns a checksum of a blob, `None` if it is not known yet.
pub async fn checksum(app: &App, id: &str, algorithm: &str) -> Result<Option<String>> {
    let algorithm = parse_algorithm(algorithm)?;
    let row = find(app, id).await?;
    Ok(Some(row.checksums.get(algorithm).to_owned()).filter(|checksum| !checksum.is_empty()))
}

/// Returns the blob with a checksum, if the caller may read it.
pub async fn search(
    app: &App,
    caller: &Caller,
    algorithm: &str,
    checksum: &str,
) -> Result<Option<BlobRecord>> {
    let algorithm = parse_algorithm(algorithm)?;
    for row in blobs::by_checksum(&*app.store, algorithm, &checksum.to_lowercase()).await? {
        if caller.is_system() || blobs::is_readable(&*app.store, row.id, &caller.namespace).await? {
            return to_record(app, caller, row).await.map(Some);
        }
    }
    Ok(None)
}

fn parse_algorithm(algorithm: &str) -> Result<HashAlgorithm> {
    algorithm.parse().map_err(|_| Error::Invalid("unknown hash algorithm".into()))
}

async fn to_record(app: &App, caller: &Caller, row: BlobRow) -> Result<BlobRecord> {
    let mut records = records(&*app.store, Some(caller), vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("blob"))
}

/// Returns the records of rows, with a constant number of queries. Callers see only the users that they may read.
pub(crate) async fn records<D: Read + Copy>(
    db: D,
    caller: Option<&Caller>,
    rows: Vec<BlobRow>,
) -> Result<Vec<BlobRecord>> {
    let ids: Vec<BlobId> = rows.iter().map(|row| row.id).collect();
    let seen_by = caller.filter(|caller| !caller.is_system()).map(|caller| caller.namespace.as_str());
    let mut details = blobs::details(db, &ids, seen_by).await?;
    let mut metadata_of = metadata::by_blob(caller, details.metadata);
    let mut records = Vec::with_capacity(rows.len());
    for mut row in rows {
        let references = details.references.remove(&row.id.to_string()).unwrap_or_default();
        if seen_by.is_some() {
            let receipt = details.receipts.remove(&row.id);
            hide_foreign_times(&mut row, receipt, &references.to);
        }
        // It is in use as long as an instance has a disk on it.
        let users = instances(&references.to);
        let checksums =
            HashAlgorithm::ALL.iter().map(|algorithm| (*algorithm, row.checksums.get(*algorithm).to_owned()));
        records.push(BlobRecord {
            uuid: row.id,
            state: row.state,
            metadata: metadata_of.remove(&row.id).unwrap_or_default(),
            version: VERSION,
            size: row.size,
            modified: row.modified,
            fetched_at: row.created,
            depends_on: row.depends_on,
            transcodes: BTreeMap::new(),
            locations: details.locations.remove(&row.id).unwrap_or_default(),
            reference_count: use_count(&references.to),
            sha512: Some(row.checksums.sha512.clone()).filter(|checksum| !checksum.is_empty()),
            checksums: checksums.filter(|(_, checksum)| !checksum.is_empty()).collect(),
            last_used: if users.is_empty() { row.last_used } else { Some(now()) },
            instances: Some(users),
            image: row.image.as_ref().map(|facts| image_keys(facts, row.size)).unwrap_or_default(),
            references_to: references.to,
            references_from: references.from,
        });
    }
    Ok(records)
}

/// Replaces the times of a blob by those of its receipt, or else of the visible users. The caller does not learn when
/// others sent or used the same content; without a visible user it only sees that the blob exists.
fn hide_foreign_times(row: &mut BlobRow, receipt: Option<BlobReceiptRow>, users: &References) {
    (row.created, row.modified, row.last_used) = match receipt {
        Some(receipt) => (receipt.received, receipt.modified, receipt.last_used),
        None => {
            let first = users.values().flatten().map(|user| user.created).min_by(f64::total_cmp);
            let last = users.values().flatten().map(|user| user.last_active).max_by(f64::total_cmp);
            (first.unwrap_or_default(), None, last)
        }
    };
}

/// Returns the instances among the users of a blob.
pub(crate) fn instances(references: &References) -> Vec<InstanceId> {
    let uses = references.values().flatten();
    let mut ids: Vec<_> = uses
        .filter(|reference| reference.source_object_type == ObjectType::Instance.as_str())
        .filter_map(|reference| reference.source_uuid.parse().ok())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Returns the number of uses of a blob. Operations do not count.
pub(crate) fn use_count(references: &References) -> i64 {
    let is_operation =
        |reference: &Reference| reference.source_object_type == ObjectType::ClusterOperation.as_str();
    let uses = references.values().flatten().filter(|reference| !is_operation(reference));
    i64::try_from(uses.count()).unwrap_or(i64::MAX)
}

/// Returns the fields of the record that describe a disk image.
fn image_keys(facts: &ImageFacts, size: i64) -> Map<String, Value> {
    let mut keys = facts.format_details.clone();
    // Optical discs are attached as raw images.
    let format = match facts.format {
        muster_types::blob::ImageFormat::Iso => "raw",
        format => format.as_str(),
    };
    keys.insert("file format".into(), json!(format));
    keys.insert("virtual size".into(), json!(facts.virtual_size));
    keys.insert("disk size".into(), json!(size));
    // The existing clients read both spellings.
    keys.insert("mime-type".into(), json!(facts.mime_type()));
    keys.insert("mime type".into(), json!(facts.mime_type()));
    keys
}

/// Returns a complete blob and a node to read it from.
pub async fn locate(app: &App, id: &str) -> Result<(BlobRow, NodeLocation)> {
    let row = find(app, id).await?;
    if row.state != BlobState::Created {
        return Err(Error::not_found("blob"));
    }
    let copies = blob_locations::of_blob(&*app.store, row.id).await?;
    let complete: Vec<NodeId> =
        copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node).collect();
    if let Some(node) = app.nodes.iter().find(|node| complete.contains(&node.identity().id)) {
        return Ok((row, NodeLocation::Local(Arc::clone(node))));
    }
    let alive = |node: &NodeRow| node.state == NodeState::Created && complete.contains(&node.identity.id);
    match nodes::list(&*app.store).await?.into_iter().find(alive) {
        Some(node) => Ok((row, NodeLocation::Remote(Box::new(node)))),
        None => Err(Error::NotFound("blob missing".into())),
    }
}

/// Records that the caller uses a blob, at most once per interval.
pub async fn record_use(app: &App, caller: &Caller, row: &BlobRow) {
    if !app.blob_uses.begin(row.id, &caller.namespace) {
        return;
    }
    let recorded = transaction!(app.store, |tx| {
        blobs::set_used(tx, row.id).await?;
        Ok(blob_namespaces::set_used(tx, row.id, &caller.namespace).await?)
    });
    if let Err(error) = recorded {
        app.blob_uses.forget(row.id, &caller.namespace);
        tracing::warn!(blob = %row.id, %error, "failed to record use of blob");
    }
}

/// Marks a node's copy as damaged, so that it is no longer served.
pub async fn set_damaged(app: &App, id: BlobId, node: &NodeRef, reason: &str) -> Result<()> {
    let newly_damaged = transaction!(app.store, |tx| {
        let copies = blob_locations::of_blob(&mut *tx, id).await?;
        // A copy that was removed or is being replaced is not damaged.
        let own = copies.iter().find(|copy| copy.node == node.id && copy.state != CopyState::Copying);
        let Some(own) = own else { return Ok(false) };
        blob_locations::set(tx, id, node.id, CopyState::Damaged).await?;
        Ok(own.state == CopyState::Complete)
    })?;
    if newly_damaged {
        tracing::error!(blob = %id, node = node.name, reason, "copy of blob is damaged");
        app.events.record(
            Event::new(EventType::Health, object(id), "a copy of the blob is damaged")
                .with_object(ObjectRef::new(ObjectType::Node, node.id))
                .with("node", node.name.clone())
                .with("reason", reason),
        );
    }
    Ok(())
}

/// The id and the name of a node.
#[derive(Debug, Clone)]
pub struct NodeRef {
    pub(crate) id: NodeId,
    pub(crate) name: String,
}

impl NodeRef {
    pub fn of(node: &Arc<dyn NodeApi>) -> Self {
        Self { id: node.identity().id, name: node.identity().name.clone() }
    }
}
