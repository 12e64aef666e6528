//! `/auth/namespaces/{namespace}/trust`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::namespace::NamespaceRecord;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::fields::Text;
use crate::guard::Authenticated;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::trust;

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewTrust {
    /// The namespace to trust; it need not exist.
    #[schema(value_type = String)]
    external_namespace: Option<Text>,
}

/// Trust another namespace.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/trust", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewTrust,
    responses((status = 200, body = NamespaceRecord), (status = 404, description = "no such namespace")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewTrust>,
) -> ApiResult {
    let other = new.external_namespace.map(|text| text.0).filter(|name| !name.is_empty());
    let other = other.ok_or_else(|| Error::Invalid("no external namespace specified".into()))?;
    Ok(ok(&trust::add(&app, &caller, &namespace, &other).await?))
}

/// Stop trusting another namespace. `system` stays trusted.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/trust/{external_namespace}", tag = "auth",
    params(("namespace" = String, Path), ("external_namespace" = String, Path)),
    responses((status = 200, body = NamespaceRecord), (status = 404, description = "no such namespace")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, other)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&trust::remove(&app, &caller, &namespace, &other).await?))
}
