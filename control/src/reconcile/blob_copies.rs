//! Copies blobs that too few nodes have. Every node decides for itself: all of them put the nodes in the same order
//! for a blob, and those in front that lack it fetch it.

use std::sync::Arc;

use aws_lc_rs::digest;
use futures_util::StreamExt as _;
use muster_types::blob::{BlobState, CopyState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeApi, NodeState};
use muster_types::storage::{ByteStream, Draft};
use muster_types::{Error, Result};

use crate::app::App;
use crate::http::peer;
use crate::objects::key::service_token;
use crate::objects::{blob, upload};
use crate::store::blobs::{self, BlobRow};
use crate::store::nodes::{self, NodeRow};
use crate::store::{blob_locations, transaction};

/// Blobs considered in one pass.
const PASS: i64 = 500;

/// How many copies a blob should have: as many as the setting says, if there are that many nodes.
pub(super) async fn wanted(app: &App) -> Result<i64> {
    Ok(wanted_of(app, living(app).await?.len()))
}

fn wanted_of(app: &App, nodes: usize) -> i64 {
    let factor = i64::try_from(app.settings.blob_replication_factor).unwrap_or(i64::MAX);
    factor.min(i64::try_from(nodes).unwrap_or(i64::MAX))
}

async fn living(app: &App) -> Result<Vec<NodeRow>> {
    let rows = nodes::list(&*app.store).await?;
    Ok(rows.into_iter().filter(|row| row.state == NodeState::Created).collect())
}

/// Fetches what this node should have a copy of; one blob after the other.
pub(super) async fn run(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
    let known = nodes::list(&*app.store).await?;
    // A node that is silent for so long that it is in error may never come back.
    let lost: Vec<NodeId> = known
        .iter()
        .filter(|row| matches!(row.state, NodeState::Error | NodeState::Deleted))
        .map(|row| row.identity.id)
        .collect();
    let living: Vec<NodeRow> = known.into_iter().filter(|row| row.state == NodeState::Created).collect();
    let wanted = wanted_of(app, living.len());
    if wanted < 2 && living.len() < 2 {
        return Ok(());
    }
    for id in blob_locations::scarce(&*app.store, wanted, PASS).await? {
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        let whole = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
        let whole: Vec<NodeId> = whole.filter(|node| !lost.contains(node)).collect();
        let lacking = usize::try_from(wanted).unwrap_or(0).saturating_sub(whole.len());
        let mut order: Vec<NodeId> =
            living.iter().map(|row| row.identity.id).filter(|id| !whole.contains(id)).collect();
        order.sort_by_cached_key(|node| rank(id, *node));
        if whole.is_empty() || !order.iter().take(lacking).any(|id| *id == node.identity().id) {
            continue;
        }
        if let Err(error) = copy(app, node, id, &whole, &living).await {
            tracing::warn!(blob = %id, node = node.identity().name, %error, "a blob was not copied");
        }
    }
    Ok(())
}

/// Makes a copy of a blob on a node that has none. [`Error::NotReady`] while somebody else is at it.
pub(crate) async fn ensure_here(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<()> {
    let here = node.identity().id;
    let whole = || async {
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        let whole = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
        Ok::<Vec<NodeId>, Error>(whole.collect())
    };
    let holders = whole().await?;
    if holders.contains(&here) {
        return Ok(());
    }
    copy(app, node, id, &holders, &living(app).await?).await?;
    if whole().await?.contains(&here) {
        Ok(())
    } else {
        Err(Error::NotReady(format!("blob {id} is on its way to node {}", node.identity().name)))
    }
}

/// Where a node stands in the order for a blob.
fn rank(blob: BlobId, node: NodeId) -> Vec<u8> {
    let text = format!("{blob}{node}");
    digest::digest(&digest::SHA256, text.as_bytes()).as_ref().to_vec()
}

async fn copy(
    app: &App,
    node: &Arc<dyn NodeApi>,
    id: BlobId,
    whole: &[NodeId],
    living: &[NodeRow],
) -> Result<()> {
    let Some(row) = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created) else {
        return Ok(());
    };
    // Somebody stores the same content here just now.
    let Some(_mark) = app.making.begin(node.identity().id, id) else { return Ok(()) };
    let (draft, storage) = (Draft::Copy(id), node.storage());
    let have = storage.draft_size(draft).await?.unwrap_or(0);
    let data = read(app, &row, have, whole, living).await?;
    storage.append(draft, Some(have), upload::most_bytes(app).max(row.content().size), data).await?;
    if storage.content(draft).await? != row.content() {
        storage.remove_draft(draft).await?;
        return Err(Error::Unavailable("what arrived is not what was sent".into()));
    }
    let here = node.identity().id;
    let there = transaction!(app.store, |tx| {
        let row = blobs::get(&mut *tx, id).await?;
        if row.is_none_or(|row| row.state != BlobState::Created) {
            return Ok(false);
        }
        blob_locations::set(tx, id, here, CopyState::Copying).await?;
        Ok(true)
    })?;
    if there {
        // Nobody but this task touches the draft, so it keeps what was compared.
        storage.keep(draft, id).await?;
        transaction!(app.store, |tx| {
            if blobs::get(&mut *tx, id).await?.is_some() {
                blob_locations::set(tx, id, here, CopyState::Complete).await?;
            }
            Ok(())
        })?;
        let event = Event::new(EventType::Status, blob::object(id), "copied to another node");
        app.events.record(event.with("node", node.identity().name.clone()));
    }
    storage.remove_draft(draft).await
}

/// The bytes of a blob from where this node has none yet: from another node of this daemon, or over the network.
async fn read(
    app: &App,
    row: &BlobRow,
    from: u64,
    whole: &[NodeId],
    living: &[NodeRow],
) -> Result<ByteStream> {
    if let Some(near) = app.nodes.iter().find(|node| whole.contains(&node.identity().id)) {
        return near.storage().read(row.id, from..row.content().size).await;
    }
    let holder =
        living.iter().find(|node| whole.contains(&node.identity.id) && !node.report.api_url.is_empty());
    let holder = holder.ok_or_else(|| Error::Unavailable("no node that has it can be reached".into()))?;
    let silent = |error: reqwest::Error| {
        Error::Unavailable(format!("node {} does not answer: {error}", holder.identity.name))
    };
    let token = service_token(app, muster_types::namespace::SYSTEM).await?;
    let url = format!("{}/blobs/{}/data?offset={from}", holder.report.api_url, row.id);
    let client = peer::client(app).map_err(Error::Internal)?;
    let answer =
        client.get(url).bearer_auth(token).send().await.and_then(reqwest::Response::error_for_status);
    let name = holder.identity.name.clone();
    let bytes = answer.map_err(silent)?.bytes_stream().map(move |piece| {
        piece.map_err(|_| Error::Unavailable(format!("node {name} broke the connection off")))
    });
    Ok(Box::pin(bytes))
}
