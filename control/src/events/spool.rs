//! The local event queue: JSON lines in numbered segment files, one directory for each process. See
//! docs/decisions/0002.
//!
//! ```text
//! spool/eventlog/muster-4711-x8Jq/lock        locked while the process runs
//!                                /cursor      first byte that is not in the database
//!                                /000001.log  events, oldest first
//! ```
//!
//! A line is complete if it ends with a newline. An incomplete last line belongs to an event whose recording never
//! returned. The cursor advances after the database has the batch, so a batch may be written twice. That is harmless,
//! because events have unique IDs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};

use muster_types::key::random_alphanumeric;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;

/// The size at which a segment is closed and the next one begins.
const SEGMENT_BYTES: u64 = 4 << 20;
/// The size of the file that checks whether the disk accepts data.
const PROBE_BYTES: usize = 16 << 10;

/// Whether an event was added to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AppendOutcome {
    Queued,
    /// The queue has reached its capacity.
    Full,
}

/// The queue that this process writes.
#[derive(Debug)]
pub(super) struct Spool {
    directory: PathBuf,
    capacity: i64,
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
    pub(super) fn create(parent: &Path, capacity: u64) -> io::Result<Self> {
        let capacity = i64::try_from(capacity).map_err(io::Error::other)?;
        let directory = parent.join(format!("muster-{}-{}", std::process::id(), random_alphanumeric(4)));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        let lock = lock(&directory)?.ok_or_else(|| io::Error::other("the event queue is in use"))?;
        let writer = Writer { file: create_segment(&directory, 1)?, segment: 1, size: 0 };
        Ok(Self { directory, capacity, depth: AtomicI64::new(0), writer: Mutex::new(writer), _lock: lock })
    }

    /// Adds a line.
    pub(super) fn append(&self, line: &[u8]) -> io::Result<AppendOutcome> {
        let mut writer = self.writer.lock();
        if self.is_full() {
            return Ok(AppendOutcome::Full);
        }
        if writer.size >= SEGMENT_BYTES {
            let segment = writer.segment + 1;
            *writer = Writer { file: create_segment(&self.directory, segment)?, segment, size: 0 };
        }
        if let Err(error) = writer.file.write_all(line) {
            // Removes the incomplete line, which would corrupt the next one.
            let size = writer.size;
            writer.file.set_len(size)?;
            return Err(error);
        }
        writer.size += line.len() as u64;
        self.depth.fetch_add(1, Ordering::Relaxed);
        Ok(AppendOutcome::Queued)
    }

    pub(super) fn depth(&self) -> i64 {
        self.depth.load(Ordering::Relaxed)
    }

    pub(super) fn is_nearly_full(&self) -> bool {
        self.depth() >= self.capacity - self.capacity / 5
    }

    pub(super) fn is_full(&self) -> bool {
        self.depth() >= self.capacity
    }

    /// Checks whether the disk accepts data, with a file that is removed again.
    pub(super) fn probe(&self) -> io::Result<()> {
        let path = self.directory.join("probe");
        let written = fs::write(&path, [0; PROBE_BYTES]);
        let removed = fs::remove_file(&path);
        written.and(removed)
    }

    /// Subtracts drained events from the depth.
    pub(super) fn drained(&self, count: usize) {
        let count = i64::try_from(count).expect("a batch is limited by DRAIN_BATCH_SIZE");
        self.depth.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the number of the segment that is being written.
    pub(super) fn open_segment(&self) -> u64 {
        self.writer.lock().segment
    }
}

/// Reads a queue from its cursor.
#[derive(Debug)]
pub(super) struct Reader {
    directory: PathBuf,
    cursor: File,
    segment: u64,
    /// The first byte of `segment` that is not in the database.
    offset: u64,
    /// The lock of an orphaned queue, so that only one process drains it.
    _lock: Option<Flock<File>>,
}

/// Lines and the offset of their end.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) lines: Vec<Vec<u8>>,
    end: u64,
}

impl Reader {
    pub(super) fn open(directory: &Path) -> io::Result<Self> {
        Self::with_lock(directory, None)
    }

    fn with_lock(directory: &Path, lock: Option<Flock<File>>) -> io::Result<Self> {
        let path = directory.join("cursor");
        let cursor =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let mut position = [0u8; 16];
        let (mut segment, mut offset) = (0, 0);
        if cursor.read_at(&mut position, 0)? == position.len() {
            let number = |bytes: &[u8]| bytes.iter().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
            (segment, offset) = (number(&position[..8]), number(&position[8..]));
        }
        if segment == 0 {
            segment = segments(directory)?.first().copied().unwrap_or(1);
        }
        Ok(Self { directory: directory.to_owned(), cursor, segment, offset, _lock: lock })
    }

    /// Reads up to `limit` lines after the cursor. `open` is the segment that still grows, if there is one.
    pub(super) fn read(&mut self, limit: usize, open: Option<u64>) -> io::Result<Batch> {
        loop {
            let batch = self.read_segment(limit)?;
            if !batch.lines.is_empty() || open.is_some_and(|open| self.segment >= open) {
                return Ok(batch);
            }
            // This segment is closed and drained.
            let Some(next) = segments(&self.directory)?.into_iter().find(|number| *number > self.segment)
            else {
                return Ok(batch);
            };
            let old = segment_path(&self.directory, self.segment);
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
        let mut file = match File::open(segment_path(&self.directory, self.segment)) {
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

    /// Advances the cursor past a batch that is in the database.
    pub(super) fn advance(&mut self, batch: &Batch) -> io::Result<()> {
        self.offset = batch.end;
        self.save()
    }

    fn save(&self) -> io::Result<()> {
        let mut position = [0u8; 16];
        position[..8].copy_from_slice(&self.segment.to_be_bytes());
        position[8..].copy_from_slice(&self.offset.to_be_bytes());
        self.cursor.write_all_at(&position, 0)
    }

    /// Removes the queue. All of it must be in the database.
    pub(super) fn remove(self) -> io::Result<()> {
        fs::remove_dir_all(&self.directory)
    }
}

/// Locks and returns the queues below `parent` whose process is dead.
pub(super) fn lock_orphans(parent: &Path) -> io::Result<Vec<Reader>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(parent)? {
        let directory = entry?.path();
        if directory.is_dir()
            && let Some(lock) = lock(&directory)?
        {
            found.push(Reader::with_lock(&directory, Some(lock))?);
        }
    }
    Ok(found)
}

/// Locks a queue. Returns `None` if its process runs, or another one drains it.
fn lock(directory: &Path) -> io::Result<Option<Flock<File>>> {
    let options =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(directory.join("lock"));
    let file = match options {
        Ok(file) => file,
        // Another process has removed the drained queue.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

fn segment_path(directory: &Path, segment: u64) -> PathBuf {
    directory.join(format!("{segment:06}.log"))
}

fn create_segment(directory: &Path, segment: u64) -> io::Result<File> {
    OpenOptions::new().append(true).create_new(true).mode(0o600).open(segment_path(directory, segment))
}

/// Returns the numbers of the segments of a queue, in order.
fn segments(directory: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        // Files with other names, such as the lock and the cursor, are not segments.
        let number = name.to_str().and_then(|name| name.strip_suffix(".log"));
        numbers.extend(number.and_then(|number| number.parse::<u64>().ok()));
    }
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
    fn reads_lines_in_order_across_segments() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::create(directory.path(), 1000).unwrap();
        let mut reader = Reader::open(spool.directory()).unwrap();
        let big = "x".repeat(1 << 20);
        let sent: Vec<String> = (0..20).map(|n| format!("{n} {big}\n")).collect();
        sent.iter()
            .for_each(|line| assert_eq!(spool.append(line.as_bytes()).unwrap(), AppendOutcome::Queued));
        assert!(spool.open_segment() > 2);
        assert_eq!(lines(&mut reader, Some(spool.open_segment())), sent);
        assert_eq!(segments(spool.directory()).unwrap(), vec![spool.open_segment()]);
    }

    #[test]
    fn rejects_lines_beyond_its_capacity_until_some_are_drained() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::create(directory.path(), 2).unwrap();
        assert_eq!(spool.append(b"1\n").unwrap(), AppendOutcome::Queued);
        assert_eq!(spool.append(b"2\n").unwrap(), AppendOutcome::Queued);
        assert_eq!(spool.append(b"3\n").unwrap(), AppendOutcome::Full);
        spool.drained(1);
        assert_eq!(spool.append(b"4\n").unwrap(), AppendOutcome::Queued);
    }

    #[test]
    fn orphaned_queue_is_recovered_without_its_incomplete_line() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::create(directory.path(), 10).unwrap();
        spool.append(b"whole\n").unwrap();
        spool.append(b"second\n").unwrap();
        spool.append(b"torn").unwrap();
        assert!(lock_orphans(directory.path()).unwrap().is_empty());
        drop(spool);
        let mut orphans = lock_orphans(directory.path()).unwrap();
        assert_eq!(orphans.len(), 1);
        let mut reader = orphans.remove(0);
        let batch = reader.read(1, None).unwrap();
        reader.advance(&batch).unwrap();
        drop(reader);
        let mut reader = lock_orphans(directory.path()).unwrap().remove(0);
        assert_eq!(lines(&mut reader, None), vec!["second\n"]);
        reader.remove().unwrap();
        assert!(lock_orphans(directory.path()).unwrap().is_empty());
    }
}
