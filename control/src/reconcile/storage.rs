//! Reconciles the files of this daemon's nodes with the database: removes unwanted files, verifies checksums, replicates
//! blobs that have too few copies, and removes surplus copies.
//!
//! A row is written before its file and removed after it, so every file has a row. A file without a row may belong to
//! another database and is ignored. See docs/decisions/0015.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::Result;
use muster_types::blob::{BlobState, CopyState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeApi, NodeState};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::settings::Settings;
use muster_types::storage::{Draft, StoredFile, StoredFileKind};
use muster_types::time::now;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::blob_copies;
use crate::app::App;
use crate::objects::blob::{self, NodeRef};
use crate::objects::upload;
use muster_store::blob_locations::NodeCopy;
use muster_store::uploads::UploadRow;
use muster_store::{blob_locations, blobs, operations, transaction, uploads};

/// The longest interval between passes over the nodes while no blob changes.
const MAX_RECONCILE_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest interval between passes.
const MIN_RECONCILE_INTERVAL: Duration = Duration::from_secs(2);
/// The maximum number of complete copies of a node that are verified in one pass.
const MAX_VERIFICATIONS: usize = 10;
/// How often surplus copies are removed.
const TRIM_INTERVAL: Duration = Duration::from_secs(300);
/// The age of the rows of the nodes by which a pass decides where copies are missing.
const NODES_TTL: Duration = Duration::from_secs(30);
/// The maximum number of nodes per pass.
const NODES_PER_PASS: usize = 16;
/// The maximum number of files removed from a node in one pass.
const MAX_REMOVALS: usize = 200;
/// The time in seconds after which a damaged copy is verified again: the read error may have been transient.
const DAMAGED_RECHECK_DELAY: f64 = 600.0;

/// Returns the interval between passes: `CHECKSUM_VERIFICATION_FREQUENCY`, between two seconds and a minute.
pub(super) fn interval(settings: &Settings) -> Duration {
    let interval = Duration::from_secs(settings.checksum_verification_frequency);
    interval.clamp(MIN_RECONCILE_INTERVAL, MAX_RECONCILE_INTERVAL)
}

/// In-memory state kept per node between passes.
#[derive(Debug, Default)]
struct StorageState {
    /// The copies that are due for verification, those that were verified first come first.
    due: Vec<(BlobId, CopyState)>,
    /// Complete copies whose files the last pass did not find.
    missing: HashSet<BlobId>,
    /// Drafts that the last pass found unused.
    unused_drafts: HashSet<Draft>,
    /// Files without a record that were already reported.
    reported: HashSet<StoredFileKind>,
    /// The task that verifies and replicates blobs.
    background: Option<JoinHandle<()>>,
    /// When surplus copies were last removed.
    trimmed: Option<Instant>,
}

/// Reconciles storage until `stop` is set.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut states: HashMap<NodeId, StorageState> = HashMap::new();
    let mut next = 0;
    while !*stop.borrow() {
        for _ in 0..NODES_PER_PASS.min(app.nodes.len()) {
            let node = &app.nodes[next % app.nodes.len()];
            next = (next + 1) % app.nodes.len();
            let state = states.entry(node.identity().id).or_default();
            let started = Instant::now();
            let outcome = reconcile_node(&app, node, state).await;
            app.metrics.passed("storage", started, outcome.is_ok());
            if let Err(error) = outcome {
                tracing::warn!(node = node.identity().name, %error, "failed to reconcile storage");
            }
            spawn_background(&app, node, state);
        }
        let pause = async {
            let changed = app.cluster_changes.wait_blobs_changed();
            let changed = async { tokio::join!(changed, tokio::time::sleep(MIN_RECONCILE_INTERVAL)) };
            // Without a change, too: files may have been damaged or left behind.
            let _ = tokio::time::timeout(interval(&app.settings), changed).await;
        };
        tokio::select! {
            () = pause => {}
            _ = stop.changed() => {}
        }
    }
    for task in states.into_values().filter_map(|state| state.background) {
        task.abort();
    }
}

/// Reconciles the storage of all nodes once, and verifies and replicates once.
pub async fn run_once(app: &Arc<App>) -> Result<()> {
    for node in &app.nodes {
        let mut state = StorageState::default();
        reconcile_node(app, node, &mut state).await?;
        verify_and_replicate(app, node, &state.due, Duration::ZERO).await?;
        blob_copies::trim(app, node).await?;
    }
    Ok(())
}

/// Verifies and replicates blobs in the background, one task per node.
fn spawn_background(app: &Arc<App>, node: &Arc<dyn NodeApi>, state: &mut StorageState) {
    if state.background.as_ref().is_some_and(|task| !task.is_finished()) {
        return;
    }
    let (app, node, due) = (Arc::clone(app), Arc::clone(node), std::mem::take(&mut state.due));
    // Other nodes may be starting when this one does.
    let is_trim_due = state.trimmed.get_or_insert_with(Instant::now).elapsed() >= TRIM_INTERVAL;
    if is_trim_due {
        state.trimmed = Some(Instant::now());
    }
    state.background = Some(tokio::spawn(async move {
        if let Err(error) = verify_and_replicate(&app, &node, &due, NODES_TTL).await {
            tracing::warn!(node = node.identity().name, %error, "failed to verify or replicate blobs");
        } else if is_trim_due && let Err(error) = blob_copies::trim(&app, &node).await {
            tracing::warn!(node = node.identity().name, %error, "failed to remove surplus copies of blobs");
        }
    }));
}

/// Verifies some of the copies that are due, and fetches blobs. The nodes are those of at most `max_age` ago.
async fn verify_and_replicate(
    app: &Arc<App>,
    node: &Arc<dyn NodeApi>,
    due: &[(BlobId, CopyState)],
    max_age: Duration,
) -> Result<()> {
    let in_state = |wanted: CopyState| due.iter().filter(move |(_, state)| *state == wanted);
    let complete = in_state(CopyState::Complete).take(MAX_VERIFICATIONS);
    for (id, _) in complete.chain(in_state(CopyState::Damaged).take(1)) {
        verify_copy(app, node, *id).await?;
    }
    blob_copies::run(app, node, max_age).await
}

/// Returns the copies that are due for verification, those that were verified first come first.
fn due_copies(app: &App, copies: &HashMap<BlobId, NodeCopy>) -> Vec<(BlobId, CopyState)> {
    #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
    let interval = app.settings.checksum_verification_frequency as f64;
    let (complete, damaged) = (now() - interval, now() - interval.min(DAMAGED_RECHECK_DELAY));
    let is_due = |copy: &NodeCopy| match copy.state {
        CopyState::Complete => copy.verified <= complete,
        CopyState::Damaged => copy.verified <= damaged,
        CopyState::Copying => false,
    };
    let mut due: Vec<_> =
        copies.iter().filter(|(_, copy)| copy.blob == BlobState::Created && is_due(copy)).collect();
    due.sort_by(|(_, a), (_, b)| a.verified.total_cmp(&b.verified));
    due.into_iter().map(|(id, copy)| (*id, copy.state)).collect()
}

/// Verifies the checksums of a copy and records the result.
async fn verify_copy(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<()> {
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
                let event =
                    Event::new(EventType::Health, blob::object(id), "damaged copy passed verification");
                app.events.record(event.with("node", node.identity().name.clone()));
            }
            Ok(())
        }
        Some(reason) => blob::set_damaged(app, id, &NodeRef::of(node), &reason).await,
    }
}

/// Reconciles the files of a node with the database.
async fn reconcile_node(app: &Arc<App>, node: &Arc<dyn NodeApi>, state: &mut StorageState) -> Result<()> {
    // Files first: a row is older than its file.
    let found = node.storage().list_files().await?;
    let content = blob_locations::of_node(&*app.store, node.identity().id).await?;
    // The disks of its instances, which stay, depend on its blobs.
    if content.state == Some(NodeState::Deleted) {
        return Ok(());
    }
    state.due = due_copies(app, &content.copies);
    let mut pass = StoragePass { app, node, state, copies: content.copies, removed: 0 };
    let files: HashSet<StoredFileKind> = found.iter().map(|file| file.kind).collect();
    for file in &found {
        if pass.removed >= MAX_REMOVALS {
            return Ok(());
        }
        match file.kind {
            StoredFileKind::Blob(id) => pass.reconcile_blob(id).await?,
            StoredFileKind::Draft(Draft::Upload(_)) => {}
            StoredFileKind::Draft(draft) => pass.reconcile_draft(draft, file).await?,
            StoredFileKind::Conversion(id) => pass.reconcile_conversion(id, file).await?,
        }
    }
    pass.reconcile_missing(&files).await?;
    pass.reconcile_uploads(&found, content.uploads).await
}

/// One pass over the files of a node.
struct StoragePass<'a> {
    app: &'a Arc<App>,
    node: &'a Arc<dyn NodeApi>,
    state: &'a mut StorageState,
    /// The copies that the database expects on the node.
    copies: HashMap<BlobId, NodeCopy>,
    removed: usize,
}

impl StoragePass<'_> {
    fn node_id(&self) -> NodeId {
        self.node.identity().id
    }

    async fn forget_copy(&self, id: BlobId) -> Result<()> {
        let node_id = self.node_id();
        transaction!(self.app.store, |tx| { Ok(blob_locations::remove(tx, id, node_id).await?) })
    }

    async fn remove_blob(&mut self, id: BlobId) -> Result<()> {
        self.removed += 1;
        self.node.storage().remove(id).await?;
        self.forget_copy(id).await
    }

    /// Reconciles the file of a blob.
    async fn reconcile_blob(&mut self, id: BlobId) -> Result<()> {
        if self.app.blobs_in_progress.contains(self.node_id(), id) {
            return Ok(());
        }
        match self.copies.get(&id).map(|copy| (copy.state, copy.blob)) {
            Some((_, BlobState::Deleted)) => self.remove_blob(id).await,
            Some((_, BlobState::Initial)) => {
                self.removed += 1;
                blob::remove_incomplete(self.app, self.node, id).await
            }
            Some((CopyState::Copying, BlobState::Created)) => self.adopt_or_remove(id).await,
            Some((CopyState::Damaged, BlobState::Created)) => self.replace_damaged(id).await,
            Some((CopyState::Complete, BlobState::Created)) => Ok(()),
            None => match blobs::get(&*self.app.store, id).await?.map(|row| row.state) {
                Some(BlobState::Created) => self.adopt_or_remove(id).await,
                Some(BlobState::Deleted) => self.remove_blob(id).await,
                Some(BlobState::Initial) | None => {
                    self.report_unknown(StoredFileKind::Blob(id));
                    Ok(())
                }
            },
        }
    }

    /// Verifies a file that is not recorded as complete, and records it as a copy or removes it.
    async fn adopt_or_remove(&mut self, id: BlobId) -> Result<()> {
        let Some(row) = blobs::get(&*self.app.store, id).await? else { return Ok(()) };
        let Some(_mark) = self.app.blobs_in_progress.begin(self.node_id(), id) else { return Ok(()) };
        let node_id = self.node_id();
        if self.node.storage().verify(id, &row.content()).await?.is_some() {
            let copies = blob_locations::of_blob(&*self.app.store, id).await?;
            if copies.iter().any(|copy| copy.node != node_id && copy.state == CopyState::Complete) {
                return self.remove_blob(id).await;
            }
            // There is no complete copy.
            return transaction!(self.app.store, |tx| {
                Ok(blob_locations::set(tx, id, node_id, CopyState::Damaged).await?)
            });
        }
        transaction!(self.app.store, |tx| {
            // Unless it was deleted meanwhile.
            if blobs::get(&mut *tx, id).await?.is_some_and(|row| row.state == BlobState::Created) {
                blob_locations::set(tx, id, node_id, CopyState::Complete).await?;
            }
            Ok(())
        })
    }

    /// Removes a damaged copy once the blob has enough complete ones.
    async fn replace_damaged(&mut self, id: BlobId) -> Result<()> {
        let copies = blob_locations::of_blob(&*self.app.store, id).await?;
        let complete = copies.iter().filter(|copy| copy.state == CopyState::Complete).count();
        if complete >= blob_copies::target_copies(self.app).await? {
            self.remove_blob(id).await
        } else {
            Ok(())
        }
    }

    /// Removes a draft that two consecutive passes found unused.
    async fn reconcile_draft(&mut self, draft: Draft, file: &StoredFile) -> Result<()> {
        let unused = match draft {
            Draft::Upload(_) => false,
            Draft::Copy(id) => !self.app.blobs_in_progress.contains(self.node_id(), id),
            Draft::Vm(id) => !self.app.drafts_in_progress.contains(self.node_id(), id),
            Draft::Fetch(id) => {
                operations::get(&*self.app.store, id).await?.is_none_or(|row| row.state.is_final())
            }
        };
        if !unused {
            self.state.unused_drafts.remove(&draft);
        } else if self.state.unused_drafts.insert(draft) {
            // Removed by the next pass unless it is used by then.
        } else {
            tracing::info!(?draft, bytes = file.size, "removing an unused draft");
            self.removed += 1;
            self.node.storage().remove_draft(draft).await?;
            self.state.unused_drafts.remove(&draft);
        }
        Ok(())
    }

    /// Removes a conversion whose blob was deleted or that was not used for `BLOB_TRANSCODE_MAXIMUM_IDLE_TIME` seconds.
    async fn reconcile_conversion(&mut self, id: BlobId, file: &StoredFile) -> Result<()> {
        #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
        let idle = self.app.settings.blob_transcode_maximum_idle_time as f64;
        let wanted = match self.copies.get(&id) {
            Some(copy) => copy.blob == BlobState::Created,
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

    /// Handles copies that have a row but no file.
    async fn reconcile_missing(&mut self, files: &HashSet<StoredFileKind>) -> Result<()> {
        let mut missing = HashSet::new();
        for (id, copy) in &self.copies {
            if files.contains(&StoredFileKind::Blob(*id))
                || self.app.blobs_in_progress.contains(self.node_id(), *id)
            {
                continue;
            }
            match (copy.state, copy.blob) {
                (_, BlobState::Initial) => blob::remove_incomplete(self.app, self.node, *id).await?,
                (_, BlobState::Deleted) | (CopyState::Copying, BlobState::Created) => {
                    self.forget_copy(*id).await?;
                }
                (CopyState::Damaged, BlobState::Created) => {}
                (CopyState::Complete, BlobState::Created) => {
                    // The row may be newer than the list of files, so the next pass decides.
                    if self.state.missing.contains(id) {
                        let node = NodeRef::of(self.node);
                        blob::set_damaged(self.app, *id, &node, "its file is missing").await?;
                    } else {
                        missing.insert(*id);
                    }
                }
            }
        }
        self.state.missing = missing;
        Ok(())
    }

    /// Removes uploads that ended or were not continued for `UPLOAD_MAXIMUM_IDLE_TIME` seconds.
    async fn reconcile_uploads(&mut self, found: &[StoredFile], uploads: Vec<UploadRow>) -> Result<()> {
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
        for row in uploads {
            let draft = Draft::Upload(row.id);
            known.insert(draft);
            let modified_at = files.get(&draft).copied().unwrap_or(row.created).max(row.created);
            if !row.ended && now() - modified_at > idle {
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
                self.report_unknown(StoredFileKind::Draft(draft));
            }
        }
        Ok(())
    }

    /// Reports a file without a record, once.
    fn report_unknown(&mut self, file: StoredFileKind) {
        if !self.state.reported.insert(file) {
            return;
        }
        tracing::warn!(?file, node = self.node.identity().name, "ignored a file without a record");
        let node = ObjectRef::new(ObjectType::Node, self.node_id());
        let event = Event::new(EventType::Health, node, "ignored a file without a record");
        self.app.events.record(event.with("file", format!("{file:?}")));
    }
}
