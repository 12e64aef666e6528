//! Copies a blob to a node of this daemon from a node that has it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use muster_store::blobs::{self, BlobRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::{Read, StoreError, blob_locations, transaction};
use muster_types::blob::{BlobState, CopyState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::node::{NodeApi, NodeState};
use muster_types::storage::{ByteStream, Draft, StorageApi};
use muster_types::{Error, Result};
use reqwest::Method;

use super::service_key::ServiceKey;
use super::{blob, upload};
use crate::app::App;
use crate::peer::{FORWARDED, STALL_TIMEOUT, until_stalled};

/// Returns the nodes that are up.
pub(crate) async fn live_nodes(app: &App) -> Result<Vec<NodeRow>> {
    let rows = nodes::list(&*app.store).await?;
    Ok(rows.into_iter().filter(|row| row.state == NodeState::Created).collect())
}

/// Returns the nodes that keep the copies of blobs that they have: they are up and not drained.
pub(crate) async fn storing_nodes(db: impl Read) -> Result<Vec<NodeId>, StoreError> {
    let rows = nodes::list(db).await?;
    Ok(rows.iter().filter(|row| row.stores_copies()).map(|row| row.identity.id).collect())
}

/// Returns the nodes that are up and have a complete copy of a blob, the nearest first. Call it if no node of this daemon has a
/// copy.
pub async fn live_holders(app: &App, id: BlobId) -> Result<Vec<NodeRow>> {
    let copies = blob_locations::of_blob(&*app.store, id).await?;
    let complete = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
    Ok(nearest_first(app, &live_nodes(app).await?, &complete.collect::<Vec<_>>()).await)
}

/// Returns those nodes of `live` that have a copy, the nearest first.
async fn nearest_first(app: &App, live: &[NodeRow], complete: &[NodeId]) -> Vec<NodeRow> {
    let mut holders: Vec<NodeRow> =
        live.iter().filter(|row| complete.contains(&row.identity.id)).cloned().collect();
    app.peers.sort_by_distance(&mut holders).await;
    holders
}

/// Copies a blob to a node that lacks it. Fails with [`Error::NotReady`] while another task copies it.
pub(crate) async fn ensure_local(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<()> {
    let node_id = node.identity().id;
    let complete = || async {
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        let complete = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
        Ok::<Vec<NodeId>, Error>(complete.collect())
    };
    let sources = complete().await?;
    if sources.contains(&node_id) {
        return Ok(());
    }
    copy(app, node, id, &sources, &live_nodes(app).await?).await?;
    if complete().await?.contains(&node_id) {
        Ok(())
    } else {
        Err(Error::NotReady(format!("blob {id} is being copied to node {}", node.identity().name)))
    }
}

/// Copies a blob from one of the nodes `complete`, unless this daemon is storing the same blob already.
pub(crate) async fn copy(
    app: &App,
    node: &Arc<dyn NodeApi>,
    id: BlobId,
    complete: &[NodeId],
    live: &[NodeRow],
) -> Result<()> {
    let Some(row) = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created) else {
        return Ok(());
    };
    // Another task is storing the same content on this node.
    let Some(_in_progress) = app.blobs_in_progress.begin(node.identity().id, id) else { return Ok(()) };
    let (draft, storage) = (Draft::Copy(id), node.storage());
    receive(app, storage, &row, complete, live).await?;
    if storage.digest(draft).await? != row.content() {
        storage.remove_draft(draft).await?;
        return Err(Error::Unavailable("the received content does not match its checksum".into()));
    }
    let node_id = node.identity().id;
    let exists = transaction!(app.store, |tx| {
        let row = blobs::get(&mut *tx, id).await?;
        if row.is_none_or(|row| row.state != BlobState::Created) {
            return Ok(false);
        }
        blob_locations::set(tx, id, node_id, CopyState::Copying).await?;
        Ok(true)
    })?;
    if exists {
        // Only this task writes the draft, so it still has the verified content.
        storage.commit(draft, id).await?;
        transaction!(app.store, |tx| {
            if blobs::get(&mut *tx, id).await?.is_some() {
                blob_locations::set(tx, id, node_id, CopyState::Complete).await?;
            }
            Ok(())
        })?;
        let event = Event::new(EventType::Status, blob::object(id), "copied to another node");
        app.events.record(event.with("node", node.identity().name.clone()));
    }
    storage.remove_draft(draft).await
}

/// Receives the content of a blob into its draft: from another node of this daemon, or from the other nodes in turn, the
/// nearest first. The next one continues where the last one has failed or stalled.
async fn receive(
    app: &App,
    storage: &dyn StorageApi,
    row: &BlobRow,
    complete: &[NodeId],
    live: &[NodeRow],
) -> Result<()> {
    let (draft, size) = (Draft::Copy(row.id), row.content().size);
    let max_size = upload::max_content_bytes(app).max(size);
    let offset = storage.draft_size(draft).await?.unwrap_or(0);
    if let Some(local) = app.nodes.iter().find(|node| complete.contains(&node.identity().id)) {
        let data = local.storage().read(row.id, offset..size).await?;
        return storage.append(draft, Some(offset), max_size, data).await.map(|_| ());
    }
    let mut failure = Error::Unavailable("no node with a copy is reachable".into());
    for source in nearest_first(app, live, complete).await {
        let offset = storage.draft_size(draft).await?.unwrap_or(0);
        let received = match open(app, &source, row, offset..size).await {
            Ok(data) => storage.append(draft, Some(offset), max_size, data).await.map(|_| ()),
            Err(error) => Err(error),
        };
        match received {
            Err(error @ Error::Unavailable(_)) => failure = error,
            received => return received,
        }
    }
    Err(failure)
}

/// Opens the content of a blob: on a node of this daemon, or else on the nearest other node that responds.
pub(crate) async fn open_anywhere(app: &App, id: BlobId) -> Result<ByteStream> {
    let row = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created);
    let row = row.ok_or_else(|| Error::Unavailable("it does not exist".into()))?;
    let copies = blob_locations::of_blob(&*app.store, id).await?;
    let complete = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
    let (complete, range): (Vec<NodeId>, _) = (complete.collect(), 0..row.content().size);
    if let Some(local) = app.nodes.iter().find(|node| complete.contains(&node.identity().id)) {
        return local.storage().read(id, range).await;
    }
    let mut failure = Error::Unavailable("no node with a copy is reachable".into());
    for source in nearest_first(app, &live_nodes(app).await?, &complete).await {
        match open(app, &source, &row, range.clone()).await {
            Ok(data) => return Ok(data),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Opens a part of a blob on another node.
async fn open(app: &App, source: &NodeRow, row: &BlobRow, range: Range<u64>) -> Result<ByteStream> {
    let name = source.identity.name.clone();
    let unreachable =
        |error: &dyn std::fmt::Display| Error::Unavailable(format!("node {name} does not respond: {error}"));
    if range.is_empty() {
        return Ok(Box::pin(stream::empty()));
    }
    let path = format!("/blobs/{}/data?offset={}&limit={}", row.id, range.start, range.end - range.start);
    let request = app.peers.request(source, Method::GET, &path).await.map_err(|error| unreachable(&error))?;
    let key = ServiceKey::for_daemon(app, SYSTEM_NAMESPACE, vec!["blob.read".to_owned()]).await?;
    let response = app.peers.send(source, request.header(FORWARDED, "1").bearer_auth(key.token())).await;
    key.remove(app).await;
    let response = response.map_err(|error| unreachable(&error))?;
    let response = response.error_for_status().map_err(|error| unreachable(&error))?;
    let bytes = until_stalled(response.bytes_stream(), STALL_TIMEOUT)
        .map(move |chunk| chunk.map_err(|error| Error::Unavailable(format!("node {name}: {error}"))));
    Ok(Box::pin(bytes))
}

/// Reads a part of a blob from the nodes `sources` in turn. The next one continues where the last one has failed or
/// stalled. Fails if none responds.
pub async fn read_remote(
    app: &Arc<App>,
    row: &BlobRow,
    range: Range<u64>,
    sources: Vec<NodeRow>,
) -> Result<ByteStream> {
    let mut reader = RemoteReader {
        app: Arc::clone(app),
        row: row.clone(),
        range,
        sources: sources.into(),
        current: None,
    };
    let first = reader.next().await.transpose()?;
    let rest = stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        match reader.next().await? {
            Ok(bytes) => Some((Ok(bytes), Some(reader))),
            Err(error) => Some((Err(error), None)),
        }
    });
    Ok(Box::pin(stream::iter(first.map(Ok)).chain(rest)))
}

/// A part of a blob that is being read from other nodes.
struct RemoteReader {
    app: Arc<App>,
    row: BlobRow,
    /// What has not been received.
    range: Range<u64>,
    /// The nodes that have not been tried.
    sources: VecDeque<NodeRow>,
    current: Option<ByteStream>,
}

impl RemoteReader {
    async fn next(&mut self) -> Option<Result<Bytes>> {
        let mut failure = Error::Unavailable("no node with a copy is reachable".into());
        while !self.range.is_empty() {
            let Some(current) = &mut self.current else {
                let Some(source) = self.sources.pop_front() else { return Some(Err(failure)) };
                match open(&self.app, &source, &self.row, self.range.clone()).await {
                    Ok(stream) => self.current = Some(stream),
                    Err(error) => failure = error,
                }
                continue;
            };
            match current.next().await {
                Some(Ok(bytes)) => {
                    self.range.start += bytes.len() as u64;
                    return Some(Ok(bytes));
                }
                Some(Err(error)) => failure = error,
                None => {}
            }
            tracing::info!(blob = %self.row.id, "reading a blob from another node");
            self.current = None;
        }
        None
    }
}
