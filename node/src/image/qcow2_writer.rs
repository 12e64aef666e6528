//! Creates qcow2 images, empty or with a backing file, without running a program.
//!
//! ```text
//! header │ refcount table │ refcounts │ L1 table … [│ L2 table │ first cluster]
//! ```
//!
//! Clusters have 32 subclusters, so that a guest that writes 4 KiB does not cause the rest of the cluster to be copied
//! from the backing file. In a benchmark, such writes took a third of the time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const CLUSTER_BITS: u32 = 17;
const CLUSTER_SIZE: u64 = 1 << CLUSTER_BITS;

/// The number of bytes of the disk that one entry of the L1 table maps. Entries of L2 tables have 16 bytes.
const BYTES_PER_L1_ENTRY: u64 = CLUSTER_SIZE * (CLUSTER_SIZE / 16);

/// The feature bit of extended L2 entries, which have subclusters.
const EXTENDED_L2: u64 = 1 << 4;

/// The feature bit of an image whose data is in another file.
const EXTERNAL_DATA_FILE: u8 = 1 << 2;

/// The bitmap of a cluster of which all subclusters are allocated.
const ALL_SUBCLUSTERS: u64 = 0xffff_ffff;

/// The length of a version 3 header without extensions.
const HEADER_LEN: u32 = 104;

const BACKING_FORMAT: u32 = 0xe279_2aca;

/// The flag of a cluster with a reference count of 1.
const COPIED: u64 = 1 << 63;

/// A backing file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackingFile<'a> {
    /// Relative to the directory of the image.
    pub(crate) name: &'a str,
    pub(crate) format: &'a str,
}

/// Creates an image and syncs it to disk. `first_cluster` is the beginning of its disk; the rest is empty, or that of
/// the backing file.
pub(crate) fn create(
    path: &Path,
    virtual_size: u64,
    backing: Option<BackingFile<'_>>,
    first_cluster: Option<&[u8]>,
) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    write_to(&file, virtual_size, backing, first_cluster)?;
    file.sync_all()
}

fn write_to(
    file: &File,
    virtual_size: u64,
    backing: Option<BackingFile<'_>>,
    first_cluster: Option<&[u8]>,
) -> io::Result<()> {
    let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "the disk is too large for a qcow2 image");
    let l1_entries = virtual_size.div_ceil(BYTES_PER_L1_ENTRY).max(1);
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER_SIZE);
    let (refcount_table, refcounts, l1_table) = (CLUSTER_SIZE, 2 * CLUSTER_SIZE, 3 * CLUSTER_SIZE);
    let l2_table = l1_table + l1_clusters * CLUSTER_SIZE;
    let clusters = 3 + l1_clusters + if first_cluster.is_some() { 2 } else { 0 };
    // One cluster of refcounts covers these.
    if clusters > CLUSTER_SIZE / 2
        || first_cluster.is_some_and(|first_cluster| first_cluster.len() as u64 > CLUSTER_SIZE)
    {
        return Err(too_large());
    }
    let l1_entries = u32::try_from(l1_entries).map_err(|_| too_large())?;
    file.write_all_at(&header(virtual_size, l1_entries, backing)?, 0)?;
    file.write_all_at(&refcounts.to_be_bytes(), refcount_table)?;
    let refcount_values: Vec<u8> = (0..clusters).flat_map(|_| 1u16.to_be_bytes()).collect();
    file.write_all_at(&refcount_values, refcounts)?;
    if let Some(first_cluster) = first_cluster {
        let data = l2_table + CLUSTER_SIZE;
        file.write_all_at(&(l2_table | COPIED).to_be_bytes(), l1_table)?;
        file.write_all_at(&[data | COPIED, ALL_SUBCLUSTERS].map(u64::to_be_bytes).concat(), l2_table)?;
        file.write_all_at(first_cluster, data)?;
    }
    file.set_len(clusters * CLUSTER_SIZE)
}

fn header(virtual_size: u64, l1_entries: u32, backing: Option<BackingFile<'_>>) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the name of the backing file is too long");
    let mut extensions = Vec::new();
    if let Some(backing) = backing {
        let size = u32::try_from(backing.format.len()).map_err(|_| too_long())?;
        extensions.extend(BACKING_FORMAT.to_be_bytes());
        extensions.extend(size.to_be_bytes());
        extensions.extend(backing.format.as_bytes());
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    // The end of the extensions.
    extensions.extend([0; 8]);
    let name = backing.map_or(&[][..], |backing| backing.name.as_bytes());
    // A limit of the format.
    if name.len() > 1023 {
        return Err(too_long());
    }
    let name_size = u32::try_from(name.len()).map_err(|_| too_long())?;
    let name_offset = if name.is_empty() { 0 } else { u64::from(HEADER_LEN) + extensions.len() as u64 };

    let mut header = Vec::with_capacity(512);
    header.extend(b"QFI\xfb");
    header.extend(3u32.to_be_bytes());
    header.extend(name_offset.to_be_bytes());
    header.extend(name_size.to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(virtual_size.to_be_bytes());
    // Not encrypted.
    header.extend(0u32.to_be_bytes());
    header.extend(l1_entries.to_be_bytes());
    header.extend((3 * CLUSTER_SIZE).to_be_bytes());
    header.extend(CLUSTER_SIZE.to_be_bytes());
    // One cluster of the refcount table.
    header.extend(1u32.to_be_bytes());
    // No snapshots, and one incompatible feature.
    header.extend([0; 4 + 8]);
    header.extend(EXTENDED_L2.to_be_bytes());
    header.extend([0; 2 * 8]);
    // Refcounts have 2 to the 4th bits.
    header.extend(4u32.to_be_bytes());
    header.extend(HEADER_LEN.to_be_bytes());
    header.extend(extensions);
    header.extend(name);
    Ok(header)
}

/// Returns the size of the disk of an image.
pub(crate) fn virtual_size(path: &Path) -> io::Result<u64> {
    let mut header = [0; 32];
    File::open(path)?.read_exact_at(&mut header, 0)?;
    match header {
        [b'Q', b'F', b'I', 0xfb, .., a, b, c, d, e, f, g, h] => {
            Ok(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
        }
        _ => Err(damaged()),
    }
}

/// Returns an error unless a file is a version 3 image that refers to no other file.
pub(crate) fn require_standalone(path: &Path) -> io::Result<()> {
    let mut header = [0; HEADER_LEN as usize];
    File::open(path)?.read_exact_at(&mut header, 0)?;
    let has_backing_file = header[8..20].iter().any(|byte| *byte != 0);
    // The last byte of the incompatible features.
    let has_data_file = header[79] & EXTERNAL_DATA_FILE != 0;
    match header.starts_with(b"QFI\xfb\0\0\0\x03") && !has_backing_file && !has_data_file {
        true => Ok(()),
        false => Err(damaged()),
    }
}

/// Removes the backing file from the header of an image. Readers have to specify it afterwards.
pub(super) fn remove_backing_file(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 0)?;
    let read_u32 = |offset: usize| -> io::Result<usize> {
        let bytes =
            header.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok()).ok_or_else(damaged)?;
        usize::try_from(u32::from_be_bytes(bytes)).map_err(|_| damaged())
    };
    if !header.starts_with(b"QFI\xfb\0\0\0\x03") {
        return Err(damaged());
    }
    // The name follows the extensions; everything but the name and its format is written again.
    let (begin, end) = (read_u32(100)?, read_u32(12)? + read_u32(16)?);
    let mut extensions = Vec::new();
    let mut offset = begin;
    loop {
        let size = 8 + read_u32(offset + 4)?.next_multiple_of(8);
        let extension = header.get(offset..offset + size).ok_or_else(damaged)?;
        if !extension.starts_with(&BACKING_FORMAT.to_be_bytes()) {
            extensions.extend_from_slice(extension);
        }
        if read_u32(offset)? == 0 {
            break;
        }
        offset += size;
    }
    if end > header.len() || extensions.len() > end.saturating_sub(begin) {
        return Err(damaged());
    }
    extensions.resize(end - begin, 0);
    header[begin..end].copy_from_slice(&extensions);
    header[8..20].fill(0);
    file.write_all_at(&header, 0)?;
    file.sync_all()
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not a qcow2 image that Muster wrote")
}

#[cfg(test)]
mod tests;
