//! The header of a qcow2 image, as far as it decides whether anybody should open the image, and the tables that say
//! where its data is. Every offset, count and size in it is a claim of a stranger.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use muster_types::{Error, Result};
use serde_json::{Map, Value};

use super::format::refuse;
use crate::storage::failed;

pub(super) const MAGIC: &[u8] = b"QFI\xfb";

const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Extensions of the header.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE_NAME: u32 = 0x4441_5441;
const ENCRYPTION: u32 = 0x0537_be77;

/// Tables that are larger make a reader reserve more memory than any image needs.
const LARGEST_TABLE: u64 = 32 << 20;
const MOST_SNAPSHOTS: u32 = 1024;
const SMALLEST_SNAPSHOT: u64 = 40;

/// Where the offset is in an entry of a table.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeros, whatever it holds; not where each part of a cluster has a mark of its own.
const ZEROS: u64 = 1;
/// Parts of a cluster that have a mark each.
const PARTS: u64 = 32;

/// An image that may be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Qcow2 {
    /// Size of the disk that a guest sees.
    pub(crate) virtual_size: u64,
    version: u32,
    cluster_size: u64,
    zstd: bool,
    extended_l2: bool,
    /// Where the table of tables is.
    table: u64,
}

impl Qcow2 {
    /// What `ImageFacts` says about it.
    pub(crate) fn further(&self) -> Map<String, Value> {
        let facts = [
            ("cluster_size", self.cluster_size.into()),
            ("compat", if self.version == 2 { "0.10" } else { "1.1" }.into()),
            ("compression type", if self.zstd { "zstd" } else { "zlib" }.into()),
            ("extended l2", self.extended_l2.into()),
        ];
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Refuses an image of which data lies beyond its end, or that has more than `most` bytes of it. Reads every table
    /// once, and no more of them than fit into the file.
    pub(super) fn require_whole(
        &self,
        file: &File,
        size: u64,
        most: u64,
        go_on: &dyn Fn() -> bool,
    ) -> Result<()> {
        let entry_size = if self.extended_l2 { 16 } else { 8 };
        let mapped = self.cluster_size * (self.cluster_size / entry_size);
        let tables = entries(file, self.table, self.virtual_size.div_ceil(mapped) * 8)?;
        let count = tables.iter().filter(|entry| **entry & OFFSET != 0).count() as u64;
        if count.saturating_mul(self.cluster_size) > size {
            return Err(refuse("the image is cut off or damaged: its tables are larger than all of it"));
        }
        let mut allocated = 0u64;
        for (number, entry) in (0u64..).zip(tables) {
            let at = entry & OFFSET;
            if at == 0 {
                continue;
            }
            if !go_on() {
                return Err(Error::Unavailable("nobody waits for it any more".into()));
            }
            let start = number * mapped;
            let clusters = (self.virtual_size - start).min(mapped).div_ceil(self.cluster_size);
            let length = clusters * entry_size;
            if !at.is_multiple_of(self.cluster_size) {
                return Err(refuse("the image is damaged: a table lies where none can be"));
            }
            if at.checked_add(length).is_none_or(|end| end > size) {
                return Err(refuse("the image is cut off: a table lies beyond its end"));
            }
            let table = entries(file, at, length)?;
            let step = if self.extended_l2 { 2 } else { 1 };
            for (entry, cluster) in table.chunks_exact(step).zip(0u64..) {
                let seen = self.virtual_size - start - cluster * self.cluster_size;
                let end = self.end_of(entry[0], entry.get(1).copied(), seen)?;
                if end > size {
                    return Err(refuse("the image is cut off: data lies beyond its end"));
                }
                allocated += u64::from(end > 0);
            }
            if allocated.saturating_mul(self.cluster_size) > most {
                return Err(refuse("the image holds far more data than its size allows"));
            }
        }
        Ok(())
    }

    /// Where the data of an entry ends in the file, of which a guest sees `seen` bytes; 0 if there is none.
    fn end_of(&self, entry: u64, marks: Option<u64>, seen: u64) -> Result<u64> {
        if entry & COMPRESSED != 0 {
            let shift = 62 - (self.cluster_size.trailing_zeros() - 8);
            let at = entry & ((1 << shift) - 1);
            let further_sectors = (entry & (COMPRESSED - 1)) >> shift;
            let last = if further_sectors == 0 { at } else { (at & !511) + further_sectors * 512 };
            // The last sector need not be whole: nobody knows how much of it is data.
            return Ok(last + 1);
        }
        let at = entry & OFFSET;
        let length = match marks {
            // The parts that hold data have their marks in the lower half.
            Some(marks) => {
                let parts = PARTS - u64::from(((marks & u64::from(u32::MAX)) as u32).leading_zeros());
                parts * (self.cluster_size / PARTS)
            }
            None if entry & ZEROS != 0 => 0,
            None => self.cluster_size,
        };
        if at == 0 || length == 0 {
            return Ok(0);
        }
        if !at.is_multiple_of(self.cluster_size) {
            return Err(refuse("the image is damaged: data lies where none can be"));
        }
        // A disk may end within its last cluster, and the file with it.
        Ok(at + length.min(seen))
    }
}

/// The numbers of a table.
fn entries(file: &File, at: u64, length: u64) -> Result<Vec<u64>> {
    let length = usize::try_from(length).map_err(|_| refuse("the image has a table without end"))?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => refuse("the image is cut off: a table lies beyond its end"),
        _ => failed("an image cannot be read")(error),
    })?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry)).collect())
}

/// Numbers at offsets; what lies behind the end is refused.
struct Header<'a>(&'a [u8]);

impl Header<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        let bytes = at.checked_add(N).and_then(|end| self.0.get(at..end)?.try_into().ok());
        bytes.ok_or_else(|| refuse("the image is cut off within its header"))
    }

    fn u32(&self, at: usize) -> Result<u32> {
        self.bytes(at).map(u32::from_be_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64> {
        self.bytes(at).map(u64::from_be_bytes)
    }
}

/// Reads a header. `size` is that of the whole file, `head` its beginning.
pub(super) fn read(head: &[u8], size: u64) -> Result<Qcow2> {
    let header = Header(head);
    let version = header.u32(4)?;
    if !(2..=3).contains(&version) {
        return Err(refuse("the image is of an unknown version of qcow2"));
    }
    if header.u64(8)? != 0 || header.u32(16)? != 0 {
        return Err(refuse("the image has a backing file, which could be any file of the host"));
    }
    let cluster_bits = header.u32(20)?;
    if !(9..=21).contains(&cluster_bits) {
        return Err(refuse("the image has clusters of a size that does not exist"));
    }
    let cluster_size = 1u64 << cluster_bits;
    let virtual_size = header.u64(24)?;
    if header.u32(32)? != 0 {
        return Err(refuse("the image is encrypted"));
    }
    let features = Features::read(&header, version, cluster_bits)?;
    check_extensions(&header, features.header_length, cluster_size)?;
    check_tables(&header, size, virtual_size, cluster_size, features.extended_l2)?;
    let (zstd, extended_l2, table) = (features.zstd, features.extended_l2, header.u64(40)?);
    Ok(Qcow2 { virtual_size, version, cluster_size, zstd, extended_l2, table })
}

/// What version 3 added.
struct Features {
    header_length: usize,
    zstd: bool,
    extended_l2: bool,
}

impl Features {
    fn read(header: &Header<'_>, version: u32, cluster_bits: u32) -> Result<Self> {
        if version == 2 {
            return Ok(Self { header_length: 72, zstd: false, extended_l2: false });
        }
        let features = header.u64(72)?;
        if features & CORRUPT != 0 {
            return Err(refuse("the image is marked as corrupt"));
        }
        if features & EXTERNAL_DATA != 0 {
            return Err(refuse(
                "the image has its data in another file, which could be any file of the host",
            ));
        }
        if features & !(DIRTY | COMPRESSION_TYPE | EXTENDED_L2) != 0 {
            return Err(refuse("the image needs features of qcow2 that are not known"));
        }
        if header.u32(96)? > 6 {
            return Err(refuse("the image has reference counts of a size that does not exist"));
        }
        let length = header.u32(100)?;
        if length < 104 || length % 8 != 0 || u64::from(length) > 1 << cluster_bits {
            return Err(refuse("the image has a header of a length that does not exist"));
        }
        let compression = if length > 104 { header.bytes::<1>(104)?[0] } else { 0 };
        if compression > 1 || (compression != 0) != (features & COMPRESSION_TYPE != 0) {
            return Err(refuse("the image is compressed in an unknown way"));
        }
        let extended_l2 = features & EXTENDED_L2 != 0;
        if extended_l2 && cluster_bits < 14 {
            return Err(refuse("the image has clusters too small for its tables"));
        }
        Ok(Self { header_length: length as usize, zstd: compression == 1, extended_l2 })
    }
}

/// Walks through the extensions, which fill the first cluster at most.
fn check_extensions(header: &Header<'_>, start: usize, cluster_size: u64) -> Result<()> {
    let mut at = start;
    // A cluster may end within the last eight bytes.
    while at as u64 + 8 <= cluster_size {
        let (kind, length) = (header.u32(at)?, header.u32(at + 4)?);
        match kind {
            0 => return Ok(()),
            BACKING_FORMAT => return Err(refuse("the image names the format of a backing file")),
            DATA_FILE_NAME => return Err(refuse("the image names another file for its data")),
            ENCRYPTION => return Err(refuse("the image is encrypted")),
            _ => {}
        }
        let next = (at as u64 + 8 + u64::from(length)).next_multiple_of(8);
        if next > cluster_size {
            return Err(refuse("the image has a header that does not end"));
        }
        at = usize::try_from(next).map_err(|_| refuse("the image has a header that does not end"))?;
    }
    Ok(())
}

/// Whether the tables are where they can be, and as long as they must be.
fn check_tables(
    header: &Header<'_>,
    size: u64,
    virtual_size: u64,
    cluster_size: u64,
    extended_l2: bool,
) -> Result<()> {
    let (entries, table) = (u64::from(header.u32(36)?), header.u64(40)?);
    let (references, reference_clusters) = (header.u64(48)?, u64::from(header.u32(56)?));
    let (snapshots, snapshot_table) = (header.u32(60)?, header.u64(64)?);
    let fits = |at: u64, length: u64| {
        at != 0 && at.is_multiple_of(cluster_size) && at.checked_add(length).is_some_and(|end| end <= size)
    };
    let mapped = cluster_size * (cluster_size / if extended_l2 { 16 } else { 8 });
    if entries * 8 > LARGEST_TABLE {
        return Err(refuse("the image has a table that is larger than any disk needs"));
    }
    if entries < virtual_size.div_ceil(mapped) {
        return Err(refuse("the image has a table that is too small for its disk"));
    }
    if entries > 0 && !fits(table, entries * 8) {
        return Err(refuse("the image is cut off: a table lies beyond its end"));
    }
    let reference_size = reference_clusters.checked_mul(cluster_size).filter(|size| *size <= LARGEST_TABLE);
    if reference_size.is_none_or(|length| length == 0 || !fits(references, length)) {
        return Err(refuse("the image is cut off: its table of references lies beyond its end"));
    }
    if snapshots > MOST_SNAPSHOTS {
        return Err(refuse("the image has more snapshots than anybody makes"));
    }
    if snapshots > 0 && !fits(snapshot_table, u64::from(snapshots) * SMALLEST_SNAPSHOT) {
        return Err(refuse("the image is cut off: its table of snapshots lies beyond its end"));
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use muster_types::Error;
    use proptest::prelude::*;

    use super::*;
    use crate::image::format::{self, HEAD};

    /// A version 3 image of 1 GiB with clusters of 64 KiB, as `qemu-img create` makes it.
    pub(crate) fn image() -> Vec<u8> {
        let mut bytes = vec![0; 0x3_0010];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(4, &3u32.to_be_bytes());
        put(20, &16u32.to_be_bytes());
        put(24, &(1u64 << 30).to_be_bytes());
        put(36, &2u32.to_be_bytes());
        put(40, &0x3_0000u64.to_be_bytes());
        put(48, &0x1_0000u64.to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &112u32.to_be_bytes());
        bytes
    }

    fn look(bytes: &[u8]) -> Result<Qcow2> {
        match format::look(&bytes[..bytes.len().min(HEAD)], bytes.len() as u64)? {
            format::Kind::Qcow2(image) => Ok(image),
            other => panic!("{other:?}"),
        }
    }

    fn with(at: usize, value: &[u8]) -> Vec<u8> {
        let mut bytes = image();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    }

    #[test]
    fn a_good_image_is_read() {
        let image = look(&image()).unwrap();
        assert_eq!(image.virtual_size, 1 << 30);
        let further = serde_json::to_string(&image.further()).unwrap();
        let expected =
            r#"{"cluster_size":65536,"compat":"1.1","compression type":"zlib","extended l2":false}"#;
        assert_eq!(further, expected);
        assert!(look(&with(72, &1u64.to_be_bytes())).is_ok(), "dirty");
        let old = look(&with(4, &2u32.to_be_bytes())).unwrap();
        assert_eq!(old.further()["compat"], "0.10");
        let mut zstd = with(72, &8u64.to_be_bytes());
        zstd[104] = 1;
        assert_eq!(look(&zstd).unwrap().further()["compression type"], "zstd");
    }

    #[test]
    fn what_nobody_should_open_is_refused_with_the_reason() {
        let extension = |kind: u32| with(112, &[kind.to_be_bytes(), 5u32.to_be_bytes()].concat());
        for (bytes, reason) in [
            (with(8, &512u64.to_be_bytes()), "backing file"),
            (with(16, &9u32.to_be_bytes()), "backing file"),
            (extension(BACKING_FORMAT), "backing file"),
            (extension(DATA_FILE_NAME), "another file"),
            (extension(ENCRYPTION), "encrypted"),
            (with(112, &[1u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat()), "does not end"),
            (with(4, &4u32.to_be_bytes()), "version"),
            (with(20, &8u32.to_be_bytes()), "clusters"),
            (with(20, &63u32.to_be_bytes()), "clusters"),
            (with(32, &2u32.to_be_bytes()), "encrypted"),
            (with(72, &2u64.to_be_bytes()), "corrupt"),
            (with(72, &4u64.to_be_bytes()), "another file"),
            (with(72, &(1u64 << 40).to_be_bytes()), "not known"),
            (with(96, &7u32.to_be_bytes()), "reference counts"),
            (with(100, &8u32.to_be_bytes()), "header of a length"),
            (with(100, &u32::MAX.to_be_bytes()), "header of a length"),
            (with(104, &[1]), "compressed"),
            (with(36, &u32::MAX.to_be_bytes()), "larger than any"),
            (with(36, &1u32.to_be_bytes()), "too small"),
            (with(24, &u64::MAX.to_be_bytes()), "too small"),
            (with(40, &0x4_0000u64.to_be_bytes()), "cut off"),
            (with(40, &(u64::MAX - 0xffff).to_be_bytes()), "cut off"),
            (with(40, &0u64.to_be_bytes()), "cut off"),
            (with(48, &0x8_0000u64.to_be_bytes()), "references"),
            (with(56, &u32::MAX.to_be_bytes()), "references"),
            (with(60, &u32::MAX.to_be_bytes()), "snapshots"),
            (with(60, &[1u32.to_be_bytes(), [0xff; 4], [0xff; 4]].concat()), "snapshots"),
        ] {
            match look(&bytes) {
                Err(Error::Invalid(text)) => assert!(text.contains(reason), "{reason}: {text}"),
                other => panic!("{reason}: {other:?}"),
            }
        }
    }

    #[test]
    fn an_image_cut_off_anywhere_is_refused() {
        let whole = image();
        for size in (4..200).chain([0x1_0000, 0x1_ffff, 0x3_0000, 0x3_000f]) {
            assert!(matches!(look(&whole[..size]), Err(Error::Invalid(_))), "{size}");
        }
        assert!(look(&whole).is_ok());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(changes in prop::collection::vec((0usize..256, any::<u8>()), 1..12),
                                  size in prop::option::of(any::<u64>())) {
            let mut bytes = image();
            for (at, value) in changes {
                bytes[at] = value;
            }
            let size = size.unwrap_or(bytes.len() as u64);
            let _ = format::look(&bytes[..HEAD], size);
        }

        #[test]
        fn nor_do_tables(tables in prop::collection::vec(any::<u64>(), 2),
                         entries in prop::collection::vec(any::<u64>(), 1..20), extended in any::<bool>()) {
            let mut bytes = with(24, &(1u64 << 29).to_be_bytes());
            bytes.resize(0x5_0000, 0);
            bytes[79] = if extended { 16 } else { 0 };
            let at = if tables[0] % 2 == 0 { 0x4_0000 } else { tables[0] };
            for (place, entry) in [(0x3_0000, at), (0x3_0008, tables[1])] {
                bytes[place..place + 8].copy_from_slice(&entry.to_be_bytes());
            }
            for (entry, place) in entries.iter().zip((0x4_0000..).step_by(8)) {
                bytes[place..place + 8].copy_from_slice(&entry.to_be_bytes());
            }
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &bytes).unwrap();
            let _ = look(&bytes).unwrap().require_whole(&file, bytes.len() as u64, 1 << 30, &|| true);
        }

        #[test]
        fn nor_do_random_ones(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = format::look(&bytes, bytes.len() as u64);
            let _ = read(&bytes, u64::MAX);
        }
    }
}
