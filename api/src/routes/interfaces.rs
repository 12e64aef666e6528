//! `/interfaces`: interfaces and their floating addresses.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::interface::InterfaceRecord;
use muster_types::object::ObjectRef;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::{Json, Null};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::interface;

/// Returns an interface.
#[utoipa::path(get, path = "/interfaces/{interface_uuid}", tag = "interfaces",
    params(("interface_uuid" = String, Path)), responses((status = 404, description = "No such interface.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<InterfaceRecord>> {
    Ok(Json(interface::get(&app, &caller, &id).await?))
}

/// Assigns a floating address to an interface.
#[utoipa::path(post, path = "/interfaces/{interface_uuid}/float", tag = "interfaces",
    params(("interface_uuid" = String, Path)), responses((status = 403, description = "A quota of the namespace would be exceeded, or the token lacks the required scope."), 
    (status = 404, description = "No such interface."),
    (status = 406, description = "The network is not ready."),
    (status = 409, description = "The interface already has a floating address, or has no IPv4 address."),
    (status = 507, description = "No address is free.")))]
pub(crate) async fn float(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    interface::float(&app, &caller, &id).await?;
    Ok(Null)
}

/// Removes the floating address of an interface. Does nothing if it has none.
#[utoipa::path(post, path = "/interfaces/{interface_uuid}/defloat", tag = "interfaces",
    params(("interface_uuid" = String, Path)), responses((status = 404, description = "No such interface.")))]
pub(crate) async fn defloat(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    interface::defloat(&app, &caller, &id).await?;
    Ok(Null)
}

async fn object(app: &App, caller: &Caller, id: &str) -> Result<ObjectRef, Error> {
    interface::metadata_object(app, caller, id, false).await
}

async fn own_object(app: &App, caller: &Caller, id: &str) -> Result<ObjectRef, Error> {
    interface::metadata_object(app, caller, id, true).await
}

metadata_routes!(
    "/interfaces/{interface_uuid}/metadata",
    "/interfaces/{interface_uuid}/metadata/{key}",
    ("interface_uuid" => interface_uuid: String),
    "interfaces",
    super::object,
    super::own_object
);
