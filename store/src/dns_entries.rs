//! Rows of names that a network's resolver knows beside those of its interfaces.

use std::net::Ipv4Addr;

use muster_types::ids::NetworkId;

use super::{Read, StoreError, Tx, params};

/// The names of all networks.
pub async fn list(mut db: impl Read) -> Result<Vec<(NetworkId, String, Ipv4Addr)>, StoreError> {
    let sql = "SELECT network_uuid, name, value FROM dns_entries ORDER BY network_uuid, name";
    let rows = db.rows(sql, &[]).await?;
    rows.iter().map(|row| Ok((row.parse(0)?, row.get(1)?, row.parse(2)?))).collect()
}

pub async fn set(tx: &mut Tx, network: NetworkId, name: &str, value: Ipv4Addr) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO dns_entries (network_uuid, name, value) VALUES (?, ?, ?)",
        params![network, name, value],
    )
    .await?;
    Ok(())
}

/// How many names a network has.
pub async fn count(mut db: impl Read, network: NetworkId) -> Result<i64, StoreError> {
    let rows = db.rows("SELECT COUNT(*) FROM dns_entries WHERE network_uuid = ?", params![network]).await?;
    rows.first().map_or(Ok(0), |row| row.get(0))
}

pub async fn remove(tx: &mut Tx, network: NetworkId, name: &str) -> Result<bool, StoreError> {
    let sql = "DELETE FROM dns_entries WHERE network_uuid = ? AND name = ?";
    Ok(tx.execute(sql, params![network, name]).await? == 1)
}

/// Removes every name of a network.
pub async fn remove_of(tx: &mut Tx, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM dns_entries WHERE network_uuid = ?", params![network]).await?;
    Ok(())
}
