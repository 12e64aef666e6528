use std::sync::Arc;

use muster_types::namespace::NamespaceState;
use muster_types::time::now;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn compares_names_by_bytes(store: Arc<Store>) {
        let names = ["a", "A", "ä", "a.", "b b", "名前", "\u{1f600}"];
        transaction!(store, |tx| {
            for name in names {
                namespaces::insert(tx, name).await?;
            }
            Ok(())
        }).unwrap();
        let listed = namespaces::page(&*store, None, None, 100).await.unwrap();
        let mut expected = names.map(str::to_owned);
        expected.sort_unstable();
        assert_eq!(listed.into_iter().map(|row| row.name).collect::<Vec<_>>(), expected);
        assert!(namespaces::get(&*store, "a ").await.unwrap().is_none(), "no padding");
        let again = transaction!(store, |tx| { Ok(namespaces::insert(tx, "a").await.is_err()) }).unwrap();
        assert!(again);
    }

    async fn changes_state_only_from_the_expected_state(store: Arc<Store>) {
        let (created, deleted) = (NamespaceState::Created, NamespaceState::Deleted);
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "ns").await?) }).unwrap();
        assert!(transaction!(store, |tx| { Ok(namespaces::lock(tx, "ns", created).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(namespaces::remove(tx, "ns").await?) }).unwrap());
        assert!(transaction!(store, |tx| { Ok(namespaces::set_state(tx, "ns", created, deleted).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(namespaces::set_state(tx, "ns", created, deleted).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(namespaces::lock(tx, "ns", created).await?) }).unwrap());
        assert!(namespaces::page(&*store, None, None, 10).await.unwrap().is_empty());
        assert_eq!(namespaces::deleted_before(&*store, now() + 1.0, 10).await.unwrap().len(), 1);
        assert!(namespaces::deleted_before(&*store, now() - 60.0, 10).await.unwrap().is_empty());
        assert!(transaction!(store, |tx| { Ok(namespaces::remove(tx, "ns").await?) }).unwrap());
    }

    async fn deletion_waits_for_shared_locks(store: Arc<Store>) {
        let created = NamespaceState::Created;
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "ns").await?) }).unwrap();
        assert!(!transaction!(store, |tx| { Ok(namespaces::lock_shared(tx, "other", created).await?) }).unwrap());
        let (locked, is_locked) = tokio::sync::oneshot::channel();
        let mut locked = Some(locked);
        let other = Arc::clone(&store);
        let deletion = tokio::spawn(async move {
            is_locked.await.unwrap();
            transaction!(other, |tx| {
                assert!(namespaces::set_state(tx, "ns", created, NamespaceState::Deleted).await?);
                Ok(trusts::exists(&mut *tx, "ns", "added").await?)
            })
        });
        transaction!(store, |tx| {
            assert!(namespaces::lock_shared(tx, "ns", created).await?);
            if let Some(locked) = locked.take() {
                locked.send(()).unwrap();
            }
            tokio::task::yield_now().await;
            trusts::put(tx, "ns", "added", None).await?;
            Ok(())
        }).unwrap();
        assert!(deletion.await.unwrap().unwrap(), "the deletion waits for what is being added");
        assert!(!transaction!(store, |tx| { Ok(namespaces::lock_shared(tx, "ns", created).await?) }).unwrap());
    }

    async fn pages_contain_only_visible_namespaces(store: Arc<Store>) {
        transaction!(store, |tx| {
            for name in ["a", "b", "c", "d"] {
                namespaces::insert(tx, name).await?;
            }
            trusts::put(tx, "c", "b", None).await?;
            trusts::put(tx, "c", "zz", None).await?;
            Ok(())
        }).unwrap();
        let names = |rows: Vec<namespaces::NamespaceRow>| rows.into_iter().map(|r| r.name).collect::<Vec<_>>();
        assert_eq!(names(namespaces::page(&*store, Some("b"), None, 10).await.unwrap()), ["b", "c"]);
        assert_eq!(names(namespaces::page(&*store, Some("b"), Some("b"), 10).await.unwrap()), ["c"]);
        assert_eq!(names(namespaces::page(&*store, None, Some("b"), 1).await.unwrap()), ["c"]);
        assert!(trusts::exists(&*store, "c", "b").await.unwrap());
        assert!(!trusts::exists(&*store, "b", "c").await.unwrap());
        assert_eq!(trusts::trusting(&*store, "b").await.unwrap(), ["c"]);
        let trusted = async || namespaces::details(&*store, "a", "d").await.unwrap().trusts.remove("c").unwrap_or_default();
        assert_eq!(trusted().await, ["b", "zz"]);
        transaction!(store, |tx| { Ok(trusts::remove_naming(tx, "b").await?) }).unwrap();
        assert_eq!(trusted().await, ["zz"]);
        transaction!(store, |tx| { trusts::put(tx, "c", "d", None).await?; Ok(trusts::remove(tx, "c", "d").await?) }).unwrap();
        transaction!(store, |tx| { Ok(trusts::remove_of(tx, "c").await?) }).unwrap();
        assert!(trusted().await.is_empty());
    }
}
