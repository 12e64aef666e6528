//! Commands and their output.

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

use super::connection::{Call, Connection, ReplyFlow};
use super::packet::{Chunk, NoResultReason, Packet};
use crate::guest::channel::stream_error;

/// The maximum size of output that is fetched together with the result of its command.
const MAX_INLINE_OUTPUT: u64 = 10 << 10;

/// The number of chunks of output that are requested ahead.
const READ_AHEAD: usize = 8;

/// Runs a command, or resumes it, and waits for it to exit.
pub(super) async fn execute(
    connection: &Arc<Connection>,
    command: &GuestCommand,
) -> Result<CommandResult, GuestError> {
    match connection.features().remembers_commands {
        true => execute_with_key(connection, command).await,
        false => execute_plain(connection, command).await,
    }
}

/// Runs a command on an agent that remembers commands by their key.
async fn execute_with_key(
    connection: &Arc<Connection>,
    command: &GuestCommand,
) -> Result<CommandResult, GuestError> {
    let mut fields = json!({
        "command-line": command.line, "block-for-result": true, "key": command.key.to_string(),
    });
    if command.sent_boot_id.is_some() {
        fields["again"] = true.into();
    }
    let reply = connection.request("execute", fields).await?;
    let Some(return_code) = reply.return_code() else {
        let resent_in_same_boot = command.sent_boot_id.is_some() && is_same_boot(connection, command);
        return Err(match reply.no_result_reason() {
            Some(NoResultReason::Unknown) if resent_in_same_boot => GuestError::UnknownCommand,
            Some(NoResultReason::Unknown | NoResultReason::Lost) => restarted(),
            Some(NoResultReason::Cancelled) => GuestError::Refused("the command was cancelled".into()),
            None => reply.failure().unwrap_or_else(no_result),
        });
    };
    let stdout = command_output(connection, command.key, OutputName::Stdout, &reply).await?;
    let stderr = command_output(connection, command.key, OutputName::Stderr, &reply).await?;
    Ok(CommandResult { return_code, stdout, stderr })
}

async fn execute_plain(
    connection: &Arc<Connection>,
    command: &GuestCommand,
) -> Result<CommandResult, GuestError> {
    if command.sent_boot_id.is_some() {
        let same_boot = is_same_boot(connection, command);
        return Err(if same_boot { GuestError::StatelessAgent } else { restarted() });
    }
    let _guards = (connection.allow_long_frames(), connection.allow_silence());
    let fields = json!({ "command-line": command.line, "block-for-result": true });
    let mut reply = connection.request("execute", fields).await?;
    let Some(return_code) = reply.return_code() else {
        return Err(reply.failure().unwrap_or_else(no_result));
    };
    // A missing output counts as empty.
    let mut inline =
        |name| CommandOutput::Inline(reply.take_text(name).unwrap_or_default().into_bytes().into());
    Ok(CommandResult { return_code, stdout: inline("stdout"), stderr: inline("stderr") })
}

/// Returns whether a command was sent during the current boot. An unknown boot ID is sent as the empty string.
fn is_same_boot(connection: &Connection, command: &GuestCommand) -> bool {
    connection.agent_info().boot_id.unwrap_or_default() == command.sent_boot_id.as_deref().unwrap_or_default()
}

fn restarted() -> GuestError {
    GuestError::Restarted("the guest or its agent was restarted while the command ran".into())
}

fn no_result() -> GuestError {
    GuestError::Refused("the guest's agent did not report the command's exit status".into())
}

/// Returns one output of a command that has exited, with its data if it is small.
async fn command_output(
    connection: &Arc<Connection>,
    key: CommandKey,
    name: OutputName,
    reply: &Packet,
) -> Result<CommandOutput, GuestError> {
    let size = reply.unsigned(&format!("{name}-size")).ok_or_else(|| {
        GuestError::Refused(format!("the guest's agent did not report the size of the command's {name}"))
    })?;
    let truncated = reply.boolean(&format!("{name}-cut")) == Some(true);
    if size > MAX_INLINE_OUTPUT || truncated {
        return Ok(CommandOutput::Stored { size, truncated });
    }
    let mut output = BytesMut::new();
    while (output.len() as u64) < size {
        let offset = output.len() as u64;
        let reply = request_output(connection, key, name, offset)?.next().await?;
        let Some(bytes) = output_chunk(&reply, offset)? else { break };
        output.extend_from_slice(&bytes);
    }
    // The last chunk may exceed the reported size.
    output.truncate(usize::try_from(size).expect("at most MAX_INLINE_OUTPUT"));
    Ok(CommandOutput::Inline(output.freeze()))
}

/// Requests a chunk of output.
fn request_output(
    connection: &Arc<Connection>,
    key: CommandKey,
    name: OutputName,
    offset: u64,
) -> Result<Call, GuestError> {
    let call = connection.call("read-output", ReplyFlow::Single)?;
    let fields = json!({ "key": key.to_string(), "name": name, "offset": offset, "length": MAX_CHUNK_SIZE });
    connection.send_now(&call.packet(fields));
    Ok(call)
}

/// Returns the chunk in a reply, or `None` at the end of the output.
fn output_chunk(reply: &Packet, offset: u64) -> Result<Option<Bytes>, GuestError> {
    if let Some(failure) = reply.failure() {
        return Err(failure);
    }
    let mismatch =
        || GuestError::Refused("the guest's agent sent a different part of the output than requested".into());
    if reply.unsigned("offset").is_some_and(|sent| sent != offset) {
        return Err(mismatch());
    }
    match reply.chunk()?.ok_or_else(mismatch)? {
        Chunk::Bytes(bytes) if bytes.len() > MAX_CHUNK_SIZE => Err(mismatch()),
        Chunk::Bytes(bytes) if !bytes.is_empty() => Ok(Some(bytes)),
        Chunk::Bytes(_) | Chunk::End => Ok(None),
    }
}

/// Streams the output of a command.
pub(super) async fn output(
    connection: &Arc<Connection>,
    key: CommandKey,
    name: OutputName,
) -> Result<ByteStream, GuestError> {
    if !connection.features().remembers_commands {
        return Err(GuestError::StatelessAgent);
    }
    let mut reader = OutputReader {
        connection: connection.clone(),
        key,
        name,
        requests: VecDeque::new(),
        next_offset: 0,
        ended: false,
    };
    // Waits for the first chunk so that a missing output fails this call and not the stream.
    reader.request_ahead()?;
    let first = std::future::poll_fn(|context| reader.poll_chunk(context)).await?;
    Ok(Box::pin(OutputStream { first, reader }))
}

/// Reads output with several requests in flight.
struct OutputReader {
    connection: Arc<Connection>,
    key: CommandKey,
    name: OutputName,
    /// The requests in flight with their offsets.
    requests: VecDeque<(u64, Call)>,
    next_offset: u64,
    ended: bool,
}

struct OutputStream {
    first: Option<Bytes>,
    reader: OutputReader,
}

impl OutputReader {
    fn request_ahead(&mut self) -> Result<(), GuestError> {
        while self.requests.len() < READ_AHEAD && !self.ended {
            let call = request_output(&self.connection, self.key, self.name, self.next_offset)?;
            self.requests.push_back((self.next_offset, call));
            self.next_offset += MAX_CHUNK_SIZE as u64;
        }
        Ok(())
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, GuestError>> {
        if let Err(error) = self.request_ahead() {
            return Poll::Ready(Err(error));
        }
        let Some((offset, call)) = self.requests.front_mut() else { return Poll::Ready(Ok(None)) };
        let offset = *offset;
        let reply = ready!(call.poll_next(context));
        self.requests.pop_front();
        let chunk = reply.and_then(|reply| output_chunk(&reply, offset));
        match &chunk {
            Ok(Some(bytes)) if bytes.len() < MAX_CHUNK_SIZE => {
                // After a short chunk the offsets of the other requests are wrong.
                self.requests.clear();
                self.next_offset = offset + bytes.len() as u64;
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => {
                self.ended = true;
                self.requests.clear();
            }
        }
        Poll::Ready(chunk)
    }
}

impl Stream for OutputStream {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.reader.ended {
            return Poll::Ready(None);
        }
        self.reader.poll_chunk(context).map(|chunk| chunk.map_err(|error| stream_error(&error)).transpose())
    }
}
