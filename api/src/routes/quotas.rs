//! `/auth/namespaces/{namespace}/quotas`: how much a namespace may use.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::quota::QuotaRecord;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs, nullable};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::quota;

/// Lists the quotas of a namespace, with their limits and the current usage.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/quotas", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<QuotaRecord>> {
    Pages::of(quota::list(&app, &caller, &namespace).await?)
}

/// A new limit.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"limit": 10}))]
pub(crate) struct QuotaChange {
    /// The maximum usage; 0 or null means unlimited.
    #[schema(value_type = Option<i64>, minimum = 0, required = true)]
    #[serde(default, deserialize_with = "nullable")]
    limit: Option<Option<i64>>,
}

/// Sets a limit of a namespace. One below the current usage only rejects new objects.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/quotas/{quota}", tag = "auth",
    params(("namespace" = String, Path),
    ("quota" = String, Path, description = "The name of the quota, such as `floating_addresses`.")),
    request_body = QuotaChange, responses((status = 400, description = "There is no such quota, or the limit is malformed."),
    (status = 404, description = "No such namespace.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    Args(change): Args<QuotaChange>,
) -> ApiResult<Json<QuotaRecord>> {
    Ok(Json(quota::set(&app, &caller, &namespace, &name, change.limit.map(Option::unwrap_or_default)).await?))
}

/// Removes a limit of a namespace, so that the default of the cluster applies.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/quotas/{quota}", tag = "auth",
    params(("namespace" = String, Path),
    ("quota" = String, Path, description = "The name of the quota, such as `floating_addresses`.")),
    responses((status = 400, description = "There is no such quota."), (status = 404, description = "No such namespace.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, name)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<QuotaRecord>> {
    Ok(Json(quota::reset(&app, &caller, &namespace, &name).await?))
}
