//! How bytes get into a simulated guest and out of it.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use muster_types::storage::ByteStream;
use muster_types::{Error, Result};
use tokio::sync::{mpsc, watch};

use super::guest::{Link, broken};

/// The largest piece of a file that is read.
const PIECE: usize = 64 << 10;

/// How fast a transfer is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    bytes_per_second: Option<u64>,
    stalls_after: Option<u64>,
    moved: u64,
}

impl Pace {
    pub(super) fn new(bytes_per_second: Option<u64>, stalls_after: Option<u64>) -> Self {
        Self { bytes_per_second, stalls_after, moved: 0 }
    }

    /// Ends when so many bytes have gone over, which may be never.
    pub(super) async fn pass(&mut self, bytes: usize) {
        self.moved += bytes as u64;
        if self.stalls_after.is_some_and(|most| self.moved > most) {
            std::future::pending::<()>().await;
        }
        if let Some(rate) = self.bytes_per_second {
            #[expect(clippy::cast_precision_loss, reason = "a moment more or less")]
            tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)).await;
        }
    }

    /// How much is sent at a time.
    fn piece(&self) -> usize {
        let tenth = self.bytes_per_second.map_or(PIECE as u64, |rate| rate / 10);
        usize::try_from(tenth).unwrap_or(PIECE).clamp(1, PIECE)
    }
}

/// Bytes as somebody else hands them over.
struct Pieces(mpsc::Receiver<Result<Bytes>>);

impl Stream for Pieces {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}

/// Reads bytes at that pace, for as long as the connection holds. Nothing is read ahead of whoever takes it.
pub(super) fn sent(data: Bytes, mut pace: Pace, mut link: watch::Receiver<Link>, session: u64) -> ByteStream {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut rest = data;
        while !rest.is_empty() {
            let piece = rest.split_to(rest.len().min(pace.piece()));
            let sent = tokio::select! {
                () = pace.pass(piece.len()) => sender.send(Ok(piece)).await.is_ok(),
                () = sender.closed() => false,
                () = broken(&mut link, session) => {
                    let _ = sender.send(Err(Error::Unavailable("the connection broke".into()))).await;
                    false
                }
            };
            if !sent {
                break;
            }
        }
    });
    Box::pin(Pieces(receiver))
}

/// The next bytes of a stream.
pub(super) async fn next(stream: &mut ByteStream) -> Option<Result<Bytes>> {
    std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await
}
