//! The replicas that this node has of the disks of instances on other nodes. See docs/decisions/0074.
//!
//! ```text
//! replicas/<instance>/replica.json          which files are the replica
//!                     <disk>.<copy>.qcow2   a full copy, or the changes since the one before
//!                     nvram.<copy>.fd
//! ```
//!
//! `replica.json` is replaced when all files of a copy are complete and synced: this commits the copy. Then its changes are merged
//! with the full copy. Until that is complete, the changes remain on top of it, so that the disks have the content of the copy at any
//! time. Files that `replica.json` does not name are incomplete or obsolete.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use muster_types::ids::InstanceId;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use super::disks::create_atomically;
use super::hypervisor::blocking;
use super::vm_dir::{VmDir, file};
use crate::files::{create_dir, io_error};
use crate::image::qcow2_writer;
use crate::replica_messages::{
    CopyHeader, ReplicaStatus, TRANSFER_TIMEOUT, confirm, receive_message, reject, send_message, to_async,
    within,
};
use crate::storage::FileStorage;

const REPLICAS_DIR: &str = "replicas";
const MANIFEST: &str = "replica.json";
/// The maximum number of disks of a copy.
const MAX_DISKS: usize = 64;
const BUFFER_SIZE: usize = 1 << 20;

/// The replicas of a node.
#[derive(Debug)]
pub(super) struct ReplicaStore {
    dir: PathBuf,
    storage: Arc<FileStorage>,
    /// The copies that are being received.
    receiving: Arc<Mutex<HashSet<Uuid>>>,
    /// Acquired to change a replica.
    locks: Mutex<HashMap<InstanceId, Arc<tokio::sync::Mutex<()>>>>,
}

/// The content of a replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ReplicaManifest {
    /// The last complete copy.
    copy: Uuid,
    /// The time that it dates from.
    time: f64,
    /// The generation of the VM that it was taken of.
    generation: i64,
    disks: Vec<String>,
    /// Whether the copy includes the NVRAM.
    nvram: bool,
    /// The copy that the files of the full copy are named after.
    full: Uuid,
    /// Whether the files of the last copy contain changes that are not merged with the full copy yet.
    is_unmerged: bool,
    /// Whether it was restored, after which it must not change.
    sealed: bool,
}

impl ReplicaManifest {
    /// Returns the files that belong to the replica.
    fn files(&self) -> Vec<String> {
        let mut files = vec![MANIFEST.to_owned()];
        for disk in &self.disks {
            files.push(disk_name(disk, self.full));
            if self.is_unmerged {
                files.push(disk_name(disk, self.copy));
            }
        }
        if self.nvram {
            files.push(nvram_name(self.copy));
        }
        files
    }
}

fn disk_name(disk: &str, copy: Uuid) -> String {
    format!("{disk}.{copy}.qcow2")
}

fn nvram_name(copy: Uuid) -> String {
    format!("nvram.{copy}.fd")
}

impl ReplicaStore {
    pub(super) fn new(storage_dir: &Path, storage: Arc<FileStorage>) -> Self {
        Self {
            dir: storage_dir.join(REPLICAS_DIR),
            storage,
            receiving: Arc::default(),
            locks: Mutex::default(),
        }
    }

    fn replica_dir(&self, id: InstanceId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    async fn lock(&self, id: InstanceId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock();
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(id).or_default().clone()
        };
        lock.lock_owned().await
    }

    /// Opens a connection that receives a copy in the background.
    pub(super) fn receive(self: &Arc<Self>, id: InstanceId, generation: i64) -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair().map_err(io_error("failed to create a socket pair"))?;
        ours.set_nonblocking(true).map_err(io_error("failed to configure a socket"))?;
        create_dir(&self.replica_dir(id))?;
        let store = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = store.receive_copy(id, generation, theirs).await {
                tracing::info!(instance = %id, %error, "did not receive a copy of disks");
            }
        });
        Ok(ours)
    }

    async fn receive_copy(&self, id: InstanceId, generation: i64, stream: UnixStream) -> Result<()> {
        let mut stream = to_async(stream)?;
        let dir = self.replica_dir(id);
        let last = load(&dir)?;
        send_message(&mut stream, &ReplicaStatus { copy: last.as_ref().map(|last| last.copy) }).await?;
        // The source may only have asked what the replica contains.
        let Ok(header) = receive_message::<CopyHeader>(&mut stream).await else { return Ok(()) };
        if header.generation != generation {
            return Err(Error::Conflict("the copy has another generation".into()));
        }
        let names = check_header(&header)?;
        self.receiving.lock().insert(header.copy);
        let received = async {
            for name in &names {
                receive_file(&mut stream, &dir.join(name)).await?;
            }
            self.commit(id, last.as_ref(), &header).await
        };
        let received = received.await;
        self.receiving.lock().remove(&header.copy);
        if let Err(error) = received {
            // Unless it was committed, and something failed afterwards.
            if load(&dir)?.is_none_or(|current| current.copy != header.copy) {
                for name in &names {
                    remove_file(&dir.join(name))?;
                }
            }
            reject(&mut stream, &error).await;
            return Err(error);
        }
        confirm(&mut stream).await?;
        let _lock = self.lock(id).await;
        self.merge(id).await.map(drop)
    }

    /// Makes a copy whose files are complete the content of the replica, unless it has changed since `last`.
    async fn commit(
        &self,
        id: InstanceId,
        last: Option<&ReplicaManifest>,
        header: &CopyHeader,
    ) -> Result<()> {
        let _lock = self.lock(id).await;
        // An earlier daemon may have been killed before it did so.
        let current = self.merge(id).await?;
        if current.as_ref().map(|current| current.copy) != last.map(|last| last.copy) {
            return Err(Error::Conflict("the replica has changed".into()));
        }
        if let Some(current) = &current {
            if current.sealed {
                return Err(Error::Conflict("the instance was restored from the replica".into()));
            }
            if current.generation > header.generation {
                return Err(Error::Conflict("the replica has a copy of a later generation".into()));
            }
            if header.base.is_some() && (header.base != Some(current.copy) || header.disks != current.disks) {
                return Err(Error::Conflict(
                    "the replica lacks the copy that the changes are based on".into(),
                ));
            }
        } else if header.base.is_some() {
            return Err(Error::Conflict("the replica has no copy".into()));
        }
        let manifest = ReplicaManifest {
            copy: header.copy,
            time: header.time,
            generation: header.generation,
            disks: header.disks.clone(),
            nvram: header.nvram,
            full: match (header.base, &current) {
                (Some(_), Some(current)) => current.full,
                _ => header.copy,
            },
            is_unmerged: header.base.is_some(),
            sealed: false,
        };
        let dir = self.replica_dir(id);
        let receiving = self.receiving.clone();
        blocking(move || {
            for disk in &manifest.disks {
                // QEMU has written it on the other host, with the privileges of the guest.
                qcow2_writer::require_standalone(&dir.join(disk_name(disk, manifest.copy)))
                    .map_err(io_error("failed to check the copy of a disk"))?;
            }
            save(&dir, &manifest)?;
            clean(&dir, &manifest, &receiving)
        })
        .await
    }

    /// Merges the changes of the last copy with the full copy, and removes the files that are not needed. Returns the content of the
    /// replica. The caller holds its lock.
    async fn merge(&self, id: InstanceId) -> Result<Option<ReplicaManifest>> {
        let dir = self.replica_dir(id);
        let Some(mut manifest) = load(&dir)? else { return Ok(None) };
        if !manifest.is_unmerged {
            return Ok(Some(manifest));
        }
        for disk in &manifest.disks {
            let (top, base) =
                (dir.join(disk_name(disk, manifest.copy)), dir.join(disk_name(disk, manifest.full)));
            self.storage.merge_disk(&id.to_string(), top, base).await?;
        }
        manifest.is_unmerged = false;
        let receiving = self.receiving.clone();
        blocking(move || {
            save(&dir, &manifest)?;
            clean(&dir, &manifest, &receiving)?;
            Ok(Some(manifest))
        })
        .await
    }

    /// Makes the content of a replica the disks of a VM that has none, and returns the time that it dates from. `disks` are the
    /// devices that the VM needs.
    pub(super) async fn restore(&self, id: InstanceId, disks: &[String], vm_dir: VmDir) -> Result<f64> {
        let _lock = self.lock(id).await;
        let dir = self.replica_dir(id);
        let missing = || Error::Conflict("the node has no complete replica of the disks".into());
        let mut manifest = load(&dir)?.ok_or_else(missing)?;
        if let Some(disk) = disks.iter().find(|disk| !manifest.disks.contains(disk)) {
            return Err(Error::Conflict(format!("the replica does not have disk {disk}")));
        }
        if !manifest.sealed {
            manifest.sealed = true;
            save(&dir, &manifest)?;
        }
        let manifest = self.merge(id).await?.ok_or_else(missing)?;
        blocking(move || {
            vm_dir.create()?;
            // Links: if the VM cannot be created, the replica still has the disks.
            let link = |from: String, to: &str| {
                let to = vm_dir.file(to);
                match to.exists() {
                    true => Ok(()),
                    false => create_atomically(&to, |new| fs::hard_link(dir.join(from), new)),
                }
            };
            for disk in &manifest.disks {
                link(disk_name(disk, manifest.full), &format!("{disk}.qcow2"))?;
            }
            if manifest.nvram {
                link(nvram_name(manifest.copy), file::NVRAM)?;
            }
            sync_dir(vm_dir.path())?;
            Ok(manifest.time)
        })
        .await
    }

    pub(super) async fn remove(&self, id: InstanceId) -> Result<()> {
        let _lock = self.lock(id).await;
        let dir = self.replica_dir(id);
        blocking(move || match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to remove a replica")(error))
            }
            _ => Ok(()),
        })
        .await
    }
}

/// Checks a copy that another host sends, and returns the names of its files.
fn check_header(header: &CopyHeader) -> Result<Vec<String>> {
    let is_device = |disk: &String| !disk.is_empty() && disk.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if header.disks.len() > MAX_DISKS || !header.disks.iter().all(is_device) {
        return Err(Error::Invalid("the disks of the copy are invalid".into()));
    }
    let disks = header.disks.iter().map(|disk| disk_name(disk, header.copy));
    Ok(disks.chain(header.nvram.then(|| nvram_name(header.copy))).collect())
}

/// Receives a file and syncs it.
async fn receive_file(stream: &mut tokio::net::UnixStream, path: &Path) -> Result<()> {
    let failed = || io_error("failed to write the copy of a disk");
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = tokio::fs::File::from_std(file.map_err(failed())?);
    let mut left = within(TRANSFER_TIMEOUT, stream.read_u64()).await?;
    let mut buffer = vec![0; BUFFER_SIZE];
    while left > 0 {
        let chunk = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        within(TRANSFER_TIMEOUT, stream.read_exact(&mut buffer[..chunk])).await?;
        file.write_all(&buffer[..chunk]).await.map_err(failed())?;
        left -= chunk as u64;
    }
    file.flush().await.map_err(failed())?;
    file.sync_all().await.map_err(failed())
}

/// Returns the content of a replica, or `None` if it has no complete copy.
fn load(dir: &Path) -> Result<Option<ReplicaManifest>> {
    match fs::read(dir.join(MANIFEST)) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| Error::Internal(format!("{}: {error}", dir.join(MANIFEST).display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("failed to read a replica")(error)),
    }
}

/// Replaces the content of a replica.
fn save(dir: &Path, manifest: &ReplicaManifest) -> Result<()> {
    let text = serde_json::to_vec(manifest)
        .map_err(|error| Error::Internal(format!("failed to write {MANIFEST}: {error}")))?;
    sync_dir(dir)?;
    create_atomically(&dir.join(MANIFEST), |new| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
        file.write_all(&text)?;
        file.sync_all()
    })?;
    sync_dir(dir)
}

/// Removes the files that belong neither to a replica nor to a copy that is being received. The caller holds the lock of the replica.
fn clean(dir: &Path, manifest: &ReplicaManifest, receiving: &Mutex<HashSet<Uuid>>) -> Result<()> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(io_error("failed to list a replica"))?;
    // Read afterwards, so that they include the copies that all listed files belong to.
    let receiving: Vec<String> = receiving.lock().iter().map(Uuid::to_string).collect();
    let files = manifest.files();
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !files.contains(&name) && !receiving.iter().any(|copy| name.contains(copy)) {
            remove_file(&dir.join(name))?;
        }
    }
    Ok(())
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("failed to sync a replica"))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("failed to remove a file")(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
