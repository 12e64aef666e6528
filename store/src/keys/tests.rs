use std::collections::HashSet;
use std::sync::Arc;

use muster_types::time::now;

use super::{NewKey, PutOutcome, StoredSecret};
use crate::testing::{key, on_both_engines};
use crate::*;

on_both_engines! {
    async fn finds_live_keys_by_tag(store: Arc<Store>) {
        transaction!(store, |tx| {
            namespaces::insert(tx, "ns").await?;
            keys::put(tx, "ns", "forever", &key(7, None)).await?;
            keys::put(tx, "ns", "same tag", &key(7, Some(now() + 60.0))).await?;
            keys::put(tx, "ns", "expired", &key(7, Some(now() - 60.0))).await?;
            keys::put(tx, "other", "elsewhere", &key(7, None)).await?;
            Ok(())
        }).unwrap();
        let names: Vec<_> = keys::candidates(&store, "ns", 7).await.unwrap().into_iter().map(|c| c.name).collect();
        assert_eq!(names, ["forever", "same tag"]);
        assert_eq!(keys::names(&*store, "ns", "ns").await.unwrap().len(), 2);
        assert!(keys::find(&*store, "ns", "expired").await.unwrap().is_none());
        assert!(keys::get(&*store, "ns", "expired").await.unwrap().is_none());
        let (forever, _) = keys::get(&*store, "ns", "forever").await.unwrap().unwrap();
        assert_eq!((forever.name.as_str(), forever.expiry), ("forever", None));
        assert!(keys::credential(&store, "nowhere", "x").await.unwrap().is_none());
        assert!(keys::credential(&store, "ns", "x").await.unwrap().unwrap().key.is_none());
        assert_eq!(keys::credential(&store, "ns", "forever").await.unwrap().unwrap().key.unwrap().nonce, "nonce 7");

        let PutOutcome::Rotated(id) = transaction!(store, |tx| { Ok(keys::put(tx, "ns", "forever", &key(8, None)).await?) }).unwrap()
            else { panic!("the name existed") };
        assert_eq!(keys::find(&*store, "ns", "forever").await.unwrap(), Some(id));
        assert_eq!(keys::candidates(&store, "ns", 8).await.unwrap().len(), 1);
        assert!(transaction!(store, |tx| { Ok(keys::soft_delete(tx, "ns", "forever").await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(keys::soft_delete(tx, "ns", "forever").await?) }).unwrap());
    }

    async fn names_of_expired_keys_can_be_used_again(store: Arc<Store>) {
        transaction!(store, |tx| {
            keys::put(tx, "ns", "old", &key(1, Some(now() - 100.0))).await?;
            keys::put(tx, "ns", "young", &key(2, Some(now() - 1.0))).await?;
            Ok(())
        }).unwrap();
        let expired = keys::expired_before(&*store, now() - 50.0, 10).await.unwrap();
        assert_eq!(expired.iter().map(|k| k.name.as_str()).collect::<Vec<_>>(), ["old"]);
        let id = expired[0].id;
        assert!(transaction!(store, |tx| { Ok(keys::soft_delete_expired(tx, id, now() - 50.0).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(keys::soft_delete_expired(tx, id, now() - 50.0).await?) }).unwrap());
        assert_eq!(keys::deleted_before(&*store, now() + 1.0, 10).await.unwrap().len(), 1);
        // The name of a swept key may be used again, under the same id.
        let PutOutcome::Created(again) = transaction!(store, |tx| { Ok(keys::put(tx, "ns", "old", &key(3, None)).await?) }).unwrap()
            else { panic!("the row existed") };
        assert_eq!(again, id);
        assert!(!transaction!(store, |tx| { Ok(keys::remove_deleted(tx, id).await?) }).unwrap());
        transaction!(store, |tx| { Ok(keys::soft_delete_of(tx, "ns").await?) }).unwrap();
        assert_eq!(keys::of_namespace(&*store, "ns", 10).await.unwrap().len(), 2);
        assert!(transaction!(store, |tx| { Ok(keys::remove_deleted(tx, id).await?) }).unwrap());
    }

    async fn concurrent_puts_create_one_key(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for n in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                transaction!(store, |tx| { Ok(keys::put(tx, "ns", "same", &key(n, None)).await?) }).unwrap()
            }));
        }
        let mut ids = HashSet::new();
        let mut created = 0;
        for task in tasks {
            match task.await.unwrap() {
                PutOutcome::Created(id) => { created += 1; ids.insert(id); }
                PutOutcome::Rotated(id) => { ids.insert(id); }
            }
        }
        assert_eq!((created, ids.len()), (1, 1));
    }

    async fn insert_rejects_existing_names_and_records_provenance(store: Arc<Store>) {
        let secret = StoredSecret { tag: 1, hash: "hash".into(), nonce: "nonce".into() };
        let provenance = Some(serde_json::json!({"source": "federated", "sub": "répo"}));
        let new = NewKey { secret, expiry: Some(now() + 60.0), scopes: Some(vec!["blob.read".into()]), provenance };
        let stored = async || {
            let row = store.query_one("SELECT provenance FROM namespace_keys", &[]).await.unwrap().unwrap();
            row.scalar::<Json<Option<serde_json::Value>>>().unwrap().0
        };
        transaction!(store, |tx| { Ok(keys::insert(tx, "ns", "ci-1", &new).await?) }).unwrap();
        assert_eq!(stored().await, new.provenance);
        for _ in 0..2 {
            let again = transaction!(store, |tx| {
                // The transaction continues after a duplicate name.
                let taken = matches!(keys::insert(tx, "ns", "ci-1", &new).await, Err(StoreError::Duplicate(_)));
                Ok((taken, keys::soft_delete(tx, "ns", "ci-1").await?))
            });
            assert!(again.unwrap().0, "also one that is deleted");
        }
        let mut plain = new.clone();
        plain.provenance = None;
        transaction!(store, |tx| { Ok(keys::put(tx, "ns", "ci-1", &plain).await?) }).unwrap();
        assert_eq!(stored().await, None, "replacing a key replaces its provenance");
    }
}
