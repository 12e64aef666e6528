//! Parses the header of a qcow2 image, as far as it matters for whether the image is safe to open, and the tables that
//! locate its data. Every offset, count and size in it is untrusted.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use muster_types::{Error, Result};
use serde_json::{Map, Value};

use super::format::invalid;
use crate::files::io_error;

pub(super) const MAGIC: &[u8] = b"QFI\xfb";

/// Incompatible features.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Header extensions.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE_NAME: u32 = 0x4441_5441;
const ENCRYPTION: u32 = 0x0537_be77;

/// The maximum size of a table, which readers allocate. No image needs more.
const MAX_TABLE_SIZE: u64 = 32 << 20;
const MAX_SNAPSHOTS: u32 = 1024;
const MIN_SNAPSHOT_SIZE: u64 = 40;

/// The bits of a table entry that contain the offset.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes. Not used with subclusters, which have their own bits.
const ZEROS: u64 = 1;
/// The number of subclusters of a cluster.
const SUBCLUSTERS: u64 = 32;

/// An image that is safe to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Qcow2 {
    /// The size of the disk that a guest sees.
    pub(crate) virtual_size: u64,
    version: u32,
    cluster_size: u64,
    zstd: bool,
    extended_l2: bool,
    /// The offset of the L1 table.
    l1_table: u64,
}

impl Qcow2 {
    /// Returns the `format_details` of [`ImageFacts`](muster_types::blob::ImageFacts).
    pub(crate) fn format_details(&self) -> Map<String, Value> {
        let facts = [
            ("cluster_size", self.cluster_size.into()),
            ("compat", if self.version == 2 { "0.10" } else { "1.1" }.into()),
            ("compression type", if self.zstd { "zstd" } else { "zlib" }.into()),
            ("extended l2", self.extended_l2.into()),
        ];
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Refuses an image with data beyond the end of the file, or with more than `max_data` bytes of data. Reads every table
    /// once, and only if all of them fit into the file.
    pub(super) fn require_complete(
        &self,
        file: &File,
        size: u64,
        max_data: u64,
        should_continue: &dyn Fn() -> bool,
    ) -> Result<()> {
        let entry_size = if self.extended_l2 { 16 } else { 8 };
        let bytes_per_l2_table = self.cluster_size * (self.cluster_size / entry_size);
        let l1_entries = read_table(file, self.l1_table, self.virtual_size.div_ceil(bytes_per_l2_table) * 8)?;
        let count = l1_entries.iter().filter(|entry| **entry & OFFSET_MASK != 0).count() as u64;
        if count.saturating_mul(self.cluster_size) > size {
            return Err(invalid("the image is truncated or damaged: its tables are larger than the file"));
        }
        let mut allocated = 0u64;
        for (index, entry) in (0u64..).zip(l1_entries) {
            let offset = entry & OFFSET_MASK;
            if offset == 0 {
                continue;
            }
            if !should_continue() {
                return Err(Error::Unavailable("the request was cancelled".into()));
            }
            let start = index * bytes_per_l2_table;
            let clusters = (self.virtual_size - start).min(bytes_per_l2_table).div_ceil(self.cluster_size);
            let length = clusters * entry_size;
            if !offset.is_multiple_of(self.cluster_size) {
                return Err(invalid("the image is damaged: a table is not aligned to a cluster"));
            }
            if offset.checked_add(length).is_none_or(|end| end > size) {
                return Err(invalid("the image is truncated: a table is beyond the end of the file"));
            }
            let table = read_table(file, offset, length)?;
            let step = if self.extended_l2 { 2 } else { 1 };
            for (entry, cluster) in table.chunks_exact(step).zip(0u64..) {
                let visible = self.virtual_size - start - cluster * self.cluster_size;
                let end = self.data_end(entry[0], entry.get(1).copied(), visible)?;
                if end > size {
                    return Err(invalid("the image is truncated: data is beyond the end of the file"));
                }
                allocated += u64::from(end > 0);
            }
            if allocated.saturating_mul(self.cluster_size) > max_data {
                return Err(invalid("the image contains far more data than its size allows"));
            }
        }
        Ok(())
    }

    /// Returns the end of an entry's data in the file, or 0 if it has no data. A guest sees `visible` bytes of it.
    fn data_end(&self, entry: u64, bitmap: Option<u64>, visible: u64) -> Result<u64> {
        if entry & COMPRESSED != 0 {
            let shift = 62 - (self.cluster_size.trailing_zeros() - 8);
            let offset = entry & ((1 << shift) - 1);
            let extra_sectors = (entry & (COMPRESSED - 1)) >> shift;
            let last = if extra_sectors == 0 { offset } else { (offset & !511) + extra_sectors * 512 };
            // The last sector may be incomplete: the length of compressed data is not stored.
            return Ok(last + 1);
        }
        let offset = entry & OFFSET_MASK;
        let length = match bitmap {
            // The lower half has the bits of the allocated subclusters.
            Some(bitmap) => {
                let subclusters =
                    SUBCLUSTERS - u64::from(((bitmap & u64::from(u32::MAX)) as u32).leading_zeros());
                subclusters * (self.cluster_size / SUBCLUSTERS)
            }
            None if entry & ZEROS != 0 => 0,
            None => self.cluster_size,
        };
        if offset == 0 || length == 0 {
            return Ok(0);
        }
        if !offset.is_multiple_of(self.cluster_size) {
            return Err(invalid("the image is damaged: data is not aligned to a cluster"));
        }
        // The disk may end within its last cluster, and the file with it.
        Ok(offset + length.min(visible))
    }
}

/// Reads the entries of a table.
fn read_table(file: &File, offset: u64, length: u64) -> Result<Vec<u64>> {
    let length = usize::try_from(length).map_err(|_| invalid("the image has a table that is too large"))?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            invalid("the image is truncated: a table is beyond the end of the file")
        }
        _ => io_error("failed to read an image")(error),
    })?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry)).collect())
}

/// Reads integers from the header. An offset beyond its end is an error.
struct Header<'a>(&'a [u8]);

impl Header<'_> {
    fn bytes<const N: usize>(&self, offset: usize) -> Result<[u8; N]> {
        let bytes = offset.checked_add(N).and_then(|end| self.0.get(offset..end)?.try_into().ok());
        bytes.ok_or_else(|| invalid("the image is truncated within its header"))
    }

    fn u32(&self, offset: usize) -> Result<u32> {
        self.bytes(offset).map(u32::from_be_bytes)
    }

    fn u64(&self, offset: usize) -> Result<u64> {
        self.bytes(offset).map(u64::from_be_bytes)
    }
}

/// Parses a header. `size` is the size of the file, `head` its beginning.
pub(super) fn read(head: &[u8], size: u64) -> Result<Qcow2> {
    let header = Header(head);
    let version = header.u32(4)?;
    if !(2..=3).contains(&version) {
        return Err(invalid("the image has an unsupported qcow2 version"));
    }
    if header.u64(8)? != 0 || header.u32(16)? != 0 {
        return Err(invalid("the image has a backing file, which could be any file of the host"));
    }
    let cluster_bits = header.u32(20)?;
    if !(9..=21).contains(&cluster_bits) {
        return Err(invalid("the image has an invalid cluster size"));
    }
    let cluster_size = 1u64 << cluster_bits;
    let virtual_size = header.u64(24)?;
    if header.u32(32)? != 0 {
        return Err(invalid("the image is encrypted"));
    }
    let features = Version3Fields::read(&header, version, cluster_bits)?;
    check_extensions(&header, features.header_length, cluster_size)?;
    check_tables(&header, size, virtual_size, cluster_size, features.extended_l2)?;
    let (zstd, extended_l2, l1_table) = (features.zstd, features.extended_l2, header.u64(40)?);
    Ok(Qcow2 { virtual_size, version, cluster_size, zstd, extended_l2, l1_table })
}

/// The fields that version 3 added.
struct Version3Fields {
    header_length: usize,
    zstd: bool,
    extended_l2: bool,
}

impl Version3Fields {
    fn read(header: &Header<'_>, version: u32, cluster_bits: u32) -> Result<Self> {
        if version == 2 {
            return Ok(Self { header_length: 72, zstd: false, extended_l2: false });
        }
        let features = header.u64(72)?;
        if features & CORRUPT != 0 {
            return Err(invalid("the image is marked as corrupt"));
        }
        if features & EXTERNAL_DATA != 0 {
            return Err(invalid(
                "the image has its data in another file, which could be any file of the host",
            ));
        }
        if features & !(DIRTY | COMPRESSION_TYPE | EXTENDED_L2) != 0 {
            return Err(invalid("the image requires unknown qcow2 features"));
        }
        if header.u32(96)? > 6 {
            return Err(invalid("the image has an invalid reference count size"));
        }
        let length = header.u32(100)?;
        if length < 104 || length % 8 != 0 || u64::from(length) > 1 << cluster_bits {
            return Err(invalid("the image has an invalid header length"));
        }
        let compression = if length > 104 { header.bytes::<1>(104)?[0] } else { 0 };
        if compression > 1 || (compression != 0) != (features & COMPRESSION_TYPE != 0) {
            return Err(invalid("the image has an unknown compression type"));
        }
        let extended_l2 = features & EXTENDED_L2 != 0;
        if extended_l2 && cluster_bits < 14 {
            return Err(invalid("the image has clusters that are too small for extended L2 entries"));
        }
        Ok(Self { header_length: length as usize, zstd: compression == 1, extended_l2 })
    }
}

/// Checks the header extensions, which are within the first cluster.
fn check_extensions(header: &Header<'_>, start: usize, cluster_size: u64) -> Result<()> {
    let mut offset = start;
    // The cluster may end within the last eight bytes.
    while offset as u64 + 8 <= cluster_size {
        let (kind, length) = (header.u32(offset)?, header.u32(offset + 4)?);
        match kind {
            0 => return Ok(()),
            BACKING_FORMAT => return Err(invalid("the image names the format of a backing file")),
            DATA_FILE_NAME => return Err(invalid("the image names another file for its data")),
            ENCRYPTION => return Err(invalid("the image is encrypted")),
            _ => {}
        }
        let next = (offset as u64 + 8 + u64::from(length)).next_multiple_of(8);
        if next > cluster_size {
            return Err(invalid("the image has a header extension that exceeds the first cluster"));
        }
        offset = usize::try_from(next)
            .map_err(|_| invalid("the image has a header extension that exceeds the first cluster"))?;
    }
    Ok(())
}

/// Checks that the tables are within the file and have the necessary size.
fn check_tables(
    header: &Header<'_>,
    size: u64,
    virtual_size: u64,
    cluster_size: u64,
    extended_l2: bool,
) -> Result<()> {
    let (entries, table) = (u64::from(header.u32(36)?), header.u64(40)?);
    let (refcount_table, refcount_clusters) = (header.u64(48)?, u64::from(header.u32(56)?));
    let (snapshots, snapshot_table) = (header.u32(60)?, header.u64(64)?);
    let fits = |offset: u64, length: u64| {
        offset != 0
            && offset.is_multiple_of(cluster_size)
            && offset.checked_add(length).is_some_and(|end| end <= size)
    };
    let bytes_per_l2_table = cluster_size * (cluster_size / if extended_l2 { 16 } else { 8 });
    if entries * 8 > MAX_TABLE_SIZE {
        return Err(invalid("the image has a table that is larger than any disk needs"));
    }
    if entries < virtual_size.div_ceil(bytes_per_l2_table) {
        return Err(invalid("the image has a table that is too small for its disk"));
    }
    if entries > 0 && !fits(table, entries * 8) {
        return Err(invalid("the image is truncated: a table is beyond the end of the file"));
    }
    let refcount_size = refcount_clusters.checked_mul(cluster_size).filter(|size| *size <= MAX_TABLE_SIZE);
    if refcount_size.is_none_or(|length| length == 0 || !fits(refcount_table, length)) {
        return Err(invalid("the image is truncated: its refcount table is beyond the end of the file"));
    }
    if snapshots > MAX_SNAPSHOTS {
        return Err(invalid(&format!("the image has more than {MAX_SNAPSHOTS} snapshots")));
    }
    if snapshots > 0 && !fits(snapshot_table, u64::from(snapshots) * MIN_SNAPSHOT_SIZE) {
        return Err(invalid("the image is truncated: its snapshot table is beyond the end of the file"));
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
