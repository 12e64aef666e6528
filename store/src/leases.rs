//! Named leases: who may do a cluster-wide job right now. A row, taken by compare-and-swap; time decides
//! only when the holder is silent.

use muster_types::Result;
use muster_types::time::now;

use super::{Store, StoreError, params, transaction};

/// Who holds a lease: unique for each process and purpose, with words for people.
#[derive(Debug, Clone)]
pub struct Holder {
    pub id: String,
    pub node: String,
    pub pid: i64,
}

impl Holder {
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self {
            id: uuid::Uuid::new_v4().to_string(),
            node: node.to_owned(),
            pid: i64::from(std::process::id()),
        }
    }
}

/// Takes or renews a lease for `seconds`. Says whether it is ours.
pub async fn take(store: &Store, name: &str, holder: &Holder, seconds: f64) -> Result<bool> {
    transaction!(store, |tx| {
        let time = now();
        let row =
            tx.query_one("SELECT holder, expires, version FROM leases WHERE name = ?", params![name]).await?;
        let Some(row) = row else {
            let inserted = tx
                .execute(
                    "INSERT INTO leases (name, holder, node, pid, expires, version) VALUES (?, ?, ?, ?, ?, 1)",
                    params![name, &holder.id, &holder.node, holder.pid, time + seconds],
                )
                .await;
            return match inserted {
                Ok(_) => Ok(true),
                // Two wanted a new lease at the same moment, and the other one has it.
                Err(StoreError::Duplicate(_)) => Ok(false),
                Err(error) => Err(error.into()),
            };
        };
        let (current, expires, version): (String, f64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
        if current != holder.id && expires > time {
            return Ok(false);
        }
        let met = tx
            .execute(
                "UPDATE leases SET holder = ?, node = ?, pid = ?, expires = ?, version = version + 1 \
                 WHERE name = ? AND version = ?",
                params![&holder.id, &holder.node, holder.pid, time + seconds, name, version],
            )
            .await?;
        Ok(met == 1)
    })
}

/// Gives a lease back, if it is still ours.
pub async fn release(store: &Store, name: &str, holder: &Holder) -> Result<()> {
    transaction!(store, |tx| {
        tx.execute("DELETE FROM leases WHERE name = ? AND holder = ?", params![name, &holder.id]).await?;
        Ok(())
    })
}

/// A lease that somebody holds now.
#[derive(Debug, Clone)]
pub struct Lease {
    pub name: String,
    pub node: String,
    pub pid: i64,
    pub expires: f64,
}

/// The leases that are held now.
pub async fn list(store: &Store) -> Result<Vec<Lease>, StoreError> {
    let rows = store
        .query("SELECT name, node, pid, expires FROM leases WHERE expires > ? ORDER BY name", params![now()])
        .await?;
    rows.iter()
        .map(|row| Ok(Lease { name: row.get(0)?, node: row.get(1)?, pid: row.get(2)?, expires: row.get(3)? }))
        .collect()
}

/// The node that holds a lease now.
pub async fn holder_node(store: &Store, name: &str) -> Result<Option<String>, StoreError> {
    let row = store
        .query_one("SELECT node FROM leases WHERE name = ? AND expires > ?", params![name, now()])
        .await?;
    row.map(|row| row.get(0)).transpose()
}
