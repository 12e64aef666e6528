//! `muster backup` and `muster restore`: work on the database and the data directory, without the API. See docs/decisions/0097.

mod drill;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use muster_client::{Client, Format, Options, ProgressMeter, interrupted, message, write_private};
use muster_control::backup::{
    self, BackupPhase, BackupProgress, BackupReport, BlobMode, BlobSource, CopyFuture, DecryptionKey,
    LoadTarget, MAX_CHUNK_BYTES, NewBackup, ProgressReceiver, Protection, generate_key,
};
use muster_store::{Store, backup as stored, events, seed};
use muster_types::backup::{BackupPrivateKey, BackupRecipient};
use muster_types::event::{Event, EventType};
use muster_types::ids::BlobId;
use muster_types::key::Secret;
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::ObjectRef;
use muster_types::settings::{Settings, mask_password};
use muster_types::time::format_utc;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;

use crate::config;
use crate::serve::database_url;
use crate::state::{DataDir, read_seed, seed_file};
use crate::stdout::print;

/// The number of missing blobs that a message names.
const NAMED_BLOBS: usize = 10;
/// How long another host may send nothing.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Write an encrypted backup of the cluster to a new file, while its daemons are running
    Create(Create),
    /// Check that a backup is complete and can be restored
    Verify(Verify),
    /// Restore a backup into a temporary directory and boot one of its instances, without any network
    Drill(drill::Arguments),
    /// Create a private key for backups, and print its recipient
    CreateKey {
        /// New file for the private key; keep it outside of the cluster
        file: PathBuf,
    },
}

/// Whether a backup contains the contents of blobs.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Blobs {
    /// Only their checksums; the contents stay in the storage of the hosts
    Reference,
    /// All contents; those that are not on this host are fetched from other hosts
    Include,
}

/// The cluster on this host.
#[derive(Debug, clap::Args)]
struct ClusterArguments {
    /// Data directory of the cluster
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Settings file with one NAME = value per line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// New file for the backup
    file: PathBuf,
    /// Encrypt it for this recipient; repeat it for several [default: BACKUP_RECIPIENT]
    #[arg(long, value_name = "RECIPIENT", conflicts_with = "passphrase_file")]
    recipient: Vec<BackupRecipient>,
    /// Encrypt it with the passphrase in the first line of a file, or of standard input (-)
    #[arg(long, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
    /// Whether to include the contents of images and snapshots
    #[arg(long, value_enum, default_value = "reference")]
    blobs: Blobs,
    #[command(flatten)]
    cluster: ClusterArguments,
}

/// What decrypts a backup.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct KeyArguments {
    /// Private key that `backup create-key` wrote
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// File with the passphrase in its first line, or - for standard input
    #[arg(long, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
}

impl KeyArguments {
    fn read(&self) -> anyhow::Result<DecryptionKey> {
        match (&self.key_file, &self.passphrase_file) {
            (Some(file), _) => {
                let key: Result<BackupPrivateKey, String> = first_line(file)?.expose().parse();
                let key = key.map_err(anyhow::Error::msg).with_context(|| file.display().to_string())?;
                Ok(DecryptionKey::PrivateKey(key))
            }
            (None, Some(file)) => Ok(DecryptionKey::Passphrase(first_line(file)?)),
            (None, None) => bail!("--key-file or --passphrase-file is required"),
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Verify {
    /// Backup
    file: PathBuf,
    #[command(flatten)]
    key: KeyArguments,
    /// Directory for a temporary copy of the database [default: that of temporary files]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArguments,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The data directory and the database must be new. Nodes of the backup become lost nodes, whose names end in -lost: \
                  no VM starts before you evacuate them."
)]
pub(crate) struct Restore {
    /// Backup
    file: PathBuf,
    #[command(flatten)]
    key: KeyArguments,
    #[command(flatten)]
    cluster: ClusterArguments,
}

pub(crate) async fn run(command: Command, options: Options) -> anyhow::Result<()> {
    match command {
        Command::Create(arguments) => unless_interrupted(create(arguments, options)).await,
        Command::Verify(arguments) => unless_interrupted(verify(arguments, options.format())).await,
        Command::Drill(arguments) => drill::run(arguments).await,
        Command::CreateKey { file } => create_key(&file),
    }
}

/// Runs work until a signal interrupts it, so that it removes its temporary files.
pub(crate) async fn unless_interrupted<T>(
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let (mut interrupt, mut terminate, mut hangup) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    tokio::select! {
        result = work => return result,
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Err(interrupted("interrupted"))
}

/// Shows the progress of a backup.
fn progress() -> ProgressReceiver {
    let meter: Mutex<Option<(BackupPhase, ProgressMeter)>> = Mutex::default();
    ProgressReceiver::new(move |BackupProgress { phase, done, total }| {
        let mut meter = meter.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, meter) = match meter.take() {
            Some(current) if current.0 == phase => meter.insert(current),
            _ => {
                let title = match phase {
                    BackupPhase::Write => "writing the backup",
                    BackupPhase::Verify => "verifying the backup",
                    BackupPhase::Read => "reading the backup",
                };
                meter.insert((phase, ProgressMeter::new(title, 0, total)))
            }
        };
        meter.set_position(done);
    })
}

/// The blobs of the cluster, through its API.
#[derive(Debug)]
struct ApiBlobs(Client);

impl BlobSource for ApiBlobs {
    fn copy(&self, blob: BlobId, sink: Sender<Vec<u8>>) -> CopyFuture<'_> {
        Box::pin(async move {
            let mut body = self.0.blob_data(&blob.to_string(), 0).await.map_err(|error| error.to_string())?;
            while let Some(chunk) = body.next(STALL_TIMEOUT).await.map_err(|error| error.to_string())? {
                for part in chunk.chunks(MAX_CHUNK_BYTES) {
                    sink.send(part.to_vec()).await.map_err(|_| "the backup has ended".to_owned())?;
                }
            }
            Ok(())
        })
    }
}

/// Returns the blobs of other hosts: with the credentials of the data directory, or else those of the command line.
fn other_hosts(data: &Path, options: &Options) -> Option<ApiBlobs> {
    let own = data.join("credentials.json");
    let client = match own.exists() {
        true => {
            let cacert = options.cacert.clone();
            Options { credentials: Some(own), cacert, ..Options::default() }.client()
        }
        false => options.clone().client(),
    };
    client.ok().map(ApiBlobs)
}

/// Reads a secret from the first line of a file, or of standard input.
fn first_line(file: &Path) -> anyhow::Result<Secret> {
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).context("standard input")?;
    } else {
        text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    }
    let line = text.lines().next().unwrap_or_default().trim();
    if line.is_empty() {
        bail!("{}: the first line is empty", file.display());
    }
    Ok(Secret::new(line))
}

fn create_key(file: &Path) -> anyhow::Result<()> {
    if file.exists() {
        bail!(
            "{} exists: give another file name, because its backups cannot be decrypted without it",
            file.display()
        );
    }
    let (recipient, private) = generate_key()?;
    write_private(file, &format!("{}\n", private.to_secret().expose()))?;
    message!(
        "the private key is in {}: without it, no backup for this recipient can be read",
        file.display()
    );
    print(format!("{recipient}\n").as_bytes())
}

/// Returns the directories of this host that contain blobs.
fn storages(settings: &Settings, data: &Path) -> Vec<PathBuf> {
    let own = if settings.storage_path.is_empty() { data } else { Path::new(&settings.storage_path) };
    let simulated = std::fs::read_dir(data.join("simulated")).into_iter().flatten().flatten();
    [own.to_owned()].into_iter().chain(simulated.map(|entry| entry.path())).collect()
}

/// Returns the seed of a cluster whose daemon may be running.
fn existing_seed(settings: &Settings, data: &Path) -> anyhow::Result<Secret> {
    if !settings.auth_secret_seed.expose().is_empty() {
        return Ok(settings.auth_secret_seed.clone());
    }
    read_seed(data)?.with_context(|| format!("{} has no seed: it is not that of a cluster", data.display()))
}

async fn create(arguments: Create, options: Options) -> anyhow::Result<()> {
    let settings = config::load(arguments.cluster.config.as_deref())?;
    let data = &arguments.cluster.data_dir;
    let recipients = if arguments.recipient.is_empty() {
        settings.backup_recipient.into_iter().collect()
    } else {
        arguments.recipient
    };
    let protection = match &arguments.passphrase_file {
        Some(file) => Protection::Passphrase(first_line(file)?),
        None if !recipients.is_empty() => Protection::Recipients(recipients),
        None => bail!(
            "a backup is always encrypted: give --recipient or --passphrase-file, or set BACKUP_RECIPIENT (`muster backup \
             create-key FILE` creates a key)"
        ),
    };
    let seed = existing_seed(&settings, data)?;
    let url = database_url(&settings, data);
    let context = || format!("database {}", mask_password(url.expose()));
    let store = Store::open_existing(url.expose()).await.with_context(context)?;
    if !seed::is_that_of_cluster(&store, &seed).await.with_context(context)? {
        bail!("the seed in {} is not that of the database", data.display());
    }
    let storages = storages(&settings, data);
    let source = other_hosts(data, &options);
    let summary = backup::create(NewBackup {
        store: &store,
        seed: &seed,
        blobs: match arguments.blobs {
            Blobs::Reference => BlobMode::Reference,
            Blobs::Include => BlobMode::Include,
        },
        storages: &storages,
        source: source.as_ref().map(|source| source as &dyn BlobSource),
        protection,
        file: &arguments.file,
        progress: progress(),
    })
    .await?;
    store.close().await;
    if summary.deleted_blobs > 0 {
        message!("{} blobs were deleted meanwhile and are not included", summary.deleted_blobs);
    }
    if options.format().is_structured() {
        let file = arguments.file.display().to_string();
        let value = json!({ "name": file, "file": file, "summary": summary });
        return print(options.format().render(&value).as_bytes());
    }
    let included = match arguments.blobs {
        Blobs::Include => "included",
        Blobs::Reference => "not included",
    };
    let text = format!(
        "{}: {} rows, {} blobs ({}, {included}), {}\n",
        arguments.file.display(),
        summary.rows,
        summary.blobs,
        mebibytes(summary.blob_bytes),
        mebibytes(summary.bytes)
    );
    print(text.as_bytes())
}

async fn verify(arguments: Verify, format: Format) -> anyhow::Result<()> {
    let settings = config::load(arguments.cluster.config.as_deref())?;
    let key = arguments.key.read()?;
    let directory = arguments.directory.unwrap_or_else(std::env::temp_dir);
    let storages = storages(&settings, &arguments.cluster.data_dir);
    let report = backup::verify(&arguments.file, &key, &directory, &storages, progress()).await?;
    if format.is_structured() {
        let mut value = serde_json::to_value(&report)?;
        value["name"] = arguments.file.display().to_string().into();
        print(format.render(&value).as_bytes())?;
    } else {
        print(describe(&report).as_bytes())?;
    }
    if !report.missing_blobs.is_empty() {
        let named: Vec<String> =
            report.missing_blobs.iter().take(NAMED_BLOBS).map(ToString::to_string).collect();
        bail!(
            "{} of {} blobs are neither in the backup nor on this host: {}",
            report.missing_blobs.len(),
            report.blobs,
            named.join(", ")
        );
    }
    Ok(())
}

fn describe(report: &BackupReport) -> String {
    let manifest = &report.manifest;
    let blobs = match manifest.blobs {
        BlobMode::Include => "included",
        BlobMode::Reference => "in the storage of the hosts",
    };
    let deleted = match report.deleted_blobs.len() {
        0 => String::new(),
        count => format!("{count} blobs were deleted while it was created, and are not included\n"),
    };
    format!(
        "created {} by muster {} (schema {})\ndatabase: {} rows, consistent\nblobs: {} ({}), {blobs}\n{deleted}",
        format_utc(manifest.created),
        manifest.release,
        manifest.schema_version,
        report.rows,
        report.blobs,
        mebibytes(report.blob_bytes)
    )
}

fn mebibytes(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "one decimal place")]
    let mebibytes = bytes as f64 / 1_048_576.0;
    format!("{mebibytes:.1} MiB")
}

/// Restores a backup into a new cluster.
pub(crate) async fn restore(arguments: Restore) -> anyhow::Result<()> {
    let settings = config::load(arguments.cluster.config.as_deref())?;
    let key = arguments.key.read()?;
    let data = DataDir::open(&arguments.cluster.data_dir).await?;
    if data.path().join("nodes.json").exists() {
        bail!(
            "data directory {} is that of a node: a backup is restored only into a new cluster, with an empty data directory",
            data.path().display()
        );
    }
    let url = database_url(&settings, data.path());
    let storage = if settings.storage_path.is_empty() {
        data.path().to_owned()
    } else {
        PathBuf::from(&settings.storage_path)
    };
    let target = LoadTarget { database_url: url.clone(), storage: Some(storage), progress: progress() };
    let loaded = backup::load(&arguments.file, &key, &target).await?;
    if !settings.auth_secret_seed.expose().is_empty() {
        if settings.auth_secret_seed != loaded.seed {
            bail!(
                "AUTH_SECRET_SEED is not that of the backup: remove it from the settings, or set that of the cluster"
            );
        }
    } else {
        match read_seed(data.path())? {
            Some(existing) if existing != loaded.seed => {
                bail!("{} is not that of the backup: remove it", seed_file(data.path()).display());
            }
            Some(_) => {}
            None => write_private(&seed_file(data.path()), &format!("{}\n", loaded.seed.expose()))?,
        }
    }
    if !loaded.violations.is_empty() {
        message!("warning: the database is not consistent: {}", loaded.violations.join(", "));
    }
    let lost = stored::restart(&loaded.restored).await?;
    record(&loaded.restored.store, &loaded.manifest).await?;
    loaded.restored.finish().await?;
    let mut text = format!(
        "restored {} rows and the seed of {} into {}\nkeys are valid, and all tokens, sessions and tickets are not; without a key: \
         `muster db recover-key`\n",
        loaded.rows,
        format_utc(loaded.manifest.created),
        mask_password(url.expose())
    );
    if !lost.is_empty() {
        let name = &lost[0];
        text += &format!(
            "no VM starts by itself. Lost nodes: {}. When the new nodes are up and their hosts are off, `muster node evacuate {name} \
             --dead` restarts the instances of {name} from snapshots and images, and `muster node delete {name} --dead` removes it\n",
            lost.join(", ")
        );
    }
    print(text.as_bytes())
}

/// Records the restoration as an event of the cluster.
async fn record(store: &Store, manifest: &backup::Manifest) -> anyhow::Result<()> {
    let message = "cluster restored from a backup";
    let event = Event::new(EventType::Audit, ObjectRef::namespace(SYSTEM_NAMESPACE), message)
        .with("created", format_utc(manifest.created))
        .with("release", manifest.release.clone());
    Ok(events::insert(store, &[event]).await?)
}
