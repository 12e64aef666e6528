use std::sync::Arc;

use muster_types::ids::NodeId;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn ends_an_upload_once(store: Arc<Store>) {
        let node = NodeId::new();
        let row = transaction!(store, |tx| { Ok(uploads::insert(tx, "alpha", node).await?) }).unwrap();
        assert_eq!(uploads::get(&*store, row.id).await.unwrap(), Some(row.clone()));
        transaction!(store, |tx| { Ok(uploads::remove(tx, row.id).await?) }).unwrap();
        assert_eq!(blob_locations::of_node(&*store, node).await.unwrap().uploads.len(), 1, "it has not ended");
        assert!(transaction!(store, |tx| { Ok(uploads::end(tx, row.id).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(uploads::end(tx, row.id).await?) }).unwrap());
        transaction!(store, |tx| { Ok(uploads::remove(tx, row.id).await?) }).unwrap();
        assert!(uploads::get(&*store, row.id).await.unwrap().is_none());
    }
}
