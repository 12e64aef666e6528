//! Named leases: which process may do a cluster-wide job.
//!
//! A lease is a row that is changed by compare-and-swap; it expires if its owner does not renew it.

#[cfg(test)]
mod tests;

use muster_types::Result;
use muster_types::time::now;

use crate::error::StoreError;
use crate::row::{Read, columns};
use crate::store::Store;
use crate::{params, transaction};

/// The owner of a lease, unique for each process and purpose.
#[derive(Debug, Clone)]
pub struct LeaseOwner {
    pub id: String,
    /// The name of the node, for messages.
    pub node: String,
    pub pid: i64,
}

impl LeaseOwner {
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self {
            id: uuid::Uuid::new_v4().to_string(),
            node: node.to_owned(),
            pid: i64::from(std::process::id()),
        }
    }
}

struct LeaseState {
    owner: String,
    expires: f64,
    version: i64,
}

columns! { LeaseState { owner: holder, expires, version, } }

/// Acquires or renews a lease for `seconds`. Returns whether `owner` owns it.
pub async fn acquire(store: &Store, name: &str, owner: &LeaseOwner, seconds: f64) -> Result<bool> {
    transaction!(store, |tx| {
        let time = now();
        let Some(lease) =
            tx.select_optional::<LeaseState>("FROM leases WHERE name = ?", params![name]).await?
        else {
            let inserted = tx
                .execute(
                    "INSERT INTO leases (name, holder, node, pid, expires, version) VALUES (?, ?, ?, ?, ?, 1)",
                    params![name, &owner.id, &owner.node, owner.pid, time + seconds],
                )
                .await;
            return match inserted {
                Ok(_) => Ok(true),
                // Another process acquired the new lease at the same time.
                Err(StoreError::Duplicate(_)) => Ok(false),
                Err(error) => Err(error.into()),
            };
        };
        if lease.owner != owner.id && lease.expires > time {
            return Ok(false);
        }
        let updated = tx
            .execute(
                "UPDATE leases SET holder = ?, node = ?, pid = ?, expires = ?, version = version + 1 \
                 WHERE name = ? AND version = ?",
                params![&owner.id, &owner.node, owner.pid, time + seconds, name, lease.version],
            )
            .await?;
        Ok(updated == 1)
    })
}

/// Releases a lease if `owner` still owns it.
pub async fn release(store: &Store, name: &str, owner: &LeaseOwner) -> Result<()> {
    transaction!(store, |tx| {
        tx.execute("DELETE FROM leases WHERE name = ? AND holder = ?", params![name, &owner.id]).await?;
        Ok(())
    })
}

/// An unexpired lease.
#[derive(Debug, Clone)]
pub struct Lease {
    pub name: String,
    pub node: String,
    pub pid: i64,
    pub expires: f64,
}

columns! { Lease { name, node, pid, expires, } }

/// Returns the unexpired leases.
pub async fn list(mut store: &Store) -> Result<Vec<Lease>, StoreError> {
    store.select("FROM leases WHERE expires > ? ORDER BY name", params![now()]).await
}

/// Returns the node that owns a lease.
pub async fn owner_node(mut store: &Store, name: &str) -> Result<Option<String>, StoreError> {
    let sql = "SELECT node FROM leases WHERE name = ? AND expires > ?";
    store.fetch_optional(sql, params![name, now()]).await
}
