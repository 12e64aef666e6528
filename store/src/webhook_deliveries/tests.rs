use std::sync::Arc;

use muster_types::event::EventType;
use muster_types::ids::{DeliveryId, WebhookId};
use muster_types::object::ObjectRef;
use muster_types::webhook::DeliveryState;

use super::{Attempt, NewDelivery};
use crate::testing::on_both_engines;
use crate::webhooks::tests::{add_webhook, terms};
use crate::*;

async fn add(store: &Store, webhook: WebhookId, event: &str, created: f64) -> Option<DeliveryId> {
    let new = NewDelivery {
        id: DeliveryId::new(),
        webhook,
        event_uuid: event.into(),
        event_type: EventType::Audit,
        message: "state is now created".into(),
        object: ObjectRef::namespace("ns"),
        body: format!("body of {event}"),
        created,
    };
    let is_new = transaction!(store, |tx| { Ok(webhook_deliveries::insert(tx, &new).await?) }).unwrap();
    is_new.then_some(new.id)
}

fn attempt(state: DeliveryState, time: f64) -> Attempt<'static> {
    Attempt { state, time, next_attempt: time + 10.0, response_status: Some(500), error: Some("failed") }
}

on_both_engines! {
    async fn event_is_queued_once_for_each_webhook(store: Arc<Store>) {
        let one = add_webhook(&store, "one", &terms()).await.unwrap();
        let two = add_webhook(&store, "two", &terms()).await.unwrap();
        assert!(add(&store, one, "e", 1.0).await.is_some());
        assert!(add(&store, one, "e", 2.0).await.is_none());
        assert!(add(&store, two, "e", 3.0).await.is_some());
        assert_eq!(webhook_deliveries::due_webhooks(&*store, 3.0).await.unwrap(), [one, two]);
        assert_eq!(webhook_deliveries::due_webhooks(&*store, 1.5).await.unwrap(), [one]);
        assert_eq!(webhooks::by_name(&*store, "ns", "one").await.unwrap().unwrap().1, 1);
        assert!(transaction!(store, |tx| { Ok(webhooks::remove(tx, one).await?) }).unwrap());
        assert!(webhook_deliveries::list(&*store, one).await.unwrap().is_empty());
        assert_eq!(webhook_deliveries::list(&*store, two).await.unwrap().len(), 1);
    }

    async fn attempts_are_recorded_once_and_in_order(store: Arc<Store>) {
        let webhook = add_webhook(&store, "one", &terms()).await.unwrap();
        let first = add(&store, webhook, "a", 1.0).await.unwrap();
        let second = add(&store, webhook, "b", 2.0).await.unwrap();
        let next = async |time| webhook_deliveries::next_due(&*store, webhook, time).await.unwrap();
        let due = next(5.0).await.unwrap();
        assert_eq!((due.id, &*due.body, due.attempts), (first, "body of a", 0));
        let record = async |state, time| {
            let attempt = attempt(state, time);
            transaction!(store, |tx| { Ok(webhook_deliveries::record_attempt(tx, &due, &attempt).await?) }).unwrap()
        };
        assert!(record(DeliveryState::Pending, 5.0).await);
        assert!(!record(DeliveryState::Failed, 6.0).await, "it has another attempt");
        assert_eq!(next(5.0).await.unwrap().id, second);
        let due = next(15.0).await.unwrap();
        assert_eq!(due.id, second, "it waits longer");
        let delivered = Attempt { response_status: Some(204), error: None, ..attempt(DeliveryState::Delivered, 7.0) };
        let recorded = transaction!(store, |tx| { Ok(webhook_deliveries::record_attempt(tx, &due, &delivered).await?) });
        assert!(recorded.unwrap());
        let row = webhook_deliveries::get(&*store, webhook, second).await.unwrap().unwrap();
        assert_eq!((row.state, row.attempts, row.finished), (DeliveryState::Delivered, 1, Some(7.0)));
        assert_eq!((row.response_status, row.error), (Some(204), None));
        assert_eq!(next(15.0).await.unwrap().id, first);
        let again = async |webhook| {
            transaction!(store, |tx| { Ok(webhook_deliveries::queue_again(tx, webhook, second, 8.0).await?) }).unwrap()
        };
        assert!(!again(WebhookId::new()).await);
        assert!(again(webhook).await);
        let due = next(8.0).await.unwrap();
        assert_eq!((due.id, due.attempts, &*due.body), (second, 0, "body of b"));
    }

    async fn oldest_pending_deliveries_are_dropped(store: Arc<Store>) {
        let webhook = add_webhook(&store, "one", &terms()).await.unwrap();
        let mut ids = Vec::new();
        for number in 0..5 {
            ids.push(add(&store, webhook, &format!("e{number}"), f64::from(number)).await.unwrap());
        }
        let drop_excess = async |max| {
            transaction!(store, |tx| {
                Ok(webhook_deliveries::drop_excess(tx, webhook, max, 9.0, "too many").await?)
            })
            .unwrap()
        };
        assert_eq!((drop_excess(5).await, drop_excess(3).await), (0, 2));
        let rows = webhook_deliveries::list(&*store, webhook).await.unwrap();
        let of = |state| rows.iter().filter(|row| row.state == state).map(|row| row.id).collect::<Vec<_>>();
        assert_eq!(of(DeliveryState::Dropped), [ids[1], ids[0]]);
        assert_eq!(of(DeliveryState::Pending), [ids[4], ids[3], ids[2]]);
        assert!(rows.iter().all(|row| row.error.is_some() == (row.state == DeliveryState::Dropped)));
    }

    async fn prunes_finished_deliveries_by_age_and_number(store: Arc<Store>) {
        let webhook = add_webhook(&store, "one", &terms()).await.unwrap();
        for number in 0..5 {
            add(&store, webhook, &format!("e{number}"), f64::from(number)).await.unwrap();
            let due = webhook_deliveries::next_due(&*store, webhook, 100.0).await.unwrap().unwrap();
            let attempt = attempt(DeliveryState::Failed, 10.0 * f64::from(number));
            transaction!(store, |tx| { Ok(webhook_deliveries::record_attempt(tx, &due, &attempt).await?) }).unwrap();
        }
        add(&store, webhook, "pending", 0.0).await.unwrap();
        let removed = transaction!(store, |tx| { Ok(webhook_deliveries::prune_finished(tx, 5.0, 100).await?) });
        assert_eq!(removed.unwrap(), 1);
        let prune = async |before| {
            transaction!(store, |tx| {
                Ok(webhook_deliveries::prune_excess(tx, webhook, before, 2, 100).await?)
            })
            .unwrap()
        };
        assert_eq!((prune(25.0).await, prune(100.0).await), (0, 2));
        let left: Vec<String> =
            webhook_deliveries::list(&*store, webhook).await.unwrap().into_iter().map(|row| row.event_uuid).collect();
        assert_eq!(left, ["e4", "e3", "pending"]);
    }
}
