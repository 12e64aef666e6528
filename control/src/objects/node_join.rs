//! Joins nodes of this daemon to the cluster, and rejects a second daemon of a node. See docs/decisions/0050.

use std::time::{Duration, UNIX_EPOCH};

use muster_store::membership::Member;
use muster_store::nodes::{self, NodeRow};
use muster_store::{StoreError, Tx, TxError, transaction};
use muster_types::event::Event;
use muster_types::node::{NodeIdentity, NodeReport, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::{Error, Result};

use crate::app::App;

/// How often a daemon checks whether another daemon of its node is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The result of one attempt to join.
enum JoinOutcome {
    Joined {
        epoch: i64,
        is_new: bool,
    },
    /// Another daemon checked in recently for the same node or address.
    Occupied(Box<NodeRow>),
}

/// Registers a node of this daemon when it starts, under the id that it had before, and starts a new epoch. If another
/// daemon may be running the node, waits until that one checks in, which is an error, or counts as missing.
pub async fn join(app: &App, identity: &NodeIdentity) -> Result<()> {
    let mut first_seen: Option<Box<NodeRow>> = None;
    let (epoch, is_new) = loop {
        let outcome = transaction!(app.store.unfenced(), |tx| { try_join(app, tx, identity).await })?;
        let rival = match outcome {
            JoinOutcome::Joined { epoch, is_new } => break (epoch, is_new),
            JoinOutcome::Occupied(rival) => rival,
        };
        match &first_seen {
            Some(first) if first.identity.id == rival.identity.id => {
                if rival.lastseen > first.lastseen {
                    return Err(occupied(identity, &rival));
                }
            }
            _ => {
                tracing::warn!(
                    node = identity.name,
                    rival = rival.identity.name,
                    api = rival.report.api_url,
                    "waiting to learn whether another daemon runs this node or uses its mesh address"
                );
                first_seen = Some(rival);
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    app.store.membership.join(Member { node: identity.id, epoch });
    if is_new {
        app.events.record(
            Event::audit(ObjectRef::new(ObjectType::Node, identity.id), "db record created")
                .with("name", identity.name.clone())
                .with("simulated", identity.simulated),
        );
    }
    Ok(())
}

async fn try_join(app: &App, tx: &mut Tx, identity: &NodeIdentity) -> Result<JoinOutcome, TxError> {
    let existing = nodes::get(&mut *tx, &NameOrId::Id(identity.id)).await?;
    if existing.as_ref().is_some_and(|row| row.state == NodeState::Deleted) {
        return Err(Error::Conflict(format!(
            "node {} was deleted from the cluster; its VMs were stopped and their files moved to lost+found in its \
             storage directory. Run `muster node adopt` on its data directory, and remove NODE_UUID from its settings, to \
             let it join as a new node",
            identity.name
        ))
        .into());
    }
    #[expect(clippy::cast_precision_loss, reason = "the limit is seconds")]
    let limit = app.settings.node_checkin_maximum as f64;
    let lock_file = app.lock_file.to_string();
    if let Some(rival) = nodes::rivals(&mut *tx, identity, &lock_file, limit).await?.into_iter().next() {
        return Ok(JoinOutcome::Occupied(Box::new(rival)));
    }
    // Its VMs may be running on the other host, also if its daemon is not.
    if let Some(row) = existing.as_ref().filter(|row| app.lock_file.is_elsewhere(&row.lock_file)) {
        return Err(copied(identity, row).into());
    }
    if let Some(other) = nodes::get(&mut *tx, &NameOrId::Name(identity.name.clone())).await?
        && other.identity.id != identity.id
    {
        if other.state != NodeState::Deleted {
            return Err(name_taken(identity, &other).into());
        }
        // A deleted node keeps its record but not its name.
        let name = format!("{} (deleted {})", other.identity.name, other.identity.id);
        nodes::set_identity(tx, &NodeIdentity { name, ..other.identity }).await?;
    }
    let written = if existing.is_some() {
        nodes::set_identity(tx, identity).await
    } else {
        nodes::insert(tx, identity).await
    };
    // Another daemon registers the same name concurrently; the next attempt finds its row.
    written.map_err(|error| match error {
        StoreError::Duplicate(reason) => StoreError::Conflict(reason),
        other => other,
    })?;
    if let Some(row) = existing
        .as_ref()
        .filter(|row| row.report.fencing_lease.or(row.report.instance_fencing_lease).is_some())
    {
        // Its VMs are not certainly fenced before this daemon has found a watchdog.
        let report = NodeReport { fencing_lease: None, instance_fencing_lease: None, ..row.report.clone() };
        nodes::set_report(tx, identity.id, &report).await?;
    }
    let epoch = nodes::begin_epoch(tx, identity.id, &lock_file, app.store.schema_version()).await?;
    Ok(JoinOutcome::Joined { epoch, is_new: existing.is_none() })
}

fn name_taken(identity: &NodeIdentity, other: &NodeRow) -> Error {
    Error::Conflict(format!(
        "a node named {} exists with another id ({}): two daemons cannot share a name (set NODE_NAME, or \
         --simulate-from for simulated nodes), and a reinstalled host needs NODE_UUID set to {}",
        identity.name,
        description(other),
        other.identity.id
    ))
}

fn occupied(identity: &NodeIdentity, rival: &NodeRow) -> Error {
    Error::Conflict(if rival.identity.id == identity.id {
        format!(
            "another daemon already runs node {} ({}): stop it first; if this data directory is a copy, run \
             `muster node adopt --data-dir DIR` and set another NODE_NAME to let this host join as a new node",
            rival.identity.name,
            description(rival)
        )
    } else {
        format!(
            "node {} already uses the mesh address {} ({}): set NODE_MESH_IP to an address that only this host has",
            rival.identity.name,
            identity.ip,
            description(rival)
        )
    })
}

fn copied(identity: &NodeIdentity, row: &NodeRow) -> Error {
    Error::Conflict(format!(
        "this data directory is a copy: node {} ran in another directory or on another host ({}), where its VMs may be \
         running. Run `muster node adopt --data-dir DIR` to let this host join as a new node or, if the other host is off and \
         will not return, `muster node adopt --moved --data-dir DIR`",
        identity.name,
        description(row)
    ))
}

/// Returns where the daemon of a node runs, and since when.
fn description(row: &NodeRow) -> String {
    let url = if row.report.api_url.is_empty() { "unknown address" } else { &row.report.api_url };
    let started = UNIX_EPOCH + Duration::from_secs_f64(row.started.max(0.0));
    format!("{url}, started {}", humantime::format_rfc3339_seconds(started))
}
