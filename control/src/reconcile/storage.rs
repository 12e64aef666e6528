//! Looks after the disks of this daemon's nodes: what the database no longer wants is removed, what it wants is
//! compared with its checksums, and blobs with too few copies are copied.
//!
//! A row comes before its file and goes after it, so every file has a row that explains it. A file without one was
//! left by nobody we know, and is left alone: it may belong to another database.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use muster_types::Result;
use muster_types::blob::{BlobState, CopyState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::NodeApi;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::storage::{Draft, StoredFile, StoredFileKind};
use muster_types::time::now;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::blob_copies;
use crate::app::App;
use crate::objects::blob::{self, NodeRef};
use crate::objects::upload;
use muster_store::{blob_locations, blobs, operations, transaction, uploads};

/// How often disks are looked at.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(2);
/// Nodes that are looked at in one tick.
const NODES_AT_ONCE: usize = 16;
/// Files removed in one look at a node.
const MOST_REMOVALS: usize = 200;
/// Seconds after which a damaged copy is compared once more: the fault may have been the disk's mood.
const SECOND_CHANCE: f64 = 600.0;

/// What is remembered from one look to the next.
#[derive(Debug, Default)]
struct Memory {
    /// Copies whose files were not there.
    missing: HashSet<BlobId>,
    /// Files of fetches that nothing explained.
    idle: HashSet<Draft>,
    /// Files that nobody explains, which were told of.
    told: HashSet<StoredFileKind>,
    /// Comparing and copying, which take long.
    busy: Option<JoinHandle<()>>,
}

/// Looks after the disks until told to stop.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut memories: HashMap<NodeId, Memory> = HashMap::new();
    let mut next = 0;
    while !*stop.borrow() {
        for _ in 0..NODES_AT_ONCE.min(app.nodes.len()) {
            let node = &app.nodes[next % app.nodes.len()];
            next = (next + 1) % app.nodes.len();
            let memory = memories.entry(node.identity().id).or_default();
            if let Err(error) = look(&app, node, memory).await {
                tracing::warn!(node = node.identity().name, %error, "a disk was not looked after");
            }
            begin_long_work(&app, node, memory);
        }
        tokio::select! {
            () = tokio::time::sleep(RECONCILE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
    for task in memories.into_values().filter_map(|memory| memory.busy) {
        task.abort();
    }
}

/// One look at the disks of all nodes, and one step of what takes long.
pub async fn run_once(app: &Arc<App>) -> Result<()> {
    for node in &app.nodes {
        look(app, node, &mut Memory::default()).await?;
        work_long(app, node).await?;
    }
    Ok(())
}

/// Compares and copies beside everything else, one thing at a time for each node.
fn begin_long_work(app: &Arc<App>, node: &Arc<dyn NodeApi>, memory: &mut Memory) {
    if memory.busy.as_ref().is_some_and(|task| !task.is_finished()) {
        return;
    }
    let (app, node) = (Arc::clone(app), Arc::clone(node));
    memory.busy = Some(tokio::spawn(async move {
        if let Err(error) = work_long(&app, &node).await {
            tracing::warn!(node = node.identity().name, %error, "blobs were not compared or copied");
        }
    }));
}

async fn work_long(app: &Arc<App>, node: &Arc<dyn NodeApi>) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
    let every = app.settings.checksum_verification_frequency as f64;
    let (here, store) = (node.identity().id, &*app.store);
    let due = blob_locations::unverified(store, here, CopyState::Complete, now() - every, 1).await?;
    for id in due {
        compare(app, node, id).await?;
    }
    let again = now() - every.min(SECOND_CHANCE);
    for id in blob_locations::unverified(store, here, CopyState::Damaged, again, 1).await? {
        compare(app, node, id).await?;
    }
    blob_copies::run(app, node).await
}

/// Reads a copy from its first to its last byte, and writes down what came of it.
async fn compare(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<()> {
    let Some(row) = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created) else {
        return Ok(());
    };
    match node.storage().verify(id, &row.content()).await? {
        None => {
            let damaged = transaction!(app.store, |tx| {
                let copies = blob_locations::of_blob(&mut *tx, id).await?;
                let own = copies.iter().find(|copy| copy.node == node.identity().id);
                let Some(own) = own else { return Ok(false) };
                blob_locations::set(tx, id, own.node, CopyState::Complete).await?;
                Ok(own.state == CopyState::Damaged)
            })?;
            if damaged {
                let event = Event::new(EventType::Health, blob::object(id), "a damaged copy is whole again");
                app.events.record(event.with("node", node.identity().name.clone()));
            }
            Ok(())
        }
        Some(why) => blob::set_damaged(app, id, &NodeRef::of(node), &why).await,
    }
}

/// Brings the files of a node and the rows together.
async fn look(app: &Arc<App>, node: &Arc<dyn NodeApi>, memory: &mut Memory) -> Result<()> {
    // The files first: what has one has had a row for longer.
    let found = node.storage().list_files().await?;
    let wanted = blob_locations::of_node(&*app.store, node.identity().id).await?;
    let mut look = Look { app, node, memory, wanted, removed: 0 };
    let files: HashSet<StoredFileKind> = found.iter().map(|file| file.kind).collect();
    for file in &found {
        if look.removed >= MOST_REMOVALS {
            return Ok(());
        }
        match file.kind {
            StoredFileKind::Blob(id) => look.blob(id).await?,
            StoredFileKind::Draft(Draft::Upload(_)) => {}
            StoredFileKind::Draft(draft) => look.draft(draft, file).await?,
            StoredFileKind::Conversion(id) => look.conversion(id, file).await?,
        }
    }
    look.absent(&files).await?;
    look.uploads(&found).await
}

struct Look<'a> {
    app: &'a Arc<App>,
    node: &'a Arc<dyn NodeApi>,
    memory: &'a mut Memory,
    wanted: HashMap<BlobId, (CopyState, BlobState)>,
    removed: usize,
}

impl Look<'_> {
    fn here(&self) -> NodeId {
        self.node.identity().id
    }

    async fn forget_copy(&self, id: BlobId) -> Result<()> {
        let here = self.here();
        transaction!(self.app.store, |tx| { Ok(blob_locations::remove(tx, id, here).await?) })
    }

    async fn remove_blob(&mut self, id: BlobId) -> Result<()> {
        self.removed += 1;
        self.node.storage().remove(id).await?;
        self.forget_copy(id).await
    }

    /// A blob's file.
    async fn blob(&mut self, id: BlobId) -> Result<()> {
        if self.app.blobs_in_progress.contains(self.here(), id) {
            return Ok(());
        }
        match self.wanted.get(&id) {
            Some((_, BlobState::Deleted)) => self.remove_blob(id).await,
            Some((_, BlobState::Initial)) => {
                self.removed += 1;
                blob::remove_incomplete(self.app, self.node, id).await
            }
            Some((CopyState::Copying, BlobState::Created)) => self.decide(id).await,
            Some((CopyState::Damaged, BlobState::Created)) => self.replace_damaged(id).await,
            Some((CopyState::Complete, BlobState::Created)) => Ok(()),
            None => match blobs::get(&*self.app.store, id).await?.map(|row| row.state) {
                Some(BlobState::Created) => self.decide(id).await,
                Some(BlobState::Deleted) => self.remove_blob(id).await,
                Some(BlobState::Initial) | None => {
                    self.tell(StoredFileKind::Blob(id));
                    Ok(())
                }
            },
        }
    }

    /// A file that may or may not be what a blob is: it is compared, and then counts as a copy or goes.
    async fn decide(&mut self, id: BlobId) -> Result<()> {
        let Some(row) = blobs::get(&*self.app.store, id).await? else { return Ok(()) };
        let Some(_mark) = self.app.blobs_in_progress.begin(self.here(), id) else { return Ok(()) };
        let here = self.here();
        if self.node.storage().verify(id, &row.content()).await?.is_some() {
            let copies = blob_locations::of_blob(&*self.app.store, id).await?;
            if copies.iter().any(|copy| copy.node != here && copy.state == CopyState::Complete) {
                return self.remove_blob(id).await;
            }
            // Nobody has a better one.
            return transaction!(self.app.store, |tx| {
                Ok(blob_locations::set(tx, id, here, CopyState::Damaged).await?)
            });
        }
        transaction!(self.app.store, |tx| {
            // Not if it was deleted meanwhile.
            if blobs::get(&mut *tx, id).await?.is_some_and(|row| row.state == BlobState::Created) {
                blob_locations::set(tx, id, here, CopyState::Complete).await?;
            }
            Ok(())
        })
    }

    /// A damaged copy is kept for as long as it is the best that there is.
    async fn replace_damaged(&mut self, id: BlobId) -> Result<()> {
        let copies = blob_locations::of_blob(&*self.app.store, id).await?;
        let whole = copies.iter().filter(|copy| copy.state == CopyState::Complete).count();
        let wanted = blob_copies::wanted(self.app).await?;
        if i64::try_from(whole).is_ok_and(|whole| whole >= wanted) {
            self.remove_blob(id).await
        } else {
            Ok(())
        }
    }

    /// The file of a fetch or of a copy.
    async fn draft(&mut self, draft: Draft, file: &StoredFile) -> Result<()> {
        let over = match draft {
            Draft::Upload(_) => false,
            Draft::Copy(id) => !self.app.blobs_in_progress.contains(self.here(), id),
            Draft::Vm(id) => !self.app.drafts_in_progress.contains(self.here(), id),
            Draft::Fetch(id) => {
                operations::get(&*self.app.store, id).await?.is_none_or(|row| row.state.is_final())
            }
        };
        if !over {
            self.memory.idle.remove(&draft);
        } else if self.memory.idle.insert(draft) {
            // The next look decides.
        } else {
            tracing::info!(?draft, bytes = file.size, "a file that is of no use any more is removed");
            self.removed += 1;
            self.node.storage().remove_draft(draft).await?;
            self.memory.idle.remove(&draft);
        }
        Ok(())
    }

    /// A conversion goes with its blob, and when nobody has used it for long.
    async fn conversion(&mut self, id: BlobId, file: &StoredFile) -> Result<()> {
        #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
        let idle = self.app.settings.blob_transcode_maximum_idle_time as f64;
        let wanted = match self.wanted.get(&id) {
            Some((_, state)) => *state == BlobState::Created,
            None => {
                blobs::get(&*self.app.store, id).await?.is_some_and(|row| row.state == BlobState::Created)
            }
        };
        if !wanted || now() - file.modified_at > idle {
            self.removed += 1;
            self.node.storage().remove_conversion(id).await?;
        }
        Ok(())
    }

    /// Copies that have a row and no file.
    async fn absent(&mut self, files: &HashSet<StoredFileKind>) -> Result<()> {
        let mut missing = HashSet::new();
        for (id, (copy, state)) in &self.wanted {
            if files.contains(&StoredFileKind::Blob(*id))
                || self.app.blobs_in_progress.contains(self.here(), *id)
            {
                continue;
            }
            match (copy, state) {
                (_, BlobState::Initial) => blob::remove_incomplete(self.app, self.node, *id).await?,
                (_, BlobState::Deleted) | (CopyState::Copying, BlobState::Created) => {
                    self.forget_copy(*id).await?;
                }
                (CopyState::Damaged, BlobState::Created) => {}
                (CopyState::Complete, BlobState::Created) => {
                    // The row may be newer than the list of files: the next look decides.
                    if self.memory.missing.contains(id) {
                        let node = NodeRef::of(self.node);
                        blob::set_damaged(self.app, *id, &node, "its file is gone").await?;
                    } else {
                        missing.insert(*id);
                    }
                }
            }
        }
        self.memory.missing = missing;
        Ok(())
    }

    /// Uploads that have ended, and those that nobody goes on with.
    async fn uploads(&mut self, found: &[StoredFile]) -> Result<()> {
        #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
        let idle = self.app.settings.upload_maximum_idle_time as f64;
        let files: HashMap<Draft, f64> = found
            .iter()
            .filter_map(|file| match file.kind {
                StoredFileKind::Draft(draft @ Draft::Upload(_)) => Some((draft, file.modified_at)),
                _ => None,
            })
            .collect();
        let mut known = HashSet::new();
        for row in uploads::of_node(&*self.app.store, self.here()).await? {
            let draft = Draft::Upload(row.id);
            known.insert(draft);
            let touched = files.get(&draft).copied().unwrap_or(row.created).max(row.created);
            if !row.ended && now() - touched > idle {
                let ended = transaction!(self.app.store, |tx| { Ok(uploads::end(tx, row.id).await?) })?;
                if ended {
                    let event =
                        Event::new(EventType::Status, upload::object(row.id), "the upload was abandoned");
                    self.app.events.record(event);
                }
            } else if !row.ended {
                continue;
            }
            upload::remove_ended(self.app, self.node, row.id).await?;
        }
        for draft in files.into_keys().filter(|draft| !known.contains(draft)) {
            let Draft::Upload(id) = draft else { continue };
            if uploads::get(&*self.app.store, id).await?.is_none() {
                self.tell(StoredFileKind::Draft(draft));
            }
        }
        Ok(())
    }

    /// Tells of a file that no row explains, once.
    fn tell(&mut self, file: StoredFileKind) {
        if !self.memory.told.insert(file) {
            return;
        }
        tracing::warn!(
            ?file,
            node = self.node.identity().name,
            "no record explains a file; it is left alone"
        );
        let node = ObjectRef::new(ObjectType::Node, self.here());
        let event = Event::new(EventType::Health, node, "no record explains a file, it is left alone");
        self.app.events.record(event.with("file", format!("{file:?}")));
    }
}
