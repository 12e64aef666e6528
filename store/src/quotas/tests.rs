use std::sync::Arc;

use muster_types::ids::NodeId;
use muster_types::namespace::NamespaceState;
use muster_types::quota::QuotaName;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn every_usage_of_an_empty_namespace_is_zero(store: Arc<Store>) {
        let used = quotas::used(&*store, "alpha", QuotaName::ALL).await.unwrap();
        assert_eq!(used, vec![0; QuotaName::ALL.len()]);
    }

    async fn limits_are_set_replaced_and_removed(store: Arc<Store>) {
        transaction!(store, |tx| {
            quotas::set(tx, "alpha", QuotaName::Keys, 3).await?;
            quotas::set(tx, "alpha", QuotaName::Keys, 5).await?;
            quotas::set(tx, "alpha", QuotaName::Cpus, 0).await?;
            quotas::set(tx, "beta", QuotaName::Cpus, 1).await?;
            Ok(quotas::remove(tx, "alpha", QuotaName::Networks).await?)
        }).unwrap();
        let mut limits = quotas::of_namespace(&*store, "alpha").await.unwrap();
        limits.sort_unstable();
        assert_eq!(limits, vec![(QuotaName::Cpus, 0), (QuotaName::Keys, 5)]);
        transaction!(store, |tx| { Ok(quotas::remove_of_namespace(tx, "alpha").await?) }).unwrap();
        assert!(quotas::of_namespace(&*store, "alpha").await.unwrap().is_empty());
        assert_eq!(quotas::of_namespace(&*store, "beta").await.unwrap().len(), 1);
    }

    async fn ended_uploads_do_not_count(store: Arc<Store>) {
        let names = [QuotaName::Uploads, QuotaName::UploadBytes];
        let row = transaction!(store, |tx| {
            let row = uploads::insert(tx, "alpha", NodeId::new()).await?;
            uploads::set_bytes(tx, row.id, 700).await?;
            uploads::insert(tx, "beta", NodeId::new()).await?;
            Ok(row)
        }).unwrap();
        assert_eq!(quotas::used(&*store, "alpha", &names).await.unwrap(), [1, 700]);
        transaction!(store, |tx| { Ok(uploads::end(tx, row.id).await?) }).unwrap();
        assert_eq!(quotas::used(&*store, "alpha", &names).await.unwrap(), [0, 0]);
        let changed = transaction!(store, |tx| { Ok(uploads::set_bytes(tx, row.id, 1).await?) }).unwrap();
        assert!(!changed);
    }

    async fn concurrent_transactions_that_lock_the_namespace_do_not_exceed_a_limit(store: Arc<Store>) {
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "alpha").await?) }).unwrap();
        let names = [QuotaName::Uploads];
        let tasks: Vec<_> = (0..12).map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                transaction!(store, |tx| {
                    assert!(namespaces::lock(tx, "alpha", NamespaceState::Created).await?);
                    if quotas::used(&mut *tx, "alpha", &names).await?[0] >= 5 {
                        return Ok(false);
                    }
                    uploads::insert(tx, "alpha", NodeId::new()).await?;
                    Ok(true)
                })
            })
        }).collect();
        let mut created = 0;
        for task in tasks {
            created += usize::from(task.await.unwrap().unwrap());
        }
        assert_eq!(created, 5);
        assert_eq!(quotas::used(&*store, "alpha", &names).await.unwrap(), [5]);
    }
}
