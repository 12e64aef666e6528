//! `/instances/{instance_ref}/agent/terminal`: interactive sessions in guests, over upgraded connections.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::Response;
use bytes::BytesMut;
use futures_util::StreamExt as _;
use muster_types::guest::{GuestTerminal, TerminalInput, TerminalOutput, TerminalOutputStream};
use muster_types::ids::InstanceId;
use muster_types::node::NodeApi;
use muster_types::terminal::{
    DEFAULT_TERMINAL_SIZE, KEEPALIVE_INTERVAL, SILENCE_TIMEOUT, TERMINAL_PROTOCOL, TerminalFrame,
    TerminalRequest, TerminalSize, take_frame,
};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream};
use utoipa::ToSchema;

use crate::arguments::{Args, required};
use crate::authorized_stream::SESSION_ENDED;
use crate::error::ApiResult;
use crate::forward::{OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::upgrade::RequestedUpgrade;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::agent_operation::terminal;
use muster_control::objects::instance;
use muster_control::objects::instance::console::register;
use muster_control::objects::node_location::NodeLocation;
use muster_store::instances::InstanceRow;

/// The terminal type if the client has none.
const DEFAULT_TERM: &str = "xterm";
const READ_SIZE: usize = 16 << 10;
/// How long a client may take to read the last frames.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A command that runs with a terminal.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"command_line": "bash", "term": "xterm-256color", "rows": 50, "columns": 132}))]
pub(crate) struct NewTerminal {
    /// A command line for the shell of the guest, such as `bash`.
    #[schema(value_type = String)]
    pub(super) command_line: Option<String>,
    /// The terminal type, such as `xterm-256color`; absent: `xterm`.
    pub(super) term: Option<String>,
    /// The height of the terminal in characters; absent: 24.
    pub(super) rows: Option<u16>,
    /// The width of the terminal in characters; absent: 80.
    pub(super) columns: Option<u16>,
}

impl NewTerminal {
    pub(super) fn request(self) -> muster_types::Result<TerminalRequest> {
        let size = TerminalSize {
            rows: self.rows.unwrap_or(DEFAULT_TERMINAL_SIZE.rows),
            columns: self.columns.unwrap_or(DEFAULT_TERMINAL_SIZE.columns),
        };
        let term = self.term.unwrap_or_else(|| DEFAULT_TERM.to_owned());
        Ok(TerminalRequest { command_line: required("command_line", self.command_line)?, term, size })
    }
}

/// Runs a command with a terminal in an instance, with input and output over this connection. The client sends the headers
/// `Connection: Upgrade` and `Upgrade: muster-terminal`. After the response both sides send frames: one byte for the type, the
/// length of the payload as two bytes (big endian), and the payload. Type 0 is data of the terminal, in both directions; type 1
/// a new size, rows and columns as two bytes each, from the client; type 2 the exit code as four bytes, and type 3 the reason of
/// a failure as text, from the server, which then closes the connection. Each side sends an empty frame of type 0 at least
/// every 20 seconds. The session ends with the connection, and with the key and the browser session of the client.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/terminal", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewTerminal, responses(
    (status = 101, description = "The connection now carries frames."),
    (status = 400, description = "A field is missing or malformed, the upgrade is not requested, or the agent is not ready."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The agent refuses, for example because it does not support terminals."),
    (status = 429, description = "Too many sessions are open."),
    (status = 503, description = "The agent does not respond.")))]
pub(crate) async fn open(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    upgrade: RequestedUpgrade,
    Args(new): Args<NewTerminal>,
) -> ApiResult<Response> {
    let terminal_request = new.request()?;
    terminal::check(&terminal_request)?;
    let row = instance::find_own(&app, &caller, &reference, None).await?;
    instance::require_created(&row)?;
    let upgrade = upgrade.require(TERMINAL_PROTOCOL)?;
    let node = match instance::locate(&app, &row).await?.ok_or_else(unplaced)? {
        NodeLocation::Local(node) => node,
        NodeLocation::Remote(node) => {
            return request.forward_upgrade(&app, &node, &caller, &row.namespace, upgrade).await;
        }
    };
    let (guest, session) = terminal::open(&app, &caller, &node, &row, &terminal_request).await?;
    let client = register(&app, &caller);
    Ok(upgrade.accept(async move |stream| {
        session.end(serve(stream, guest, client.ended()).await);
    }))
}

/// Runs a command with a terminal in an instance on a node of this daemon. Returns the connection that carries its frames.
pub(super) async fn start(
    app: &Arc<App>,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    request: &TerminalRequest,
) -> ApiResult<DuplexStream> {
    let (guest, session) = terminal::open(app, caller, node, row, request).await?;
    let (client, stream) = tokio::io::duplex(READ_SIZE);
    // The caller ends the connection when the client may not use it any longer.
    tokio::spawn(async move { session.end(serve(stream, guest, std::future::pending()).await) });
    Ok(client)
}

/// Returns the request with which the daemon of another node runs a command with a terminal.
pub(super) fn forwarded_terminal(
    instance: InstanceId,
    request: &TerminalRequest,
) -> muster_types::Result<OriginalRequest> {
    let TerminalRequest { command_line, term, size } = request;
    let body =
        json!({ "command_line": command_line, "term": term, "rows": size.rows, "columns": size.columns });
    OriginalRequest::post(&format!("/instances/{instance}/agent/terminal"), &body)
}

/// Relays data between a client and a guest until one of them or the session of the client ends. Returns the exit code, or the
/// reason why the command has none.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    guest: GuestTerminal,
    session_ended: impl Future<Output = ()>,
) -> Result<i32, String> {
    let (reader, mut writer) = tokio::io::split(Box::pin(stream));
    let result = tokio::select! {
        result = send_output(&mut writer, guest.output) => result,
        reason = receive_input(reader, guest.input) => Err(reason),
        () = session_ended => Err(SESSION_ENDED.to_owned()),
    };
    let last = match &result {
        Ok(code) => TerminalFrame::Exited(*code),
        Err(reason) => TerminalFrame::Failed(reason.clone()),
    };
    // The client may have left.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, async {
        let _ = write_frame(&mut writer, &last).await;
        let _ = writer.shutdown().await;
    })
    .await;
    result
}

async fn write_frame(writer: &mut (impl AsyncWrite + Unpin), frame: &TerminalFrame) -> Result<(), String> {
    let mut buffer = BytesMut::new();
    frame.encode(&mut buffer);
    writer.write_all(&buffer).await.map_err(|error| format!("the connection of the client broke: {error}"))
}

/// Sends the output of a guest. Returns the exit code of the command.
async fn send_output(
    writer: &mut (impl AsyncWrite + Unpin),
    mut output: TerminalOutputStream,
) -> Result<i32, String> {
    let interval = Duration::from_secs(KEEPALIVE_INTERVAL);
    loop {
        let frame = match tokio::time::timeout(interval, output.next()).await {
            Err(_) => TerminalFrame::keepalive(),
            Ok(None) => return Err("the guest's agent ended the session".into()),
            Ok(Some(Err(error))) => return Err(error.to_string()),
            Ok(Some(Ok(TerminalOutput::Exited(code)))) => return Ok(code),
            Ok(Some(Ok(TerminalOutput::Bytes(bytes)))) => TerminalFrame::Data(bytes),
        };
        write_frame(writer, &frame).await?;
    }
}

/// Passes the input of a client to a guest, until it ends. Returns the reason.
async fn receive_input(mut reader: impl AsyncRead + Unpin, mut input: Box<dyn TerminalInput>) -> String {
    let mut buffer = BytesMut::new();
    loop {
        loop {
            let passed = match take_frame(&mut buffer) {
                Ok(None) => break,
                Ok(Some(TerminalFrame::Data(bytes))) if bytes.is_empty() => Ok(()),
                Ok(Some(TerminalFrame::Data(bytes))) => input.send(bytes).await,
                Ok(Some(TerminalFrame::Resize(size))) => input.resize(size).await,
                Ok(Some(TerminalFrame::Exited(_) | TerminalFrame::Failed(_))) | Err(_) => {
                    return "the client sent an invalid frame".into();
                }
            };
            if passed.is_err() {
                // The output reports the same error with its reason.
                return std::future::pending().await;
            }
        }
        buffer.reserve(READ_SIZE);
        let silence = Duration::from_secs(SILENCE_TIMEOUT);
        match tokio::time::timeout(silence, reader.read_buf(&mut buffer)).await {
            Ok(Ok(count)) if count > 0 => {}
            Ok(_) => return "the client closed the connection".into(),
            Err(_) => return "the client does not respond".into(),
        }
    }
}
