//! Uploads: content that a caller sends in pieces, until it becomes an artifact.

use std::sync::Arc;

use muster_types::event::Event;
use muster_types::ids::UploadId;
use muster_types::namespace::NamespaceState;
use muster_types::node::NodeApi;
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::storage::{ByteStream, Draft};
use muster_types::upload::UploadRecord;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::events::clear_events;
use crate::objects::node_location::{NodeLocation, storage_node};
use muster_store::uploads::UploadRow;
use muster_store::{namespaces, nodes, transaction, uploads};

/// The version of the record's format.
const VERSION: i64 = 3;

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
        Ok(uploads::insert(tx, &caller.namespace, node.id).await?)
    })?;
    app.record(caller, Event::audit(object(row.id), "creation request from REST API"));
    Ok(record(&row, node.name.clone(), 0))
}

/// Returns an upload that the caller may continue.
pub async fn find(app: &App, caller: &Caller, id: &str) -> Result<UploadRow> {
    let absent = || Error::not_found("upload");
    let id: UploadId = id.parse().map_err(|_| absent())?;
    let row = uploads::get(&*app.store, id).await?;
    row.filter(|row| !row.ended && caller.may_change(&row.namespace)).ok_or_else(absent)
}

/// Returns the node that stores an upload.
pub async fn locate(app: &App, row: &UploadRow) -> Result<NodeLocation> {
    let node = nodes::get(&*app.store, &NameOrId::Id(row.node)).await?;
    node.map(|node| NodeLocation::of(app, node)).ok_or_else(|| Error::not_found("upload"))
}

/// Returns the record of an upload that a node of this daemon stores.
pub async fn get(node: &Arc<dyn NodeApi>, row: &UploadRow) -> Result<UploadRecord> {
    let size = node.storage().draft_size(Draft::Upload(row.id)).await?.unwrap_or(0);
    Ok(record(row, node.identity().name.clone(), size))
}

/// Appends data to an upload on a node of this daemon. Returns the new size.
pub async fn append(
    app: &App,
    node: &Arc<dyn NodeApi>,
    row: &UploadRow,
    at: Option<u64>,
    data: ByteStream,
) -> Result<u64> {
    node.storage().append(Draft::Upload(row.id), at, max_content_bytes(app), data).await
}

/// Truncates an upload on a node of this daemon.
pub async fn truncate(node: &Arc<dyn NodeApi>, row: &UploadRow, size: u64) -> Result<()> {
    match node.storage().draft_size(Draft::Upload(row.id)).await? {
        None if size == 0 => return Ok(()),
        None => return Err(Error::NotFound("upload has no data".into())),
        Some(now) if size > now => {
            return Err(Error::Invalid("offset is beyond the end of the upload".into()));
        }
        Some(_) => {}
    }
    node.storage().truncate(Draft::Upload(row.id), size).await
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

fn record(row: &UploadRow, node: String, size: u64) -> UploadRecord {
    UploadRecord {
        uuid: row.id,
        state: "created".into(),
        metadata: serde_json::Map::new(),
        version: VERSION,
        node,
        created_at: row.created,
        size,
    }
}
