use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;

use muster_types::Error;
use muster_types::namespace::NamespaceState;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn rolls_back_failed_and_dropped_transactions(store: Arc<Store>) {
        let refused: Result<(), Error> = transaction!(store, |tx| {
            namespaces::insert(tx, "rejected").await?;
            Err(Error::Conflict("no".into()).into())
        });
        assert!(matches!(refused, Err(Error::Conflict(_))));
        assert!(namespaces::get(&*store, "rejected").await.unwrap().is_none());
        // A dropped transaction is rolled back too, and does not block the next one.
        let mut tx = store.begin().await.unwrap();
        namespaces::insert(&mut tx, "dropped").await.unwrap();
        drop(tx);
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "kept").await?) }).unwrap();
        assert!(namespaces::get(&*store, "dropped").await.unwrap().is_none());
        assert!(namespaces::get(&*store, "kept").await.unwrap().is_some());
    }

    async fn commits_the_first_transaction_of_a_change_only_if_its_caller_waits(store: Arc<Store>) {
        let insert = async |name: &str| {
            transaction!(store, |tx| { Ok(namespaces::insert(tx, name).await?) })
        };
        let gave_up = || Err(Error::Unavailable("gave up".into()));
        let refused = run_change(gave_up, insert("late")).await;
        assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
        assert!(namespaces::get(&*store, "late").await.unwrap().is_none());
        // Something was committed, so the rest of the change is, too.
        let waits = Arc::new(AtomicBool::new(true));
        let waiting = Arc::clone(&waits);
        let require = move || if waiting.load(Ordering::Relaxed) { Ok(()) } else { gave_up() };
        run_change(require, async {
            insert("first").await.unwrap();
            waits.store(false, Ordering::Relaxed);
            insert("second").await.unwrap();
        })
        .await;
        assert!(namespaces::get(&*store, "second").await.unwrap().is_some());
    }

    async fn change_is_committed_only_if_its_precondition_is_met(store: Arc<Store>) {
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "red").await?) }).unwrap();
        let row = ObjectRow { table: "namespaces", key_column: "name", key: "red".into() };
        let checks = Arc::new(AtomicUsize::new(0));
        let counted = |is_met: bool| {
            let (row, checks, store) = (row.clone(), Arc::clone(&checks), Arc::clone(&store));
            require_precondition(Precondition::new(Some(row), move || {
                let (checks, store) = (Arc::clone(&checks), Arc::clone(&store));
                async move {
                    checks.fetch_add(1, Ordering::Relaxed);
                    let changed = namespaces::get(&*store, "new").await?;
                    assert!(changed.is_none(), "what the transaction changes is not visible");
                    if is_met { Ok(()) } else { Err(Error::PreconditionFailed("changed".into())) }
                }
            }));
        };
        let insert = async |name: &str| {
            transaction!(store, |tx| {
                namespaces::lock(tx, "red", NamespaceState::Created).await?;
                Ok(namespaces::insert(tx, name).await?)
            })
        };
        let refused = run_change(|| Ok(()), async {
            counted(false);
            transaction!(store, |tx| { Ok(tx.query("SELECT name FROM namespaces", &[]).await?) }).unwrap();
            insert("new").await
        })
        .await;
        assert!(matches!(refused, Err(Error::PreconditionFailed(_))), "{refused:?}");
        assert!(namespaces::get(&*store, "new").await.unwrap().is_none());
        assert_eq!(checks.swap(0, Ordering::Relaxed), 1, "a transaction that writes nothing needs no check");
        run_change(|| Ok(()), async {
            counted(true);
            insert("new").await.unwrap();
            insert("other").await.unwrap();
        })
        .await;
        assert_eq!(checks.load(Ordering::Relaxed), 1, "only the first one that writes is checked");
        assert!(namespaces::get(&*store, "other").await.unwrap().is_some());
    }

    async fn only_transactions_with_a_precondition_wait_for_each_other(store: Arc<Store>) {
        let all = u32::try_from(crate::store::MAX_CONDITIONAL_TRANSACTIONS).unwrap();
        let permits = Arc::clone(&store.conditional).acquire_many_owned(all).await.unwrap();
        run_change(|| Ok(()), async {
            require_precondition(Precondition::new(None, || async { Ok(()) }));
            let mut waiting = pin!(store.begin());
            let polled = poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending()));
            assert!(polled.await, "the others use all connections that are for preconditions");
            let insert = async { transaction!(store, |tx| { Ok(namespaces::insert(tx, "beside").await?) }) };
            beside_change(insert).await.unwrap();
            drop(permits);
            drop(waiting.await.unwrap());
        })
        .await;
        let all = usize::try_from(all).unwrap();
        assert_eq!(store.conditional.available_permits(), all, "a transaction returns its permit");
    }

    async fn concurrent_transactions_lose_no_updates(store: Arc<Store>) {
        transaction!(store, |tx| { Ok(cluster_values::set(tx, "counter", "0").await?) }).unwrap();
        let mut tasks = Vec::new();
        for _ in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                let mut done = 0;
                while done < 25 {
                    let committed = transaction!(store, |tx| {
                        let sql = "SELECT value, version FROM cluster_values WHERE name = 'counter'";
                        let (value, version) = tx.fetch_one::<(String, i64)>(sql, &[]).await?;
                        let value: i64 = value.parse().unwrap();
                        let updated = tx.execute(
                            "UPDATE cluster_values SET value = ?, version = version + 1 WHERE name = 'counter' AND version = ?",
                            params![(value + 1).to_string(), version],
                        ).await?;
                        if updated == 1 { Ok(()) } else { Err(StoreError::Conflict("changed".into()).into()) }
                    });
                    match committed {
                        Ok(()) => done += 1,
                        // On a busy host the others may win every attempt.
                        Err(Error::Contended) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(cluster_values::get(&*store, "counter").await.unwrap().as_deref(), Some("200"));
    }
}
