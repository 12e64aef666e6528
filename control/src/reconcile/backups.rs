//! Periodic backups: the maintainer writes a backup of the database and the seed, verifies it, and then removes older ones. See
//! docs/decisions/0097.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use muster_store::{cluster_values, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::BlobId;
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::ObjectRef;
use muster_types::settings::Settings;
use muster_types::time::{format_utc, now};
use muster_types::{Error, Result};
use tokio::sync::mpsc;

use crate::app::App;
use crate::backup::{
    self, BackupSummary, BlobSource, CopyFuture, MAX_CHUNK_BYTES, NewBackup, ProgressReceiver, Protection,
};
use crate::objects::blob_copy::open_anywhere;

/// The key of the time of the last backup.
pub(super) const LAST_RUN: &str = "SCHEDULED_TASK_LAST_RUN_BACKUP";
/// The maximum time until a backup that failed is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(900);

const PREFIX: &str = "muster-";
const SUFFIX: &str = ".backup";

/// Returns `BACKUP_INTERVAL`, or an interval that never ends if it is not set.
pub(super) fn interval(settings: &Settings) -> Duration {
    match settings.backup_interval {
        0 => Duration::MAX,
        seconds => Duration::from_secs(seconds),
    }
}

/// Writes a backup, if `BACKUP_INTERVAL` is set.
pub async fn run(app: &App) -> Result<()> {
    let Some(recipient) = app.settings.backup_recipient.filter(|_| app.settings.backup_interval > 0) else {
        return Ok(());
    };
    let directory = Path::new(&app.settings.backup_directory);
    let file = directory.join(file_name(now()));
    let blobs = ClusterBlobs(app);
    let written = backup::create(NewBackup {
        store: &app.store,
        seed: &app.seed,
        blobs: app.settings.backup_blobs,
        // The storages of the nodes of this daemon are read as those of others.
        storages: &[],
        source: Some(&blobs),
        protection: Protection::Recipients(vec![recipient]),
        file: &file,
        progress: ProgressReceiver::default(),
    });
    match written.await {
        Ok(summary) => {
            record_success(app, &file, &summary);
            remove_older(directory, app.settings.backup_keep)
        }
        Err(error) => {
            let reason = error.to_string();
            let event = Event::new(EventType::Health, object(), "failed to create a backup");
            app.events.record(event.with("file", file.display().to_string()).with("reason", reason.clone()));
            retry_soon(app).await?;
            Err(Error::Internal(format!("failed to create backup {}: {reason}", file.display())))
        }
    }
}

/// The blobs of all nodes.
#[derive(Debug)]
struct ClusterBlobs<'a>(&'a App);

impl BlobSource for ClusterBlobs<'_> {
    fn copy(&self, blob: BlobId, sink: mpsc::Sender<Vec<u8>>) -> CopyFuture<'_> {
        Box::pin(async move {
            let mut data = open_anywhere(self.0, blob).await.map_err(|error| error.to_string())?;
            while let Some(chunk) = data.next().await {
                let chunk = chunk.map_err(|error| error.to_string())?;
                for part in chunk.chunks(MAX_CHUNK_BYTES) {
                    sink.send(part.to_vec()).await.map_err(|_| "the backup has ended".to_owned())?;
                }
            }
            Ok(())
        })
    }
}

fn object() -> ObjectRef {
    ObjectRef::namespace(SYSTEM_NAMESPACE)
}

fn record_success(app: &App, file: &Path, summary: &BackupSummary) {
    tracing::info!(file = %file.display(), bytes = summary.bytes, rows = summary.rows, "created and verified backup");
    let event = Event::new(EventType::Status, object(), "backup created and verified")
        .with("file", file.display().to_string())
        .with("bytes", summary.bytes)
        .with("rows", summary.rows)
        .with("deleted_blobs", summary.deleted_blobs);
    app.events.record(event);
}

/// Makes the next backup due before its interval ends.
async fn retry_soon(app: &App) -> Result<()> {
    let interval = interval(&app.settings);
    let last = now() - interval.saturating_sub(RETRY_INTERVAL).as_secs_f64();
    transaction!(app.store, |tx| { Ok(cluster_values::set(tx, LAST_RUN, &last.to_string()).await?) })
}

/// Returns the name of a backup. Names in the order of their times are in alphabetical order.
fn file_name(time: f64) -> String {
    format!("{PREFIX}{}{SUFFIX}", format_utc(time).replace([':', '.'], "-"))
}

/// Returns whether a file is a periodic backup.
fn is_backup(name: &str) -> bool {
    let time = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
    time.is_some_and(|time| {
        time.len() == file_name(0.0).len() - PREFIX.len() - SUFFIX.len()
            && time.starts_with(|first: char| first.is_ascii_digit())
            && time.chars().all(|c| c.is_ascii_digit() || ['T', 'Z', '-'].contains(&c))
    })
}

/// Removes the oldest backups. The newest one was verified.
fn remove_older(directory: &Path, keep: u64) -> Result<()> {
    let failed = |error: std::io::Error| Error::Internal(format!("{}: {error}", directory.display()));
    let mut backups: Vec<PathBuf> = fs::read_dir(directory)
        .map_err(failed)?
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_backup))
        .map(|entry| entry.path())
        .collect();
    backups.sort();
    let keep = usize::try_from(keep).unwrap_or(usize::MAX);
    for file in &backups[..backups.len().saturating_sub(keep)] {
        fs::remove_file(file).map_err(failed)?;
        tracing::info!(file = %file.display(), "removed an old backup");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_only_the_oldest_periodic_backups() {
        let folder = tempfile::tempdir().unwrap();
        let times = [1.0, 2.5, 1e9, 1.9e9];
        let names: Vec<String> = times.into_iter().map(file_name).collect();
        let others = ["muster-monday.backup", "notes.txt", "muster-.backup", ".muster-x.backup.partial"];
        for name in names.iter().map(String::as_str).chain(others) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_older(folder.path(), 2).unwrap();
        let exists = |name: &str| folder.path().join(name).exists();
        assert_eq!(names.iter().map(|name| exists(name)).collect::<Vec<_>>(), [false, false, true, true]);
        assert!(others.iter().all(|name| exists(name)));
        remove_older(folder.path(), 5).unwrap();
        assert!(exists(&names[2]));
    }

    #[test]
    fn backups_are_periodic_only_with_their_setting() {
        assert_eq!(interval(&Settings::defaults()), Duration::MAX);
    }
}
