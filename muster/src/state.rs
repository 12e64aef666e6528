//! What a daemon keeps in its data directory besides the database.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use muster_client::{Credentials, write_private};
use muster_types::ids::NodeId;
use muster_types::key::{Secret, random_text};
use muster_types::namespace::SYSTEM;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Map, Value};

/// How long somebody else may still have what was a killed daemon's: what it had just begun to start holds its files
/// for a moment.
pub(crate) const LINGER: Duration = Duration::from_secs(2);

/// A data directory that only this process uses.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    _lock: Flock<File>,
}

impl DataDir {
    pub(crate) async fn open(path: &Path) -> anyhow::Result<Self> {
        let named = || format!("data directory {}", path.display());
        DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(named)?;
        let path = path.canonicalize().with_context(named)?;
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .with_context(named)?;
        let (began, mut file) = (Instant::now(), lock);
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self { path, _lock: lock }),
                Err((held, Errno::EWOULDBLOCK)) if began.elapsed() < LINGER => file = held,
                Err(_) => bail!("data directory {} is in use by another muster", path.display()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The seed of tokens and lookup tags, made at the first start.
    pub(crate) fn seed(&self) -> anyhow::Result<Secret> {
        let path = self.path.join("auth_secret_seed");
        match fs::read_to_string(&path) {
            Ok(text) if text.trim().len() >= 16 => Ok(Secret::new(text.trim())),
            Ok(_) => bail!("{} is damaged: it is shorter than 16 characters", path.display()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let seed = random_text(48);
                write_private(&path, &format!("{seed}\n"))?;
                Ok(Secret::new(seed))
            }
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// The ids of the nodes that this daemon speaks for, made at the first start and kept.
    pub(crate) fn node_ids(&self, names: &[String]) -> anyhow::Result<Vec<NodeId>> {
        let path = self.path.join("nodes.json");
        let mut known: BTreeMap<String, NodeId> = match fs::read_to_string(&path) {
            Ok(text) => {
                serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let before = known.len();
        let ids = names.iter().map(|name| *known.entry(name.clone()).or_insert_with(NodeId::new)).collect();
        if known.len() != before {
            write_private(&path, &serde_json::to_string_pretty(&known)?)?;
        }
        Ok(ids)
    }

    pub(crate) fn credentials(&self) -> PathBuf {
        self.path.join("credentials.json")
    }

    /// Writes down the generated first key for the command line.
    pub(crate) fn write_credentials(&self, key: &Secret, apiurl: &str) -> anyhow::Result<()> {
        let credentials =
            Credentials { namespace: SYSTEM.into(), key: key.clone(), apiurl: apiurl.to_owned() };
        muster_client::credentials::save(&self.credentials(), &credentials)
    }

    /// Forgets a first key that another daemon turned out to have made.
    pub(crate) fn remove_credentials(&self) -> anyhow::Result<()> {
        muster_client::credentials::remove(&self.credentials()).map(|_| ())
    }

    /// Keeps the address in the credentials that this daemon wrote up to date.
    pub(crate) fn update_credentials(&self, apiurl: &str) -> anyhow::Result<()> {
        let path = self.credentials();
        let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
        let Ok(mut credentials) = serde_json::from_str::<Map<String, Value>>(&text) else { return Ok(()) };
        if credentials.get("apiurl").is_none_or(|known| known != apiurl) {
            credentials.insert("apiurl".into(), apiurl.into());
            write_private(&path, &format!("{}\n", serde_json::to_string_pretty(&credentials)?))?;
        }
        Ok(())
    }
}
