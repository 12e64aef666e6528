//! The storage of a node: drafts, which grow; blobs, which are immutable; conversions, which can be created again.
//!
//! ```text
//! append, truncate ─▶ draft ──commit──▶ blob ──convert──▶ conversion
//! ```
//!
//! A draft is named after its origin: an upload, an operation that downloads, a copy of another node's blob. A blob is
//! complete and synced to disk before anything refers to it. Every byte that is read of a blob is verified.
//! See docs/decisions/0014 and 0015.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use bytes::Bytes;
use futures_core::Stream;

use crate::Result;
use crate::blob::{Compression, ContentDigest, ImageFacts};
use crate::ids::{BlobId, OperationId, UploadId};
use crate::node_future::NodeFuture;

/// A stream of bytes to or from a disk.
pub type ByteStream = Pin<Box<dyn Stream<Item = Result<Bytes>> + Send>>;

/// Returns the file of a blob in the directory of a storage.
#[must_use]
pub fn blob_path(storage: &Path, blob: BlobId) -> PathBuf {
    let name = blob.to_string();
    storage.join("blobs").join(&name[..2]).join(name)
}

/// A partially written file, named after its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Draft {
    /// Received from a client.
    Upload(UploadId),
    /// Downloaded by an operation.
    Fetch(OperationId),
    /// Copied from another node.
    Copy(BlobId),
    /// Written by a VM: a screenshot, or a copy of its disk.
    Vm(BlobId),
}

/// A file in the storage of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredFile {
    pub kind: StoredFileKind,
    /// The Unix time of the last write, or of the last use of a conversion.
    pub modified_at: f64,
    /// In bytes.
    pub size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StoredFileKind {
    Draft(Draft),
    Blob(BlobId),
    Conversion(BlobId),
}

/// The interface of the control plane to the storage of a node.
pub trait StorageApi: Send + Sync {
    /// Returns the size of a draft in bytes, or `None` if it does not exist.
    fn draft_size(&self, draft: Draft) -> NodeFuture<'_, Option<u64>>;

    /// Appends a stream to a draft and returns its new size. If `at` is given, it must be the current size
    /// ([`Error::Conflict`] otherwise). If the stream fails, the bytes received so far are kept if `at` was given;
    /// without it the draft keeps its previous size. It also does if it would grow beyond `max_size` bytes
    /// ([`Error::TooLarge`]) or the disk is full ([`Error::InsufficientCapacity`]).
    ///
    /// [`Error::Conflict`]: crate::Error::Conflict
    /// [`Error::TooLarge`]: crate::Error::TooLarge
    /// [`Error::InsufficientCapacity`]: crate::Error::InsufficientCapacity
    fn append(&self, draft: Draft, at: Option<u64>, max_size: u64, data: ByteStream) -> NodeFuture<'_, u64>;

    /// Truncates a draft and interrupts running appends. [`Error::Invalid`] if it is shorter than `size`.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    fn truncate(&self, draft: Draft, size: u64) -> NodeFuture<'_, ()>;

    /// Removes a draft, which need not exist.
    fn remove_draft(&self, draft: Draft) -> NodeFuture<'_, ()>;

    /// Decompresses a draft in place, if it is compressed. Like every work on images, it waits for other work of the same
    /// namespace, but not for that of others.
    fn decompress<'a>(&'a self, namespace: &'a str, draft: Draft) -> NodeFuture<'a, Option<Compression>>;

    /// Returns the size and checksums of a draft: computed while it was received, or by reading it again.
    fn digest(&self, draft: Draft) -> NodeFuture<'_, ContentDigest>;

    /// Makes the content of a draft a blob, synced to disk, and returns its size and checksums. The draft is kept, but
    /// cannot change while the blob exists. An existing blob is replaced.
    fn commit(&self, draft: Draft, blob: BlobId) -> NodeFuture<'_, ContentDigest>;

    /// Inspects a blob as a disk image. [`Error::Invalid`] with the reason if the image is not safe to use.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    fn inspect<'a>(&'a self, namespace: &'a str, blob: BlobId) -> NodeFuture<'a, ImageFacts>;

    /// Reads a part of a blob. Every byte is verified before it is returned: the stream fails with
    /// [`Error::Internal`] instead of yielding a damaged one. [`Error::NotFound`] if the file does not exist.
    ///
    /// [`Error::Internal`]: crate::Error::Internal
    /// [`Error::NotFound`]: crate::Error::NotFound
    fn read(&self, blob: BlobId, range: Range<u64>) -> NodeFuture<'_, ByteStream>;

    /// Verifies a complete blob. Returns what is wrong with it, if anything.
    fn verify<'a>(&'a self, blob: BlobId, content: &'a ContentDigest) -> NodeFuture<'a, Option<String>>;

    /// Removes a blob and its conversion, which need not exist.
    fn remove(&self, blob: BlobId) -> NodeFuture<'_, ()>;

    /// Creates the copy of an image that VMs use, unless it exists: qcow2 without a backing file.
    /// [`Error::Invalid`] if the image turns out not to be safe to use.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    fn convert<'a>(&'a self, namespace: &'a str, blob: BlobId, facts: &'a ImageFacts) -> NodeFuture<'a, ()>;

    /// Converts a thin image, which contains only the differences to the conversion of `base`. The result contains
    /// both. [`Error::Unavailable`] if the conversion of the base is not on the node.
    ///
    /// [`Error::Unavailable`]: crate::Error::Unavailable
    fn convert_thin<'a>(&'a self, namespace: &'a str, blob: BlobId, base: BlobId) -> NodeFuture<'a, ()>;

    /// Removes a conversion, which need not exist.
    fn remove_conversion(&self, blob: BlobId) -> NodeFuture<'_, ()>;

    /// Returns all files of the storage, referenced or not.
    fn list_files(&self) -> NodeFuture<'_, Vec<StoredFile>>;
}
