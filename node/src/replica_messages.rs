//! The messages between the source of a replica and the node that has it. See docs/decisions/0074.
//!
//! ```text
//! target ─▶ source: ReplicaStatus
//! source ─▶ target: CopyHeader, then for each disk and the NVRAM (size: 8 bytes, content)      target ─▶ source: 1 when it
//! is committed, or 0 and the reason
//! ```
//!
//! Each message is its length in 4 bytes, and JSON.

use std::time::Duration;

use muster_types::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use uuid::Uuid;

use crate::files::io_error;

/// The maximum length of a message.
const MAX_MESSAGE: u32 = 64 << 10;
/// How long the other side may take to send or receive a part of a copy.
pub(crate) const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the target may take to commit a copy. It may have to finish the last one first.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(900);
const COMMITTED: u8 = 1;
const REJECTED: u8 = 0;

/// What a replica contains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplicaStatus {
    /// Its last complete copy.
    pub(crate) copy: Option<Uuid>,
}

/// A copy of all disks as of one point in time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CopyHeader {
    pub(crate) copy: Uuid,
    /// The copy that the files contain the changes since; unset for a full copy.
    pub(crate) base: Option<Uuid>,
    /// The time that it dates from.
    pub(crate) time: f64,
    /// The generation of the VM.
    pub(crate) generation: i64,
    /// The devices of the disks, in the order of their files.
    pub(crate) disks: Vec<String>,
    /// Whether the NVRAM follows.
    pub(crate) nvram: bool,
}

/// Returns the result of `work` unless it takes too long.
pub(crate) async fn within<T>(
    timeout: Duration,
    work: impl Future<Output = std::io::Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(timeout, work).await {
        Ok(done) => done.map_err(|error| {
            Error::Unavailable(format!("the connection to the other node was lost: {error}"))
        }),
        Err(_) => Err(Error::Unavailable("the other node does not respond".into())),
    }
}

pub(crate) async fn send_message(stream: &mut UnixStream, message: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(message)
        .map_err(|error| Error::Internal(format!("failed to write a message: {error}")))?;
    let length = u32::try_from(text.len()).map_err(|_| Error::Internal("a long message".into()))?;
    within(TRANSFER_TIMEOUT, async {
        stream.write_u32(length).await?;
        stream.write_all(&text).await
    })
    .await
}

pub(crate) async fn receive_message<T: DeserializeOwned>(stream: &mut UnixStream) -> Result<T> {
    let length = within(TRANSFER_TIMEOUT, stream.read_u32()).await?;
    if length > MAX_MESSAGE {
        return Err(Error::Invalid("the other node sent a message that is too long".into()));
    }
    let mut text = vec![0; length as usize];
    within(TRANSFER_TIMEOUT, stream.read_exact(&mut text)).await?;
    serde_json::from_slice(&text).map_err(|error| Error::Invalid(format!("invalid message: {error}")))
}

/// Converts a connection, and reads what the replica contains.
pub(crate) async fn receive_status(
    stream: std::os::unix::net::UnixStream,
) -> Result<(UnixStream, ReplicaStatus)> {
    let mut stream = to_async(stream)?;
    let status = receive_message(&mut stream).await?;
    Ok((stream, status))
}

pub(crate) fn to_async(stream: std::os::unix::net::UnixStream) -> Result<UnixStream> {
    stream
        .set_nonblocking(true)
        .and_then(|()| UnixStream::from_std(stream))
        .map_err(io_error("failed to configure a socket"))
}

/// Confirms that a copy was committed.
pub(crate) async fn confirm(stream: &mut UnixStream) -> Result<()> {
    within(TRANSFER_TIMEOUT, stream.write_u8(COMMITTED)).await
}

/// Reports why a copy was not committed. The source may have left.
pub(crate) async fn reject(stream: &mut UnixStream, error: &Error) {
    let _ = within(TRANSFER_TIMEOUT, stream.write_u8(REJECTED)).await;
    let _ = send_message(stream, &error.to_string()).await;
}

/// Waits until the target has committed a copy.
pub(crate) async fn wait_committed(stream: &mut UnixStream) -> Result<()> {
    if within(COMMIT_TIMEOUT, stream.read_u8()).await? == COMMITTED {
        return Ok(());
    }
    let reason: String = receive_message(stream).await?;
    Err(Error::Unavailable(format!("the node with the replica did not commit the copy: {reason}")))
}
