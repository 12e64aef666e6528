//! Reads files of a guest.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_core::Stream;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::guest::{GuestError, GuestFileInfo};
use muster_types::storage::ByteStream;
use serde_json::json;

use super::line::{Call, Flow, Line};
use super::packet::{Chunk, Packet};
use crate::guest::contact::stream_error;

/// How many bytes an agent that can wait sends before somebody took them.
const WINDOW: u64 = 16 * MAX_CHUNK_SIZE as u64;

/// After how many bytes it is told that they were taken.
const TAKEN: u64 = 4 * MAX_CHUNK_SIZE as u64;

pub(super) async fn get(line: &Arc<Line>, path: &str) -> Result<(GuestFileInfo, ByteStream), GuestError> {
    let windowed = line.features().pieces;
    let flow = if windowed { Flow::Window } else { Flow::Unasked };
    let mut call = line.call("get-file", flow)?;
    let mut fields = json!({ "path": path });
    if windowed {
        fields["window"] = WINDOW.into();
    }
    let turn = line.turn().await?;
    turn.send(&call.packet(fields));
    call.set_lasting(windowed);
    let reply = call.next().await?;
    if let Some(failure) = reply.failure() {
        call.set_lasting(false);
        return Err(failure);
    }
    let facts = reply.file_facts();
    let facts = facts.ok_or_else(|| GuestError::Refused("the guest did not say what the file is".into()))?;
    let mut file = File { call, windowed, size: 0, told: 0, ended: false, first: None };
    file.first = file.take(&reply).transpose();
    Ok((facts, Box::pin(file)))
}

/// A file on its way.
struct File {
    call: Call,
    windowed: bool,
    /// How much of it came.
    size: u64,
    /// How much of that the agent knows to be taken.
    told: u64,
    ended: bool,
    /// What came with the facts.
    first: Option<Result<Bytes, GuestError>>,
}

impl File {
    /// The bytes of a packet; nothing if there are none.
    fn take(&mut self, packet: &Packet) -> Result<Option<Bytes>, GuestError> {
        let taken = self.look_at(packet);
        if taken.is_err() {
            self.ended = true;
        }
        taken
    }

    fn look_at(&mut self, packet: &Packet) -> Result<Option<Bytes>, GuestError> {
        if let Some(failure) = packet.failure() {
            self.call.set_lasting(false);
            return Err(failure);
        }
        let Some(chunk) = packet.chunk()? else { return Ok(None) };
        if packet.whole("offset").is_some_and(|offset| offset != self.size) {
            // Plain agents drop what a full port does not take. Another time it may.
            return Err(GuestError::Away("a part of the file was lost on its way".into()));
        }
        match chunk {
            Chunk::End => {
                self.ended = true;
                self.call.set_lasting(false);
                Ok(None)
            }
            Chunk::Bytes(bytes) if bytes.is_empty() => Ok(None),
            Chunk::Bytes(bytes) => {
                self.size += bytes.len() as u64;
                Ok(Some(bytes))
            }
        }
    }

    /// Lets the agent send more, once what came was taken.
    fn tell_taken(&mut self) {
        if self.windowed && !self.ended && self.size - self.told >= TAKEN {
            self.told = self.size;
            let unique = self.call.unique();
            let more = json!({ "command": "get-file-more", "unique": unique, "offset": self.size });
            self.call.line().say(&more);
        }
    }
}

impl Stream for File {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first.map_err(|error| stream_error(&error))));
        }
        // Whoever asks for more has taken what came before.
        self.tell_taken();
        while !self.ended {
            let taken = match ready!(self.call.poll_next(context)) {
                Ok(packet) => self.take(&packet),
                Err(error) => {
                    self.ended = true;
                    Err(error)
                }
            };
            if let Some(taken) = taken.map_err(|error| stream_error(&error)).transpose() {
                return Poll::Ready(Some(taken));
            }
        }
        Poll::Ready(None)
    }
}
