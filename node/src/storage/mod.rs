//! The disk of a node: a folder with drafts, blobs and conversions. Nothing in here blocks the threads that serve
//! others; what is looked into rather than stored is the business of [`crate::image`].

mod blobs;
mod drafts;
mod images;
mod places;
mod sums;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use muster_types::Result;
use muster_types::blob::{Compression, Content, ImageFacts};
use muster_types::ids::BlobId;
use muster_types::node::NodeFuture;
use muster_types::storage::{ByteStream, Draft, StorageApi, StoredFile, StoredFileKind};
use tokio::sync::{OwnedMutexGuard, Semaphore};

pub(crate) use places::{Scratch, failed};

use crate::image::Images;
use drafts::Drafts;
use places::Places;
use sums::blocking;

/// How many images are converted at the same time; the others wait.
const CONVERSIONS_AT_ONCE: usize = 2;

/// How many images are looked at at the same time.
const INSPECTIONS_AT_ONCE: usize = 4;

/// A storage in a folder.
#[derive(Debug)]
pub(crate) struct FileStorage {
    places: Places,
    drafts: Drafts,
    images: Arc<Images>,
    blobs: BlobLocks,
    conversions: Arc<Semaphore>,
    inspections: Arc<Semaphore>,
}

impl FileStorage {
    pub(crate) fn new(root: &Path, images: Images) -> Self {
        let places = Places::new(root);
        Self {
            drafts: Drafts::new(places.clone()),
            places,
            images: Arc::new(images),
            blobs: BlobLocks::default(),
            conversions: Arc::new(Semaphore::new(CONVERSIONS_AT_ONCE)),
            inspections: Arc::new(Semaphore::new(INSPECTIONS_AT_ONCE)),
        }
    }
}

/// What machines of this node begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub(crate) path: PathBuf,
    pub(crate) facts: ImageFacts,
}

/// What the machines of the same node need.
impl FileStorage {
    /// Makes a finished file a draft, in place of one that is there. It is on the same file system, and gone from its
    /// old place afterwards.
    pub(crate) async fn adopt_draft(&self, draft: Draft, file: &Path) -> Result<()> {
        self.drafts.adopt(draft, file.to_owned()).await
    }

    /// The conversion of a blob; nothing if there is none. Blocks.
    pub(crate) fn conversion(&self, blob: BlobId) -> Result<Option<Conversion>> {
        let Some(path) = images::conversion(&self.places, blob) else { return Ok(None) };
        let facts = self.images.facts_of(&path)?;
        Ok(Some(Conversion { path, facts }))
    }

    /// What a file is by its first bytes. Blocks.
    pub(crate) fn facts(&self, path: &Path) -> Result<ImageFacts> {
        self.images.facts_of(path)
    }

    /// The file of a blob; nothing if it is not here.
    pub(crate) fn blob(&self, blob: BlobId) -> Option<PathBuf> {
        Some(self.places.blob(blob)).filter(|path| path.exists())
    }

    /// A folder on the same file system for one job, which goes with it.
    pub(crate) fn scratch(&self) -> Result<Scratch> {
        self.places.job()
    }
}

/// Who changes the files of a blob does so alone.
#[derive(Debug, Default)]
struct BlobLocks(Mutex<HashMap<BlobId, Arc<tokio::sync::Mutex<()>>>>);

impl BlobLocks {
    async fn lock(&self, blob: BlobId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|_, lock| Arc::strong_count(lock) > 1);
            all.entry(blob).or_default().clone()
        };
        lock.lock_owned().await
    }
}

impl StorageApi for FileStorage {
    fn draft_size(&self, draft: Draft) -> NodeFuture<'_, Option<u64>> {
        Box::pin(self.drafts.size(draft))
    }

    fn append(&self, draft: Draft, at: Option<u64>, most: u64, data: ByteStream) -> NodeFuture<'_, u64> {
        Box::pin(self.drafts.append(draft, at, most, data))
    }

    fn truncate(&self, draft: Draft, size: u64) -> NodeFuture<'_, ()> {
        Box::pin(self.drafts.truncate(draft, size))
    }

    fn remove_draft(&self, draft: Draft) -> NodeFuture<'_, ()> {
        Box::pin(self.drafts.remove(draft))
    }

    fn unpack(&self, draft: Draft) -> NodeFuture<'_, Option<Compression>> {
        Box::pin(self.unpack_draft(draft))
    }

    fn content(&self, draft: Draft) -> NodeFuture<'_, Content> {
        Box::pin(async move {
            let mut turn = self.drafts.turn(draft).await;
            Ok(self.drafts.summed(draft, &mut turn).await?.content)
        })
    }

    fn keep(&self, draft: Draft, blob: BlobId) -> NodeFuture<'_, Content> {
        Box::pin(async move {
            let mut turn = self.drafts.turn(draft).await;
            let summed = self.drafts.summed(draft, &mut turn).await?;
            let alone = self.blobs.lock(blob).await;
            let places = self.places.clone();
            blocking(move || {
                let _held = (turn, alone);
                blobs::keep(&places, &places.draft(draft), &summed.pieces, blob)?;
                Ok(summed.content)
            })
            .await
        })
    }

    fn inspect(&self, blob: BlobId) -> NodeFuture<'_, ImageFacts> {
        Box::pin(self.inspect_blob(blob))
    }

    fn read(&self, blob: BlobId, range: Range<u64>) -> NodeFuture<'_, ByteStream> {
        let places = self.places.clone();
        Box::pin(blocking(move || blobs::read(&places, blob, range)))
    }

    fn verify<'a>(&'a self, blob: BlobId, content: &'a Content) -> NodeFuture<'a, Option<String>> {
        Box::pin(async move {
            let (wrong, found) = blobs::verify(&self.places, blob, content).await?;
            if let Some(found) = found {
                let alone = self.blobs.lock(blob).await;
                let places = self.places.clone();
                let repair = move || {
                    let _held = alone;
                    blobs::repair(&places, blob, &found)
                };
                blocking(repair).await?;
            }
            Ok(wrong)
        })
    }

    fn remove(&self, blob: BlobId) -> NodeFuture<'_, ()> {
        Box::pin(async move {
            let alone = self.blobs.lock(blob).await;
            let places = self.places.clone();
            blocking(move || {
                let _held = alone;
                images::remove_conversion(&places, blob)?;
                blobs::remove(&places, blob)
            })
            .await
        })
    }

    fn convert<'a>(&'a self, blob: BlobId, facts: &'a ImageFacts) -> NodeFuture<'a, ()> {
        Box::pin(self.convert_blob(blob, facts.clone()))
    }

    fn convert_thin(&self, blob: BlobId, base: BlobId) -> NodeFuture<'_, ()> {
        Box::pin(self.convert_thin_blob(blob, base))
    }

    fn remove_conversion(&self, blob: BlobId) -> NodeFuture<'_, ()> {
        Box::pin(async move {
            let alone = self.blobs.lock(blob).await;
            let places = self.places.clone();
            blocking(move || {
                let _held = alone;
                images::remove_conversion(&places, blob)
            })
            .await
        })
    }

    fn find(&self) -> NodeFuture<'_, Vec<StoredFile>> {
        let places = self.places.clone();
        Box::pin(blocking(move || Ok(places.find().into_iter().filter_map(look).collect())))
    }
}

/// Nothing if it went in this moment.
fn look((what, path): (StoredFileKind, std::path::PathBuf)) -> Option<StoredFile> {
    let found = path.metadata().ok()?;
    let touched = found.modified().ok()?.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    Some(StoredFile { what, touched, size: found.len() })
}
