//! Deliveries: which events are sent to which webhooks, and what is sent. See docs/decisions/0089.

use aws_lc_rs::hmac;
use muster_types::event::EventType;
use muster_types::ids::{DeliveryId, WebhookId};
use muster_types::key::Secret;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};
use serde::Serialize;

use crate::app::App;
use crate::objects::event_stream::{OwnedEvent, StreamedEvent, read_events, required_scope};
use muster_store::event_streams::{EventPosition, ObjectEvent};
use muster_store::webhook_deliveries::NewDelivery;
use muster_store::webhooks::WebhookRow;
use muster_store::{StoreError, Tx, webhook_deliveries, webhooks};

/// The maximum number of pending deliveries of a webhook.
pub(crate) const MAX_PENDING: i64 = 1000;
/// The minimum number of seconds between two events about dropped deliveries of a webhook. Such an event may itself be sent.
const DROP_EVENT_INTERVAL: f64 = 3600.0;
/// The maximum size of the details of an event that are sent, in bytes.
const MAX_EXTRA: usize = 64 << 10;

/// What a delivery contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeliveryKind {
    Event,
    Test,
}

/// The body of a delivery.
#[derive(Debug, Serialize)]
struct DeliveryBody<'a> {
    delivery: DeliveryId,
    kind: DeliveryKind,
    /// Unix time at which the delivery was queued.
    created: f64,
    webhook: BodyWebhook<'a>,
    event: &'a StreamedEvent,
}

#[derive(Debug, Serialize)]
struct BodyWebhook<'a> {
    uuid: WebhookId,
    namespace: &'a str,
    name: &'a str,
}

/// Creates a delivery of an event.
pub(crate) fn new_delivery(
    webhook: &WebhookRow,
    id: DeliveryId,
    kind: DeliveryKind,
    event: &StreamedEvent,
    event_type: EventType,
    time: f64,
) -> Result<NewDelivery> {
    let body = DeliveryBody {
        delivery: id,
        kind,
        created: time,
        webhook: BodyWebhook { uuid: webhook.id, namespace: &webhook.namespace, name: &webhook.name },
        event,
    };
    let body = serde_json::to_string(&body)
        .map_err(|error| Error::Internal(format!("failed to serialize a delivery: {error}")))?;
    Ok(NewDelivery {
        id,
        webhook: webhook.id,
        event_uuid: event.event.event_uuid.clone(),
        event_type,
        message: event.event.message.clone(),
        object: ObjectRef { object_type: event.object_type, id: event.object_uuid.clone() },
        body,
        created: time,
    })
}

/// Returns the deliveries that events cause, at most one for each webhook and event.
pub(crate) async fn deliveries_of(
    app: &App,
    webhooks: &[WebhookRow],
    page: &[EventPosition],
) -> Result<Vec<NewDelivery>> {
    let events = read_events(app, page).await?;
    let mut deliveries = Vec::new();
    for webhook in webhooks {
        for of_event in events.chunk_by(|one, other| one.position == other.position) {
            let matching = of_event.iter().filter_map(|event| Some((event, matching_type(webhook, event)?)));
            // Of several objects of an event, the same one whichever daemon sends it.
            let object = |event: &OwnedEvent| (event.event.object.object_type, event.event.object.id.clone());
            let Some((event, event_type)) = matching.min_by_key(|(event, _)| object(event)) else { continue };
            let (id, time) = (DeliveryId::new(), app.store.membership.database_time());
            let sent = streamed(event);
            deliveries.push(new_delivery(webhook, id, DeliveryKind::Event, &sent, event_type, time)?);
        }
    }
    Ok(deliveries)
}

fn streamed(event: &OwnedEvent) -> StreamedEvent {
    let ObjectEvent { event: record, object, .. } = &event.event;
    let mut record = record.clone();
    if serde_json::to_string(&record.extra).is_ok_and(|text| text.len() > MAX_EXTRA) {
        record.extra.clear();
        record.extra.insert("omitted".into(), "the details are too long for a webhook".into());
    }
    StreamedEvent {
        event: record,
        object_type: object.object_type,
        object_uuid: object.id.clone(),
        namespace: event.owner.clone(),
    }
}

/// Returns the type of an event if a webhook is to send it.
fn matching_type(webhook: &WebhookRow, event: &OwnedEvent) -> Option<EventType> {
    let OwnedEvent { position, event: ObjectEvent { event: record, object, cause }, owner } = event;
    if webhook.enabled_since.is_none_or(|since| position.stored < since) {
        return None;
    }
    let (_, is_administrative) = required_scope(object.object_type)?;
    // The events of a blob, which has no owner, belong to the namespace that caused them.
    let owner = if object.object_type == ObjectType::Blob { cause } else { owner };
    // Only webhooks of `system` have the types of objects that belong to the cluster.
    if !is_administrative && owner.as_ref() != Some(&webhook.namespace) {
        return None;
    }
    let event_type: EventType = record.event_type.parse().ok()?;
    let is_wanted = webhook.object_types.contains(&object.object_type)
        && webhook.event_types.contains(&event_type)
        && webhook.message_prefix.as_ref().is_none_or(|prefix| record.message.starts_with(prefix));
    is_wanted.then_some(event_type)
}

/// The deliveries of a webhook that were dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DroppedDeliveries {
    pub(crate) count: i64,
    /// Whether an event about it is due.
    pub(crate) is_event_due: bool,
}

/// Drops the oldest pending deliveries of a webhook that has too many.
pub(crate) async fn drop_excess(
    tx: &mut Tx,
    webhook: WebhookId,
    time: f64,
) -> Result<DroppedDeliveries, StoreError> {
    let reason = format!("the webhook had more than {MAX_PENDING} pending deliveries");
    let count = webhook_deliveries::drop_excess(tx, webhook, MAX_PENDING, time, &reason).await?;
    let is_event_due =
        count > 0 && webhooks::count_dropped(tx, webhook, count, time, DROP_EVENT_INTERVAL).await?;
    Ok(DroppedDeliveries { count, is_event_due })
}

/// Returns the value of `Muster-Signature`: a signature for each secret.
pub(crate) fn signature(secrets: &[Secret], timestamp: i64, body: &str) -> String {
    let sign = |secret: &Secret| {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
        let mut context = hmac::Context::with_key(&key);
        context.update(format!("{timestamp}.").as_bytes());
        context.update(body.as_bytes());
        format!("v1={}", hex::encode(context.sign()))
    };
    secrets.iter().map(sign).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use muster_types::event::EventRecord;

    use super::*;

    #[test]
    fn signs_timestamp_and_body_with_each_secret() {
        // Computed with `printf '1700000000.{}' | openssl dgst -sha256 -hmac whsec_a`.
        let expected = "v1=04339dc4f01d6541e8d3b7e4bd93cd2d4f680ccb28592270900b08e49cc09e57";
        assert_eq!(signature(&[Secret::new("whsec_a")], 1_700_000_000, "{}"), expected);
        let both = signature(&[Secret::new("whsec_a"), Secret::new("whsec_b")], 1_700_000_000, "{}");
        let (first, second) = both.split_once(',').unwrap();
        assert!(first == expected && second.starts_with("v1=") && second != expected, "{both}");
    }

    fn webhook(namespace: &str, object_types: &[ObjectType]) -> WebhookRow {
        WebhookRow {
            id: WebhookId::new(),
            namespace: namespace.into(),
            name: "chat".into(),
            url: "https://hooks.example".into(),
            event_types: vec![EventType::Audit, EventType::Status],
            object_types: object_types.to_vec(),
            message_prefix: None,
            enabled_since: Some(100.0),
            secret: String::new(),
            previous_secret: None,
            previous_secret_expires: None,
            dropped: 0,
            last_delivered: None,
            last_failed: None,
            last_error: None,
        }
    }

    fn event(object_type: ObjectType, owner: Option<&str>, cause: Option<&str>) -> OwnedEvent {
        let event = EventRecord {
            event_uuid: "e".into(),
            request_id: None,
            timestamp: 1.0,
            event_type: "audit".into(),
            kind: "audit".into(),
            message: "state is now created".into(),
            extra: serde_json::Map::new(),
            node: "n".into(),
            fqdn: "n".into(),
            duration: None,
        };
        OwnedEvent {
            position: EventPosition { stored: 100.0, event_uuid: "e".into() },
            event: ObjectEvent {
                event,
                object: ObjectRef { object_type, id: "o".into() },
                cause: cause.map(str::to_owned),
            },
            owner: owner.map(str::to_owned),
        }
    }

    #[test]
    fn webhook_gets_only_what_its_filters_select() {
        let all = webhook("red", &[ObjectType::Instance, ObjectType::Blob]);
        let instance = event(ObjectType::Instance, Some("red"), None);
        assert_eq!(matching_type(&all, &instance), Some(EventType::Audit));
        assert_eq!(matching_type(&all, &event(ObjectType::Network, Some("red"), None)), None);
        let prefix = |text: &str| WebhookRow { message_prefix: Some(text.into()), ..all.clone() };
        assert!(matching_type(&prefix("state is now"), &instance).is_some());
        assert!(matching_type(&prefix("power"), &instance).is_none());
        let usage = WebhookRow { event_types: vec![EventType::Usage], ..all.clone() };
        assert!(matching_type(&usage, &instance).is_none());
        for since in [Some(100.5), None] {
            assert!(matching_type(&WebhookRow { enabled_since: since, ..all.clone() }, &instance).is_none());
        }
    }

    #[test]
    fn webhook_gets_only_events_of_its_namespace() {
        let red = webhook("red", &[ObjectType::Instance, ObjectType::Blob]);
        for (object_type, owner, cause, is_sent) in [
            (ObjectType::Instance, Some("red"), Some("blue"), true),
            (ObjectType::Instance, Some("blue"), Some("red"), false),
            (ObjectType::Instance, None, Some("red"), false),
            (ObjectType::Blob, None, Some("red"), true),
            (ObjectType::Blob, None, Some("blue"), false),
            (ObjectType::Blob, None, None, false),
        ] {
            let event = event(object_type, owner, cause);
            assert_eq!(matching_type(&red, &event).is_some(), is_sent, "{event:?}");
        }
        let system = webhook("system", &[ObjectType::Node, ObjectType::Instance]);
        assert!(matching_type(&system, &event(ObjectType::Node, None, None)).is_some());
        assert!(matching_type(&system, &event(ObjectType::Instance, Some("red"), None)).is_none());
    }
}
