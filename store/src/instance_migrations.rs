//! Rows of live migrations in progress. See docs/decisions/0070.

#[cfg(test)]
mod tests;

use muster_types::capacity::Capacity;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::time::now;
use muster_types::vm::ConsolePorts;

use super::instances::console_ports;
use super::{Read, StoreError, Tx, columns, params};

#[derive(Debug, Clone, PartialEq)]
pub struct MigrationRow {
    pub instance: InstanceId,
    pub source: NodeId,
    pub target: NodeId,
    /// The generation of the VM on the target.
    pub generation: i64,
    /// Whether its cancellation was requested.
    pub cancelled: bool,
    /// The capacity that is reserved on the target.
    pub reserved: Capacity,
    /// The ports on the target, once they are chosen.
    pub ports: Option<ConsolePorts>,
}

columns! { MigrationRow {
    instance: instance_uuid,
    source: source_uuid,
    target: target_uuid,
    generation,
    cancelled,
    reserved: Capacity { cpus: claimed_cpus, memory_mb: claimed_memory, disk_gb: claimed_disk, },
    ports: console_ports(console_port, vdi_port, vdi_tls_port),
} }

pub async fn get(mut db: impl Read, instance: InstanceId) -> Result<Option<MigrationRow>, StoreError> {
    db.select_optional("FROM instance_migrations WHERE instance_uuid = ?", params![instance]).await
}

/// Returns all migrations in progress.
pub async fn list(mut db: impl Read) -> Result<Vec<MigrationRow>, StoreError> {
    db.select("FROM instance_migrations ORDER BY instance_uuid", &[]).await
}

/// Returns the migrations without an unfinished operation.
pub async fn without_operation(mut db: impl Read) -> Result<Vec<MigrationRow>, StoreError> {
    let tail = "FROM instance_migrations WHERE NOT EXISTS (SELECT 1 FROM operations WHERE target_type = 'instance' \
                AND target_id = instance_uuid AND name IN ('prepare_migration', 'migrate_instance') \
                AND state IN ('queued', 'executing')) LIMIT 500";
    db.select(tail, &[]).await
}

/// Returns the migrations from or to a node that does not check in.
pub async fn of_lost_nodes(mut db: impl Read) -> Result<Vec<MigrationRow>, StoreError> {
    let tail = "FROM instance_migrations WHERE EXISTS (SELECT 1 FROM nodes WHERE uuid IN (source_uuid, target_uuid) \
                AND state NOT IN ('created', 'stopping')) LIMIT 500";
    db.select(tail, &[]).await
}

/// Inserts a migration. Returns `false` if the instance is being migrated already.
pub async fn insert(tx: &mut Tx, new: &MigrationRow) -> Result<bool, StoreError> {
    let sql = "INSERT INTO instance_migrations (instance_uuid, source_uuid, target_uuid, generation, cancelled, \
               claimed_cpus, claimed_memory, claimed_disk, created) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)";
    let values = params![
        new.instance,
        new.source,
        new.target,
        new.generation,
        new.reserved.cpus,
        new.reserved.memory_mb,
        new.reserved.disk_gb,
        now()
    ];
    match tx.execute(sql, values).await {
        Err(StoreError::Duplicate(_)) => Ok(false),
        inserted => inserted.map(|_| true),
    }
}

/// Requests the cancellation of a migration. Returns whether the instance is being migrated.
pub async fn cancel(tx: &mut Tx, instance: InstanceId) -> Result<bool, StoreError> {
    let sql = "UPDATE instance_migrations SET cancelled = 1 WHERE instance_uuid = ?";
    Ok(tx.execute(sql, params![instance]).await? == 1)
}

/// Reserves ports on the target, in addition to those on the source. Returns `false` if another instance has one of them, or
/// the migration has ended.
pub async fn set_ports(
    tx: &mut Tx,
    migration: &MigrationRow,
    ports: ConsolePorts,
) -> Result<bool, StoreError> {
    remove_ports(tx, migration).await?;
    for port in [Some(ports.console), Some(ports.vdi), ports.vdi_tls].into_iter().flatten() {
        let sql = "INSERT INTO instance_ports (node_uuid, port, instance_uuid) VALUES (?, ?, ?)";
        match tx.execute(sql, params![migration.target, port, migration.instance]).await {
            Err(StoreError::Duplicate(_)) => return Ok(false),
            inserted => inserted?,
        };
    }
    let sql = "UPDATE instance_migrations SET console_port = ?, vdi_port = ?, vdi_tls_port = ? \
               WHERE instance_uuid = ? AND generation = ?";
    let values = params![ports.console, ports.vdi, ports.vdi_tls, migration.instance, migration.generation];
    Ok(tx.execute(sql, values).await? == 1)
}

async fn remove_ports(tx: &mut Tx, migration: &MigrationRow) -> Result<(), StoreError> {
    let sql = "DELETE FROM instance_ports WHERE instance_uuid = ? AND node_uuid = ?";
    tx.execute(sql, params![migration.instance, migration.target]).await?;
    Ok(())
}

/// Removes a migration that has failed, with its ports on the target. Returns whether it existed.
pub async fn remove_failed(tx: &mut Tx, migration: &MigrationRow) -> Result<bool, StoreError> {
    let removed = remove(tx, migration).await?;
    if removed {
        remove_ports(tx, migration).await?;
    }
    Ok(removed)
}

/// Removes a migration. Returns whether it existed.
pub async fn remove(tx: &mut Tx, migration: &MigrationRow) -> Result<bool, StoreError> {
    let sql = "DELETE FROM instance_migrations WHERE instance_uuid = ? AND generation = ?";
    Ok(tx.execute(sql, params![migration.instance, migration.generation]).await? == 1)
}
