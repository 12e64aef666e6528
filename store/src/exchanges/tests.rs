use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use muster_types::Error;
use muster_types::ids::RuleId;
use muster_types::time::now;

use crate::testing::{issuer_terms, on_both_engines, rule_terms};
use crate::*;

async fn count(store: &Store, source: &str, minute: i64) -> i64 {
    transaction!(store, |tx| { Ok(exchanges::count_attempt(tx, source, minute).await?) }).unwrap()
}

async fn consume(store: &Store, rule: RuleId, issuer: &str, token: &str, expires: f64) -> bool {
    transaction!(store, |tx| { Ok(exchanges::consume_token(tx, rule, issuer, token, expires).await?) })
        .unwrap()
}

async fn rows(store: &Store, table: &str) -> i64 {
    let sql = format!("SELECT COUNT(*) FROM {table}");
    store.query_one(&sql, &[]).await.unwrap().unwrap().scalar().unwrap()
}

on_both_engines! {
    async fn attempts_of_a_source_and_minute_have_unique_numbers(store: Arc<Store>) {
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

    async fn one_of_many_consumes_a_token(store: Arc<Store>) {
        let rule = RuleId::new();
        let mut tasks = Vec::new();
        for _ in 0..50 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move { consume(&store, rule, "https://forge", "t", now()).await }));
        }
        let mut consumed = 0;
        for task in tasks {
            consumed += i32::from(task.await.unwrap());
        }
        assert_eq!((consumed, rows(&store, "exchanged_tokens").await), (1, 1));
    }

    async fn each_rule_consumes_a_token_of_an_issuer_once(store: Arc<Store>) {
        let (one, other) = (RuleId::new(), RuleId::new());
        let long = "é".repeat(2000);
        for token in ["t", "T", "t ", "", long.as_str()] {
            assert!(consume(&store, one, "https://forge", token, 1e300).await, "{token}");
            assert!(!consume(&store, one, "https://forge", token, 2.0).await, "{token}");
            assert!(consume(&store, other, "https://forge", token, 1.0).await, "{token}");
            assert!(consume(&store, one, "https://forge/", token, 1.0).await, "{token}");
        }
    }

    async fn failed_transaction_does_not_consume_the_token(store: Arc<Store>) {
        let rule = RuleId::new();
        let failed: Result<(), Error> = transaction!(store, |tx| {
            assert!(exchanges::consume_token(tx, rule, "https://forge", "t", 1.0).await?);
            Err(Error::Conflict("no".into()).into())
        });
        assert!(failed.is_err());
        assert!(consume(&store, rule, "https://forge", "t", 1.0).await);
    }

    async fn removes_only_expired_rows(store: Arc<Store>) {
        let (rule, time) = (RuleId::new(), now());
        for n in 0..5 {
            assert!(consume(&store, rule, "https://forge", &format!("old {n}"), time - 10.0).await);
            count(&store, &format!("192.0.2.{n}"), 7).await;
        }
        assert!(consume(&store, rule, "https://forge", "new", time + 10.0).await);
        count(&store, "192.0.2.1", 8).await;
        for (limit, removed) in [(3, 3), (3, 2), (3, 0)] {
            let tokens = transaction!(store, |tx| { Ok(exchanges::remove_tokens(tx, time, limit).await?) });
            let attempts = transaction!(store, |tx| { Ok(exchanges::remove_attempts(tx, 8, limit).await?) });
            assert_eq!((tokens.unwrap(), attempts.unwrap()), (removed, removed));
        }
        assert!(!consume(&store, rule, "https://forge", "new", time).await);
        assert!(consume(&store, rule, "https://forge", "old 1", time).await);
        assert_eq!(exchanges::attempts(&*store, "192.0.2.1", 8).await.unwrap(), 1);
        assert_eq!(rows(&store, "exchange_attempts").await, 1);
    }

    async fn deletion_of_rule_or_issuer_waits_for_locks(store: Arc<Store>) {
        let (rule_terms, issuer_terms) = (rule_terms(), issuer_terms("https://forge"));
        let rule = transaction!(store, |tx| { Ok(rules::insert(tx, "ns", "deploy", &rule_terms).await?) });
        let issuer = transaction!(store, |tx| { Ok(issuers::insert(tx, "forge", &issuer_terms).await?) });
        let (rule, issuer) = (rule.unwrap().id, issuer.unwrap().id);
        let mut exchange = store.begin().await.unwrap();
        assert!(rules::lock(&mut exchange, rule).await.unwrap());
        assert!(issuers::lock(&mut exchange, issuer).await.unwrap());
        let deleting = [true, false].map(|of_rule| {
            let store = Arc::clone(&store);
            // Returns the number of tokens that were consumed before.
            tokio::spawn(async move {
                transaction!(store, |tx| {
                    let deleted = if of_rule {
                        rules::soft_delete(tx, rule).await?
                    } else {
                        issuers::soft_delete(tx, issuer).await?
                    };
                    assert!(deleted);
                    Ok(tx.fetch_one::<i64>("SELECT COUNT(*) FROM exchanged_tokens", &[]).await?)
                })
                .unwrap()
            })
        });
        // Long enough for both tasks to finish if they did not wait.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(deleting.iter().all(|task| !task.is_finished()));
        assert!(exchanges::consume_token(&mut exchange, rule, "https://forge", "t", 1.0).await.unwrap());
        exchange.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
        for task in deleting {
            assert_eq!(task.await.unwrap(), 1);
        }
    }
}
