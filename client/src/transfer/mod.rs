//! Resumable and verified transfers of content to and from a cluster.

mod checksum;
mod download;
mod local_file;
mod retry;
#[cfg(test)]
mod tests;
mod upload;
mod upload_state;

use std::future::Future;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use crate::exit_code::interrupted;

pub(crate) use self::download::{DownloadTarget, PrivatePartFile, download, download_to_stream};
pub(crate) use self::local_file::LocalFile;
pub(crate) use self::retry::{Retries, RetryPolicy};
pub(crate) use self::upload::{Uploaded, send_file, send_file_untracked, send_stdin};
pub(crate) use self::upload_state::UploadState;

/// Pauses between two queries of a server-side progress.
pub(crate) async fn poll_pause() {
    sleep(Duration::from_millis(300)).await;
}

/// Runs `work` until it completes or a signal interrupts it. `consequence` then says what became of the work.
pub(crate) async fn unless_interrupted<T>(
    work: impl Future<Output = anyhow::Result<T>>,
    consequence: impl FnOnce() -> String,
) -> anyhow::Result<T> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = work => return result,
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    Err(interrupted(format!("interrupted; {}", consequence())))
}
