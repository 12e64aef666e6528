//! The serial console and the display of an instance.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use bytes::Bytes;
use muster_types::event::Event;
use muster_types::event_message::EventMessage;
use muster_types::ids::BlobId;
use muster_types::key::Secret;
use muster_types::node::NodeApi;
use muster_types::spec::Vdi;
use muster_types::storage::Draft;
use muster_types::time::now;
use muster_types::vm::ConsoleConnection;
use muster_types::{Error, Result};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::{node_row, object, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::auth::console_key::ConsoleKey;
use crate::objects::audit::with_caller;
use crate::objects::blob::{self, BlobSource};
use crate::state::ConsoleSession;
use muster_store::instances::InstanceRow;
use muster_store::transaction;

/// The number of bytes of the console that are returned by default.
const DEFAULT_LENGTH: i64 = 10240;

/// Returns the last bytes of the serial console. Call it on the daemon of the instance's node.
pub async fn read(node: &Arc<dyn NodeApi>, row: &InstanceRow, length: Option<i64>) -> Result<Bytes> {
    let length = match length {
        None | Some(0) => Some(DEFAULT_LENGTH),
        Some(-1) => None,
        Some(length) if length < 0 => {
            return Err(Error::Invalid("length: Must be greater than or equal to -1.".into()));
        }
        Some(length) => Some(length),
    };
    let max_bytes = length.and_then(|length| u64::try_from(length).ok());
    match node.vms().console(row.id, max_bytes).await {
        // The console has no output yet, or the VM is deleted.
        Err(Error::NotFound(_)) => Ok(Bytes::new()),
        output => output,
    }
}

/// Clears the output of the serial console. Call it on the daemon of the instance's node.
pub async fn clear(app: &App, caller: &Caller, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    node.vms().clear_console(row.id).await?;
    let event = Event::audit(object(row.id), "clear console request from REST API");
    app.record(caller, with_caller(caller, event));
    Ok(())
}

/// Stores a screenshot as a blob. Call it on the daemon of the instance's node.
pub async fn screenshot(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
) -> Result<BlobId> {
    require_created(row)?;
    let id = BlobId::new();
    let draft = Draft::Vm(id);
    let _in_progress = app.drafts_in_progress.begin(node.identity().id, id);
    {
        let _lock = app.instance_locks.lock(row.id).await;
        node.vms().screenshot(row.id, draft).await?;
    }
    let stored = store_draft(app, node, &row.namespace, draft).await;
    node.storage().remove_draft(draft).await?;
    let blob = stored?;
    let event = Event::audit(object(row.id), "screenshot request from REST API");
    app.record(caller, with_caller(caller, event).with("blob_uuid", blob.to_string()));
    Ok(blob)
}

async fn store_draft(app: &App, node: &Arc<dyn NodeApi>, namespace: &str, draft: Draft) -> Result<BlobId> {
    let source = BlobSource { draft, namespace: namespace.to_owned(), is_image: false, modified: None };
    let prepared = blob::prepare(app, node, &source).await?;
    match transaction!(app.store, |tx| { blob::commit_in(tx, &prepared).await }) {
        Ok(committed) => {
            blob::finish_commit(app, &prepared, committed).await;
            Ok(committed)
        }
        Err(error) => {
            blob::discard(app, &prepared).await;
            Err(error)
        }
    }
}

/// Opens a session with the serial console. Call it on the daemon of the instance's node.
pub async fn open(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
) -> Result<UnixStream> {
    let session = node.vms().open_console(row.id).await?;
    let event = Event::audit(object(row.id), "console request from REST API");
    app.record(caller, with_caller(caller, event).with("source", caller.remote.clone()));
    Ok(session)
}

/// Opens a connection to the display. Call it on the daemon of the instance's node.
pub async fn open_display(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
) -> Result<UnixStream> {
    let connection = node.vms().open_display(row.id).await?;
    let event = Event::audit(object(row.id), "display request from REST API");
    app.record(caller, with_caller(caller, event).with("source", caller.remote.clone()));
    Ok(connection)
}

/// Registers a connection to a console that a caller opens.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "Unix time is small")]
pub fn register(app: &App, caller: &Caller) -> ConsoleSession {
    let key = (caller.namespace.clone(), caller.key_name.clone());
    app.console_sessions.open(key, caller.nonce.clone(), caller.session_end().map(|end| end as f64))
}

/// Records a connection to the port of a serial console.
pub(crate) fn record_connection(app: &App, connection: ConsoleConnection) {
    let mut event = Event::audit(object(connection.vm), "connection to the port of the serial console")
        .with("source", connection.source.ip().to_string());
    if connection.unreported > 0 {
        event = event.with("earlier_connections_not_recorded", connection.unreported);
    }
    app.events.record_if_room(event);
}

fn require_open_ports(app: &App) -> Result<()> {
    if app.settings.console_ports {
        return Ok(());
    }
    Err(Error::NotFound(
        "the ports of displays are closed on this cluster: set CONSOLE_PORTS to open them".into(),
    ))
}

/// Returns the password of the display; `None` if the VM was started by a release without passwords.
pub(super) async fn display_password(node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<Option<Secret>> {
    match node.vms().display_password(row.id).await {
        Err(Error::Conflict(_) | Error::NotFound(_)) => {
            Err(Error::Conflict("the instance is off and has no display: power it on first".into()))
        }
        password => password,
    }
}

/// Returns the file with which virt-viewer connects to the display. Call it on the daemon of the instance's node.
pub async fn viewer_file(
    app: &App,
    caller: &Caller,
    vm_node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
) -> Result<String> {
    require_open_ports(app)?;
    let node = node_row(app, row).await?;
    let ports = row.ports.ok_or_else(|| Error::NotFound("the instance has no console yet".into()))?;
    let kind = if row.spec.video.vdi == Vdi::Vnc { "vnc" } else { "spice" };
    let mut lines = vec![
        "[virt-viewer]".to_owned(),
        format!("type={kind}"),
        format!("host={}", node.report.console_address.unwrap_or(node.identity.ip)),
        format!("port={}", ports.vdi),
    ];
    if let (Some(port), Some(display)) = (ports.vdi_tls, &node.report.display) {
        lines.push(format!("tls-port={port}"));
        lines.push(format!("host-subject={}", display.subject));
    }
    if let Some(password) = display_password(vm_node, row).await? {
        lines.push(format!("password={}", password.expose()));
    }
    lines.push("delete-this-file=1".to_owned());
    if let (Some(_), Some(display)) = (ports.vdi_tls, &node.report.display) {
        lines.push(format!("ca={}", display.authority.replace('\n', "\\n")));
    }
    let event = Event::audit(object(row.id), EventMessage::ViewerFileRequested);
    app.record(caller, with_caller(caller, event));
    Ok(lines.join("\n") + "\n")
}

/// A short-lived URL of the display on the console proxy.
#[derive(Debug, Serialize, ToSchema)]
pub struct ProxyRecord {
    /// The URL of the graphical console.
    pub url: String,
    /// Unix time in seconds.
    pub expires_at: u64,
}

/// The console proxy and the key that signs its tokens.
#[derive(Debug)]
pub struct ConsoleProxy<'a> {
    url: &'a str,
    key: &'a ConsoleKey,
}

/// Returns the console proxy, or an error if the display of the instance cannot be used through one.
pub fn check_proxy<'a>(app: &'a App, row: &InstanceRow) -> Result<ConsoleProxy<'a>> {
    let base = app.settings.kerbside_url.trim_end_matches('/');
    if base.is_empty() {
        return Err(Error::NotFound("kerbside integration is not configured".into()));
    }
    require_created(row)?;
    if row.spec.video.vdi == Vdi::Vnc {
        return Err(Error::Conflict("instance does not have a SPICE console".into()));
    }
    let Some(key) = &app.console_key else {
        return Err(Error::NotConfigured(
            "kerbside signing key is not configured, set KERBSIDE_SIGNING_KEY".into(),
        ));
    };
    require_open_ports(app)?;
    Ok(ConsoleProxy { url: base, key })
}

/// Returns a short-lived URL of the display on the console proxy. Call it on the daemon of the instance's node.
pub async fn create_proxy_url(
    app: &App,
    caller: &Caller,
    vm_node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    proxy: &ConsoleProxy<'_>,
) -> Result<ProxyRecord> {
    let ConsoleProxy { url: base, key: signer } = proxy;
    let node = node_row(app, row).await?;
    let password = display_password(vm_node, row).await?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole seconds of Unix time")]
    let issued_at = now() as u64;
    let expires_at = issued_at + app.settings.kerbside_token_duration;
    let jti = uuid::Uuid::new_v4().to_string();
    let claims = json!({
        "iss": app.settings.zone,
        "aud": base,
        "sub": row.id,
        "iat": issued_at,
        "nbf": issued_at,
        "exp": expires_at,
        "jti": jti,
        "instance_uuid": row.id,
        "instance_name": row.name,
        "namespace": row.namespace,
        "node": node.identity.name,
        "host": node.report.console_address.unwrap_or(node.identity.ip),
        "port": row.ports.map(|ports| ports.vdi),
        "tls_port": row.ports.and_then(|ports| ports.vdi_tls),
        "host_subject": node.report.display.map(|display| display.subject),
        "password": password.as_ref().map(Secret::expose),
    });
    let token = signer.sign(&claims);
    let event = Event::audit(object(row.id), "vdi console token created")
        .with("jti", jti)
        .with("kid", signer.kid())
        .with("namespace", caller.namespace.clone())
        .with("expires_at", expires_at);
    app.record(caller, with_caller(caller, event));
    Ok(ProxyRecord { url: format!("{base}/sf-console.vv?token={token}"), expires_at })
}
