use std::sync::Arc;

use muster_types::rule::RuleState;
use muster_types::time::now;

use super::RuleRow;
use crate::testing::{on_both_engines, rule_terms};
use crate::*;

async fn add_rule(store: &Store, namespace: &str, name: &str) -> Option<RuleRow> {
    let terms = rule_terms();
    transaction!(store, |tx| {
        match rules::insert(tx, namespace, name, &terms).await {
            Ok(row) => Ok(Some(row)),
            Err(StoreError::Duplicate(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    })
    .unwrap()
}

on_both_engines! {
    async fn stores_all_terms(store: Arc<Store>) {
        let row = add_rule(&store, "ns", "deploy").await.unwrap();
        assert_eq!((row.state, &row.terms), (RuleState::Created, &rule_terms()));
        assert_eq!(rules::by_name(&*store, "ns", "deploy").await.unwrap(), Some(row.clone()));
        assert_eq!(rules::by_name(&*store, "other", "deploy").await.unwrap(), None);
        let mut new = rule_terms();
        new.issuer = "another".into();
        new.bound_claims.remove("sub");
        new.scopes = vec!["*".into()];
        new.key_ttl = 86_400;
        new.key_name_prefix = "é".repeat(64);
        assert!(transaction!(store, |tx| { Ok(rules::update(tx, row.id, &new).await?) }).unwrap());
        assert_eq!(rules::by_name(&*store, "ns", "deploy").await.unwrap().unwrap().terms, new);
    }

    async fn names_are_unique_among_live_rules_of_a_namespace(store: Arc<Store>) {
        let old = add_rule(&store, "ns", "b").await.unwrap();
        assert!(add_rule(&store, "ns", "b").await.is_none());
        let other = add_rule(&store, "other", "b").await.unwrap();
        assert!(transaction!(store, |tx| { Ok(rules::soft_delete(tx, old.id).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(rules::soft_delete(tx, old.id).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(rules::update(tx, old.id, &rule_terms()).await?) }).unwrap());
        let again = add_rule(&store, "ns", "b").await.unwrap();
        let first = add_rule(&store, "ns", "a").await.unwrap();
        assert_eq!(rules::list(&*store, "ns").await.unwrap(), [first, again]);
        assert_eq!(rules::deleted_before(&*store, now() + 1.0, 10).await.unwrap(), [old.id]);
        transaction!(store, |tx| { Ok(rules::soft_delete_of(tx, "ns").await?) }).unwrap();
        assert!(rules::list(&*store, "ns").await.unwrap().is_empty());
        for id in rules::of_namespace(&*store, "ns", 10).await.unwrap() {
            assert!(transaction!(store, |tx| { Ok(rules::remove_deleted(tx, id).await?) }).unwrap());
        }
        assert!(rules::of_namespace(&*store, "ns", 10).await.unwrap().is_empty());
        assert!(!transaction!(store, |tx| { Ok(rules::remove_deleted(tx, other.id).await?) }).unwrap());
        assert_eq!(rules::list(&*store, "other").await.unwrap(), [other]);
    }

    async fn concurrent_inserts_add_one_rule(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for _ in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move { add_rule(&store, "ns", "same").await.is_some() }));
        }
        let mut added = 0;
        for task in tasks {
            added += i32::from(task.await.unwrap());
        }
        assert_eq!((added, rules::list(&*store, "ns").await.unwrap().len()), (1, 1));
    }

    async fn finds_damaged_rules_and_does_not_lock_deleted_ones(store: Arc<Store>) {
        let terms = rule_terms();
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
        let locked = transaction!(store, |tx| {
            let before = rules::lock(tx, row.id).await?;
            rules::soft_delete(tx, row.id).await?;
            Ok((before, rules::lock(tx, row.id).await?))
        });
        assert_eq!(locked.unwrap(), (true, false));
        assert!(rules::find(&*store, "ns", "deploy").await.unwrap().is_none());
    }
}
