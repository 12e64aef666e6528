//! Config drives: small ISO 9660 images with the metadata of an instance. The same files result in the same bytes.
//!
//! ```text
//! 16 empty sectors │ volume descriptors │ path tables │ directories │ Joliet directories │ file contents
//! ```
//!
//! There are two directory hierarchies: one with ISO 9660 names, extended by Rock Ridge names for Linux and the BSDs, and
//! one with Joliet names for Windows.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use muster_types::vm::ConfigDriveFile;
use muster_types::{Error, Result};

use super::disks::create_atomically;

/// The volume label by which guests find the drive.
const VOLUME_LABEL: &str = "config-2";

const SECTOR_SIZE: usize = 2048;

/// The sector of the first volume descriptor.
const FIRST_DESCRIPTOR: usize = 16;

/// The minimum size in sectors: Busybox probes file systems beyond the descriptors, and fails on a smaller image.
const MIN_SECTORS: usize = 150;

/// The maximum depth of directories that the standard allows, including the root.
const MAX_DEPTH: usize = 8;

/// The maximum number of directories.
const MAX_DIRECTORIES: usize = 1000;

/// The maximum length of a file name on Linux.
const MAX_NAME_LEN: usize = 255;

/// The maximum total size of the files, so that all sector numbers and sizes fit into 32 bits.
const MAX_TOTAL_SIZE: usize = u32::MAX as usize;

/// The maximum length of a directory record, which is even.
const MAX_RECORD_LEN: usize = 254;

/// All timestamps are the beginning of the year 2000, in two formats.
const TIMESTAMP: [u8; 7] = [100, 1, 1, 0, 0, 0, 0];
const TIMESTAMP_DIGITS: &[u8; 17] = b"2000010100000000\0";

/// Writes a drive, replacing an existing one. It is not synced, because every start rewrites it.
pub(crate) fn write(path: &Path, files: &[ConfigDriveFile]) -> Result<()> {
    let image = image(files)?;
    create_atomically(path, |new| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
        file.write_all(&image)
    })
}

/// Returns the image of a drive.
fn image(files: &[ConfigDriveFile]) -> Result<Vec<u8>> {
    let tree = FileTree::new(files)?;
    let hierarchies =
        [DirectoryHierarchy::new(&tree, Naming::RockRidge), DirectoryHierarchy::new(&tree, Naming::Joliet)];
    // Two descriptors and their terminator; two path tables for each hierarchy.
    let mut next = FIRST_DESCRIPTOR + 3;
    let mut allocate = |size: usize| {
        let sector = next;
        next += size.div_ceil(SECTOR_SIZE);
        sector
    };
    let tables: Vec<[usize; 2]> =
        hierarchies.iter().map(|hierarchy| [(); 2].map(|()| allocate(hierarchy.path_table_size()))).collect();
    let directories: Vec<Vec<usize>> = hierarchies
        .iter()
        .map(|hierarchy| {
            hierarchy.directories.iter().map(|directory| allocate(directory.total_size())).collect()
        })
        .collect();
    let contents: Vec<usize> = files.iter().map(|file| allocate(file.content.len())).collect();

    let sectors = next.max(MIN_SECTORS);
    let mut image = vec![0; sectors * SECTOR_SIZE];
    let mut put = |sector: usize, bytes: &[u8]| {
        image[sector * SECTOR_SIZE..sector * SECTOR_SIZE + bytes.len()].copy_from_slice(bytes);
    };
    for (number, hierarchy) in hierarchies.iter().enumerate() {
        let layout = SectorLayout { directories: &directories[number], contents: &contents };
        put(FIRST_DESCRIPTOR + number, &hierarchy.descriptor(sectors, tables[number], layout.directories[0]));
        let [little, big] = [u32::to_le_bytes, u32::to_be_bytes];
        put(tables[number][0], &hierarchy.path_table(&layout, little, u16::to_le_bytes));
        put(tables[number][1], &hierarchy.path_table(&layout, big, u16::to_be_bytes));
        for (directory, sector) in layout.directories.iter().enumerate() {
            put(*sector, &hierarchy.records(&tree, directory, &layout).into_bytes());
        }
    }
    put(FIRST_DESCRIPTOR + 2, b"\xffCD001\x01");
    for (file, sector) in files.iter().zip(contents.iter()) {
        put(*sector, &file.content);
    }
    Ok(image)
}

/// The files, arranged in directories.
struct FileTree<'a> {
    files: &'a [ConfigDriveFile],
    /// The root is the first.
    directories: Vec<Directory<'a>>,
}

#[derive(Default)]
struct Directory<'a> {
    entries: BTreeMap<&'a str, Entry>,
}

/// An entry of a directory, as an index into the tree.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    File(usize),
    Directory(usize),
}

impl<'a> FileTree<'a> {
    fn new(files: &'a [ConfigDriveFile]) -> Result<Self> {
        let mut directories = vec![Directory::default()];
        let mut total_size = 0_usize;
        for (number, file) in files.iter().enumerate() {
            let invalid =
                |reason: &str| Error::Invalid(format!("file {:?} of the config drive: {reason}", file.path));
            total_size = total_size.saturating_add(file.content.len());
            if total_size > MAX_TOTAL_SIZE {
                return Err(invalid("the files are too large"));
            }
            let parts: Vec<&str> = file.path.split('/').collect();
            let is_invalid = |part: &&str| matches!(*part, "" | "." | "..") || part.contains('\0');
            if parts.iter().any(is_invalid) {
                return Err(invalid("the path is not valid"));
            }
            if parts.len() > MAX_DEPTH || parts.iter().any(|part| part.len() > MAX_NAME_LEN) {
                return Err(invalid("the path is too deep or a name too long"));
            }
            let Some((name, parents)) = parts.split_last() else { continue };
            let mut at = 0;
            for parent in parents {
                let new = directories.len();
                match *directories[at].entries.entry(parent).or_insert(Entry::Directory(new)) {
                    Entry::Directory(directory) if directory == new => {
                        if new >= MAX_DIRECTORIES {
                            return Err(invalid("there are too many directories"));
                        }
                        directories.push(Directory::default());
                        at = directory;
                    }
                    Entry::Directory(directory) => at = directory,
                    Entry::File(_) => return Err(invalid("a parent directory is also a file")),
                }
            }
            if directories[at].entries.insert(name, Entry::File(number)).is_some() {
                return Err(invalid("the path occurs twice"));
            }
        }
        Ok(Self { files, directories })
    }
}

/// The naming scheme of a hierarchy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Naming {
    /// ISO 9660 names of capital letters, digits and underscores, with the original names as Rock Ridge entries.
    RockRidge,
    Joliet,
}

impl Naming {
    /// Returns an identifier for an entry that is not in `used`.
    fn identifier(self, name: &str, entry: Entry, used: &BTreeSet<Vec<u8>>) -> Vec<u8> {
        let (stem, extension) = match (entry, name.rsplit_once('.')) {
            (Entry::File(_), Some((stem, extension))) => (stem, extension),
            _ => (name, ""),
        };
        let (max_stem, max_extension) = match self {
            Self::RockRidge => (21, 8),
            Self::Joliet => (50, 13),
        };
        let fit = |part: &str, max| part.chars().map(|letter| self.replace(letter)).take(max).collect();
        let (stem, extension): (String, String) = (fit(stem, max_stem), fit(extension, max_extension));
        let encode = |stem: &str| match (self, entry) {
            (Self::RockRidge, Entry::File(_)) => format!("{stem}.{extension};1").into_bytes(),
            (Self::RockRidge, Entry::Directory(_)) => stem.to_owned().into_bytes(),
            (Self::Joliet, _) if extension.is_empty() => ucs2(stem),
            (Self::Joliet, _) => ucs2(&format!("{stem}.{extension}")),
        };
        let numbered = (1..).map(|number: u32| {
            let number = number.to_string();
            let kept_chars = max_stem.saturating_sub(number.len());
            encode(&(stem.chars().take(kept_chars).collect::<String>() + &number))
        });
        let first = (!stem.is_empty()).then(|| encode(&stem));
        let mut candidates = first.into_iter().chain(numbered);
        candidates
            .find(|identifier| !used.contains(identifier))
            .expect("the number of candidates is unlimited")
    }

    /// Replaces a character that the naming scheme does not allow.
    fn replace(self, letter: char) -> char {
        match self {
            Self::RockRidge if letter.is_ascii_alphanumeric() => letter.to_ascii_uppercase(),
            Self::RockRidge => '_',
            Self::Joliet if letter.is_control() || "*/:;?\\".contains(letter) || letter.len_utf16() > 1 => {
                '_'
            }
            Self::Joliet => letter,
        }
    }
}

/// Encodes text for Joliet.
fn ucs2(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

/// The directories under one naming scheme.
struct DirectoryHierarchy {
    naming: Naming,
    /// In path table order: by level, then by parent, then by identifier. The root is the first.
    directories: Vec<NamedDirectory>,
}

struct NamedDirectory {
    /// Its index in the tree.
    tree_index: usize,
    /// The index of its parent in the hierarchy; the root is its own parent.
    parent: usize,
    identifier: Vec<u8>,
    /// Original names and entries, by identifier.
    entries: BTreeMap<Vec<u8>, (String, Entry)>,
    /// The size of its records, and of their continuation areas.
    size: usize,
    continuation_size: usize,
}

impl NamedDirectory {
    fn total_size(&self) -> usize {
        self.size + self.continuation_size
    }
}

/// The sectors at which directories and file contents begin.
struct SectorLayout<'a> {
    /// In the order of the hierarchy.
    directories: &'a [usize],
    contents: &'a [usize],
}

impl DirectoryHierarchy {
    fn new(tree: &FileTree<'_>, naming: Naming) -> Self {
        let root = NamedDirectory::new(tree, naming, 0, 0, vec![0]);
        let mut hierarchy = Self { naming, directories: vec![root] };
        let mut at = 0;
        while at < hierarchy.directories.len() {
            let children: Vec<(Vec<u8>, usize)> = hierarchy.directories[at]
                .entries
                .iter()
                .filter_map(|(identifier, (_, entry))| match entry {
                    Entry::Directory(child) => Some((identifier.clone(), *child)),
                    Entry::File(_) => None,
                })
                .collect();
            for (identifier, child) in children {
                hierarchy.directories.push(NamedDirectory::new(tree, naming, child, at, identifier));
            }
            at += 1;
        }
        // The size of records does not depend on the layout.
        let count = hierarchy.directories.len();
        let empty = SectorLayout { directories: &vec![0; count], contents: &vec![0; tree.files.len()] };
        for at in 0..count {
            let records = hierarchy.records(tree, at, &empty);
            let directory = &mut hierarchy.directories[at];
            (directory.size, directory.continuation_size) =
                (records.records.len(), records.continuation.len());
        }
        hierarchy
    }

    fn path_table_size(&self) -> usize {
        self.directories.iter().map(|directory| (8 + directory.identifier.len()).next_multiple_of(2)).sum()
    }

    fn path_table(
        &self,
        layout: &SectorLayout<'_>,
        long: fn(u32) -> [u8; 4],
        short: fn(u16) -> [u8; 2],
    ) -> Vec<u8> {
        let mut table = Vec::with_capacity(self.path_table_size());
        for (directory, sector) in self.directories.iter().zip(layout.directories) {
            table.extend([to_u8(directory.identifier.len()), 0]);
            table.extend(long(to_u32(*sector)));
            // Numbered from 1.
            let parent = u16::try_from(directory.parent + 1).expect("there are at most MAX_DIRECTORIES");
            table.extend(short(parent));
            table.extend(&directory.identifier);
            table.resize(table.len().next_multiple_of(2), 0);
        }
        table
    }

    /// Returns the records of a directory.
    fn records(&self, tree: &FileTree<'_>, index: usize, layout: &SectorLayout<'_>) -> Records {
        let directory = &self.directories[index];
        let mut records =
            Records { sector: layout.directories[index], size: directory.size, ..Records::default() };
        for (identifier, of) in [(0u8, index), (1, directory.parent)] {
            let mut extension = Vec::new();
            if self.naming == Naming::RockRidge {
                if index == 0 && identifier == 0 {
                    extension.extend(b"SP\x07\x01\xbe\xef\x00");
                    extension.extend(b"ER\x12\x01\x0a\x00\x00\x01RRIP_1991A");
                }
                extension.extend(posix_attributes(0o040_555, 2 + self.subdirectory_count(of)));
            }
            let extent = (layout.directories[of], self.directories[of].size);
            records.add(extent, true, &[identifier], extension, Vec::new());
        }
        for (identifier, (name, entry)) in &directory.entries {
            let (extent, mode, links) = match entry {
                Entry::File(file) => {
                    ((layout.contents[*file], tree.files[*file].content.len()), 0o100_444, 1)
                }
                Entry::Directory(child) => {
                    let mut directories = self.directories.iter();
                    let of = directories.position(|other| other.tree_index == *child);
                    let of = of.expect("every directory of the tree is in the hierarchy");
                    let extent = (layout.directories[of], self.directories[of].size);
                    (extent, 0o040_555, 2 + self.subdirectory_count(of))
                }
            };
            let is_directory = matches!(entry, Entry::Directory(_));
            let (attributes, alternate_name) = match self.naming {
                Naming::RockRidge => (posix_attributes(mode, links), rock_ridge_name(name)),
                Naming::Joliet => (Vec::new(), Vec::new()),
            };
            records.add(extent, is_directory, identifier, attributes, alternate_name);
        }
        records.pad();
        records
    }

    fn subdirectory_count(&self, index: usize) -> usize {
        let entries = self.directories[index].entries.values();
        entries.filter(|(_, entry)| matches!(entry, Entry::Directory(_))).count()
    }

    /// Returns the volume descriptor.
    fn descriptor(&self, sectors: usize, tables: [usize; 2], root: usize) -> Vec<u8> {
        let is_joliet = self.naming == Naming::Joliet;
        let text = |text: &str, size: usize| {
            let mut bytes = if is_joliet { ucs2(text) } else { text.as_bytes().to_vec() };
            let space: &[u8] = if is_joliet { b"\0 " } else { b" " };
            while bytes.len() + space.len() <= size {
                bytes.extend(space);
            }
            bytes.resize(size, 0);
            bytes
        };
        let mut descriptor = vec![if is_joliet { 2 } else { 1 }];
        descriptor.extend(b"CD001\x01\0");
        descriptor.extend(text("", 32));
        descriptor.extend(text(VOLUME_LABEL, 32));
        descriptor.extend([0; 8]);
        descriptor.extend(both_endian(sectors));
        // The escape sequence that identifies Joliet level 3.
        let mut escapes = if is_joliet { b"%/E".to_vec() } else { Vec::new() };
        escapes.resize(32, 0);
        descriptor.extend(escapes);
        descriptor.extend([both_endian_short(1), both_endian_short(1), both_endian_short(2048)].concat());
        descriptor.extend(both_endian(self.path_table_size()));
        descriptor.extend(to_u32(tables[0]).to_le_bytes());
        descriptor.extend([0; 4]);
        descriptor.extend(to_u32(tables[1]).to_be_bytes());
        descriptor.extend([0; 4]);
        descriptor.extend(record((root, self.directories[0].size), true, &[0], &[]));
        // Volume set, publisher, preparer, application; copyright, abstract and bibliographic files.
        for size in [128, 128, 128, 128, 37, 37, 37] {
            descriptor.extend(text("", size));
        }
        descriptor.extend([&TIMESTAMP_DIGITS[..], TIMESTAMP_DIGITS].concat());
        // No expiration and no effective date.
        descriptor.extend([&b"0000000000000000\0"[..], b"0000000000000000\0"].concat());
        descriptor.push(1);
        descriptor.resize(SECTOR_SIZE, 0);
        descriptor
    }
}

impl NamedDirectory {
    fn new(
        tree: &FileTree<'_>,
        naming: Naming,
        tree_index: usize,
        parent: usize,
        identifier: Vec<u8>,
    ) -> Self {
        let mut used = BTreeSet::new();
        let mut entries = BTreeMap::new();
        for (name, entry) in &tree.directories[tree_index].entries {
            let identifier = naming.identifier(name, *entry, &used);
            used.insert(identifier.clone());
            entries.insert(identifier, ((*name).to_owned(), *entry));
        }
        Self { tree_index, parent, identifier, entries, size: 0, continuation_size: 0 }
    }
}

/// The records of a directory, followed by their continuation areas.
#[derive(Default)]
struct Records {
    /// The sector at which the directory begins.
    sector: usize,
    /// The size of all records, which is 0 until it is known.
    size: usize,
    records: Vec<u8>,
    continuation: Vec<u8>,
}

impl Records {
    /// Adds a record. `alternate_name` goes into a continuation area if the record would become too long.
    fn add(
        &mut self,
        extent: (usize, usize),
        is_directory: bool,
        identifier: &[u8],
        mut extension: Vec<u8>,
        alternate_name: Vec<u8>,
    ) {
        /// The size of the entry that points to a continuation area.
        const POINTER_LEN: usize = 28;
        let used = record(extent, is_directory, identifier, &extension).len();
        if used + alternate_name.len() <= MAX_RECORD_LEN - POINTER_LEN {
            extension.extend(alternate_name);
        } else {
            if self.continuation.len() % SECTOR_SIZE + alternate_name.len() > SECTOR_SIZE {
                self.continuation.resize(self.continuation.len().next_multiple_of(SECTOR_SIZE), 0);
            }
            let at = self.size + self.continuation.len();
            extension.extend(b"CE\x1c\x01");
            extension.extend(
                [
                    both_endian(self.sector + at / SECTOR_SIZE),
                    both_endian(at % SECTOR_SIZE),
                    both_endian(alternate_name.len()),
                ]
                .concat(),
            );
            self.continuation.extend(alternate_name);
        }
        let record = record(extent, is_directory, identifier, &extension);
        if self.records.len() % SECTOR_SIZE + record.len() > SECTOR_SIZE {
            self.pad();
        }
        self.records.extend(record);
    }

    /// Pads the last sector.
    fn pad(&mut self) {
        self.records.resize(self.records.len().next_multiple_of(SECTOR_SIZE), 0);
    }

    fn into_bytes(self) -> Vec<u8> {
        [self.records, self.continuation].concat()
    }
}

/// Returns a directory record. The extent is a sector and a size in bytes.
fn record(
    (sector, size): (usize, usize),
    is_directory: bool,
    identifier: &[u8],
    extension: &[u8],
) -> Vec<u8> {
    let mut record = vec![0, 0];
    record.extend([both_endian(sector), both_endian(size)].concat());
    record.extend(TIMESTAMP);
    record.extend([if is_directory { 2 } else { 0 }, 0, 0]);
    record.extend(both_endian_short(1));
    record.push(to_u8(identifier.len()));
    record.extend(identifier);
    record.resize(record.len().next_multiple_of(2), 0);
    record.extend(extension);
    record.resize(record.len().next_multiple_of(2), 0);
    record[0] = to_u8(record.len());
    record
}

/// Returns the Rock Ridge entry with mode, link count, owner and group.
fn posix_attributes(mode: usize, links: usize) -> Vec<u8> {
    [&b"PX\x24\x01"[..], &both_endian(mode), &both_endian(links), &both_endian(0), &both_endian(0)].concat()
}

/// Returns the Rock Ridge entries with the name, which is split if it is too long for one entry.
fn rock_ridge_name(name: &str) -> Vec<u8> {
    let parts: Vec<&[u8]> = name.as_bytes().chunks(200).collect();
    let entry = |(number, part): (usize, &&[u8])| {
        let continues = u8::from(number + 1 < parts.len());
        [&[b'N', b'M', to_u8(part.len() + 5), 1, continues][..], part].concat()
    };
    parts.iter().enumerate().flat_map(entry).collect()
}

/// Encodes a number in both byte orders.
fn both_endian(number: usize) -> Vec<u8> {
    [to_u32(number).to_le_bytes(), to_u32(number).to_be_bytes()].concat()
}

fn both_endian_short(number: u16) -> Vec<u8> {
    [number.to_le_bytes(), number.to_be_bytes()].concat()
}

fn to_u32(number: usize) -> u32 {
    u32::try_from(number).expect("MAX_TOTAL_SIZE limits sector numbers and sizes")
}

fn to_u8(number: usize) -> u8 {
    u8::try_from(number).expect("identifiers and records are limited to less than 256 bytes")
}

#[cfg(test)]
mod tests;
