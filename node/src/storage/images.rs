//! Drafts and blobs as disk images: locking and concurrency of inspections and conversions, and where results go.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use muster_types::blob::{Compression, ImageFacts, ImageFormat};
use muster_types::ids::BlobId;
use muster_types::storage::Draft;
use muster_types::{Error, Result};

use super::FileStorage;
use super::checksums::run_blocking;
use super::drafts::open_error;
use super::layout::{self, StorageLayout};
use crate::files::{self, io_error};
use crate::image::{self, ImageJob};

/// Cancels a job when the future that waits for it is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl FileStorage {
    /// Returns a constructor for a job, and the guard that cancels it on drop.
    fn new_job(&self) -> (impl FnOnce() -> Result<ImageJob> + Send + use<>, CancelOnDrop) {
        let cancelled = Arc::new(AtomicBool::new(false));
        let (layout, cancel) = (self.layout.clone(), CancelOnDrop(cancelled.clone()));
        let new_job = move || {
            let scratch = layout.scratch()?;
            let free_space = Box::new(move || layout.available_bytes());
            Ok(ImageJob { scratch, free_space, cancelled })
        };
        (new_job, cancel)
    }

    pub(super) async fn inspect_blob(&self, namespace: &str, blob: BlobId) -> Result<ImageFacts> {
        let permit = self.inspections.acquire(namespace).await?;
        let (images, path) = (self.images.clone(), self.layout.blob(blob));
        let (new_job, _cancel) = self.new_job();
        run_blocking(move || {
            let _guards = permit;
            if !path.exists() {
                return Err(Error::not_found("blob"));
            }
            images.inspect(&path, &new_job()?)
        })
        .await
    }

    pub(super) async fn decompress_draft(
        &self,
        namespace: &str,
        draft: Draft,
    ) -> Result<Option<Compression>> {
        let mut guard = self.drafts.lock(draft).await;
        let permit = self.inspections.acquire(namespace).await?;
        let (images, path) = (self.images.clone(), self.layout.draft(draft));
        let (new_job, _cancel) = self.new_job();
        run_blocking(move || {
            let _guards = permit;
            let Some(compression) = image::compression_of(&File::open(&path).map_err(open_error)?)? else {
                return Ok(None);
            };
            let job = new_job()?;
            let decompressed = images.decompress(&path, compression, &job)?;
            layout::set_mode(&decompressed, 0o644)?;
            *guard = None;
            fs::rename(decompressed, &path).map_err(io_error("failed to rename a decompressed draft"))?;
            Ok(Some(compression))
        })
        .await
    }

    pub(super) async fn convert_blob(&self, namespace: &str, blob: BlobId, facts: ImageFacts) -> Result<()> {
        let (layout, images) = (self.layout.clone(), self.images.clone());
        let is_disc = facts.format == ImageFormat::Iso;
        let to = if is_disc { layout.disc(blob) } else { layout.conversion(blob) };
        self.create_conversion(namespace, blob, to, move |file, job| images.convert(file, &facts, job)).await
    }

    pub(super) async fn convert_thin_blob(&self, namespace: &str, blob: BlobId, base: BlobId) -> Result<()> {
        let (layout, images) = (self.layout.clone(), self.images.clone());
        let to = layout.conversion(blob);
        let flatten = move |file: &Path, job: &ImageJob| {
            let missing = || Error::Unavailable(format!("the conversion of blob {base} is not on this node"));
            let base_path = conversion(&layout, base).ok_or_else(missing)?;
            // The link keeps the file available if the conversion is removed meanwhile.
            let linked = job.scratch.path("base");
            layout::link(&base_path, &linked)?;
            touch(&layout, base);
            images.flatten(file, &linked, job)
        };
        self.create_conversion(namespace, blob, to, flatten).await
    }

    /// Copies the disk of a stopped VM to a file on the same file system. A thin copy contains only the difference to the
    /// base. The copies of all owners get their share.
    pub(crate) async fn copy_disk(
        &self,
        owner: &str,
        (top, base): (PathBuf, Option<PathBuf>),
        (thin, compress): (bool, bool),
        to: PathBuf,
    ) -> Result<()> {
        let permit = self.copies.acquire(owner).await?;
        let images = self.images.clone();
        let (new_job, _cancel) = self.new_job();
        run_blocking(move || {
            let _guards = permit;
            let disk = image::DiskFiles { top: &top, base: base.as_deref() };
            let job = new_job()?;
            let copy = images.copy_disk(&disk, thin, compress, &job)?;
            File::open(&copy)
                .and_then(|copy| copy.sync_all())
                .map_err(io_error("failed to sync a copy of a disk"))?;
            fs::rename(copy, to).map_err(io_error("failed to rename a copy of a disk"))
        })
        .await
    }

    /// Writes the changes that a copy of a disk contains to the earlier copy `base`, and syncs it.
    pub(crate) async fn merge_disk(&self, owner: &str, top: PathBuf, base: PathBuf) -> Result<()> {
        let permit = self.copies.acquire(owner).await?;
        let images = self.images.clone();
        let (new_job, _cancel) = self.new_job();
        run_blocking(move || {
            let _guards = permit;
            images.merge(&top, &base, &new_job()?)?;
            File::open(&base)
                .and_then(|base| base.sync_all())
                .map_err(io_error("failed to sync a copy of a disk"))
        })
        .await
    }

    /// Creates the conversion of a blob unless it exists. If `convert` returns `None`, the blob itself is the conversion.
    async fn create_conversion(
        &self,
        namespace: &str,
        blob: BlobId,
        to: PathBuf,
        convert: impl FnOnce(&Path, &ImageJob) -> Result<Option<PathBuf>> + Send + 'static,
    ) -> Result<()> {
        let blob_guard = self.blobs.lock(blob).await;
        let layout = self.layout.clone();
        let exists = run_blocking(move || Ok(touch(&layout, blob))).await?;
        if exists {
            return Ok(());
        }
        let permit = self.conversions.acquire(namespace).await?;
        let layout = self.layout.clone();
        let (new_job, _cancel) = self.new_job();
        run_blocking(move || {
            let _guards = (blob_guard, permit);
            let path = layout.blob(blob);
            if !path.exists() {
                return Err(Error::not_found("blob"));
            }
            files::create_dir(&layout.conversions())?;
            let job = new_job()?;
            let complete = match convert(&path, &job)? {
                Some(new) => new,
                None => {
                    let linked = job.scratch.path("same");
                    layout::link(&path, &linked)?;
                    linked
                }
            };
            commit(&complete, &to)?;
            // A hard link to the blob has the blob's modification time.
            touch(&layout, blob);
            layout::sync_dir(&layout.conversions())
        })
        .await
    }
}

/// Gives a complete file its name.
fn commit(file: &Path, to: &Path) -> Result<()> {
    layout::set_mode(file, 0o444)?;
    File::open(file).and_then(|file| file.sync_all()).map_err(io_error("failed to sync a conversion"))?;
    fs::rename(file, to).map_err(io_error("failed to publish a conversion"))
}

/// Returns the path of a blob's conversion, if it exists.
pub(super) fn conversion(layout: &StorageLayout, blob: BlobId) -> Option<PathBuf> {
    [layout.conversion(blob), layout.disc(blob)].into_iter().find(|path| path.exists())
}

/// Updates the last use of a blob's conversion. Returns whether it exists.
fn touch(layout: &StorageLayout, blob: BlobId) -> bool {
    let names = [layout.conversion(blob), layout.disc(blob)];
    let now = SystemTime::now();
    names.iter().any(|path| File::open(path).and_then(|file| file.set_modified(now)).is_ok())
}

pub(super) fn remove_conversion(layout: &StorageLayout, blob: BlobId) -> Result<()> {
    layout::remove(&layout.conversion(blob))?;
    layout::remove(&layout.disc(blob))
}
