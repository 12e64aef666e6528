//! `/instances`: consoles and commands with a terminal through WebSockets, which a ticket opens.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::Response;
use muster_types::Error;
use muster_types::session::{ConsoleKind, ConsoleTicketRecord};
use muster_types::terminal::TERMINAL_PROTOCOL;
use muster_types::vm::{CONSOLE_PROTOCOL, DISPLAY_PROTOCOL};
use serde::Deserialize;
use utoipa::ToSchema;

use super::agent_terminal::{NewTerminal, forwarded_terminal, start};
use super::instance_console::connect;
use crate::arguments::{Args, NoArgs, required};
use crate::authorized_stream::AuthorizedStream;
use crate::error::ApiResult;
use crate::forward::{InstanceNode, MaybeForwarded, OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::incoming::Incoming;
use crate::response::{Json, named_bodies};
use crate::websocket::TicketSocket;
use muster_control::app::App;
use muster_control::objects::instance::console::register;
use muster_control::objects::instance::console_ticket::{self, ConsoleUse, RequestedConsole};
use muster_control::objects::instance::{find_own, locate, require_created};
use muster_control::objects::node_location::NodeLocation;

named_bodies!(ConsoleTicketRecord);

/// A ticket to create.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"kind": "serial"}))]
pub(crate) struct NewConsoleTicket {
    /// The console to connect to.
    #[schema(value_type = ConsoleKind)]
    kind: Option<String>,
    /// The command of a terminal: a command line for the shell of the guest. Required for `terminal`, and only for it.
    command_line: Option<String>,
    /// The type of the terminal, such as `xterm-256color`; absent: `xterm`.
    term: Option<String>,
    /// The height of the terminal in characters; absent: 24.
    rows: Option<u16>,
    /// The width of the terminal in characters; absent: 80.
    columns: Option<u16>,
}

impl NewConsoleTicket {
    fn console(self) -> Result<RequestedConsole, Error> {
        let kind = required("kind", self.kind)?;
        let kind: ConsoleKind = kind.parse().map_err(|error| Error::Invalid(format!("kind: {error}")))?;
        let new = NewTerminal {
            command_line: self.command_line,
            term: self.term,
            rows: self.rows,
            columns: self.columns,
        };
        let terminal = match kind {
            ConsoleKind::Terminal => Some(new.request()?),
            ConsoleKind::Vnc | ConsoleKind::Spice | ConsoleKind::Serial if new.command_line.is_some() => {
                return Err(Error::Invalid("command_line: only a terminal runs a command".into()));
            }
            ConsoleKind::Vnc | ConsoleKind::Spice | ConsoleKind::Serial => None,
        };
        Ok(RequestedConsole { kind, terminal })
    }
}

/// Creates a ticket for one connection to a console of the instance. It is valid for 30 seconds.
///
/// A ticket for a `terminal` also needs the scope `instance.execute`. The command runs when the connection is opened.
#[utoipa::path(post, path = "/instances/{instance_ref}/console-tickets", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewConsoleTicket, responses(
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance is not running, or its display is of another kind."),
    (status = 429, description = "The key has too many unused tickets; retry after the given time.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    Args(new): Args<NewConsoleTicket>,
) -> ApiResult<MaybeForwarded<Json<ConsoleTicketRecord>>> {
    let console = new.console()?;
    let row = find_own(&app, &caller, &reference, None).await?;
    require_created(&row)?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            let record = console_ticket::create(&app, &caller, &node, &row, console).await?;
            Ok(MaybeForwarded::Local(Json(record)))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(unplaced().into()),
    }
}

/// Opens a console with a ticket, as a WebSocket whose messages are parts of the stream of bytes.
///
/// The ticket is a subprotocol, so that it is not in the URL. Pages of other servers are refused. The connection ends with the
/// VM, with the key and the browser session that have created the ticket, after an hour without a byte, and when the client does not respond to pings. Displays require their password. The stream
/// of a terminal consists of the frames of `POST /instances/{instance_ref}/agent/terminal`.
#[utoipa::path(get, path = "/instances/{instance_ref}/console-socket", tag = "instances",
    params(("instance_ref" = String, Path, description = "UUID of the instance."),
        ("Upgrade" = String, Header, description = "The protocol to change to.", example = "websocket"),
        ("Sec-WebSocket-Protocol" = String, Header, description = "The ticket.", example = "binary, muster-ticket.TICKET")),
    responses((status = 101, description = "The connection is a WebSocket."),
    (status = 400, description = "A header is missing or malformed."),
    (status = 401, description = "The ticket does not exist, was used, has expired, or is for another instance."),
    (status = 403, description = "The header `Origin` is that of another server."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance is not running, or its agent refuses the command."),
    (status = 429, description = "Too many sessions are open."),
    (status = 503, description = "The console has too many connections, or a dependency is unavailable.")))]
pub(crate) async fn open(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Path(reference): Path<String>,
    socket: TicketSocket,
    _: Args<NoArgs>,
) -> ApiResult<Response> {
    let used = console_ticket::redeem(&app, &socket.ticket, &reference, incoming.origin()).await?;
    let ConsoleUse { caller, instance, console } = used;
    let is_display = matches!(console.kind, ConsoleKind::Vnc | ConsoleKind::Spice);
    let session = register(&app, &caller);
    match locate(&app, &instance).await?.ok_or_else(unplaced)? {
        NodeLocation::Local(node) => Ok(match console.terminal {
            Some(terminal) => {
                let peer = start(&app, &caller, &node, &instance, &terminal).await?;
                socket.relay(AuthorizedStream::new(peer, session))
            }
            None => {
                let peer = connect(&app, &caller, &node, &instance, is_display).await?;
                socket.relay(AuthorizedStream::new(peer, session))
            }
        }),
        NodeLocation::Remote(node) => {
            let (request, protocol) = match &console.terminal {
                Some(terminal) => (forwarded_terminal(instance.id, terminal)?, TERMINAL_PROTOCOL),
                None => {
                    let request = OriginalRequest::get(&format!("/instances/{}/console", instance.id))?;
                    (request, if is_display { DISPLAY_PROTOCOL } else { CONSOLE_PROTOCOL })
                }
            };
            let peer = request.connect(&app, &node, &caller, &instance.namespace, protocol).await?;
            let relay = |peer| socket.relay(AuthorizedStream::new(peer, session));
            Ok(peer.map_or_else(|refusal| refusal, relay))
        }
    }
}
