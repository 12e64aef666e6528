//! The files in the data directory besides the database.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use muster_client::{Credentials, write_private};
use muster_types::ids::NodeId;
use muster_types::key::{Secret, random_alphanumeric};
use muster_types::lock_file::LockFileId;
use muster_types::namespace::SYSTEM_NAMESPACE;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Map, Value};

/// How long to wait for the lock and the port of a killed daemon. Its last child processes hold them for a moment.
pub(crate) const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// The key of this host in `nodes.json`. Existing data directories contain it.
const HOST_NODE_KEY: &str = "this machine";

/// Exists while a directory that was moved to this host has not joined the cluster yet.
const MOVED_FILE: &str = "moved";

/// Returns the file of the seed in a data directory.
pub(crate) fn seed_file(data: &Path) -> PathBuf {
    data.join("auth_secret_seed")
}

/// Returns the seed in a data directory, if it has one.
pub(crate) fn read_seed(data: &Path) -> anyhow::Result<Option<Secret>> {
    let path = seed_file(data);
    match fs::read_to_string(&path) {
        Ok(text) if text.trim().len() >= 16 => Ok(Some(Secret::new(text.trim()))),
        Ok(_) => bail!("{} is damaged: it is shorter than 16 characters", path.display()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// A data directory that is locked by this process.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    lock: Flock<File>,
}

impl DataDir {
    pub(crate) async fn open(path: &Path) -> anyhow::Result<Self> {
        let context = || format!("data directory {}", path.display());
        DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(context)?;
        let path = path.canonicalize().with_context(context)?;
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .with_context(context)?;
        let (started, mut file) = (Instant::now(), lock);
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self { path, lock }),
                Err((unlocked, Errno::EWOULDBLOCK)) if started.elapsed() < TAKEOVER_TIMEOUT => {
                    file = unlocked;
                }
                Err(_) => bail!("data directory {} is in use by another muster process", path.display()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns what identifies the lock file among all hosts: a process that holds the same lock during the same boot
    /// knows that the previous owner has ended. A directory whose nodes are in a shared database must stay on its host, unless
    /// it was moved on purpose.
    pub(crate) fn lock_file(&self, is_shared: bool) -> anyhow::Result<LockFileId> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("boot id of this host")?;
        let file = self.lock.metadata().with_context(|| self.path.display().to_string())?;
        let host = fs::read_to_string("/etc/machine-id").unwrap_or_default();
        Ok(LockFileId {
            boot: boot.trim().to_owned(),
            device: file.dev(),
            inode: file.ino(),
            host: (is_shared && !self.path.join(MOVED_FILE).exists()).then(|| host.trim().to_owned()),
        })
    }

    /// Records that this directory was moved from another host, which is off.
    pub(crate) fn mark_moved(&self) -> anyhow::Result<()> {
        write_private(&self.path.join(MOVED_FILE), "")
    }

    /// Removes the record of a move, after the node has joined the cluster on this host.
    pub(crate) fn finish_move(&self) -> anyhow::Result<()> {
        match fs::remove_file(self.path.join(MOVED_FILE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Gives the nodes of this directory new ids.
    pub(crate) fn replace_node_ids(&self) -> anyhow::Result<()> {
        let path = self.path.join("nodes.json");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let mut ids: BTreeMap<String, NodeId> =
            serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
        ids.values_mut().for_each(|id| *id = NodeId::new());
        write_private(&path, &serde_json::to_string_pretty(&ids)?)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the seed of tokens and lookup tags, generated at the first start.
    pub(crate) fn seed(&self) -> anyhow::Result<Secret> {
        if let Some(seed) = read_seed(&self.path)? {
            return Ok(seed);
        }
        let seed = random_alphanumeric(48);
        write_private(&seed_file(&self.path), &format!("{seed}\n"))?;
        Ok(Secret::new(seed))
    }

    /// Returns the ids of the nodes that this daemon runs, generated at the first start.
    pub(crate) fn node_ids(&self, names: &[String]) -> anyhow::Result<Vec<NodeId>> {
        let path = self.path.join("nodes.json");
        let mut ids: BTreeMap<String, NodeId> = match fs::read_to_string(&path) {
            Ok(text) => {
                serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let count_before = ids.len();
        let selected =
            names.iter().map(|name| *ids.entry(name.clone()).or_insert_with(NodeId::new)).collect();
        if ids.len() != count_before {
            write_private(&path, &serde_json::to_string_pretty(&ids)?)?;
        }
        Ok(selected)
    }

    /// Returns the id of the node that this host is.
    pub(crate) fn host_node_id(&self) -> anyhow::Result<NodeId> {
        let ids = self.node_ids(&[HOST_NODE_KEY.to_owned()])?;
        ids.into_iter().next().context("no node id")
    }

    /// Returns the path of the credentials file.
    pub(crate) fn credentials(&self) -> PathBuf {
        self.path.join("credentials.json")
    }

    /// Writes the generated first key for the command line.
    pub(crate) fn write_credentials(&self, key: &Secret, apiurl: &str) -> anyhow::Result<()> {
        let credentials =
            Credentials { namespace: SYSTEM_NAMESPACE.into(), key: key.clone(), apiurl: apiurl.to_owned() };
        muster_client::credentials::save(&self.credentials(), &credentials)
    }

    /// Removes the first key if another daemon created the cluster's key concurrently.
    pub(crate) fn remove_credentials(&self) -> anyhow::Result<()> {
        muster_client::credentials::remove(&self.credentials()).map(|_| ())
    }

    /// Updates the API URL in the credentials file, if this daemon wrote one.
    pub(crate) fn update_credentials(&self, apiurl: &str) -> anyhow::Result<()> {
        let path = self.credentials();
        let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
        let Ok(mut credentials) = serde_json::from_str::<Map<String, Value>>(&text) else { return Ok(()) };
        if credentials.get("apiurl").is_none_or(|saved| saved != apiurl) {
            credentials.insert("apiurl".into(), apiurl.into());
            write_private(&path, &format!("{}\n", serde_json::to_string_pretty(&credentials)?))?;
        }
        Ok(())
    }
}
