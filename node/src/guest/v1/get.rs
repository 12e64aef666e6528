//! Reads files from a guest.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_core::Stream;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::guest::{GuestError, GuestFileInfo};
use muster_types::storage::ByteStream;
use serde_json::json;

use super::connection::{Call, Connection, ReplyFlow};
use super::packet::{Chunk, Packet};
use crate::guest::channel::stream_error;

/// The number of bytes that the agent may send ahead of the reader.
const TRANSFER_WINDOW: u64 = 16 * MAX_CHUNK_SIZE as u64;

/// The number of bytes after which the reader's progress is acknowledged.
const ACKNOWLEDGE_EVERY: u64 = 4 * MAX_CHUNK_SIZE as u64;

pub(super) async fn get(
    connection: &Arc<Connection>,
    path: &str,
) -> Result<(GuestFileInfo, ByteStream), GuestError> {
    let windowed = connection.features().windowed_transfers;
    let flow = if windowed { ReplyFlow::Windowed } else { ReplyFlow::Unlimited };
    let mut call = connection.call("get-file", flow)?;
    let mut fields = json!({ "path": path });
    if windowed {
        fields["window"] = TRANSFER_WINDOW.into();
    }
    let permit = connection.send_permit().await?;
    permit.send(&call.packet(fields));
    call.set_abandon_on_drop(windowed);
    let reply = call.next().await?;
    if let Some(failure) = reply.failure() {
        call.set_abandon_on_drop(false);
        return Err(failure);
    }
    let info = reply.file_info();
    let info = info.ok_or_else(|| GuestError::Refused("the guest's agent sent no file metadata".into()))?;
    let mut download = Download { call, windowed, received: 0, acknowledged: 0, ended: false, first: None };
    download.first = download.take_chunk(&reply).transpose();
    Ok((info, Box::pin(download)))
}

/// A file transfer from a guest.
struct Download {
    call: Call,
    windowed: bool,
    received: u64,
    acknowledged: u64,
    ended: bool,
    /// The data that arrived together with the metadata.
    first: Option<Result<Bytes, GuestError>>,
}

impl Download {
    /// Returns the data in a packet, or `None` if it has none. An error ends the transfer.
    fn take_chunk(&mut self, packet: &Packet) -> Result<Option<Bytes>, GuestError> {
        let chunk = self.parse_chunk(packet);
        if chunk.is_err() {
            self.ended = true;
        }
        chunk
    }

    fn parse_chunk(&mut self, packet: &Packet) -> Result<Option<Bytes>, GuestError> {
        if let Some(failure) = packet.failure() {
            self.call.set_abandon_on_drop(false);
            return Err(failure);
        }
        let Some(chunk) = packet.chunk()? else { return Ok(None) };
        if packet.unsigned("offset").is_some_and(|offset| offset != self.received) {
            // Plain agents drop data when the port is full. A retry may succeed.
            return Err(GuestError::Unreachable("a part of the file was lost in transit".into()));
        }
        match chunk {
            Chunk::End => {
                self.ended = true;
                self.call.set_abandon_on_drop(false);
                Ok(None)
            }
            Chunk::Bytes(bytes) if bytes.is_empty() => Ok(None),
            Chunk::Bytes(bytes) => {
                self.received += bytes.len() as u64;
                Ok(Some(bytes))
            }
        }
    }

    /// Moves the window after the reader consumed the received data.
    fn acknowledge(&mut self) {
        if self.windowed && !self.ended && self.received - self.acknowledged >= ACKNOWLEDGE_EVERY {
            self.acknowledged = self.received;
            let unique = self.call.unique();
            let more = json!({ "command": "get-file-more", "unique": unique, "offset": self.received });
            self.call.connection().send_now(&more);
        }
    }
}

impl Stream for Download {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first.map_err(|error| stream_error(&error))));
        }
        // A reader that polls has consumed all earlier chunks.
        self.acknowledge();
        while !self.ended {
            let chunk = match ready!(self.call.poll_next(context)) {
                Ok(packet) => self.take_chunk(&packet),
                Err(error) => {
                    self.ended = true;
                    Err(error)
                }
            };
            if let Some(chunk) = chunk.map_err(|error| stream_error(&error)).transpose() {
                return Poll::Ready(Some(chunk));
            }
        }
        Poll::Ready(None)
    }
}
