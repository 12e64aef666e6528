//! Rows of networks.

use std::net::Ipv4Addr;

use muster_types::address::Netblock;
use muster_types::ids::{NetworkId, OperationId};
use muster_types::network::{FLOATING_NETWORK_ID, MAX_VXID, NetworkState};
use muster_types::time::now;

use super::addresses::AddressPool;
use super::{FAILED_LAST, Read, StoreError, Tx, Value, columns, params, placeholders};

#[derive(Debug, Clone, PartialEq)]
pub struct NetworkRow {
    pub id: NetworkId,
    pub name: String,
    /// `None` for the floating network.
    pub namespace: Option<String>,
    pub netblock: Netblock,
    pub provide_dhcp: bool,
    pub provide_nat: bool,
    pub provide_dns: bool,
    pub vxid: u32,
    pub floating_gateway: Option<Ipv4Addr>,
    pub state: NetworkState,
    pub error_message: Option<String>,
    /// Whether nodes should have it; `false` once it is being deleted.
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

columns! { NetworkRow {
    id: uuid,
    name,
    namespace,
    netblock,
    provide_dhcp,
    provide_nat,
    provide_dns,
    vxid,
    floating_gateway,
    state,
    error_message,
    wanted,
    generation,
    last_operation,
} }

/// The states in which a network can be found by its name.
const ACTIVE: &str = "state IN ('initial', 'created', 'error', 'delete-wait')";

impl NetworkRow {
    /// Returns the address pool of the network.
    #[must_use]
    pub fn pool(&self) -> AddressPool {
        AddressPool { network: self.id, netblock: self.netblock }
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<NetworkRow>, StoreError> {
    db.select(&format!("FROM networks WHERE {tail}"), values).await
}

pub async fn get(db: impl Read, id: NetworkId) -> Result<Option<NetworkRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Returns some networks by id.
pub async fn by_ids(db: impl Read, ids: &[NetworkId]) -> Result<Vec<NetworkRow>, StoreError> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    rows(db, &format!("uuid IN ({})", placeholders(ids.len())), &values).await
}

/// Returns up to [`crate::MAX_NAMESAKES`] networks with a name, in one namespace or in all. The floating network has no namespace.
pub async fn by_name(
    db: impl Read,
    name: &str,
    namespace: Option<&str>,
) -> Result<Vec<NetworkRow>, StoreError> {
    match namespace {
        Some(namespace) => {
            let tail = format!("name = ? AND namespace = ? AND {ACTIVE} ORDER BY {FAILED_LAST}");
            rows(db, &tail, params![name, namespace]).await
        }
        None => rows(db, &format!("name = ? AND {ACTIVE} ORDER BY {FAILED_LAST}"), params![name]).await,
    }
}

/// Returns the next networks after `after`, by id, without the floating one. With `seen_by`, only those of that
/// namespace and of those that trust it; with `all`, also deleted ones.
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

/// Returns all live networks of a namespace.
pub async fn of_namespace(db: impl Read, namespace: &str) -> Result<Vec<NetworkRow>, StoreError> {
    rows(db, &format!("namespace = ? AND {ACTIVE} ORDER BY uuid"), params![namespace]).await
}

/// Returns all networks that nodes should have.
pub async fn wanted(db: impl Read) -> Result<Vec<NetworkRow>, StoreError> {
    rows(db, "wanted = 1 AND namespace IS NOT NULL ORDER BY uuid", &[]).await
}

/// Returns the networks in a transitional state that no unfinished operation will change.
pub async fn without_operation(db: impl Read) -> Result<Vec<NetworkRow>, StoreError> {
    let tail = "state IN ('initial', 'delete-wait') AND NOT EXISTS (SELECT 1 FROM operations \
                WHERE target_type = 'network' AND target_id = networks.uuid AND state IN ('queued', 'executing')) \
                ORDER BY updated LIMIT 500";
    rows(db, tail, &[]).await
}

/// The sum of the generations of networks, each multiplied by a number of its own: it changes with every change that nodes must
/// apply, also when a network replaces another one.
pub(crate) const GENERATIONS: &str = "CAST(COALESCE(SUM(generation * (vxid + 1)), 0) AS SIGNED)";

/// Returns the number of networks that nodes should have and [`GENERATIONS`].
pub async fn generation_summary(mut db: impl Read) -> Result<(i64, i64), StoreError> {
    db.fetch_one(&format!("SELECT COUNT(*), {GENERATIONS} FROM networks WHERE wanted = 1"), &[]).await
}

/// Returns the soft-deleted networks that no node has and whose state changed before `before`.
pub async fn cleanable(db: impl Read, before: f64, limit: i64) -> Result<Vec<NetworkRow>, StoreError> {
    let tail = "state = 'deleted' AND updated <= ? \
                AND NOT EXISTS (SELECT 1 FROM node_networks WHERE network_uuid = networks.uuid) \
                ORDER BY updated LIMIT ?";
    rows(db, tail, params![before, limit]).await
}

/// Adds a network with an unused VXLAN id.
pub async fn insert(tx: &mut Tx, new: &NewNetwork) -> Result<NetworkRow, StoreError> {
    let floating = new.id == FLOATING_NETWORK_ID;
    // Fails only if nearly all ids are in use.
    for _ in 0..64 {
        let vxid = if floating { 0 } else { random_vxid() };
        let time = now();
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
                return row.ok_or_else(|| StoreError::Internal("a new network has no row".into()));
            }
            Err(StoreError::Duplicate(_)) if !floating => {}
            Err(error) => return Err(error),
        }
    }
    Err(StoreError::Conflict("no unused VXLAN id was found".into()))
}

fn random_vxid() -> u32 {
    let random = uuid::Uuid::new_v4().as_u128() % u128::from(MAX_VXID);
    u32::try_from(random).expect("the remainder is less than MAX_VXID") + 1
}

/// Locks a network until the transaction ends. Returns whether it is in one of `states`.
pub async fn lock(tx: &mut Tx, id: NetworkId, states: &[NetworkState]) -> Result<bool, StoreError> {
    update_in_states(tx, id, states, "version = version + 1").await
}

/// As [`lock`], and starts a new generation, which the nodes apply.
pub async fn bump_generation(
    tx: &mut Tx,
    id: NetworkId,
    states: &[NetworkState],
) -> Result<bool, StoreError> {
    update_in_states(tx, id, states, "generation = generation + 1, version = version + 1").await
}

async fn update_in_states(
    tx: &mut Tx,
    id: NetworkId,
    states: &[NetworkState],
    assignments: &str,
) -> Result<bool, StoreError> {
    let mut values: Vec<Value> = vec![id.into()];
    values.extend(states.iter().map(|state| Value::from(*state)));
    let sql = format!(
        "UPDATE networks SET {assignments} WHERE uuid = ? AND state IN ({})",
        placeholders(states.len())
    );
    Ok(tx.execute(&sql, &values).await? == 1)
}

/// Changes the state of a network if it is still `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: NetworkId,
    from: NetworkState,
    to: NetworkState,
    error: Option<&str>,
) -> Result<bool, StoreError> {
    if !from.can_transition_to(to) {
        return Err(StoreError::Internal(format!("a network cannot go from {from} to {to}")));
    }
    let updated = tx
        .execute(
            "UPDATE networks SET state = ?, error_message = COALESCE(?, error_message), updated = ?, \
             version = version + 1 WHERE uuid = ? AND state = ?",
            params![to, error, now(), id, from],
        )
        .await?;
    Ok(updated == 1)
}

/// Marks a network as one that nodes should no longer have.
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
