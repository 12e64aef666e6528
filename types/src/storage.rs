//! The disk of a node: drafts, which grow; blobs, which never change; conversions, which can be made again.
//!
//! ```text
//! append, truncate ─▶ draft ──keep──▶ blob ──convert──▶ conversion
//! ```
//!
//! A draft is named by what explains it: an upload, an operation that fetches, a copy of another node's blob. A blob
//! is on disk, whole and synchronised, before anybody learns of it. What is read of a blob was compared with what
//! was written.

use std::ops::Range;
use std::pin::Pin;

use bytes::Bytes;
use futures_core::Stream;

use crate::Result;
use crate::blob::{Compression, Content, ImageFacts};
use crate::ids::{BlobId, OperationId, UploadId};
use crate::node::NodeFuture;

/// Bytes on their way to or from a disk.
pub type ByteStream = Pin<Box<dyn Stream<Item = Result<Bytes>> + Send>>;

/// A file that grows, by what explains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Draft {
    /// A caller sends it.
    Upload(UploadId),
    /// An operation fetches it.
    Fetch(OperationId),
    /// It is copied from another node.
    Copy(BlobId),
    /// A machine writes it: a picture of its screen, a copy of its disk.
    Vm(BlobId),
}

/// A file that a node has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredFile {
    pub what: StoredFileKind,
    /// Unix time when it was last written, or used if it is a conversion.
    pub touched: f64,
    /// In bytes.
    pub size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StoredFileKind {
    Draft(Draft),
    Blob(BlobId),
    Conversion(BlobId),
}

/// Everything that the control plane may ask of a node's disk.
pub trait StorageApi: Send + Sync {
    /// How many bytes a draft has; nothing if there is none.
    fn draft_size(&self, draft: Draft) -> NodeFuture<'_, Option<u64>>;

    /// Appends what comes, and says how long the draft is then. It begins at the end, which must be `at` if that is
    /// given ([`Error::Conflict`] otherwise). When the stream fails, what came before stays if `at` was given, for then
    /// it is where it belongs; without it the draft is as long as before. A draft does not grow beyond `most` bytes ([`Error::TooLarge`]), and a full disk is [`Error::Insufficient`]; in both cases the draft
    /// is then as long as before.
    ///
    /// [`Error::Conflict`]: crate::Error::Conflict
    /// [`Error::TooLarge`]: crate::Error::TooLarge
    /// [`Error::Insufficient`]: crate::Error::Insufficient
    fn append(&self, draft: Draft, at: Option<u64>, most: u64, data: ByteStream) -> NodeFuture<'_, u64>;

    /// Cuts a draft; whoever appends to it at that moment is interrupted. [`Error::Invalid`] beyond its end.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    fn truncate(&self, draft: Draft, size: u64) -> NodeFuture<'_, ()>;

    /// Removes a draft. Nothing there is no error.
    fn remove_draft(&self, draft: Draft) -> NodeFuture<'_, ()>;

    /// Unpacks a draft in its place, if it is packed.
    fn unpack(&self, draft: Draft) -> NodeFuture<'_, Option<Compression>>;

    /// What a draft holds: summed up while it came in, or read once more.
    fn content(&self, draft: Draft) -> NodeFuture<'_, Content>;

    /// Makes the bytes of a draft those of a blob, on disk and synchronised, and says what they are. The draft stays,
    /// but nothing can be added to it while the blob is there. A blob that is there already is replaced.
    fn keep(&self, draft: Draft, blob: BlobId) -> NodeFuture<'_, Content>;

    /// Looks at a blob as a disk image. [`Error::Invalid`] with the reason if it is none that anybody should use.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    fn inspect(&self, blob: BlobId) -> NodeFuture<'_, ImageFacts>;

    /// Reads a part of a blob. Every byte is checked before it is handed out: the stream fails with
    /// [`Error::Internal`] instead of yielding a damaged one. [`Error::NotFound`] if the file is not there.
    ///
    /// [`Error::Internal`]: crate::Error::Internal
    /// [`Error::NotFound`]: crate::Error::NotFound
    fn read(&self, blob: BlobId, range: Range<u64>) -> NodeFuture<'_, ByteStream>;

    /// Reads a blob from its first to its last byte. Says what is wrong with it, if anything is.
    fn verify<'a>(&'a self, blob: BlobId, content: &'a Content) -> NodeFuture<'a, Option<String>>;

    /// Removes a blob and its conversion. Nothing there is no error.
    fn remove(&self, blob: BlobId) -> NodeFuture<'_, ()>;

    /// Makes the copy of a blob that machines use: qcow2, with nothing behind it. One that is there is left alone.
    /// [`Error::Invalid`] if the image turns out to be one that nobody should use.
    ///
    /// [`Error::Invalid`]: crate::Error::Invalid
    fn convert<'a>(&'a self, blob: BlobId, facts: &'a ImageFacts) -> NodeFuture<'a, ()>;

    /// The same for a blob that holds only what differs from the conversion of `base`, which the node has: the two
    /// are joined, and the result needs neither. [`Error::Unavailable`] if the conversion of the base is not there.
    ///
    /// [`Error::Unavailable`]: crate::Error::Unavailable
    fn convert_thin(&self, blob: BlobId, base: BlobId) -> NodeFuture<'_, ()>;

    /// Removes a conversion. Nothing there is no error.
    fn remove_conversion(&self, blob: BlobId) -> NodeFuture<'_, ()>;

    /// Every file that is there, whether it should be or not.
    fn find(&self) -> NodeFuture<'_, Vec<StoredFile>>;
}
