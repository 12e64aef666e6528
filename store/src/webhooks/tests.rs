use std::sync::Arc;

use muster_types::event::EventType;
use muster_types::ids::WebhookId;
use muster_types::object::ObjectType;
use muster_types::webhook::WebhookTerms;

use super::NewWebhook;
use crate::testing::on_both_engines;
use crate::*;

pub(crate) fn terms() -> WebhookTerms {
    WebhookTerms {
        url: "https://hooks.example/x".into(),
        event_types: vec![EventType::Audit, EventType::Status],
        object_types: vec![ObjectType::Instance],
        message_prefix: Some("é".repeat(128)),
        enabled: true,
    }
}

/// Adds the namespace `ns` and a webhook; `None` if the name is in use.
pub(crate) async fn add_webhook(store: &Store, name: &str, terms: &WebhookTerms) -> Option<WebhookId> {
    let id = WebhookId::new();
    transaction!(store, |tx| {
        if namespaces::get(&mut *tx, "ns").await?.is_none() {
            namespaces::insert(tx, "ns").await?;
        }
        match webhooks::insert(tx, &NewWebhook { id, namespace: "ns", name, terms, secret: "sealed" }).await {
            Ok(()) => Ok(Some(id)),
            Err(StoreError::Duplicate(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    })
    .unwrap()
}

on_both_engines! {
    async fn stores_all_terms_and_names_are_unique(store: Arc<Store>) {
        let id = add_webhook(&store, "b", &terms()).await.unwrap();
        assert!(add_webhook(&store, "b", &terms()).await.is_none());
        let first = add_webhook(&store, "a", &terms()).await.unwrap();
        let (row, pending) = webhooks::by_name(&*store, "ns", "b").await.unwrap().unwrap();
        assert_eq!((row.id, &row.url, pending), (id, &terms().url, 0));
        assert_eq!((row.event_types, row.object_types), (terms().event_types, terms().object_types));
        assert_eq!(row.message_prefix, terms().message_prefix);
        assert!(webhooks::by_name(&*store, "other", "b").await.unwrap().is_none());
        let ids: Vec<WebhookId> =
            webhooks::list(&*store, "ns").await.unwrap().into_iter().map(|(row, _)| row.id).collect();
        assert_eq!(ids, [first, id]);
        assert_eq!(quotas::used(&*store, "ns", &[muster_types::quota::QuotaName::Webhooks]).await.unwrap(), [2]);
        transaction!(store, |tx| { Ok(webhooks::remove_of_namespace(tx, "ns").await?) }).unwrap();
        assert!(webhooks::list(&*store, "ns").await.unwrap().is_empty());
    }

    async fn webhook_that_stays_enabled_keeps_its_start(store: Arc<Store>) {
        let id = add_webhook(&store, "a", &terms()).await.unwrap();
        let since = webhooks::enabled(&*store).await.unwrap()[0].enabled_since.unwrap();
        let update = async |terms: &WebhookTerms| {
            assert!(transaction!(store, |tx| { Ok(webhooks::update(tx, id, terms).await?) }).unwrap());
            webhooks::enabled_by_id(&*store, id).await.unwrap().map(|row| row.enabled_since.unwrap())
        };
        assert_eq!(update(&WebhookTerms { message_prefix: None, ..terms() }).await, Some(since));
        assert_eq!(update(&WebhookTerms { enabled: false, ..terms() }).await, None);
        assert!(webhooks::enabled(&*store).await.unwrap().is_empty());
        assert!(update(&terms()).await.unwrap() > since);
    }

    async fn webhooks_of_deleted_namespaces_are_not_enabled(store: Arc<Store>) {
        let id = add_webhook(&store, "a", &terms()).await.unwrap();
        assert!(webhooks::deleted_namespaces(&*store).await.unwrap().is_empty());
        transaction!(store, |tx| {
            Ok(tx.execute("UPDATE namespaces SET state = 'deleted' WHERE name = 'ns'", &[]).await?)
        }).unwrap();
        assert!(webhooks::enabled(&*store).await.unwrap().is_empty());
        assert!(webhooks::enabled_by_id(&*store, id).await.unwrap().is_none());
        assert_eq!(webhooks::deleted_namespaces(&*store).await.unwrap(), ["ns"]);
    }

    async fn previous_secret_is_kept_only_with_an_overlap(store: Arc<Store>) {
        add_webhook(&store, "a", &terms()).await.unwrap();
        let get = async || webhooks::by_name(&*store, "ns", "a").await.unwrap().unwrap().0;
        let old = get().await;
        let rotate = async |secret: &str, overlap| {
            transaction!(store, |tx| { Ok(webhooks::rotate_secret(tx, &old, secret, overlap).await?) }).unwrap()
        };
        assert!(rotate("second", 60).await);
        let row = get().await;
        assert_eq!((&*row.secret, row.previous_secret.as_deref()), ("second", Some("sealed")));
        let left = row.previous_secret_expires.unwrap() - database_time(&*store).await.unwrap();
        assert!((1.0..=60.0).contains(&left), "{left}");
        assert!(!rotate("third", 60).await, "the secret has changed");
        assert!(transaction!(store, |tx| { Ok(webhooks::rotate_secret(tx, &row, "fourth", 0).await?) }).unwrap());
        let row = get().await;
        assert_eq!((&*row.secret, row.previous_secret, row.previous_secret_expires), ("fourth", None, None));
    }

    async fn an_event_about_dropped_deliveries_is_due_once_per_interval(store: Arc<Store>) {
        let id = add_webhook(&store, "a", &terms()).await.unwrap();
        for (time, is_due) in [(1000.0, true), (1059.0, false), (1061.0, true)] {
            let due = transaction!(store, |tx| { Ok(webhooks::count_dropped(tx, id, 2, time, 60.0).await?) });
            assert_eq!(due.unwrap(), is_due, "{time}");
        }
        assert_eq!(webhooks::enabled(&*store).await.unwrap()[0].dropped, 6);
    }
}
