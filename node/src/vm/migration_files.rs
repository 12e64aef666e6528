//! Files of a VM that a migration copies: the log of its serial console and, while it is off, its disks and its NVRAM. See
//! docs/decisions/0070.
//!
//! ```text
//! source ─▶ target: (length of the name: 1 byte, name, size: 8 bytes, content)*, 0      target ─▶ source: 1, when all are synced
//! ```

use std::fs::{File, OpenOptions};
use std::io::SeekFrom;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use muster_types::migration::{
    MigrationChannel, MigrationConnection, MigrationDriver, MigrationMode, MigrationProgress,
    MigrationSettings, SwitchOver,
};
use muster_types::{Error, Result};
use nix::libc;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::console_log;
use super::hypervisor::blocking;
use super::lifecycle::Vm;
use super::migration_outgoing::{REPORT_INTERVAL, bandwidth};
use super::vm_dir::{VmDir, file};
use crate::files::io_error;
use crate::replica_messages::{TRANSFER_TIMEOUT, within};

/// The file of a VM for the earlier part of its console log.
const OLD_CONSOLE_LOG: &str = "console.old";
/// The confirmation of the target.
const RECEIVED: u8 = 1;
const BUFFER_SIZE: usize = 1 << 20;
/// How long sending the console log may take. The guest runs on the target meanwhile.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(20);

/// The content of a file that is sent.
enum Content {
    Bytes(Bytes),
    File(File, u64),
}

/// Opens the connection for the console log, while the target waits for the migration.
pub(super) async fn connect(driver: &dyn MigrationDriver) -> Result<UnixStream> {
    let connection = MigrationConnection { channel: MigrationChannel::Files, display_password: None };
    let stream = driver.connect(connection).await?;
    UnixStream::from_std(stream).map_err(io_error("failed to connect to the target"))
}

/// Sends the console log of a VM whose guest has stopped here. Without it the log starts again on the target.
pub(super) async fn send_console(vm: &Vm, stream: UnixStream) {
    let sent = async {
        let files = vec![console(&vm.dir).await?];
        send(stream, files, None, None).await
    };
    let sent = tokio::time::timeout(CONSOLE_TIMEOUT, sent).await;
    let sent = sent.unwrap_or_else(|_| Err(Error::Unavailable("the target does not confirm it".into())));
    if let Err(error) = sent {
        tracing::warn!(vm = %vm.id, %error, "failed to copy the console log to the target of a migration");
    }
}

async fn console(dir: &VmDir) -> Result<(String, Content)> {
    let log = dir.file(file::CONSOLE);
    let content = blocking(move || console_log::read(&log, None)).await?;
    Ok((OLD_CONSOLE_LOG.to_owned(), Content::Bytes(content)))
}

/// Migrates a VM that is off.
pub(super) async fn migrate(
    vm: &Vm,
    settings: &MigrationSettings,
    driver: &dyn MigrationDriver,
) -> Result<u64> {
    let _snapshot = vm.snapshot_lock.lock().await;
    require_off(vm)?;
    let (dir, before) = (vm.dir.clone(), versions(&vm.dir)?);
    let mut files = blocking(move || open_disks(&dir)).await?;
    files.push(console(&vm.dir).await?);
    let stream = connect(driver).await?;
    send(stream, files, bandwidth(settings), Some(driver)).await?;
    driver.prepare_switch_over().await?;
    require_off(vm)?;
    if versions(&vm.dir)? != before {
        return Err(Error::Conflict("the disks were changed during the migration".into()));
    }
    match driver.switch_over().await? {
        SwitchOver::Moved => Ok(0),
        SwitchOver::Refused(reason) => Err(Error::Conflict(reason)),
    }
}

fn require_off(vm: &Vm) -> Result<()> {
    match vm.running() {
        None => Ok(()),
        Some(_) => Err(Error::Conflict("the VM is running".into())),
    }
}

/// Returns the names of the disks and the NVRAM of a VM.
fn disk_names(dir: &VmDir) -> Result<Vec<String>> {
    let is_disk = |name: &String| name.ends_with(".qcow2") || name == file::NVRAM;
    Ok(dir.file_names()?.into_iter().filter(is_disk).collect())
}

/// Returns the names, sizes and times of the disks of a VM.
pub(super) fn versions(dir: &VmDir) -> Result<Vec<(String, u64, i64, i64)>> {
    let version = |name: String| {
        let metadata =
            std::fs::symlink_metadata(dir.file(&name)).map_err(io_error("failed to inspect disk"))?;
        Ok((name, metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    };
    let mut versions = disk_names(dir)?.into_iter().map(version).collect::<Result<Vec<_>>>()?;
    versions.sort_unstable();
    Ok(versions)
}

fn open_disks(dir: &VmDir) -> Result<Vec<(String, Content)>> {
    let open = |name: String| {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(dir.file(&name));
        let opened = opened.and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = opened.map_err(io_error("failed to open disk"))?;
        if !metadata.is_file() {
            return Err(Error::Conflict(format!("{name} is not a regular file")));
        }
        Ok((name, Content::File(file, metadata.len())))
    };
    disk_names(dir)?.into_iter().map(open).collect()
}

impl Content {
    fn size(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File(_, size) => *size,
        }
    }
}

/// Reports progress, which fails if the migration was cancelled.
async fn report(driver: Option<&dyn MigrationDriver>, done: u64, total: u64) -> Result<()> {
    match driver {
        Some(driver) => driver.report_progress(MigrationProgress { done, total }).await,
        None => Ok(()),
    }
}

/// Sends files, and returns when the target has confirmed them.
async fn send(
    mut stream: UnixStream,
    files: Vec<(String, Content)>,
    bandwidth: Option<u64>,
    driver: Option<&dyn MigrationDriver>,
) -> Result<()> {
    let failed = || io_error("failed to send files to the target");
    let total = files.iter().map(|(_, content)| content.size()).sum();
    let (started, mut reported, mut done) = (Instant::now(), Instant::now(), 0_u64);
    report(driver, done, total).await?;
    for (name, content) in files {
        let length = u8::try_from(name.len()).map_err(|_| Error::Internal("a long file name".into()))?;
        stream.write_u8(length).await.map_err(failed())?;
        stream.write_all(name.as_bytes()).await.map_err(failed())?;
        stream.write_u64(content.size()).await.map_err(failed())?;
        let (file, mut left) = match content {
            Content::Bytes(bytes) => {
                stream.write_all(&bytes).await.map_err(failed())?;
                done += bytes.len() as u64;
                continue;
            }
            Content::File(file, size) => (file, size),
        };
        let mut file = tokio::fs::File::from_std(file);
        let mut buffer = vec![0; BUFFER_SIZE];
        while left > 0 {
            let chunk = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            file.read_exact(&mut buffer[..chunk]).await.map_err(io_error("failed to read disk"))?;
            within(TRANSFER_TIMEOUT, stream.write_all(&buffer[..chunk])).await?;
            left -= chunk as u64;
            done += chunk as u64;
            if let Some(bandwidth) = bandwidth {
                let due = Duration::from_millis(done.saturating_mul(1000) / bandwidth.max(1));
                while started.elapsed() < due {
                    tokio::time::sleep(REPORT_INTERVAL.min(due.saturating_sub(started.elapsed()))).await;
                    report(driver, done, total).await?;
                }
            }
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                report(driver, done, total).await?;
            }
        }
    }
    stream.write_u8(0).await.map_err(failed())?;
    let mut confirmed = std::pin::pin!(stream.read_u8());
    loop {
        match tokio::time::timeout(REPORT_INTERVAL, &mut confirmed).await {
            Ok(Ok(RECEIVED)) => return Ok(()),
            Ok(Ok(_)) => return Err(Error::Unavailable("the target did not receive the files".into())),
            Ok(Err(error)) => return Err(failed()(error)),
            Err(_) => report(driver, done, total).await?,
        }
    }
}

/// Receives files in the background.
pub(super) fn receive(vm: &Arc<Vm>, stream: std::os::unix::net::UnixStream, mode: MigrationMode) {
    let vm = Arc::clone(vm);
    tokio::spawn(async move {
        if let Err(error) = receive_all(&vm, stream, mode).await {
            tracing::warn!(vm = %vm.id, %error, "failed to receive the files of a migration");
        }
    });
}

async fn receive_all(vm: &Vm, stream: std::os::unix::net::UnixStream, mode: MigrationMode) -> Result<()> {
    let failed = || io_error("failed to receive files");
    let mut stream = UnixStream::from_std(stream).map_err(failed())?;
    let mut missing = match mode {
        MigrationMode::Live => Vec::new(),
        MigrationMode::Off => disk_names(&vm.dir)?,
    };
    loop {
        let length = stream.read_u8().await.map_err(failed())?;
        if length == 0 {
            break;
        }
        let mut name = vec![0; usize::from(length)];
        stream.read_exact(&mut name).await.map_err(failed())?;
        let name = String::from_utf8_lossy(&name).into_owned();
        let size = stream.read_u64().await.map_err(failed())?;
        let position = missing.iter().position(|expected| *expected == name);
        if let Some(position) = position {
            missing.remove(position);
        } else if name != OLD_CONSOLE_LOG {
            return Err(Error::Conflict(format!("the file {name:?} is not expected")));
        }
        receive_file(&mut stream, vm.dir.file(&name), size).await?;
    }
    if let Some(name) = missing.first() {
        return Err(Error::Conflict(format!("the source did not send {name}")));
    }
    if mode == MigrationMode::Off {
        let dir = vm.dir.clone();
        blocking(move || dir.mark_received()).await?;
    }
    stream.write_u8(RECEIVED).await.map_err(failed())
}

/// Receives a file, which replaces an existing one when it is complete.
async fn receive_file(stream: &mut UnixStream, path: PathBuf, size: u64) -> Result<()> {
    let failed = || io_error("failed to write a received file");
    let new = path.with_extension("part");
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new);
    let mut file = tokio::fs::File::from_std(file.map_err(failed())?);
    let (mut left, mut buffer) = (size, vec![0; BUFFER_SIZE]);
    while left > 0 {
        let chunk = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        stream.read_exact(&mut buffer[..chunk]).await.map_err(io_error("failed to receive files"))?;
        if buffer[..chunk].iter().all(|byte| *byte == 0) {
            file.seek(SeekFrom::Current(i64::try_from(chunk).unwrap_or(i64::MAX))).await.map_err(failed())?;
        } else {
            file.write_all(&buffer[..chunk]).await.map_err(failed())?;
        }
        left -= chunk as u64;
    }
    file.flush().await.map_err(failed())?;
    file.set_len(size).await.map_err(failed())?;
    file.sync_all().await.map_err(failed())?;
    tokio::fs::rename(&new, &path).await.map_err(failed())
}
