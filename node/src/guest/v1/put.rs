//! Writes files into a guest.

use std::sync::Arc;

use bytes::Bytes;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::guest::GuestError;
use muster_types::storage::ByteStream;
use serde_json::{Value, json};

use super::connection::{Call, Connection, ReplyFlow};
use super::packet::{Packet, encode_chunk};

/// The maximum chunk size for plain agents. A plain agent that reads several packets at once sleeps for 200 ms after each;
/// packets above its read size arrive one at a time.
const PLAIN_CHUNK: usize = 16 << 10;

/// The maximum number of bytes that the agent has not acknowledged.
const TRANSFER_WINDOW: u64 = 16 * MAX_CHUNK_SIZE as u64;

const DEFAULT_MODE: u32 = 0o644;
/// The file type bits of a regular file.
const REGULAR_FILE: u32 = 0o100_000;

pub(super) async fn put(
    connection: &Arc<Connection>,
    path: &str,
    size: u64,
    mode: Option<u32>,
    mut data: ByteStream,
) -> Result<(), GuestError> {
    let windowed = connection.features().windowed_transfers;
    let mut call = connection.call("put-file", ReplyFlow::Windowed)?;
    // A plain agent replies only after the last chunk.
    let _silence = (!windowed).then(|| connection.allow_silence());
    start_upload(connection, &mut call, path, size, mode).await?;
    let mut upload = Upload { path, windowed, size, sent: 0, acknowledged: 0 };
    let mut buffered: Option<Bytes> = None;
    while upload.sent < size {
        tokio::select! {
            reply = call.next() => upload.handle_acknowledgement(&mut call, &reply?)?,
            more = next_bytes(&mut data), if buffered.is_none() => {
                buffered = more?.filter(|bytes| !bytes.is_empty());
            }
            permit = connection.send_permit(), if upload.window_is_open() && buffered.is_some() => {
                let permit = permit?;
                if let Some(bytes) = &mut buffered {
                    let chunk = upload.split_chunk(bytes)?;
                    permit.send(&call.packet(upload.packet(Some(&chunk))));
                    upload.sent += chunk.len() as u64;
                }
                buffered = buffered.filter(|bytes| !bytes.is_empty());
            }
        }
    }
    if buffered.is_some() || has_more(&mut data).await? {
        return Err(too_long());
    }
    let last = loop {
        tokio::select! {
            biased;
            permit = connection.send_permit() => break permit?,
            reply = call.next() => upload.handle_acknowledgement(&mut call, &reply?)?,
        }
    };
    last.send(&call.packet(upload.packet(None)));
    loop {
        let reply = call.next().await?;
        if upload.handle_reply(&mut call, &reply)? {
            return Ok(());
        }
    }
}

/// Sends the first packet of an upload.
async fn start_upload(
    connection: &Arc<Connection>,
    call: &mut Call,
    path: &str,
    size: u64,
    mode: Option<u32>,
) -> Result<(), GuestError> {
    let windowed = connection.features().windowed_transfers;
    if !windowed {
        // A plain agent appends to an unfinished upload of the same path: finish that one first.
        let (_, unique) = connection.new_request_id();
        let end =
            json!({ "command": "put-file", "path": path, "offset": 0, "chunk": null, "unique": unique });
        connection.send_permit().await?.send(&end);
    }
    let permit = connection.send_permit().await?;
    let mut stat = json!({ "size": size, "uid": 0, "gid": 0, "atime": 0, "mtime": 0, "ctime": 0 });
    // Without a mode, an agent with windowed transfers keeps the permissions of an existing file.
    if let Some(mode) = mode.or((!windowed).then_some(DEFAULT_MODE)) {
        stat["mode"] = (REGULAR_FILE | mode).into();
    }
    let mut first = json!({ "path": path, "stat_result": stat });
    if windowed {
        first["pieces"] = true.into();
    }
    permit.send(&call.packet(first));
    call.set_abandon_on_drop(windowed);
    Ok(())
}

/// The progress of an upload.
struct Upload<'a> {
    path: &'a str,
    windowed: bool,
    size: u64,
    sent: u64,
    acknowledged: u64,
}

impl Upload<'_> {
    fn window_is_open(&self) -> bool {
        !self.windowed || self.sent - self.acknowledged < TRANSFER_WINDOW
    }

    fn split_chunk(&self, bytes: &mut Bytes) -> Result<Bytes, GuestError> {
        let max_size = if self.windowed { MAX_CHUNK_SIZE } else { PLAIN_CHUNK };
        let chunk = bytes.split_to(bytes.len().min(max_size));
        if self.sent + chunk.len() as u64 > self.size { Err(too_long()) } else { Ok(chunk) }
    }

    fn packet(&self, chunk: Option<&[u8]>) -> Value {
        json!({
            "path": self.path, "offset": self.sent, "encoding": "base64", "chunk": chunk.map(encode_chunk),
        })
    }

    /// Handles a reply before the end of the file was sent.
    fn handle_acknowledgement(&mut self, call: &mut Call, reply: &Packet) -> Result<(), GuestError> {
        match self.handle_reply(call, reply)? {
            false => Ok(()),
            true => Err(GuestError::Refused("the guest's agent completed an unfinished transfer".into())),
        }
    }

    /// Handles a reply. Returns whether the guest has the complete file.
    fn handle_reply(&mut self, call: &mut Call, reply: &Packet) -> Result<bool, GuestError> {
        if let Some(failure) = reply.failure() {
            call.set_abandon_on_drop(false);
            return Err(failure);
        }
        if let Some(offset) = reply.unsigned("offset") {
            if offset > self.sent {
                return Err(GuestError::Refused("the guest's agent acknowledged more than was sent".into()));
            }
            self.acknowledged = self.acknowledged.max(offset);
            return Ok(false);
        }
        call.set_abandon_on_drop(false);
        Ok(true)
    }
}

fn too_long() -> GuestError {
    GuestError::HostFailed("the file is longer than its announced size".into())
}

async fn next_bytes(data: &mut ByteStream) -> Result<Option<Bytes>, GuestError> {
    match std::future::poll_fn(|context| data.as_mut().poll_next(context)).await {
        Some(bytes) => bytes.map(Some).map_err(|error| GuestError::HostFailed(error.to_string())),
        None => Err(GuestError::HostFailed("the file is shorter than its announced size".into())),
    }
}

/// Returns whether the stream has more bytes.
async fn has_more(data: &mut ByteStream) -> Result<bool, GuestError> {
    loop {
        match std::future::poll_fn(|context| data.as_mut().poll_next(context)).await {
            None => return Ok(false),
            Some(Err(error)) => return Err(GuestError::HostFailed(error.to_string())),
            Some(Ok(bytes)) if bytes.is_empty() => {}
            Some(Ok(_)) => return Ok(true),
        }
    }
}
