//! Config drives: small optical discs (ISO 9660) that tell a guest what it is. Written by ourselves, the same bytes for
//! the same files.
//!
//! ```text
//! 16 sectors of nothing │ descriptors │ path tables │ folders │ folders once more │ contents
//! ```
//!
//! The folders are there twice: once with plain names, beside which the Rock Ridge extension has the true ones for
//! Linux and the BSDs, and once with the long names of Joliet for Windows.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use muster_types::vm::DriveFile;
use muster_types::{Error, Result};

use super::disks::place;

/// By this guests know it.
const LABEL: &str = "config-2";

const SECTOR: usize = 2048;

/// Where the descriptors begin.
const FIRST: usize = 16;

/// Busybox reads more than the descriptors to find out what a disc is, and gives up on one that ends before.
const SMALLEST: usize = 150;

/// The most folders within each other that the standard allows, the first of them without a name.
const DEEPEST: usize = 8;

/// More are a mistake.
const MOST_FOLDERS: usize = 1000;

/// The longest name of a file on Linux.
const LONGEST_NAME: usize = 255;

/// The longest record in a folder. Records have an even number of bytes.
const LONGEST_RECORD: usize = 254;

/// Everything is of the first second of the year 2000.
const MOMENT: [u8; 7] = [100, 1, 1, 0, 0, 0, 0];
const MOMENT_IN_DIGITS: &[u8; 17] = b"2000010100000000\0";

/// Writes a drive, in place of one that is there. It is written at every start, hence it need not be synchronised.
pub(crate) fn write(path: &Path, files: &[DriveFile]) -> Result<()> {
    let disc = disc(files)?;
    place(path, |new| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
        file.write_all(&disc)
    })
}

/// The bytes of a drive.
fn disc(files: &[DriveFile]) -> Result<Vec<u8>> {
    let tree = Tree::new(files)?;
    let shapes = [Shape::new(&tree, Naming::Plain), Shape::new(&tree, Naming::Joliet)];
    // Two descriptors and their end; for each shape two path tables.
    let mut next = FIRST + 3;
    let mut take = |size: usize| {
        let at = next;
        next += size.div_ceil(SECTOR);
        at
    };
    let tables: Vec<[usize; 2]> =
        shapes.iter().map(|shape| [(); 2].map(|()| take(shape.path_table_size()))).collect();
    let folders: Vec<Vec<usize>> =
        shapes.iter().map(|shape| shape.folders.iter().map(|folder| take(folder.all())).collect()).collect();
    let contents: Vec<usize> = files.iter().map(|file| take(file.content.len())).collect();

    let next = next.max(SMALLEST);
    let mut disc = vec![0; next * SECTOR];
    let mut put = |sector: usize, bytes: &[u8]| {
        disc[sector * SECTOR..sector * SECTOR + bytes.len()].copy_from_slice(bytes);
    };
    for (number, shape) in shapes.iter().enumerate() {
        let places = Places { folders: &folders[number], contents: &contents };
        put(FIRST + number, &shape.descriptor(next, tables[number], places.folders[0]));
        let [little, big] = [u32::to_le_bytes, u32::to_be_bytes];
        put(tables[number][0], &shape.path_table(&places, little, u16::to_le_bytes));
        put(tables[number][1], &shape.path_table(&places, big, u16::to_be_bytes));
        for (folder, at) in places.folders.iter().enumerate() {
            put(*at, &shape.records(&tree, folder, &places).bytes());
        }
    }
    put(FIRST + 2, b"\xffCD001\x01");
    for (file, at) in files.iter().zip(contents.iter()) {
        put(*at, &file.content);
    }
    Ok(disc)
}

/// The files by their folders.
struct Tree<'a> {
    files: &'a [DriveFile],
    folders: Vec<Folder<'a>>,
}

#[derive(Default)]
struct Folder<'a> {
    entries: BTreeMap<&'a str, Entry>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    File(usize),
    Folder(usize),
}

impl<'a> Tree<'a> {
    fn new(files: &'a [DriveFile]) -> Result<Self> {
        let mut folders = vec![Folder::default()];
        for (number, file) in files.iter().enumerate() {
            let refuse =
                |why: &str| Error::Invalid(format!("file {:?} of the config drive: {why}", file.path));
            if u32::try_from(file.content.len()).is_err() {
                return Err(refuse("it is too large"));
            }
            let parts: Vec<&str> = file.path.split('/').collect();
            let bad = |part: &&str| matches!(*part, "" | "." | "..") || part.contains('\0');
            if parts.iter().any(bad) {
                return Err(refuse("that is no path"));
            }
            if parts.len() > DEEPEST || parts.iter().any(|part| part.len() > LONGEST_NAME) {
                return Err(refuse("the path is too deep or a name too long"));
            }
            let Some((name, above)) = parts.split_last() else { continue };
            let mut at = 0;
            for part in above {
                let fresh = folders.len();
                match *folders[at].entries.entry(part).or_insert(Entry::Folder(fresh)) {
                    Entry::Folder(folder) if folder == fresh => {
                        if fresh >= MOST_FOLDERS {
                            return Err(refuse("there are too many folders"));
                        }
                        folders.push(Folder::default());
                        at = folder;
                    }
                    Entry::Folder(folder) => at = folder,
                    Entry::File(_) => return Err(refuse("what should be a folder is a file")),
                }
            }
            if folders[at].entries.insert(name, Entry::File(number)).is_some() {
                return Err(refuse("it is there twice"));
            }
        }
        Ok(Self { files, folders })
    }
}

/// How things are called.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Naming {
    /// Capital letters, digits and underscores, for those who know nothing else; true names beside them.
    Plain,
    Joliet,
}

impl Naming {
    /// A name for something, none of those that are taken.
    fn identifier(self, name: &str, entry: Entry, taken: &BTreeSet<Vec<u8>>) -> Vec<u8> {
        let (stem, extension) = match (entry, name.rsplit_once('.')) {
            (Entry::File(_), Some((stem, extension))) => (stem, extension),
            _ => (name, ""),
        };
        let (longest_stem, longest_extension) = match self {
            Self::Plain => (21, 8),
            Self::Joliet => (50, 13),
        };
        let fit =
            |part: &str, longest| part.chars().map(|letter| self.letter(letter)).take(longest).collect();
        let (stem, extension): (String, String) =
            (fit(stem, longest_stem), fit(extension, longest_extension));
        let spell = |stem: &str| match (self, entry) {
            (Self::Plain, Entry::File(_)) => format!("{stem}.{extension};1").into_bytes(),
            (Self::Plain, Entry::Folder(_)) => stem.to_owned().into_bytes(),
            (Self::Joliet, _) if extension.is_empty() => wide(stem),
            (Self::Joliet, _) => wide(&format!("{stem}.{extension}")),
        };
        let numbered = (1..).map(|number: u32| {
            let number = number.to_string();
            let kept = longest_stem.saturating_sub(number.len());
            spell(&(stem.chars().take(kept).collect::<String>() + &number))
        });
        let first = (!stem.is_empty()).then(|| spell(&stem));
        first.into_iter().chain(numbered).find(|name| !taken.contains(name)).unwrap_or_default()
    }

    fn letter(self, letter: char) -> char {
        match self {
            Self::Plain if letter.is_ascii_alphanumeric() => letter.to_ascii_uppercase(),
            Self::Plain => '_',
            Self::Joliet if letter.is_control() || "*/:;?\\".contains(letter) || letter.len_utf16() > 1 => {
                '_'
            }
            Self::Joliet => letter,
        }
    }
}

/// As Joliet writes text.
fn wide(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

/// The folders under one kind of names.
struct Shape {
    naming: Naming,
    /// In the order of the path tables: the outermost first, those of one level by their parents and names.
    folders: Vec<Named>,
}

struct Named {
    /// Its number in the tree.
    of: usize,
    /// The place of its parent in the order; the first is its own.
    parent: usize,
    identifier: Vec<u8>,
    /// What is in it, by the identifiers.
    entries: BTreeMap<Vec<u8>, (String, Entry)>,
    /// How many bytes its records have, and what they continue with.
    size: usize,
    continued: usize,
}

impl Named {
    fn all(&self) -> usize {
        self.size + self.continued
    }
}

/// Where things are on the disc, in sectors.
struct Places<'a> {
    /// In the order of the shape.
    folders: &'a [usize],
    contents: &'a [usize],
}

impl Shape {
    fn new(tree: &Tree<'_>, naming: Naming) -> Self {
        let root = Named::new(tree, naming, 0, 0, vec![0]);
        let mut shape = Self { naming, folders: vec![root] };
        let mut at = 0;
        while at < shape.folders.len() {
            let within: Vec<(Vec<u8>, usize)> = shape.folders[at]
                .entries
                .iter()
                .filter_map(|(identifier, (_, entry))| match entry {
                    Entry::Folder(folder) => Some((identifier.clone(), *folder)),
                    Entry::File(_) => None,
                })
                .collect();
            for (identifier, folder) in within {
                shape.folders.push(Named::new(tree, naming, folder, at, identifier));
            }
            at += 1;
        }
        // How long records are does not depend on where things are.
        let nowhere = Places { folders: &vec![0; shape.folders.len()], contents: &vec![0; tree.files.len()] };
        for at in 0..shape.folders.len() {
            let records = shape.records(tree, at, &nowhere);
            (shape.folders[at].size, shape.folders[at].continued) =
                (records.records.len(), records.continued.len());
        }
        shape
    }

    fn path_table_size(&self) -> usize {
        self.folders.iter().map(|folder| (8 + folder.identifier.len()).next_multiple_of(2)).sum()
    }

    fn path_table(
        &self,
        places: &Places<'_>,
        long: fn(u32) -> [u8; 4],
        short: fn(u16) -> [u8; 2],
    ) -> Vec<u8> {
        let mut table = Vec::with_capacity(self.path_table_size());
        for (folder, at) in self.folders.iter().zip(places.folders) {
            table.extend([byte(folder.identifier.len()), 0]);
            table.extend(long(word(*at)));
            // Counted from 1, and there are not that many.
            table.extend(short(u16::try_from(folder.parent + 1).unwrap_or(u16::MAX)));
            table.extend(&folder.identifier);
            table.resize(table.len().next_multiple_of(2), 0);
        }
        table
    }

    /// What is in a folder.
    fn records(&self, tree: &Tree<'_>, at: usize, places: &Places<'_>) -> Records {
        let folder = &self.folders[at];
        let mut records = Records { begins: places.folders[at], size: folder.size, ..Records::default() };
        for (identifier, of) in [(0u8, at), (1, folder.parent)] {
            let mut extension = Vec::new();
            if self.naming == Naming::Plain {
                if at == 0 && identifier == 0 {
                    extension.extend(b"SP\x07\x01\xbe\xef\x00");
                    extension.extend(b"ER\x12\x01\x0a\x00\x00\x01RRIP_1991A");
                }
                extension.extend(posix(0o040_555, 2 + self.folders_in(of)));
            }
            let extent = (places.folders[of], self.folders[of].size);
            records.add(extent, true, &[identifier], extension, Vec::new());
        }
        for (identifier, (name, entry)) in &folder.entries {
            let (extent, mode, links) = match entry {
                Entry::File(file) => {
                    ((places.contents[*file], tree.files[*file].content.len()), 0o100_444, 1)
                }
                Entry::Folder(of) => {
                    let of = self.folders.iter().position(|other| other.of == *of).unwrap_or(0);
                    ((places.folders[of], self.folders[of].size), 0o040_555, 2 + self.folders_in(of))
                }
            };
            let is_folder = matches!(entry, Entry::Folder(_));
            match self.naming {
                Naming::Plain => {
                    records.add(extent, is_folder, identifier, posix(mode, links), true_name(name));
                }
                Naming::Joliet => records.add(extent, is_folder, identifier, Vec::new(), Vec::new()),
            }
        }
        records.end();
        records
    }

    fn folders_in(&self, at: usize) -> usize {
        self.folders[at].entries.values().filter(|(_, entry)| matches!(entry, Entry::Folder(_))).count()
    }

    fn descriptor(&self, sectors: usize, tables: [usize; 2], root: usize) -> Vec<u8> {
        let is_plain = self.naming == Naming::Plain;
        let text = |text: &str, size: usize| {
            let mut bytes = if is_plain { text.as_bytes().to_vec() } else { wide(text) };
            let space: &[u8] = if is_plain { b" " } else { b"\0 " };
            while bytes.len() + space.len() <= size {
                bytes.extend(space);
            }
            bytes.resize(size, 0);
            bytes
        };
        let mut descriptor = vec![if is_plain { 1 } else { 2 }];
        descriptor.extend(b"CD001\x01\0");
        descriptor.extend(text("", 32));
        descriptor.extend(text(LABEL, 32));
        descriptor.extend([0; 8]);
        descriptor.extend(both(sectors));
        // How Joliet says that names are as wide as it has them.
        let mut escapes = if is_plain { Vec::new() } else { b"%/E".to_vec() };
        escapes.resize(32, 0);
        descriptor.extend(escapes);
        descriptor.extend([short_both(1), short_both(1), short_both(2048)].concat());
        descriptor.extend(both(self.path_table_size()));
        descriptor.extend(word(tables[0]).to_le_bytes());
        descriptor.extend([0; 4]);
        descriptor.extend(word(tables[1]).to_be_bytes());
        descriptor.extend([0; 4]);
        descriptor.extend(record((root, self.folders[0].size), true, &[0], &[]));
        // The set, the publisher, the preparer, the application, and three files that say more.
        for size in [128, 128, 128, 128, 37, 37, 37] {
            descriptor.extend(text("", size));
        }
        descriptor.extend([&MOMENT_IN_DIGITS[..], MOMENT_IN_DIGITS].concat());
        // It never expires, and may be used from the beginning.
        descriptor.extend([&b"0000000000000000\0"[..], b"0000000000000000\0"].concat());
        descriptor.push(1);
        descriptor.resize(SECTOR, 0);
        descriptor
    }
}

impl Named {
    fn new(tree: &Tree<'_>, naming: Naming, of: usize, parent: usize, identifier: Vec<u8>) -> Self {
        let mut taken = BTreeSet::new();
        let mut entries = BTreeMap::new();
        for (name, entry) in &tree.folders[of].entries {
            let identifier = naming.identifier(name, *entry, &taken);
            taken.insert(identifier.clone());
            entries.insert(identifier, ((*name).to_owned(), *entry));
        }
        Self { of, parent, identifier, entries, size: 0, continued: 0 }
    }
}

/// The records of a folder, and after them what has no room in them.
#[derive(Default)]
struct Records {
    /// The sector where they begin.
    begins: usize,
    /// How many bytes they will have.
    size: usize,
    records: Vec<u8>,
    continued: Vec<u8>,
}

impl Records {
    fn add(
        &mut self,
        extent: (usize, usize),
        is_folder: bool,
        identifier: &[u8],
        mut extension: Vec<u8>,
        further: Vec<u8>,
    ) {
        /// What says where it goes on.
        const POINTER: usize = 28;
        let used = record(extent, is_folder, identifier, &extension).len();
        if used + further.len() <= LONGEST_RECORD - POINTER {
            extension.extend(further);
        } else {
            if self.continued.len() % SECTOR + further.len() > SECTOR {
                self.continued.resize(self.continued.len().next_multiple_of(SECTOR), 0);
            }
            let at = self.size + self.continued.len();
            extension.extend(b"CE\x1c\x01");
            extension
                .extend([both(self.begins + at / SECTOR), both(at % SECTOR), both(further.len())].concat());
            self.continued.extend(further);
        }
        let record = record(extent, is_folder, identifier, &extension);
        if self.records.len() % SECTOR + record.len() > SECTOR {
            self.end();
        }
        self.records.extend(record);
    }

    /// Fills the last sector up.
    fn end(&mut self) {
        self.records.resize(self.records.len().next_multiple_of(SECTOR), 0);
    }

    fn bytes(self) -> Vec<u8> {
        [self.records, self.continued].concat()
    }
}

fn record((at, size): (usize, usize), is_folder: bool, identifier: &[u8], extension: &[u8]) -> Vec<u8> {
    let mut record = vec![0, 0];
    record.extend([both(at), both(size)].concat());
    record.extend(MOMENT);
    record.extend([if is_folder { 2 } else { 0 }, 0, 0]);
    record.extend(short_both(1));
    record.push(byte(identifier.len()));
    record.extend(identifier);
    record.resize(record.len().next_multiple_of(2), 0);
    record.extend(extension);
    record.resize(record.len().next_multiple_of(2), 0);
    record[0] = byte(record.len());
    record
}

/// What a file is to Rock Ridge: mode, names, owner, group.
fn posix(mode: usize, links: usize) -> Vec<u8> {
    [&b"PX\x24\x01"[..], &both(mode), &both(links), &both(0), &both(0)].concat()
}

/// What a file is called to Rock Ridge. A name that is too long for one entry goes on in another.
fn true_name(name: &str) -> Vec<u8> {
    let parts: Vec<&[u8]> = name.as_bytes().chunks(200).collect();
    let entry = |(number, part): (usize, &&[u8])| {
        let goes_on = u8::from(number + 1 < parts.len());
        [&[b'N', b'M', byte(part.len() + 5), 1, goes_on][..], part].concat()
    };
    parts.iter().enumerate().flat_map(entry).collect()
}

/// A number in both orders of bytes.
fn both(number: usize) -> Vec<u8> {
    [word(number).to_le_bytes(), word(number).to_be_bytes()].concat()
}

fn short_both(number: u16) -> Vec<u8> {
    [number.to_le_bytes(), number.to_be_bytes()].concat()
}

/// Sizes were checked before: nothing here is larger.
fn word(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn byte(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

#[cfg(test)]
#[path = "config_drive_tests.rs"]
mod tests;
