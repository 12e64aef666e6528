//! `/auth/namespaces/{namespace}/rules`: mapping rules of federated identities.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::event::EventRecord;
use muster_types::rule::RuleRecord;
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
use muster_control::objects::rule::{self, RuleRequest};
use muster_store::run_or_check;

/// Lists the mapping rules of a namespace, ordered by name.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/rules", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<RuleRecord>> {
    Pages::of(rule::list(&app, &caller, &namespace).await?)
}

/// A new mapping rule.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "deploy", "issuer": "forge", "bound_claims": {"repository": ["example/web", "example/api"]},
    "scopes": ["instance.*", "network.read"], "key_ttl": 900, "key_name_prefix": "deploy"
}))]
pub(crate) struct NewRule {
    /// The name of the rule, unique in the namespace.
    #[schema(value_type = String)]
    name: Option<Value>,
    /// Name of the issuer whose tokens are accepted.
    #[schema(value_type = String)]
    issuer: Option<Value>,
    /// The JWT claims that a token must have, by name: a string, or a list of which one must match.
    #[schema(value_type = std::collections::BTreeMap<String, muster_types::rule::ClaimMatcher>)]
    bound_claims: Option<Value>,
    /// The scopes of the keys; at most the caller's own.
    #[schema(value_type = Vec<String>)]
    scopes: Option<Value>,
    /// Lifetime of the keys in seconds; at most one day.
    #[schema(value_type = i64)]
    key_ttl: Option<Value>,
    /// Prefix of the names of the keys.
    #[schema(value_type = String)]
    key_name_prefix: Option<Value>,
    /// Whether to only check the request, without creating anything; false by default. The response is the record that would
    /// be created; its UUID is an example.
    dry_run: Option<bool>,
}

/// Creates a mapping rule.
///
/// A caller with a token of the issuer that has these JWT claims can exchange it for a key of the namespace.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/rules", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewRule, responses((status = 400, description = "A field is missing or malformed."),
    (status = 403, description = "The rule would grant scopes that the caller does not have."),
    (status = 404, description = "No such namespace."), (status = 409, description = "The name is in use.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewRule>,
) -> ApiResult<Json<RuleRecord>> {
    let request = RuleRequest {
        issuer: new.issuer,
        bound_claims: new.bound_claims,
        scopes: new.scopes,
        key_ttl: new.key_ttl,
        key_name_prefix: new.key_name_prefix,
    };
    let creation = rule::create(&app, &caller, &namespace, new.name.as_ref(), &request);
    Ok(Json(run_or_check(new.dry_run, creation).await?))
}

/// Returns a mapping rule.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/rules/{rule}", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path)),
    responses((status = 404, description = "No such namespace or rule.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<RuleRecord>> {
    Ok(Json(rule::get(&app, &caller, &namespace, &rule).await?))
}

/// Replaces the terms of a mapping rule. Keys that it has created do not change.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/rules/{rule}", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path)), request_body = RuleRequest, responses((status = 400, description = "A field is missing or malformed."),
    (status = 403, description = "The rule would grant scopes that the caller does not have."),
    (status = 404, description = "No such namespace or rule.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    Args(request): Args<RuleRequest>,
) -> ApiResult<Json<RuleRecord>> {
    Ok(Json(rule::update(&app, &caller, &namespace, &rule, &request).await?))
}

/// Deletes a mapping rule. Keys that it has created do not change.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/rules/{rule}", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path)),
    responses((status = 404, description = "No such namespace or rule.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<RuleRecord>> {
    Ok(Json(rule::delete(&app, &caller, &namespace, &rule).await?))
}

/// Lists the events of a mapping rule, newest first: its changes, and rejected exchanges.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/rules/{rule}/events", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path), EventQuery),
    responses((status = 404, description = "No such rule.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    let subject = rule::subject(&app, &caller, &namespace, &rule).await?;
    events_of(&app, &subject, &query).await
}

metadata_routes!(
    "/auth/namespaces/{namespace}/rules/{rule}/metadata",
    "/auth/namespaces/{namespace}/rules/{rule}/metadata/{key}",
    ("namespace" => namespace: String, "rule" => rule_name: String),
    "auth",
    super::rule::subject,
    super::rule::subject
);
