//! Prepares a restored database for its first daemon: nothing of the former cluster continues by itself. See
//! docs/decisions/0097.

use std::collections::HashSet;

use muster_types::ids::{InstanceId, NodeId};
use muster_types::key::random_alphanumeric;
use muster_types::operation::ErrorReport;
use muster_types::time::now;
use serde_json::Value as JsonValue;

use super::RestoredStore;
use crate::row::Read as _;
use crate::{Json, StoreError, Tx, params, to_json, transaction};

/// The reason of everything that a restoration ends.
const RESTORED: &str = "the cluster was restored from a backup";
/// The lock file of the nodes of the former cluster. Every data directory differs from it, so a host that returns is refused until
/// an operator decides: see `LockFileId::is_elsewhere`.
const LOST_LOCK_FILE: &str = "restored:0:0:none";

/// Ends everything that was in progress, and makes the nodes of the former cluster lost ones. Returns the new names of these
/// nodes.
pub async fn restart(restored: &RestoredStore) -> Result<Vec<String>, StoreError> {
    transaction!(restored.store, |tx| {
        let nodes = lose_nodes(tx).await?;
        end_operations(tx).await?;
        forget_hosts(tx).await?;
        replace_generations(tx).await?;
        recompute_ledgers(tx).await?;
        invalidate_tokens(tx).await?;
        Ok(nodes)
    })
    .map_err(|error| StoreError::Internal(format!("failed to prepare the restored database: {error}")))
}

/// Renames the nodes, so that hosts can join under their former names, and fences them. They are lost until an operator
/// evacuates or deletes them: without their fencing leases nothing assumes that their VMs have stopped.
async fn lose_nodes(tx: &mut Tx) -> Result<Vec<String>, StoreError> {
    let rows: Vec<(NodeId, String, String, Json<JsonValue>)> =
        tx.fetch("SELECT uuid, name, state, report FROM nodes ORDER BY name", &[]).await?;
    let mut names: HashSet<String> = rows.iter().map(|(_, name, ..)| name.clone()).collect();
    let mut lost = Vec::new();
    for (id, name, state, Json(mut report)) in rows {
        let new_name = lost_name(&name, &names);
        names.insert(new_name.clone());
        if let Some(fields) = report.as_object_mut() {
            for name in ["fencing_lease", "instance_fencing_lease", "api_url", "node_address"] {
                fields.remove(name);
            }
        }
        let sql = "UPDATE nodes SET name = ?, state = ?, report = ?, lock_file = ?, epoch = epoch + 1, \
                   version = version + 1 WHERE uuid = ?";
        let is_deleted = state == "deleted";
        let state = if is_deleted { "deleted" } else { "error" };
        tx.execute(sql, params![&new_name, state, to_json(&report)?, LOST_LOCK_FILE, id]).await?;
        if !is_deleted {
            lost.push(new_name);
        }
    }
    Ok(lost)
}

/// Returns the name of a lost node that no other node has.
fn lost_name(name: &str, names: &HashSet<String>) -> String {
    let short: String = name.chars().take(200).collect();
    let numbered = (2..).map(|number| format!("{short}-lost-{number}"));
    let mut candidates = [format!("{short}-lost")].into_iter().chain(numbered);
    candidates.find(|candidate| !names.contains(candidate)).expect("there are more numbers than nodes")
}

/// Ends unfinished operations. Periodic tasks repair their objects.
async fn end_operations(tx: &mut Tx) -> Result<(), StoreError> {
    let report = ErrorReport {
        code: "cluster.restored".to_owned(),
        message: RESTORED.to_owned(),
        details: serde_json::Map::new(),
    };
    let sql = "UPDATE operations SET state = 'abort', holder = '', lease_expires = 0.0, error_report = ?, updated = ?, \
               version = version + 1 WHERE state IN ('queued', 'executing')";
    tx.execute(sql, params![to_json(&report)?, now()]).await?;
    let unfinished = "state IN ('preflight', 'queued', 'executing')";
    let sql = format!(
        "DELETE FROM object_references WHERE source_type = 'agentoperation' AND source_id IN \
         (SELECT uuid FROM agent_operations WHERE {unfinished})"
    );
    tx.execute(&sql, &[]).await?;
    let sql = format!(
        "UPDATE agent_operations SET state = 'error', error_message = ?, sent_boot = NULL, updated = ?, \
         version = version + 1 WHERE {unfinished}"
    );
    tx.execute(&sql, params![RESTORED, now()]).await?;
    Ok(())
}

/// Removes what describes files, ports and transfers of the former hosts.
async fn forget_hosts(tx: &mut Tx) -> Result<(), StoreError> {
    // A node that has the file of a blob verifies and records it.
    for table in ["blob_locations", "uploads", "instance_migrations", "instance_replicas", "instance_ports"] {
        tx.execute(&format!("DELETE FROM {table}"), &[]).await?;
    }
    // Their content was not complete.
    tx.execute("DELETE FROM blobs WHERE state = 'initial'", &[]).await?;
    let sql = "UPDATE instances SET console_port = NULL, vdi_port = NULL, vdi_tls_port = NULL";
    tx.execute(sql, &[]).await?;
    let sql = "UPDATE instances SET power_state = 'unknown', power_state_since = ?, \
               agent_state = CASE WHEN agent_state IS NULL THEN NULL ELSE 'unknown' END WHERE state = 'created'";
    tx.execute(sql, params![now()]).await?;
    Ok(())
}

/// Gives instances a later generation than every VM of the former cluster has: also those that were placed after the backup,
/// or after an earlier restoration of it. The number of seconds since 1970 grows faster than a number of placements.
async fn replace_generations(tx: &mut Tx) -> Result<(), StoreError> {
    #[expect(clippy::cast_possible_truncation, reason = "seconds since 1970 are far below the limit")]
    let seconds = now() as i64;
    let rows: Vec<(InstanceId, i64, i64)> =
        tx.fetch("SELECT uuid, generation, reserved_generation FROM instances", &[]).await?;
    for (id, generation, reserved) in rows {
        let next = seconds.max(generation + 1).max(reserved + 1);
        let sql = "UPDATE instances SET generation = ?, reserved_generation = 0, version = version + 1 WHERE uuid = ?";
        tx.execute(sql, params![next, id]).await?;
    }
    Ok(())
}

/// Computes the committed capacity of the lost nodes from their instances, without migrations and replicas.
async fn recompute_ledgers(tx: &mut Tx) -> Result<(), StoreError> {
    let nodes: Vec<NodeId> = tx.fetch("SELECT node_uuid FROM node_claims", &[]).await?;
    for node in nodes {
        let sql = "SELECT COALESCE(CAST(SUM(claimed_cpus) AS SIGNED), 0), \
                   COALESCE(CAST(SUM(claimed_memory) AS SIGNED), 0), COALESCE(CAST(SUM(claimed_disk) AS SIGNED), 0) \
                   FROM instances WHERE node_uuid = ?";
        let (cpus, memory, disk): (i64, i64, i64) = tx.fetch_one(sql, params![node]).await?;
        let sql = "UPDATE node_claims SET cpus = ?, memory = ?, disk = ?, demand = 0.0, version = version + 1 \
                   WHERE node_uuid = ?";
        tx.execute(sql, params![cpus, memory, disk, node]).await?;
    }
    Ok(())
}

/// Makes tokens, browser sessions, tickets and invitations invalid. Secrets of keys stay valid.
async fn invalidate_tokens(tx: &mut Tx) -> Result<(), StoreError> {
    tx.execute("DELETE FROM tickets", &[]).await?;
    tx.execute("DELETE FROM cluster_values WHERE name LIKE 'NODE_INVITATION_%'", &[]).await?;
    let keys: Vec<String> = tx.fetch("SELECT uuid FROM namespace_keys", &[]).await?;
    for key in keys {
        let sql = "UPDATE namespace_keys SET nonce = ?, version = version + 1 WHERE uuid = ?";
        tx.execute(sql, params![random_alphanumeric(16), key]).await?;
    }
    Ok(())
}

/// An instance that a restore drill boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrillInstance {
    pub id: InstanceId,
    pub name: String,
    pub namespace: String,
}

/// The name of the lost node whose only instance a drill restores.
const DRILL_NODE: &str = "drill-source";

/// Moves one instance to a lost node of its own, so that only this one is evacuated, and permits to create it from its images.
/// Returns the instance, or `None` if no instance has the name or the id. Without one, it is the first whose agent answered.
pub async fn prepare_drill(
    restored: &RestoredStore,
    wanted: Option<&str>,
) -> Result<Option<(DrillInstance, String)>, StoreError> {
    transaction!(restored.store, |tx| {
        let sql = "SELECT uuid, name, namespace, node_uuid, spec FROM instances WHERE state = 'created' \
                   AND node_uuid IS NOT NULL ORDER BY CASE WHEN agent_state IS NULL THEN 1 ELSE 0 END, created";
        let rows: Vec<(InstanceId, String, String, (NodeId, String))> = tx.fetch(sql, &[]).await?;
        let is_wanted = |id: InstanceId, name: &str| {
            wanted.is_none_or(|wanted| wanted == name || wanted == id.to_string())
        };
        let found = rows.into_iter().find(|(id, name, ..)| is_wanted(*id, name));
        let Some((id, name, namespace, (source, spec))) = found else { return Ok(None) };
        let node = NodeId::new();
        let sql = "INSERT INTO nodes (uuid, name, ip, state, software, simulated, is_hypervisor, is_network_node, \
                   is_database_node, lastseen, report, created, updated, version, lock_file) \
                   SELECT ?, ?, ip, 'error', software, simulated, is_hypervisor, is_network_node, is_database_node, lastseen, \
                   report, created, updated, 1, lock_file FROM nodes WHERE uuid = ?";
        tx.execute(sql, params![node, DRILL_NODE, source]).await?;
        let mut spec: JsonValue = serde_json::from_str(&spec)
            .map_err(|error| StoreError::Internal(format!("specification of instance {id}: {error}")))?;
        spec["disposable"] = true.into();
        let sql = "UPDATE instances SET node_uuid = ?, spec = ?, power_wanted = 'on' WHERE uuid = ?";
        tx.execute(sql, params![node, to_json(&spec)?, id]).await?;
        tx.execute("UPDATE interfaces SET node_uuid = ? WHERE instance_uuid = ?", params![node, id]).await?;
        Ok(Some((DrillInstance { id, name, namespace }, DRILL_NODE.to_owned())))
    })
    .map_err(|error| StoreError::Internal(format!("failed to prepare the drill: {error}")))
}
