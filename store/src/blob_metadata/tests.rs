use std::sync::Arc;

use muster_types::ids::BlobId;
use serde_json::json;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn namespaces_have_their_own_metadata(store: Arc<Store>) {
        let (one, two) = (BlobId::new(), BlobId::new());
        transaction!(store, |tx| {
            for (blob, namespace, value) in [(one, "alpha", 1), (one, "alpha", 2), (one, "beta", 3), (two, "beta", 4)] {
                blob_metadata::set(tx, blob, namespace, "k", &json!(value)).await?;
            }
            Ok(())
        })
        .unwrap();
        let values = async |namespace: Option<&str>| {
            let mut rows = blob_metadata::of_blob(&*store, one, namespace).await.unwrap();
            rows.extend(blob_metadata::of_blob(&*store, two, namespace).await.unwrap());
            let mut values: Vec<i64> = rows.into_iter().map(|row| row.value.as_i64().unwrap()).collect();
            values.sort_unstable();
            values
        };
        assert_eq!(values(Some("alpha")).await, [2]);
        assert_eq!(values(Some("beta")).await, [3, 4]);
        assert_eq!(values(None).await, [2, 3, 4]);
        assert_eq!(blob_metadata::size(&*store, one, "alpha").await.unwrap(), 2);
        transaction!(store, |tx| { Ok(blob_metadata::remove(tx, one, "alpha", "k").await?) }).unwrap();
        assert_eq!(values(None).await, [3, 4]);
        transaction!(store, |tx| { Ok(blob_metadata::remove_of(tx, one).await?) }).unwrap();
        assert_eq!(values(None).await, [4]);
        transaction!(store, |tx| { Ok(blob_metadata::remove_of_namespace(tx, "beta").await?) }).unwrap();
        assert!(values(None).await.is_empty());
    }
}
