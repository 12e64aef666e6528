//! `/auth/namespaces/{namespace}/rules`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::rule::RuleRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::guard::Authenticated;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::rule::{self, RuleRequest};

/// The mapping rules of a namespace, by name.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/rules", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 200, body = Vec<RuleRecord>), (status = 404, description = "no such namespace")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&rule::list(&app, &caller, &namespace).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewRule {
    #[schema(value_type = String)]
    name: Option<Value>,
    /// Name of the issuer whose tokens are accepted.
    #[schema(value_type = String)]
    issuer: Option<Value>,
    /// What a token must claim, by the claim's name: a string, or one of a list of strings.
    #[schema(value_type = std::collections::BTreeMap<String, muster_types::rule::Matcher>)]
    bound_claims: Option<Value>,
    /// What the keys may be used for; not more than the caller's own.
    #[schema(value_type = Vec<String>)]
    scopes: Option<Value>,
    /// Seconds that the keys live, a day at most.
    #[schema(value_type = i64)]
    key_ttl: Option<Value>,
    /// How the names of the keys begin.
    #[schema(value_type = String)]
    key_name_prefix: Option<Value>,
}

/// Add a mapping rule.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/rules", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewRule, responses(
    (status = 200, body = RuleRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 403, description = "it would grant scopes that the caller does not hold"),
    (status = 404, description = "no such namespace"), (status = 409, description = "the name is taken")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewRule>,
) -> ApiResult {
    let request = RuleRequest {
        issuer: new.issuer,
        bound_claims: new.bound_claims,
        scopes: new.scopes,
        key_ttl: new.key_ttl,
        key_name_prefix: new.key_name_prefix,
    };
    Ok(ok(&rule::create(&app, &caller, &namespace, new.name.as_ref(), &request).await?))
}

/// One mapping rule.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/rules/{rule}", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path)),
    responses((status = 200, body = RuleRecord), (status = 404, description = "no such namespace or rule")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&rule::get(&app, &caller, &namespace, &rule).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewRuleTerms {
    /// Name of the issuer whose tokens are accepted.
    #[schema(value_type = String)]
    issuer: Option<Value>,
    /// What a token must claim, by the claim's name: a string, or one of a list of strings.
    #[schema(value_type = std::collections::BTreeMap<String, muster_types::rule::Matcher>)]
    bound_claims: Option<Value>,
    /// What the keys may be used for; not more than the caller's own.
    #[schema(value_type = Vec<String>)]
    scopes: Option<Value>,
    /// Seconds that the keys live, a day at most.
    #[schema(value_type = i64)]
    key_ttl: Option<Value>,
    /// How the names of the keys begin.
    #[schema(value_type = String)]
    key_name_prefix: Option<Value>,
}

/// Replace all that a mapping rule says. Keys that it made stay as they are.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/rules/{rule}", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path)), request_body = NewRuleTerms, responses(
    (status = 200, body = RuleRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 403, description = "it would grant scopes that the caller does not hold"),
    (status = 404, description = "no such namespace or rule")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    Args(new): Args<NewRuleTerms>,
) -> ApiResult {
    let request = RuleRequest {
        issuer: new.issuer,
        bound_claims: new.bound_claims,
        scopes: new.scopes,
        key_ttl: new.key_ttl,
        key_name_prefix: new.key_name_prefix,
    };
    Ok(ok(&rule::update(&app, &caller, &namespace, &rule, &request).await?))
}

/// Delete a mapping rule. Keys that it made stay as they are.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/rules/{rule}", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path)),
    responses((status = 200, body = RuleRecord), (status = 404, description = "no such namespace or rule")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&rule::delete(&app, &caller, &namespace, &rule).await?))
}

/// Events of a mapping rule, newest first: its changes, and the exchanges that were refused.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/rules/{rule}/events", tag = "auth",
    params(("namespace" = String, Path), ("rule" = String, Path), EventQuery),
    responses((status = 200, body = Vec<muster_types::event::EventRecord>),
    (status = 404, description = "no such rule")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, rule)): Path<(String, String)>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let subject = rule::subject(&app, &caller, &namespace, &rule).await?;
    answer(&app, &subject, &query).await
}
