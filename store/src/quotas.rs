//! Rows of quotas, and the usage that counts against them. See docs/decisions/0041.
//!
//! Usage is the sum over the rows of live objects, so it cannot differ from them. A transaction that adds such rows
//! locks the namespace ([`namespaces::lock`](super::namespaces::lock)) before it reads the usage.

#[cfg(test)]
mod tests;

use muster_types::key::RESERVED_NAME_PREFIX;
use muster_types::quota::QuotaName;
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, params};

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

/// Returns the current usage of a namespace, in the order of `names`.
pub async fn used(mut db: impl Read, namespace: &str, names: &[QuotaName]) -> Result<Vec<i64>, StoreError> {
    let mut instances = None;
    let mut used = Vec::with_capacity(names.len());
    for name in names {
        used.push(match instance_column(*name) {
            Some(column) => {
                let totals = match instances {
                    Some(totals) => totals,
                    None => instance_totals(&mut db, namespace).await?,
                };
                instances = Some(totals);
                totals[column]
            }
            None => used_rows(&mut db, namespace, *name).await?,
        });
    }
    Ok(used)
}

/// Returns the column of [`instance_totals`] with a usage.
fn instance_column(name: QuotaName) -> Option<usize> {
    match name {
        QuotaName::Instances => Some(0),
        QuotaName::Cpus => Some(1),
        QuotaName::MemoryMb => Some(2),
        QuotaName::DiskGb => Some(3),
        _ => None,
    }
}

/// Returns the number of instances, and their CPUs, memory and disk space. One in error has released everything.
async fn instance_totals(mut db: impl Read, namespace: &str) -> Result<[i64; 4], StoreError> {
    let sql = "SELECT COUNT(*), CAST(COALESCE(SUM(claimed_cpus), 0) AS SIGNED), \
               CAST(COALESCE(SUM(claimed_memory), 0) AS SIGNED), CAST(COALESCE(SUM(claimed_disk), 0) AS SIGNED) \
               FROM instances WHERE namespace = ? AND state NOT IN ('error', 'deleted')";
    let (instances, cpus, memory, disk) = db.fetch_one(sql, params![namespace]).await?;
    Ok([instances, cpus, memory, disk])
}

async fn used_rows(mut db: impl Read, namespace: &str, name: QuotaName) -> Result<i64, StoreError> {
    let floating = format!(
        "SELECT (SELECT COUNT(*) FROM interfaces WHERE namespace = ? AND state <> 'deleted' AND floating IS NOT NULL) \
         + (SELECT COUNT(*) FROM networks WHERE namespace = ? AND state <> 'deleted' AND provide_nat = 1) + ({ROUTED})"
    );
    let mut values: Vec<Value> = vec![namespace.into()];
    let sql = match name {
        QuotaName::Networks => "SELECT COUNT(*) FROM networks WHERE namespace = ? AND state <> 'deleted'",
        QuotaName::FloatingAddresses => {
            values.extend([namespace.into(), namespace.into()]);
            &floating
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
            "SELECT CAST(COALESCE(SUM(bytes), 0) AS SIGNED) FROM uploads WHERE namespace = ? AND ended = 0"
        }
        QuotaName::ArtifactBytes => {
            "SELECT CAST(COALESCE(SUM(size), 0) AS SIGNED) FROM artifacts \
             JOIN object_references ON source_type = 'artifact' AND source_id = artifacts.uuid \
             AND relationship = 'version' JOIN blobs ON blobs.uuid = target_id \
             WHERE artifacts.namespace = ? AND artifacts.state <> 'deleted'"
        }
        QuotaName::Instances | QuotaName::Cpus | QuotaName::MemoryMb | QuotaName::DiskGb => {
            return Err(StoreError::Internal(format!("{name} is a property of instances")));
        }
    };
    db.fetch_one(sql, &values).await
}
