//! `/auth/namespaces/{namespace}/claims`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::claim::ClaimRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::guard::Authenticated;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::claim::{self, ClaimRequest};

/// Claims of a namespace, oldest first, with those that have expired.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/claims", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 200, body = Vec<ClaimRecord>), (status = 404, description = "no such namespace")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&claim::list(&app, &caller, &namespace).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewClaim {
    #[schema(value_type = i64, minimum = 0)]
    limit_cpus: Option<Value>,
    #[schema(value_type = i64, minimum = 0)]
    limit_memory_mb: Option<Value>,
    #[schema(value_type = i64, minimum = 0)]
    limit_disk_gb: Option<Value>,
    /// After so many seconds nothing is promised any more.
    #[schema(value_type = i64, minimum = 1)]
    expires_in_seconds: Option<Value>,
}

/// Promise a namespace a part of the cluster. What its instances hold already counts as used.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/claims", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewClaim, responses(
    (status = 200, body = ClaimRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 404, description = "no such namespace"),
    (status = 409, description = "the namespace holds an active claim"),
    (status = 503, description = "no node has reported yet, or the database does not answer"),
    (status = 507, description = "the cluster cannot promise it")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewClaim>,
) -> ApiResult {
    let request = ClaimRequest {
        limit_cpus: new.limit_cpus,
        limit_memory_mb: new.limit_memory_mb,
        limit_disk_gb: new.limit_disk_gb,
        expires_in_seconds: new.expires_in_seconds,
    };
    Ok(ok(&claim::create(&app, &caller, &namespace, &request).await?))
}

/// One claim.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/claims/{claim_ref}", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path)),
    responses((status = 200, body = ClaimRecord), (status = 404, description = "no such claim")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&claim::get(&app, &caller, &namespace, &claim).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ClaimChange {
    #[schema(value_type = Option<i64>, minimum = 0)]
    limit_cpus: Option<Value>,
    #[schema(value_type = Option<i64>, minimum = 0)]
    limit_memory_mb: Option<Value>,
    #[schema(value_type = Option<i64>, minimum = 0)]
    limit_disk_gb: Option<Value>,
    /// From now on.
    #[schema(value_type = Option<i64>, minimum = 1)]
    expires_in_seconds: Option<Value>,
}

/// Change an active claim. What is not given stays as it is.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/claims/{claim_ref}", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path)), request_body = ClaimChange, responses(
    (status = 200, body = ClaimRecord), (status = 400, description = "nothing is given, or a field is malformed"),
    (status = 404, description = "no such claim"),
    (status = 409, description = "it has expired, or more is in use"),
    (status = 503, description = "no node has reported yet, others were in the way, or the database does not answer"),
    (status = 507, description = "the cluster cannot promise it")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    Args(change): Args<ClaimChange>,
) -> ApiResult {
    let request = ClaimRequest {
        limit_cpus: change.limit_cpus,
        limit_memory_mb: change.limit_memory_mb,
        limit_disk_gb: change.limit_disk_gb,
        expires_in_seconds: change.expires_in_seconds,
    };
    Ok(ok(&claim::update(&app, &caller, &namespace, &claim, &request).await?))
}

/// Delete a claim with its events. What it promised is there for others at once.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/claims/{claim_ref}", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path)),
    responses((status = 200, description = "the claim as it was", body = ClaimRecord),
    (status = 404, description = "no such claim")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&claim::delete(&app, &caller, &namespace, &claim).await?))
}

/// Events of a claim, newest first.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/claims/{claim_ref}/events", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path), EventQuery),
    responses((status = 200, body = Vec<muster_types::event::EventRecord>),
    (status = 404, description = "no such claim")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let subject = claim::subject(&app, &caller, &namespace, &claim).await?;
    answer(&app, &subject, &query).await
}
