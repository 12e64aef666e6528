//! `/instances`: what only the daemon of an instance's node can do. Every daemon takes such a call, and hands it on.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, Uri};
use axum::response::Response;
use muster_types::Error;
use muster_types::node::NodeApi;
use serde::Deserialize;
use serde_json::Value;
use utoipa::IntoParams;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::peer::{self, Handed};
use crate::request::Incoming;
use crate::response::{nothing, ok, text};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::agent_operation;
use muster_control::objects::instance::console::{self, ProxyRecord};
use muster_control::objects::instance::power::{self, PowerAction};
use muster_control::objects::instance::{find, find_own, locate, require_created};
use muster_control::objects::node_location::NodeLocation;
use muster_store::instances::InstanceRow;

/// A call as it came, for the daemon that it is handed on to.
pub(crate) struct Call {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

impl FromRequestParts<Arc<App>> for Call {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Infallible> {
        let incoming = parts.extensions.get::<Incoming>();
        Ok(Self {
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers: parts.headers.clone(),
            body: incoming.map(|incoming| incoming.body.clone()).unwrap_or_default(),
        })
    }
}

/// Where a call is answered.
enum At {
    Here(Arc<dyn NodeApi>),
    Answered(Response),
    /// The instance has no place.
    Nowhere,
}

/// Finds the node of an instance; a call for the node of another daemon is answered by that.
async fn at(
    app: &App,
    caller: &Caller,
    row: &InstanceRow,
    call: &Call,
) -> Result<At, crate::error::ApiError> {
    match locate(app, row).await? {
        None => Ok(At::Nowhere),
        Some(NodeLocation::Local(node)) => Ok(At::Here(node)),
        Some(NodeLocation::Remote(node)) => {
            let handed = Handed {
                method: call.method.clone(),
                uri: &call.uri,
                headers: &call.headers,
                body: reqwest::Body::from(call.body.clone()),
            };
            peer::ask(app, &node, caller, handed).await.map(At::Answered)
        }
    }
}

async fn act(app: &App, caller: &Caller, reference: &str, call: &Call, action: PowerAction) -> ApiResult {
    let row = find_own(app, caller, reference, None).await?;
    require_created(&row)?;
    match at(app, caller, &row, call).await? {
        At::Here(node) => {
            power::apply(app, caller, &node, row.id, action).await?;
            Ok(nothing())
        }
        At::Answered(answer) => Ok(answer),
        At::Nowhere => Err(Error::Internal("a created instance has no place".into()).into()),
    }
}

macro_rules! power_call {
    ($name:ident, $path:literal, $action:expr, $about:literal) => {
        #[doc = $about]
        #[utoipa::path(post, path = $path, tag = "instances", params(("instance_ref" = String, Path)), responses(
            (status = 200, description = "`null`"), (status = 404, description = "no such instance"),
            (status = 406, description = "the instance is not ready"),
            (status = 409, description = "its power does not allow that")))]
        pub(crate) async fn $name(
            State(app): State<Arc<App>>,
            Authenticated(caller): Authenticated,
            Path(reference): Path<String>,
            call: Call,
            _: Args<Nothing>,
        ) -> ApiResult {
            act(&app, &caller, &reference, &call, $action).await
        }
    };
}

power_call!(
    reboot_soft,
    "/instances/{instance_ref}/rebootsoft",
    PowerAction::RebootSoft,
    "Ask the guest to restart. It may not do it."
);
power_call!(
    reboot_hard,
    "/instances/{instance_ref}/reboothard",
    PowerAction::RebootHard,
    "Press the reset switch."
);
power_call!(power_on, "/instances/{instance_ref}/poweron", PowerAction::On, "Switch an instance on.");
power_call!(
    power_off,
    "/instances/{instance_ref}/poweroff",
    PowerAction::Off,
    "Switch an instance off at once."
);
power_call!(
    pause,
    "/instances/{instance_ref}/pause",
    PowerAction::Pause,
    "Halt an instance, leaving it in memory."
);
power_call!(
    unpause,
    "/instances/{instance_ref}/unpause",
    PowerAction::Unpause,
    "Let a halted instance go on."
);

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConsoleQuery {
    /// How many bytes from the end; -1: all; absent: 10240. Also taken from the body.
    #[param(value_type = Option<i64>)]
    length: Option<Value>,
}

impl ConsoleQuery {
    fn length(&self) -> Result<Option<i64>, Error> {
        let bad = || Error::Invalid("length is not an integer".into());
        match &self.length {
            None => Ok(None),
            Some(Value::String(text)) if text.is_empty() => Ok(None),
            Some(Value::String(text)) => text.trim().parse().map(Some).map_err(|_| bad()),
            Some(Value::Number(number)) => number.as_i64().map(Some).ok_or_else(bad),
            Some(_) => Err(bad()),
        }
    }
}

/// The last bytes of the serial console.
#[utoipa::path(get, path = "/instances/{instance_ref}/consoledata", tag = "instances",
    params(("instance_ref" = String, Path), ConsoleQuery), responses(
    (status = 200, description = "bytes", content_type = "application/octet-stream", body = Vec<u8>),
    (status = 400, description = "the length is none"), (status = 404, description = "no such instance")))]
pub(crate) async fn console_data(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    call: Call,
    Args(query): Args<ConsoleQuery>,
) -> ApiResult {
    let length = query.length()?;
    let row = find(&*app.store, &caller, &reference, None).await?;
    match at(&app, &caller, &row, &call).await? {
        At::Here(node) => Ok(text("application/octet-stream", console::read(&node, &row, length).await?)),
        At::Answered(answer) => Ok(answer),
        At::Nowhere => Ok(text("application/octet-stream", Vec::new())),
    }
}

/// Forget what the serial console showed.
#[utoipa::path(delete, path = "/instances/{instance_ref}/consoledata", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 200, description = "`null`"),
    (status = 404, description = "no such instance")))]
pub(crate) async fn clear_console_data(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    call: Call,
    _: Args<Nothing>,
) -> ApiResult {
    let row = find_own(&app, &caller, &reference, None).await?;
    match at(&app, &caller, &row, &call).await? {
        At::Here(node) => console::clear(&app, &caller, &node, &row).await?,
        At::Answered(answer) => return Ok(answer),
        At::Nowhere => {}
    }
    Ok(nothing())
}

/// Keep what the screen shows as a blob, whose UUID is the answer. It is a PNG.
#[utoipa::path(get, path = "/instances/{instance_ref}/screenshot", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 200, description = "the blob", body = String),
    (status = 404, description = "no such instance"), (status = 406, description = "the instance is not ready"),
    (status = 409, description = "it is not on, or has no screen")))]
pub(crate) async fn screenshot(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    call: Call,
    _: Args<Nothing>,
) -> ApiResult {
    let row = find_own(&app, &caller, &reference, None).await?;
    require_created(&row)?;
    match at(&app, &caller, &row, &call).await? {
        At::Here(node) => Ok(ok(&console::screenshot(&app, &caller, &node, &row).await?)),
        At::Answered(answer) => Ok(answer),
        At::Nowhere => Err(Error::Internal("a created instance has no place".into()).into()),
    }
}

/// A file that tells a viewer where the screen is.
#[utoipa::path(get, path = "/instances/{instance_ref}/vdiconsolehelper", tag = "instances",
    params(("instance_ref" = String, Path)), responses(
    (status = 200, description = "a file for virt-viewer", content_type = "application/x-virt-viewer", body = String),
    (status = 404, description = "no such instance, or it has no place yet")))]
pub(crate) async fn vdi_helper(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(text("application/x-virt-viewer", console::viewer_file(&app, &caller, &reference).await?))
}

/// A short-lived address of the screen through the console proxy.
#[utoipa::path(get, path = "/instances/{instance_ref}/vdiconsoleproxy", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 200, body = ProxyRecord),
    (status = 404, description = "no such instance, or there is no console proxy"),
    (status = 406, description = "the instance is not ready"),
    (status = 409, description = "the instance has no SPICE console"),
    (status = 500, description = "no key signs the tokens")))]
pub(crate) async fn vdi_proxy(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&console::create_proxy_url(&app, &caller, &reference).await?))
}

/// What the guest of an instance says of itself: its distribution, mounts and SSH host keys.
#[utoipa::path(get, path = "/instances/{instance_ref}/agent/facts", tag = "instances",
    params(("instance_ref" = String, Path)), responses(
    (status = 200, description = "`distribution`, `mounts`, `ssh-host-keys`", body = Object),
    (status = 400, description = "the agent is not ready"), (status = 404, description = "no such instance"),
    (status = 406, description = "the instance is not ready"),
    (status = 503, description = "the agent does not answer")))]
pub(crate) async fn agent_facts(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    call: Call,
    _: Args<Nothing>,
) -> ApiResult {
    let row = find_own(&app, &caller, &reference, None).await?;
    require_created(&row)?;
    match at(&app, &caller, &row, &call).await? {
        At::Here(node) => {
            // A guest may say that it is there, and never answer.
            let most = Duration::from_secs(app.settings.api_async_wait);
            let facts = tokio::time::timeout(most, agent_operation::facts(&app, &node, &row)).await;
            let silent = |_| Error::Unavailable("the agent of the instance does not answer".into());
            Ok(ok(&facts.map_err(silent)??))
        }
        At::Answered(answer) => Ok(answer),
        At::Nowhere => Err(Error::Internal("a created instance has no place".into()).into()),
    }
}
