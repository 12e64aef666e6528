//! Uploads: content that a caller sends in pieces, until it becomes an artifact.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use muster_types::event::Event;
use muster_types::ids::UploadId;
use muster_types::namespace::NamespaceState;
use muster_types::node::NodeApi;
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::storage::{ByteStream, Draft};
use muster_types::upload::UploadRecord;
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::events::clear_events;
use crate::objects::node_location::{NodeLocation, storage_node};
use crate::objects::quota::{self, UploadReservation};
use muster_store::uploads::UploadRow;
use muster_store::{Store, metadata, namespaces, nodes, transaction, uploads};

/// The version of the record's format.
const VERSION: i64 = 3;
/// The number of bytes to reserve at a time for data of unknown size.
const RESERVE_BYTES: i64 = 64 << 20;

/// Returns the upload as the subject of events.
pub(crate) fn object(id: UploadId) -> ObjectRef {
    ObjectRef::new(ObjectType::Upload, id)
}

/// Creates an upload that a node of this daemon stores.
pub async fn create(app: &App, caller: &Caller) -> Result<UploadRecord> {
    let node = storage_node(app)?.identity();
    let row = transaction!(app.store, |tx| {
        // The lock keeps a concurrently deleted namespace from leaving the upload behind.
        if !namespaces::lock(tx, &caller.namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        quota::require_in(app, tx, &caller.namespace, &[(QuotaName::Uploads, 1)]).await?;
        Ok(uploads::insert(tx, &caller.namespace, node.id).await?)
    })?;
    app.record(caller, Event::audit(object(row.id), "creation request from REST API"));
    Ok(record(&row, node.name.clone(), 0, Map::new()))
}

/// Returns an upload that the caller may continue.
pub async fn find(app: &App, caller: &Caller, id: &str) -> Result<UploadRow> {
    let absent = || Error::not_found("upload");
    let id: UploadId = id.parse().map_err(|_| absent())?;
    let row = uploads::get(&*app.store, id).await?;
    row.filter(|row| !row.ended && caller.may_change(&row.namespace)).ok_or_else(absent)
}

/// Returns the upload as the subject of metadata.
pub async fn subject(app: &App, caller: &Caller, id: &str) -> Result<ObjectRef> {
    Ok(object(find(app, caller, id).await?.id))
}

/// Returns the node that stores an upload.
pub async fn locate(app: &App, row: &UploadRow) -> Result<NodeLocation> {
    if let Some(own) = app.nodes.iter().find(|own| own.identity().id == row.node) {
        return Ok(NodeLocation::Local(Arc::clone(own)));
    }
    let node = nodes::get(&*app.store, &NameOrId::Id(row.node)).await?;
    node.map(|node| NodeLocation::Remote(Box::new(node))).ok_or_else(|| Error::not_found("upload"))
}

/// Returns the record of an upload that a node of this daemon stores.
pub async fn get(app: &App, node: &Arc<dyn NodeApi>, row: &UploadRow) -> Result<UploadRecord> {
    let size = node.storage().draft_size(Draft::Upload(row.id)).await?.unwrap_or(0);
    let metadata = metadata::get(&*app.store, ObjectType::Upload, &row.id.to_string()).await?;
    Ok(record(row, node.identity().name.clone(), size, metadata))
}

/// Appends data to an upload on a node of this daemon. Returns the new size. `length` is the size of the data, if it is
/// known.
pub async fn append(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &UploadRow,
    at: Option<u64>,
    length: Option<u64>,
    data: ByteStream,
) -> Result<u64> {
    // The next request then sees the size that this one results in.
    let _lock = app.upload_locks.lock(row.id).await;
    let current = uploads::get(&*app.store, row.id).await?.filter(|row| !row.ended);
    let current = current.ok_or_else(|| Error::not_found("upload"))?;
    caller.deadline.require_waiting()?;
    if current.truncations != row.truncations {
        let text = "the upload was truncated while this part was received";
        return Err(Error::Conflict(text.into()));
    }
    let reservation = UploadReservation {
        upload: row.id,
        namespace: row.namespace.clone(),
        limit: quota::upload_bytes_limit(app, &row.namespace).await?,
    };
    let size = column(node.storage().draft_size(Draft::Upload(row.id)).await?.unwrap_or(0))?;
    let step = length.map_or(Ok(RESERVE_BYTES), column)?.min(column(max_content_bytes(app))?);
    let metered =
        MeteredData { store: Arc::clone(&app.store), reservation, data, size, step, reserved: current.bytes };
    let data: ByteStream = Box::pin(stream::try_unfold(metered, MeteredData::next));
    let outcome = node.storage().append(Draft::Upload(row.id), at, max_content_bytes(app), data).await;
    release_reservation(app, node, row.id).await?;
    outcome
}

/// Data whose size is reserved before it is passed on, so that the uploads of a namespace never exceed its quota.
struct MeteredData {
    store: Arc<Store>,
    reservation: UploadReservation,
    data: ByteStream,
    /// The size of the upload with the data passed on so far.
    size: i64,
    reserved: i64,
    /// The number of bytes to reserve at a time.
    step: i64,
}

impl MeteredData {
    async fn next(mut self) -> Result<Option<(Bytes, Self)>> {
        let Some(chunk) = self.data.next().await.transpose()? else { return Ok(None) };
        let needed = self.size.saturating_add(column(chunk.len() as u64)?);
        if needed > self.reserved {
            let wanted = needed.max(self.size.saturating_add(self.step));
            self.reserved = self.reservation.grow(&self.store, self.reserved, needed, wanted).await?;
        }
        self.size = needed;
        Ok(Some((chunk, self)))
    }
}

/// Sets the reserved size of an upload to the actual one. The caller has locked the upload.
async fn release_reservation(app: &App, node: &Arc<dyn NodeApi>, id: UploadId) -> Result<()> {
    let size = column(node.storage().draft_size(Draft::Upload(id)).await?.unwrap_or(0))?;
    let reserved = uploads::get(&*app.store, id).await?.map(|row| row.bytes);
    if reserved.is_some_and(|reserved| reserved != size) {
        transaction!(app.store, |tx| { Ok(uploads::set_bytes(tx, id, size).await?) })?;
    }
    Ok(())
}

fn column(bytes: u64) -> Result<i64> {
    i64::try_from(bytes).map_err(|_| Error::TooLarge(format!("{bytes} bytes are too many")))
}

/// Truncates an upload on a node of this daemon.
pub async fn truncate(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &UploadRow,
    size: u64,
) -> Result<()> {
    match node.storage().draft_size(Draft::Upload(row.id)).await? {
        None if size == 0 => return Ok(()),
        None => return Err(Error::NotFound("upload has no data".into())),
        Some(now) if size > now => {
            return Err(Error::Invalid("offset is beyond the end of the upload".into()));
        }
        Some(_) => {}
    }
    caller.deadline.require_waiting()?;
    // Rejects appends that wait for the lock, and interrupts the running one, which holds it.
    transaction!(app.store, |tx| { Ok(uploads::count_truncation(tx, row.id).await?) })?;
    node.storage().truncate(Draft::Upload(row.id), size).await?;
    let _lock = app.upload_locks.lock(row.id).await;
    release_reservation(app, node, row.id).await
}

/// Removes an upload that has ended: the file first, because only the row refers to it.
pub(crate) async fn remove_ended(app: &App, node: &Arc<dyn NodeApi>, id: UploadId) -> Result<()> {
    node.storage().remove_draft(Draft::Upload(id)).await?;
    clear_events(&app.store, &object(id)).await?;
    transaction!(app.store, |tx| { Ok(uploads::remove(tx, id).await?) })
}

/// Returns the maximum size of stored content.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size, and the cast saturates")]
pub(crate) fn max_content_bytes(app: &App) -> u64 {
    (app.settings.max_image_size_gb * f64::from(1 << 30)) as u64
}

fn record(row: &UploadRow, node: String, size: u64, metadata: Map<String, Value>) -> UploadRecord {
    UploadRecord {
        uuid: row.id,
        state: "created".into(),
        metadata,
        version: VERSION,
        node,
        created_at: row.created,
        size,
    }
}
