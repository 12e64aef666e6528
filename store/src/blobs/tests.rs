use std::sync::Arc;

use muster_types::blob::{BlobState, HashAlgorithm};
use muster_types::ids::{ArtifactId, BlobId, NodeId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use crate::testing::{add_instance, create_blob, new_blob, new_instance, on_both_engines};
use crate::*;

on_both_engines! {
    async fn deletes_only_unchanged_unused_blobs(store: Arc<Store>) {
        let (new, node) = (new_blob('a'), NodeId::new());
        create_blob(&store, &new, node).await;
        let row = blobs::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.content(), row.image.clone()), (BlobState::Created, new.content.clone(), new.image.clone()));
        for algorithm in HashAlgorithm::ALL {
            let checksum = new.content.checksums.get(*algorithm);
            assert_eq!(blobs::by_checksum(&*store, *algorithm, checksum).await.unwrap()[0].id, new.id);
        }
        assert_eq!(blobs::by_content(&*store, &new.content.checksums.sha512).await.unwrap(), Some(new.id));
        let is_rejected = transaction!(store, |tx| {
            Ok(blobs::insert_content(tx, &new.content.checksums.sha512, BlobId::new()).await.is_err())
        });
        assert!(is_rejected.unwrap(), "a content has one blob");
        assert_eq!(blobs::unused(&*store, now() + 1.0, 10).await.unwrap()[0].id, row.id);
        assert!(blobs::unused(&*store, now() - 10.0, 10).await.unwrap().is_empty());
        // A new use changes the row.
        let user = ObjectRef::new(ObjectType::Artifact, ArtifactId::new());
        transaction!(store, |tx| {
            assert!(blobs::lock(tx, new.id).await?);
            references::insert(tx, &user, "version", Some("1"), &ObjectRef::new(ObjectType::Blob, new.id)).await?;
            Ok(())
        })
        .unwrap();
        assert!(!transaction!(store, |tx| { Ok(blobs::delete(tx, &row).await?) }).unwrap());
        assert!(blobs::unused(&*store, now() + 1.0, 10).await.unwrap().is_empty());
        transaction!(store, |tx| { Ok(references::remove(tx, &user, "version", "1").await?) }).unwrap();
        let row = blobs::get(&*store, new.id).await.unwrap().unwrap();
        assert!(transaction!(store, |tx| { Ok(blobs::delete(tx, &row).await?) }).unwrap());
        assert_eq!(blobs::by_content(&*store, &new.content.checksums.sha512).await.unwrap(), None);
        assert!(!transaction!(store, |tx| { Ok(blobs::lock(tx, new.id).await?) }).unwrap());
        assert!(blobs::cleanable(&*store, now() + 1.0, 10).await.unwrap().is_empty(), "a node has it");
        transaction!(store, |tx| { Ok(blob_locations::remove(tx, new.id, node).await?) }).unwrap();
        assert_eq!(blobs::cleanable(&*store, now() + 1.0, 10).await.unwrap().len(), 1);
        assert!(transaction!(store, |tx| { Ok(blobs::remove(tx, new.id).await?) }).unwrap());
    }

    async fn details_contain_only_users_that_the_namespace_may_read(store: Arc<Store>) {
        let (new, node) = (new_blob('a'), NodeId::new());
        create_blob(&store, &new, node).await;
        let target = ObjectRef::new(ObjectType::Blob, new.id);
        let names = ["alpha", "beta", "gamma"];
        for name in names {
            let instance = new_instance(name, name, None);
            add_instance(&store, &instance).await;
            let source = ObjectRef::new(ObjectType::Instance, instance.id);
            transaction!(store, |tx| {
                blob_metadata::set(tx, new.id, name, "k", &name.into()).await?;
                blob_namespaces::receive(tx, new.id, name, Some(name)).await?;
                Ok(references::insert(tx, &source, "disk", Some(name), &target).await?)
            })
            .unwrap();
        }
        let operation = ObjectRef::new(ObjectType::ClusterOperation, BlobId::new());
        transaction!(store, |tx| {
            references::insert(tx, &operation, "disk", Some("operation"), &target).await?;
            references::insert(tx, &target, "depends_on", None, &target).await?;
            Ok(trusts::put(tx, "beta", "alpha", None).await?)
        })
        .unwrap();
        let users = async |seen_by: Option<&str>| {
            let details = blobs::details(&*store, &[new.id], seen_by).await.unwrap();
            let references = &details.references[&new.id.to_string()];
            assert_eq!(references.from["depends_on"].len(), 1);
            let users: Vec<String> =
                references.to["disk"].iter().filter_map(|user| user.relationship_value.clone()).collect();
            (users, details.metadata.len(), details.receipts.get(&new.id).and_then(|receipt| receipt.modified.clone()))
        };
        assert_eq!(users(Some("alpha")).await, (vec!["alpha".into(), "beta".into()], 1, Some("alpha".into())));
        assert_eq!(users(Some("beta")).await, (vec!["beta".into()], 1, Some("beta".into())));
        assert_eq!(users(None).await.0, ["alpha", "beta", "gamma", "operation"]);
    }
}
