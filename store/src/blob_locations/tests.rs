use std::sync::Arc;

use muster_types::blob::{BlobState, CopyState};
use muster_types::ids::NodeId;
use muster_types::node::{NodeIdentity, NodeState};
use muster_types::time::now;

use crate::nodes::tests::identity;
use crate::testing::{create_blob, new_blob, on_both_engines};
use crate::*;

on_both_engines! {
    async fn counts_verifies_and_removes_copies(store: Arc<Store>) {
        let (first, second) = (NodeId::new(), NodeId::new());
        let (a, b) = (new_blob('a'), new_blob('b'));
        create_blob(&store, &a, first).await;
        create_blob(&store, &b, first).await;
        transaction!(store, |tx| { Ok(blob_locations::set(tx, a.id, second, CopyState::Complete).await?) }).unwrap();
        let lacking = async |excluded: &[NodeId], wanted| {
            blob_locations::under_replicated(&*store, excluded, wanted, 10).await.unwrap()
        };
        assert_eq!(lacking(&[], 2).await, [b.id]);
        assert_eq!(lacking(&[second], 2).await, [a.id, b.id]);
        assert_eq!(lacking(&[first], 1).await, [b.id], "it has a copy, which does not count");
        let only = async |node, others: &[NodeId]| blob_locations::only_on(&*store, node, others).await.unwrap();
        let mut both = [a.id, b.id];
        both.sort_by_key(ToString::to_string);
        assert_eq!(only(first, &[]).await, both);
        assert_eq!(only(first, &[second, NodeId::new()]).await, [b.id]);
        assert!(only(second, &[first]).await.is_empty());
        transaction!(store, |tx| { Ok(blob_locations::lock_blobs_of_node(tx, first).await?) }).unwrap();
        assert_eq!(blob_locations::of_blobs(&*store, &[a.id, b.id]).await.unwrap()[&a.id].len(), 2);
        let surplus = async |wanted, seconds: f64| {
            blob_locations::over_replicated(&*store, first, wanted, now() + seconds, 10).await.unwrap()
        };
        assert!(surplus(1, 1.0).await.is_empty(), "the nodes are not active");
        for (id, name) in [(first, "one"), (second, "two")] {
            let identity = NodeIdentity { id, ..identity(name) };
            transaction!(store, |tx| { Ok(nodes::insert(tx, &identity).await?) }).unwrap();
        }
        assert_eq!(surplus(1, 1.0).await, [a.id]);
        assert!(surplus(2, 1.0).await.is_empty());
        assert!(surplus(1, -10.0).await.is_empty(), "it was verified lately");
        let own = blob_locations::of_node(&*store, first).await.unwrap();
        let copy = own.copies[&b.id];
        assert_eq!((copy.state, copy.blob), (CopyState::Complete, BlobState::Created));
        assert!((copy.verified - now()).abs() < 60.0);
        assert_eq!((own.state, own.uploads.len()), (Some(NodeState::Created), 0));
        assert_eq!(blobs::page(&*store, Some(second), None, 10).await.unwrap().len(), 1);
        transaction!(store, |tx| { Ok(blob_locations::remove_of_node(tx, second).await?) }).unwrap();
        assert!(blobs::page(&*store, Some(second), None, 10).await.unwrap().is_empty());
        let all = blobs::page(&*store, None, None, 1).await.unwrap();
        assert_eq!(blobs::page(&*store, None, Some(all[0].id), 10).await.unwrap().len(), 1);
    }
}
