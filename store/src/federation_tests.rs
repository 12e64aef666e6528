//! Rows of issuers and rules, on both engines.

use std::collections::BTreeMap;
use std::sync::Arc;

use muster_types::issuer::{IssuerState, IssuerTerms};
use muster_types::rule::{Matcher, RuleState, RuleTerms};
use muster_types::time::now;

use super::issuers::IssuerRow;
use super::rules::RuleRow;
use super::tests::on_both_engines;
use super::*;

pub(super) fn terms(url: &str) -> IssuerTerms {
    IssuerTerms {
        issuer_url: url.into(),
        jwks_uri: "https://keys.example/ü".into(),
        audience: "cloud".into(),
    }
}

/// Adds an issuer as the rules do it: unless its name or URL is taken.
async fn add(store: &Store, name: &str, url: &str) -> Option<IssuerRow> {
    let terms = terms(url);
    transaction!(store, |tx| {
        if issuers::by_name(&mut *tx, name).await?.is_some()
            || issuers::by_url(&mut *tx, url).await?.is_some()
        {
            return Ok(None);
        }
        Ok(Some(issuers::insert(tx, name, &terms).await?))
    })
    .unwrap()
}

pub(super) fn rule_terms() -> RuleTerms {
    let bound_claims = BTreeMap::from([
        ("sub".to_owned(), Matcher::One("répo".into())),
        ("ref".to_owned(), Matcher::Any(vec!["main".into()])),
    ]);
    RuleTerms {
        issuer: "forge".into(),
        bound_claims,
        scopes: vec!["artifact.*".into(), "blob.read".into()],
        key_ttl: 600,
        key_name_prefix: "ci".into(),
    }
}

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
    async fn an_issuer_is_found_by_its_name_and_by_its_whole_url(store: Arc<Store>) {
        // Longer than a key of either engine, and different only at the end.
        let long = format!("https://{}", "é".repeat(1016));
        let (a, b) = (format!("{}a", &long[..long.len() - 2]), format!("{}b", &long[..long.len() - 2]));
        let first = add(&store, "first", &a).await.unwrap();
        let second = add(&store, "Second", &b).await.unwrap();
        assert_eq!(issuers::by_url(&*store, &a).await.unwrap(), Some(first.clone()));
        assert_eq!(issuers::by_url(&*store, &b).await.unwrap(), Some(second.clone()));
        assert_eq!(issuers::by_url(&*store, &format!("{a}/")).await.unwrap(), None);
        assert_eq!(issuers::by_name(&*store, "first").await.unwrap(), Some(first.clone()));
        assert_eq!(issuers::by_name(&*store, "second").await.unwrap(), None, "byte by byte");
        assert_eq!(issuers::list(&*store).await.unwrap(), [second, first]);
    }

    async fn a_deleted_issuer_gives_its_name_and_its_url_free(store: Arc<Store>) {
        let old = add(&store, "forge", "https://forge.example").await.unwrap();
        assert!(add(&store, "forge", "https://other.example").await.is_none());
        assert!(add(&store, "other", "https://forge.example").await.is_none());
        assert!(transaction!(store, |tx| { Ok(issuers::soft_delete(tx, old.id).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(issuers::soft_delete(tx, old.id).await?) }).unwrap());
        let new = terms("https://new.example");
        assert!(!transaction!(store, |tx| { Ok(issuers::update(tx, old.id, &new).await?) }).unwrap());
        let again = add(&store, "forge", "https://forge.example").await.unwrap();
        assert_ne!(again.id, old.id);
        let deleted = issuers::deleted_of_name(&*store, "forge").await.unwrap().unwrap();
        assert_eq!((deleted.id, deleted.state), (old.id, IssuerState::Deleted));
        assert!(issuers::deleted_before(&*store, now() - 60.0, 10).await.unwrap().is_empty());
        assert_eq!(issuers::deleted_before(&*store, now() + 1.0, 10).await.unwrap(), [old.id]);
        assert!(!transaction!(store, |tx| { Ok(issuers::remove_deleted(tx, again.id).await?) }).unwrap());
        assert!(transaction!(store, |tx| { Ok(issuers::remove_deleted(tx, old.id).await?) }).unwrap());
        assert!(issuers::deleted_of_name(&*store, "forge").await.unwrap().is_none());
    }

    async fn an_issuer_takes_another_url_with_it_when_it_is_changed(store: Arc<Store>) {
        let row = add(&store, "forge", "https://forge.example").await.unwrap();
        let new = terms("https://new.example");
        assert!(transaction!(store, |tx| { Ok(issuers::update(tx, row.id, &new).await?) }).unwrap());
        assert_eq!(issuers::by_url(&*store, "https://new.example").await.unwrap().unwrap().terms, new);
        assert!(issuers::by_url(&*store, "https://forge.example").await.unwrap().is_none());
        assert!(add(&store, "other", "https://forge.example").await.is_some(), "the old one is free");
        let refused: Result<bool, muster_types::Error> = transaction!(store, |tx| {
            // That the URL is taken is seen by the index, too.
            match issuers::update(tx, row.id, &terms("https://forge.example")).await {
                Err(StoreError::Conflict(_)) => Err(muster_types::Error::Conflict("taken".into()).into()),
                other => Ok(other?),
            }
        });
        assert!(matches!(refused, Err(muster_types::Error::Conflict(_))), "{refused:?}");
    }

    async fn of_many_who_add_the_same_issuer_one_does(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for n in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                // Half of them want the same name, the others the same URL.
                let (name, url) = if n % 2 == 0 {
                    ("forge".to_owned(), format!("https://{n}.example"))
                } else {
                    (format!("forge {n}"), "https://forge.example".to_owned())
                };
                add(&store, &name, &url).await.is_some()
            }));
        }
        let mut added = 0;
        for task in tasks {
            added += i32::from(task.await.unwrap());
        }
        assert_eq!(added, 2);
        assert_eq!(issuers::list(&*store).await.unwrap().len(), 2);
    }

    async fn a_rule_keeps_everything_that_it_says(store: Arc<Store>) {
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

    async fn rules_are_named_in_their_namespace_and_go_with_it(store: Arc<Store>) {
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
        for id in rules::some_of(&*store, "ns", 10).await.unwrap() {
            assert!(transaction!(store, |tx| { Ok(rules::remove_deleted(tx, id).await?) }).unwrap());
        }
        assert!(rules::some_of(&*store, "ns", 10).await.unwrap().is_empty());
        assert!(!transaction!(store, |tx| { Ok(rules::remove_deleted(tx, other.id).await?) }).unwrap());
        assert_eq!(rules::list(&*store, "other").await.unwrap(), [other]);
    }

    async fn of_many_who_add_the_same_rule_one_does(store: Arc<Store>) {
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
}
