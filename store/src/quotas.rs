//! Rows of quotas, and the usage that counts against them. See docs/decisions/0041.
//!
//! Usage is the sum over the rows of live objects, so it cannot differ from them. A transaction that adds such rows
//! locks the namespace ([`namespaces::lock`](super::namespaces::lock)) before it reads the usage.

#[cfg(test)]
mod tests;

use muster_types::key::RESERVED_NAME_PREFIX;
use muster_types::quota::QuotaName;
use muster_types::time::now;

use super::{Read, StoreError, Tx, Union, Value, params};

/// The addresses that are routed to networks of a namespace.
const ROUTED: &str = "SELECT COUNT(*) FROM networks JOIN object_references ON source_type = 'network' \
                      AND source_id = networks.uuid AND relationship = 'routed_address' \
                      WHERE namespace = ? AND networks.state <> 'deleted'";

/// Returns the limits that were set for a namespace; 0 means unlimited.
pub async fn of_namespace(mut db: impl Read, namespace: &str) -> Result<Vec<(QuotaName, i64)>, StoreError> {
    db.fetch("SELECT name, value FROM namespace_quotas WHERE namespace = ?", params![namespace]).await
}

/// Sets a limit of a namespace; 0 means unlimited.
pub async fn set(tx: &mut Tx, namespace: &str, name: QuotaName, limit: i64) -> Result<(), StoreError> {
    let sql = "REPLACE INTO namespace_quotas (namespace, name, value) VALUES (?, ?, ?)";
    tx.execute(sql, params![namespace, name, limit]).await?;
    Ok(())
}

/// Removes a limit of a namespace, so that the default applies.
pub async fn remove(tx: &mut Tx, namespace: &str, name: QuotaName) -> Result<(), StoreError> {
    let sql = "DELETE FROM namespace_quotas WHERE namespace = ? AND name = ?";
    tx.execute(sql, params![namespace, name]).await?;
    Ok(())
}

/// Removes all limits of a namespace.
pub async fn remove_of_namespace(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM namespace_quotas WHERE namespace = ?", params![namespace]).await?;
    Ok(())
}

/// Returns the current usage of a namespace, in the order of `names`, in one statement.
pub async fn used(db: impl Read, namespace: &str, names: &[QuotaName]) -> Result<Vec<i64>, StoreError> {
    if names.is_empty() {
        return Ok(vec![]);
    }
    let mut union = Union::default();
    let mut totals = None;
    let mut parts = Vec::with_capacity(names.len());
    for name in names {
        parts.push(match usage_of(namespace, *name) {
            Some((sql, values)) => union.add(&format!("({sql})"), String::new(), &values),
            None => *totals
                .get_or_insert_with(|| union.add(INSTANCE_TOTALS, LIVE_INSTANCES.into(), params![namespace])),
        });
    }
    let mut rows = union.fetch(db).await?;
    let totals: Vec<(i64, i64, i64, i64)> = totals.map_or(Ok(vec![]), |part| rows.take(part))?;
    let totals =
        totals.first().map_or([0; 4], |&(instances, cpus, memory, disk)| [instances, cpus, memory, disk]);
    names
        .iter()
        .zip(parts)
        .map(|(name, part)| match instance_column(*name) {
            Some(column) => Ok(totals[column]),
            None => Ok(rows.take::<i64>(part)?.into_iter().sum()),
        })
        .collect()
}

/// Returns the column of [`INSTANCE_TOTALS`] with a usage.
fn instance_column(name: QuotaName) -> Option<usize> {
    match name {
        QuotaName::Instances => Some(0),
        QuotaName::Cpus => Some(1),
        QuotaName::MemoryMb => Some(2),
        QuotaName::DiskGb => Some(3),
        _ => None,
    }
}

/// The number of instances, and their CPUs, memory and disk space.
const INSTANCE_TOTALS: &str = "COUNT(*), COALESCE(SUM(claimed_cpus), 0), COALESCE(SUM(claimed_memory), 0), \
                               COALESCE(SUM(claimed_disk), 0)";
/// The instances that use something. One in error has released everything.
const LIVE_INSTANCES: &str = "FROM instances WHERE namespace = ? AND state NOT IN ('error', 'deleted')";

/// Returns a select of a usage and its parameters, `None` for a property of instances.
fn usage_of(namespace: &str, name: QuotaName) -> Option<(String, Vec<Value>)> {
    let mut values: Vec<Value> = vec![namespace.into()];
    let sql = match name {
        QuotaName::Networks => "SELECT COUNT(*) FROM networks WHERE namespace = ? AND state <> 'deleted'",
        QuotaName::FloatingAddresses => {
            values.extend([namespace.into(), namespace.into()]);
            let sql = format!(
                "SELECT (SELECT COUNT(*) FROM interfaces WHERE namespace = ? AND state <> 'deleted' AND floating IS NOT NULL) \
                 + (SELECT COUNT(*) FROM networks WHERE namespace = ? AND state <> 'deleted' AND provide_nat = 1) \
                 + ({ROUTED})"
            );
            return Some((sql, values));
        }
        QuotaName::RoutedAddresses => ROUTED,
        QuotaName::Keys => {
            values.push(now().into());
            values.push(i64::try_from(RESERVED_NAME_PREFIX.len()).expect("a short name").into());
            values.push(RESERVED_NAME_PREFIX.into());
            "SELECT COUNT(*) FROM namespace_keys WHERE namespace = ? AND state = 'created' \
             AND (expiry IS NULL OR expiry > ?) AND SUBSTR(name, 1, ?) <> ?"
        }
        QuotaName::Uploads => "SELECT COUNT(*) FROM uploads WHERE namespace = ? AND ended = 0",
        QuotaName::UploadBytes => {
            "SELECT COALESCE(SUM(bytes), 0) FROM uploads WHERE namespace = ? AND ended = 0"
        }
        QuotaName::ArtifactBytes => {
            "SELECT COALESCE(SUM(size), 0) FROM artifacts \
             JOIN object_references ON source_type = 'artifact' AND source_id = artifacts.uuid \
             AND relationship = 'version' JOIN blobs ON blobs.uuid = target_id \
             WHERE artifacts.namespace = ? AND artifacts.state <> 'deleted'"
        }
        QuotaName::Webhooks => "SELECT COUNT(*) FROM webhooks WHERE namespace = ?",
        QuotaName::Instances | QuotaName::Cpus | QuotaName::MemoryMb | QuotaName::DiskGb => return None,
    };
    Some((sql.to_owned(), values))
}
