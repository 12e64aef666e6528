//! Reads a backup: verifies it, or restores it into a new cluster.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{BufReader, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest;
use muster_store::Row;
use muster_store::backup::{self, Restoration, RestoredStore, StoredBlob, decode};
use muster_types::backup::BlobMode;
use muster_types::ids::BlobId;
use muster_types::key::{Secret, random_alphanumeric};
use muster_types::storage::blob_path;
use tokio::sync::{mpsc, oneshot};

use super::archive::{ArchiveReader, FORMAT, Manifest, PartHeader};
use super::encryption::{DecryptionKey, EncryptedReader};
use super::progress::{BackupPhase, ProgressReader, ProgressReceiver};
use super::{BackupError, find_blob, require_space, with_path};

/// The number of rows that wait for the database. Each may be as large as [`MAX_ROW_BYTES`](backup::MAX_ROW_BYTES).
const QUEUED_ROWS: usize = 8;
/// The minimum length of the seed of a cluster.
const MIN_SEED_LENGTH: usize = 16;

/// Where a backup is restored.
#[derive(Debug, Clone)]
pub struct LoadTarget {
    pub database_url: Secret,
    /// The storage that blobs are written to. Unset: they are only verified.
    pub storage: Option<PathBuf>,
    pub progress: ProgressReceiver,
}

/// A backup that is in the database, which no daemon can use yet.
#[derive(Debug)]
pub struct LoadedBackup {
    pub manifest: Manifest,
    pub seed: Secret,
    pub restored: RestoredStore,
    pub rows: u64,
    /// The blobs of the cluster.
    pub blobs: Vec<StoredBlob>,
    /// The blobs that were deleted while the backup was created, which it does not include.
    pub deleted_blobs: Vec<BlobId>,
    /// The relations between tables that do not hold.
    pub violations: Vec<String>,
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct BackupReport {
    pub manifest: Manifest,
    pub rows: u64,
    /// The number of blobs of the cluster, and their size.
    pub blobs: u64,
    pub blob_bytes: u64,
    /// The blobs that are neither in the backup nor in a storage of this host.
    pub missing_blobs: Vec<BlobId>,
    /// The blobs that were deleted while the backup was created, which it does not include.
    pub deleted_blobs: Vec<BlobId>,
}

/// What the reader has found.
enum ArchiveItem {
    Manifest(Manifest),
    Seed(Secret),
    Table(String),
    Row(Row, usize),
    /// All tables were read. The reader waits for the blobs of the database.
    Tables,
}

/// Verifies a backup: every checksum, the database, for which it creates a temporary one in `directory`, and that all blobs are in
/// the backup or in a storage of this host.
pub async fn verify(
    file: &Path,
    key: &DecryptionKey,
    directory: &Path,
    storages: &[PathBuf],
    progress: ProgressReceiver,
) -> Result<BackupReport, BackupError> {
    let temporary = TemporaryDirectory::create(directory)?;
    let url = format!("sqlite:{}", temporary.0.join("muster.db").display());
    let target = LoadTarget { database_url: Secret::new(url), storage: None, progress };
    let loaded = load(file, key, &target).await?;
    loaded.restored.store.close().await;
    if !loaded.violations.is_empty() {
        let violations = loaded.violations.join(", ");
        return Err(BackupError::Damaged(format!("its database is not consistent: {violations}")));
    }
    let is_missing = |blob: &&StoredBlob| {
        let size =
            find_blob(storages, blob).and_then(|path| fs::metadata(path).ok()).map(|found| found.len());
        size != Some(blob.size)
    };
    let missing_blobs = match loaded.manifest.blobs {
        BlobMode::Include => Vec::new(),
        BlobMode::Reference => loaded.blobs.iter().filter(is_missing).map(|blob| blob.id).collect(),
    };
    Ok(BackupReport {
        manifest: loaded.manifest,
        rows: loaded.rows,
        blobs: loaded.blobs.len() as u64,
        blob_bytes: loaded.blobs.iter().map(|blob| blob.size).sum(),
        missing_blobs,
        deleted_blobs: loaded.deleted_blobs,
    })
}

/// Reads a backup into a new database, and verifies all of it. The database cannot be used before
/// [`RestoredStore::finish`].
pub async fn load(
    file: &Path,
    key: &DecryptionKey,
    target: &LoadTarget,
) -> Result<LoadedBackup, BackupError> {
    let (items, mut received) = mpsc::channel(QUEUED_ROWS);
    let (expect, expected) = oneshot::channel();
    let (path, key, target_of_reader) = (file.to_owned(), key.clone(), target.clone());
    let reader = tokio::task::spawn_blocking(move || read(&path, &key, &target_of_reader, &items, expected));
    let consumed = consume(&mut received, expect, target.database_url.expose()).await;
    // While this is open, the reader knows that it was not interrupted.
    let _received = consumed.is_ok().then_some(received);
    let read = reader.await.map_err(|error| BackupError::Failed(error.to_string()))?;
    match (read, consumed) {
        // The reader stops if the database fails.
        (Err(ReadError::Stopped) | Ok(_), Err(error)) => Err(error),
        (Err(ReadError::Stopped), Ok(_)) => {
            Err(BackupError::Failed("reading the backup was cancelled".into()))
        }
        (Err(ReadError::Backup(error)), _) => Err(error),
        (Ok(deleted_blobs), Ok(loaded)) => {
            let loaded = loaded.ok_or_else(|| BackupError::Damaged("it has no tables".into()))?;
            Ok(LoadedBackup { deleted_blobs, ..loaded })
        }
    }
}

/// Writes what the reader finds to the database.
async fn consume(
    items: &mut mpsc::Receiver<ArchiveItem>,
    expect: oneshot::Sender<HashMap<BlobId, StoredBlob>>,
    url: &str,
) -> Result<Option<LoadedBackup>, BackupError> {
    let (Some(ArchiveItem::Manifest(manifest)), Some(ArchiveItem::Seed(seed))) =
        (items.recv().await, items.recv().await)
    else {
        return Ok(None);
    };
    let mut restoration = Restoration::begin(url, manifest.schema_version).await?;
    let mut rows = 0;
    while let Some(item) = items.recv().await {
        match item {
            ArchiveItem::Manifest(_) | ArchiveItem::Seed(_) => {
                return Err(BackupError::Damaged("a part is there twice".into()));
            }
            ArchiveItem::Table(name) => restoration.begin_table(&name).await?,
            ArchiveItem::Row(row, bytes) => {
                rows += 1;
                restoration.add(row, bytes).await?;
            }
            ArchiveItem::Tables => {
                let restored = restoration.migrate().await?;
                let violations = backup::check(&restored.store).await?;
                let blobs = backup::blobs(&restored.store).await?;
                // The reader has ended if this fails.
                let _ = expect.send(blobs.iter().map(|blob| (blob.id, blob.clone())).collect());
                let deleted_blobs = Vec::new();
                return Ok(Some(LoadedBackup {
                    manifest,
                    seed,
                    restored,
                    rows,
                    blobs,
                    deleted_blobs,
                    violations,
                }));
            }
        }
    }
    Ok(None)
}

/// Why the reader ended early.
enum ReadError {
    /// The receiver has ended, and knows why.
    Stopped,
    Backup(BackupError),
}

impl From<BackupError> for ReadError {
    fn from(error: BackupError) -> Self {
        Self::Backup(error)
    }
}

fn damaged(text: &str) -> ReadError {
    ReadError::Backup(BackupError::Damaged(text.to_owned()))
}

/// Reads the file, and writes its blobs. Returns those that were deleted while it was created.
fn read(
    path: &Path,
    key: &DecryptionKey,
    target: &LoadTarget,
    items: &mpsc::Sender<ArchiveItem>,
    expected: oneshot::Receiver<HashMap<BlobId, StoredBlob>>,
) -> Result<Vec<BlobId>, ReadError> {
    let send = |item| items.blocking_send(item).map_err(|_| ReadError::Stopped);
    let input = File::open(path).map_err(with_path("read", path))?;
    let total = input.metadata().ok().map(|found| found.len());
    let receiver = target.progress.clone();
    let file = ProgressReader { input, receiver, phase: BackupPhase::Read, done: 0, total };
    let mut archive = ArchiveReader::new(EncryptedReader::new(BufReader::with_capacity(1 << 20, file), key)?);

    if archive.next_part()? != Some(PartHeader::Manifest) {
        return Err(damaged("it does not begin with its manifest"));
    }
    let manifest: Manifest = serde_json::from_slice(&archive.only_record()?)
        .map_err(|error| BackupError::Damaged(format!("manifest: {error}")))?;
    if manifest.format != FORMAT {
        let text = format!("it has format {}, which this program does not know", manifest.format);
        return Err(ReadError::Backup(BackupError::Failed(text)));
    }
    let mode = manifest.blobs;
    send(ArchiveItem::Manifest(manifest))?;
    if archive.next_part()? != Some(PartHeader::Seed) {
        return Err(damaged("it has no seed"));
    }
    let seed = String::from_utf8(archive.only_record()?).ok().filter(|seed| seed.len() >= MIN_SEED_LENGTH);
    send(ArchiveItem::Seed(Secret::new(seed.ok_or_else(|| damaged("its seed is not a text"))?)))?;

    let mut part = archive.next_part()?;
    while let Some(PartHeader::Table { name }) = part {
        send(ArchiveItem::Table(name.clone()))?;
        while let Some(record) = archive.next_record()? {
            let row =
                decode(&record).ok_or_else(|| damaged(&format!("a row of table {name} is not readable")))?;
            send(ArchiveItem::Row(row, record.len()))?;
        }
        part = archive.next_part()?;
    }
    send(ArchiveItem::Tables)?;
    let expected = expected.blocking_recv().map_err(|_| ReadError::Stopped)?;
    if let (BlobMode::Include, Some(storage)) = (mode, &target.storage) {
        let needed = expected.values().map(|blob| blob.size).sum();
        require_space(storage, needed)?;
    }
    let (mut found, mut deleted) = (HashSet::new(), Vec::new());
    while let Some(header) = part {
        let (uuid, size) = match header {
            PartHeader::Blob { uuid, size } => (uuid, Some(size)),
            PartHeader::DeletedBlob { uuid } => (uuid, None),
            _ => return Err(damaged("a part is there twice")),
        };
        let is_expected = |blob: &&StoredBlob| size.is_none_or(|size| blob.size == size);
        let blob = expected.get(&uuid).filter(is_expected);
        let blob = blob.ok_or_else(|| damaged(&format!("blob {uuid} is not that of its database")))?;
        if !found.insert(uuid) {
            return Err(damaged(&format!("blob {uuid} is there twice")));
        }
        if size.is_some() {
            read_blob(&mut archive, blob, target.storage.as_deref(), items)?;
        } else if archive.next_record()?.is_some() {
            return Err(damaged("a blob that was deleted has content"));
        } else {
            deleted.push(uuid);
        }
        part = archive.next_part()?;
    }
    match mode {
        BlobMode::Reference if !found.is_empty() => Err(damaged("it contains blobs, although it is without")),
        BlobMode::Include if found.len() < expected.len() => {
            Err(damaged(&format!("{} of its blobs are missing", expected.len() - found.len())))
        }
        _ => Ok(deleted),
    }
}

/// Reads a blob, and writes it to a storage under its name once it is complete.
fn read_blob(
    archive: &mut ArchiveReader<impl std::io::Read>,
    blob: &StoredBlob,
    storage: Option<&Path>,
    items: &mpsc::Sender<ArchiveItem>,
) -> Result<(), ReadError> {
    let mut output = storage.map(|storage| BlobFile::create(&blob_path(storage, blob.id))).transpose()?;
    let mut hash = digest::Context::new(&digest::SHA256);
    let mut size = 0;
    while let Some(record) = archive.next_record()? {
        // The caller was interrupted, and removes what was written.
        if items.is_closed() {
            return Err(ReadError::Stopped);
        }
        size += record.len() as u64;
        if size > blob.size {
            return Err(damaged(&format!("blob {} is larger than its size", blob.id)));
        }
        hash.update(&record);
        if let Some(output) = &mut output {
            output.file.write_all(&record).map_err(with_path("write", &output.path))?;
        }
    }
    if size != blob.size || hex::encode(hash.finish()) != blob.sha256 {
        return Err(damaged(&format!("blob {} differs from its checksum", blob.id)));
    }
    output.map_or(Ok(()), |output| output.finish().map_err(ReadError::from))
}

/// The file of a blob, which has its name only once it is complete. The node verifies it again before it uses it.
struct BlobFile {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
}

impl BlobFile {
    fn create(path: &Path) -> Result<Self, BackupError> {
        let directory = path.parent().unwrap_or(Path::new("."));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(with_path("create", directory))?;
        let temporary = path.with_extension("restoring");
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
        let file = file.map_err(with_path("create", &temporary))?;
        Ok(Self { path: path.to_owned(), temporary, file })
    }

    fn finish(self) -> Result<(), BackupError> {
        let written = self.file.sync_all();
        let written = written.and_then(|()| self.file.set_permissions(Permissions::from_mode(0o444)));
        written.and_then(|()| fs::rename(&self.temporary, &self.path)).map_err(with_path("write", &self.path))
    }
}

impl Drop for BlobFile {
    fn drop(&mut self) {
        // After the rename no file has this name.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// A private directory that is removed with its content.
#[derive(Debug)]
struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    fn create(parent: &Path) -> Result<Self, BackupError> {
        let path = parent.join(format!("muster-verify-{}", random_alphanumeric(12)));
        DirBuilder::new().mode(0o700).create(&path).map_err(with_path("create", &path))?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
