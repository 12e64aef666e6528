//! Writes files into a guest.

use std::sync::Arc;

use bytes::Bytes;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::guest::GuestError;
use muster_types::storage::ByteStream;
use serde_json::json;

use super::line::{Call, Flow, Line};
use super::packet::{Packet, encode};

/// The largest piece of a plain agent. Hosts have sent 1024 bytes, but an agent that finds several packets at once rests
/// for a fifth of a second after each; in packets of more than it reads at once it finds one at a time.
const PLAIN_PIECE: usize = 16 << 10;

/// How many bytes may be on the way to an agent that says what it wrote.
const WINDOW: u64 = 16 * MAX_CHUNK_SIZE as u64;

/// A file that everybody may read, until somebody says otherwise.
const MODE: u32 = 0o644;
/// What the mode of a regular file has beside its permissions.
const REGULAR: u32 = 0o100_000;

pub(super) async fn put(
    line: &Arc<Line>,
    path: &str,
    size: u64,
    mode: Option<u32>,
    mut data: ByteStream,
) -> Result<(), GuestError> {
    let pieces = line.features().pieces;
    let mut call = line.call("put-file", Flow::Window)?;
    // A plain agent says nothing until it has all.
    let _expected = (!pieces).then(|| line.expect_silence());
    if !pieces {
        // A plain agent appends to what somebody began and did not end, whoever that was: this ends it.
        let (_, unique) = line.new_name();
        let end =
            json!({ "command": "put-file", "path": path, "offset": 0, "chunk": null, "unique": unique });
        line.turn().await?.send(&end);
    }
    let turn = line.turn().await?;
    let mut stat = json!({ "size": size, "uid": 0, "gid": 0, "atime": 0, "mtime": 0, "ctime": 0 });
    // Ours leaves the permissions of a file that is there alone if it is told none.
    if let Some(mode) = mode.or((!pieces).then_some(MODE)) {
        stat["mode"] = (REGULAR | mode).into();
    }
    let mut first = json!({ "path": path, "stat_result": stat });
    if pieces {
        first["pieces"] = true.into();
    }
    turn.send(&call.packet(first));
    call.set_lasting(pieces);
    let mut file = File { path, pieces, size, sent: 0, written: 0 };
    let mut rest: Option<Bytes> = None;
    while file.sent < size {
        let is_open = !pieces || file.sent - file.written < WINDOW;
        tokio::select! {
            reply = call.next() => file.hear(&mut call, &reply?)?,
            more = next(&mut data), if rest.is_none() => rest = more?.filter(|bytes| !bytes.is_empty()),
            turn = line.turn(), if is_open && rest.is_some() => {
                let turn = turn?;
                if let Some(bytes) = &mut rest {
                    let piece = file.cut(bytes)?;
                    turn.send(&call.packet(file.packet(Some(&piece))));
                    file.sent += piece.len() as u64;
                }
                rest = rest.filter(|bytes| !bytes.is_empty());
            }
        }
    }
    if rest.is_some() || more_than_nothing(&mut data).await? {
        return Err(GuestError::Host("there is more of the file than was said".into()));
    }
    let last = loop {
        tokio::select! {
            biased;
            turn = line.turn() => break turn?,
            reply = call.next() => file.hear(&mut call, &reply?)?,
        }
    };
    last.send(&call.packet(file.packet(None)));
    loop {
        let reply = call.next().await?;
        if file.hear_last(&mut call, &reply)? {
            return Ok(());
        }
    }
}

/// A file on its way.
struct File<'a> {
    path: &'a str,
    pieces: bool,
    size: u64,
    sent: u64,
    /// How much the guest says to have written.
    written: u64,
}

impl File<'_> {
    /// The next piece of these bytes.
    fn cut(&self, bytes: &mut Bytes) -> Result<Bytes, GuestError> {
        let most = if self.pieces { MAX_CHUNK_SIZE } else { PLAIN_PIECE };
        let piece = bytes.split_to(bytes.len().min(most));
        if self.sent + piece.len() as u64 > self.size {
            return Err(GuestError::Host("there is more of the file than was said".into()));
        }
        Ok(piece)
    }

    fn packet(&self, piece: Option<&[u8]>) -> serde_json::Value {
        json!({ "path": self.path, "offset": self.sent, "encoding": "base64", "chunk": piece.map(encode) })
    }

    fn hear(&mut self, call: &mut Call, reply: &Packet) -> Result<(), GuestError> {
        match self.hear_last(call, reply)? {
            false => Ok(()),
            true => Err(GuestError::Refused("the guest has a file before it was sent".into())),
        }
    }

    /// Whether the guest has the file.
    fn hear_last(&mut self, call: &mut Call, reply: &Packet) -> Result<bool, GuestError> {
        if let Some(failure) = reply.failure() {
            call.set_lasting(false);
            return Err(failure);
        }
        if let Some(offset) = reply.whole("offset") {
            if offset > self.sent {
                return Err(GuestError::Refused("the guest has more than was sent".into()));
            }
            self.written = self.written.max(offset);
            return Ok(false);
        }
        call.set_lasting(false);
        Ok(true)
    }
}

async fn next(data: &mut ByteStream) -> Result<Option<Bytes>, GuestError> {
    let host = |error: muster_types::Error| GuestError::Host(error.to_string());
    match std::future::poll_fn(|context| data.as_mut().poll_next(context)).await {
        Some(bytes) => bytes.map(Some).map_err(host),
        None => Err(GuestError::Host("there is less of the file than was said".into())),
    }
}

/// Whether the stream goes on.
async fn more_than_nothing(data: &mut ByteStream) -> Result<bool, GuestError> {
    loop {
        match std::future::poll_fn(|context| data.as_mut().poll_next(context)).await {
            None => return Ok(false),
            Some(Err(error)) => return Err(GuestError::Host(error.to_string())),
            Some(Ok(bytes)) if bytes.is_empty() => {}
            Some(Ok(_)) => return Ok(true),
        }
    }
}
