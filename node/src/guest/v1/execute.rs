//! Commands, and what they wrote.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures_core::Stream;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::guest::{CommandKey, CommandOutput, CommandResult, GuestCommand, GuestError, OutputName};
use muster_types::storage::ByteStream;
use serde_json::json;

use super::line::{Call, Flow, Line};
use super::packet::{Chunk, Packet};
use crate::guest::contact::stream_error;

/// Up to this what a command wrote is fetched with its result.
const SMALL: u64 = 10 << 10;

/// How many pieces of output are asked for before the first of them came.
const AHEAD: usize = 8;

/// Runs a command, or goes on with it, and returns when it has ended.
pub(super) async fn execute(line: &Arc<Line>, command: &GuestCommand) -> Result<CommandResult, GuestError> {
    match line.features().memory {
        true => execute_remembered(line, command).await,
        false => execute_plainly(line, command).await,
    }
}

async fn execute_remembered(line: &Arc<Line>, command: &GuestCommand) -> Result<CommandResult, GuestError> {
    let mut fields = json!({
        "command-line": command.line, "block-for-result": true, "key": command.key.to_string(),
    });
    if command.again.is_some() {
        fields["again"] = true.into();
    }
    let reply = line.ask("execute", fields).await?;
    let Some(return_code) = reply.return_code() else {
        return Err(match reply.text("reason") {
            Some("unknown") if command.again.is_some() && is_this_boot(line, command) => GuestError::Unknown,
            Some("unknown" | "lost") => restarted(),
            Some("cancelled") => GuestError::Refused("the command was cancelled".into()),
            _ => reply.failure().unwrap_or_else(no_result),
        });
    };
    let stdout = written(line, command.key, OutputName::Stdout, &reply).await?;
    let stderr = written(line, command.key, OutputName::Stderr, &reply).await?;
    Ok(CommandResult { return_code, stdout, stderr })
}

async fn execute_plainly(line: &Arc<Line>, command: &GuestCommand) -> Result<CommandResult, GuestError> {
    if command.again.is_some() {
        return Err(if is_this_boot(line, command) { GuestError::Forgetful } else { restarted() });
    }
    let _expected = (line.expect_long(), line.expect_silence());
    let fields = json!({ "command-line": command.line, "block-for-result": true });
    let mut reply = line.ask("execute", fields).await?;
    let Some(return_code) = reply.return_code() else {
        return Err(reply.failure().unwrap_or_else(no_result));
    };
    let mut here = |name| CommandOutput::Here(reply.take_text(name).unwrap_or_default().into_bytes().into());
    Ok(CommandResult { return_code, stdout: here("stdout"), stderr: here("stderr") })
}

fn is_this_boot(line: &Line, command: &GuestCommand) -> bool {
    line.known().boot.unwrap_or_default() == command.again.as_deref().unwrap_or_default()
}

fn restarted() -> GuestError {
    GuestError::Restarted("the guest or its agent was restarted while the command ran".into())
}

fn no_result() -> GuestError {
    GuestError::Refused("the guest did not say how the command ended".into())
}

/// What an ended command wrote to one of its outputs.
async fn written(
    line: &Arc<Line>,
    key: CommandKey,
    name: OutputName,
    reply: &Packet,
) -> Result<CommandOutput, GuestError> {
    let size = reply.whole(&format!("{name}-size")).unwrap_or_default();
    let cut = reply.flag(&format!("{name}-cut")) == Some(true);
    if size > SMALL || cut {
        return Ok(CommandOutput::There { size, cut });
    }
    let mut all = BytesMut::new();
    while (all.len() as u64) < size {
        let call = read_output(line, key, name, all.len() as u64);
        let Some(bytes) = piece(&call?.next().await?, all.len() as u64)? else { break };
        all.extend_from_slice(&bytes);
    }
    // It may have more than it said by now, but no more than a piece.
    all.truncate(usize::try_from(size).unwrap_or(usize::MAX));
    Ok(CommandOutput::Here(all.freeze()))
}

/// Asks for a piece.
fn read_output(line: &Arc<Line>, key: CommandKey, name: OutputName, offset: u64) -> Result<Call, GuestError> {
    let call = line.call("read-output", Flow::Once)?;
    let fields = json!({ "key": key.to_string(), "name": name, "offset": offset, "length": MAX_CHUNK_SIZE });
    line.say(&call.packet(fields));
    Ok(call)
}

/// The bytes that came; nothing at the end.
fn piece(reply: &Packet, offset: u64) -> Result<Option<Bytes>, GuestError> {
    if let Some(failure) = reply.failure() {
        return Err(failure);
    }
    let wrong =
        || GuestError::Refused("the guest sent another part of the output than it was asked for".into());
    if reply.whole("offset").is_some_and(|sent| sent != offset) {
        return Err(wrong());
    }
    match reply.chunk()?.ok_or_else(wrong)? {
        Chunk::Bytes(bytes) if bytes.len() > MAX_CHUNK_SIZE => Err(wrong()),
        Chunk::Bytes(bytes) if !bytes.is_empty() => Ok(Some(bytes)),
        Chunk::Bytes(_) | Chunk::End => Ok(None),
    }
}

/// What a command wrote, from its first byte.
pub(super) async fn output(
    line: &Arc<Line>,
    key: CommandKey,
    name: OutputName,
) -> Result<ByteStream, GuestError> {
    if !line.features().memory {
        return Err(GuestError::Forgetful);
    }
    let mut written =
        Written { line: line.clone(), key, name, asked: VecDeque::new(), next: 0, ended: false };
    // Whether there is anything is known before anybody begins to read.
    written.ask_ahead()?;
    let first = std::future::poll_fn(|context| written.poll_piece(context)).await?;
    Ok(Box::pin(Piece { first, written }))
}

/// CommandOutput on its way.
struct Written {
    line: Arc<Line>,
    key: CommandKey,
    name: OutputName,
    /// The pieces that are asked for, by where they begin.
    asked: VecDeque<(u64, Call)>,
    /// Where the next piece to ask for begins.
    next: u64,
    ended: bool,
}

/// The same with its first piece, which came already.
struct Piece {
    first: Option<Bytes>,
    written: Written,
}

impl Written {
    fn ask_ahead(&mut self) -> Result<(), GuestError> {
        while self.asked.len() < AHEAD && !self.ended {
            self.asked.push_back((self.next, read_output(&self.line, self.key, self.name, self.next)?));
            self.next += MAX_CHUNK_SIZE as u64;
        }
        Ok(())
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, GuestError>> {
        if let Err(error) = self.ask_ahead() {
            return Poll::Ready(Err(error));
        }
        let Some((offset, call)) = self.asked.front_mut() else { return Poll::Ready(Ok(None)) };
        let offset = *offset;
        let reply = ready!(call.poll_next(context));
        self.asked.pop_front();
        let bytes = reply.and_then(|reply| piece(&reply, offset));
        match &bytes {
            Ok(Some(bytes)) if bytes.len() < MAX_CHUNK_SIZE => {
                // What was asked for beyond it does not follow it.
                self.asked.clear();
                self.next = offset + bytes.len() as u64;
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => {
                self.ended = true;
                self.asked.clear();
            }
        }
        Poll::Ready(bytes)
    }
}

impl Stream for Piece {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.written.ended {
            return Poll::Ready(None);
        }
        self.written.poll_piece(context).map(|piece| piece.map_err(|error| stream_error(&error)).transpose())
    }
}
