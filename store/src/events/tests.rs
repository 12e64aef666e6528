use std::sync::Arc;

use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use serde_json::{Map, json};

use crate::testing::{event, on_both_engines};
use crate::*;

on_both_engines! {
    async fn inserting_events_again_has_no_effect(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::namespace("b"));
        let mut events: Vec<Event> = (0..237).map(|n| event(&a, EventType::Audit, &format!("{n}"), 237.0 - f64::from(n))).collect();
        events[236] = events[236].clone().with_object(b.clone());
        events[5].event_type = EventType::Status;
        events[5].duration = Some(1.5);
        events[5].request_id = Some("r".into());
        events::insert(&store, &events).await.unwrap();
        events::insert(&store, &events).await.unwrap();
        let listed = events::list(&*store, &a, None, 1000).await.unwrap();
        assert_eq!(listed.len(), 237);
        assert_eq!(listed.iter().take(2).map(|e| e.message.as_str()).collect::<Vec<_>>(), ["236", "235"], "newest first");
        assert_eq!(listed[0].extra, Map::from_iter([("a".to_owned(), json!("ü"))]));
        let status = events::list(&*store, &a, Some(EventType::Status), 10).await.unwrap();
        assert_eq!(status.len(), 1);
        assert_eq!((status[0].duration, status[0].request_id.as_deref(), status[0].fqdn.as_str()), (Some(1.5), Some("r"), "node"));
        assert_eq!(events::list(&*store, &b, None, 10).await.unwrap().len(), 1);
        assert_eq!(events::list(&*store, &a, None, 3).await.unwrap().len(), 3);
        assert!(store.estimate_rows("events").await.unwrap() >= 0);
        let own = async |name: &str| {
            let page = events::EventPage { namespace: Some(name), event_type: None, after: None, limit: 10 };
            events::page(&*store, &b, &page).await.unwrap().len()
        };
        let mut before = event(&b, EventType::Audit, "of a former namespace", 1000.0);
        let mut after = event(&b, EventType::Audit, "own", -1000.0);
        (before.namespace, after.namespace) = (Some("ns".into()), Some("ns".into()));
        events::insert(&store, &[before, after]).await.unwrap();
        assert_eq!(own("ns").await, 0, "the namespace does not exist");
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "ns").await?) }).unwrap();
        assert_eq!((own("ns").await, own("other").await), (1, 0));
    }

    async fn removes_oldest_events_with_their_size(store: Arc<Store>) {
        let (a, request) = (ObjectRef::namespace("a"), ObjectRef::new(ObjectType::ApiRequest, "r"));
        let shared = event(&a, EventType::Audit, "shared", 1000.0).with_object(request.clone());
        let all = [
            shared,
            event(&request, EventType::Audit, &"x".repeat(1000), 1000.0),
            event(&request, EventType::Audit, "new", 1.0),
            event(&a, EventType::Status, "status", 1000.0),
        ];
        events::insert(&store, &all).await.unwrap();
        let size = async || {
            let first = events::size_of_page(&*store, "", 3).await.unwrap();
            assert!(first.is_full);
            let second = events::size_of_page(&*store, &first.last.unwrap(), 3).await.unwrap();
            assert!(!second.is_full);
            first.bytes + second.bytes
        };
        let before = size().await;
        assert!(before > 3000, "{before}");
        let old = now() - 500.0;
        let removed = transaction!(store, |tx| { Ok(events::remove_requests(tx, "", old, 10).await?) }).unwrap();
        assert_eq!((removed.links, removed.last.as_deref()), (2, Some("r")), "of the shared event only the link");
        assert!((1500..1600).contains(&removed.bytes), "{}", removed.bytes);
        let rest = events::size_of_page(&*store, "", 100).await.unwrap();
        assert_eq!(rest.bytes, before - removed.bytes);
        let removed =
            transaction!(store, |tx| { Ok(events::remove_older(tx, EventType::Status, old, 10).await?) }).unwrap();
        assert_eq!(removed.links, 1);
        assert_eq!(events::list(&*store, &a, None, 10).await.unwrap().len(), 1);
        assert_eq!(events::list(&*store, &request, None, 10).await.unwrap().len(), 1);
    }

    async fn size_counts_bytes_and_large_batches_are_removed(store: Arc<Store>) {
        let request = ObjectRef::new(ObjectType::ApiRequest, "r");
        let ascii = events::size_of_page(&*store, "", 1000).await.unwrap().bytes;
        let all: Vec<Event> = (0..250).map(|_| event(&request, EventType::Audit, "äöü", 1000.0)).collect();
        events::insert(&store, &all).await.unwrap();
        let bytes = events::size_of_page(&*store, "", 1000).await.unwrap().bytes - ascii;
        let extra = "{\"a\":\"ü\"}".len() + "äöü".len();
        assert_eq!(bytes, 250 * (i64::try_from(extra).unwrap() + 500), "on both engines");
        let old = now() - 500.0;
        let removed = transaction!(store, |tx| { Ok(events::remove_requests(tx, "", old, 500).await?) }).unwrap();
        assert_eq!((removed.links, removed.bytes), (250, bytes));
        assert_eq!(events::list(&*store, &request, None, 10).await.unwrap(), []);
    }

    async fn prunes_links_by_age_and_events_without_links(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::namespace("b"));
        let request = ObjectRef::new(ObjectType::ApiRequest, "r");
        let shared = event(&a, EventType::Audit, "shared", 1000.0).with_object(b.clone());
        let mut all = vec![
            shared.clone(),
            event(&a, EventType::Audit, "old", 1000.0),
            event(&a, EventType::Status, "old status", 1000.0),
            event(&a, EventType::Audit, "new", 1.0),
            event(&request, EventType::Audit, "request", 1000.0),
        ];
        all.extend((0..30).map(|n| event(&a, EventType::Usage, &n.to_string(), 1000.0)));
        events::insert(&store, &all).await.unwrap();
        let before = now() - 500.0;
        let prune = async |kind| transaction!(store, |tx| { Ok(events::prune_links(tx, kind, before, 20).await?) }).unwrap();
        assert_eq!((prune(EventType::Usage).await, prune(EventType::Usage).await), (20, 10), "in batches");
        let removed = transaction!(store, |tx| { Ok(events::prune_request_links(tx, "", before, 20).await?) }).unwrap();
        assert_eq!(removed, (1, Some("r".into())));
        let removed = transaction!(store, |tx| { Ok(events::prune_object_links(tx, &a, 20).await?) }).unwrap();
        assert_eq!(removed, 4);
        let mut cursor = String::new();
        let mut orphans = 0;
        loop {
            let (removed, next) = transaction!(store, |tx| {
                Ok(events::prune_orphans(tx, &cursor, 10).await?)
            }).unwrap();
            orphans += removed;
            match next { Some(event) => cursor = event, None => break }
        }
        // All except the event that the other object is linked to.
        assert_eq!(orphans, 34);
        assert_eq!(events::list(&*store, &b, None, 10).await.unwrap()[0].message, "shared");
    }
}
