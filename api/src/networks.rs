//! `/networks`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use muster_types::Error;
use muster_types::address::AddressRecord;
use muster_types::ids::NetworkId;
use muster_types::interface::InterfaceRecord;
use muster_types::network::{NetworkRecord, PingResult};
use muster_types::object::ObjectRef;
use muster_types::operation::{OperationHandle, OperationRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, Nothing, Within};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::fields::{Boolean, Text};
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::pages::in_pages;
use crate::peer::{self, Handed};
use crate::response::{json_response, nothing, ok};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::network::{self, NetworkRequest};
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::{address, interface, operation};

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Whether deleted ones are listed, too. Also taken from the body.
    #[param(value_type = Option<bool>)]
    all: Option<Boolean>,
}

/// The networks that the caller can see.
#[utoipa::path(get, path = "/networks", tag = "networks", params(ListQuery),
    responses((status = 200, body = Vec<NetworkRecord>)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(query): Args<ListQuery>,
) -> ApiResult {
    let all = query.all.is_some_and(|all| all.0);
    in_pages(move |after: Option<NetworkId>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { network::list_page(&app, &caller, all, after).await }
    })
    .await
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewNetwork {
    #[schema(value_type = String)]
    name: Option<Text>,
    /// The addresses, such as `10.0.0.0/24`; from /8 to /29.
    #[schema(value_type = String)]
    netblock: Option<Text>,
    /// Whether instances get their addresses by DHCP; true when absent.
    #[schema(value_type = Option<bool>)]
    provide_dhcp: Option<Boolean>,
    /// Whether instances reach the world; true when absent.
    #[schema(value_type = Option<bool>)]
    provide_nat: Option<Boolean>,
    /// Whether the router resolves names; false when absent.
    #[schema(value_type = Option<bool>)]
    provide_dns: Option<Boolean>,
    /// Only `system` may name another namespace than its own.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
}

/// Create a network. It is usable once its state is `created`.
#[utoipa::path(post, path = "/networks", tag = "networks", request_body = NewNetwork, responses(
    (status = 200, body = NetworkRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 401, description = "another namespace was named"), (status = 404, description = "no such namespace")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewNetwork>,
) -> ApiResult {
    let request = NetworkRequest {
        name: new.name.map(|text| text.0),
        netblock: new.netblock.map(|text| text.0),
        provide_dhcp: new.provide_dhcp.map(|flag| flag.0),
        provide_nat: new.provide_nat.map(|flag| flag.0),
        provide_dns: new.provide_dns.map(|flag| flag.0),
        namespace: new.namespace.map(|text| text.0),
    };
    Ok(ok(&network::create(&app, &caller, request).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Everything {
    /// If given it must be true.
    #[schema(value_type = Option<bool>)]
    confirm: Option<Boolean>,
    /// Only `system` may name another namespace than its own.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
    /// Whether networks with interfaces are deleted, too, as soon as those are gone.
    #[schema(value_type = Option<bool>)]
    clean_wait: Option<Boolean>,
}

/// A network that is being deleted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deletion {
    network_uuid: NetworkId,
    #[serde(flatten)]
    operation: OperationHandle,
}

/// Delete every network of a namespace.
#[utoipa::path(delete, path = "/networks", tag = "networks", request_body = Everything, responses(
    (status = 202, body = Vec<Deletion>), (status = 401, description = "another namespace was named"),
    (status = 403, description = "some have interfaces and were left; `error` names both kinds"),
    (status = 404, description = "no such namespace")))]
pub(crate) async fn delete_all(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(what): Args<Everything>,
) -> ApiResult {
    if what.confirm.is_some_and(|confirm| !confirm.0) {
        return Err(Error::Invalid("parameter confirm is not set true".into()).into());
    }
    let namespace = what.namespace.map(|text| text.0);
    let clean_wait = what.clean_wait.is_some_and(|flag| flag.0);
    let outcome = network::delete_all(&app, &caller, namespace.as_deref(), clean_wait).await?;
    let deleted: Vec<Deletion> = outcome
        .deleted
        .into_iter()
        .map(|(network_uuid, operation)| Deletion { network_uuid, operation })
        .collect();
    if outcome.unable.is_empty() {
        return Ok(json_response(StatusCode::ACCEPTED, &deleted));
    }
    let error = json!({ "deleted": deleted, "unable": outcome.unable });
    Ok(json_response(StatusCode::FORBIDDEN, &json!({ "error": error, "status": 403 })))
}

/// One network, by id or name.
#[utoipa::path(get, path = "/networks/{network_ref}", tag = "networks", params(("network_ref" = String, Path), Within),
    responses((status = 200, body = NetworkRecord), (status = 404, description = "no such network")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&network::get(&app, &caller, &reference, within.namespace()).await?))
}

/// Delete a network. One with interfaces goes when they are gone.
#[utoipa::path(delete, path = "/networks/{network_ref}", tag = "networks",
    params(("network_ref" = String, Path), Within), responses(
    (status = 202, body = OperationHandle), (status = 403, description = "it is the floating network"),
    (status = 404, description = "no such network, or it is deleted")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    let handle = network::delete(&app, &caller, &reference, within.namespace()).await?;
    Ok(json_response(StatusCode::ACCEPTED, &handle))
}

/// The same as `DELETE /networks/{network_ref}`.
#[utoipa::path(delete, path = "/networks/networks/{network_ref}", tag = "networks",
    params(("network_ref" = String, Path), Within), responses(
    (status = 202, body = OperationHandle), (status = 403, description = "it is the floating network"),
    (status = 404, description = "no such network, or it is deleted")))]
pub(crate) async fn delete_by_long_path(
    app: State<Arc<App>>,
    caller: Authenticated,
    reference: Path<String>,
    within: Args<Within>,
) -> ApiResult {
    delete(app, caller, reference, within).await
}

/// Events of a network, newest first.
#[utoipa::path(get, path = "/networks/{network_ref}/events", tag = "networks",
    params(("network_ref" = String, Path), EventQuery), responses(
    (status = 200, body = Vec<muster_types::event::EventRecord>), (status = 404, description = "no such network")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    answer(&app, &object(&app, &caller, &reference).await?, &query).await
}

/// The interfaces on a network.
#[utoipa::path(get, path = "/networks/{network_ref}/interfaces", tag = "networks",
    params(("network_ref" = String, Path)), responses(
    (status = 200, body = Vec<InterfaceRecord>), (status = 404, description = "no such network")))]
pub(crate) async fn list_interfaces(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    let id = network::find(&app, &caller, &reference, None).await?.id;
    in_pages(move |after| {
        let app = Arc::clone(&app);
        async move { interface::list_page(&app, id, after).await }
    })
    .await
}

/// The addresses of a network that are not free.
#[utoipa::path(get, path = "/networks/{network_ref}/addresses", tag = "networks",
    params(("network_ref" = String, Path)), responses(
    (status = 200, body = Vec<AddressRecord>), (status = 404, description = "no such network")))]
pub(crate) async fn list_addresses(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    let id = network::find(&app, &caller, &reference, None).await?.id;
    in_pages(move |after| {
        let app = Arc::clone(&app);
        async move { address::list_page(&app, id, after).await }
    })
    .await
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Reservation {
    /// What it is for, in at most 255 characters.
    #[schema(value_type = Option<String>)]
    comment: Option<Text>,
}

/// Reserve an address: nobody is given it until it is released.
#[utoipa::path(post, path = "/networks/{network_ref}/addresses/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), request_body = Reservation, responses(
    (status = 200, body = AddressRecord), (status = 400, description = "not an address of the network, or the comment is too long"),
    (status = 404, description = "no such network"), (status = 406, description = "the network is in error or being deleted"),
    (status = 409, description = "the address is in use, maybe by you")))]
pub(crate) async fn reserve(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, wanted)): Path<(String, String)>,
    Args(reservation): Args<Reservation>,
) -> ApiResult {
    let comment = reservation.comment.map(|text| text.0);
    Ok(ok(&address::reserve(&app, &caller, &reference, &wanted, comment).await?))
}

/// Release a manual reservation.
#[utoipa::path(delete, path = "/networks/{network_ref}/addresses/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), responses(
    (status = 200, description = "`null`"), (status = 400, description = "not an address of the network"),
    (status = 403, description = "held by something else than a manual reservation"),
    (status = 404, description = "no such network, or nothing holds the address"),
    (status = 406, description = "the network is in error or being deleted")))]
pub(crate) async fn release(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, held)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    address::release(&app, &caller, &reference, &held).await?;
    Ok(nothing())
}

/// Ping an address of the network from its router, ten times.
#[utoipa::path(get, path = "/networks/{network_ref}/ping/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), responses(
    (status = 200, body = PingResult), (status = 400, description = "not an address of the network"),
    (status = 404, description = "no such network"), (status = 406, description = "the network is not ready")))]
pub(crate) async fn ping(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, wanted)): Path<(String, String)>,
    uri: Uri,
    headers: HeaderMap,
    _: Args<Nothing>,
) -> ApiResult {
    let (id, address, place) = network::prepare_ping(&app, &caller, &reference, &wanted).await?;
    match place {
        NodeLocation::Local(node) => Ok(ok(&node.ping(id, address).await?)),
        NodeLocation::Remote(node) => peer::ask(&app, &node, &caller, Handed::read(&uri, &headers)).await,
    }
}

/// Route an address of the floating network to this one. The answer is the address.
#[utoipa::path(post, path = "/networks/{network_ref}/route", tag = "networks", params(("network_ref" = String, Path)),
    responses((status = 200, body = String), (status = 404, description = "no such network"),
    (status = 406, description = "the network is not ready"), (status = 507, description = "no address is free")))]
pub(crate) async fn route(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&network::route(&app, &caller, &reference).await?))
}

/// Take a routed address back.
#[utoipa::path(delete, path = "/networks/{network_ref}/route/{address}", tag = "networks",
    params(("network_ref" = String, Path), ("address" = String, Path)), responses(
    (status = 200, description = "`null`"), (status = 400, description = "not an address"),
    (status = 403, description = "routed by another network"), (status = 404, description = "no such network, or not routed"),
    (status = 406, description = "the network is not ready")))]
pub(crate) async fn unroute(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, routed)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    network::unroute(&app, &caller, &reference, &routed).await?;
    Ok(nothing())
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DnsEntry {
    /// A host name.
    #[schema(value_type = String)]
    name: Option<Text>,
    /// Its IPv4 address.
    #[schema(value_type = String)]
    value: Option<Text>,
}

/// Tell the network's resolver a name, or another address for it.
#[utoipa::path(post, path = "/networks/{network_ref}/dns", tag = "networks", params(("network_ref" = String, Path)),
    request_body = DnsEntry, responses((status = 200, description = "`null`"),
    (status = 400, description = "a field is missing or malformed"), (status = 404, description = "no such network"),
    (status = 406, description = "the network provides no DNS, is not ready, or the name is none")))]
pub(crate) async fn set_name(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(entry): Args<DnsEntry>,
) -> ApiResult {
    let (name, value) = (entry.name.map(|text| text.0), entry.value.map(|text| text.0));
    network::set_dns_entry(&app, &caller, &reference, name.as_deref(), value.as_deref()).await?;
    Ok(nothing())
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct DnsName {
    /// The name to forget. Also taken from the body.
    #[param(value_type = String)]
    name: Option<Text>,
}

/// Make the network's resolver forget a name. One that it does not know is fine.
#[utoipa::path(delete, path = "/networks/{network_ref}/dns", tag = "networks",
    params(("network_ref" = String, Path), DnsName), responses((status = 200, description = "`null`"),
    (status = 400, description = "no name"), (status = 404, description = "no such network"),
    (status = 406, description = "the network provides no DNS, is not ready, or the name is none")))]
pub(crate) async fn remove_name(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(entry): Args<DnsName>,
) -> ApiResult {
    let name = entry.name.map(|text| text.0);
    network::remove_dns_entry(&app, &caller, &reference, name.as_deref()).await?;
    Ok(nothing())
}

/// The operations on a network, newest first: those that have not ended, or all.
#[utoipa::path(get, path = "/networks/{network_ref}/clusteroperations", tag = "networks",
    params(("network_ref" = String, Path), ListQuery), responses(
    (status = 200, body = Vec<OperationRecord>), (status = 404, description = "no such network")))]
pub(crate) async fn list_operations(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<ListQuery>,
) -> ApiResult {
    let target = own_object(&app, &caller, &reference).await?;
    Ok(ok(&operation::of_object(&app, &target, query.all.is_some_and(|all| all.0)).await?))
}

/// The network that a call reads about.
async fn object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(network::object(network::find(app, caller, reference, None).await?.id))
}

/// The network that a call changes.
async fn own_object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(network::object(network::find_own(app, caller, reference, None).await?.id))
}

metadata_routes!(
    "/networks/{network_ref}/metadata",
    "/networks/{network_ref}/metadata/{key}",
    "network_ref",
    "networks",
    super::object,
    super::own_object
);
