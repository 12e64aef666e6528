//! Interfaces: created and removed with their instance, floated and defloated by callers.

use std::net::Ipv4Addr;

use muster_types::address::{AddressType, MacAddress};
use muster_types::event::Event;
use muster_types::ids::{InstanceId, InterfaceId, NetworkId, NodeId};
use muster_types::interface::{InterfaceRecord, InterfaceState};
use muster_types::network::NetworkState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::address::reserve_unfenced_in;
use crate::objects::network::address_pool::{NO_FREE_ADDRESSES, floating_pool, quarantine, require_within};
use crate::objects::network::state::{PRESENT, USABLE, changed, require_state};
use crate::objects::network::wait::wait_applied;
use crate::objects::{network, quota};
use muster_store::addresses::{self, Allocation};
use muster_store::interfaces::{self, InterfaceRow};
use muster_store::networks::{self, NetworkRow};
use muster_store::{Read, Tx, TxError, metadata, transaction};

/// The version of the record's format.
const VERSION: i64 = 3;

/// The number of interfaces in a page of a list.
const PAGE_SIZE: i64 = 500;

/// The address that a new interface should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WantedAddress {
    Any,
    Exactly(Ipv4Addr),
    None,
}

/// An interface to create.
#[derive(Debug, Clone)]
pub struct NewInterface {
    pub network: NetworkId,
    pub instance: InstanceId,
    pub namespace: String,
    pub hostname: String,
    pub node: Option<NodeId>,
    pub mac: Option<MacAddress>,
    pub address: WantedAddress,
    pub float: bool,
    pub model: String,
    pub order: i64,
}

fn object(id: InterfaceId) -> ObjectRef {
    ObjectRef::new(ObjectType::Interface, id)
}

/// Creates an interface as part of a transaction, with its address and its MAC address. Call
/// `app.networks.notify_changed()` afterwards. The transaction must end with the [`Admission`](quota::Admission) of the
/// floating address, which locks the namespace.
pub async fn create_in(app: &App, tx: &mut Tx, new: &NewInterface) -> Result<InterfaceRow, TxError> {
    if !networks::bump_generation(tx, new.network, USABLE).await? {
        return Err(changed(tx, new.network).await);
    }
    let network = networks::get(&mut *tx, new.network).await?.ok_or_else(|| Error::not_found("network"))?;
    let id = InterfaceId::new();
    let mac = allocate_mac(tx, new.mac, id).await?;
    let ipv4 = allocate_address(app, tx, &network, new).await?;
    let floating = match ipv4 {
        Some(_) if new.float => Some(allocate_floating(app, tx, &new.namespace, id).await?),
        None if new.float => {
            return Err(Error::Invalid("float: an interface without an address cannot float".into()).into());
        }
        _ => None,
    };
    let row = InterfaceRow {
        id,
        network: new.network,
        instance: new.instance,
        namespace: new.namespace.clone(),
        hostname: new.hostname.clone(),
        node: new.node,
        mac,
        ipv4,
        floating,
        model: new.model.clone(),
        order: new.order,
        state: InterfaceState::Initial,
    };
    interfaces::insert(tx, &row).await?;
    Ok(row)
}

async fn allocate_mac(
    tx: &mut Tx,
    wanted: Option<MacAddress>,
    id: InterfaceId,
) -> Result<MacAddress, TxError> {
    if let Some(mac) = wanted {
        if interfaces::allocate_mac(tx, mac, id).await? {
            return Ok(mac);
        }
        return Err(Error::Conflict(format!("macaddress: {mac} is already in use")).into());
    }
    for _ in 0..64 {
        let mac = MacAddress::random();
        if interfaces::allocate_mac(tx, mac, id).await? {
            return Ok(mac);
        }
    }
    Err(Error::InsufficientCapacity("No free hardware addresses".into()).into())
}

async fn allocate_address(
    app: &App,
    tx: &mut Tx,
    network: &NetworkRow,
    new: &NewInterface,
) -> Result<Option<Ipv4Addr>, TxError> {
    let user = ObjectRef::new(ObjectType::Instance, new.instance);
    let allocation = Allocation::new(AddressType::Instance, user);
    match new.address {
        WantedAddress::None => Ok(None),
        WantedAddress::Any => {
            let found =
                addresses::allocate_any(tx, network.pool(), &allocation, quarantine(app).reclaim_after)
                    .await?;
            found.map(Some).ok_or_else(|| Error::InsufficientCapacity(NO_FREE_ADDRESSES.into()).into())
        }
        WantedAddress::Exactly(address) => {
            require_within(network, address)?;
            if !addresses::allocate(tx, network.pool(), address, &allocation).await? {
                return Err(Error::AddressInUse(address).into());
            }
            Ok(Some(address))
        }
    }
}

async fn allocate_floating(
    app: &App,
    tx: &mut Tx,
    namespace: &str,
    id: InterfaceId,
) -> Result<Ipv4Addr, TxError> {
    quota::require_in(app, tx, namespace, &[(QuotaName::FloatingAddresses, 1)]).await?;
    let floats = floating_pool(&mut *tx).await?;
    let allocation = Allocation::new(AddressType::Floating, object(id));
    let found = addresses::allocate_any(tx, floats, &allocation, quarantine(app).reclaim_after).await?;
    found.ok_or_else(|| Error::InsufficientCapacity(NO_FREE_ADDRESSES.into()).into())
}

/// Sets the state of an interface as part of a transaction, after its instance was built or failed.
pub async fn set_state_in(tx: &mut Tx, row: &InterfaceRow, to: InterfaceState) -> Result<bool, TxError> {
    networks::bump_generation(tx, row.network, PRESENT).await?;
    Ok(interfaces::set_state(tx, row.id, row.state, to).await?)
}

/// Removes an interface as part of a transaction: quarantines its addresses and frees its MAC address. If VMs may still use
/// its address on the nodes `unfenced`, it is reserved instead. Call `app.networks.notify_changed()` afterwards.
pub async fn delete_in(
    app: &App,
    tx: &mut Tx,
    id: InterfaceId,
    unfenced: &[NodeId],
) -> Result<bool, TxError> {
    let Some(network) = interfaces::get(&mut *tx, id).await?.map(|row| row.network) else { return Ok(false) };
    // Locks the network before the interface, as everywhere, so that floating it concurrently has to wait.
    networks::bump_generation(tx, network, PRESENT).await?;
    if !interfaces::lock(tx, id).await? {
        return Ok(false);
    }
    let Some(row) = interfaces::get(&mut *tx, id).await? else { return Ok(false) };
    interfaces::set_state(tx, id, row.state, InterfaceState::Deleted).await?;
    let is_quarantined = quarantine(app).enabled;
    if let Some(floating) = row.floating {
        let floats = floating_pool(&mut *tx).await?;
        addresses::release(tx, floats, floating, AddressType::Floating, &object(id), is_quarantined).await?;
    }
    if let (Some(address), [node, others @ ..]) = (row.ipv4, unfenced) {
        reserve_unfenced_in(tx, row.network, address, row.instance, (*node, others)).await?;
    } else if let (Some(address), Some(network)) = (row.ipv4, networks::get(&mut *tx, row.network).await?) {
        let user = ObjectRef::new(ObjectType::Instance, row.instance);
        addresses::release(tx, network.pool(), address, AddressType::Instance, &user, is_quarantined).await?;
    }
    Ok(true)
}

/// Returns an interface and its network if the caller may read both.
async fn find(app: &App, caller: &Caller, id: &str) -> Result<(InterfaceRow, NetworkRow)> {
    let absent = || Error::not_found("interface");
    let id: InterfaceId = id.parse().map_err(|_| absent())?;
    let (row, network) = interfaces::with_network(&*app.store, id).await?;
    let row = row.ok_or_else(absent)?;
    if !caller.may_see(&*app.store, &row.namespace).await? {
        return Err(absent());
    }
    let network = network.ok_or_else(|| Error::not_found("interface network"))?;
    let visible = match &network.namespace {
        Some(owner) => caller.may_see(&*app.store, owner).await?,
        None => caller.is_system(),
    };
    if visible { Ok((row, network)) } else { Err(absent()) }
}

/// Returns an interface and its network if the caller may change both.
async fn find_own(app: &App, caller: &Caller, id: &str) -> Result<(InterfaceRow, NetworkRow)> {
    let (row, network) = find(app, caller, id).await?;
    let own = caller.may_change(&row.namespace)
        && network.namespace.as_ref().is_none_or(|owner| caller.may_change(owner));
    if own { Ok((row, network)) } else { Err(Error::not_found("interface")) }
}

/// Returns the interface whose metadata the caller may read or change.
pub async fn metadata_object(app: &App, caller: &Caller, id: &str, change: bool) -> Result<ObjectRef> {
    let (row, _) = if change { find_own(app, caller, id).await? } else { find(app, caller, id).await? };
    Ok(object(row.id))
}

pub async fn get(app: &App, caller: &Caller, id: &str) -> Result<InterfaceRecord> {
    let (row, _) = find(app, caller, id).await?;
    record(app, row).await
}

/// Returns the next page of the interfaces of a network, by id.
pub async fn list_page(
    app: &App,
    network: NetworkId,
    after: Option<InterfaceId>,
) -> Result<(Vec<InterfaceRecord>, Option<InterfaceId>)> {
    let rows = interfaces::page(&*app.store, network, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.id);
    Ok((records(&*app.store, rows).await?, next))
}

/// Assigns a floating address to an interface.
pub async fn float(app: &App, caller: &Caller, id: &str) -> Result<()> {
    let (row, network) = find_own(app, caller, id).await?;
    if row.state == InterfaceState::Deleted {
        return Err(Error::not_found("interface"));
    }
    require_state(&network, &[NetworkState::Created])?;
    if row.ipv4.is_none() {
        return Err(Error::Conflict("interface has no address that could float".into()));
    }
    let added = [(QuotaName::FloatingAddresses, 1)];
    let address = transaction!(app.store, |tx| {
        let admission = quota::Admission::begin(app, tx, &row.namespace, &added).await?;
        if !networks::bump_generation(tx, network.id, &[NetworkState::Created]).await? {
            return Err(changed(tx, network.id).await);
        }
        let address = allocate_floating(app, tx, &row.namespace, row.id).await?;
        if !interfaces::set_floating(tx, row.id, None, Some(address)).await? {
            return Err(Error::Conflict("interface already has a floating address".into()).into());
        }
        admission.finish(tx).await?;
        Ok(address)
    })?;
    record_floating_change(app, caller, &row, "float request from REST API", address);
    wait_applied(app, network.id).await
}

/// Releases the floating address of an interface, if it has one. The address is quarantined.
pub async fn defloat(app: &App, caller: &Caller, id: &str) -> Result<()> {
    let (row, network) = find_own(app, caller, id).await?;
    let Some(address) = row.floating.filter(|_| row.state != InterfaceState::Deleted) else { return Ok(()) };
    let floats = floating_pool(&*app.store).await?;
    let released = transaction!(app.store, |tx| {
        networks::bump_generation(tx, network.id, PRESENT).await?;
        if !interfaces::set_floating(tx, row.id, Some(address), None).await? {
            return Ok(false);
        }
        let user = object(row.id);
        addresses::release(tx, floats, address, AddressType::Floating, &user, quarantine(app).enabled)
            .await?;
        Ok(true)
    })?;
    if released {
        record_floating_change(app, caller, &row, "defloat request from REST API", address);
    }
    wait_applied(app, network.id).await
}

fn record_floating_change(app: &App, caller: &Caller, row: &InterfaceRow, message: &str, address: Ipv4Addr) {
    let event = Event::audit(object(row.id), message)
        .with_object(network::object(row.network))
        .with_object(ObjectRef::new(ObjectType::Instance, row.instance))
        .with("address", address.to_string());
    app.record(caller, event);
}

pub(crate) async fn record(app: &App, row: InterfaceRow) -> Result<InterfaceRecord> {
    let mut records = records(&*app.store, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("interface"))
}

/// Returns the records of rows, with a constant number of queries.
pub(crate) async fn records<D: Read + Copy>(db: D, rows: Vec<InterfaceRow>) -> Result<Vec<InterfaceRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut metadata_of = metadata::of_objects(db, ObjectType::Interface, &ids).await?;
    let records = rows.into_iter().zip(ids);
    Ok(records.map(|(row, id)| to_record(row, metadata_of.remove(&id).unwrap_or_default())).collect())
}

pub(crate) fn to_record(row: InterfaceRow, metadata: Map<String, Value>) -> InterfaceRecord {
    InterfaceRecord {
        metadata,
        uuid: row.id,
        instance_uuid: row.instance,
        network_uuid: row.network,
        macaddr: row.mac,
        ipv4: row.ipv4,
        floating: row.floating,
        model: row.model,
        order: row.order,
        state: row.state,
        version: VERSION,
    }
}
