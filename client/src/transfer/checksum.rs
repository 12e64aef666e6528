//! The checksum of transferred content.

use aws_lc_rs::digest::{Context, SHA512};

/// The number of bytes read or passed on at a time.
pub(super) const CHUNK_SIZE: usize = 1 << 20;

/// The SHA-512 of content that is processed from its beginning. Parts of it may be seen repeatedly.
pub(super) struct ContentHasher {
    context: Context,
    /// The number of bytes hashed so far.
    hashed: u64,
}

impl ContentHasher {
    pub(super) fn new() -> Self {
        Self { context: Context::new(&SHA512), hashed: 0 }
    }

    /// Returns the number of bytes hashed so far.
    pub(super) fn hashed(&self) -> u64 {
        self.hashed
    }

    /// Hashes the bytes at `offset` that have not been hashed yet.
    pub(super) fn update_at(&mut self, offset: u64, bytes: &[u8]) {
        let skip = self.hashed.saturating_sub(offset);
        if skip < bytes.len() as u64 {
            self.update(&bytes[skip as usize..]);
        }
    }

    /// Hashes the next bytes.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
        self.hashed += bytes.len() as u64;
    }

    /// Returns the checksum as hexadecimal digits.
    pub(super) fn digest(&self) -> String {
        hex::encode(self.context.clone().finish())
    }
}
