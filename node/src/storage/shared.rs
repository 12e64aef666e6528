//! Storage that the operator has mounted on several hosts, for disks that outlive the host of their VM. See
//! docs/decisions/0073.
//!
//! ```text
//! muster-storage.json                          the marker: which storage of which cluster this is
//! instances/<instance>/owner.json              the node and the generation that may use the disks
//! instances/<instance>/vda.qcow2  vda.base …   the disks, as in the directory of a VM
//! ```
//!
//! The marker is read before each use, because an unmounted directory looks like an empty storage. Everything here blocks, also
//! without a limit if a server does not respond.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muster_types::ids::{ClusterId, InstanceId, NodeId, StorageId};
use muster_types::shared_storage::SharedStorageRecord;
use muster_types::{Error, Result};
use nix::sys::statvfs::{FsFlags, statvfs};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use super::layout;
use crate::files::io_error;

const MARKER_FILE: &str = "muster-storage.json";
const INSTANCES_DIR: &str = "instances";
const OWNER_FILE: &str = "owner.json";

/// The path at which the kernel lists the mounts of this process.
const MOUNTS_FILE: &str = "/proc/self/mountinfo";

/// How long an inspection may take before the storage counts as unresponsive.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// The free space in bytes below which a storage counts as full.
const MIN_FREE_BYTES: i64 = 64 << 20;

/// Identifies a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct StorageMarker {
    cluster: ClusterId,
    storage: StorageId,
}

/// Who may use the disks of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct DiskOwner {
    node: NodeId,
    generation: i64,
}

type Inspection = Result<SharedStorageRecord, String>;

/// The shared storage of a node.
#[derive(Debug, Clone)]
pub(crate) struct SharedStorage {
    path: PathBuf,
    node: NodeId,
    is_simulated: bool,
    /// An inspection that exceeded its timeout.
    hanging: Arc<Mutex<Option<JoinHandle<Inspection>>>>,
}

impl SharedStorage {
    /// Accesses nothing yet. A simulated node accepts a directory that is not mounted.
    pub(crate) fn new(path: PathBuf, node: NodeId, is_simulated: bool) -> Self {
        Self { path, node, is_simulated, hanging: Arc::default() }
    }

    /// Inspects the storage within a limited time. `registered` is the storage that the cluster knows at this path; without one,
    /// a storage without a marker gets one.
    pub(crate) async fn inspect(
        &self,
        cluster: ClusterId,
        registered: Option<StorageId>,
    ) -> SharedStorageRecord {
        let unresponsive = || Err("it does not respond".to_owned());
        let inspection = if self.hangs() {
            unresponsive()
        } else {
            let storage = self.clone();
            let mut task = tokio::task::spawn_blocking(move || storage.inspect_now(cluster, registered));
            match tokio::time::timeout(INSPECTION_TIMEOUT, &mut task).await {
                Ok(inspected) => inspected.unwrap_or_else(|error| Err(error.to_string())),
                Err(_) => {
                    *self.hanging.lock() = Some(task);
                    unresponsive()
                }
            }
        };
        inspection.unwrap_or_else(|problem| SharedStorageRecord {
            path: self.path.display().to_string(),
            uuid: None,
            total: 0,
            free: 0,
            problem: Some(problem),
        })
    }

    /// Returns whether an inspection has not returned yet that exceeded its timeout.
    fn hangs(&self) -> bool {
        self.hanging.lock().as_ref().is_some_and(|task| !task.is_finished())
    }

    fn inspect_now(&self, cluster: ClusterId, registered: Option<StorageId>) -> Inspection {
        let path = self.path.display();
        if !self.path.is_dir() {
            return Err(format!("{path} is not a directory: mount the storage there"));
        }
        let marker = match self.read_marker().map_err(|error| format!("failed to read {path}: {error}"))? {
            Some(marker) if marker.cluster != cluster => {
                return Err(format!("{path} belongs to another cluster, {}", marker.cluster));
            }
            Some(marker) => marker,
            None if registered.is_none() => self
                .create_marker(cluster)
                .map_err(|error| format!("failed to initialize {path}: {error}"))?,
            None => return Err(self.not_mounted(registered)),
        };
        if registered.is_some_and(|registered| registered != marker.storage) {
            return Err(self.not_mounted(registered));
        }
        if !self.is_simulated {
            self.require_accessible()?;
        }
        let instances = self.path.join(INSTANCES_DIR);
        let usage = create_dir(&instances, 0o711)
            .and_then(|()| Ok(statvfs(&instances)?))
            .map_err(|error| format!("failed to use {path}: {error}"))?;
        let bytes =
            |blocks: u64| i64::try_from(blocks.saturating_mul(usage.fragment_size())).unwrap_or(i64::MAX);
        let (total, free) = (bytes(usage.blocks()), bytes(usage.blocks_available()));
        let problem = if usage.flags().contains(FsFlags::ST_RDONLY) {
            Some("it is mounted read-only".to_owned())
        } else if free < MIN_FREE_BYTES {
            Some("it is full".to_owned())
        } else {
            None
        };
        Ok(SharedStorageRecord { path: path.to_string(), uuid: Some(marker.storage), total, free, problem })
    }

    /// Returns the problem of a directory without the storage that is registered at its path.
    fn not_mounted(&self, registered: Option<StorageId>) -> String {
        let (path, registered) =
            (self.path.display(), registered.map(|id| id.to_string()).unwrap_or_default());
        format!("{path} is not the storage {registered}, which other nodes have at this path: mount it there")
    }

    fn read_marker(&self) -> io::Result<Option<StorageMarker>> {
        read_json(&self.path.join(MARKER_FILE))
    }

    /// Creates the marker of a new storage. Of several nodes, one creates it.
    fn create_marker(&self, cluster: ClusterId) -> io::Result<StorageMarker> {
        if !self.is_simulated && is_on_root_file_system(&self.path)? {
            return Err(io::Error::other("it is on the root file system: mount the storage there"));
        }
        let marker = StorageMarker { cluster, storage: StorageId::new() };
        let new = self.path.join(format!(".{MARKER_FILE}.{}", marker.storage));
        write_json(&new, &marker)?;
        // Unlike a rename, a link does not replace a marker that another node has created meanwhile.
        let linked = fs::hard_link(&new, self.path.join(MARKER_FILE));
        fs::remove_file(&new)?;
        match linked {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => {
                layout::sync_dir(&self.path).map_err(io::Error::other)?;
                self.read_marker()?.ok_or_else(|| ErrorKind::NotFound.into())
            }
        }
    }

    /// Rejects a path that the users of VMs cannot traverse.
    fn require_accessible(&self) -> Result<(), String> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(());
        }
        for directory in self.path.ancestors() {
            let metadata = fs::metadata(directory).map_err(|error| error.to_string())?;
            if metadata.mode() & 0o001 == 0 {
                return Err(format!(
                    "VMs, which have their own users, cannot reach it: run `chmod o+x {}`",
                    directory.display()
                ));
            }
        }
        Ok(())
    }

    /// Returns [`Error::NotReady`] if the storage did not respond to the last inspection.
    pub(crate) fn require_responsive(&self) -> Result<()> {
        if self.hangs() {
            let path = self.path.display();
            return Err(Error::NotReady(format!("the shared storage at {path} does not respond")));
        }
        Ok(())
    }

    /// Returns [`Error::NotReady`] unless the storage is mounted.
    fn require(&self, storage: StorageId) -> Result<()> {
        let path = self.path.display();
        self.require_responsive()?;
        match self.read_marker() {
            Ok(Some(marker)) if marker.storage == storage => Ok(()),
            Ok(_) => Err(Error::NotReady(format!("the shared storage {storage} is not mounted at {path}"))),
            Err(error) => {
                Err(Error::NotReady(format!("failed to read the shared storage at {path}: {error}")))
            }
        }
    }

    fn instance_dir(&self, id: InstanceId) -> PathBuf {
        self.path.join(INSTANCES_DIR).join(id.to_string())
    }

    /// Acquires the disks of an instance for this node under a generation, and returns their directory, which is created if it
    /// does not exist. A node with an earlier generation cannot acquire them any longer.
    pub(crate) fn acquire(&self, storage: StorageId, id: InstanceId, generation: i64) -> Result<PathBuf> {
        self.require(storage)?;
        let dir = self.instance_dir(id);
        let owner_file = dir.join(OWNER_FILE);
        let new = DiskOwner { node: self.node, generation };
        let current: Option<DiskOwner> = create_dir(&dir, 0o700)
            .and_then(|()| read_json(&owner_file))
            .map_err(io_error("failed to read the owner of shared disks"))?;
        match current {
            Some(owner) if owner == new => return Ok(dir),
            Some(owner) if owner.generation >= generation => {
                return Err(Error::Conflict(format!(
                    "node {} uses the disks under the generation {}, and this node has the generation {generation}",
                    owner.node, owner.generation
                )));
            }
            _ => {}
        }
        let written = write_json(&dir.join(format!("{OWNER_FILE}.new")), &new)
            .and_then(|()| fs::rename(dir.join(format!("{OWNER_FILE}.new")), &owner_file));
        written.map_err(io_error("failed to write the owner of shared disks"))?;
        layout::sync_dir(&dir)?;
        Ok(dir)
    }

    /// Returns the directory of the disks of an instance, which need not exist.
    pub(crate) fn disk_dir(&self, storage: StorageId, id: InstanceId) -> Result<PathBuf> {
        self.require(storage)?;
        Ok(self.instance_dir(id))
    }

    /// Removes the disks of an instance, which need not exist.
    pub(crate) fn remove(&self, storage: StorageId, id: InstanceId) -> Result<()> {
        self.require(storage)?;
        match fs::remove_dir_all(self.instance_dir(id)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to remove shared disks")(error))
            }
            _ => Ok(()),
        }
    }

    /// Replaces the text of an error about a full disk.
    pub(crate) fn explain_full(&self, error: Error) -> Error {
        match error {
            Error::InsufficientCapacity(_) => Error::InsufficientCapacity(format!(
                "the shared storage at {} does not have enough space",
                self.path.display()
            )),
            other => other,
        }
    }
}

fn create_dir(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        // The mode does not depend on the umask.
        created => created.and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode))),
    }
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => Ok(Some(serde_json::from_slice(&text?)?)),
    }
}

fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(path)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()
}

/// Returns whether a directory is on the root file system, so that nothing is mounted there.
fn is_on_root_file_system(path: &Path) -> io::Result<bool> {
    let path = fs::canonicalize(path)?;
    let mounts = fs::read_to_string(MOUNTS_FILE)?;
    let mount_points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    let is_mounted = mount_points.filter(|mount| mount != "/").any(|mount| path.starts_with(mount));
    Ok(!is_mounted)
}

/// Replaces the escapes of spaces and backslashes in the list of mounts.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(path: &Path) -> SharedStorage {
        SharedStorage::new(path.to_owned(), NodeId::new(), true)
    }

    #[tokio::test]
    async fn nodes_identify_the_storage_by_its_marker() {
        let (mounted, unmounted) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let cluster = ClusterId::new();
        let (first, second) = (storage(mounted.path()), storage(mounted.path()));
        let created = first.inspect(cluster, None).await;
        assert!(created.uuid.is_some() && created.problem.is_none() && created.total > 0, "{created:?}");
        assert_eq!(second.inspect(cluster, None).await.uuid, created.uuid);
        assert_eq!(second.inspect(cluster, created.uuid).await.uuid, created.uuid);

        let problem = async |storage: SharedStorage, cluster, registered| {
            let found = storage.inspect(cluster, registered).await;
            assert_eq!(found.uuid, None);
            found.problem.unwrap()
        };
        let registered = created.uuid.unwrap();
        let found = problem(storage(unmounted.path()), cluster, Some(registered)).await;
        assert!(found.contains(&format!("is not the storage {registered}")), "{found}");
        assert_eq!(fs::read_dir(unmounted.path()).unwrap().count(), 0, "nothing is written there");
        let found = problem(second.clone(), cluster, Some(StorageId::new())).await;
        assert!(found.contains("mount it there"), "{found}");
        let found = problem(second, ClusterId::new(), None).await;
        assert!(found.contains("belongs to another cluster"), "{found}");
        let found = problem(storage(&mounted.path().join("absent")), cluster, None).await;
        assert!(found.contains("is not a directory"), "{found}");
    }

    #[tokio::test]
    async fn only_the_latest_generation_acquires_the_disks() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (storage(directory.path()), storage(directory.path()));
        let uuid = first.inspect(ClusterId::new(), None).await.uuid.unwrap();
        let id = InstanceId::new();
        let dir = first.acquire(uuid, id, 1).unwrap();
        fs::write(dir.join("vda.qcow2"), "data").unwrap();
        assert_eq!(first.acquire(uuid, id, 1).unwrap(), dir, "it may be repeated");
        assert!(matches!(second.acquire(uuid, id, 1), Err(Error::Conflict(_))));
        assert_eq!(second.acquire(uuid, id, 2).unwrap(), dir);
        let refused = first.acquire(uuid, id, 1).unwrap_err().to_string();
        assert!(refused.contains("under the generation 2"), "{refused}");
        assert_eq!(fs::read_to_string(dir.join("vda.qcow2")).unwrap(), "data");

        let other = StorageId::new();
        assert!(matches!(second.acquire(other, id, 3), Err(Error::NotReady(_))));
        assert!(matches!(second.remove(other, id), Err(Error::NotReady(_))));
        second.remove(uuid, id).unwrap();
        second.remove(uuid, id).unwrap();
        assert!(!dir.exists());
    }

    #[test]
    fn recognizes_directories_that_are_not_mounted() {
        assert!(is_on_root_file_system(Path::new("/")).unwrap());
        assert!(!is_on_root_file_system(Path::new("/proc/self")).unwrap());
        assert_eq!(unescape("/mnt/a\\040b"), "/mnt/a b");
    }
}
