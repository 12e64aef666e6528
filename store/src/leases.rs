//! Named leases: which process may do a cluster-wide job.
//!
//! A lease is a row that is changed by compare-and-swap. If its owner does not renew it, a short one expires by the clock of the
//! database. The clock may be set, so a lease on which more depends is taken over only by a daemon that has seen the same version of
//! the row for its whole duration ([`acquire_unrenewed`]).

#[cfg(test)]
mod tests;

use std::time::UNIX_EPOCH;

use muster_types::Result;
use muster_types::ids::NodeId;

use crate::error::StoreError;
use crate::row::{Read, columns};
use crate::store::Store;
use crate::time::NOW;
use crate::value::Value;
use crate::{params, transaction};

/// The lease whose owner is the active network node. The owner's id is that of the node.
pub const NETWORK_NODE_LEASE: &str = "network node";

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

/// When a lease of another owner may be taken over.
#[derive(Debug, Clone, Copy)]
enum Takeover {
    /// It has expired by the clock of the database.
    Expired,
    /// It still has this version.
    Version(Option<i64>),
}

/// Acquires a lease for `seconds`, or renews it. Returns whether `owner` owns it.
pub async fn acquire(store: &Store, name: &str, owner: &LeaseOwner, seconds: f64) -> Result<bool> {
    acquire_if(store, name, owner, seconds, Takeover::Expired).await
}

/// Acquires a lease that has no owner, or renews it. A lease of another owner is taken over, whenever it expires, if it still has the
/// version `unrenewed`, which was not renewed for its whole duration. Returns whether `owner` owns it.
pub async fn acquire_unrenewed(
    store: &Store,
    name: &str,
    owner: &LeaseOwner,
    seconds: f64,
    unrenewed: Option<i64>,
) -> Result<bool> {
    acquire_if(store, name, owner, seconds, Takeover::Version(unrenewed)).await
}

async fn acquire_if(
    store: &Store,
    name: &str,
    owner: &LeaseOwner,
    seconds: f64,
    takeover: Takeover,
) -> Result<bool> {
    transaction!(store, |tx| {
        let sql = format!(
            "SELECT version, CASE WHEN holder = ? THEN 1 ELSE 0 END, CASE WHEN expires <= {NOW} THEN 1 ELSE 0 END \
             FROM leases WHERE name = ?"
        );
        let found: Option<(i64, i64, i64)> = tx.fetch_optional(&sql, params![&owner.id, name]).await?;
        let Some((version, is_own, is_expired)) = found else {
            // A released lease is acquired again with another version, so that it is not taken for the earlier one.
            let sql = format!(
                "INSERT INTO leases (name, holder, node, pid, expires, version) VALUES (?, ?, ?, ?, {NOW} + ?, ?)"
            );
            let version = UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
            let version = i64::try_from(version).expect("an i64 has microseconds for 292000 years");
            let values = params![name, &owner.id, &owner.node, owner.pid, seconds, version];
            return match tx.execute(&sql, values).await {
                Ok(_) => Ok(true),
                // Another process acquired the new lease at the same time.
                Err(StoreError::Duplicate(_)) => Ok(false),
                Err(error) => Err(error.into()),
            };
        };
        let may_take_over = match takeover {
            Takeover::Expired => is_expired == 1,
            Takeover::Version(unrenewed) => unrenewed == Some(version),
        };
        if is_own == 0 && !may_take_over {
            return Ok(false);
        }
        let sql = format!(
            "UPDATE leases SET holder = ?, node = ?, pid = ?, expires = {NOW} + ?, version = version + 1 \
             WHERE name = ? AND version = ?"
        );
        let values = params![&owner.id, &owner.node, owner.pid, seconds, name, version];
        Ok(tx.execute(&sql, values).await? == 1)
    })
}

/// A lease to be renewed.
#[derive(Debug, Clone)]
pub struct Renewal {
    pub name: &'static str,
    /// The id of the owner.
    pub owner: String,
    pub seconds: f64,
}

/// Renews leases in one statement, which contains the epoch that a transaction would check. Returns `false` if one of them has
/// another owner or the statement failed.
pub async fn renew(store: &Store, renewals: &[Renewal]) -> bool {
    let Some(member) = store.membership.members().first().copied() else { return false };
    let seconds = " WHEN ? THEN ?".repeat(renewals.len());
    let owned = vec!["(name = ? AND holder = ?)"; renewals.len()].join(" OR ");
    let sql = format!(
        "UPDATE leases SET expires = {NOW} + CASE name{seconds} ELSE 0 END, version = version + 1 \
         WHERE ({owned}) AND EXISTS (SELECT 1 FROM nodes WHERE nodes.uuid = ? AND epoch = ?)"
    );
    let mut values: Vec<Value> = Vec::new();
    values.extend(renewals.iter().flat_map(|renewal| [renewal.name.into(), renewal.seconds.into()]));
    values.extend(
        renewals.iter().flat_map(|renewal| [renewal.name.into(), Value::from(renewal.owner.as_str())]),
    );
    values.extend_from_slice(params![member.node, member.epoch]);
    let count = u64::try_from(renewals.len()).expect("a daemon has few leases");
    store.execute(&sql, &values).await.is_ok_and(|renewed| renewed == count)
}

/// Releases a lease if `owner` still owns it.
pub async fn release(store: &Store, name: &str, owner: &LeaseOwner) -> Result<()> {
    transaction!(store, |tx| {
        tx.execute("DELETE FROM leases WHERE name = ? AND holder = ?", params![name, &owner.id]).await?;
        Ok(())
    })
}

/// A lease, which may have expired.
#[derive(Debug, Clone, PartialEq)]
pub struct Lease {
    pub name: String,
    /// The id of the owner.
    pub owner: String,
    /// The name of the owner's node.
    pub node: String,
    pub pid: i64,
    pub expires: f64,
    /// Incremented by each renewal.
    pub version: i64,
}

columns! { Lease { name, owner: holder, node, pid, expires, version, } }

/// The number of seconds until its expiry from which a lease does not expire. Other leases last for minutes at most.
const UNLIMITED: f64 = 1e8;

impl Lease {
    /// Returns whether the lease does not expire, at a time of the database.
    #[must_use]
    pub fn is_unlimited(&self, time: f64) -> bool {
        self.expires - time > UNLIMITED
    }
}

impl Lease {
    /// Returns the node that owns the lease, if it is one of nodes.
    pub fn owner_node(&self) -> Result<NodeId, StoreError> {
        let invalid =
            || StoreError::Internal(format!("the lease {} has the owner {:?}", self.name, self.owner));
        self.owner.parse().map_err(|_| invalid())
    }
}

/// Returns the unexpired leases.
pub async fn list(mut store: &Store) -> Result<Vec<Lease>, StoreError> {
    store.select(&format!("FROM leases WHERE expires > {NOW} ORDER BY name"), &[]).await
}

/// Returns all leases, also expired ones.
pub async fn all(mut store: &Store) -> Result<Vec<Lease>, StoreError> {
    store.select("FROM leases ORDER BY name", &[]).await
}

/// Returns the id of the owner of a lease.
pub async fn owner_id(mut store: &Store, name: &str) -> Result<Option<String>, StoreError> {
    let sql = format!("SELECT holder FROM leases WHERE name = ? AND expires > {NOW}");
    store.fetch_optional(&sql, params![name]).await
}
