//! Creates a backup while daemons are running.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aws_lc_rs::digest;
use muster_store::backup::{self, BackupSnapshot, StoredBlob, encode};
use muster_store::{Row, Store};
use muster_types::backup::BlobMode;
use muster_types::key::Secret;
use muster_types::time::now;
use tokio::sync::mpsc;

use super::archive::{ArchiveReader, ArchiveWriter, FORMAT, Manifest, PartHeader};
use super::encryption::{DecryptionKey, EncryptedReader, EncryptedWriter, Protection};
use super::output_file::{OutputFile, directory};
use super::progress::{BackupPhase, ProgressReader, ProgressReceiver};
use super::{BackupError, BlobSource, find_blob, require_space, with_path};

/// The number of pages of rows that wait for the writer.
const QUEUED_PAGES: usize = 4;
/// The number of bytes of a blob in one record.
pub(super) const BLOB_RECORD_BYTES: u64 = 1 << 20;

/// What a new backup contains, and where it is written.
#[derive(Debug)]
pub struct NewBackup<'a> {
    pub store: &'a Store,
    pub seed: &'a Secret,
    pub blobs: BlobMode,
    /// The directories that contain blobs on this host.
    pub storages: &'a [PathBuf],
    /// Where other blobs come from.
    pub source: Option<&'a dyn BlobSource>,
    pub protection: Protection,
    pub file: &'a Path,
    pub progress: ProgressReceiver,
}

/// A backup that was written and verified.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct BackupSummary {
    pub bytes: u64,
    pub rows: u64,
    /// The number of blobs of the cluster, and their size.
    pub blobs: u64,
    pub blob_bytes: u64,
    /// The number of blobs that were deleted while the backup was created, which it does not include.
    pub deleted_blobs: u64,
}

/// What the writer is to do.
enum WriterCommand {
    Begin(PartHeader),
    Add(Vec<u8>),
    AddRows(Vec<Row>),
    AddBlob(StoredBlob, PathBuf, File),
    /// Nothing is missing.
    Finish,
}

/// Cancels the writer when it is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Creates a backup, and reads the whole file again to verify it before it gets its name. If the future is dropped, no file remains.
pub async fn create(new: NewBackup<'_>) -> Result<BackupSummary, BackupError> {
    let mut snapshot = BackupSnapshot::begin(new.store).await?;
    let created = now();
    let blobs = snapshot.blobs().await?;
    let blob_bytes = blobs.iter().map(|blob| blob.size).sum();
    if new.blobs == BlobMode::Include {
        require_space(directory(new.file), blob_bytes)?;
    }
    let manifest = Manifest {
        format: FORMAT,
        created,
        release: env!("CARGO_PKG_VERSION").to_owned(),
        schema_version: snapshot.schema_version,
        blobs: new.blobs,
    };
    let (commands, received) = mpsc::channel(QUEUED_PAGES);
    let (file, protection, progress) = (new.file.to_owned(), new.protection.clone(), new.progress.clone());
    let cancel = CancelOnDrop(Arc::default());
    let cancelled = Arc::clone(&cancel.0);
    let writer =
        tokio::task::spawn_blocking(move || write(&file, &protection, received, progress, &cancelled));
    let tables = produce_tables(&mut snapshot, &manifest, new.seed, &commands).await;
    // The contents of blobs take long, and do not need the snapshot.
    snapshot.end().await;
    let produced = match tables {
        Ok(()) => produce_blobs(&new, &blobs, commands).await,
        Err(error) => {
            drop(commands);
            Err(error)
        }
    };
    let written = writer.await.map_err(|error| BackupError::Failed(error.to_string()))?;
    let (bytes, rows, deleted_blobs) = match (written, produced) {
        // If the writer fails, it stops receiving: its error is the cause.
        (Err(error), _) | (Ok(None), Err(error)) => return Err(error),
        (Ok(None), Ok(_)) => return Err(cancelled_error()),
        (Ok(Some((bytes, rows))), produced) => (bytes, rows, produced?),
    };
    Ok(BackupSummary { bytes, rows, blobs: blobs.len() as u64, blob_bytes, deleted_blobs })
}

fn cancelled_error() -> BackupError {
    BackupError::Failed("the backup was cancelled".into())
}

async fn send(commands: &mpsc::Sender<WriterCommand>, command: WriterCommand) -> Result<(), BackupError> {
    commands.send(command).await.map_err(|_| BackupError::Failed("the file cannot be written".into()))
}

/// Sends everything but blobs to the writer.
async fn produce_tables(
    snapshot: &mut BackupSnapshot<'_>,
    manifest: &Manifest,
    seed: &Secret,
    commands: &mpsc::Sender<WriterCommand>,
) -> Result<(), BackupError> {
    let manifest = serde_json::to_vec(manifest).map_err(io::Error::from)?;
    send(commands, WriterCommand::Begin(PartHeader::Manifest)).await?;
    send(commands, WriterCommand::Add(manifest)).await?;
    send(commands, WriterCommand::Begin(PartHeader::Seed)).await?;
    send(commands, WriterCommand::Add(seed.expose().as_bytes().to_vec())).await?;
    for table in snapshot.tables() {
        send(commands, WriterCommand::Begin(PartHeader::Table { name: (*table).to_owned() })).await?;
        let mut after: Option<Row> = None;
        loop {
            let rows = snapshot.page(table, after.as_ref()).await?;
            let Some(last) = rows.last() else { break };
            after = Some(last.clone());
            send(commands, WriterCommand::AddRows(rows)).await?;
        }
    }
    Ok(())
}

/// Sends the blobs, if they are wanted, and the end to the writer. Returns the number of blobs that were deleted meanwhile.
async fn produce_blobs(
    new: &NewBackup<'_>,
    blobs: &[StoredBlob],
    commands: mpsc::Sender<WriterCommand>,
) -> Result<u64, BackupError> {
    let mut deleted = 0;
    if new.blobs == BlobMode::Include {
        for blob in blobs {
            let header = PartHeader::Blob { uuid: blob.id, size: blob.size };
            // The open file keeps its content if the blob is deleted.
            let local = find_blob(new.storages, blob).and_then(|path| Some((File::open(&path).ok()?, path)));
            let missing = match local {
                Some((file, path)) => {
                    send(&commands, WriterCommand::Begin(header)).await?;
                    send(&commands, WriterCommand::AddBlob(blob.clone(), path, file)).await?;
                    None
                }
                None => copy_remote(new.source, blob, header, &commands).await?,
            };
            if let Some(reason) = missing {
                if backup::has_blob(new.store, blob.id).await? {
                    return Err(BackupError::Failed(reason));
                }
                deleted += 1;
                send(&commands, WriterCommand::Begin(PartHeader::DeletedBlob { uuid: blob.id })).await?;
            }
        }
    }
    send(&commands, WriterCommand::Finish).await?;
    Ok(deleted)
}

/// Sends a blob of another host to the writer. Returns the reason if it cannot be read at all.
async fn copy_remote(
    source: Option<&dyn BlobSource>,
    blob: &StoredBlob,
    header: PartHeader,
    commands: &mpsc::Sender<WriterCommand>,
) -> Result<Option<String>, BackupError> {
    let Some(source) = source else {
        return Ok(Some(format!(
            "blob {} is not on this host, and no other host can be asked: give the credentials of the cluster, or create the \
             backup without --blobs include",
            blob.id
        )));
    };
    let failed =
        |reason: &str| format!("blob {} is not on this host, and reading it failed: {reason}", blob.id);
    let (sink, chunks) = mpsc::channel(QUEUED_PAGES);
    // Owns the receiver, so that the source ends if the writer has failed.
    let receive = async move {
        let (mut header, mut hash) = (Some(header), digest::Context::new(&digest::SHA256));
        let (mut chunks, mut size) = (chunks, 0_u64);
        while let Some(chunk) = chunks.recv().await {
            let chunk: Vec<u8> = chunk;
            size += chunk.len() as u64;
            hash.update(&chunk);
            if let Some(header) = header.take() {
                send(commands, WriterCommand::Begin(header)).await?;
            }
            send(commands, WriterCommand::Add(chunk)).await?;
        }
        Ok::<_, BackupError>((header, size, hash))
    };
    let (copied, received) = tokio::join!(source.copy(blob.id, sink), receive);
    let (header, size, hash) = received?;
    match (copied, header) {
        // Nothing was written.
        (Err(reason), Some(_)) => return Ok(Some(failed(&reason))),
        (Err(reason), None) => return Err(BackupError::Failed(failed(&reason))),
        (Ok(()), Some(header)) => send(commands, WriterCommand::Begin(header)).await?,
        (Ok(()), None) => {}
    }
    if size != blob.size || hex::encode(hash.finish()) != blob.sha256 {
        return Err(BackupError::Failed(failed("its content differs from its checksum")));
    }
    Ok(None)
}

/// Writes and verifies the file. Returns its size and the number of rows, or `None` if it was not finished.
fn write(
    path: &Path,
    protection: &Protection,
    mut commands: mpsc::Receiver<WriterCommand>,
    progress: ProgressReceiver,
    cancelled: &AtomicBool,
) -> Result<Option<(u64, u64)>, BackupError> {
    let output = OutputFile::create(path, progress.clone())?;
    let writer = EncryptedWriter::new(BufWriter::with_capacity(1 << 20, output), protection)?;
    let key = DecryptionKey::FileKey(writer.file_key());
    let mut archive = ArchiveWriter::new(writer);
    let mut rows = 0;
    let mut is_complete = false;
    while let Some(command) = commands.blocking_recv() {
        let written = match command {
            WriterCommand::Begin(header) => archive.begin(&header),
            WriterCommand::Finish => {
                is_complete = true;
                Ok(())
            }
            WriterCommand::Add(record) => archive.add(&record),
            WriterCommand::AddRows(page) => {
                rows += page.len() as u64;
                page.iter().try_for_each(|row| archive.add(&encode(row)))
            }
            WriterCommand::AddBlob(blob, path, file) => {
                copy_blob(&mut archive, &blob, (&path, file), cancelled)?;
                Ok(())
            }
        };
        written.map_err(with_path("write", path))?;
    }
    if !is_complete {
        return Ok(None);
    }
    let encrypted = archive.finish().map_err(with_path("write", path))?;
    let buffered = encrypted.finish().map_err(with_path("write", path))?;
    let mut output = buffered.into_inner().map_err(|error| with_path("write", path)(error.into_error()))?;
    output.sync()?;
    verify_file(output.temporary(), &key, progress, cancelled)?;
    if cancelled.load(Ordering::Relaxed) {
        return Ok(None);
    }
    Ok(Some((output.finish()?, rows)))
}

fn copy_blob(
    archive: &mut ArchiveWriter<impl io::Write>,
    blob: &StoredBlob,
    (path, mut file): (&Path, File),
    cancelled: &AtomicBool,
) -> Result<(), BackupError> {
    let mut hash = digest::Context::new(&digest::SHA256);
    let mut size = 0;
    loop {
        let mut record = Vec::new();
        (&mut file).take(BLOB_RECORD_BYTES).read_to_end(&mut record).map_err(with_path("read", path))?;
        if record.is_empty() {
            break;
        }
        if cancelled.load(Ordering::Relaxed) {
            return Err(cancelled_error());
        }
        size += record.len() as u64;
        hash.update(&record);
        archive.add(&record).map_err(with_path("write the content of", path))?;
    }
    if size != blob.size || hex::encode(hash.finish()) != blob.sha256 {
        return Err(BackupError::Failed(format!(
            "blob {} is damaged: {} differs from its checksum. Muster replaces damaged copies from other nodes",
            blob.id,
            path.display()
        )));
    }
    Ok(())
}

/// Verifies every checksum of a file.
fn verify_file(
    path: &Path,
    key: &DecryptionKey,
    receiver: ProgressReceiver,
    cancelled: &AtomicBool,
) -> Result<(), BackupError> {
    let input = File::open(path).map_err(with_path("read", path))?;
    let total = input.metadata().ok().map(|found| found.len());
    let file = ProgressReader { input, receiver, phase: BackupPhase::Verify, done: 0, total };
    let mut archive = ArchiveReader::new(EncryptedReader::new(BufReader::with_capacity(1 << 20, file), key)?);
    while archive.next_part()?.is_some() {
        while archive.next_record()?.is_some() {
            if cancelled.load(Ordering::Relaxed) {
                return Err(cancelled_error());
            }
        }
    }
    Ok(())
}
