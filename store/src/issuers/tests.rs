use std::sync::Arc;

use muster_types::issuer::IssuerState;
use muster_types::time::now;

use super::IssuerRow;
use crate::testing::{issuer_terms, on_both_engines};
use crate::*;

/// Adds an issuer unless its name or URL is in use, as `control` does.
async fn add(store: &Store, name: &str, url: &str) -> Option<IssuerRow> {
    let terms = issuer_terms(url);
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

on_both_engines! {
    async fn finds_issuer_by_name_and_by_full_url(store: Arc<Store>) {
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

    async fn name_and_url_of_a_deleted_issuer_can_be_used_again(store: Arc<Store>) {
        let old = add(&store, "forge", "https://forge.example").await.unwrap();
        assert!(add(&store, "forge", "https://other.example").await.is_none());
        assert!(add(&store, "other", "https://forge.example").await.is_none());
        assert!(transaction!(store, |tx| { Ok(issuers::soft_delete(tx, old.id).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(issuers::soft_delete(tx, old.id).await?) }).unwrap());
        let new = issuer_terms("https://new.example");
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

    async fn update_replaces_the_url(store: Arc<Store>) {
        let row = add(&store, "forge", "https://forge.example").await.unwrap();
        let new = issuer_terms("https://new.example");
        assert!(transaction!(store, |tx| { Ok(issuers::update(tx, row.id, &new).await?) }).unwrap());
        assert_eq!(issuers::by_url(&*store, "https://new.example").await.unwrap().unwrap().terms, new);
        assert!(issuers::by_url(&*store, "https://forge.example").await.unwrap().is_none());
        assert!(add(&store, "other", "https://forge.example").await.is_some(), "the old URL can be used again");
        let refused: Result<bool, muster_types::Error> = transaction!(store, |tx| {
            // The unique index rejects the URL, too.
            match issuers::update(tx, row.id, &issuer_terms("https://forge.example")).await {
                Err(StoreError::Conflict(_)) => Err(muster_types::Error::Conflict("taken".into()).into()),
                other => Ok(other?),
            }
        });
        assert!(matches!(refused, Err(muster_types::Error::Conflict(_))), "{refused:?}");
    }

    async fn concurrent_inserts_add_one_issuer(store: Arc<Store>) {
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
}
