//! `/instances`: serial console, screenshots and graphical consoles.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use muster_types::Error;
use muster_types::node::NodeApi;
use muster_types::vm::{CONSOLE_PROTOCOL, DISPLAY_PROTOCOL};
use serde::Deserialize;
use serde_json::Value;
use tokio::net::UnixStream;
use utoipa::IntoParams;

use crate::arguments::{Args, NoArgs};
use crate::authorized_stream::AuthorizedStream;
use crate::error::ApiResult;
use crate::forward::{InstanceNode, MaybeForwarded, OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::response::{Json, Null, content};
use crate::upgrade::RequestedUpgrade;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::console::{self, ProxyRecord};
use muster_control::objects::instance::{find, find_own, locate, not_placed, require_created};
use muster_control::objects::node_location::NodeLocation;
use muster_store::instances::InstanceRow;

const OCTET_STREAM: &str = "application/octet-stream";

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConsoleQuery {
    /// The number of bytes from the end; -1 for all, 10240 by default. Also accepted in the body.
    #[param(value_type = Option<i64>)]
    length: Option<Value>,
}

impl ConsoleQuery {
    fn length(&self) -> Result<Option<i64>, Error> {
        let invalid = || Error::Invalid("length is not an integer".into());
        match &self.length {
            None => Ok(None),
            Some(Value::String(text)) if text.is_empty() => Ok(None),
            Some(Value::String(text)) => text.trim().parse().map(Some).map_err(|_| invalid()),
            Some(Value::Number(number)) => number.as_i64().map(Some).ok_or_else(invalid),
            Some(_) => Err(invalid()),
        }
    }
}

/// Returns the last bytes of the serial console.
#[utoipa::path(get, path = "/instances/{instance_ref}/consoledata", tag = "instances",
    params(("instance_ref" = String, Path), ConsoleQuery), responses(
    (status = 200, description = "Bytes.", content_type = "application/octet-stream", body = Vec<u8>),
    (status = 400, description = "The length is not an integer."), (status = 404, description = "No such instance.")))]
pub(crate) async fn console_data(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    Args(query): Args<ConsoleQuery>,
) -> ApiResult<Response> {
    let length = query.length()?;
    let row = find(&*app.store, &caller, &reference, None).await?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => Ok(content(OCTET_STREAM, console::read(&node, &row, length).await?)),
        InstanceNode::Forwarded(response) => Ok(response),
        InstanceNode::Unplaced => Ok(content(OCTET_STREAM, Vec::new())),
    }
}

/// Deletes the recorded output of the serial console.
#[utoipa::path(delete, path = "/instances/{instance_ref}/consoledata", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 404, description = "No such instance.")))]
pub(crate) async fn clear_console_data(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Null>> {
    let row = find_own(&app, &caller, &reference, None).await?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => console::clear(&app, &caller, &node, &row).await?,
        InstanceNode::Forwarded(response) => return Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => {}
    }
    Ok(MaybeForwarded::Local(Null))
}

/// Takes a screenshot, stores it as a blob in PNG format and returns the UUID of the blob.
#[utoipa::path(get, path = "/instances/{instance_ref}/screenshot", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 200, description = "UUID of the blob."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance is not running, or has no screen.")))]
pub(crate) async fn screenshot(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Json<String>>> {
    let row = find_own(&app, &caller, &reference, None).await?;
    require_created(&row)?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            let blob = console::screenshot(&app, &caller, &node, &row).await?;
            Ok(MaybeForwarded::Local(Json(blob.to_string())))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(unplaced().into()),
    }
}

/// Opens a console: the connection changes from HTTP to another protocol. With `muster-console`, the server sends the
/// bytes of the serial console and the client the bytes that are typed. With `muster-display`, both send the bytes of VNC or
/// SPICE, whichever the display of the instance has; the display requires its password. The connection ends with the VM, with the key
/// and the browser session of the client, and after an hour without a byte. A serial console has at most eight such connections; all of them receive the output.
#[utoipa::path(get, path = "/instances/{instance_ref}/console", tag = "instances",
    params(("instance_ref" = String, Path),
        ("Upgrade" = String, Header, description = "The protocol to change to: `muster-console` or `muster-display`.", example = "muster-console")),
    responses((status = 101, description = "The connection now transfers the bytes of the console."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance is not running.")))]
pub(crate) async fn open(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    upgrade: RequestedUpgrade,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<Response> {
    let row = find_own(&app, &caller, &reference, None).await?;
    let is_display = upgrade.requests(DISPLAY_PROTOCOL);
    let upgrade = upgrade.require(if is_display { DISPLAY_PROTOCOL } else { CONSOLE_PROTOCOL })?;
    require_created(&row)?;
    match locate(&app, &row).await? {
        None => Err(unplaced().into()),
        Some(NodeLocation::Local(node)) => {
            let peer = connect(&app, &caller, &node, &row, is_display).await?;
            Ok(upgrade.relay(AuthorizedStream::new(peer, console::register(&app, &caller))))
        }
        Some(NodeLocation::Remote(node)) => {
            request.forward_upgrade(&app, &node, &caller, &row.namespace, upgrade).await
        }
    }
}

/// Connects to a console of an instance on a node of this daemon.
pub(super) async fn connect(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    is_display: bool,
) -> ApiResult<UnixStream> {
    let connection = if is_display {
        console::open_display(app, caller, node, row).await?
    } else {
        console::open(app, caller, node, row).await?
    };
    let opened = UnixStream::from_std(connection);
    Ok(opened.map_err(|error| Error::Internal(format!("failed to open the console: {error}")))?)
}

/// Returns a connection file for virt-viewer, which contains the password of the display. The password changes whenever
/// the instance is powered on.
#[utoipa::path(get, path = "/instances/{instance_ref}/vdiconsolehelper", tag = "instances",
    params(("instance_ref" = String, Path)), responses(
    (status = 200, description = "A file for virt-viewer.", content_type = "application/x-virt-viewer", body = String),
    (status = 404, description = "No such instance, it is not placed on a node yet, or the ports of consoles are closed."),
    (status = 409, description = "The instance is not running.")))]
pub(crate) async fn vdi_helper(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<Response> {
    let row = find_own(&app, &caller, &reference, None).await?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            let file = console::viewer_file(&app, &caller, &node, &row).await?;
            Ok(content("application/x-virt-viewer", file))
        }
        InstanceNode::Forwarded(response) => Ok(response),
        InstanceNode::Unplaced => Err(not_placed().into()),
    }
}

/// Returns a short-lived URL of the graphical console at the console proxy. Its token contains the password of the display.
#[utoipa::path(get, path = "/instances/{instance_ref}/vdiconsoleproxy", tag = "instances",
    params(("instance_ref" = String, Path)), responses(
    (status = 404, description = "No such instance, no console proxy is configured, or the ports of consoles are closed."),
    (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance has no SPICE console, or is not running."),
    (status = 500, description = "The key that signs console tokens is not configured.")))]
pub(crate) async fn vdi_proxy(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Json<ProxyRecord>>> {
    let row = find_own(&app, &caller, &reference, None).await?;
    let proxy = console::check_proxy(&app, &row)?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            let record = console::create_proxy_url(&app, &caller, &node, &row, &proxy).await?;
            Ok(MaybeForwarded::Local(Json(record)))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(not_placed().into()),
    }
}
