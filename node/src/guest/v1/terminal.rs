//! Interactive sessions.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_core::Stream;
use muster_agent::{MAX_CHUNK_SIZE, MAX_TERMINAL_INPUT};
use muster_types::guest::{GuestError, GuestFuture, GuestTerminal, TerminalInput, TerminalOutput};
use muster_types::terminal::{TerminalRequest, TerminalSize};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::connection::{Call, Connection, ReplyFlow};
use super::packet::{Chunk, Packet, encode_chunk};
use crate::guest::channel::terminals_unsupported;

/// The number of bytes that the agent may send ahead of the reader.
const OUTPUT_WINDOW: u64 = 128 << 10;

/// The number of bytes after which the reader's progress is acknowledged.
const ACKNOWLEDGE_EVERY: u64 = OUTPUT_WINDOW / 4;

pub(super) async fn open(
    connection: &Arc<Connection>,
    request: &TerminalRequest,
) -> Result<GuestTerminal, GuestError> {
    if !connection.features().terminals {
        return Err(terminals_unsupported());
    }
    let mut call = connection.call("terminal", ReplyFlow::Windowed)?;
    let fields = json!({
        "command-line": request.command_line, "term": request.term,
        "rows": request.size.rows, "columns": request.size.columns, "window": OUTPUT_WINDOW,
    });
    connection.send_permit().await?.send(&call.packet(fields));
    call.set_abandon_on_drop(true);
    if let Some(failure) = call.next().await?.failure() {
        call.set_abandon_on_drop(false);
        return Err(failure);
    }
    let (accepted, accepted_input) = watch::channel(0);
    let input = InputSender {
        connection: connection.clone(),
        unique: call.unique(),
        sent: 0,
        accepted: accepted_input,
    };
    let output = OutputReceiver { call, accepted, received: 0, acknowledged: 0, ended: false };
    Ok(GuestTerminal { input: Box::new(input), output: Box::pin(output) })
}

struct InputSender {
    connection: Arc<Connection>,
    unique: String,
    sent: u64,
    /// The number of bytes that the terminal has accepted. Closed when the session ends.
    accepted: watch::Receiver<u64>,
}

impl InputSender {
    async fn send_packet(&self, command: &str, mut fields: Value) -> Result<(), GuestError> {
        fields["command"] = command.into();
        fields["unique"] = self.unique.as_str().into();
        self.connection.send_permit().await?.send(&fields);
        Ok(())
    }

    async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), GuestError> {
        for chunk in bytes.chunks(MAX_CHUNK_SIZE / 4) {
            let sent = self.sent + chunk.len() as u64;
            let has_room = |accepted: &u64| sent.saturating_sub(*accepted) <= MAX_TERMINAL_INPUT as u64;
            let ended = |_| GuestError::Unreachable("the session has ended".into());
            self.accepted.wait_for(has_room).await.map_err(ended)?;
            self.sent = sent;
            self.send_packet("terminal-input", json!({ "encoding": "base64", "chunk": encode_chunk(chunk) }))
                .await?;
        }
        Ok(())
    }
}

impl TerminalInput for InputSender {
    fn send(&mut self, bytes: Bytes) -> GuestFuture<'_, ()> {
        Box::pin(async move { self.send_bytes(&bytes).await })
    }

    fn resize(&mut self, size: TerminalSize) -> GuestFuture<'_, ()> {
        let fields = json!({ "rows": size.rows, "columns": size.columns });
        Box::pin(async move { self.send_packet("terminal-resize", fields).await })
    }
}

struct OutputReceiver {
    call: Call,
    accepted: watch::Sender<u64>,
    received: u64,
    acknowledged: u64,
    ended: bool,
}

impl OutputReceiver {
    /// Returns the output in a packet, or `None` if it has none.
    fn take_output(&mut self, packet: &Packet) -> Result<Option<TerminalOutput>, GuestError> {
        if let Some(failure) = packet.failure() {
            self.call.set_abandon_on_drop(false);
            return Err(failure);
        }
        if let Some(code) = packet.return_code() {
            self.ended = true;
            self.call.set_abandon_on_drop(false);
            return Ok(Some(TerminalOutput::Exited(code)));
        }
        if let Some(accepted) = packet.unsigned("accepted") {
            self.accepted.send_replace(accepted);
        }
        let Some(Chunk::Bytes(bytes)) = packet.chunk()? else { return Ok(None) };
        if packet.unsigned("offset") != Some(self.received) {
            return Err(GuestError::Refused("the guest's agent lost a part of the output".into()));
        }
        self.received += bytes.len() as u64;
        Ok((!bytes.is_empty()).then_some(TerminalOutput::Bytes(bytes)))
    }

    /// Moves the window after the reader consumed the received data.
    fn acknowledge(&mut self) {
        if self.received - self.acknowledged >= ACKNOWLEDGE_EVERY {
            self.acknowledged = self.received;
            let unique = self.call.unique();
            let more = json!({ "command": "terminal-more", "unique": unique, "offset": self.received });
            self.call.connection().send_now(&more);
        }
    }
}

impl Stream for OutputReceiver {
    type Item = Result<TerminalOutput, GuestError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // A reader that polls has consumed all earlier output.
        self.acknowledge();
        while !self.ended {
            let output = match ready!(self.call.poll_next(context)) {
                Ok(packet) => self.take_output(&packet),
                Err(error) => Err(error),
            };
            self.ended |= output.is_err();
            if let Some(output) = output.transpose() {
                return Poll::Ready(Some(output));
            }
        }
        Poll::Ready(None)
    }
}
