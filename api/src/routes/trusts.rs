//! `/auth/namespaces/{namespace}/trust`: trust between namespaces.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::namespace::NamespaceRecord;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::trust;
use muster_store::run_or_check;

/// A namespace to trust.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"external_namespace": "staging"}))]
pub(crate) struct NewTrust {
    /// The namespace to trust. It does not need to exist.
    #[schema(value_type = String)]
    external_namespace: Option<String>,
    /// Whether to only check the request, without changing anything; false by default. The response is the record of the namespace
    /// as it would be.
    dry_run: Option<bool>,
}

/// Trusts another namespace.
///
/// The other namespace can then list and read the instances, networks and artifacts of this one, but not change them.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/trust", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewTrust,
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewTrust>,
) -> ApiResult<Json<NamespaceRecord>> {
    let other = new.external_namespace.filter(|name| !name.is_empty());
    let other = other.ok_or_else(|| Error::Invalid("no external namespace specified".into()))?;
    Ok(Json(run_or_check(new.dry_run, trust::add(&app, &caller, &namespace, &other)).await?))
}

/// Stops trusting another namespace. `system` is always trusted.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/trust/{external_namespace}", tag = "auth",
    params(("namespace" = String, Path), ("external_namespace" = String, Path)),
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, other)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<NamespaceRecord>> {
    Ok(Json(trust::remove(&app, &caller, &namespace, &other).await?))
}
