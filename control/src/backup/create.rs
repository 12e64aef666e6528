//! Creates a backup while daemons are running.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest;
use muster_store::backup::{BackupSnapshot, StoredBlob, encode};
use muster_store::{Row, Store};
use muster_types::key::Secret;
use muster_types::time::now;
use tokio::sync::mpsc;

use super::archive::{ArchiveReader, ArchiveWriter, BlobMode, FORMAT, Manifest, PartHeader};
use super::encryption::{DecryptionKey, EncryptedReader, EncryptedWriter, Protection};
use super::output_file::OutputFile;
use super::{BackupError, find_blob, with_path};

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
    pub protection: Protection,
    pub file: &'a Path,
}

/// A backup that was written and verified.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct BackupSummary {
    pub bytes: u64,
    pub rows: u64,
    /// The number of blobs of the cluster, and their size.
    pub blobs: u64,
    pub blob_bytes: u64,
}

/// What the writer is to do.
enum WriterCommand {
    Begin(PartHeader),
    Add(Vec<u8>),
    AddRows(Vec<Row>),
    AddBlob(StoredBlob, PathBuf),
    /// Nothing is missing.
    Finish,
}

/// Creates a backup, and reads the whole file again to verify it before it gets its name.
pub async fn create(new: NewBackup<'_>) -> Result<BackupSummary, BackupError> {
    let mut snapshot = BackupSnapshot::begin(new.store).await?;
    let created = now();
    let blobs = snapshot.blobs().await?;
    let included = match new.blobs {
        BlobMode::Reference => Vec::new(),
        BlobMode::Include => locate(new.storages, &blobs)?,
    };
    let manifest = Manifest {
        format: FORMAT,
        created,
        release: env!("CARGO_PKG_VERSION").to_owned(),
        schema_version: snapshot.schema_version,
        blobs: new.blobs,
    };
    let (commands, received) = mpsc::channel(QUEUED_PAGES);
    let (file, protection) = (new.file.to_owned(), new.protection);
    let writer = tokio::task::spawn_blocking(move || write(&file, &protection, received));
    let produced = produce(&mut snapshot, &manifest, new.seed, included, commands).await;
    snapshot.end().await;
    let written = writer.await.map_err(|error| BackupError::Failed(error.to_string()))?;
    let (bytes, rows) = match (written, produced) {
        // If the writer fails, it stops receiving: its error is the cause.
        (Err(error), _) | (Ok(None), Err(error)) => return Err(error),
        (Ok(None), Ok(())) => return Err(BackupError::Failed("the backup was cancelled".into())),
        (Ok(Some(written)), _) => written,
    };
    let blob_bytes = blobs.iter().map(|blob| blob.size).sum();
    Ok(BackupSummary { bytes, rows, blobs: blobs.len() as u64, blob_bytes })
}

/// Finds the files of all blobs.
fn locate(storages: &[PathBuf], blobs: &[StoredBlob]) -> Result<Vec<(StoredBlob, PathBuf)>, BackupError> {
    let located: Vec<_> = blobs.iter().map(|blob| (blob.clone(), find_blob(storages, blob))).collect();
    let missing: Vec<String> =
        located.iter().filter(|(_, path)| path.is_none()).map(|(blob, _)| blob.id.to_string()).collect();
    if !missing.is_empty() {
        return Err(BackupError::Failed(format!(
            "{} of {} blobs are not on this host, so the backup cannot include them (first: {}). Create it on a host that has \
             all blobs, see `muster blob show`, or without --blobs include",
            missing.len(),
            blobs.len(),
            missing[0]
        )));
    }
    Ok(located.into_iter().filter_map(|(blob, path)| Some((blob, path?))).collect())
}

/// Sends the content of the backup to the writer.
async fn produce(
    snapshot: &mut BackupSnapshot<'_>,
    manifest: &Manifest,
    seed: &Secret,
    blobs: Vec<(StoredBlob, PathBuf)>,
    commands: mpsc::Sender<WriterCommand>,
) -> Result<(), BackupError> {
    let send = async |command| {
        commands.send(command).await.map_err(|_| BackupError::Failed("the file cannot be written".into()))
    };
    let manifest = serde_json::to_vec(manifest).map_err(io::Error::from)?;
    send(WriterCommand::Begin(PartHeader::Manifest)).await?;
    send(WriterCommand::Add(manifest)).await?;
    send(WriterCommand::Begin(PartHeader::Seed)).await?;
    send(WriterCommand::Add(seed.expose().as_bytes().to_vec())).await?;
    for table in snapshot.tables() {
        send(WriterCommand::Begin(PartHeader::Table { name: (*table).to_owned() })).await?;
        let mut after: Option<Row> = None;
        loop {
            let rows = snapshot.page(table, after.as_ref()).await?;
            let Some(last) = rows.last() else { break };
            after = Some(last.clone());
            send(WriterCommand::AddRows(rows)).await?;
        }
    }
    for (blob, path) in blobs {
        send(WriterCommand::Begin(PartHeader::Blob { uuid: blob.id, size: blob.size })).await?;
        send(WriterCommand::AddBlob(blob, path)).await?;
    }
    send(WriterCommand::Finish).await
}

/// Writes and verifies the file. Returns its size and the number of rows, or `None` if it was not finished.
fn write(
    path: &Path,
    protection: &Protection,
    mut commands: mpsc::Receiver<WriterCommand>,
) -> Result<Option<(u64, u64)>, BackupError> {
    let output = OutputFile::create(path)?;
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
            WriterCommand::AddBlob(blob, path) => {
                copy_blob(&mut archive, &blob, &path)?;
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
    verify_file(output.temporary(), &key)?;
    Ok(Some((output.finish()?, rows)))
}

fn copy_blob(
    archive: &mut ArchiveWriter<impl io::Write>,
    blob: &StoredBlob,
    path: &Path,
) -> Result<(), BackupError> {
    let mut file = File::open(path).map_err(with_path("read", path))?;
    let mut hash = digest::Context::new(&digest::SHA256);
    let mut size = 0;
    loop {
        let mut record = Vec::new();
        (&mut file).take(BLOB_RECORD_BYTES).read_to_end(&mut record).map_err(with_path("read", path))?;
        if record.is_empty() {
            break;
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
fn verify_file(path: &Path, key: &DecryptionKey) -> Result<(), BackupError> {
    let file = File::open(path).map_err(with_path("read", path))?;
    let mut archive = ArchiveReader::new(EncryptedReader::new(BufReader::with_capacity(1 << 20, file), key)?);
    while archive.next_part()?.is_some() {
        while archive.next_record()?.is_some() {}
    }
    Ok(())
}
