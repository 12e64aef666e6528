//! Checksums: of a whole content, and of each piece of it so that a part can be checked when it is read.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA512};
use bytes::Bytes;
use muster_types::blob::{Checksums, Content};
use muster_types::{Error, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use tokio::task::{JoinError, JoinHandle};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::places::{is_damage, unreadable};

/// How much is summed up, and checked, at once.
pub(super) const PIECE: usize = 1 << 20;

/// The first bytes of a file of sums.
const MAGIC: &[u8; 8] = b"muster\x01s";

/// What is known of a content of which every byte has been seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Summed {
    pub(super) content: Content,
    pub(super) pieces: Pieces,
}

/// A content on its way through the hash functions, which run beside each other in two lanes of about equal length.
#[derive(Debug)]
pub(super) struct Summing {
    pub(super) size: u64,
    long: Lane<Long>,
    short: Lane<Short>,
}

/// The slowest function has a lane for itself.
struct Long(Context);

struct Short {
    sha1: Context,
    sha256: Context,
    xxh128: Xxh3,
    piece: Xxh3,
    /// How far the last piece has come.
    filled: usize,
    pieces: Vec<u64>,
}

/// Something that is worked on in a thread, or waits for that.
pub(super) enum Lane<T> {
    Idle(T),
    Busy(JoinHandle<T>),
}

impl<T> std::fmt::Debug for Lane<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Idle(_) => "Idle",
            Self::Busy(_) => "Busy",
        })
    }
}

impl<T: Send + 'static> Lane<T> {
    /// Begins work, which goes on when nobody waits for it any more.
    pub(super) fn go(work: impl FnOnce() -> T + Send + 'static) -> Self {
        Self::Busy(tokio::task::spawn_blocking(work))
    }

    pub(super) async fn end(self) -> Result<T> {
        match self {
            Self::Idle(state) => Ok(state),
            Self::Busy(job) => job.await.map_err(ended),
        }
    }
}

/// Whatever ended a thread's work, the files are not to blame.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn ended(error: JoinError) -> Error {
    tracing::error!(%error, "work on the disk ended early");
    Error::Unavailable("work on the disk ended early".into())
}

impl Summing {
    pub(super) fn new() -> Self {
        let short = Short {
            sha1: Context::new(&SHA1_FOR_LEGACY_USE_ONLY),
            sha256: Context::new(&SHA256),
            xxh128: Xxh3::new(),
            piece: Xxh3::new(),
            filled: 0,
            pieces: Vec::new(),
        };
        Self { size: 0, long: Lane::Idle(Long(Context::new(&SHA512))), short: Lane::Idle(short) }
    }

    /// Takes in what comes next. Comes back while that is being worked on, but only one such thing is at a time.
    pub(super) async fn feed(self, data: Bytes) -> Result<Self> {
        let size = self.size + data.len() as u64;
        let (mut long, mut short) = (self.long.end().await?, self.short.end().await?);
        let same = data.clone();
        let long = Lane::go(move || {
            long.0.update(&same);
            long
        });
        let short = Lane::go(move || {
            short.take(&data);
            short
        });
        Ok(Self { size, long, short })
    }

    /// The sums so far, and what it takes to go on.
    pub(super) async fn sums(self) -> Result<(Summed, Self)> {
        let size = self.size;
        let (long, short) = (self.long.end().await?, self.short.end().await?);
        let checksums = Checksums {
            sha1: hex(short.sha1.clone().finish().as_ref()),
            sha256: hex(short.sha256.clone().finish().as_ref()),
            sha512: hex(long.0.clone().finish().as_ref()),
            xxh128: hex(&short.xxh128.digest128().to_be_bytes()),
        };
        let mut sums = short.pieces.clone();
        if short.filled > 0 {
            sums.push(short.piece.digest());
        }
        let summed = Summed { content: Content { size, checksums }, pieces: Pieces { size, sums } };
        Ok((summed, Self { size, long: Lane::Idle(long), short: Lane::Idle(short) }))
    }
}

impl Short {
    fn take(&mut self, data: &[u8]) {
        self.sha1.update(data);
        self.sha256.update(data);
        self.xxh128.update(data);
        let mut rest = data;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(PIECE - self.filled));
            self.piece.update(now);
            self.filled += now.len();
            if self.filled == PIECE {
                self.pieces.push(self.piece.digest());
                self.piece.reset();
                self.filled = 0;
            }
            rest = later;
        }
    }
}

/// Sums up a file from its first to its last byte.
pub(super) async fn sum_up(file: File, gently: bool) -> Result<Summed> {
    let file = Arc::new(file);
    let mut summing = Summing::new();
    loop {
        let (from, at) = (file.clone(), summing.size);
        let read = move || -> Result<Bytes> {
            let mut data = vec![0; PIECE];
            let mut filled = 0;
            while filled < PIECE {
                let came = from.read_at(&mut data[filled..], at + filled as u64);
                match came.map_err(unreadable("a file cannot be read"))? {
                    0 => break,
                    came => filled += came,
                }
            }
            data.truncate(filled);
            if gently {
                // Others need the memory more than what is read once a day. That it fails does not matter.
                let (at, length) = (at.cast_signed(), filled.cast_signed() as i64);
                let _ = posix_fadvise(&*from, at, length, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
            }
            Ok(data.into())
        };
        let data = blocking(read).await?;
        if data.is_empty() {
            return Ok(summing.sums().await?.0);
        }
        summing = summing.feed(data).await?;
    }
}

/// Does something that blocks. It goes on when nobody waits for it any more.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    Lane::go(work).end().await?
}

/// The sums of the pieces of a content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pieces {
    pub(super) size: u64,
    sums: Vec<u64>,
}

impl Pieces {
    /// Whether a piece is what it was.
    pub(super) fn is_right(&self, number: usize, data: &[u8]) -> bool {
        self.sums.get(number) == Some(&xxh3_64(data))
    }

    /// The offset of the first piece that differs.
    pub(super) fn first_difference(&self, other: &Self) -> Option<u64> {
        let same = self.sums.iter().zip(&other.sums).take_while(|(one, other)| one == other).count();
        let all = self.size == other.size && same == self.sums.len() && same == other.sums.len();
        (!all).then_some(same as u64 * PIECE as u64)
    }

    /// As a file: what it is, the size of the content, the sums, and the sum of all that.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let numbers = std::iter::once(self.size).chain(self.sums.iter().copied());
        let mut bytes: Vec<u8> = MAGIC.iter().copied().chain(numbers.flat_map(u64::to_le_bytes)).collect();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Nothing if these are not the bytes of one.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (body, sum) = bytes.split_last_chunk::<8>()?;
        let (numbers, []) = body.strip_prefix(MAGIC)?.as_chunks::<8>() else { return None };
        let (size, sums) = numbers.split_first()?;
        let size = u64::from_le_bytes(*size);
        let right =
            xxh3_64(body) == u64::from_le_bytes(*sum) && sums.len() as u64 == size.div_ceil(PIECE as u64);
        right.then(|| Self { size, sums: sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect() })
    }

    /// Nothing if the file is missing or damaged.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        match std::fs::read(path) {
            Ok(bytes) => Ok(Self::from_bytes(&bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound || is_damage(&error) => Ok(None),
            Err(error) => Err(unreadable("the sums of a blob cannot be read")(error)),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_sums_are_the_known_ones_however_the_bytes_come() {
        let mut summing = Summing::new();
        for part in ["ab", "", "c"] {
            summing = summing.feed(Bytes::from(part)).await.unwrap();
        }
        let (summed, _) = summing.sums().await.unwrap();
        let sums = summed.content.checksums;
        assert_eq!(sums.sha1, "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(sums.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(sums.sha512.starts_with("ddaf35a193617abacc417349ae204131"));
        assert_eq!(sums.xxh128, "06b05ab6733a618578af5f94892f3950");
        assert_eq!(summed.content.size, 3);
    }

    #[tokio::test]
    async fn pieces_do_not_depend_on_how_the_bytes_come() {
        let data: Vec<u8> =
            (0..5 * PIECE / 2).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        let mut expected = None;
        for step in [data.len(), PIECE, 700_001, PIECE / 2 + 1] {
            let mut summing = Summing::new();
            for part in data.chunks(step) {
                summing = summing.feed(Bytes::copy_from_slice(part)).await.unwrap();
            }
            let summed = summing.sums().await.unwrap().0;
            assert_eq!(*expected.get_or_insert(summed.clone()), summed, "{step}");
        }
        let pieces = expected.unwrap().pieces;
        assert!(pieces.is_right(2, &data[2 * PIECE..]) && !pieces.is_right(1, &data[..PIECE]));
        assert!(!pieces.is_right(3, &[]));
    }

    #[test]
    fn a_damaged_file_of_sums_is_noticed() {
        let pieces = Pieces { size: PIECE as u64 + 1, sums: vec![1, 2] };
        let bytes = pieces.to_bytes();
        assert_eq!(Pieces::from_bytes(&bytes), Some(pieces));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(Pieces::from_bytes(&damaged), None, "{at}");
            assert_eq!(Pieces::from_bytes(&bytes[..at]), None, "{at}");
        }
    }
}
