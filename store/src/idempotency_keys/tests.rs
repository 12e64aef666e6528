use std::sync::Arc;

use muster_types::Error;
use muster_types::idempotency::IdempotencyState;

use crate::idempotency_keys::{IdempotencyLease, NewIdempotencyKey};
use crate::testing::on_both_engines;
use crate::*;

fn lease(owner: &str) -> IdempotencyLease {
    IdempotencyLease { hash: "h".into(), owner: owner.into() }
}

async fn insert(store: &Store, lease: &IdempotencyLease, seconds: f64, lifetime: f64) {
    let new =
        NewIdempotencyKey { namespace: "ci", request_hash: "r", request_id: "id", lease: seconds, lifetime };
    transaction!(store, |tx| { Ok(idempotency_keys::insert(tx, lease, &new).await?) }).unwrap();
}

async fn take_over(store: &Store, lease: &IdempotencyLease) -> bool {
    transaction!(store, |tx| { Ok(idempotency_keys::take_over(tx, lease, "other", 60.0).await?) }).unwrap()
}

async fn state(store: &Store) -> Option<IdempotencyState> {
    idempotency_keys::get(store, "h").await.unwrap().map(|row| row.state)
}

/// Creates a namespace as the request of a lease.
async fn change(store: &Store, lease: &IdempotencyLease, name: &str) -> Result<(), Error> {
    let insert = async { transaction!(store, |tx| { Ok(namespaces::insert(tx, name).await?) }) };
    run_keyed_change(|| Ok(()), Some(lease.clone()), insert).await
}

on_both_engines! {
    async fn records_the_first_change_in_its_transaction(store: Arc<Store>) {
        let first = lease("first");
        insert(&store, &first, 60.0, 60.0).await;
        let read = async { transaction!(store, |tx| { Ok(namespaces::get(tx, "a").await?) }) };
        run_keyed_change(|| Ok(()), Some(first.clone()), read).await.unwrap();
        assert_eq!(state(&store).await, Some(IdempotencyState::Running), "nothing was written");
        let failing = async {
            transaction!(store, |tx| {
                namespaces::insert(tx, "a").await?;
                Err::<(), _>(Error::Conflict("no".into()).into())
            })
        };
        run_keyed_change(|| Ok(()), Some(first.clone()), failing).await.unwrap_err();
        assert_eq!(state(&store).await, Some(IdempotencyState::Running), "it was rolled back");
        let both = async {
            beside_change(async { transaction!(store, |tx| { Ok(namespaces::insert(tx, "beside").await?) }) })
                .await
                .unwrap();
            assert_eq!(state(&store).await, Some(IdempotencyState::Running), "no part of the change");
            transaction!(store, |tx| { Ok(namespaces::insert(tx, "a").await?) }).unwrap();
            assert_eq!(state(&store).await, Some(IdempotencyState::Changed));
            transaction!(store, |tx| { Ok(namespaces::insert(tx, "b").await?) }).unwrap();
        };
        run_keyed_change(|| Ok(()), Some(first.clone()), both).await;
        assert!(!idempotency_keys::abandon(&store, &first).await.unwrap(), "it must not be executed again");
        assert!(!take_over(&store, &lease("second")).await);
        idempotency_keys::finish(&store, &first, "sealed").await.unwrap();
        let row = idempotency_keys::get(&*store, "h").await.unwrap().unwrap();
        assert_eq!((row.state, row.response.as_str()), (IdempotencyState::Finished, "sealed"));
    }

    async fn request_that_was_taken_over_changes_nothing(store: Arc<Store>) {
        let (first, second) = (lease("first"), lease("second"));
        insert(&store, &first, 60.0, 60.0).await;
        assert!(!take_over(&store, &second).await, "it is running");
        idempotency_keys::renew(&store, &first, -1.0).await.unwrap();
        assert!(take_over(&store, &second).await, "its lease has expired");
        assert!(matches!(change(&store, &first, "a").await, Err(Error::Unavailable(_))));
        assert!(namespaces::get(&*store, "a").await.unwrap().is_none());
        change(&store, &second, "a").await.unwrap();
        idempotency_keys::finish(&store, &first, "stale").await.unwrap();
        assert_eq!(state(&store).await, Some(IdempotencyState::Changed), "not the owner");
    }

    async fn failed_request_releases_its_key(store: Arc<Store>) {
        let first = lease("first");
        insert(&store, &first, 60.0, 60.0).await;
        assert!(!idempotency_keys::abandon(&store, &lease("other")).await.unwrap());
        assert!(idempotency_keys::abandon(&store, &first).await.unwrap());
        assert_eq!(state(&store).await, None);
        assert!(change(&store, &first, "late").await.is_err(), "a change that arrives later is not made");
    }

    async fn expired_keys_are_replaced_and_removed(store: Arc<Store>) {
        insert(&store, &lease("old"), 60.0, -1.0).await;
        assert_eq!(idempotency_keys::count(&*store, "ci").await.unwrap().0, 0);
        insert(&store, &lease("new"), 60.0, 60.0).await;
        let (count, first_expires) = idempotency_keys::count(&*store, "ci").await.unwrap();
        assert_eq!(count, 1);
        assert!((1.0..=60.0).contains(&first_expires), "{first_expires}");
        assert_eq!(idempotency_keys::count(&*store, "other").await.unwrap(), (0, 0.0));
        let expired = IdempotencyLease { hash: "x".into(), owner: "o".into() };
        insert(&store, &expired, 60.0, -1.0).await;
        for removed in [1, 0] {
            let count = transaction!(store, |tx| { Ok(idempotency_keys::remove_expired(tx, 10).await?) });
            assert_eq!(count.unwrap(), removed);
        }
        let count = transaction!(store, |tx| { Ok(idempotency_keys::remove_of_namespace(tx, "ci").await?) });
        assert_eq!(count.unwrap(), 1);
    }
}
