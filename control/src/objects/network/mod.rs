//! Networks: create, get, list, delete, route, ping. See docs/decisions/0013.

pub(crate) mod address_pool;
pub mod dns;
pub(crate) mod plan;
pub(crate) mod state;
pub(crate) mod wait;

use std::net::Ipv4Addr;

use muster_types::address::{AddressType, Netblock};
use muster_types::event::Event;
use muster_types::ids::{NetworkId, OperationId};
use muster_types::network::{FLOATING_NETWORK_ID, NetworkRecord, NetworkState, check_name};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::operation::{OperationHandle, OperationType};
use muster_types::quota::QuotaName;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::namespace_for_delete_all;
use crate::objects::lookup::{SearchScope, only_match, search_order};
use crate::objects::node_location::{NodeLocation, network_node};
use crate::objects::quota;
use crate::queue::{CreateNetwork, DeleteNetwork, NewOperation, Operation};
use address_pool::{NO_FREE_ADDRESSES, floating_pool, quarantine};
use muster_store::addresses::{self, Allocation};
use muster_store::attributes::{self, ObjectAttributes};
use muster_store::networks::{NetworkRow, NewNetwork};
use muster_store::operations::OperationRow;
use muster_store::{
    Read, StoreError, Tx, TxError, interfaces, networks, operations, references, transaction,
};
use state::{changed, require_state};

/// The version of the record's format.
const VERSION: i64 = 9;
/// The number of networks in a page of a list.
const PAGE_SIZE: i64 = 500;
/// The relationship between a network and the addresses that are routed to it.
pub const ROUTED: &str = "routed_address";
/// A request to create a network.
#[derive(Debug, Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewNetwork)]
#[schema(example = json!({"name": "blue", "netblock": "10.0.0.0/24", "provide_dns": true}))]
pub struct NetworkRequest {
    /// The name of the network; it does not need to be unique.
    #[schema(value_type = String)]
    pub name: Option<String>,
    /// The network in CIDR notation, such as `10.0.0.0/24`; from /8 to /29.
    #[schema(value_type = String)]
    pub netblock: Option<String>,
    /// Whether instances get their addresses by DHCP; true by default.
    pub provide_dhcp: Option<bool>,
    /// Whether instances reach external networks through NAT; true by default.
    pub provide_nat: Option<bool>,
    /// Whether the router resolves DNS names; false by default.
    pub provide_dns: Option<bool>,
    /// Defaults to the caller's. Only `system` may name another namespace.
    pub namespace: Option<String>,
    /// Whether to only check the request, without creating anything; false by default. The response is the record that would
    /// be created; its UUID is an example.
    pub dry_run: Option<bool>,
}

/// Returns the network as the subject of events.
pub fn object(id: NetworkId) -> ObjectRef {
    ObjectRef::new(ObjectType::Network, id)
}

/// Creates the floating network on the first start of the cluster. Its block never changes.
pub async fn bootstrap(app: &App) -> Result<()> {
    let configured: Netblock = app.settings.floating_network.parse()?;
    let found = transaction!(app.store, |tx| {
        if let Some(row) = networks::get(&mut *tx, FLOATING_NETWORK_ID).await? {
            return Ok(row.netblock);
        }
        let new = NewNetwork {
            id: FLOATING_NETWORK_ID,
            name: "floating".into(),
            namespace: None,
            netblock: configured,
            provide_dhcp: false,
            provide_nat: false,
            provide_dns: false,
        };
        match networks::insert(tx, &new).await {
            Ok(row) => reserve_special_addresses(tx, &row).await?,
            // Another daemon created it first: retry.
            Err(StoreError::Duplicate(reason)) => return Err(StoreError::Conflict(reason).into()),
            Err(error) => return Err(error.into()),
        }
        Ok(configured)
    })?;
    if found != configured {
        tracing::warn!(%found, %configured, "ignoring FLOATING_NETWORK: the cluster was created with another one");
    }
    Ok(())
}

/// Reserves the addresses that no interface can have.
async fn reserve_special_addresses(tx: &mut Tx, row: &NetworkRow) -> Result<(), StoreError> {
    let block = row.netblock;
    for (address, kind) in [
        (block.network(), AddressType::Network),
        (block.router(), AddressType::Gateway),
        (block.broadcast(), AddressType::Broadcast),
    ] {
        addresses::allocate(tx, row.pool(), address, &Allocation::new(kind, object(row.id))).await?;
    }
    Ok(())
}

/// Creates a network. An operation creates its devices.
pub async fn create(app: &App, caller: &Caller, request: NetworkRequest) -> Result<NetworkRecord> {
    let required = |name: &str| Error::Invalid(format!("{name}: Missing data for required field."));
    let name = request.name.ok_or_else(|| required("name"))?;
    let netblock = Netblock::check(&request.netblock.ok_or_else(|| required("netblock"))?)?;
    check_name(&name)?;
    let namespace =
        request.namespace.filter(|name| !name.is_empty()).unwrap_or_else(|| caller.namespace.clone());
    // A trusted namespace may create objects in the namespace that trusts it.
    if !caller.may_see(&*app.store, &namespace).await? {
        let text = "only admins can create resources in a different namespace";
        return Err(Error::Unauthenticated(text.into()));
    }
    let floats = floating_pool(&*app.store).await?.netblock;
    if netblock.overlaps(floats) {
        let text = format!("netblock: {netblock} overlaps the floating network {floats}");
        return Err(Error::Invalid(text));
    }
    let new = NewNetwork {
        id: NetworkId::new(),
        name,
        namespace: Some(namespace.clone()),
        netblock,
        provide_dhcp: request.provide_dhcp.unwrap_or(true),
        provide_nat: request.provide_nat.unwrap_or(true),
        provide_dns: request.provide_dns.unwrap_or(false),
    };
    // With NAT, an operation allocates the address.
    let added = [(QuotaName::Networks, 1), (QuotaName::FloatingAddresses, i64::from(new.provide_nat))];
    let row = transaction!(app.store, |tx| {
        let admission = quota::Admission::begin(app, tx, &namespace, &added).await?;
        let row = networks::insert(tx, &new).await?;
        reserve_special_addresses(tx, &row).await?;
        let handle = operation_on(&row, CreateNetwork {}, Some(caller)).enqueue(tx).await?;
        networks::set_operation(tx, row.id, handle.op_uuid).await?;
        // The lock keeps a concurrently deleted namespace from leaving the network behind.
        admission.finish(tx).await?;
        Ok(NetworkRow { last_operation: Some(handle.op_uuid), ..row })
    })?;
    app.queue.wake();
    app.record(
        caller,
        Event::audit(object(row.id), "db record created")
            .with("name", row.name.clone())
            .with("netblock", row.netblock.to_string())
            .with("vxid", row.vxid),
    );
    app.record(caller, Event::audit(object(row.id), "creation request from REST API"));
    to_record(&*app.store, row).await
}

fn operation_on<P: Operation>(row: &NetworkRow, parameters: P, caller: Option<&Caller>) -> NewOperation<P> {
    NewOperation {
        request_id: caller.map(|caller| caller.request_id.clone()),
        ..NewOperation::new(object(row.id), row.namespace.clone(), parameters)
    }
}

/// Returns a network by id or name that the caller may read. A name refers to the caller's namespace; `system` also finds
/// names of all others.
pub async fn find(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<NetworkRow> {
    find_in(&*app.store, caller, reference, namespace).await
}

async fn find_in<D: Read + Copy>(
    store: D,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<NetworkRow> {
    let absent = || Error::not_found("network");
    let namespace = namespace.filter(|name| !name.is_empty());
    let row = match NameOrId::parse(reference) {
        NameOrId::Id(id) => networks::get(store, id).await?,
        NameOrId::Name(name) => by_name(store, caller, &name, namespace).await?,
    };
    let row = row.ok_or_else(absent)?;
    if namespace.is_some_and(|wanted| row.namespace.as_deref() != Some(wanted)) {
        return Err(absent());
    }
    let visible = match &row.namespace {
        Some(owner) => caller.may_see(store, owner).await?,
        None => caller.is_system(),
    };
    if visible { Ok(row) } else { Err(absent()) }
}

async fn by_name<D: Read + Copy>(
    store: D,
    caller: &Caller,
    name: &str,
    namespace: Option<&str>,
) -> Result<Option<NetworkRow>> {
    for scope in search_order(caller, namespace) {
        let found = match scope {
            SearchScope::Namespace(namespace) => networks::by_name(store, name, Some(namespace)).await?,
            SearchScope::AllNamespaces => networks::by_name(store, name, None).await?,
            // Networks are not shared.
            SearchScope::Shared => vec![],
        };
        if let Some(row) = only_match(found, "networks", name)? {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

/// Returns a network by id or name that instances of a namespace may use.
pub(crate) async fn find_for_instances(app: &App, namespace: &str, reference: &str) -> Result<NetworkRow> {
    let absent = || Error::NotFound(format!("network {reference} not found"));
    match NameOrId::parse(reference) {
        NameOrId::Id(id) => {
            let row = networks::get(&*app.store, id).await?.ok_or_else(absent)?;
            if row.namespace.as_deref() != Some(namespace) {
                return Err(Error::NotFound(format!("network {id} does not exist")));
            }
            Ok(row)
        }
        NameOrId::Name(name) => {
            let found = networks::by_name(&*app.store, &name, Some(namespace)).await?;
            only_match(found, "networks", &name)?.ok_or_else(absent)
        }
    }
}

/// Returns a network by id or name that the caller may change.
pub async fn find_own(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<NetworkRow> {
    let row = find(app, caller, reference, namespace).await?;
    let own = row.namespace.as_ref().map_or_else(|| caller.is_system(), |owner| caller.may_change(owner));
    if own { Ok(row) } else { Err(Error::not_found("network")) }
}

pub async fn get(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<NetworkRecord> {
    let snapshot = app.store.snapshot()?;
    let row = find_in(&snapshot, caller, reference, namespace).await?;
    to_record(&snapshot, row).await
}

/// Returns the next page of the networks that the caller may read, by id.
pub async fn list_page(
    app: &App,
    caller: &Caller,
    all: bool,
    after: Option<NetworkId>,
) -> Result<(Vec<NetworkRecord>, Option<NetworkId>)> {
    let seen_by = (!caller.is_system()).then_some(caller.namespace.as_str());
    let rows = networks::page(&*app.store, seen_by, all, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.id);
    Ok((records(&*app.store, rows).await?, next))
}

async fn to_record<D: Read + Copy>(db: D, row: NetworkRow) -> Result<NetworkRecord> {
    let mut records = records(db, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("network"))
}

/// Returns the records of rows, with a constant number of queries.
async fn records<D: Read + Copy>(db: D, rows: Vec<NetworkRow>) -> Result<Vec<NetworkRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut attributes_of = attributes::of_objects(db, ObjectType::Network, &ids).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let id = row.id.to_string();
            let ObjectAttributes { metadata, references } = attributes_of.remove(&id).unwrap_or_default();
            NetworkRecord {
                uuid: row.id,
                name: row.name,
                namespace: row.namespace,
                netblock: row.netblock,
                provide_dhcp: row.provide_dhcp,
                provide_nat: row.provide_nat,
                provide_dns: row.provide_dns,
                floating_gateway: row.floating_gateway,
                vxid: row.vxid.into(),
                vxlan_id: row.vxid.into(),
                state: row.state,
                error_message: row.error_message,
                last_cluster_operation: row.last_operation.map(handle),
                metadata,
                version: VERSION,
                references_to: references.to,
                references_from: references.from,
            }
        })
        .collect())
}

fn handle(operation: OperationId) -> OperationHandle {
    OperationHandle { op_type: OperationType::Network, op_uuid: operation }
}

/// Deletes a network. One with interfaces is deleted once they are removed.
pub async fn delete(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<OperationHandle> {
    let row = find_own(app, caller, reference, namespace).await?;
    reject_floating(&row, "delete")?;
    if row.state == NetworkState::Deleted {
        return Err(Error::NotFound("network is deleted".into()));
    }
    let handle = transaction!(app.store, |tx| { enqueue_delete(tx, row.id, Some(caller)).await })?;
    app.queue.wake();
    app.record(caller, Event::audit(object(row.id), "deletion request from REST API"));
    handle.ok_or_else(|| Error::NotFound("network is deleted".into()))
}

fn reject_floating(row: &NetworkRow, verb: &str) -> Result<()> {
    if row.id == FLOATING_NETWORK_ID {
        return Err(Error::Forbidden(format!("you cannot {verb} the floating network")));
    }
    Ok(())
}

/// Marks a network for deletion and queues the operation, unless one is pending. Returns `None` if it is deleted.
pub(crate) async fn enqueue_delete(
    tx: &mut Tx,
    id: NetworkId,
    caller: Option<&Caller>,
) -> Result<Option<OperationHandle>, TxError> {
    let Some(row) = networks::get(&mut *tx, id).await? else { return Ok(None) };
    match row.state {
        NetworkState::Deleted => return Ok(None),
        NetworkState::DeleteWait => {
            if let Some(pending) = pending_delete(&mut *tx, id).await? {
                return Ok(Some(handle(pending.id)));
            }
        }
        NetworkState::Initial | NetworkState::Created | NetworkState::Error => {
            if !networks::set_state(tx, id, row.state, NetworkState::DeleteWait, None).await? {
                return Err(StoreError::Conflict("the network changed".into()).into());
            }
        }
    }
    let handle = operation_on(&row, DeleteNetwork {}, caller).enqueue(tx).await?;
    networks::set_operation(tx, id, handle.op_uuid).await?;
    Ok(Some(handle))
}

async fn pending_delete(db: impl Read, id: NetworkId) -> Result<Option<OperationRow>, StoreError> {
    let rows = operations::of_target(db, &object(id)).await?;
    Ok(rows.into_iter().find(|row| row.name == DeleteNetwork::KIND.name && !row.state.is_final()))
}

/// A network that is being deleted.
#[derive(Debug)]
pub struct QueuedDeletion {
    pub network: NetworkId,
    pub operation: OperationHandle,
    /// The number of interfaces that have to be removed first.
    pub interfaces: i64,
}

/// Deletes every network of a namespace, as [`delete`] does.
pub async fn delete_all(app: &App, caller: &Caller, namespace: Option<&str>) -> Result<Vec<QueuedDeletion>> {
    let named = namespace.filter(|name| !name.is_empty()).unwrap_or(&caller.namespace);
    let namespace = namespace_for_delete_all(&*app.store, caller, Some(named)).await?;
    let mut deletions = vec![];
    for row in networks::of_namespace(&*app.store, namespace).await? {
        let queued = transaction!(app.store, |tx| {
            let Some(operation) = enqueue_delete(tx, row.id, Some(caller)).await? else { return Ok(None) };
            let interfaces = interfaces::count(&mut *tx, row.id).await?;
            Ok(Some(QueuedDeletion { network: row.id, operation, interfaces }))
        })?;
        app.record(caller, Event::audit(object(row.id), "deletion request from REST API"));
        deletions.extend(queued);
    }
    app.queue.wake();
    Ok(deletions)
}

/// Routes a floating address to a network without translation.
pub async fn route(app: &App, caller: &Caller, reference: &str) -> Result<Ipv4Addr> {
    let row = find_own(app, caller, reference, None).await?;
    reject_floating(&row, "route addresses to")?;
    require_state(&row, &[NetworkState::Created])?;
    let floats = floating_pool(&*app.store).await?;
    let namespace = row.namespace.clone().unwrap_or_default();
    let added = [(QuotaName::FloatingAddresses, 1), (QuotaName::RoutedAddresses, 1)];
    let address = transaction!(app.store, |tx| {
        if !networks::bump_generation(tx, row.id, &[NetworkState::Created]).await? {
            return Err(changed(tx, row.id).await);
        }
        let admission = quota::Admission::begin(app, tx, &namespace, &added).await?;
        admission.reject_early(tx, &added.map(|(name, _)| name)).await?;
        let allocation = Allocation::new(AddressType::Routed, object(row.id));
        let allocated =
            addresses::allocate_any(tx, floats, &allocation, quarantine(app).reclaim_after).await?;
        let address = allocated.ok_or_else(|| Error::InsufficientCapacity(NO_FREE_ADDRESSES.into()))?;
        let (text, target) = (address.to_string(), object(FLOATING_NETWORK_ID));
        references::insert(tx, &object(row.id), ROUTED, Some(&text), &target).await?;
        admission.finish(tx).await?;
        Ok(address)
    })?;
    app.record(
        caller,
        Event::audit(object(row.id), "route address request from REST API")
            .with("address", address.to_string()),
    );
    match wait::wait_applied(app, row.id).await {
        Err(Error::Unavailable(reason)) => Err(Error::Unavailable(format!("{address}: {reason}"))),
        outcome => outcome.map(|()| address),
    }
}

/// Releases a routed address.
pub async fn unroute(app: &App, caller: &Caller, reference: &str, address: &str) -> Result<()> {
    let address: Ipv4Addr = address.parse().map_err(|_| Error::Invalid("invalid address".into()))?;
    let row = find_own(app, caller, reference, None).await?;
    reject_floating(&row, "unroute addresses from")?;
    require_state(&row, &[NetworkState::Created])?;
    let floats = floating_pool(&*app.store).await?;
    let allocated = if floats.netblock.contains(address) {
        addresses::get(&*app.store, floats.network, address).await?
    } else {
        None
    };
    let allocated = allocated.filter(|allocated| allocated.kind != AddressType::Halo);
    let user = allocated.ok_or_else(|| Error::NotFound("address not routed".into()))?;
    if user.kind != AddressType::Routed || user.user != Some(object(row.id)) {
        return Err(Error::Forbidden("address not routed by this network".into()));
    }
    transaction!(app.store, |tx| {
        if !networks::bump_generation(tx, row.id, &[NetworkState::Created]).await? {
            return Err(changed(tx, row.id).await);
        }
        let (kind, user) = (AddressType::Routed, object(row.id));
        if !addresses::release(tx, floats, address, kind, &user, quarantine(app).enabled).await? {
            return Err(Error::NotFound("address not routed".into()).into());
        }
        references::remove(tx, &object(row.id), ROUTED, &address.to_string()).await?;
        Ok(())
    })?;
    app.record(
        caller,
        Event::audit(object(row.id), "unroute address request from REST API")
            .with("address", address.to_string()),
    );
    wait::wait_applied(app, row.id).await
}

/// A ping that was checked.
#[derive(Debug)]
pub struct PreparedPing {
    pub network: NetworkId,
    /// The namespace of the network.
    pub owner: Option<String>,
    pub address: Ipv4Addr,
    /// The node to send it from.
    pub location: NodeLocation,
}

/// Checks a ping and finds the node to send it from.
pub async fn prepare_ping(
    app: &App,
    caller: &Caller,
    reference: &str,
    address: &str,
) -> Result<PreparedPing> {
    let address: Ipv4Addr = address.parse().map_err(|_| Error::Invalid("invalid address".into()))?;
    let row = find(app, caller, reference, None).await?;
    reject_floating(&row, "ping from")?;
    if !row.netblock.contains(address) {
        return Err(Error::Invalid("ping request for address outside network block".into()));
    }
    require_state(&row, &[NetworkState::Created])?;
    let node = network_node(app).await?;
    Ok(PreparedPing { network: row.id, owner: row.namespace, address, location: NodeLocation::of(app, node) })
}
