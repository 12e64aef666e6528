//! Rows of interfaces and of their MAC addresses.

use std::net::Ipv4Addr;

use muster_types::address::MacAddress;
use muster_types::ids::{InstanceId, InterfaceId, NetworkId, NodeId};
use muster_types::interface::InterfaceState;
use muster_types::time::now;

use super::networks::NetworkRow;
use super::{Read, Select as _, StoreError, Tx, Union, Value, columns, params, placeholders};

#[derive(Debug, Clone, PartialEq)]
pub struct InterfaceRow {
    pub id: InterfaceId,
    pub network: NetworkId,
    pub instance: InstanceId,
    pub namespace: String,
    /// The name in DHCP and DNS.
    pub hostname: String,
    /// The node of its instance, once that is placed.
    pub node: Option<NodeId>,
    pub mac: MacAddress,
    pub ipv4: Option<Ipv4Addr>,
    pub floating: Option<Ipv4Addr>,
    pub model: String,
    pub order: i64,
    pub state: InterfaceState,
}

columns! { InterfaceRow {
    id: uuid,
    network: network_uuid,
    instance: instance_uuid,
    namespace,
    hostname,
    node: node_uuid,
    mac: macaddr,
    ipv4,
    floating,
    model,
    order: position,
    state,
} }

pub(crate) const LIVE: &str = "state IN ('initial', 'created', 'error')";

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<InterfaceRow>, StoreError> {
    db.select(&format!("FROM interfaces {tail}"), values).await
}

pub async fn get(db: impl Read, id: InterfaceId) -> Result<Option<InterfaceRow>, StoreError> {
    Ok(rows(db, "WHERE uuid = ?", params![id]).await?.pop())
}

/// Returns an interface and its network, each if it exists.
pub async fn with_network(
    db: impl Read,
    id: InterfaceId,
) -> Result<(Option<InterfaceRow>, Option<NetworkRow>), StoreError> {
    let mut union = Union::default();
    let interface = union.add(InterfaceRow::COLUMNS, "FROM interfaces WHERE uuid = ?".into(), params![id]);
    let of_interface = "FROM networks WHERE uuid IN (SELECT network_uuid FROM interfaces WHERE uuid = ?)";
    let network = union.add(NetworkRow::COLUMNS, of_interface.into(), params![id]);
    let mut rows = union.fetch(db).await?;
    Ok((rows.take(interface)?.pop(), rows.take(network)?.pop()))
}

/// Returns all live interfaces.
pub async fn list(db: impl Read) -> Result<Vec<InterfaceRow>, StoreError> {
    rows(db, &format!("WHERE {LIVE} ORDER BY network_uuid, position, uuid"), &[]).await
}

/// Returns the next live interfaces of a network after `after`, by id.
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

/// Returns the live interfaces of some instances, in their order.
pub async fn of_instances(db: impl Read, ids: &[InstanceId]) -> Result<Vec<InterfaceRow>, StoreError> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let tail =
        format!("WHERE instance_uuid IN ({}) AND {LIVE} ORDER BY position, uuid", placeholders(ids.len()));
    rows(db, &tail, &values).await
}

/// Returns the number of live interfaces of a network.
pub async fn count(mut db: impl Read, network: NetworkId) -> Result<i64, StoreError> {
    let sql = format!("SELECT COUNT(*) FROM interfaces WHERE network_uuid = ? AND {LIVE}");
    db.fetch_one(&sql, params![network]).await
}

/// Returns the soft-deleted interfaces whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<InterfaceId>, StoreError> {
    let sql = "SELECT uuid FROM interfaces WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?";
    db.fetch(sql, params![before, limit]).await
}

/// Allocates a MAC address to an interface. Returns `false` if another interface has it.
pub async fn allocate_mac(tx: &mut Tx, mac: MacAddress, interface: InterfaceId) -> Result<bool, StoreError> {
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

/// Sets the floating address of a live interface if it still is `from`.
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

/// Records the node of an instance in its live interfaces.
pub async fn set_node(tx: &mut Tx, instance: InstanceId, node: NodeId) -> Result<(), StoreError> {
    let sql = format!(
        "UPDATE interfaces SET node_uuid = ?, version = version + 1 WHERE instance_uuid = ? AND {LIVE}"
    );
    tx.execute(&sql, params![node, instance]).await?;
    Ok(())
}

/// Locks an interface until the transaction ends. Returns whether it is live.
pub async fn lock(tx: &mut Tx, id: InterfaceId) -> Result<bool, StoreError> {
    let sql = format!("UPDATE interfaces SET version = version + 1 WHERE uuid = ? AND {LIVE}");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}

/// Changes the state of an interface if it is still `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: InterfaceId,
    from: InterfaceState,
    to: InterfaceState,
) -> Result<bool, StoreError> {
    if !from.can_transition_to(to) {
        return Err(StoreError::Internal(format!("an interface cannot go from {from} to {to}")));
    }
    let updated = tx
        .execute(
            "UPDATE interfaces SET state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND state = ?",
            params![to, now(), id, from],
        )
        .await?;
    if updated == 1 && to == InterfaceState::Deleted {
        tx.execute("DELETE FROM hardware_addresses WHERE interface_uuid = ?", params![id]).await?;
    }
    Ok(updated == 1)
}

/// Removes the row of a soft-deleted interface.
pub async fn remove(tx: &mut Tx, id: InterfaceId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM interfaces WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![id, InterfaceState::Deleted]).await? == 1)
}
