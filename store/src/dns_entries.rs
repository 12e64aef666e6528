//! Rows of DNS names that a network's resolver serves in addition to those of its interfaces.

use std::net::Ipv4Addr;

use muster_types::ids::NetworkId;

use super::{Read, StoreError, Tx, params};

/// Returns the names of all networks.
pub async fn list(mut db: impl Read) -> Result<Vec<(NetworkId, String, Ipv4Addr)>, StoreError> {
    db.fetch("SELECT network_uuid, name, value FROM dns_entries ORDER BY network_uuid, name", &[]).await
}

pub async fn set(tx: &mut Tx, network: NetworkId, name: &str, value: Ipv4Addr) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO dns_entries (network_uuid, name, value) VALUES (?, ?, ?)",
        params![network, name, value],
    )
    .await?;
    Ok(())
}

/// Returns the number of names of a network.
pub async fn count(mut db: impl Read, network: NetworkId) -> Result<i64, StoreError> {
    db.fetch_one("SELECT COUNT(*) FROM dns_entries WHERE network_uuid = ?", params![network]).await
}

pub async fn remove(tx: &mut Tx, network: NetworkId, name: &str) -> Result<bool, StoreError> {
    let sql = "DELETE FROM dns_entries WHERE network_uuid = ? AND name = ?";
    Ok(tx.execute(sql, params![network, name]).await? == 1)
}

/// Removes all names of a network.
pub async fn remove_of(tx: &mut Tx, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM dns_entries WHERE network_uuid = ?", params![network]).await?;
    Ok(())
}
