use std::sync::Arc;

use muster_types::session::TicketPurpose;
use muster_types::time::now;
use serde_json::json;

use crate::testing::on_both_engines;
use crate::tickets::TicketRow;
use crate::*;

fn row(purpose: TicketPurpose, expires: f64) -> TicketRow {
    let (namespace, key_name) = ("ci".to_owned(), "deploy".to_owned());
    TicketRow { purpose, namespace, key_name, document: json!({"nonce": "n"}), expires }
}

async fn insert(store: &Store, ticket: &str, row: &TicketRow) {
    transaction!(store, |tx| { Ok(tickets::insert(tx, ticket, row).await?) }).unwrap();
}

async fn take(store: &Store, ticket: &str, purpose: TicketPurpose) -> Option<TicketRow> {
    transaction!(store, |tx| { Ok(tickets::take(tx, ticket, purpose).await?) }).unwrap()
}

on_both_engines! {
    async fn one_of_many_takes_a_ticket(store: Arc<Store>) {
        let ticket = row(TicketPurpose::Login, now() + 60.0);
        insert(&store, "t", &ticket).await;
        assert_eq!(take(&store, "t", TicketPurpose::Console).await, None, "another purpose");
        assert_eq!(take(&store, "T", TicketPurpose::Login).await, None, "another ticket");
        let mut tasks = Vec::new();
        for _ in 0..20 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move { take(&store, "t", TicketPurpose::Login).await }));
        }
        let mut taken = Vec::new();
        for task in tasks {
            taken.extend(task.await.unwrap());
        }
        assert_eq!(taken, [ticket]);
    }

    async fn expired_tickets_are_not_taken_and_are_removed(store: Arc<Store>) {
        let time = now();
        for n in 0..3 {
            insert(&store, &format!("old {n}"), &row(TicketPurpose::Login, time - 1.0)).await;
        }
        insert(&store, "new", &row(TicketPurpose::Login, time + 60.0)).await;
        assert_eq!(take(&store, "old 0", TicketPurpose::Login).await, None);
        assert_eq!(tickets::count(&*store, "ci", "deploy").await.unwrap(), 1);
        assert_eq!(tickets::count(&*store, "ci", "other").await.unwrap(), 0);
        for (limit, removed) in [(1, 1), (5, 1), (5, 0)] {
            let count = transaction!(store, |tx| { Ok(tickets::remove_expired(tx, time, limit).await?) });
            assert_eq!(count.unwrap(), removed);
        }
        assert!(take(&store, "new", TicketPurpose::Login).await.is_some());
    }
}
