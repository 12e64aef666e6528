//! `muster backup drill`: boots one restored instance in its own namespaces, without an uplink, and checks that its agent answers.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use muster_client::{Client, Options};
use muster_control::auth::secrets::Secrets;
use muster_control::backup::{self, BlobMode, DecryptionKey, LoadTarget};
use muster_control::objects;
use muster_store::backup::{self as stored, DrillInstance, StoredBlob};
use muster_types::instance::{InstanceState, agent_is_ready};
use muster_types::key::{Secret, random_alphanumeric};
use muster_types::storage::blob_path;
use muster_types::time::format_utc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};

use super::{ClusterArguments, KeyArguments, storages};
use crate::running::program;
use crate::state::{DataDir, seed_file};
use crate::{config, print, rootless};

/// The interval at which the drill polls its cluster.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long the daemon of the drill may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The settings of the daemon of the drill: it uses what the host has.
const SETTINGS: &[(&str, &str)] = &[
    ("NODE_NAME", "drill"),
    ("API_DRAIN_GRACE", "0"),
    ("NODE_RAM_RESERVATION_GB", "0"),
    ("NODE_CPU_RESERVATION_THREADS", "0"),
    ("NODE_DISK_RESERVATION_GB", "0"),
    ("CPU_OVERCOMMIT_RATIO", "20"),
    ("SCHEDULER_DISK_OVERCOMMIT", "100"),
];

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Backup
    file: PathBuf,
    #[command(flatten)]
    key: KeyArguments,
    /// Name or UUID of the instance to boot [default: the oldest one with an agent]
    #[arg(long, value_name = "INSTANCE")]
    instance: Option<String>,
    /// Seconds in which the agent must answer
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Directory for the temporary cluster [default: that of temporary files]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArguments,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let settings = config::load(arguments.cluster.config.as_deref())?;
    let key = arguments.key.read()?;
    rootless::require_isolated().await?;
    // Before the directory exists: an interrupted drill must not leave the seed of the cluster in it.
    let mut interruption = Interruption::listen()?;
    let parent = arguments.directory.clone().unwrap_or_else(std::env::temp_dir);
    let directory = DrillDirectory::create(&parent)?;
    let storages = storages(&settings, &arguments.cluster.data_dir);
    let drill = interruption.unless(Drill::prepare(&arguments, &key, &storages, &directory.0)).await?;
    let instance = &drill.instance;

    let log = drill.data.join("muster.log");
    let mut daemon = start(&drill.data, &log)?;
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    let outcome = interruption.unless(async {
        tokio::select! {
            outcome = tokio::time::timeout_at(deadline.into(), boot(&drill)) => outcome.unwrap_or_else(|_| {
                Err(anyhow::anyhow!("the agent did not answer within {} seconds", arguments.timeout))
            }),
            status = daemon.wait() => Err(anyhow::anyhow!("the daemon ended with {}", status?)),
        }
    });
    let outcome = outcome.await;
    stop(&mut daemon).await;
    if let Err(error) = outcome {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(10)..].join("\n");
        bail!("instance {} did not boot: {error:#}\nlast lines of the log:\n{last}", instance.name);
    }
    let text = format!("the agent of instance {} ({}) answered\n", instance.name, instance.id);
    print(text.as_bytes())
}

/// The signals that end a drill.
struct Interruption {
    interrupt: SignalStream,
    terminate: SignalStream,
}

impl Interruption {
    /// From now on these signals no longer end the process.
    fn listen() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Runs work until it ends or a signal arrives.
    async fn unless<T>(&mut self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        tokio::select! {
            result = work => result,
            _ = self.interrupt.recv() => bail!("interrupted"),
            _ = self.terminate.recv() => bail!("interrupted"),
        }
    }
}

/// A restored cluster with an instance to boot.
struct Drill {
    data: PathBuf,
    credentials: PathBuf,
    instance: DrillInstance,
    node: String,
    blobs: Vec<StoredBlob>,
}

impl Drill {
    /// Restores a backup into a directory.
    async fn prepare(
        arguments: &Arguments,
        key: &DecryptionKey,
        storages: &[PathBuf],
        directory: &Path,
    ) -> anyhow::Result<Self> {
        let data = DataDir::open(directory).await?;
        let url = format!("sqlite:{}", data.path().join("muster.db").display());
        let target = LoadTarget { database_url: Secret::new(url), storage: Some(data.path().to_owned()) };
        let loaded = backup::load(&arguments.file, key, &target).await?;
        eprintln!("restored {} rows of {}", loaded.rows, format_utc(loaded.manifest.created));
        if loaded.manifest.blobs == BlobMode::Reference {
            link_blobs(storages, data.path(), &loaded.blobs)?;
        }
        stored::restart(&loaded.restored).await?;
        let prepared = stored::prepare_drill(&loaded.restored, arguments.instance.as_deref()).await?;
        let Some((instance, node)) = prepared else {
            match &arguments.instance {
                Some(name) => bail!("the backup has no instance {name} that was created"),
                None => bail!("the backup has no instance, so there is nothing to boot"),
            }
        };
        fs::write(seed_file(data.path()), loaded.seed.expose())?;
        let save = |key: &Secret| {
            data.write_credentials(key, "http://127.0.0.1:0").map_err(|error| format!("{error:#}"))
        };
        objects::key::recover(&loaded.restored.store, &Secrets::new(&loaded.seed), save).await?;
        loaded.restored.finish().await?;
        Ok(Self {
            data: data.path().to_owned(),
            credentials: data.credentials(),
            instance,
            node,
            blobs: loaded.blobs,
        })
    }
}

/// Makes the blobs of this host those of the drill.
fn link_blobs(storages: &[PathBuf], data: &Path, blobs: &[StoredBlob]) -> anyhow::Result<()> {
    for blob in blobs {
        let found = storages.iter().map(|storage| blob_path(storage, blob.id)).find(|path| path.is_file());
        // The instance may not need it.
        let Some(found) = found else { continue };
        let path = blob_path(data, blob.id);
        fs::create_dir_all(path.parent().unwrap_or(data))?;
        fs::hard_link(&found, &path)
            .or_else(|_| fs::copy(&found, &path).map(drop))
            .with_context(|| format!("failed to copy {}", found.display()))?;
    }
    Ok(())
}

/// Starts a daemon in its own namespaces.
fn start(path: &Path, log: &Path) -> anyhow::Result<Child> {
    let mut command = Command::new(program()?);
    command.args(["rootless", "--offline", "--listen", "127.0.0.1:0", "--data-dir"]).arg(path);
    command.arg("--").arg("--data-dir").arg(path);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MUSTER_")) {
        command.env_remove(name);
    }
    command.envs(SETTINGS.iter().map(|(name, value)| (format!("MUSTER_{name}"), value)));
    let log = File::create(log)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0).kill_on_drop(true);
    command.spawn().context("failed to start the daemon of the drill")
}

/// Stops the daemon. Its VMs end with its namespaces.
async fn stop(daemon: &mut Child) {
    if let Some(pid) = daemon.id().and_then(|pid| i32::try_from(pid).ok()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    if tokio::time::timeout(STOP_TIMEOUT, daemon.wait()).await.is_err() {
        let _ = daemon.kill().await;
    }
}

/// Evacuates the instance to the node of the drill, and waits until its agent answers.
async fn boot(drill: &Drill) -> anyhow::Result<()> {
    let Drill { credentials, instance, node, blobs, .. } = drill;
    let client = connect(credentials).await;
    wait_for_blobs(&client, credentials, blobs).await;
    let records = client.evacuate_node(node, true).await?.value()?;
    let Some(record) = records.first() else { bail!("it was not found on node {node}") };
    eprintln!("booting {} {}: {}", instance.name, record.outcome, record.reason);
    if record.node.is_none() {
        bail!("{}", record.reason);
    }
    loop {
        let found = client.instance(&instance.id.to_string()).await?.value()?;
        if agent_is_ready(found.agent_state.as_deref()) {
            return Ok(());
        }
        if found.state == InstanceState::Error {
            bail!("{}", found.error_message.unwrap_or_else(|| format!("its state is {}", found.state)));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the API is ready.
async fn connect(credentials: &Path) -> Client {
    loop {
        let options = Options { credentials: Some(credentials.to_owned()), ..Options::default() };
        if let Ok(client) = options.client()
            && !client.url().ends_with(":0")
            && client.nodes(&Default::default()).await.is_ok()
        {
            return client;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the node of the drill has verified its blobs.
async fn wait_for_blobs(client: &Client, credentials: &Path, blobs: &[StoredBlob]) {
    let data = credentials.parent().unwrap_or(Path::new("."));
    for blob in blobs.iter().filter(|blob| blob_path(data, blob.id).exists()) {
        loop {
            let found =
                client.blob(&blob.id.to_string()).await.and_then(muster_client::api::ApiResponse::value);
            if found.is_ok_and(|found| !found.locations.is_empty()) {
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// The directory of a drill, which is removed with everything in it.
#[derive(Debug)]
struct DrillDirectory(PathBuf);

impl DrillDirectory {
    fn create(parent: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let path = parent.join(format!("muster-drill-{}", random_alphanumeric(12)));
        fs::DirBuilder::new().mode(0o700).create(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for DrillDirectory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("warning: failed to remove {}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn signal_ends_the_work_even_if_it_arrived_before() {
        let mut interruption = Interruption::listen().unwrap();
        nix::sys::signal::raise(Signal::SIGTERM).unwrap();
        let interrupted: anyhow::Result<()> = interruption.unless(std::future::pending()).await;
        assert_eq!(interrupted.unwrap_err().to_string(), "interrupted");
        assert_eq!(interruption.unless(async { Ok(1) }).await.unwrap(), 1);
    }
}
