//! Drafts and blobs as disk images: who may look at or convert them when, and where the result goes.

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
use super::drafts::absent;
use super::places::{self, Places, failed};
use super::sums::blocking;
use crate::image::{self, Job};

/// Tells a job that nobody waits for it any more.
struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl FileStorage {
    /// A job, and what keeps it going.
    fn job(&self) -> (impl FnOnce() -> Result<Job> + Send + use<>, Waiting) {
        let given_up = Arc::new(AtomicBool::new(false));
        let (places, waiting) = (self.places.clone(), Waiting(given_up.clone()));
        let begin = move || {
            let scratch = places.job()?;
            let room = Box::new(move || places.room());
            Ok(Job { scratch, room, given_up })
        };
        (begin, waiting)
    }

    pub(super) async fn inspect_blob(&self, blob: BlobId) -> Result<ImageFacts> {
        let permit = permit(&self.inspections).await?;
        let (images, path) = (self.images.clone(), self.places.blob(blob));
        let (begin, _waiting) = self.job();
        blocking(move || {
            let _held = permit;
            if !path.exists() {
                return Err(Error::not_found("blob"));
            }
            images.inspect(&path, &begin()?)
        })
        .await
    }

    pub(super) async fn unpack_draft(&self, draft: Draft) -> Result<Option<Compression>> {
        let mut turn = self.drafts.turn(draft).await;
        let permit = permit(&self.inspections).await?;
        let (images, path) = (self.images.clone(), self.places.draft(draft));
        let (begin, _waiting) = self.job();
        blocking(move || {
            let _held = permit;
            let Some(packing) = image::packing(&File::open(&path).map_err(absent)?)? else { return Ok(None) };
            let job = begin()?;
            let unpacked = images.unpack(&path, packing, &job)?;
            places::set_mode(&unpacked, 0o644)?;
            *turn = None;
            fs::rename(unpacked, &path).map_err(failed("an unpacked draft gets no name"))?;
            Ok(Some(packing))
        })
        .await
    }

    pub(super) async fn convert_blob(&self, blob: BlobId, facts: ImageFacts) -> Result<()> {
        let (places, images) = (self.places.clone(), self.images.clone());
        let is_disc = facts.format == ImageFormat::Iso;
        let to = if is_disc { places.disc(blob) } else { places.conversion(blob) };
        self.make_conversion(blob, to, move |file, job| images.convert(file, &facts, job)).await
    }

    pub(super) async fn convert_thin_blob(&self, blob: BlobId, base: BlobId) -> Result<()> {
        let (places, images) = (self.places.clone(), self.images.clone());
        let to = places.conversion(blob);
        let join = move |file: &Path, job: &Job| {
            let missing = || Error::Unavailable(format!("the conversion of blob {base} is not on this node"));
            let under = conversion(&places, base).ok_or_else(missing)?;
            // It may be removed meanwhile.
            let kept = job.scratch.path("base");
            places::link(&under, &kept)?;
            touch(&places, base);
            images.join(file, &kept, job)
        };
        self.make_conversion(blob, to, join).await
    }

    /// Copies the disk of a machine that is off to a file on the same file system; a thin copy has only what differs from its base.
    pub(crate) async fn copy_disk(
        &self,
        (top, base): (PathBuf, Option<PathBuf>),
        (thin, compress): (bool, bool),
        to: PathBuf,
    ) -> Result<()> {
        let permit = permit(&self.conversions).await?;
        let images = self.images.clone();
        let (begin, _waiting) = self.job();
        blocking(move || {
            let _held = permit;
            let disk = image::Disk { top: &top, base: base.as_deref() };
            let job = begin()?;
            let made = images.copy_disk(&disk, thin, compress, &job)?;
            File::open(&made)
                .and_then(|made| made.sync_all())
                .map_err(failed("a copy is not synchronised"))?;
            fs::rename(made, to).map_err(failed("a copy of a disk gets no name"))
        })
        .await
    }

    /// Gives a blob its conversion, which `make` makes, unless it is there. Nothing made: it is the blob itself.
    async fn make_conversion(
        &self,
        blob: BlobId,
        to: PathBuf,
        make: impl FnOnce(&Path, &Job) -> Result<Option<PathBuf>> + Send + 'static,
    ) -> Result<()> {
        let alone = self.blobs.lock(blob).await;
        let places = self.places.clone();
        let is_there = blocking(move || Ok(touch(&places, blob))).await?;
        if is_there {
            return Ok(());
        }
        let permit = permit(&self.conversions).await?;
        let places = self.places.clone();
        let (begin, _waiting) = self.job();
        blocking(move || {
            let _held = (alone, permit);
            let path = places.blob(blob);
            if !path.exists() {
                return Err(Error::not_found("blob"));
            }
            places::make(&places.conversions())?;
            let job = begin()?;
            let whole = match make(&path, &job)? {
                Some(new) => new,
                None => {
                    let same = job.scratch.path("same");
                    places::link(&path, &same)?;
                    same
                }
            };
            publish(&whole, &to)?;
            // What is the blob's own file is as old as that.
            touch(&places, blob);
            places::sync_folder(&places.conversions())
        })
        .await
    }
}

async fn permit(of: &Arc<tokio::sync::Semaphore>) -> Result<tokio::sync::OwnedSemaphorePermit> {
    of.clone().acquire_owned().await.map_err(|error| Error::Internal(format!("no permit: {error}")))
}

/// Gives a whole file its name.
fn publish(file: &Path, to: &Path) -> Result<()> {
    places::set_mode(file, 0o444)?;
    File::open(file).and_then(|file| file.sync_all()).map_err(failed("a conversion is not synchronised"))?;
    fs::rename(file, to).map_err(failed("a conversion gets no name"))
}

/// Where the conversion of a blob is, if there is one.
pub(super) fn conversion(places: &Places, blob: BlobId) -> Option<PathBuf> {
    [places.conversion(blob), places.disc(blob)].into_iter().find(|path| path.exists())
}

/// Says that the conversion of a blob was used, if there is one.
fn touch(places: &Places, blob: BlobId) -> bool {
    let names = [places.conversion(blob), places.disc(blob)];
    let now = SystemTime::now();
    names.iter().any(|path| File::open(path).and_then(|file| file.set_modified(now)).is_ok())
}

pub(super) fn remove_conversion(places: &Places, blob: BlobId) -> Result<()> {
    places::remove(&places.conversion(blob))?;
    places::remove(&places.disc(blob))
}
