//! Rows of networks.

use std::net::Ipv4Addr;

use muster_types::address::Netblock;
use muster_types::ids::{NetworkId, OperationId};
use muster_types::network::{FLOATING, MAX_VXID, NetworkState};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, params};

#[derive(Debug, Clone, PartialEq)]
pub struct NetworkRow {
    pub id: NetworkId,
    pub name: String,
    /// Nothing for the floating network.
    pub namespace: Option<String>,
    pub netblock: Netblock,
    pub provide_dhcp: bool,
    pub provide_nat: bool,
    pub provide_dns: bool,
    pub vxid: i64,
    pub floating_gateway: Option<Ipv4Addr>,
    pub state: NetworkState,
    pub error_message: Option<String>,
    /// Whether nodes should have it.
    pub wanted: bool,
    pub generation: i64,
    pub last_operation: Option<OperationId>,
}

/// A network to add.
#[derive(Debug, Clone)]
pub struct NewNetwork {
    pub id: NetworkId,
    pub name: String,
    pub namespace: Option<String>,
    pub netblock: Netblock,
    pub provide_dhcp: bool,
    pub provide_nat: bool,
    pub provide_dns: bool,
}

const COLUMNS: &str = "uuid, name, namespace, netblock, provide_dhcp, provide_nat, provide_dns, vxid, floating_gateway, \
                       state, error_message, wanted, generation, last_operation";
/// States in which a network goes by its name.
const ACTIVE: &str = "state IN ('initial', 'created', 'error', 'delete-wait')";

impl NetworkRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            name: row.get(1)?,
            namespace: row.get(2)?,
            netblock: row.parse(3)?,
            provide_dhcp: row.get(4)?,
            provide_nat: row.get(5)?,
            provide_dns: row.get(6)?,
            vxid: row.get(7)?,
            floating_gateway: row.parse_opt(8)?,
            state: row.parse(9)?,
            error_message: row.get(10)?,
            wanted: row.get(11)?,
            generation: row.get(12)?,
            last_operation: row.parse_opt(13)?,
        })
    }

    /// The addresses of the network.
    #[must_use]
    pub fn pool(&self) -> super::addresses::Pool {
        super::addresses::Pool { network: self.id, netblock: self.netblock }
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<NetworkRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM networks WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(NetworkRow::read).collect()
}

pub async fn get(db: impl Read, id: NetworkId) -> Result<Option<NetworkRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Some networks by id.
pub async fn some(db: impl Read, ids: &[NetworkId]) -> Result<Vec<NetworkRow>, StoreError> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    rows(db, &format!("uuid IN ({})", vec!["?"; ids.len()].join(", ")), &values).await
}

/// The networks of a name, in one namespace or in all. The floating network has no namespace.
pub async fn by_name(
    db: impl Read,
    name: &str,
    namespace: Option<&str>,
) -> Result<Vec<NetworkRow>, StoreError> {
    match namespace {
        Some(namespace) => {
            rows(db, &format!("name = ? AND namespace = ? AND {ACTIVE} LIMIT 2"), params![name, namespace])
                .await
        }
        None => rows(db, &format!("name = ? AND {ACTIVE} LIMIT 2"), params![name]).await,
    }
}

/// The networks of a name in namespaces that trust the caller.
pub async fn by_name_trusting(
    db: impl Read,
    name: &str,
    caller: &str,
) -> Result<Vec<NetworkRow>, StoreError> {
    let tail = format!(
        "name = ? AND namespace IN (SELECT namespace FROM trusts WHERE trusted = ?) AND {ACTIVE} LIMIT 2"
    );
    rows(db, &tail, params![name, caller]).await
}

/// The next networks after `after`, by id, without the floating one. `seen_by` keeps those of namespaces that are
/// or trust that one; `all` keeps deleted ones.
pub async fn page(
    db: impl Read,
    seen_by: Option<&str>,
    all: bool,
    after: Option<NetworkId>,
    limit: i64,
) -> Result<Vec<NetworkRow>, StoreError> {
    let mut tail = "uuid > ? AND namespace IS NOT NULL".to_owned();
    let mut values: Vec<Value> = vec![after.map_or_else(String::new, |id| id.to_string()).into()];
    if !all {
        tail = format!("{tail} AND {ACTIVE}");
    }
    if let Some(caller) = seen_by {
        tail.push_str(
            " AND (namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?))",
        );
        values.extend([caller.into(), caller.into()]);
    }
    values.push(limit.into());
    rows(db, &format!("{tail} ORDER BY uuid LIMIT ?"), &values).await
}

/// Every live network of a namespace.
pub async fn of_namespace(db: impl Read, namespace: &str) -> Result<Vec<NetworkRow>, StoreError> {
    rows(db, &format!("namespace = ? AND {ACTIVE} ORDER BY uuid"), params![namespace]).await
}

/// Every network that nodes should have.
pub async fn wanted(db: impl Read) -> Result<Vec<NetworkRow>, StoreError> {
    rows(db, "wanted = 1 AND namespace IS NOT NULL ORDER BY uuid", &[]).await
}

/// Networks that an operation should be bringing to another state, and that no operation is at.
pub async fn abandoned(db: impl Read) -> Result<Vec<NetworkRow>, StoreError> {
    let tail = "state IN ('initial', 'delete-wait') AND NOT EXISTS (SELECT 1 FROM operations \
                WHERE target_type = 'network' AND target_id = networks.uuid AND state IN ('queued', 'executing')) \
                ORDER BY updated LIMIT 500";
    rows(db, tail, &[]).await
}

/// A number that changes with every change that nodes must follow, for as good as free.
pub async fn pulse(mut db: impl Read) -> Result<(i64, i64), StoreError> {
    let sql = "SELECT COUNT(*), CAST(COALESCE(SUM(generation), 0) AS SIGNED) FROM networks WHERE wanted = 1";
    let rows = db.rows(sql, &[]).await?;
    rows.first().map_or(Ok((0, 0)), |row| Ok((row.get(0)?, row.get(1)?)))
}

/// Soft-deleted networks whose state changed before `before` and of which no node has anything.
pub async fn cleanable(db: impl Read, before: f64, limit: i64) -> Result<Vec<NetworkRow>, StoreError> {
    let tail = "state = 'deleted' AND updated <= ? \
                AND NOT EXISTS (SELECT 1 FROM node_networks WHERE network_uuid = networks.uuid) \
                ORDER BY updated LIMIT ?";
    rows(db, tail, params![before, limit]).await
}

/// Adds a network with a VXLAN of its own.
pub async fn insert(tx: &mut Tx, new: &NewNetwork) -> Result<NetworkRow, StoreError> {
    // A cluster would have to be full of networks for this to fail.
    for _ in 0..64 {
        let random = uuid::Uuid::new_v4().as_u128() % u128::from(MAX_VXID);
        let vxid = if new.id == FLOATING { 0 } else { i64::try_from(random).unwrap_or(0) + 1 };
        let (time, floating) = (now(), new.id == FLOATING);
        let state = if floating { NetworkState::Created } else { NetworkState::Initial };
        let inserted = tx
            .execute(
                "INSERT INTO networks (uuid, name, namespace, netblock, provide_dhcp, provide_nat, provide_dns, vxid, \
                 state, wanted, generation, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, 1)",
                params![
                    new.id,
                    &new.name,
                    new.namespace.as_ref(),
                    new.netblock,
                    new.provide_dhcp,
                    new.provide_nat,
                    new.provide_dns,
                    vxid,
                    state,
                    !floating,
                    time,
                    time
                ],
            )
            .await;
        match inserted {
            Ok(_) => {
                let row = get(&mut *tx, new.id).await?;
                return row.ok_or_else(|| StoreError::Broken("a new network has no row".into()));
            }
            Err(StoreError::Duplicate(_)) if !floating => {}
            Err(error) => return Err(error),
        }
    }
    Err(StoreError::Conflict("no free VXLAN was found".into()))
}

/// Keeps a network in one of `states` until this transaction ends. Says whether it is in one of them.
pub async fn hold(tx: &mut Tx, id: NetworkId, states: &[NetworkState]) -> Result<bool, StoreError> {
    touch(tx, id, states, "version = version + 1").await
}

/// As [`hold`], and tells the nodes that there is something new to follow.
pub async fn bump(tx: &mut Tx, id: NetworkId, states: &[NetworkState]) -> Result<bool, StoreError> {
    touch(tx, id, states, "generation = generation + 1, version = version + 1").await
}

async fn touch(tx: &mut Tx, id: NetworkId, states: &[NetworkState], what: &str) -> Result<bool, StoreError> {
    let marks = vec!["?"; states.len()].join(", ");
    let mut values: Vec<Value> = vec![id.into()];
    values.extend(states.iter().map(|state| Value::from(*state)));
    let sql = format!("UPDATE networks SET {what} WHERE uuid = ? AND state IN ({marks})");
    Ok(tx.execute(&sql, &values).await? == 1)
}

/// Moves a network to another state if it is still in `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: NetworkId,
    from: NetworkState,
    to: NetworkState,
    error: Option<&str>,
) -> Result<bool, StoreError> {
    if !from.may_become(to) {
        return Err(StoreError::Broken(format!("a network cannot go from {from} to {to}")));
    }
    let met = tx
        .execute(
            "UPDATE networks SET state = ?, error_message = COALESCE(?, error_message), updated = ?, \
             version = version + 1 WHERE uuid = ? AND state = ?",
            params![to, error, now(), id, from],
        )
        .await?;
    Ok(met == 1)
}

/// Nodes should no longer have it.
pub async fn set_unwanted(tx: &mut Tx, id: NetworkId) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE networks SET wanted = 0, generation = generation + 1, version = version + 1 WHERE uuid = ?",
        params![id],
    )
    .await?;
    Ok(())
}

pub async fn set_gateway(tx: &mut Tx, id: NetworkId, gateway: Option<Ipv4Addr>) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE networks SET floating_gateway = ?, generation = generation + 1, version = version + 1 WHERE uuid = ?",
        params![gateway, id],
    )
    .await?;
    Ok(())
}

pub async fn set_operation(tx: &mut Tx, id: NetworkId, operation: OperationId) -> Result<(), StoreError> {
    tx.execute("UPDATE networks SET last_operation = ? WHERE uuid = ?", params![operation, id]).await?;
    Ok(())
}

/// Removes the row of a soft-deleted network.
pub async fn remove(tx: &mut Tx, id: NetworkId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM networks WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![id, NetworkState::Deleted]).await? == 1)
}
