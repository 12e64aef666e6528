//! Rows of interfaces, and of the hardware addresses that they hold.

use std::net::Ipv4Addr;

use muster_types::address::MacAddress;
use muster_types::ids::{InstanceId, InterfaceId, NetworkId, NodeId};
use muster_types::interface::InterfaceState;
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, marks, params};

#[derive(Debug, Clone, PartialEq)]
pub struct InterfaceRow {
    pub id: InterfaceId,
    pub network: NetworkId,
    pub instance: InstanceId,
    pub namespace: String,
    /// The name under which DHCP and DNS know it.
    pub hostname: String,
    /// Where it is, once that is decided.
    pub node: Option<NodeId>,
    pub mac: MacAddress,
    pub ipv4: Option<Ipv4Addr>,
    pub floating: Option<Ipv4Addr>,
    pub model: String,
    pub order: i64,
    pub state: InterfaceState,
}

const COLUMNS: &str = "uuid, network_uuid, instance_uuid, namespace, hostname, node_uuid, macaddr, ipv4, floating, model, \
                       position, state";
const LIVE: &str = "state IN ('initial', 'created', 'error')";

impl InterfaceRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            network: row.parse(1)?,
            instance: row.parse(2)?,
            namespace: row.get(3)?,
            hostname: row.get(4)?,
            node: row.parse_opt(5)?,
            mac: row.parse(6)?,
            ipv4: row.parse_opt(7)?,
            floating: row.parse_opt(8)?,
            model: row.get(9)?,
            order: row.get(10)?,
            state: row.parse(11)?,
        })
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<InterfaceRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM interfaces {tail}");
    db.rows(&sql, values).await?.iter().map(InterfaceRow::read).collect()
}

pub async fn get(db: impl Read, id: InterfaceId) -> Result<Option<InterfaceRow>, StoreError> {
    Ok(rows(db, "WHERE uuid = ?", params![id]).await?.pop())
}

/// All live interfaces.
pub async fn list(db: impl Read) -> Result<Vec<InterfaceRow>, StoreError> {
    rows(db, &format!("WHERE {LIVE} ORDER BY network_uuid, position, uuid"), &[]).await
}

/// The next live interfaces of a network after `after`, by id.
pub async fn page(
    db: impl Read,
    network: NetworkId,
    after: Option<InterfaceId>,
    limit: i64,
) -> Result<Vec<InterfaceRow>, StoreError> {
    let after = after.map_or_else(String::new, |id| id.to_string());
    let tail = format!("WHERE network_uuid = ? AND {LIVE} AND uuid > ? ORDER BY uuid LIMIT ?");
    rows(db, &tail, params![network, after, limit]).await
}

/// The live interfaces of some instances, in their order.
pub async fn of_instances(db: impl Read, ids: &[InstanceId]) -> Result<Vec<InterfaceRow>, StoreError> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let tail = format!("WHERE instance_uuid IN ({}) AND {LIVE} ORDER BY position, uuid", marks(ids.len()));
    rows(db, &tail, &values).await
}

/// How many live interfaces a network has.
pub async fn count(mut db: impl Read, network: NetworkId) -> Result<i64, StoreError> {
    let sql = format!("SELECT COUNT(*) FROM interfaces WHERE network_uuid = ? AND {LIVE}");
    db.rows(&sql, params![network]).await?.first().map_or(Ok(0), |row| row.get(0))
}

/// Soft-deleted interfaces whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<InterfaceId>, StoreError> {
    let sql = "SELECT uuid FROM interfaces WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?";
    db.rows(sql, params![before, limit]).await?.iter().map(|row| row.parse(0)).collect()
}

/// Takes a hardware address for an interface. `false`: another interface has it.
pub async fn claim_mac(tx: &mut Tx, mac: MacAddress, interface: InterfaceId) -> Result<bool, StoreError> {
    let sql = "INSERT INTO hardware_addresses (macaddr, interface_uuid) VALUES (?, ?)";
    match tx.execute(sql, params![mac, interface]).await {
        Ok(_) => Ok(true),
        Err(StoreError::Duplicate(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

pub async fn insert(tx: &mut Tx, row: &InterfaceRow) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO interfaces (uuid, network_uuid, instance_uuid, namespace, hostname, node_uuid, macaddr, ipv4, \
         floating, model, position, state, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            row.id,
            row.network,
            row.instance,
            &row.namespace,
            &row.hostname,
            row.node,
            row.mac,
            row.ipv4,
            row.floating,
            &row.model,
            row.order,
            row.state,
            time,
            time
        ],
    )
    .await?;
    Ok(())
}

/// Sets the floating address if it still is `from` and the interface lives.
pub async fn set_floating(
    tx: &mut Tx,
    id: InterfaceId,
    from: Option<Ipv4Addr>,
    to: Option<Ipv4Addr>,
) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE interfaces SET floating = ?, version = version + 1 \
         WHERE uuid = ? AND COALESCE(floating, '') = ? AND {LIVE}"
    );
    let from = from.map_or_else(String::new, |address| address.to_string());
    Ok(tx.execute(&sql, params![to, id, from]).await? == 1)
}

/// Keeps a live interface from going until this transaction ends. Says whether it lives.
pub async fn hold(tx: &mut Tx, id: InterfaceId) -> Result<bool, StoreError> {
    let sql = format!("UPDATE interfaces SET version = version + 1 WHERE uuid = ? AND {LIVE}");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}

/// Moves an interface to another state if it is still in `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: InterfaceId,
    from: InterfaceState,
    to: InterfaceState,
) -> Result<bool, StoreError> {
    if !from.may_become(to) {
        return Err(StoreError::Broken(format!("an interface cannot go from {from} to {to}")));
    }
    let met = tx
        .execute(
            "UPDATE interfaces SET state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND state = ?",
            params![to, now(), id, from],
        )
        .await?;
    if met == 1 && to == InterfaceState::Deleted {
        tx.execute("DELETE FROM hardware_addresses WHERE interface_uuid = ?", params![id]).await?;
    }
    Ok(met == 1)
}

/// Removes the row of a soft-deleted interface.
pub async fn remove(tx: &mut Tx, id: InterfaceId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM interfaces WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![id, InterfaceState::Deleted]).await? == 1)
}
