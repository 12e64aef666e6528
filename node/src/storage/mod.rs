//! The storage of a node: a directory with drafts, blobs and conversions. All file access runs on blocking threads. The
//! content of images is handled by [`crate::image`]. See docs/decisions/0015.

mod blobs;
mod checksums;
mod drafts;
mod fair_semaphore;
mod images;
mod layout;
mod shared;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use muster_types::blob::{Compression, ContentDigest, ImageFacts};
use muster_types::ids::{BlobId, ClusterId, StorageId};
use muster_types::node::NodeFuture;
use muster_types::shared_storage::SharedStorageRecord;
use muster_types::storage::{ByteStream, Draft, StorageApi, StoredFile, StoredFileKind};
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use crate::files::ScratchDir;
use crate::image::Images;
use checksums::run_blocking;
use drafts::Drafts;
use fair_semaphore::FairSemaphore;
use layout::StorageLayout;

pub(crate) use shared::SharedStorage;

/// The number of images that are converted concurrently, and of disks that are copied; see [`FairSemaphore`].
const MAX_CONCURRENT_CONVERSIONS: usize = 2;

/// The number of images that are inspected or decompressed concurrently; see [`FairSemaphore`].
const MAX_CONCURRENT_INSPECTIONS: usize = 4;

/// A storage in a directory.
#[derive(Debug)]
pub(crate) struct FileStorage {
    layout: StorageLayout,
    drafts: Drafts,
    images: Arc<Images>,
    blobs: BlobLocks,
    conversions: Arc<FairSemaphore>,
    copies: Arc<FairSemaphore>,
    inspections: Arc<FairSemaphore>,
    /// The storage that the node shares with others.
    shared: Mutex<Option<SharedStorage>>,
}

impl FileStorage {
    pub(crate) fn new(root: &Path, images: Images) -> Self {
        let layout = StorageLayout::new(root);
        Self {
            drafts: Drafts::new(layout.clone()),
            layout,
            images: Arc::new(images),
            blobs: BlobLocks::default(),
            conversions: FairSemaphore::new(MAX_CONCURRENT_CONVERSIONS),
            copies: FairSemaphore::new(MAX_CONCURRENT_CONVERSIONS),
            inspections: FairSemaphore::new(MAX_CONCURRENT_INSPECTIONS),
            shared: Mutex::default(),
        }
    }

    pub(crate) fn set_shared(&self, shared: Option<SharedStorage>) {
        *self.shared.lock() = shared;
    }

    /// Returns the storage that the node shares with others, if it has one.
    pub(crate) fn shared(&self) -> Option<SharedStorage> {
        self.shared.lock().clone()
    }

    /// Inspects the storage that the node shares with others, if it has one. See [`SharedStorage::inspect`].
    pub(crate) async fn inspect_shared(
        &self,
        cluster: ClusterId,
        registered: Option<StorageId>,
    ) -> Result<Option<SharedStorageRecord>> {
        match self.shared() {
            Some(shared) => Ok(Some(shared.inspect(cluster, registered).await)),
            None => Ok(None),
        }
    }

    /// Returns the storage that the node shares with others, otherwise [`Error::NotReady`].
    pub(crate) fn require_shared(&self) -> Result<SharedStorage> {
        let missing = || Error::NotReady("the node has no shared storage (SHARED_STORAGE)".into());
        self.shared().ok_or_else(missing)
    }
}

/// A converted image, which disks of VMs on this node are based on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub(crate) path: PathBuf,
    pub(crate) facts: ImageFacts,
}

/// The interface for the VMs of the same node.
impl FileStorage {
    /// Makes a finished file a draft, replacing an existing one. The file has to be on the same file system and is moved.
    pub(crate) async fn adopt_draft(&self, draft: Draft, file: &Path) -> Result<()> {
        self.drafts.adopt(draft, file.to_owned()).await
    }

    /// Returns the conversion of a blob, if it exists. Blocks.
    pub(crate) fn conversion(&self, blob: BlobId) -> Result<Option<Conversion>> {
        let Some(path) = images::conversion(&self.layout, blob) else { return Ok(None) };
        let facts = self.images.facts_from_header(&path)?;
        Ok(Some(Conversion { path, facts }))
    }

    /// Inspects the header of an image. Blocks.
    pub(crate) fn facts(&self, path: &Path) -> Result<ImageFacts> {
        self.images.facts_from_header(path)
    }

    /// Returns the path of a blob, if it is on this node.
    pub(crate) fn blob(&self, blob: BlobId) -> Option<PathBuf> {
        Some(self.layout.blob(blob)).filter(|path| path.exists())
    }

    /// Creates a scratch directory on the same file system.
    pub(crate) fn scratch(&self) -> Result<ScratchDir> {
        self.layout.scratch()
    }
}

/// One lock per blob, acquired to change its files.
#[derive(Debug, Default)]
struct BlobLocks(Mutex<HashMap<BlobId, Arc<tokio::sync::Mutex<()>>>>);

impl BlobLocks {
    async fn lock(&self, blob: BlobId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock();
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(blob).or_default().clone()
        };
        lock.lock_owned().await
    }
}

impl StorageApi for FileStorage {
    fn draft_size(&self, draft: Draft) -> NodeFuture<'_, Option<u64>> {
        Box::pin(self.drafts.size(draft))
    }

    fn append(
        &self,
        draft: Draft,
        offset: Option<u64>,
        max_size: u64,
        data: ByteStream,
    ) -> NodeFuture<'_, u64> {
        Box::pin(self.drafts.append(draft, offset, max_size, data))
    }

    fn truncate(&self, draft: Draft, size: u64) -> NodeFuture<'_, ()> {
        Box::pin(self.drafts.truncate(draft, size))
    }

    fn remove_draft(&self, draft: Draft) -> NodeFuture<'_, ()> {
        Box::pin(self.drafts.remove(draft))
    }

    fn decompress<'a>(&'a self, namespace: &'a str, draft: Draft) -> NodeFuture<'a, Option<Compression>> {
        Box::pin(self.decompress_draft(namespace, draft))
    }

    fn digest(&self, draft: Draft) -> NodeFuture<'_, ContentDigest> {
        Box::pin(async move {
            let mut guard = self.drafts.lock(draft).await;
            Ok(self.drafts.hashed(draft, &mut guard).await?.content)
        })
    }

    fn commit(&self, draft: Draft, blob: BlobId) -> NodeFuture<'_, ContentDigest> {
        Box::pin(async move {
            let mut guard = self.drafts.lock(draft).await;
            let hashed = self.drafts.hashed(draft, &mut guard).await?;
            let blob_guard = self.blobs.lock(blob).await;
            let layout = self.layout.clone();
            run_blocking(move || {
                let _guards = (guard, blob_guard);
                blobs::commit(&layout, &layout.draft(draft), &hashed.chunks, blob)?;
                Ok(hashed.content)
            })
            .await
        })
    }

    fn inspect<'a>(&'a self, namespace: &'a str, blob: BlobId) -> NodeFuture<'a, ImageFacts> {
        Box::pin(self.inspect_blob(namespace, blob))
    }

    fn read(&self, blob: BlobId, range: Range<u64>) -> NodeFuture<'_, ByteStream> {
        let layout = self.layout.clone();
        Box::pin(run_blocking(move || blobs::read(&layout, blob, range)))
    }

    fn verify<'a>(&'a self, blob: BlobId, content: &'a ContentDigest) -> NodeFuture<'a, Option<String>> {
        Box::pin(async move {
            let (damage, repair_data) = blobs::verify(&self.layout, blob, content).await?;
            if let Some(repair_data) = repair_data {
                let blob_guard = self.blobs.lock(blob).await;
                let layout = self.layout.clone();
                let repair = move || {
                    let _guards = blob_guard;
                    blobs::repair(&layout, blob, &repair_data)
                };
                run_blocking(repair).await?;
            }
            Ok(damage)
        })
    }

    fn remove(&self, blob: BlobId) -> NodeFuture<'_, ()> {
        Box::pin(async move {
            let blob_guard = self.blobs.lock(blob).await;
            let layout = self.layout.clone();
            run_blocking(move || {
                let _guards = blob_guard;
                images::remove_conversion(&layout, blob)?;
                blobs::remove(&layout, blob)
            })
            .await
        })
    }

    fn convert<'a>(&'a self, namespace: &'a str, blob: BlobId, facts: &'a ImageFacts) -> NodeFuture<'a, ()> {
        Box::pin(self.convert_blob(namespace, blob, facts.clone()))
    }

    fn convert_thin<'a>(&'a self, namespace: &'a str, blob: BlobId, base: BlobId) -> NodeFuture<'a, ()> {
        Box::pin(self.convert_thin_blob(namespace, blob, base))
    }

    fn remove_conversion(&self, blob: BlobId) -> NodeFuture<'_, ()> {
        Box::pin(async move {
            let blob_guard = self.blobs.lock(blob).await;
            let layout = self.layout.clone();
            run_blocking(move || {
                let _guards = blob_guard;
                images::remove_conversion(&layout, blob)
            })
            .await
        })
    }

    fn list_files(&self) -> NodeFuture<'_, Vec<StoredFile>> {
        let layout = self.layout.clone();
        Box::pin(run_blocking(move || Ok(layout.find().into_iter().filter_map(inspect_file).collect())))
    }
}

/// Returns `None` if the file was removed meanwhile.
fn inspect_file((kind, path): (StoredFileKind, std::path::PathBuf)) -> Option<StoredFile> {
    let metadata = path.metadata().ok()?;
    let modified_at =
        metadata.modified().ok()?.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    Some(StoredFile { kind, modified_at, size: metadata.len() })
}
