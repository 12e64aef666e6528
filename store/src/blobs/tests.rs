use std::sync::Arc;

use muster_types::blob::{BlobState, HashAlgorithm};
use muster_types::ids::{ArtifactId, BlobId, NodeId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use crate::testing::{create_blob, new_blob, on_both_engines};
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
}
