//! The progress of writing and reading a backup.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

/// What is being done with a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupPhase {
    Write,
    /// Reads the written file again.
    Verify,
    Read,
}

/// The bytes of a backup file that a phase has processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackupProgress {
    pub phase: BackupPhase,
    pub done: u64,
    pub total: Option<u64>,
}

/// Receives the progress, about once for each MiB.
#[derive(Clone, Default)]
pub struct ProgressReceiver(Option<Arc<dyn Fn(BackupProgress) + Send + Sync>>);

impl fmt::Debug for ProgressReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProgressReceiver")
    }
}

impl ProgressReceiver {
    pub fn new(receive: impl Fn(BackupProgress) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(receive)))
    }

    pub(super) fn report(&self, phase: BackupPhase, done: u64, total: Option<u64>) {
        if let Some(receive) = &self.0 {
            receive(BackupProgress { phase, done, total });
        }
    }
}

/// Reports how much of a file was read.
#[derive(Debug)]
pub(super) struct ProgressReader<R> {
    pub(super) input: R,
    pub(super) receiver: ProgressReceiver,
    pub(super) phase: BackupPhase,
    pub(super) done: u64,
    pub(super) total: Option<u64>,
}

impl<R: Read> Read for ProgressReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.done += count as u64;
        self.receiver.report(self.phase, self.done, self.total);
        Ok(count)
    }
}
