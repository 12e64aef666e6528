//! Blobs: made of drafts, found, read, checked, given up.
//!
//! Knowing a blob's id implies access to it. So an id is told only to who may read one of the artifacts that use the
//! blob, or has sent its bytes: a search by checksum finds nothing else (docs/decisions/0014).

use std::collections::{BTreeMap, HashMap, HashSet};
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
use crate::objects::node::Place;
use crate::state::BlobInProgress;
use muster_store::blobs::{self, BlobRow, NewBlob};
use muster_store::nodes::{self, NodeRow};
use muster_store::references::References;
use muster_store::{
    Read, StoreError, Tx, TxError, artifacts, blob_locations, metadata, references, transaction,
};

/// Version of the record's format.
const VERSION: i64 = 6;
/// Blobs read at once for a list.
const PAGE: i64 = 500;
/// That a blob is read is written down at most this often, in seconds.
const USED_EVERY: f64 = 60.0;

/// How a blob uses the one that it is only whole with.
const DEPENDS_ON: &str = "depends_on";

/// The blob as the subject of events.
pub fn object(id: BlobId) -> ObjectRef {
    ObjectRef::new(ObjectType::Blob, id)
}

/// A draft whose bytes are on disk as those of a blob, which nobody knows of yet.
pub(crate) struct Prepared<'a> {
    blob: BlobId,
    content: ContentDigest,
    image: Option<ImageFacts>,
    node: Arc<dyn NodeApi>,
    /// Whether there was no blob with this content before.
    fresh: bool,
    /// Says that this daemon is at it, if this node had no copy.
    mark: Option<BlobInProgress<'a>>,
}

impl fmt::Debug for Prepared<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("blob", &self.blob)
            .field("fresh", &self.fresh)
            .finish_non_exhaustive()
    }
}

/// What is to become a blob.
#[derive(Debug)]
pub(crate) struct Coming {
    pub(crate) draft: Draft,
    /// Whether it is to be used as a disk image, and so must be one that may be.
    pub(crate) is_image: bool,
    /// When the source says that it last changed.
    pub(crate) modified: Option<String>,
}

/// Puts the bytes of a draft on disk as those of a blob: of the one that holds the same, or of a new one. An image is
/// looked at once nobody can change it any more.
pub(crate) async fn prepare<'a>(
    app: &'a App,
    node: &Arc<dyn NodeApi>,
    coming: &Coming,
) -> Result<Prepared<'a>> {
    let content = node.storage().content(coming.draft).await?;
    let known = blobs::by_content(&*app.store, &content.checksums.sha512).await?;
    let (blob, fresh) = known.map_or_else(|| (BlobId::new(), true), |blob| (blob, false));
    let mut prepared = Prepared { blob, content, image: None, node: Arc::clone(node), fresh, mark: None };
    if !is_here(app, &prepared).await? {
        prepared.mark = Some(app.blobs_in_progress.begin_after_others(node.identity().id, blob).await?);
        if is_here(app, &prepared).await? {
            // Whoever was at it has done it.
            prepared.mark = None;
        }
    }
    match put(app, coming, &mut prepared).await {
        Ok(()) => Ok(prepared),
        Err(error) => {
            discard(app, &prepared).await;
            Err(error)
        }
    }
}

/// Puts the bytes of a draft on disk as those of a new blob with this id, whoever else holds the same.
pub(crate) async fn prepare_as<'a>(
    app: &'a App,
    node: &Arc<dyn NodeApi>,
    coming: &Coming,
    blob: BlobId,
) -> Result<Prepared<'a>> {
    let content = node.storage().content(coming.draft).await?;
    // What an attempt that died left of it is made anew.
    give_up(app, node, blob).await?;
    let mark = Some(app.blobs_in_progress.begin_after_others(node.identity().id, blob).await?);
    let mut prepared = Prepared { blob, content, image: None, node: Arc::clone(node), fresh: true, mark };
    match put(app, coming, &mut prepared).await {
        Ok(()) => Ok(prepared),
        Err(error) => {
            discard(app, &prepared).await;
            Err(error)
        }
    }
}

/// Whether the node has a whole copy.
async fn is_here(app: &App, prepared: &Prepared<'_>) -> Result<bool> {
    let here = prepared.node.identity().id;
    let copies = blob_locations::of_blob(&*app.store, prepared.blob).await?;
    Ok(copies.iter().any(|copy| copy.node == here && copy.state == CopyState::Complete))
}

async fn put(app: &App, coming: &Coming, prepared: &mut Prepared<'_>) -> Result<()> {
    let (blob, here) = (prepared.blob, prepared.node.identity().id);
    let storage = prepared.node.storage();
    if prepared.mark.is_some() {
        // The rows come first: whatever happens next, they explain the file.
        transaction!(app.store, |tx| {
            if prepared.fresh {
                let (content, modified) = (prepared.content.clone(), coming.modified.clone());
                blobs::insert(tx, &NewBlob { id: blob, content, modified, image: None }).await?;
            } else if !blobs::lock(tx, blob).await? {
                return Err(gone().into());
            }
            Ok(blob_locations::set(tx, blob, here, CopyState::Copying).await?)
        })?;
        if storage.keep(coming.draft, blob).await? != prepared.content {
            return Err(Error::Conflict("the content was changed while it was stored".into()));
        }
    }
    if coming.is_image {
        let known = blobs::get(&*app.store, blob).await?.and_then(|row| row.image);
        prepared.image = match known {
            Some(known) => Some(known),
            None => Some(storage.inspect(blob).await?),
        };
    }
    Ok(())
}

fn gone() -> Error {
    Error::Unavailable("a blob with this content was just deleted, please retry".into())
}

/// Makes a prepared blob known, as part of the transaction that also says what uses it. The answer is the blob that
/// holds the content: somebody else may have been faster. Call [`settle`] afterwards.
pub(crate) async fn commit_in(tx: &mut Tx, prepared: &Prepared<'_>) -> Result<BlobId, TxError> {
    let node = prepared.node.identity().id;
    let sha512 = &prepared.content.checksums.sha512;
    let holder = match blobs::by_content(&mut *tx, sha512).await? {
        Some(holder) => {
            if !blobs::lock(tx, holder).await? {
                return Err(StoreError::Conflict("the blob changed".into()).into());
            }
            holder
        }
        None if prepared.fresh => {
            match blobs::insert_content(tx, sha512, prepared.blob).await {
                Err(StoreError::Duplicate(why)) => return Err(StoreError::Conflict(why).into()),
                claimed => claimed?,
            }
            if !blobs::set_created(tx, prepared.blob).await? {
                return Err(Error::Internal(format!("blob {} is not being made", prepared.blob)).into());
            }
            prepared.blob
        }
        None => return Err(gone().into()),
    };
    if holder == prepared.blob && prepared.mark.is_some() {
        blob_locations::set(tx, holder, node, CopyState::Complete).await?;
    }
    if let Some(image) = &prepared.image {
        blobs::set_image(tx, holder, image).await?;
    }
    Ok(holder)
}

/// Makes a blob of [`prepare_as`] known, as part of the transaction that also says what uses it. It may only be whole
/// with another one. Call [`settle`] afterwards.
pub(crate) async fn commit_own_in(
    tx: &mut Tx,
    prepared: &Prepared<'_>,
    base: Option<BlobId>,
) -> Result<(), TxError> {
    let blob = prepared.blob;
    let sha512 = &prepared.content.checksums.sha512;
    if blobs::by_content(&mut *tx, sha512).await?.is_none() && base.is_none() {
        match blobs::insert_content(tx, sha512, blob).await {
            Err(StoreError::Duplicate(why)) => return Err(StoreError::Conflict(why).into()),
            claimed => claimed?,
        }
    }
    if !blobs::set_created(tx, blob).await? {
        return Err(Error::Internal(format!("blob {blob} is not being made")).into());
    }
    blob_locations::set(tx, blob, prepared.node.identity().id, CopyState::Complete).await?;
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

/// What is left to do once [`commit_in`] is committed.
pub(crate) async fn settle(app: &App, prepared: &Prepared<'_>, holder: BlobId) {
    if prepared.fresh && holder != prepared.blob {
        discard(app, prepared).await;
    } else if prepared.fresh {
        app.events
            .record(Event::audit(object(holder), "db record created").with("size", prepared.content.size));
    }
}

/// Gives up a prepared blob that could not be committed.
pub(crate) async fn discard(app: &App, prepared: &Prepared<'_>) {
    if !prepared.fresh {
        // Another copy exists. This one is compared and then kept or removed.
        return;
    }
    let outcome = give_up(app, &prepared.node, prepared.blob).await;
    if let Err(error) = outcome {
        tracing::warn!(blob = %prepared.blob, %error, "what was left of a blob was not removed yet");
    }
}

/// Removes what there is of a blob that never became whole: the file first, for the rows explain it.
pub(crate) async fn give_up(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<()> {
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

/// A blob by its id.
pub async fn find(app: &App, id: &str) -> Result<BlobRow> {
    let id: BlobId = id.parse().map_err(|_| Error::not_found("blob"))?;
    blobs::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("blob"))
}

pub async fn get(app: &App, caller: &Caller, id: &str) -> Result<BlobRecord> {
    let row = find(app, id).await?;
    one(app, caller, row).await
}

/// The next page of all blobs, by id; of one node if it is named.
pub async fn list_page(
    app: &App,
    node: Option<NodeId>,
    after: Option<BlobId>,
) -> Result<(Vec<BlobRecord>, Option<BlobId>)> {
    let rows = blobs::page(&*app.store, node, after, PAGE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE);
    let next = rows.last().filter(|_| full).map(|row| row.id);
    let mut records = records(&*app.store, None, rows).await?;
    records.iter_mut().for_each(|record| record.instances = None);
    Ok((records, next))
}

/// One checksum of a blob; nothing while it is not known.
pub async fn checksum(app: &App, id: &str, algorithm: &str) -> Result<Option<String>> {
    let algorithm = parse_algorithm(algorithm)?;
    let row = find(app, id).await?;
    Ok(Some(row.checksums.get(algorithm).to_owned()).filter(|sum| !sum.is_empty()))
}

/// The blob of a checksum, if the caller may read it already.
pub async fn search(app: &App, caller: &Caller, algorithm: &str, sum: &str) -> Result<Option<BlobRecord>> {
    let algorithm = parse_algorithm(algorithm)?;
    for row in blobs::by_checksum(&*app.store, algorithm, &sum.to_lowercase()).await? {
        if caller.is_system() || blobs::is_readable(&*app.store, row.id, &caller.namespace).await? {
            return one(app, caller, row).await.map(Some);
        }
    }
    Ok(None)
}

fn parse_algorithm(algorithm: &str) -> Result<HashAlgorithm> {
    algorithm.parse().map_err(|_| Error::Invalid("unknown hash algorithm".into()))
}

async fn one(app: &App, caller: &Caller, row: BlobRow) -> Result<BlobRecord> {
    let mut records = records(&*app.store, Some(caller), vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("blob"))
}

/// The records of rows, in few reads however many there are. A caller is shown those uses that it may see.
pub(crate) async fn records<D: Read + Copy>(
    db: D,
    caller: Option<&Caller>,
    rows: Vec<BlobRow>,
) -> Result<Vec<BlobRecord>> {
    let ids: Vec<BlobId> = rows.iter().map(|row| row.id).collect();
    let words: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let mut metadata_of = metadata::of_objects(db, ObjectType::Blob, &words).await?;
    let mut references_of = references::of_objects(db, ObjectType::Blob, &words).await?;
    let mut copies_of = blob_locations::of_blobs(db, &ids).await?;
    let uses = blobs::use_counts(db, &ids).await?;
    let holders: HashSet<NodeId> = copies_of.values().flatten().map(|copy| copy.node).collect();
    let names = nodes::names(db, &holders.into_iter().collect::<Vec<_>>()).await?;
    let mut records = Vec::with_capacity(rows.len());
    for row in rows {
        let id = row.id.to_string();
        let references = references_of.remove(&id).unwrap_or_default();
        let references_to = match caller.filter(|caller| !caller.is_system()) {
            Some(caller) => visible(db, caller, references.to).await?,
            None => references.to,
        };
        let copies = copies_of.remove(&row.id).unwrap_or_default();
        let whole = copies.iter().filter(|copy| copy.state == CopyState::Complete);
        let mut locations: Vec<String> = whole.filter_map(|copy| names.get(&copy.node).cloned()).collect();
        locations.sort_unstable();
        let sums = HashAlgorithm::ALL.iter().map(|word| (*word, row.checksums.get(*word).to_owned()));
        records.push(BlobRecord {
            uuid: row.id,
            state: row.state,
            metadata: metadata_of.remove(&id).unwrap_or_default(),
            version: VERSION,
            size: row.size,
            modified: row.modified,
            fetched_at: row.created,
            depends_on: row.depends_on,
            transcodes: BTreeMap::new(),
            locations,
            reference_count: uses.get(&row.id).copied().unwrap_or(0),
            sha512: Some(row.checksums.sha512.clone()).filter(|sum| !sum.is_empty()),
            checksums: sums.filter(|(_, sum)| !sum.is_empty()).collect(),
            last_used: row.last_used,
            instances: Some(instances(&references_to)),
            image: row.image.as_ref().map(|facts| image_keys(facts, row.size)).unwrap_or_default(),
            references_to,
            references_from: references.from,
        });
    }
    Ok(records)
}

/// The instances among what uses a blob.
fn instances(references: &References) -> Vec<InstanceId> {
    let uses = references.values().flatten();
    let mut ids: Vec<_> = uses
        .filter(|reference| reference.source_object_type == ObjectType::Instance.as_str())
        .filter_map(|reference| reference.source_uuid.parse().ok())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The instances that use each of some blobs, of which a caller may know.
pub(crate) async fn instances_by_blob(
    db: impl Read,
    caller: &Caller,
    users: HashMap<String, references::ObjectReferences>,
) -> Result<HashMap<String, Vec<InstanceId>>> {
    let mut found: HashMap<String, Vec<InstanceId>> =
        users.into_iter().map(|(blob, around)| (blob, instances(&around.to))).collect();
    if !caller.is_system() {
        let all: Vec<String> = found.values().flatten().map(ToString::to_string).collect();
        let seen = muster_store::instances::visible(db, &all, &caller.namespace).await?;
        found.values_mut().for_each(|list| list.retain(|id| seen.contains(&id.to_string())));
    }
    Ok(found)
}

/// Those uses of a blob of which a caller may know.
async fn visible<D: Read + Copy>(db: D, caller: &Caller, references: References) -> Result<References> {
    let of = |kind: ObjectType| -> Vec<String> {
        let uses = references.values().flatten();
        let own = uses.filter(|reference| reference.source_object_type == kind.as_str());
        own.map(|reference| reference.source_uuid.clone()).collect()
    };
    let mut seen = artifacts::visible(db, &of(ObjectType::Artifact), &caller.namespace).await?;
    seen.extend(muster_store::instances::visible(db, &of(ObjectType::Instance), &caller.namespace).await?);
    let kept = references.into_iter().map(|(name, list)| {
        let list: Vec<Reference> =
            list.into_iter().filter(|reference| seen.contains(&reference.source_uuid)).collect();
        (name, list)
    });
    Ok(kept.filter(|(_, list)| !list.is_empty()).collect())
}

/// What the record of a disk image says of it.
fn image_keys(facts: &ImageFacts, size: i64) -> Map<String, Value> {
    let mut keys = facts.further.clone();
    // An optical disc is read as it is.
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

/// A whole blob, and where its bytes can be read.
pub async fn locate(app: &App, id: &str) -> Result<(BlobRow, Place)> {
    let row = find(app, id).await?;
    if row.state != BlobState::Created {
        return Err(Error::not_found("blob"));
    }
    let copies = blob_locations::of_blob(&*app.store, row.id).await?;
    let whole: Vec<NodeId> =
        copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node).collect();
    if let Some(node) = app.nodes.iter().find(|node| whole.contains(&node.identity().id)) {
        return Ok((row, Place::Here(Arc::clone(node))));
    }
    let alive = |node: &NodeRow| node.state == NodeState::Created && whole.contains(&node.identity.id);
    match nodes::list(&*app.store).await?.into_iter().find(alive) {
        Some(node) => Ok((row, Place::There(Box::new(node)))),
        None => Err(Error::NotFound("blob missing".into())),
    }
}

/// Writes down that a blob is read, now and then.
pub async fn note_use(app: &App, row: &BlobRow) {
    if row.last_used.is_some_and(|last| now() - last < USED_EVERY) {
        return;
    }
    let noted = transaction!(app.store, |tx| { Ok(blobs::set_used(tx, row.id).await?) });
    if let Err(error) = noted {
        tracing::warn!(blob = %row.id, %error, "that a blob is used was not written down");
    }
}

/// A node's copy turned out to be damaged: it is not served any more.
pub async fn set_damaged(app: &App, id: BlobId, node: &NodeRef, why: &str) -> Result<()> {
    let news = transaction!(app.store, |tx| {
        let copies = blob_locations::of_blob(&mut *tx, id).await?;
        // One that is gone or being replaced meanwhile is nobody's damage.
        let own = copies.iter().find(|copy| copy.node == node.id && copy.state != CopyState::Copying);
        let Some(own) = own else { return Ok(false) };
        blob_locations::set(tx, id, node.id, CopyState::Damaged).await?;
        Ok(own.state == CopyState::Complete)
    })?;
    if news {
        tracing::error!(blob = %id, node = node.name, why, "a copy of a blob is damaged");
        app.events.record(
            Event::new(EventType::Health, object(id), "a copy of the blob is damaged")
                .also(ObjectRef::new(ObjectType::Node, node.id))
                .with("node", node.name.clone())
                .with("reason", why),
        );
    }
    Ok(())
}

/// A node by id and name.
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
