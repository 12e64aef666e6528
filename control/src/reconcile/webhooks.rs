//! Queues events for webhooks, and sends the deliveries that are due. See docs/decisions/0089.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use muster_store::webhook_deliveries::{self, Attempt, DueDelivery, NewDelivery};
use muster_store::webhooks::{self, WebhookRow};
use muster_store::{cluster_values, namespaces, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::WebhookId;
use muster_types::namespace::NamespaceState;
use muster_types::object::ObjectRef;
use muster_types::webhook::{DeliveryState, RETRY_DELAYS};
use muster_types::{Error, Result};
use reqwest::{Url, header};

use crate::app::App;
use crate::fetch::guarded_client::{GuardedClient, RequestFailure, no_response};
use crate::objects::webhook::{address_filter, signing_secrets};
use crate::objects::webhook_delivery::{deliveries_of, drop_excess, signature};
use crate::state::{EVENT_PAGE, EventFollower};

/// The interval between reads of new events and due deliveries during a pass.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The interval between removals of old deliveries.
pub(super) const PRUNE_INTERVAL: Duration = Duration::from_secs(60);
/// The timeout of one attempt: resolving, connecting, sending, and the head of the response.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of webhooks that are sent to at a time, of the cluster and of one namespace, so that slow receivers of one
/// namespace do not delay others.
const MAX_SENDERS: usize = 64;
const MAX_NAMESPACE_SENDERS: usize = 4;
/// How many of them may be webhooks whose last attempt has failed, so that receivers which are known to be slow or down do not
/// delay those that work.
const MAX_FAILING_SENDERS: usize = 32;
const MAX_NAMESPACE_FAILING_SENDERS: usize = 2;
/// The number of deliveries after which another webhook may be next.
const SENDER_BATCH: usize = 10;
/// The random part of a delay, as a share of it.
const JITTER: f64 = 0.2;
/// How long finished deliveries are kept, in seconds, and how many of one webhook.
const RETENTION: f64 = 3.0 * 86_400.0;
const MAX_FINISHED: i64 = 1000;
/// How long every delivery is kept, in seconds: longer than an event may be read again.
const MIN_RETENTION: f64 = 60.0;
const PRUNE_BATCH: i64 = 500;
/// The value with the time up to which stored events were queued.
const POSITION: &str = "WEBHOOK_EVENT_POSITION";

/// Runs one pass: until no event is to be queued and no delivery is due. A pass may be cancelled at any point; a delivery that is
/// being sent is then sent again.
pub async fn run(app: &App) -> Result<()> {
    let mut senders = Senders::default();
    loop {
        let enabled = webhooks::enabled(&*app.store).await?;
        if enabled.is_empty() {
            return Ok(());
        }
        queue_events(app, &enabled).await?;
        senders.start(app, &enabled).await?;
        if senders.running.is_empty() {
            return Ok(());
        }
        // The time limit lets new events, and the deliveries of other webhooks, not wait for slow receivers.
        let _ = tokio::time::timeout(POLL_INTERVAL, senders.next_end()).await;
    }
}

/// Queues deliveries of the events that were stored since the last call.
async fn queue_events(app: &App, enabled: &[WebhookRow]) -> Result<()> {
    let mut current = app.webhook_events.lock().await;
    let stored = cluster_values::get(&*app.store, POSITION).await?;
    let stored = match stored {
        None => 0.0,
        Some(text) => text.parse::<f64>().map_err(|_| {
            Error::Internal(format!("table cluster_values, value of {POSITION:?}: {text:?} is not a time"))
        })?,
    };
    // Of a webhook that was enabled just now, only later events are sent.
    let start = enabled.iter().filter_map(|row| row.enabled_since).fold(f64::INFINITY, f64::min).max(stored);
    // Taken, so that after an error, or if this is cancelled, events are read again.
    let follower = current.take().filter(|follower| follower.latest >= start);
    let mut follower = follower.unwrap_or_else(|| EventFollower::new(start));
    let new = follower.take_new(&app.store).await?;
    for page in new.chunks(usize::try_from(EVENT_PAGE).unwrap_or(usize::MAX)) {
        let deliveries = deliveries_of(app, enabled, page).await?;
        let position = page.iter().map(|event| event.stored).fold(stored, f64::max);
        insert(app, enabled, &deliveries, position).await?;
    }
    *current = Some(follower);
    Ok(())
}

/// Inserts deliveries, and records up to which time events were queued.
async fn insert(app: &App, enabled: &[WebhookRow], deliveries: &[NewDelivery], position: f64) -> Result<()> {
    let time = app.store.membership.database_time();
    let dropped = transaction!(app.store, |tx| {
        let mut changed: Vec<WebhookId> = Vec::new();
        for delivery in deliveries {
            if webhook_deliveries::insert(tx, delivery).await? && !changed.contains(&delivery.webhook) {
                changed.push(delivery.webhook);
            }
        }
        let mut dropped = Vec::new();
        for webhook in changed {
            let excess = drop_excess(tx, webhook, time).await?;
            if excess.is_event_due {
                dropped.push((webhook, excess.count));
            }
        }
        cluster_values::set(tx, POSITION, &position.to_string()).await?;
        Ok(dropped)
    })?;
    for (webhook, count) in dropped {
        let Some(row) = enabled.iter().find(|row| row.id == webhook) else { continue };
        tracing::warn!(
            webhook = row.name,
            namespace = row.namespace,
            count,
            "dropped deliveries of a webhook"
        );
        let message = "dropped the oldest deliveries of a webhook, because too many were pending";
        let event = Event::new(EventType::Status, ObjectRef::namespace(&row.namespace), message);
        app.events.record(event.with("webhook", row.name.clone()).with("count", count));
    }
    Ok(())
}

type Sender<'a> = Pin<Box<dyn Future<Output = WebhookId> + Send + 'a>>;

/// A webhook that is being sent to.
struct CurrentWebhook {
    namespace: String,
    /// Whether the last attempt before had failed.
    is_failing: bool,
}

/// The webhooks that are being sent to.
#[derive(Default)]
struct Senders<'a> {
    running: FuturesUnordered<Sender<'a>>,
    current: HashMap<WebhookId, CurrentWebhook>,
    client: Option<Arc<GuardedClient>>,
}

impl<'a> Senders<'a> {
    /// Starts to send to webhooks with due deliveries, within the limits.
    async fn start(&mut self, app: &'a App, enabled: &[WebhookRow]) -> Result<()> {
        let time = app.store.membership.database_time();
        let due = webhook_deliveries::due_webhooks(&*app.store, time).await?;
        for row in in_turn(&due, enabled) {
            let id = row.id;
            if self.running.len() >= MAX_SENDERS {
                break;
            }
            let is_failing = is_failing(row);
            if self.current.contains_key(&id) || !self.has_room(&row.namespace, is_failing) {
                continue;
            }
            let client = match &self.client {
                Some(client) => client.clone(),
                None => {
                    let client = GuardedClient::new(&app.settings, address_filter(&app.settings))?;
                    self.client.insert(Arc::new(client)).clone()
                }
            };
            self.current.insert(id, CurrentWebhook { namespace: row.namespace.clone(), is_failing });
            self.running.push(Box::pin(async move {
                if let Err(error) = send_due(app, &client, id).await {
                    tracing::warn!(webhook = %id, %error, "failed to send the deliveries of a webhook");
                }
                id
            }));
        }
        Ok(())
    }

    /// Returns whether another webhook of a namespace may be sent to.
    fn has_room(&self, namespace: &str, is_failing: bool) -> bool {
        let (mut of_namespace, mut failing, mut failing_of_namespace) = (0, 0, 0);
        for current in self.current.values() {
            let is_same = usize::from(current.namespace == namespace);
            of_namespace += is_same;
            if current.is_failing {
                failing += 1;
                failing_of_namespace += is_same;
            }
        }
        of_namespace < MAX_NAMESPACE_SENDERS
            && (!is_failing
                || failing < MAX_FAILING_SENDERS && failing_of_namespace < MAX_NAMESPACE_FAILING_SENDERS)
    }

    /// Waits until one of the webhooks is finished.
    async fn next_end(&mut self) {
        if let Some(id) = self.running.next().await {
            self.current.remove(&id);
        }
    }
}

/// Returns whether the last attempt of a webhook has failed.
fn is_failing(webhook: &WebhookRow) -> bool {
    webhook
        .last_failed
        .is_some_and(|failed| webhook.last_delivered.is_none_or(|delivered| failed > delivered))
}

/// Returns the webhooks of `due` that are enabled. The one whose last attempt is longest ago is first, so each gets its turn,
/// however long its deliveries have been due.
fn in_turn<'a>(due: &[WebhookId], enabled: &'a [WebhookRow]) -> Vec<&'a WebhookRow> {
    let mut rows: Vec<&WebhookRow> =
        due.iter().filter_map(|id| enabled.iter().find(|row| row.id == *id)).collect();
    let last_attempt =
        |row: &WebhookRow| row.last_failed.unwrap_or_default().max(row.last_delivered.unwrap_or_default());
    rows.sort_by(|one, other| last_attempt(one).total_cmp(&last_attempt(other)));
    rows
}

/// Sends due deliveries of a webhook, one after the other, until one fails.
async fn send_due(app: &App, client: &GuardedClient, id: WebhookId) -> Result<()> {
    for _ in 0..SENDER_BATCH {
        let time = app.store.membership.database_time();
        // Read again each time: it may have been changed, disabled or deleted.
        let Some(webhook) = webhooks::enabled_by_id(&*app.store, id).await? else { return Ok(()) };
        let due = webhook_deliveries::next_due(&*app.store, id, time).await?;
        let Some(delivery) = due else { return Ok(()) };
        let outcome = send(app, client, &webhook, &delivery).await;
        let has_failed = outcome.is_err();
        record(app, &webhook, &delivery, outcome).await?;
        if has_failed {
            return Ok(());
        }
    }
    Ok(())
}

/// Why an attempt failed.
struct AttemptFailure {
    status: Option<u16>,
    reason: String,
}

impl AttemptFailure {
    fn new(reason: impl Into<String>) -> Self {
        Self { status: None, reason: reason.into() }
    }
}

/// Sends a delivery. Returns the status of the response that accepts it.
async fn send(
    app: &App,
    client: &GuardedClient,
    webhook: &WebhookRow,
    delivery: &DueDelivery,
) -> Result<u16, AttemptFailure> {
    let time = app.store.membership.database_time();
    let secrets =
        signing_secrets(app, webhook, time).map_err(|error| AttemptFailure::new(error.to_string()))?;
    let url = Url::parse(&webhook.url).map_err(|_| AttemptFailure::new("url: is not a valid URL"))?;
    #[expect(clippy::cast_possible_truncation, reason = "Unix time is small")]
    let timestamp = time as i64;
    let request = async {
        client.check(&url).await.map_err(RequestFailure::Blocked)?;
        let request = client
            .client()
            .post(url.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .header("Muster-Delivery", delivery.id.to_string())
            .header("Muster-Timestamp", timestamp.to_string())
            .header("Muster-Signature", signature(&secrets, timestamp, &delivery.body))
            .body(delivery.body.clone());
        // The body of the response is not read, and its connection is closed.
        request.send().await.map_err(|error| client.classify(&url, &error))
    };
    let response = match tokio::time::timeout(ATTEMPT_TIMEOUT, request).await {
        Ok(Ok(response)) => response,
        Ok(Err(RequestFailure::Blocked(blocked))) => {
            return Err(AttemptFailure::new(format!("url: {blocked}")));
        }
        Ok(Err(
            RequestFailure::NoResponse(reason)
            | RequestFailure::Untrusted(reason)
            | RequestFailure::Interrupted(reason),
        )) => {
            return Err(AttemptFailure::new(reason));
        }
        Err(_) => {
            let reason = format!("{} within {} seconds", no_response(&url), ATTEMPT_TIMEOUT.as_secs());
            return Err(AttemptFailure::new(reason));
        }
    };
    let status = response.status();
    if status.is_success() {
        return Ok(status.as_u16());
    }
    let why = if status.is_redirection() { ", and redirects are not followed" } else { "" };
    let reason = format!("the receiver responded with {}{why}", status.as_u16());
    Err(AttemptFailure { status: Some(status.as_u16()), reason })
}

/// Records the result of an attempt.
async fn record(
    app: &App,
    webhook: &WebhookRow,
    delivery: &DueDelivery,
    outcome: Result<u16, AttemptFailure>,
) -> Result<()> {
    let time = app.store.membership.database_time();
    let (status, error) = match &outcome {
        Ok(status) => (Some(*status), None),
        Err(failure) => (failure.status, Some(failure.reason.as_str())),
    };
    let delay = retry_delay(delivery.attempts);
    let state = match (&outcome, delay) {
        (Ok(_), _) => DeliveryState::Delivered,
        (Err(_), Some(_)) => DeliveryState::Pending,
        (Err(_), None) => DeliveryState::Failed,
    };
    let attempt = Attempt {
        state,
        time,
        next_attempt: time + delay.unwrap_or_default(),
        response_status: status.map(i64::from),
        error,
    };
    transaction!(app.store, |tx| {
        webhook_deliveries::record_attempt(tx, delivery, &attempt).await?;
        webhooks::record_attempt(tx, webhook.id, time, error).await?;
        Ok(())
    })?;
    if state == DeliveryState::Failed {
        let (namespace, name) = (&webhook.namespace, &webhook.name);
        tracing::info!(namespace, webhook = name, delivery = %delivery.id, error, "gave up a delivery of a webhook");
    }
    Ok(())
}

/// Returns the seconds until the attempt after a failed one, which `attempts` others preceded; `None` if it was the last one.
fn retry_delay(attempts: i64) -> Option<f64> {
    let delay = RETRY_DELAYS.get(usize::try_from(attempts).ok()?)?;
    let random = uuid::Uuid::new_v4().as_bytes()[0];
    Some(delay * (1.0 + JITTER * f64::from(random) / 255.0))
}

/// Removes old deliveries, and webhooks of deleted namespaces. Returns whether there is more to do right away.
pub async fn prune(app: &App) -> Result<bool> {
    let time = app.store.membership.database_time();
    let removed = transaction!(app.store, |tx| {
        Ok(webhook_deliveries::prune_finished(tx, time - RETENTION, PRUNE_BATCH).await?)
    })?;
    let mut is_full = i64::try_from(removed).is_ok_and(|removed| removed >= PRUNE_BATCH);
    for webhook in webhooks::enabled(&*app.store).await? {
        let before = time - MIN_RETENTION;
        let removed = transaction!(app.store, |tx| {
            Ok(webhook_deliveries::prune_excess(tx, webhook.id, before, MAX_FINISHED, PRUNE_BATCH).await?)
        })?;
        is_full |= i64::try_from(removed).is_ok_and(|removed| removed >= PRUNE_BATCH);
    }
    // A daemon of an earlier release does not remove them. A new namespace of the same name must not get them.
    for namespace in webhooks::deleted_namespaces(&*app.store).await? {
        transaction!(app.store, |tx| {
            if !namespaces::lock(tx, &namespace, NamespaceState::Deleted).await? {
                return Err(Error::not_found("namespace").into());
            }
            Ok(webhooks::remove_of_namespace(tx, &namespace).await?)
        })?;
    }
    Ok(is_full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_the_last_attempt() {
        let delays: Vec<f64> = (0..).map_while(retry_delay).collect();
        assert_eq!(delays.len(), RETRY_DELAYS.len());
        for (delay, least) in delays.iter().zip(RETRY_DELAYS) {
            assert!((*least..=*least * (1.0 + JITTER)).contains(delay), "{delay}");
        }
        assert_eq!(retry_delay(-1), None);
    }

    #[test]
    fn webhook_whose_last_attempt_is_longest_ago_is_next() {
        let webhook = |name: &str, last_delivered: Option<f64>, last_failed: Option<f64>| WebhookRow {
            id: WebhookId::new(),
            namespace: "ns".into(),
            name: name.into(),
            url: String::new(),
            event_types: Vec::new(),
            object_types: Vec::new(),
            message_prefix: None,
            enabled_since: Some(0.0),
            secret: String::new(),
            previous_secret: None,
            previous_secret_expires: None,
            dropped: 0,
            last_delivered,
            last_failed,
            last_error: None,
        };
        let enabled = [
            webhook("failed again", Some(1.0), Some(9.0)),
            webhook("failed before", Some(2.0), Some(3.0)),
            webhook("works", Some(5.0), Some(4.0)),
            webhook("new", None, None),
            webhook("not due", None, None),
        ];
        let due: Vec<WebhookId> = enabled[..4].iter().map(|row| row.id).chain([WebhookId::new()]).collect();
        let names: Vec<&str> = in_turn(&due, &enabled).iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["new", "failed before", "works", "failed again"]);
    }
}
