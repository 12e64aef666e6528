//! The serial console and the display of an instance.

use std::sync::Arc;

use bytes::Bytes;
use muster_types::event::Event;
use muster_types::event_message::EventMessage;
use muster_types::ids::BlobId;
use muster_types::node::NodeApi;
use muster_types::spec::Vdi;
use muster_types::storage::Draft;
use muster_types::time::now;
use muster_types::{Error, Result};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::{find_own, node_row, object, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::blob::{self, BlobSource};
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
    app.record(caller, Event::audit(object(row.id), "clear console request from REST API"));
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
    app.record(
        caller,
        Event::audit(object(row.id), "screenshot request from REST API").with("blob_uuid", blob.to_string()),
    );
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

/// Returns the file with which virt-viewer connects to the display.
pub async fn viewer_file(app: &App, caller: &Caller, reference: &str) -> Result<String> {
    let row = find_own(app, caller, reference, None).await?;
    let node = node_row(app, &row).await?;
    let ports = row.ports.ok_or_else(|| Error::NotFound("the instance has no console yet".into()))?;
    let kind = if row.spec.video.vdi == Vdi::Vnc { "vnc" } else { "spice" };
    let mut lines = vec![
        "[virt-viewer]".to_owned(),
        format!("type={kind}"),
        format!("host={}", node.identity.ip),
        format!("port={}", ports.vdi),
    ];
    if let (Some(port), Some(display)) = (ports.vdi_tls, &node.report.display) {
        lines.push(format!("tls-port={port}"));
        lines.push(format!("host-subject={}", display.subject));
    }
    lines.push("delete-this-file=1".to_owned());
    if let (Some(_), Some(display)) = (ports.vdi_tls, &node.report.display) {
        lines.push(format!("ca={}", display.authority.replace('\n', "\\n")));
    }
    app.record(caller, Event::audit(object(row.id), EventMessage::ViewerFileRequested));
    Ok(lines.join("\n") + "\n")
}

/// A short-lived URL of the display on the console proxy.
#[derive(Debug, Serialize, ToSchema)]
pub struct ProxyRecord {
    pub url: String,
    /// Unix time in seconds.
    pub expires_at: u64,
}

/// Returns a short-lived URL of the display on the console proxy.
pub async fn create_proxy_url(app: &App, caller: &Caller, reference: &str) -> Result<ProxyRecord> {
    let row = find_own(app, caller, reference, None).await?;
    let base = app.settings.kerbside_url.trim_end_matches('/');
    if base.is_empty() {
        return Err(Error::NotFound("kerbside integration is not configured".into()));
    }
    require_created(&row)?;
    if row.spec.video.vdi == Vdi::Vnc {
        return Err(Error::Conflict("instance does not have a SPICE console".into()));
    }
    let Some(signer) = &app.console_key else {
        return Err(Error::NotConfigured(
            "kerbside signing key is not configured, set KERBSIDE_SIGNING_KEY".into(),
        ));
    };
    let node = node_row(app, &row).await?;
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
        "host": node.identity.ip,
        "port": row.ports.map(|ports| ports.vdi),
        "tls_port": row.ports.and_then(|ports| ports.vdi_tls),
        "host_subject": node.report.display.map(|display| display.subject),
    });
    let token = signer.sign(&claims);
    app.record(
        caller,
        Event::audit(object(row.id), "vdi console token created")
            .with("jti", jti)
            .with("kid", signer.kid())
            .with("namespace", caller.namespace.clone())
            .with("expires_at", expires_at),
    );
    Ok(ProxyRecord { url: format!("{base}/sf-console.vv?token={token}"), expires_at })
}
