//! Webhooks of a namespace: create, get, list, update, delete, and their deliveries. A webhook sends what its creator may
//! read. See docs/decisions/0089.

use std::str::FromStr;

use muster_types::event::{Event, EventRecord, EventType};
use muster_types::ids::{DeliveryId, WebhookId};
use muster_types::key::Secret;
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::settings::Settings;
use muster_types::webhook::{
    DEFAULT_EVENT_TYPES, DeliveryRecord, DeliveryState, WebhookRecord, WebhookTerms, check_message_prefix,
    check_name, check_secret_overlap, check_url_length, generate_secret,
};
use muster_types::{Error, Result};
use reqwest::Url;
use serde_json::Map;

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::auth::scopes::{self, CLUSTER_ADMIN};
use crate::fetch::address::AddressFilter;
use crate::fetch::check_url;
use crate::fetch::guarded_client::host_of;
use crate::objects::audit::with_request;
use crate::objects::event_stream::{StreamedEvent, required_scope};
use crate::objects::quota::Admission;
use crate::objects::webhook_delivery::{self, DeliveryKind};
use muster_store::webhook_deliveries::DeliveryRow;
use muster_store::webhooks::{NewWebhook, WebhookRow};
use muster_store::{StoreError, transaction, webhook_deliveries, webhooks};

/// The terms of a webhook as requested, not validated yet.
#[derive(Debug, Clone, Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewWebhookTerms)]
#[schema(example = json!({"url": "https://hooks.example/muster", "event_types": ["status"], "object_types": ["instance"]}))]
pub struct WebhookRequest {
    /// The URL that events are sent to, with http or https and without credentials. Its host must have a public address, or one
    /// in `WEBHOOK_ALLOWED_NETWORKS`.
    #[schema(value_type = String)]
    pub url: Option<String>,
    /// The types of events that are sent; `audit`, `mutate` and `status` by default.
    #[schema(value_type = Option<Vec<EventType>>)]
    pub event_types: Option<Vec<String>>,
    /// The types of objects whose events are sent; by default all that the caller may read. Those that belong to the cluster, such
    /// as `node`, are only for webhooks of `system`.
    #[schema(value_type = Option<Vec<ObjectType>>)]
    pub object_types: Option<Vec<String>>,
    /// Send only events whose message starts with this text.
    pub message_prefix: Option<String>,
    /// Whether events are sent; true by default. Events of the time in which a webhook is disabled are not sent later.
    pub enabled: Option<bool>,
}

impl WebhookRequest {
    /// Validates the terms, including that the caller may read the events.
    fn check(self, app: &App, caller: &Caller, namespace: &str) -> Result<WebhookTerms> {
        let url = self.url.ok_or_else(|| Error::Invalid("url: Missing data for required field.".into()))?;
        check_url_length(&url)?;
        let invalid = |reason: &dyn std::fmt::Display| Error::Invalid(format!("url: {reason}"));
        let parsed = Url::parse(&url).map_err(|_| invalid(&"is not a valid URL"))?;
        check_url(&parsed).map_err(|reason| invalid(&reason))?;
        address_filter(&app.settings).check_literal(&parsed).map_err(|reason| invalid(&reason))?;
        let event_types = parse_types("event_types", self.event_types)?;
        let event_types = event_types.unwrap_or_else(|| DEFAULT_EVENT_TYPES.to_vec());
        let object_types = parse_types("object_types", self.object_types)?;
        let object_types = readable_types(caller, namespace, object_types)?;
        Ok(WebhookTerms {
            url,
            event_types: distinct("event_types", event_types)?,
            object_types: distinct("object_types", object_types)?,
            message_prefix: check_message_prefix(self.message_prefix)?,
            enabled: self.enabled.unwrap_or(true),
        })
    }
}

/// Returns the filter for the addresses that webhooks may send to.
pub(crate) fn address_filter(settings: &Settings) -> AddressFilter {
    let networks = &settings.webhook_allowed_networks;
    AddressFilter::new("WEBHOOK_ALLOWED_NETWORKS", networks, &settings.http_proxy_server)
}

fn parse_types<T: FromStr<Err = String>>(field: &str, names: Option<Vec<String>>) -> Result<Option<Vec<T>>> {
    let Some(names) = names else { return Ok(None) };
    let parse = |name: &String| name.parse().map_err(|why| Error::Invalid(format!("{field}: {why}")));
    names.iter().map(parse).collect::<Result<_>>().map(Some)
}

fn distinct<T: Ord>(field: &str, mut values: Vec<T>) -> Result<Vec<T>> {
    if values.is_empty() {
        return Err(Error::Invalid(format!(
            "{field}: must not be empty; a webhook without them sends nothing"
        )));
    }
    values.sort_unstable();
    values.dedup();
    Ok(values)
}

/// Returns the requested types of objects if the caller may read their events, by default all those.
fn readable_types(
    caller: &Caller,
    namespace: &str,
    requested: Option<Vec<ObjectType>>,
) -> Result<Vec<ObjectType>> {
    let is_granted = |scope| scopes::grants(caller.scopes.as_deref(), scope);
    let Some(requested) = requested else {
        let is_readable =
            |object_type| matches!(required_scope(object_type), Some((scope, false)) if is_granted(scope));
        return Ok(ObjectType::ALL.iter().copied().filter(|object_type| is_readable(*object_type)).collect());
    };
    let mut missing = Vec::new();
    for object_type in &requested {
        let refuse =
            |reason: &str| Err(Error::Invalid(format!("object_types: events of {object_type} {reason}")));
        let Some((scope, is_administrative)) = required_scope(*object_type) else {
            return refuse("cannot be sent");
        };
        if is_administrative && namespace != SYSTEM_NAMESPACE {
            return refuse("are only sent by webhooks of system");
        }
        let scopes = [Some(scope), is_administrative.then_some(CLUSTER_ADMIN)];
        missing.extend(scopes.into_iter().flatten().filter(|scope| !is_granted(scope)));
    }
    if missing.is_empty() {
        return Ok(requested);
    }
    missing.sort_unstable();
    missing.dedup();
    let text =
        format!("a webhook cannot send events that need scopes you do not hold: {}", missing.join(", "));
    Err(Error::Forbidden(text))
}

/// Returns "not found" unless the namespace exists and is the caller's own, or the caller is `system`. A trust does not allow to
/// send the events of a namespace elsewhere.
async fn require_own_namespace(app: &App, caller: &Caller, namespace: &str) -> Result<()> {
    require_namespace(&*app.store, caller, namespace).await?;
    if caller.may_change(namespace) { Ok(()) } else { Err(Error::not_found("namespace")) }
}

/// Returns the webhooks of a namespace, by name.
pub async fn list(app: &App, caller: &Caller, namespace: &str) -> Result<Vec<WebhookRecord>> {
    require_own_namespace(app, caller, namespace).await?;
    let rows = webhooks::list(&*app.store, namespace).await?;
    Ok(rows.into_iter().map(|(row, pending)| record(app, row, pending)).collect())
}

/// Returns a webhook.
pub async fn get(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<WebhookRecord> {
    require_own_namespace(app, caller, namespace).await?;
    let found = webhooks::by_name(&*app.store, namespace, name).await?;
    let (row, pending) = found.ok_or_else(absent)?;
    Ok(record(app, row, pending))
}

async fn find(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<WebhookRow> {
    require_own_namespace(app, caller, namespace).await?;
    Ok(webhooks::by_name(&*app.store, namespace, name).await?.ok_or_else(absent)?.0)
}

fn absent() -> Error {
    Error::not_found("webhook")
}

/// Creates a webhook. Its record has the secret.
pub async fn create(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    request: WebhookRequest,
) -> Result<WebhookRecord> {
    require_own_namespace(app, caller, namespace).await?;
    check_name(name)?;
    let terms = request.check(app, caller, namespace)?;
    let (id, secret) = (WebhookId::new(), generate_secret());
    let sealed = seal(app, id, &secret)?;
    let (row, pending) = transaction!(app.store, |tx| {
        let admission = Admission::begin(app, tx, namespace, &[(QuotaName::Webhooks, 1)]).await?;
        let new = NewWebhook { id, namespace, name, terms: &terms, secret: &sealed };
        match webhooks::insert(tx, &new).await {
            Ok(()) => {}
            Err(StoreError::Duplicate(_)) => {
                return Err(Error::Conflict("webhook already exists".into()).into());
            }
            Err(error) => return Err(error.into()),
        }
        let created = webhooks::by_name(&mut *tx, namespace, name).await?.ok_or_else(absent)?;
        admission.finish(tx).await?;
        Ok(created)
    })?;
    record_change(app, caller, namespace, name, EventType::Audit, "webhook created", Some(&terms));
    Ok(WebhookRecord { secret: Some(secret.expose().to_owned()), ..record(app, row, pending) })
}

/// Replaces the terms of a webhook. Pending deliveries are sent to the new URL.
pub async fn update(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    request: WebhookRequest,
) -> Result<WebhookRecord> {
    let row = find(app, caller, namespace, name).await?;
    let terms = request.check(app, caller, namespace)?;
    let is_updated = transaction!(app.store, |tx| { Ok(webhooks::update(tx, row.id, &terms).await?) })?;
    if !is_updated {
        return Err(absent());
    }
    record_change(app, caller, namespace, name, EventType::Mutate, "webhook updated", Some(&terms));
    get(app, caller, namespace, name).await
}

/// Deletes a webhook and its deliveries. Returns its last record.
pub async fn delete(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<WebhookRecord> {
    let last = get(app, caller, namespace, name).await?;
    if !transaction!(app.store, |tx| { Ok(webhooks::remove(tx, last.uuid).await?) })? {
        return Err(absent());
    }
    record_change(app, caller, namespace, name, EventType::Audit, "webhook deleted", None);
    Ok(last)
}

/// Replaces the secret of a webhook. For `overlap` seconds deliveries are signed with both. The record has the new one.
pub async fn rotate_secret(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    overlap: Option<i64>,
) -> Result<WebhookRecord> {
    let row = find(app, caller, namespace, name).await?;
    let overlap = check_secret_overlap(overlap)?;
    let secret = generate_secret();
    let sealed = seal(app, row.id, &secret)?;
    let is_replaced =
        transaction!(app.store, |tx| { Ok(webhooks::rotate_secret(tx, &row, &sealed, overlap).await?) })?;
    if !is_replaced {
        return Err(Error::Conflict("the webhook or its secret has changed, please retry".into()));
    }
    record_change(app, caller, namespace, name, EventType::Audit, "secret of webhook rotated", None);
    Ok(WebhookRecord { secret: Some(secret.expose().to_owned()), ..get(app, caller, namespace, name).await? })
}

/// Returns the deliveries of a webhook, newest first.
pub async fn list_deliveries(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
) -> Result<Vec<DeliveryRecord>> {
    let row = find(app, caller, namespace, name).await?;
    let rows = webhook_deliveries::list(&*app.store, row.id).await?;
    Ok(rows.into_iter().map(delivery_record).collect())
}

/// Sends a delivery again, as soon as possible, whatever its state is.
pub async fn redeliver(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    delivery: &str,
) -> Result<DeliveryRecord> {
    let row = find(app, caller, namespace, name).await?;
    require_enabled(&row)?;
    let not_found = || Error::not_found("delivery");
    let id: DeliveryId = delivery.parse().map_err(|_| not_found())?;
    let time = app.store.membership.database_time();
    let queued = transaction!(app.store, |tx| {
        if !webhook_deliveries::queue_again(tx, row.id, id, time).await? {
            return Err(not_found().into());
        }
        Ok(webhook_deliveries::get(&mut *tx, row.id, id).await?)
    })?;
    queued.map(delivery_record).ok_or_else(not_found)
}

/// Queues a delivery that tests the receiver.
pub async fn test(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<DeliveryRecord> {
    let row = find(app, caller, namespace, name).await?;
    require_enabled(&row)?;
    let id = DeliveryId::new();
    let time = app.store.membership.database_time();
    let event = EventRecord {
        event_uuid: id.to_string(),
        request_id: Some(caller.request_id.clone()),
        timestamp: time,
        event_type: EventType::Audit.to_string(),
        kind: EventType::Audit.to_string(),
        message: "test of the webhook".into(),
        extra: Map::new(),
        node: app.events.node().to_owned(),
        fqdn: app.events.node().to_owned(),
        duration: None,
    };
    let event = StreamedEvent {
        event,
        object_type: ObjectType::Namespace,
        object_uuid: namespace.to_owned(),
        namespace: Some(namespace.to_owned()),
    };
    let new = webhook_delivery::new_delivery(&row, id, DeliveryKind::Test, &event, EventType::Audit, time)?;
    let queued = transaction!(app.store, |tx| {
        webhook_deliveries::insert(tx, &new).await?;
        webhook_delivery::drop_excess(tx, row.id, time).await?;
        Ok(webhook_deliveries::get(&mut *tx, row.id, id).await?)
    })?;
    queued.map(delivery_record).ok_or_else(absent)
}

fn require_enabled(row: &WebhookRow) -> Result<()> {
    if row.enabled_since.is_none() {
        return Err(Error::Conflict("the webhook is disabled; enable it first".into()));
    }
    Ok(())
}

/// Records a change as an event of the namespace. The URL may contain a token, so only its host is recorded.
fn record_change(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    event_type: EventType,
    message: &str,
    terms: Option<&WebhookTerms>,
) {
    let mut event = Event::new(event_type, ObjectRef::namespace(namespace), message).with("webhook", name);
    if let Some(terms) = terms {
        event = event
            .with("host", Url::parse(&terms.url).ok().map(|url| host_of(&url)))
            .with("event_types", serde_json::json!(terms.event_types))
            .with("object_types", serde_json::json!(terms.object_types))
            .with("message_prefix", terms.message_prefix.clone())
            .with("enabled", terms.enabled);
    }
    app.record(caller, with_request(caller, event));
}

/// Encrypts a secret for the row of its webhook.
fn seal(app: &App, id: WebhookId, secret: &Secret) -> Result<String> {
    app.webhook_cipher.seal(&id.to_string(), secret.expose())
}

/// Returns the secrets that sign deliveries at a time of the database, the current one first.
pub(crate) fn signing_secrets(app: &App, row: &WebhookRow, time: f64) -> Result<Vec<Secret>> {
    let previous = row.previous_secret.as_ref();
    let previous = previous.filter(|_| row.previous_secret_expires.is_some_and(|expires| expires > time));
    let open = |sealed: &String| {
        let secret = app.webhook_cipher.open(&row.id.to_string(), sealed).map(Secret::new);
        secret.ok_or_else(|| {
            Error::Conflict(
                "the stored secret cannot be decrypted; rotate it, and restore auth_secret_seed".into(),
            )
        })
    };
    std::iter::once(&row.secret).chain(previous).map(open).collect()
}

fn record(app: &App, row: WebhookRow, pending: i64) -> WebhookRecord {
    let time = app.store.membership.database_time();
    WebhookRecord {
        uuid: row.id,
        namespace: row.namespace,
        name: row.name,
        url: row.url,
        enabled: row.enabled_since.is_some(),
        event_types: row.event_types,
        object_types: row.object_types,
        message_prefix: row.message_prefix,
        secret: None,
        previous_secret_expires: row.previous_secret_expires.filter(|expires| *expires > time),
        pending,
        dropped: row.dropped,
        last_delivered: row.last_delivered,
        last_failed: row.last_failed,
        last_error: row.last_error,
    }
}

fn delivery_record(row: DeliveryRow) -> DeliveryRecord {
    DeliveryRecord {
        uuid: row.id,
        event_uuid: row.event_uuid,
        event_type: row.event_type,
        message: row.message,
        object_type: row.object.object_type,
        object_uuid: row.object.id,
        state: row.state,
        attempts: row.attempts,
        created: row.created,
        next_attempt: (row.state == DeliveryState::Pending).then_some(row.next_attempt),
        finished: row.finished,
        response_status: row.response_status,
        error: row.error,
    }
}
