//! Tests of protocol 1 with plain agents and with agents that have all features.

mod execute;
mod fake_agent;
mod hostile;
mod released;
mod state;
mod transfer;

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_core::Stream;
use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES};
use muster_types::guest::{CommandKey, GuestCommand};
use muster_types::ids::AgentOperationId;
use muster_types::storage::ByteStream;

const ALL_FEATURES: &[&str] = &[FEATURE_MEMORY, FEATURE_PIECES];

fn command(line: &str) -> GuestCommand {
    let key = CommandKey { operation: AgentOperationId::new(), index: 0 };
    GuestCommand { key, line: line.into(), sent_boot_id: None }
}

async fn collect(mut stream: ByteStream) -> muster_types::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(chunk) = std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await {
        bytes.extend_from_slice(&chunk?);
    }
    Ok(bytes)
}

/// A stream of one chunk.
struct OneChunk(Option<Bytes>);

impl OneChunk {
    fn stream(bytes: Bytes) -> ByteStream {
        Box::pin(Self(Some(bytes)))
    }
}

impl Stream for OneChunk {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.take().map(Ok))
    }
}
