//! Rows of replicas: copies of the disks of instances on other nodes. See docs/decisions/0074.

#[cfg(test)]
mod tests;

use muster_types::ids::{InstanceId, NodeId};
use muster_types::replica::ReplicaState;
use muster_types::time::now;

use super::instances::InstanceRow;
use super::{Read, Select as _, StoreError, Tx, Union, Value, columns, params, placeholders};

#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaRow {
    pub instance: InstanceId,
    pub node: NodeId,
    pub state: ReplicaState,
    /// The disk space that is reserved on the node.
    pub reserved_disk_gb: i64,
    /// The generation of the VM that the last complete copy was taken of.
    pub generation: i64,
    /// The time that the last complete copy dates from, by the clock of the database.
    pub last_complete: Option<f64>,
    /// The bytes that the guest had written since then when it was last measured, if that is known.
    pub bytes_behind: Option<i64>,
    /// Why the last copy failed.
    pub error: Option<String>,
}

columns! { ReplicaRow {
    instance: instance_uuid,
    node: node_uuid,
    state,
    reserved_disk_gb: claimed_disk,
    generation,
    last_complete,
    bytes_behind,
    error,
} }

/// Returns the replicas of an instance.
pub async fn of_instance(mut db: impl Read, instance: InstanceId) -> Result<Vec<ReplicaRow>, StoreError> {
    let tail = "FROM instance_replicas WHERE instance_uuid = ? ORDER BY node_uuid";
    db.select(tail, params![instance]).await
}

/// Returns the created instances with replicas on some nodes, and the replicas of all instances on those nodes with the ones that
/// those nodes remove.
pub async fn of_nodes(
    db: impl Read,
    nodes: &[NodeId],
) -> Result<(Vec<InstanceRow>, Vec<ReplicaRow>), StoreError> {
    let list = placeholders(nodes.len());
    let values = || nodes.iter().map(|node| Value::from(*node));
    let mut union = Union::default();
    let tail = format!(
        "FROM instances WHERE node_uuid IN ({list}) AND state = 'created' AND spec LIKE '%\"replicas\":1%'"
    );
    let instances = union.add(InstanceRow::COLUMNS, tail, &values().collect::<Vec<_>>());
    let tail = format!(
        "FROM instance_replicas WHERE (state = 'deleting' AND node_uuid IN ({list})) \
         OR instance_uuid IN (SELECT uuid FROM instances WHERE node_uuid IN ({list}))"
    );
    let replicas = union.add(ReplicaRow::COLUMNS, tail, &values().chain(values()).collect::<Vec<_>>());
    let mut rows = union.fetch(db).await?;
    let mut instances: Vec<InstanceRow> = rows.take(instances)?;
    instances.sort_by_key(|row| row.id);
    let mut replicas: Vec<ReplicaRow> = rows.take(replicas)?;
    replicas.sort_by_key(|row| (row.instance, row.node));
    Ok((instances, replicas))
}

/// Inserts a replica without a copy. Returns `false` if the node has one of the instance, or has not removed an earlier one.
pub async fn insert(tx: &mut Tx, new: &ReplicaRow) -> Result<bool, StoreError> {
    let sql = "INSERT INTO instance_replicas (instance_uuid, node_uuid, state, claimed_disk, generation, created) \
               VALUES (?, ?, ?, ?, ?, ?)";
    let values = params![new.instance, new.node, new.state, new.reserved_disk_gb, new.generation, now()];
    match tx.execute(sql, values).await {
        Err(StoreError::Duplicate(_)) => Ok(false),
        inserted => inserted.map(|_| true),
    }
}

/// Records a complete copy. Returns `false` if the replica receives no copies any longer, or has a later one.
pub async fn set_complete(
    tx: &mut Tx,
    replica: &ReplicaRow,
    generation: i64,
    time: f64,
    bytes_behind: Option<i64>,
) -> Result<bool, StoreError> {
    let sql = "UPDATE instance_replicas SET state = 'complete', generation = ?, last_complete = ?, bytes_behind = ?, error = NULL \
               WHERE instance_uuid = ? AND node_uuid = ? AND state IN ('initial', 'complete') \
               AND (last_complete IS NULL OR last_complete < ?)";
    let values = params![generation, time, bytes_behind, replica.instance, replica.node, time];
    Ok(tx.execute(sql, values).await? == 1)
}

/// Records how much the guest has written since the copy that a replica has.
pub async fn set_bytes_behind(
    tx: &mut Tx,
    replica: &ReplicaRow,
    bytes_behind: Option<i64>,
) -> Result<(), StoreError> {
    // A later copy has another value.
    let sql = "UPDATE instance_replicas SET bytes_behind = ? WHERE instance_uuid = ? AND node_uuid = ? AND last_complete = ?";
    tx.execute(sql, params![bytes_behind, replica.instance, replica.node, replica.last_complete]).await?;
    Ok(())
}

/// Records why a copy failed.
pub async fn set_error(tx: &mut Tx, replica: &ReplicaRow, error: &str) -> Result<(), StoreError> {
    let sql = "UPDATE instance_replicas SET error = ? WHERE instance_uuid = ? AND node_uuid = ?";
    tx.execute(sql, params![error, replica.instance, replica.node]).await?;
    Ok(())
}

/// Makes a complete replica the source of the disks of its instance, whose disk space then counts as that of the instance.
/// Returns `false` if it is not complete any longer.
pub async fn begin_restore(tx: &mut Tx, replica: &ReplicaRow) -> Result<bool, StoreError> {
    let sql = "UPDATE instance_replicas SET state = 'restoring', claimed_disk = 0 \
               WHERE instance_uuid = ? AND node_uuid = ? AND state = 'complete'";
    Ok(tx.execute(sql, params![replica.instance, replica.node]).await? == 1)
}

/// Lets the nodes of the replicas of an instance remove them, except that of `keep`.
pub async fn delete_others(
    tx: &mut Tx,
    instance: InstanceId,
    keep: Option<NodeId>,
) -> Result<(), StoreError> {
    let sql = "UPDATE instance_replicas SET state = 'deleting' WHERE instance_uuid = ? AND node_uuid <> ?";
    let keep = keep.map_or_else(String::new, |node| node.to_string());
    tx.execute(sql, params![instance, keep]).await?;
    Ok(())
}

/// Removes the row of a replica whose files were removed. Returns whether it existed.
pub async fn remove(tx: &mut Tx, replica: &ReplicaRow) -> Result<bool, StoreError> {
    let sql =
        "DELETE FROM instance_replicas WHERE instance_uuid = ? AND node_uuid = ? AND state = 'deleting'";
    Ok(tx.execute(sql, params![replica.instance, replica.node]).await? == 1)
}

/// Removes the rows of a deleted node.
pub async fn remove_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM instance_replicas WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}
