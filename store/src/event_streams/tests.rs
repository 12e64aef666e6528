use std::sync::Arc;

use muster_types::event::EventType;
use muster_types::object::{ObjectRef, ObjectType};

use crate::event_streams::EventPosition;
use crate::testing::on_both_engines;
use crate::testing::{event, operation};
use crate::*;

/// Returns the messages of all events after a position, and the last position.
async fn read(store: &Store, mut position: EventPosition) -> (Vec<String>, EventPosition) {
    let mut messages = Vec::new();
    loop {
        let page = event_streams::page(store, &position, 3).await.unwrap();
        let Some(last) = page.last() else { return (messages, position) };
        position = last.clone();
        let ids: Vec<&str> = page.iter().map(|event| event.event_uuid.as_str()).collect();
        let mut events = event_streams::with_objects(store, &ids).await.unwrap();
        events.sort_by_key(|event| ids.iter().position(|id| *id == event.event.event_uuid));
        messages
            .extend(events.into_iter().map(|event| format!("{} {}", event.event.message, event.object.id)));
    }
}

on_both_engines! {
    async fn pages_follow_the_order_in_which_events_were_stored(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::namespace("b"));
        let start = EventPosition { stored: database_time(&*store).await.unwrap() - 1.0, event_uuid: String::new() };
        let request = ObjectRef::new(ObjectType::ApiRequest, "r");
        let events: Vec<_> = (0..10).map(|n| event(&a, EventType::Audit, &n.to_string(), 0.0)).collect();
        events::insert(&store, &events).await.unwrap();
        let (messages, position) = read(&store, start).await;
        assert_eq!(messages, (0..10).map(|n| format!("{n} a")).collect::<Vec<_>>());
        assert_eq!(read(&store, position.clone()).await.0, Vec::<String>::new());
        // It happened long ago, but another daemon stores it now.
        let late = event(&a, EventType::Audit, "late", 1000.0).with_object(b.clone()).with_object(request);
        events::insert(&store, &[late]).await.unwrap();
        let (mut messages, _) = read(&store, position).await;
        messages.sort_unstable();
        assert_eq!(messages, ["late a", "late b"], "without its request");
    }

    async fn finds_owners_and_unfinished_operations(store: Arc<Store>) {
        let new = operation("red", vec![]);
        let handle = transaction!(store, |tx| { Ok(operations::insert(tx, &new).await?) }).unwrap();
        let object = ObjectRef::new(ObjectType::ClusterOperation, handle.op_uuid);
        let absent = ObjectRef::new(ObjectType::Instance, "absent");
        let owners = event_streams::owners(&*store, &[&object, &absent, &ObjectRef::namespace("red")]).await.unwrap();
        assert_eq!(owners.into_iter().collect::<Vec<_>>(), [(object.clone(), "red".to_owned())]);
        let queued = event_streams::unfinished_work(&*store).await.unwrap();
        assert_eq!((queued.len(), &queued[0].operation, &queued[0].target), (1, &object, &ObjectRef::namespace("red")));
        assert_eq!(queued[0].namespace.as_deref(), Some("red"));
        let row = operations::get(&*store, handle.op_uuid).await.unwrap().unwrap();
        let leased = operations::lease(&store, &row, 60.0).await.unwrap().unwrap();
        let executing = event_streams::unfinished_work(&*store).await.unwrap();
        assert_ne!(executing, queued);
        let complete = muster_types::operation::OperationState::Complete;
        transaction!(store, |tx| { Ok(operations::release(tx, &leased, complete, 0.0, None).await?) }).unwrap();
        assert_eq!(event_streams::unfinished_work(&*store).await.unwrap(), []);
    }
}
