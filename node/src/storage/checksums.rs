//! Checksums of whole files, and of their chunks so that a part can be verified when it is read.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA512};
use bytes::Bytes;
use muster_types::blob::{Checksums, ContentDigest};
use muster_types::{Error, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use tokio::task::{JoinError, JoinHandle};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::layout::{is_corruption, read_error};

/// The unit of hashing and verification.
pub(super) const CHUNK_SIZE: usize = 1 << 20;

/// The first bytes of a checksum file.
const MAGIC: &[u8; 8] = b"muster\x01s";

/// The checksums of a complete file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HashedContent {
    pub(super) content: ContentDigest,
    pub(super) chunks: ChunkChecksums,
}

/// Hashes data with several algorithms, in two background tasks that take about the same time.
#[derive(Debug)]
pub(super) struct ContentHasher {
    pub(super) size: u64,
    sha512: BackgroundTask<Sha512Task>,
    others: BackgroundTask<OtherHashes>,
}

/// SHA-512 is the slowest algorithm and has its own task.
struct Sha512Task(Context);

struct OtherHashes {
    sha1: Context,
    sha256: Context,
    xxh128: Xxh3,
    chunk: Xxh3,
    /// The number of bytes in the current chunk.
    filled: usize,
    chunks: Vec<u64>,
}

/// A value that a blocking task is working on, or that is idle.
pub(super) enum BackgroundTask<T> {
    Idle(T),
    Busy(JoinHandle<T>),
}

impl<T> std::fmt::Debug for BackgroundTask<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Idle(_) => "Idle",
            Self::Busy(_) => "Busy",
        })
    }
}

impl<T: Send + 'static> BackgroundTask<T> {
    /// Starts a blocking task, which runs to completion even if its result is not awaited.
    pub(super) fn spawn(work: impl FnOnce() -> T + Send + 'static) -> Self {
        Self::Busy(tokio::task::spawn_blocking(work))
    }

    pub(super) async fn join(self) -> Result<T> {
        match self {
            Self::Idle(state) => Ok(state),
            Self::Busy(job) => job.await.map_err(task_failed),
        }
    }
}

/// Returns the error for a task that panicked or was cancelled, which is not evidence for a damaged file.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn task_failed(error: JoinError) -> Error {
    tracing::error!(%error, "disk task failed");
    Error::Unavailable("a disk task failed, see the log of the node".into())
}

impl ContentHasher {
    pub(super) fn new() -> Self {
        let others = OtherHashes {
            sha1: Context::new(&SHA1_FOR_LEGACY_USE_ONLY),
            sha256: Context::new(&SHA256),
            xxh128: Xxh3::new(),
            chunk: Xxh3::new(),
            filled: 0,
            chunks: Vec::new(),
        };
        Self {
            size: 0,
            sha512: BackgroundTask::Idle(Sha512Task(Context::new(&SHA512))),
            others: BackgroundTask::Idle(others),
        }
    }

    /// Hashes the next bytes in the background, after those of the previous call.
    pub(super) async fn feed(self, data: Bytes) -> Result<Self> {
        let size = self.size + data.len() as u64;
        let (mut sha512, mut others) = (self.sha512.join().await?, self.others.join().await?);
        let copy = data.clone();
        let sha512 = BackgroundTask::spawn(move || {
            sha512.0.update(&copy);
            sha512
        });
        let others = BackgroundTask::spawn(move || {
            others.update(&data);
            others
        });
        Ok(Self { size, sha512, others })
    }

    /// Returns the checksums so far, and the hasher to continue with.
    pub(super) async fn finish(self) -> Result<(HashedContent, Self)> {
        let size = self.size;
        let (sha512, others) = (self.sha512.join().await?, self.others.join().await?);
        let checksums = Checksums {
            sha1: hex::encode(others.sha1.clone().finish().as_ref()),
            sha256: hex::encode(others.sha256.clone().finish().as_ref()),
            sha512: hex::encode(sha512.0.clone().finish().as_ref()),
            xxh128: hex::encode(others.xxh128.digest128().to_be_bytes()),
        };
        let mut chunk_checksums = others.chunks.clone();
        if others.filled > 0 {
            chunk_checksums.push(others.chunk.digest());
        }
        let hashed = HashedContent {
            content: ContentDigest { size, checksums },
            chunks: ChunkChecksums { size, checksums: chunk_checksums },
        };
        Ok((
            hashed,
            Self { size, sha512: BackgroundTask::Idle(sha512), others: BackgroundTask::Idle(others) },
        ))
    }
}

impl OtherHashes {
    fn update(&mut self, data: &[u8]) {
        self.sha1.update(data);
        self.sha256.update(data);
        self.xxh128.update(data);
        let mut rest = data;
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(rest.len().min(CHUNK_SIZE - self.filled));
            self.chunk.update(head);
            self.filled += head.len();
            if self.filled == CHUNK_SIZE {
                self.chunks.push(self.chunk.digest());
                self.chunk.reset();
                self.filled = 0;
            }
            rest = tail;
        }
    }
}

/// Hashes a file. With `drop_cache`, its pages are dropped from the page cache.
pub(super) async fn hash_file(file: File, drop_cache: bool) -> Result<HashedContent> {
    let file = Arc::new(file);
    let mut hasher = ContentHasher::new();
    loop {
        let (source, offset) = (file.clone(), hasher.size);
        let read = move || -> Result<Bytes> {
            let mut data = vec![0; CHUNK_SIZE];
            let mut filled = 0;
            while filled < CHUNK_SIZE {
                let read = source.read_at(&mut data[filled..], offset + filled as u64);
                match read.map_err(read_error("failed to read a file"))? {
                    0 => break,
                    read => filled += read,
                }
            }
            data.truncate(filled);
            if drop_cache {
                // Data that is read once a day should not evict other pages. A failure does not matter.
                let (offset, length) = (offset.cast_signed(), filled.cast_signed() as i64);
                let _ = posix_fadvise(&*source, offset, length, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
            }
            Ok(data.into())
        };
        let data = run_blocking(read).await?;
        if data.is_empty() {
            return Ok(hasher.finish().await?.0);
        }
        hasher = hasher.feed(data).await?;
    }
}

/// Runs a closure on a blocking thread. It runs to completion even if the future is dropped.
pub(super) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    BackgroundTask::spawn(work).join().await?
}

/// The checksums of the chunks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChunkChecksums {
    pub(super) size: u64,
    checksums: Vec<u64>,
}

impl ChunkChecksums {
    /// Returns whether a chunk has its checksum.
    pub(super) fn matches(&self, number: usize, data: &[u8]) -> bool {
        self.checksums.get(number) == Some(&xxh3_64(data))
    }

    /// Returns the offset of the first chunk that differs.
    pub(super) fn first_difference(&self, other: &Self) -> Option<u64> {
        let same =
            self.checksums.iter().zip(&other.checksums).take_while(|(one, other)| one == other).count();
        let all = self.size == other.size && same == self.checksums.len() && same == other.checksums.len();
        (!all).then_some(same as u64 * CHUNK_SIZE as u64)
    }

    /// Returns the content of a checksum file: magic, size, checksums, and the checksum of all that.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let numbers = std::iter::once(self.size).chain(self.checksums.iter().copied());
        let mut bytes: Vec<u8> = MAGIC.iter().copied().chain(numbers.flat_map(u64::to_le_bytes)).collect();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Returns `None` if these bytes are not a valid checksum file.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (body, checksum) = bytes.split_last_chunk::<8>()?;
        let (numbers, []) = body.strip_prefix(MAGIC)?.as_chunks::<8>() else { return None };
        let (size, checksums) = numbers.split_first()?;
        let size = u64::from_le_bytes(*size);
        let is_valid = xxh3_64(body) == u64::from_le_bytes(*checksum)
            && checksums.len() as u64 == size.div_ceil(CHUNK_SIZE as u64);
        is_valid.then(|| Self {
            size,
            checksums: checksums.iter().map(|checksum| u64::from_le_bytes(*checksum)).collect(),
        })
    }

    /// Returns `None` if the file is missing or damaged.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        match std::fs::read(path) {
            Ok(bytes) => Ok(Self::from_bytes(&bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound || is_corruption(&error) => Ok(None),
            Err(error) => Err(read_error("failed to read the checksums of a blob")(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn computes_known_checksums_for_any_split_of_the_bytes() {
        let mut hasher = ContentHasher::new();
        for part in ["ab", "", "c"] {
            hasher = hasher.feed(Bytes::from(part)).await.unwrap();
        }
        let (hashed, _) = hasher.finish().await.unwrap();
        let checksums = hashed.content.checksums;
        assert_eq!(checksums.sha1, "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(checksums.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(checksums.sha512.starts_with("ddaf35a193617abacc417349ae204131"));
        assert_eq!(checksums.xxh128, "06b05ab6733a618578af5f94892f3950");
        assert_eq!(hashed.content.size, 3);
    }

    #[tokio::test]
    async fn chunk_checksums_do_not_depend_on_the_split_of_the_bytes() {
        let data: Vec<u8> =
            (0..5 * CHUNK_SIZE / 2).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        let mut expected = None;
        for step in [data.len(), CHUNK_SIZE, 700_001, CHUNK_SIZE / 2 + 1] {
            let mut hasher = ContentHasher::new();
            for part in data.chunks(step) {
                hasher = hasher.feed(Bytes::copy_from_slice(part)).await.unwrap();
            }
            let hashed = hasher.finish().await.unwrap().0;
            assert_eq!(*expected.get_or_insert(hashed.clone()), hashed, "{step}");
        }
        let chunks = expected.unwrap().chunks;
        assert!(chunks.matches(2, &data[2 * CHUNK_SIZE..]) && !chunks.matches(1, &data[..CHUNK_SIZE]));
        assert!(!chunks.matches(3, &[]));
    }

    #[test]
    fn detects_a_damaged_checksum_file() {
        let chunks = ChunkChecksums { size: CHUNK_SIZE as u64 + 1, checksums: vec![1, 2] };
        let bytes = chunks.to_bytes();
        assert_eq!(ChunkChecksums::from_bytes(&bytes), Some(chunks));
        for index in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[index] ^= 1;
            assert_eq!(ChunkChecksums::from_bytes(&damaged), None, "{index}");
            assert_eq!(ChunkChecksums::from_bytes(&bytes[..index]), None, "{index}");
        }
    }
}
