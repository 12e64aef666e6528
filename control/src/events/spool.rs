//! The local event queue: lines of JSON in numbered files, one folder for each process.
//!
//! ```text
//! spool/eventlog/muster-4711-x8Jq/lock        held while the process lives
//!                                /cursor      first byte that is not in the database yet
//!                                /000001.log  events, oldest first
//! ```
//!
//! A line is complete when it ends with a newline; a torn last line belongs to an event whose recording
//! never returned. The cursor moves after the database has the batch, so a batch may be written twice;
//! the event's id makes that harmless.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use muster_types::key::random_alphanumeric;
use nix::fcntl::{Flock, FlockArg};

/// A file is closed and the next one begun at this size.
const SEGMENT: u64 = 4 << 20;

/// The queue that this process writes.
#[derive(Debug)]
pub(super) struct Spool {
    folder: PathBuf,
    cap: i64,
    depth: AtomicI64,
    writer: Mutex<Writer>,
    _lock: Flock<File>,
}

#[derive(Debug)]
struct Writer {
    file: File,
    segment: u64,
    size: u64,
}

impl Spool {
    pub(super) fn create(directory: &Path, cap: u64) -> io::Result<Self> {
        let folder = directory.join(format!("muster-{}-{}", std::process::id(), random_alphanumeric(4)));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let lock = lock(&folder)?.ok_or_else(|| io::Error::other("the event queue is in use"))?;
        let writer = Writer { file: create(&folder, 1)?, segment: 1, size: 0 };
        Ok(Self {
            folder,
            cap: i64::try_from(cap).unwrap_or(i64::MAX),
            depth: AtomicI64::new(0),
            writer: Mutex::new(writer),
            _lock: lock,
        })
    }

    /// Adds a line. `false`: the queue is full and the line was not added.
    pub(super) fn append(&self, line: &[u8]) -> io::Result<bool> {
        let mut writer = self.writer();
        if self.depth() >= self.cap {
            return Ok(false);
        }
        if writer.size >= SEGMENT {
            let segment = writer.segment + 1;
            *writer = Writer { file: create(&self.folder, segment)?, segment, size: 0 };
        }
        if let Err(error) = writer.file.write_all(line) {
            // A half-written line would swallow the next one.
            let size = writer.size;
            writer.file.set_len(size)?;
            return Err(error);
        }
        writer.size += line.len() as u64;
        self.depth.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    pub(super) fn depth(&self) -> i64 {
        self.depth.load(Ordering::Relaxed)
    }

    pub(super) fn is_nearly_full(&self) -> bool {
        self.depth() >= self.cap - self.cap / 5
    }

    /// Takes drained events off the count.
    pub(super) fn drained(&self, count: usize) {
        self.depth.fetch_sub(i64::try_from(count).unwrap_or(0), Ordering::Relaxed);
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file being written now.
    pub(super) fn open_segment(&self) -> u64 {
        self.writer().segment
    }
}

/// Reads a queue from its cursor on.
#[derive(Debug)]
pub(super) struct Reader {
    folder: PathBuf,
    cursor: File,
    segment: u64,
    /// First byte of `segment` that is not in the database yet.
    offset: u64,
    /// Held for a leftover queue, so that only one process drains it.
    _lock: Option<Flock<File>>,
}

/// Lines read and where they end.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) lines: Vec<Vec<u8>>,
    end: u64,
}

impl Reader {
    pub(super) fn open(folder: &Path) -> io::Result<Self> {
        Self::with_lock(folder, None)
    }

    fn with_lock(folder: &Path, lock: Option<Flock<File>>) -> io::Result<Self> {
        let path = folder.join("cursor");
        let cursor =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let mut place = [0u8; 16];
        let (mut segment, mut offset) = (0, 0);
        if cursor.read_at(&mut place, 0)? == place.len() {
            let number = |bytes: &[u8]| bytes.iter().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
            (segment, offset) = (number(&place[..8]), number(&place[8..]));
        }
        if segment == 0 {
            segment = segments(folder)?.first().copied().unwrap_or(1);
        }
        Ok(Self { folder: folder.to_owned(), cursor, segment, offset, _lock: lock })
    }

    /// Up to `limit` lines after the cursor. `open`: the segment that still grows, if any does.
    pub(super) fn read(&mut self, limit: usize, open: Option<u64>) -> io::Result<Batch> {
        loop {
            let batch = self.read_segment(limit)?;
            if !batch.lines.is_empty() || open.is_some_and(|open| self.segment >= open) {
                return Ok(batch);
            }
            // This file is closed and drained.
            let Some(next) = segments(&self.folder)?.into_iter().find(|number| *number > self.segment) else {
                return Ok(batch);
            };
            let old = path(&self.folder, self.segment);
            (self.segment, self.offset) = (next, 0);
            self.save()?;
            if let Err(error) = fs::remove_file(&old)
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
        }
    }

    fn read_segment(&self, limit: usize) -> io::Result<Batch> {
        let mut batch = Batch { lines: Vec::new(), end: self.offset };
        let mut file = match File::open(path(&self.folder, self.segment)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(batch),
            Err(error) => return Err(error),
        };
        file.seek(SeekFrom::Start(self.offset))?;
        let mut file = BufReader::with_capacity(64 << 10, file);
        while batch.lines.len() < limit {
            let mut line = Vec::new();
            let length = file.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                break;
            }
            batch.end += length as u64;
            batch.lines.push(line);
        }
        Ok(batch)
    }

    /// Moves the cursor behind a batch that the database has.
    pub(super) fn advance(&mut self, batch: &Batch) -> io::Result<()> {
        self.offset = batch.end;
        self.save()
    }

    fn save(&self) -> io::Result<()> {
        let mut place = [0u8; 16];
        place[..8].copy_from_slice(&self.segment.to_be_bytes());
        place[8..].copy_from_slice(&self.offset.to_be_bytes());
        self.cursor.write_all_at(&place, 0)
    }

    /// Removes the queue, once all of it is in the database.
    pub(super) fn remove(self) -> io::Result<()> {
        fs::remove_dir_all(&self.folder)
    }
}

/// The queues below `directory` whose process is dead, each now locked by us.
pub(super) fn leftovers(directory: &Path) -> io::Result<Vec<Reader>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let folder = entry?.path();
        if folder.is_dir()
            && let Some(lock) = lock(&folder)?
        {
            found.push(Reader::with_lock(&folder, Some(lock))?);
        }
    }
    Ok(found)
}

/// The lock of a queue; `None` while another process, or another part of this one, holds it.
fn lock(folder: &Path) -> io::Result<Option<Flock<File>>> {
    let options =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(folder.join("lock"));
    let file = match options {
        Ok(file) => file,
        // Another process has just removed a drained queue.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

fn path(folder: &Path, segment: u64) -> PathBuf {
    folder.join(format!("{segment:06}.log"))
}

fn create(folder: &Path, segment: u64) -> io::Result<File> {
    OpenOptions::new().append(true).create_new(true).mode(0o600).open(path(folder, segment))
}

/// The numbers of a queue's files, in order.
fn segments(folder: &Path) -> io::Result<Vec<u64>> {
    let mut numbers: Vec<u64> = fs::read_dir(folder)?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".log")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(reader: &mut Reader, open: Option<u64>) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let batch = reader.read(7, open).unwrap();
            if batch.lines.is_empty() {
                return all;
            }
            all.extend(batch.lines.iter().map(|line| String::from_utf8(line.clone()).unwrap()));
            reader.advance(&batch).unwrap();
        }
    }

    #[test]
    fn what_goes_in_comes_out_in_order_across_files() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::create(folder.path(), 1000).unwrap();
        let mut reader = Reader::open(spool.folder()).unwrap();
        let big = "x".repeat(1 << 20);
        let sent: Vec<String> = (0..20).map(|n| format!("{n} {big}\n")).collect();
        sent.iter().for_each(|line| assert!(spool.append(line.as_bytes()).unwrap()));
        assert!(spool.open_segment() > 2);
        assert_eq!(lines(&mut reader, Some(spool.open_segment())), sent);
        assert_eq!(segments(spool.folder()).unwrap(), vec![spool.open_segment()]);
    }

    #[test]
    fn the_cap_drops_new_events_until_some_are_drained() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::create(folder.path(), 2).unwrap();
        assert!(spool.append(b"1\n").unwrap() && spool.append(b"2\n").unwrap());
        assert!(!spool.append(b"3\n").unwrap());
        spool.drained(1);
        assert!(spool.append(b"4\n").unwrap());
    }

    #[test]
    fn a_queue_is_left_over_only_when_its_process_is_gone_and_a_torn_line_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::create(folder.path(), 10).unwrap();
        spool.append(b"whole\n").unwrap();
        spool.append(b"second\n").unwrap();
        spool.append(b"torn").unwrap();
        assert!(leftovers(folder.path()).unwrap().is_empty());
        drop(spool);
        let mut found = leftovers(folder.path()).unwrap();
        assert_eq!(found.len(), 1);
        let mut reader = found.remove(0);
        let batch = reader.read(1, None).unwrap();
        reader.advance(&batch).unwrap();
        drop(reader);
        let mut reader = leftovers(folder.path()).unwrap().remove(0);
        assert_eq!(lines(&mut reader, None), vec!["second\n"]);
        reader.remove().unwrap();
        assert!(leftovers(folder.path()).unwrap().is_empty());
    }
}
