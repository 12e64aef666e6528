//! `/auth/namespaces/{namespace}/webhooks`: where the events of a namespace are sent, and their deliveries.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::event::EventType;
use muster_types::object::ObjectType;
use muster_types::webhook::{DeliveryRecord, WebhookRecord};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs, required};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::webhook::{self, WebhookRequest};
use muster_store::run_or_check;

/// Lists the webhooks of a namespace, ordered by name.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/webhooks", tag = "auth", params(("namespace" = String, Path)),
    responses((status = 404, description = "No such namespace.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<WebhookRecord>> {
    Pages::of(webhook::list(&app, &caller, &namespace).await?)
}

/// A new webhook.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "chat", "url": "https://hooks.example/muster", "event_types": ["audit", "status"], "object_types": ["instance"],
    "message_prefix": "state is now"
}))]
pub(crate) struct NewWebhook {
    /// The name of the webhook, unique in the namespace.
    #[schema(value_type = String)]
    name: Option<String>,
    /// The URL that events are sent to, with http or https and without credentials. Its host must have a public address, or one
    /// in `WEBHOOK_ALLOWED_NETWORKS`.
    #[schema(value_type = String)]
    url: Option<String>,
    /// The types of events that are sent; `audit`, `mutate` and `status` by default.
    #[schema(value_type = Option<Vec<EventType>>)]
    event_types: Option<Vec<String>>,
    /// The types of objects whose events are sent; by default all that the caller may read. Those that belong to the cluster, such
    /// as `node`, are only for webhooks of `system`.
    #[schema(value_type = Option<Vec<ObjectType>>)]
    object_types: Option<Vec<String>>,
    /// Send only events whose message starts with this text.
    message_prefix: Option<String>,
    /// Whether events are sent; true by default.
    enabled: Option<bool>,
    /// Whether to only check the request, without creating anything; false by default. The response is the record that would
    /// be created, without a secret; its UUID is an example.
    dry_run: Option<bool>,
}

/// Creates a webhook.
///
/// The response has the secret that signs the deliveries. It is not returned again.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/webhooks", tag = "auth", params(("namespace" = String, Path)),
    request_body = NewWebhook, responses((status = 400, description = "A field is missing or malformed, or the address of the URL is not allowed."),
    (status = 403, description = "The caller may not read these events, or the quota is exceeded."),
    (status = 404, description = "No such namespace."), (status = 409, description = "The name is in use.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(namespace): Path<String>,
    Args(new): Args<NewWebhook>,
) -> ApiResult<Json<WebhookRecord>> {
    let name = required("name", new.name)?;
    let request = WebhookRequest {
        url: new.url,
        event_types: new.event_types,
        object_types: new.object_types,
        message_prefix: new.message_prefix,
        enabled: new.enabled,
    };
    let creation = webhook::create(&app, &caller, &namespace, &name, request);
    let record = run_or_check(new.dry_run, creation).await?;
    // The secret of a webhook that does not exist would only mislead.
    let secret = record.secret.filter(|_| !new.dry_run.unwrap_or(false));
    Ok(Json(WebhookRecord { secret, ..record }))
}

/// Returns a webhook, without its secret.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/webhooks/{webhook}", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path)),
    responses((status = 404, description = "No such namespace or webhook.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<WebhookRecord>> {
    Ok(Json(webhook::get(&app, &caller, &namespace, &webhook).await?))
}

/// Replaces the terms of a webhook. Pending deliveries are sent to the new URL.
#[utoipa::path(put, path = "/auth/namespaces/{namespace}/webhooks/{webhook}", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path)), request_body = WebhookRequest,
    responses((status = 400, description = "A field is missing or malformed, or the address of the URL is not allowed."),
    (status = 403, description = "The caller may not read these events."),
    (status = 404, description = "No such namespace or webhook.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook)): Path<(String, String)>,
    Args(request): Args<WebhookRequest>,
) -> ApiResult<Json<WebhookRecord>> {
    Ok(Json(webhook::update(&app, &caller, &namespace, &webhook, request).await?))
}

/// Deletes a webhook and its deliveries. Nothing is sent any longer.
#[utoipa::path(delete, path = "/auth/namespaces/{namespace}/webhooks/{webhook}", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path)),
    responses((status = 404, description = "No such namespace or webhook.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<WebhookRecord>> {
    Ok(Json(webhook::delete(&app, &caller, &namespace, &webhook).await?))
}

/// A new secret for a webhook.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"overlap": 3600}))]
pub(crate) struct SecretRotation {
    /// For how many seconds deliveries are signed with the previous secret, too: 86400 by default, at most 604800. 0 if the
    /// previous one has leaked.
    overlap: Option<i64>,
}

/// Replaces the secret of a webhook.
///
/// The response has the new secret. It is not returned again. Meanwhile each delivery has a signature of both secrets.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/webhooks/{webhook}/rotate-secret", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path)), request_body = SecretRotation,
    responses((status = 404, description = "No such namespace or webhook."),
    (status = 409, description = "Another request replaces the secret.")))]
pub(crate) async fn rotate_secret(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook)): Path<(String, String)>,
    Args(rotation): Args<SecretRotation>,
) -> ApiResult<Json<WebhookRecord>> {
    Ok(Json(webhook::rotate_secret(&app, &caller, &namespace, &webhook, rotation.overlap).await?))
}

/// Queues a delivery that tests the receiver. The list of deliveries has its result.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/webhooks/{webhook}/test", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path)),
    responses((status = 404, description = "No such namespace or webhook."),
    (status = 409, description = "The webhook is disabled.")))]
pub(crate) async fn test(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<DeliveryRecord>> {
    Ok(Json(webhook::test(&app, &caller, &namespace, &webhook).await?))
}

/// Lists the deliveries of a webhook, newest first. Finished ones are kept for three days, up to 1000 of them.
#[utoipa::path(get, path = "/auth/namespaces/{namespace}/webhooks/{webhook}/deliveries", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path)),
    responses((status = 404, description = "No such namespace or webhook.")))]
pub(crate) async fn list_deliveries(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook)): Path<(String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<DeliveryRecord>> {
    Pages::of(webhook::list_deliveries(&app, &caller, &namespace, &webhook).await?)
}

/// Sends a delivery again as soon as possible, with the same id and body.
#[utoipa::path(post, path = "/auth/namespaces/{namespace}/webhooks/{webhook}/deliveries/{delivery}/redeliver", tag = "auth",
    params(("namespace" = String, Path), ("webhook" = String, Path), ("delivery" = String, Path)),
    responses((status = 404, description = "No such namespace, webhook or delivery."),
    (status = 409, description = "The webhook is disabled.")))]
pub(crate) async fn redeliver(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((namespace, webhook, delivery)): Path<(String, String, String)>,
    _: Args<NoArgs>,
) -> ApiResult<Json<DeliveryRecord>> {
    Ok(Json(webhook::redeliver(&app, &caller, &namespace, &webhook, &delivery).await?))
}
