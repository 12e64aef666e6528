//! Copies a blob to a node of this daemon from a node that has it.

use std::sync::Arc;

use futures_util::StreamExt as _;
use muster_store::blobs::{self, BlobRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::{blob_locations, transaction};
use muster_types::blob::{BlobState, CopyState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeApi, NodeState};
use muster_types::storage::{ByteStream, Draft};
use muster_types::{Error, Result};

use super::key::service_token;
use super::{blob, upload};
use crate::app::App;

/// Returns the nodes that are up.
pub(crate) async fn live_nodes(app: &App) -> Result<Vec<NodeRow>> {
    let rows = nodes::list(&*app.store).await?;
    Ok(rows.into_iter().filter(|row| row.state == NodeState::Created).collect())
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
    let offset = storage.draft_size(draft).await?.unwrap_or(0);
    let data = read(app, &row, offset, complete, live).await?;
    storage.append(draft, Some(offset), upload::max_content_bytes(app).max(row.content().size), data).await?;
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

/// Reads a blob from the offset `from`: from another node of this daemon, or over the network.
async fn read(
    app: &App,
    row: &BlobRow,
    from: u64,
    complete: &[NodeId],
    live: &[NodeRow],
) -> Result<ByteStream> {
    if let Some(local) = app.nodes.iter().find(|node| complete.contains(&node.identity().id)) {
        return local.storage().read(row.id, from..row.content().size).await;
    }
    let source =
        live.iter().find(|node| complete.contains(&node.identity.id) && !node.report.api_url.is_empty());
    let source = source.ok_or_else(|| Error::Unavailable("no node with a copy is reachable".into()))?;
    let unreachable = |error: reqwest::Error| {
        Error::Unavailable(format!("node {} does not respond: {error}", source.identity.name))
    };
    let token = service_token(app, muster_types::namespace::SYSTEM_NAMESPACE).await?;
    let url = format!("{}/blobs/{}/data?offset={from}", source.report.api_url, row.id);
    let client = app.peers.get()?;
    let response =
        client.get(url).bearer_auth(token).send().await.and_then(reqwest::Response::error_for_status);
    let name = source.identity.name.clone();
    let bytes = response.map_err(unreachable)?.bytes_stream().map(move |chunk| {
        chunk.map_err(|_| Error::Unavailable(format!("node {name} closed the connection")))
    });
    Ok(Box::pin(bytes))
}
