//! `/networks`: networks, their addresses, routes and DNS entries.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::address::AddressRecord;
use muster_types::event::EventRecord;
use muster_types::ids::NetworkId;
use muster_types::interface::InterfaceRecord;
use muster_types::network::{NetworkRecord, PingResult};
use muster_types::object::ObjectRef;
use muster_types::operation::{OperationHandle, OperationRecord};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, ListQuery, NamespaceQuery, NoArgs, OperationsQuery};
use crate::error::ApiResult;
use crate::forward::{MaybeForwarded, OriginalRequest};
use crate::guard::Authenticated;
use crate::pages::{Pages, in_pages};
use crate::response::{Accepted, Json, Null, named_bodies};
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::network::{self, NetworkRequest, QueuedDeletion};
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::{address, interface, operation};
use muster_store::dry_run;

/// Lists the networks that the caller can see.
#[utoipa::path(get, path = "/networks", tag = "networks", params(ListQuery))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(query): Args<ListQuery>,
) -> ApiResult<Pages<NetworkRecord>> {
    let all = query.all();
    in_pages(move |after: Option<NetworkId>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { network::list_page(&app, &caller, all, after).await }
    })
    .await
}

/// Creates a network. It is usable once its state is `created`.
///
/// Networks are isolated from each other, so they may use the same addresses. The first address is the router.
#[utoipa::path(post, path = "/networks", tag = "networks", request_body = NetworkRequest, responses((status = 400, description = "A field is missing or malformed."),
    (status = 401, description = "The request names another namespace."),
    (status = 403, description = "A quota of the namespace would be exceeded, or the token lacks the required scope."), 
    (status = 404, description = "No such namespace.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(request): Args<NetworkRequest>,
) -> ApiResult<Json<NetworkRecord>> {
    if request.dry_run.unwrap_or(false) {
        let record = dry_run(network::create(&app, &caller, request)).await?;
        return Ok(Json(NetworkRecord { last_cluster_operation: None, ..record }));
    }
    Ok(Json(network::create(&app, &caller, request).await?))
}

/// Confirms the deletion of all networks of a namespace.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = NetworksDeletion)]
#[schema(example = json!({"confirm": true}))]
pub(crate) struct DeleteAllRequest {
    /// Must be true if given.
    confirm: Option<bool>,
    /// Defaults to the caller's. Only `system` may name another namespace.
    namespace: Option<String>,
    /// Ignored: networks with interfaces are always deleted once the interfaces are.
    #[serde(rename = "clean_wait")]
    _clean_wait: Option<bool>,
}

/// A network that is being deleted.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Deletion)]
pub(crate) struct NetworkDeletion {
    /// The network that is being deleted.
    network_uuid: NetworkId,
    #[serde(flatten)]
    operation: OperationHandle,
    /// Why the network cannot be deleted yet. Absent if nothing prevents it.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl From<QueuedDeletion> for NetworkDeletion {
    fn from(queued: QueuedDeletion) -> Self {
        let reason = match queued.interfaces {
            0 => None,
            1 => Some("the network is deleted once its last interface is".to_owned()),
            count => Some(format!("the network is deleted once its {count} interfaces are")),
        };
        Self { network_uuid: queued.network, operation: queued.operation, reason }
    }
}

named_bodies!(NetworkDeletion);

/// Deletes all networks of a namespace. Networks with interfaces are deleted after them.
#[utoipa::path(delete, path = "/networks", tag = "networks", request_body = DeleteAllRequest, responses((status = 401, description = "The request names another namespace."),
    (status = 404, description = "No such namespace.")))]
pub(crate) async fn delete_all(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(request): Args<DeleteAllRequest>,
) -> ApiResult<Accepted<Vec<NetworkDeletion>>> {
    if request.confirm == Some(false) {
        return Err(Error::Invalid("parameter confirm is not set true".into()).into());
    }
    let deletions = network::delete_all(&app, &caller, request.namespace.as_deref()).await?;
    Ok(Accepted(deletions.into_iter().map(NetworkDeletion::from).collect()))
}

/// Returns a network.
#[utoipa::path(get, path = "/networks/{network_ref}", tag = "networks", params(("network_ref" = String, Path), NamespaceQuery),
    responses((status = 404, description = "No such network.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<NetworkRecord>> {
    Ok(Json(network::get(&app, &caller, &reference, query.namespace.as_deref()).await?))
}

/// Deletes a network. If it has interfaces, it is deleted after them.
#[utoipa::path(delete, path = "/networks/{network_ref}", tag = "networks",
    params(("network_ref" = String, Path), NamespaceQuery), responses((status = 403, description = "The floating network cannot be deleted."),
    (status = 404, description = "No such network, or it is already deleted.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Accepted<OperationHandle>> {
    let handle = network::delete(&app, &caller, &reference, query.namespace.as_deref()).await?;
    Ok(Accepted(handle))
}

/// Alias of `DELETE /networks/{network_ref}`.
#[utoipa::path(delete, path = "/networks/networks/{network_ref}", tag = "networks",
    params(("network_ref" = String, Path), NamespaceQuery), responses((status = 403, description = "The floating network cannot be deleted."),
    (status = 404, description = "No such network, or it is already deleted.")))]
pub(crate) async fn delete_legacy_path(
    app: State<Arc<App>>,
    caller: Authenticated,
    reference: Path<String>,
    query: Args<NamespaceQuery>,
) -> ApiResult<Accepted<OperationHandle>> {
    delete(app, caller, reference, query).await
}

/// Lists the events of a network, newest first.
#[utoipa::path(get, path = "/networks/{network_ref}/events", tag = "networks",
    params(("network_ref" = String, Path), EventQuery), responses((status = 404, description = "No such network.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    events_of(&app, &object(&app, &caller, &reference).await?, &query).await
}

/// Lists the interfaces of a network.
#[utoipa::path(get, path = "/networks/{network_ref}/interfaces", tag = "networks",
    params(("network_ref" = String, Path)), responses((status = 404, description = "No such network.")))]
pub(crate) async fn list_interfaces(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<InterfaceRecord>> {
    let id = network::find(&app, &caller, &reference, None).await?.id;
    in_pages(move |after| {
        let app = Arc::clone(&app);
        async move { interface::list_page(&app, id, after).await }
    })
    .await
}

/// Lists the allocated, reserved and quarantined addresses of a network.
#[utoipa::path(get, path = "/networks/{network_ref}/addresses", tag = "networks",
    params(("network_ref" = String, Path)), responses((status = 404, description = "No such network.")))]
pub(crate) async fn list_addresses(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<AddressRecord>> {
    let id = network::find(&app, &caller, &reference, None).await?.id;
    in_pages(move |after| {
        let app = Arc::clone(&app);
        async move { address::list_page(&app, id, after).await }
    })
    .await
}

/// The reservation of an address.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"comment": "the printer"}))]
pub(crate) struct Reservation {
    /// The purpose of the reservation; at most 255 characters.
    comment: Option<String>,
}

/// Reserves an address. It is not allocated until it is released.
#[utoipa::path(post, path = "/networks/{network_ref}/addresses/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), request_body = Reservation, responses((status = 400, description = "The address is not in the network, or the comment is too long."),
    (status = 404, description = "No such network."), (status = 406, description = "The network is in error or being deleted."),
    (status = 409, description = "The address is already allocated or reserved.")))]
pub(crate) async fn reserve(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, address)): Path<(String, String)>,
    Args(reservation): Args<Reservation>,
) -> ApiResult<Json<AddressRecord>> {
    Ok(Json(address::reserve(&app, &caller, &reference, &address, reservation.comment).await?))
}

/// Releases a reserved address.
///
/// The address of a deleted instance whose VM may still run on a lost host is reserved, too. Release it only if that host is off.
#[utoipa::path(delete, path = "/networks/{network_ref}/addresses/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), responses((status = 400, description = "The address is not in the network."),
    (status = 403, description = "The address is not a manual reservation: it is free, quarantined or allocated."),
    (status = 404, description = "No such network."),
    (status = 406, description = "The network is in error or being deleted.")))]
pub(crate) async fn release(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, address)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    address::release(&app, &caller, &reference, &address).await?;
    Ok(Null)
}

/// Pings an address of a network from its router, ten times.
#[utoipa::path(get, path = "/networks/{network_ref}/ping/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), responses((status = 400, description = "The address is not in the network."),
    (status = 404, description = "No such network."), (status = 406, description = "The network is not ready.")))]
pub(crate) async fn ping(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, address)): Path<(String, String)>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Json<PingResult>>> {
    let ping = network::prepare_ping(&app, &caller, &reference, &address).await?;
    match ping.location {
        NodeLocation::Local(node) => {
            Ok(MaybeForwarded::Local(Json(node.ping(ping.network, ping.address).await?)))
        }
        NodeLocation::Remote(node) => {
            let owner = ping.owner.as_deref().unwrap_or(&caller.namespace);
            request.forward(&app, &node, &caller, owner).await.map(MaybeForwarded::Forwarded)
        }
    }
}

/// Routes an address of the floating network to a network and returns the address.
///
/// Packets to the address reach the network without translation; a guest must be configured with it.
#[utoipa::path(post, path = "/networks/{network_ref}/route", tag = "networks", params(("network_ref" = String, Path)),
    responses((status = 403, description = "A quota of the namespace would be exceeded, or the token lacks the required scope."), (status = 404, description = "No such network."),
    (status = 406, description = "The network is not ready."), (status = 507, description = "No address is free.")))]
pub(crate) async fn route(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<String>> {
    Ok(Json(network::route(&app, &caller, &reference).await?.to_string()))
}

/// Removes a routed address.
#[utoipa::path(delete, path = "/networks/{network_ref}/route/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), responses((status = 400, description = "The address is invalid."),
    (status = 403, description = "The address is routed to another network."), (status = 404, description = "No such network, or the address is not routed."),
    (status = 406, description = "The network is not ready.")))]
pub(crate) async fn unroute(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, routed)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    network::unroute(&app, &caller, &reference, &routed).await?;
    Ok(Null)
}

/// A DNS entry of a network.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"name": "db", "value": "10.0.0.5"}))]
pub(crate) struct DnsEntry {
    /// A host name, such as `db`.
    #[schema(value_type = String)]
    name: Option<String>,
    /// The IPv4 address of the name.
    #[schema(value_type = String)]
    value: Option<String>,
}

/// Creates or replaces a DNS entry of a network.
#[utoipa::path(post, path = "/networks/{network_ref}/dns", tag = "networks", params(("network_ref" = String, Path)),
    request_body = DnsEntry, responses((status = 400, description = "A field is missing or malformed."), (status = 404, description = "No such network."),
    (status = 406, description = "The network does not provide DNS or is not ready, or the name is invalid.")))]
pub(crate) async fn set_name(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(entry): Args<DnsEntry>,
) -> ApiResult<Null> {
    network::dns::set(&app, &caller, &reference, entry.name.as_deref(), entry.value.as_deref()).await?;
    Ok(Null)
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct DnsEntryQuery {
    /// The name to delete. Also accepted in the body.
    #[param(value_type = String)]
    name: Option<String>,
}

/// Deletes a DNS entry of a network. Does nothing if the name does not exist.
#[utoipa::path(delete, path = "/networks/{network_ref}/dns", tag = "networks",
    params(("network_ref" = String, Path), DnsEntryQuery), responses((status = 400, description = "The name is missing."), (status = 404, description = "No such network."),
    (status = 406, description = "The network does not provide DNS or is not ready, or the name is invalid.")))]
pub(crate) async fn remove_name(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<DnsEntryQuery>,
) -> ApiResult<Null> {
    network::dns::remove(&app, &caller, &reference, query.name.as_deref()).await?;
    Ok(Null)
}

/// Lists the operations on a network, newest first.
#[utoipa::path(get, path = "/networks/{network_ref}/clusteroperations", tag = "networks",
    params(("network_ref" = String, Path), OperationsQuery), responses((status = 404, description = "No such network.")))]
pub(crate) async fn list_operations(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<OperationsQuery>,
) -> ApiResult<Pages<OperationRecord>> {
    let target = own_object(&app, &caller, &reference).await?;
    Pages::of(operation::of_object(&app, &target, query.all()).await?)
}

/// Finds a network that the caller may read.
async fn object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(network::object(network::find(app, caller, reference, None).await?.id))
}

/// Finds a network that the caller may change.
async fn own_object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(network::object(network::find_own(app, caller, reference, None).await?.id))
}

metadata_routes!(
    "/networks/{network_ref}/metadata",
    "/networks/{network_ref}/metadata/{key}",
    ("network_ref" => network_ref: String),
    "networks",
    super::object,
    super::own_object
);
