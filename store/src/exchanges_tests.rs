//! Rows of exchanges, on both engines.

use std::collections::BTreeSet;
use std::sync::Arc;

use muster_types::ids::RuleId;
use muster_types::time::now;

use super::keys::{NewKey, StoredSecret};
use super::tests::on_both_engines;
use super::*;

async fn count(store: &Store, source: &str, minute: i64) -> i64 {
    transaction!(store, |tx| { Ok(exchanges::count_attempt(tx, source, minute).await?) }).unwrap()
}

async fn take(store: &Store, rule: RuleId, issuer: &str, token: &str, expires: f64) -> bool {
    transaction!(store, |tx| { Ok(exchanges::take_token(tx, rule, issuer, token, expires).await?) }).unwrap()
}

async fn rows(store: &Store, table: &str) -> i64 {
    let sql = format!("SELECT COUNT(*) FROM {table}");
    store.query_one(&sql, &[]).await.unwrap().unwrap().get(0).unwrap()
}

on_both_engines! {
    async fn every_attempt_of_a_source_in_a_minute_has_a_number_of_its_own(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for _ in 0..20 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                let mut numbers = Vec::new();
                for _ in 0..5 {
                    numbers.push(count(&store, "192.0.2.1", 7).await);
                }
                numbers
            }));
        }
        let mut numbers = BTreeSet::new();
        for task in tasks {
            numbers.extend(task.await.unwrap());
        }
        assert_eq!(numbers, (1..=100).collect());
        assert_eq!(exchanges::attempts(&*store, "192.0.2.1", 7).await.unwrap(), 100);
        assert_eq!(exchanges::attempts(&*store, "192.0.2.1", 8).await.unwrap(), 0);
        assert_eq!(count(&store, "192.0.2.1", 8).await, 1, "another minute");
        assert_eq!(count(&store, "2001:db8::1", 7).await, 1, "another source");
    }

    async fn of_many_who_take_the_same_token_one_does(store: Arc<Store>) {
        let rule = RuleId::new();
        let mut tasks = Vec::new();
        for _ in 0..50 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move { take(&store, rule, "https://forge", "t", now()).await }));
        }
        let mut taken = 0;
        for task in tasks {
            taken += i32::from(task.await.unwrap());
        }
        assert_eq!((taken, rows(&store, "exchanged_tokens").await), (1, 1));
    }

    async fn a_token_is_taken_once_by_each_rule_and_means_its_issuer(store: Arc<Store>) {
        let (one, other) = (RuleId::new(), RuleId::new());
        let long = "é".repeat(2000);
        for token in ["t", "T", "t ", "", long.as_str()] {
            assert!(take(&store, one, "https://forge", token, 1e300).await, "{token}");
            assert!(!take(&store, one, "https://forge", token, 2.0).await, "{token}");
            assert!(take(&store, other, "https://forge", token, 1.0).await, "{token}");
            assert!(take(&store, one, "https://forge/", token, 1.0).await, "{token}");
        }
    }

    async fn a_token_is_not_taken_by_a_transaction_that_fails(store: Arc<Store>) {
        let rule = RuleId::new();
        let failed: Result<(), Error> = transaction!(store, |tx| {
            assert!(exchanges::take_token(tx, rule, "https://forge", "t", 1.0).await?);
            Err(Error::Conflict("no".into()).into())
        });
        assert!(failed.is_err());
        assert!(take(&store, rule, "https://forge", "t", 1.0).await);
    }

    async fn what_is_over_is_forgotten_and_the_rest_is_not(store: Arc<Store>) {
        let (rule, time) = (RuleId::new(), now());
        for n in 0..5 {
            assert!(take(&store, rule, "https://forge", &format!("old {n}"), time - 10.0).await);
            count(&store, &format!("192.0.2.{n}"), 7).await;
        }
        assert!(take(&store, rule, "https://forge", "new", time + 10.0).await);
        count(&store, "192.0.2.1", 8).await;
        for (limit, gone) in [(3, 3), (3, 2), (3, 0)] {
            let tokens = transaction!(store, |tx| { Ok(exchanges::remove_tokens(tx, time, limit).await?) });
            let attempts = transaction!(store, |tx| { Ok(exchanges::remove_attempts(tx, 8, limit).await?) });
            assert_eq!((tokens.unwrap(), attempts.unwrap()), (gone, gone));
        }
        assert!(!take(&store, rule, "https://forge", "new", time).await);
        assert!(take(&store, rule, "https://forge", "old 1", time).await);
        assert_eq!(exchanges::attempts(&*store, "192.0.2.1", 8).await.unwrap(), 1);
        assert_eq!(rows(&store, "exchange_attempts").await, 1);
    }

    async fn a_key_is_inserted_only_under_a_name_of_its_own_and_says_where_it_is_from(store: Arc<Store>) {
        let secret = StoredSecret { tag: 1, hash: "hash".into(), nonce: "nonce".into() };
        let provenance = Some(serde_json::json!({"source": "federated", "sub": "répo"}));
        let new = NewKey { secret, expiry: Some(now() + 60.0), scopes: Some(vec!["blob.read".into()]), provenance };
        let stored = async || {
            let row = store.query_one("SELECT provenance FROM namespace_keys", &[]).await.unwrap().unwrap();
            row.json_opt::<serde_json::Value>(0).unwrap()
        };
        transaction!(store, |tx| { Ok(keys::insert(tx, "ns", "ci-1", &new).await?) }).unwrap();
        assert_eq!(stored().await, new.provenance);
        for _ in 0..2 {
            let again = transaction!(store, |tx| {
                // The transaction goes on after a name that is taken.
                let taken = matches!(keys::insert(tx, "ns", "ci-1", &new).await, Err(StoreError::Duplicate(_)));
                Ok((taken, keys::soft_delete(tx, "ns", "ci-1").await?))
            });
            assert!(again.unwrap().0, "also one that is deleted");
        }
        let mut plain = new.clone();
        plain.provenance = None;
        transaction!(store, |tx| { Ok(keys::put(tx, "ns", "ci-1", &plain).await?) }).unwrap();
        assert_eq!(stored().await, None, "a key that is replaced is from whoever replaced it");
    }

    async fn whoever_deletes_a_rule_or_an_issuer_waits_for_those_who_rely_on_it(store: Arc<Store>) {
        let (rule_terms, issuer_terms) = (federation_tests::rule_terms(), federation_tests::terms("https://forge"));
        let rule = transaction!(store, |tx| { Ok(rules::insert(tx, "ns", "deploy", &rule_terms).await?) });
        let issuer = transaction!(store, |tx| { Ok(issuers::insert(tx, "forge", &issuer_terms).await?) });
        let (rule, issuer) = (rule.unwrap().id, issuer.unwrap().id);
        let mut relying = store.begin().await.unwrap();
        assert!(rules::hold(&mut relying, rule).await.unwrap());
        assert!(issuers::hold(&mut relying, issuer).await.unwrap());
        let deleting = [true, false].map(|of_rule| {
            let store = Arc::clone(&store);
            // Says how many tokens were taken before.
            tokio::spawn(async move {
                transaction!(store, |tx| {
                    let gone = if of_rule {
                        rules::soft_delete(tx, rule).await?
                    } else {
                        issuers::soft_delete(tx, issuer).await?
                    };
                    assert!(gone);
                    let row = tx.query_one("SELECT COUNT(*) FROM exchanged_tokens", &[]).await?;
                    Ok(row.expect("a count").get::<i64>(0)?)
                })
                .unwrap()
            })
        });
        // Long enough for them to be there, and to be wrong if they did not wait.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(deleting.iter().all(|task| !task.is_finished()));
        assert!(exchanges::take_token(&mut relying, rule, "https://forge", "t", 1.0).await.unwrap());
        relying.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
        for task in deleting {
            assert_eq!(task.await.unwrap(), 1);
        }
    }

    async fn a_damaged_rule_is_found_and_a_deleted_one_cannot_be_held(store: Arc<Store>) {
        let terms = federation_tests::rule_terms();
        let row = transaction!(store, |tx| { Ok(rules::insert(tx, "ns", "deploy", &terms).await?) }).unwrap();
        let found = rules::find(&*store, "ns", "deploy").await.unwrap().unwrap();
        assert_eq!((found.id, found.row), (row.id, Some(row.clone())));
        assert!(rules::find(&*store, "ns", "Deploy").await.unwrap().is_none());
        for damage in ["bound_claims = 'x'", "bound_claims = '{\"a\": 7}'", "scopes = '{}'", "scopes = ''"] {
            transaction!(store, |tx| {
                let (claims, scopes) = (r#"{"sub": "x"}"#, "[]");
                tx.execute("UPDATE rules SET bound_claims = ?, scopes = ?", params![claims, scopes]).await?;
                Ok(tx.execute(&format!("UPDATE rules SET {damage}"), &[]).await?)
            }).unwrap();
            let found = rules::find(&*store, "ns", "deploy").await.unwrap().unwrap();
            assert_eq!((found.id, found.row), (row.id, None), "{damage}");
        }
        let held = transaction!(store, |tx| {
            let before = rules::hold(tx, row.id).await?;
            rules::soft_delete(tx, row.id).await?;
            Ok((before, rules::hold(tx, row.id).await?))
        });
        assert_eq!(held.unwrap(), (true, false));
        assert!(rules::find(&*store, "ns", "deploy").await.unwrap().is_none());
    }
}
