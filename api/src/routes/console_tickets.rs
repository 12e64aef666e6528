//! `/instances`: consoles for browsers, through WebSockets that a ticket opens.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::Response;
use muster_types::Error;
use muster_types::session::{ConsoleKind, ConsoleTicketRecord};
use muster_types::vm::{CONSOLE_PROTOCOL, DISPLAY_PROTOCOL};
use serde::Deserialize;
use utoipa::ToSchema;

use super::instance_console::connect;
use crate::arguments::{Args, NoArgs, required};
use crate::error::ApiResult;
use crate::forward::{InstanceNode, MaybeForwarded, OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::request::Incoming;
use crate::response::{Json, named_bodies};
use crate::websocket::TicketSocket;
use muster_control::app::App;
use muster_control::objects::instance::console_ticket::{self, ConsoleUse};
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
}

/// Creates a ticket for one connection to a console of the instance. It is valid for 30 seconds.
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
    let kind = required("kind", new.kind)?;
    let kind: ConsoleKind = kind.parse().map_err(|error| Error::Invalid(format!("kind: {error}")))?;
    let row = find_own(&app, &caller, &reference, None).await?;
    require_created(&row)?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            let record = console_ticket::create(&app, &caller, &node, &row, kind).await?;
            Ok(MaybeForwarded::Local(Json(record)))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(unplaced().into()),
    }
}

/// Opens a console with a ticket, as a WebSocket whose messages are parts of the stream of bytes.
///
/// The ticket is a subprotocol, so that it is not in the URL. Pages of other servers are refused. The connection ends with the
/// VM, after an hour without a byte, and when the client does not respond to pings. Displays require their password.
#[utoipa::path(get, path = "/instances/{instance_ref}/console-socket", tag = "instances",
    params(("instance_ref" = String, Path, description = "UUID of the instance."),
        ("Upgrade" = String, Header, description = "The protocol to change to.", example = "websocket"),
        ("Sec-WebSocket-Protocol" = String, Header, description = "The ticket.", example = "binary, muster-ticket.TICKET")),
    responses((status = 101, description = "The connection is a WebSocket."),
    (status = 400, description = "A header is missing or malformed."),
    (status = 401, description = "The ticket does not exist, was used, has expired, or is for another instance."),
    (status = 403, description = "The header `Origin` is that of another server."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance is not running."),
    (status = 503, description = "The console has too many connections, or a dependency is unavailable.")))]
pub(crate) async fn open(
    State(app): State<Arc<App>>,
    Extension(incoming): Extension<Incoming>,
    Path(reference): Path<String>,
    socket: TicketSocket,
    _: Args<NoArgs>,
) -> ApiResult<Response> {
    let used = console_ticket::redeem(&app, &socket.ticket, &reference, incoming.origin()).await?;
    let ConsoleUse { caller, instance, kind } = used;
    let is_display = kind != ConsoleKind::Serial;
    match locate(&app, &instance).await? {
        None => Err(unplaced().into()),
        Some(NodeLocation::Local(node)) => {
            Ok(socket.relay(connect(&app, &caller, &node, &instance, is_display).await?))
        }
        Some(NodeLocation::Remote(node)) => {
            let request = OriginalRequest::get(&format!("/instances/{}/console", instance.id))?;
            let protocol = if is_display { DISPLAY_PROTOCOL } else { CONSOLE_PROTOCOL };
            let peer = request.connect(&app, &node, &caller, &instance.namespace, protocol).await?;
            Ok(peer.map_or_else(|refusal| refusal, |peer| socket.relay(peer)))
        }
    }
}
