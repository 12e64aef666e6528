//! Transfers from and to simulated guests.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use muster_types::storage::ByteStream;
use muster_types::{Error, Result};
use tokio::sync::{mpsc, watch};

use super::guest::{ConnectionState, disconnected};

/// The maximum chunk size of a download.
const MAX_CHUNK: usize = 64 << 10;

/// Limits the rate of one transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Throttle {
    bytes_per_second: Option<u64>,
    stall_after_bytes: Option<u64>,
    transferred: u64,
}

impl Throttle {
    pub(super) fn new(bytes_per_second: Option<u64>, stall_after_bytes: Option<u64>) -> Self {
        Self { bytes_per_second, stall_after_bytes, transferred: 0 }
    }

    /// Waits for the time that the transfer of `bytes` bytes takes, forever if the transfer stalls.
    pub(super) async fn transfer(&mut self, bytes: usize) {
        self.transferred += bytes as u64;
        if self.stall_after_bytes.is_some_and(|limit| self.transferred > limit) {
            std::future::pending::<()>().await;
        }
        if let Some(rate) = self.bytes_per_second {
            #[expect(clippy::cast_precision_loss, reason = "the delay does not have to be exact")]
            tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)).await;
        }
    }

    /// Returns the chunk size, which is what is transferred in 0.1 s.
    fn chunk_size(&self) -> usize {
        let per_chunk = self.bytes_per_second.map_or(MAX_CHUNK as u64, |rate| rate / 10);
        usize::try_from(per_chunk.clamp(1, MAX_CHUNK as u64)).expect("at most MAX_CHUNK")
    }
}

/// A stream of the chunks from a channel.
struct ReceiverStream(mpsc::Receiver<Result<Bytes>>);

impl Stream for ReceiverStream {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}

/// Returns a throttled stream of `data` that fails when the connection ends. At most one chunk is sent ahead.
pub(super) fn download(
    data: Bytes,
    mut throttle: Throttle,
    mut connection: watch::Receiver<ConnectionState>,
    session: u64,
) -> ByteStream {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut rest = data;
        while !rest.is_empty() {
            let chunk = rest.split_to(rest.len().min(throttle.chunk_size()));
            let sent = tokio::select! {
                () = throttle.transfer(chunk.len()) => sender.send(Ok(chunk)).await.is_ok(),
                () = sender.closed() => false,
                () = disconnected(&mut connection, session) => {
                    let _ = sender.send(Err(Error::Unavailable("the connection broke".into()))).await;
                    false
                }
            };
            if !sent {
                break;
            }
        }
    });
    Box::pin(ReceiverStream(receiver))
}

/// Returns the next chunk of a stream.
pub(super) async fn next(stream: &mut ByteStream) -> Option<Result<Bytes>> {
    std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await
}
