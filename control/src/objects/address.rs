//! Addresses of a network: list, reserve, release.

use std::net::Ipv4Addr;

use muster_types::address::{AddressRecord, AddressType};
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NetworkId, NodeId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::network::address_pool::{quarantine, require_within};
use crate::objects::network::state::{USABLE, changed, require_state};
use crate::objects::network::{find_own, object};
use muster_store::addresses::{self, AddressRow, Allocation};
use muster_store::{StoreError, Tx, TxError, cluster_values, networks, nodes, transaction};

/// The maximum length of a comment, in characters.
const MAX_COMMENT_CHARS: usize = 255;
/// The number of addresses in a page of a list.
const PAGE_SIZE: i64 = 2000;

/// Returns the next page of the addresses that are not free.
pub async fn list_page(
    app: &App,
    network: NetworkId,
    after: Option<Ipv4Addr>,
) -> Result<(Vec<AddressRecord>, Option<Ipv4Addr>)> {
    let rows = addresses::page(&*app.store, network, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.address);
    Ok((rows.into_iter().map(|row| record(network, row)).collect(), next))
}

/// Reserves an address, so that no interface gets it.
pub async fn reserve(
    app: &App,
    caller: &Caller,
    reference: &str,
    address: &str,
    comment: Option<String>,
) -> Result<AddressRecord> {
    let address = parse(address)?;
    let comment = comment.unwrap_or_default();
    if comment.chars().count() > MAX_COMMENT_CHARS {
        return Err(Error::Invalid(format!("comment: Longer than maximum length {MAX_COMMENT_CHARS}.")));
    }
    let network = find_own(app, caller, reference, None).await?;
    require_within(&network, address)?;
    require_state(&network, USABLE)?;
    let allocation =
        Allocation { kind: AddressType::Manual, user: object(network.id), comment: comment.clone() };
    let row = transaction!(app.store, |tx| {
        if !networks::lock(tx, network.id, USABLE).await? {
            return Err(changed(tx, network.id).await);
        }
        if !addresses::allocate(tx, network.pool(), address, &allocation).await? {
            return Err(Error::Conflict(format!("address {address} is already in use")).into());
        }
        let row = addresses::get(&mut *tx, network.id, address).await?;
        row.ok_or_else(|| Error::Internal("an allocated address has no row".into()).into())
    })?;
    app.record(
        caller,
        Event::audit(object(network.id), "address reserved")
            .with("address", address.to_string())
            .with("comment", comment),
    );
    Ok(record(network.id, row))
}

/// Releases a manual reservation. The address is quarantined before it can be allocated.
pub async fn release(app: &App, caller: &Caller, reference: &str, address: &str) -> Result<()> {
    let address = parse(address)?;
    let network = find_own(app, caller, reference, None).await?;
    require_within(&network, address)?;
    require_state(&network, USABLE)?;
    let comment = transaction!(app.store, |tx| {
        if !networks::lock(tx, network.id, USABLE).await? {
            return Err(changed(tx, network.id).await);
        }
        let reserved = addresses::get(&mut *tx, network.id, address).await?;
        let reserved = reserved.filter(|reserved| reserved.kind == AddressType::Manual);
        let reserved = reserved
            .ok_or_else(|| Error::Forbidden(format!("address {address} is not a manual reservation")))?;
        let user = reserved.user.clone().unwrap_or_else(|| object(network.id));
        addresses::release(tx, network.pool(), address, AddressType::Manual, &user, quarantine(app).enabled)
            .await?;
        cluster_values::remove(tx, &unfenced_key(network.id, address)).await?;
        Ok(reserved.comment)
    })?;
    app.record(
        caller,
        Event::audit(object(network.id), "address reservation released")
            .with("address", address.to_string())
            .with("comment", comment),
    );
    Ok(())
}

/// The prefix of the cluster values with the other nodes on which the VM of a deleted instance may still use an address. The first one
/// is the user of the reservation.
const UNFENCED: &str = "UNFENCED ";

fn unfenced_key(network: NetworkId, address: Ipv4Addr) -> String {
    format!("{UNFENCED}{network} {address}")
}

fn parse_unfenced(key: &str, value: &str) -> Result<Vec<NodeId>> {
    let unreadable = |error| Error::Internal(format!("table cluster_values, value of {key:?}: {error}"));
    serde_json::from_str(value).map_err(unreadable)
}

async fn set_unfenced_in(tx: &mut Tx, key: &str, nodes: &[NodeId]) -> Result<(), TxError> {
    if nodes.is_empty() {
        cluster_values::remove(tx, key).await?;
        return Ok(());
    }
    let value = serde_json::to_string(nodes).map_err(|error| Error::Internal(error.to_string()))?;
    Ok(cluster_values::set(tx, key, &value).await?)
}

async fn unfenced_allocation(tx: &mut Tx, node: NodeId, object: &str) -> Result<Allocation, StoreError> {
    let name = nodes::names(&mut *tx, &[node]).await?.remove(&node).unwrap_or_else(|| node.to_string());
    Ok(Allocation {
        kind: AddressType::Manual,
        user: ObjectRef::new(ObjectType::Node, node),
        comment: format!("the VM of {object} may still run on node {name}"),
    })
}

/// Reserves the address of a deleted instance whose VM may still run on a node and on some other nodes, until all of them are back or
/// the reservation is released by request.
pub(crate) async fn reserve_unfenced_in(
    tx: &mut Tx,
    network: NetworkId,
    address: Ipv4Addr,
    instance: InstanceId,
    (node, others): (NodeId, &[NodeId]),
) -> Result<(), TxError> {
    let allocation = unfenced_allocation(tx, node, &format!("the deleted instance {instance}")).await?;
    let user = ObjectRef::new(ObjectType::Instance, instance);
    addresses::reallocate(tx, network, address, (AddressType::Instance, &user), &allocation).await?;
    set_unfenced_in(tx, &unfenced_key(network, address), others).await
}

/// Releases the addresses that are reserved because VMs might run on a node. The node has stopped them, and may be deleted. Those that a
/// VM on another node might use stay reserved for that.
pub(crate) async fn release_unfenced(app: &App, node: NodeId) -> Result<()> {
    transaction!(app.store.unfenced(), |tx| {
        // Several nodes may return at the same time.
        cluster_values::lock_prefix(tx, UNFENCED).await?;
        for (key, value) in cluster_values::with_prefix(&mut *tx, UNFENCED).await? {
            let mut others = parse_unfenced(&key, &value)?;
            if others.contains(&node) {
                others.retain(|other| *other != node);
                set_unfenced_in(tx, &key, &others).await?;
            }
        }
        Ok(())
    })?;
    let user = ObjectRef::new(ObjectType::Node, node);
    for (network, address) in addresses::of_user(&*app.store, AddressType::Manual, &user).await? {
        let (key, kind) = (unfenced_key(network, address), AddressType::Manual);
        let released = transaction!(app.store.unfenced(), |tx| {
            let Some(row) = networks::get(&mut *tx, network).await? else { return Ok(false) };
            cluster_values::lock_prefix(tx, &key).await?;
            let others = cluster_values::get(&mut *tx, &key).await?;
            let others = others.map(|value| parse_unfenced(&key, &value)).transpose()?.unwrap_or_default();
            if let [next, rest @ ..] = others.as_slice() {
                let allocation = unfenced_allocation(tx, *next, "a deleted instance").await?;
                if addresses::reallocate(tx, network, address, (kind, &user), &allocation).await? {
                    set_unfenced_in(tx, &key, rest).await?;
                }
                return Ok(false);
            }
            let is_quarantined = quarantine(app).enabled;
            Ok(addresses::release(tx, row.pool(), address, kind, &user, is_quarantined).await?)
        })?;
        if released {
            let event = Event::new(EventType::Mutate, object(network), "address reservation released");
            let event = event.with("address", address.to_string()).with_object(user.clone());
            app.events.record(event.with("reason", "the node has stopped the VM that might have used it"));
        }
    }
    Ok(())
}

fn parse(address: &str) -> Result<Ipv4Addr> {
    address.parse().map_err(|_| Error::Invalid("address: must be an IPv4 address".into()))
}

fn record(network: NetworkId, row: AddressRow) -> AddressRecord {
    AddressRecord {
        address: row.address,
        kind: row.kind,
        reservation_type: row.kind,
        user: row
            .user
            .as_ref()
            .map_or_else(Vec::new, |user| vec![user.object_type.to_string(), user.id.clone()]),
        user_type: row.user.as_ref().map(|user| user.object_type.to_string()),
        user_uuid: row.user.map(|user| user.id),
        comment: row.comment,
        when: row.reserved_at,
        reserved_at: row.reserved_at,
        ipam_uuid: network,
    }
}
