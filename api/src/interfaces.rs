//! `/interfaces`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::interface::InterfaceRecord;
use muster_types::object::ObjectRef;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::response::{nothing, ok};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::interface;

/// One interface.
#[utoipa::path(get, path = "/interfaces/{interface_uuid}", tag = "interfaces",
    params(("interface_uuid" = String, Path)), responses(
    (status = 200, body = InterfaceRecord), (status = 404, description = "no such interface")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&interface::get(&app, &caller, &id).await?))
}

/// Give an interface a floating address.
#[utoipa::path(post, path = "/interfaces/{interface_uuid}/float", tag = "interfaces",
    params(("interface_uuid" = String, Path)), responses(
    (status = 200, description = "`null`"), (status = 404, description = "no such interface"),
    (status = 406, description = "the network is not ready"),
    (status = 409, description = "it has one, or no address that could float"),
    (status = 507, description = "no address is free")))]
pub(crate) async fn float(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    interface::float(&app, &caller, &id).await?;
    Ok(nothing())
}

/// Take the floating address of an interface back. Without one nothing changes.
#[utoipa::path(post, path = "/interfaces/{interface_uuid}/defloat", tag = "interfaces",
    params(("interface_uuid" = String, Path)), responses(
    (status = 200, description = "`null`"), (status = 404, description = "no such interface")))]
pub(crate) async fn defloat(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    interface::defloat(&app, &caller, &id).await?;
    Ok(nothing())
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
    "interface_uuid",
    "interfaces",
    super::object,
    super::own_object
);
