use std::sync::Arc;

use muster_types::ids::BlobId;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn keeps_first_time_and_last_use_per_namespace(store: Arc<Store>) {
        let blob = BlobId::new();
        let of = async |namespace: &str| {
            blob_namespaces::of_namespace(&*store, namespace, &[blob]).await.unwrap().remove(&blob)
        };
        let receive = async |namespace: &str, modified: Option<&str>| {
            transaction!(store, |tx| { Ok(blob_namespaces::receive(tx, blob, namespace, modified).await?) }).unwrap();
        };
        receive("alpha", Some("then")).await;
        let first = of("alpha").await.unwrap();
        assert_eq!((first.modified.as_deref(), first.last_used), (Some("then"), None));
        assert_eq!(of("beta").await, None);
        receive("alpha", None).await;
        assert_eq!(of("alpha").await, Some(first.clone()));
        receive("alpha", Some("later")).await;
        receive("beta", None).await;
        transaction!(store, |tx| { Ok(blob_namespaces::set_used(tx, blob, "beta").await?) }).unwrap();
        let second = of("alpha").await.unwrap();
        assert_eq!((second.received, second.modified.as_deref(), second.last_used), (first.received, Some("later"), None));
        assert!(of("beta").await.unwrap().last_used.is_some());
        transaction!(store, |tx| { Ok(blob_namespaces::remove_of_namespace(tx, "beta").await?) }).unwrap();
        assert_eq!((of("alpha").await.is_some(), of("beta").await), (true, None));
        transaction!(store, |tx| { Ok(blob_namespaces::remove_of(tx, blob).await?) }).unwrap();
        assert_eq!(of("alpha").await, None);
    }
}
