//! `/auth/namespaces/{namespace}/claims`: capacity claims.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::claim::ClaimRecord;
use muster_types::event::EventRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::Json;
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::objects::claim::{self, ClaimRequest};
use muster_store::run_or_check;

/// Lists the claims of a namespace, including expired ones, oldest first.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/claims", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<ClaimRecord>> {
    Pages::of(claim::list(&app, &caller, &namespace).await?)
}

/// Reserves capacity of the cluster for a namespace. The capacity of its existing instances counts as used.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/claims", tag = "auth", params(("namespace" = String, Path)),
    request_body = ClaimRequest, responses((status = 400, description = "A field is missing or malformed."),
    (status = 404, description = "No such namespace."),
    (status = 409, description = "The namespace has an active claim."),
    (status = 503, description = "No node has reported its capacity yet, or the database is unavailable."),
    (status = 507, description = "The cluster lacks the capacity.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(request): Args<ClaimRequest>,
) -> ApiResult<Json<ClaimRecord>> {
    let creation = claim::create(&app, &caller, &namespace, &request);
    Ok(Json(run_or_check(request.dry_run, creation).await?))
}

/// Returns a claim.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/claims/{claim_ref}", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path)),
    responses((status = 404, description = "No such claim.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<ClaimRecord>> {
    Ok(Json(claim::get(&app, &caller, &namespace, &claim).await?))
}

/// New limits of a claim.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"limit_cpus": 16, "expires_in_seconds": 86400}))]
pub(crate) struct ClaimChange {
    /// The number of virtual CPUs to reserve.
    #[schema(value_type = Option<i64>, minimum = 0)]
    limit_cpus: Option<Value>,
    /// The memory to reserve, in megabytes.
    #[schema(value_type = Option<i64>, minimum = 0)]
    limit_memory_mb: Option<Value>,
    /// The disk space to reserve, in gigabytes.
    #[schema(value_type = Option<i64>, minimum = 0)]
    limit_disk_gb: Option<Value>,
    /// Seconds from now until the claim expires.
    #[schema(value_type = Option<i64>, minimum = 1)]
    expires_in_seconds: Option<Value>,
}

/// Changes an active claim. Fields that are absent do not change.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/claims/{claim_ref}", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path)), request_body = ClaimChange, responses((status = 400, description = "No field is given, or one is malformed."),
    (status = 404, description = "No such claim."),
    (status = 409, description = "The claim has expired, or more than the new limit is in use."),
    (status = 503, description = "No node has reported its capacity yet, the claim changed concurrently, or the database is unavailable."),
    (status = 507, description = "The cluster lacks the capacity.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    Args(change): Args<ClaimChange>,
) -> ApiResult<Json<ClaimRecord>> {
    let request = ClaimRequest {
        limit_cpus: change.limit_cpus,
        limit_memory_mb: change.limit_memory_mb,
        limit_disk_gb: change.limit_disk_gb,
        expires_in_seconds: change.expires_in_seconds,
        dry_run: None,
    };
    Ok(Json(claim::update(&app, &caller, &namespace, &claim, &request).await?))
}

/// Deletes a claim and its events. Its capacity is available to others immediately.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/claims/{claim_ref}", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path)),
    responses((status = 200, description = "The deleted claim."),
    (status = 404, description = "No such claim.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<ClaimRecord>> {
    Ok(Json(claim::delete(&app, &caller, &namespace, &claim).await?))
}

/// Lists the events of a claim, newest first.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/claims/{claim_ref}/events", tag = "auth",
    params(("namespace" = String, Path), ("claim_ref" = String, Path), EventQuery),
    responses((status = 404, description = "No such claim.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, claim)): Path<(String, String)>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    let subject = claim::subject(&app, &caller, &namespace, &claim).await?;
    events_of(&app, &subject, &query).await
}

metadata_routes!(
    "/auth/namespaces/{namespace}/claims/{claim_ref}/metadata",
    "/auth/namespaces/{namespace}/claims/{claim_ref}/metadata/{key}",
    ("namespace" => namespace: String, "claim_ref" => claim_ref: String),
    "auth",
    super::claim::subject,
    super::claim::subject
);
