//! The content of a backup: parts of records, each with a checksum. See docs/decisions/0097.
//!
//! ```text
//! part    = 'P' header, { 'R' record }, 'E' footer         header and footer are JSON
//! archive = manifest, seed, tables in the order of the schema, blobs, 'Z' number of parts
//! ```
//!
//! Every frame is a letter, its length and its bytes. A reader allocates only what it has received, up to a limit.

#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};

use aws_lc_rs::digest;
use muster_store::backup::MAX_ROW_BYTES;
use muster_types::backup::BlobMode;
use muster_types::ids::BlobId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::BackupError;

/// The version of this format.
pub const FORMAT: u32 = 1;
/// The maximum number of bytes of a header or a footer.
const MAX_JSON_BYTES: usize = 64 << 10;
/// The maximum number of bytes of a record: a row, or a part of a blob.
const MAX_RECORD_BYTES: usize = MAX_ROW_BYTES;

const PART: u8 = b'P';
const RECORD: u8 = b'R';
const PART_END: u8 = b'E';
const ARCHIVE_END: u8 = b'Z';

/// The first part of a backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    /// The Unix time of the snapshot.
    pub created: f64,
    /// The release that created it.
    pub release: String,
    pub schema_version: i64,
    pub blobs: BlobMode,
}

/// The header of a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "part", rename_all = "lowercase", deny_unknown_fields)]
pub enum PartHeader {
    /// One record: the manifest as JSON.
    Manifest,
    /// One record: the seed of the cluster.
    Seed,
    /// A record for each row.
    Table { name: String },
    /// The content, in records of at most 1 MiB.
    Blob { uuid: BlobId, size: u64 },
    /// No record: the blob was deleted after the snapshot of the database.
    DeletedBlob { uuid: BlobId },
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartFooter {
    records: u64,
    bytes: u64,
    sha256: String,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArchiveFooter {
    parts: u64,
}

/// Counts and hashes the records of a part.
struct PartHasher {
    records: u64,
    bytes: u64,
    hash: digest::Context,
}

impl PartHasher {
    fn new() -> Self {
        Self { records: 0, bytes: 0, hash: digest::Context::new(&digest::SHA256) }
    }

    fn add(&mut self, record: &[u8]) {
        self.records += 1;
        self.bytes += record.len() as u64;
        self.hash.update(&(record.len() as u64).to_be_bytes());
        self.hash.update(record);
    }

    fn finish(self) -> PartFooter {
        PartFooter { records: self.records, bytes: self.bytes, sha256: hex::encode(self.hash.finish()) }
    }
}

/// Writes the parts of a backup.
pub struct ArchiveWriter<W: Write> {
    output: W,
    part: Option<PartHasher>,
    parts: u64,
}

impl<W: Write> std::fmt::Debug for ArchiveWriter<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ArchiveWriter")
    }
}

impl<W: Write> ArchiveWriter<W> {
    pub fn new(output: W) -> Self {
        Self { output, part: None, parts: 0 }
    }

    fn write_frame(&mut self, kind: u8, content: &[u8]) -> io::Result<()> {
        let length = u32::try_from(content.len()).map_err(|_| io::Error::other("a record is too large"))?;
        self.output.write_all(&[kind])?;
        self.output.write_all(&length.to_be_bytes())?;
        self.output.write_all(content)
    }

    fn write_json(&mut self, kind: u8, content: &impl Serialize) -> io::Result<()> {
        self.write_frame(kind, &serde_json::to_vec(content)?)
    }

    /// Ends the current part, and begins another one.
    pub fn begin(&mut self, header: &PartHeader) -> io::Result<()> {
        self.end_part()?;
        self.write_json(PART, header)?;
        self.part = Some(PartHasher::new());
        self.parts += 1;
        Ok(())
    }

    /// Adds a record to the current part.
    pub fn add(&mut self, record: &[u8]) -> io::Result<()> {
        if record.len() > MAX_RECORD_BYTES {
            return Err(io::Error::other(format!("a row has more than {} MiB", MAX_RECORD_BYTES >> 20)));
        }
        self.write_frame(RECORD, record)?;
        self.part.as_mut().ok_or_else(|| io::Error::other("a record without a part"))?.add(record);
        Ok(())
    }

    fn end_part(&mut self) -> io::Result<()> {
        match self.part.take() {
            Some(part) => self.write_json(PART_END, &part.finish()),
            None => Ok(()),
        }
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.end_part()?;
        self.write_json(ARCHIVE_END, &ArchiveFooter { parts: self.parts })?;
        Ok(self.output)
    }
}

/// Reads the parts of a backup, and verifies their checksums.
pub(super) struct ArchiveReader<R: Read> {
    input: R,
    part: Option<PartHasher>,
    parts: u64,
    is_ended: bool,
}

impl<R: Read> std::fmt::Debug for ArchiveReader<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ArchiveReader")
    }
}

impl<R: Read> ArchiveReader<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, part: None, parts: 0, is_ended: false }
    }

    fn read_frame(&mut self) -> Result<(u8, Vec<u8>), BackupError> {
        let mut start = [0; 5];
        self.input.read_exact(&mut start)?;
        let [kind, length @ ..] = start;
        let length = u32::from_be_bytes(length);
        let limit = if kind == RECORD { MAX_RECORD_BYTES } else { MAX_JSON_BYTES };
        if length as usize > limit {
            return Err(BackupError::Damaged(format!("a record of {length} bytes is larger than permitted")));
        }
        let mut content = Vec::new();
        (&mut self.input).take(u64::from(length)).read_to_end(&mut content)?;
        if content.len() < length as usize {
            return Err(BackupError::Damaged("the file ends within a record".into()));
        }
        Ok((kind, content))
    }

    /// Returns the header of the next part, or `None` at the end. All records of the current one must have been read.
    pub(super) fn next_part(&mut self) -> Result<Option<PartHeader>, BackupError> {
        if self.is_ended {
            return Ok(None);
        }
        if self.part.is_some() {
            return Err(BackupError::Damaged("a part has more records than expected".into()));
        }
        match self.read_frame()? {
            (PART, content) => {
                self.part = Some(PartHasher::new());
                self.parts += 1;
                parse(&content).map(Some)
            }
            (ARCHIVE_END, content) => {
                self.is_ended = true;
                if parse::<ArchiveFooter>(&content)?.parts != self.parts {
                    return Err(BackupError::Damaged("the number of parts differs".into()));
                }
                let mut rest = [0; 1];
                if self.input.read(&mut rest)? != 0 {
                    return Err(BackupError::Damaged("data follows the end of the backup".into()));
                }
                Ok(None)
            }
            (kind, _) => Err(unexpected(kind)),
        }
    }

    /// Returns the next record of the current part, or `None` at its end.
    pub(super) fn next_record(&mut self) -> Result<Option<Vec<u8>>, BackupError> {
        if self.part.is_none() {
            return Ok(None);
        }
        match self.read_frame()? {
            (RECORD, content) => {
                if let Some(part) = &mut self.part {
                    part.add(&content);
                }
                Ok(Some(content))
            }
            (PART_END, content) => {
                let found = self.part.take().map(PartHasher::finish);
                if found != Some(parse(&content)?) {
                    return Err(BackupError::Damaged(format!("the checksum of part {} differs", self.parts)));
                }
                Ok(None)
            }
            (kind, _) => Err(unexpected(kind)),
        }
    }

    /// Returns the only record of the current part.
    pub(super) fn only_record(&mut self) -> Result<Vec<u8>, BackupError> {
        let missing = || BackupError::Damaged("a part has no record".into());
        let record = self.next_record()?.ok_or_else(missing)?;
        match self.next_record()? {
            None => Ok(record),
            Some(_) => Err(BackupError::Damaged("a part has more records than expected".into())),
        }
    }
}

fn unexpected(kind: u8) -> BackupError {
    BackupError::Damaged(format!("an unexpected record of type {:?}", char::from(kind)))
}

fn parse<T: DeserializeOwned>(content: &[u8]) -> Result<T, BackupError> {
    serde_json::from_slice(content).map_err(|error| BackupError::Damaged(error.to_string()))
}
