//! Rows of blobs, copies, artifacts and uploads, on both engines.

use std::sync::Arc;

use muster_types::artifact::{ArtifactState, ArtifactType};
use muster_types::blob::{
    BlobState, Checksums, ContentDigest, CopyState, HashAlgorithm, ImageFacts, ImageFormat,
};
use muster_types::ids::{ArtifactId, BlobId, NodeId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::Progress;
use muster_types::time::now;

use super::artifacts::{NewArtifact, Validators};
use super::blobs::NewBlob;
use super::operations::Able;
use super::tests::{on_both_engines, operation};
use super::*;

fn content(letter: char) -> ContentDigest {
    let digits = |count| letter.to_string().repeat(count);
    let checksums =
        Checksums { sha1: digits(40), sha256: digits(64), sha512: digits(128), xxh128: digits(32) };
    ContentDigest { size: 5_000_000_000, checksums }
}

fn new_blob(letter: char) -> NewBlob {
    let image = ImageFacts {
        format: ImageFormat::Qcow2,
        packing: None,
        virtual_size: 1 << 40,
        further: serde_json::Map::new(),
    };
    NewBlob { id: BlobId::new(), content: content(letter), modified: Some("ü".into()), image: Some(image) }
}

async fn make(store: &Store, new: &NewBlob, node: NodeId) {
    transaction!(store, |tx| {
        blobs::insert(tx, new).await?;
        blob_locations::set(tx, new.id, node, CopyState::Copying).await?;
        blobs::claim(tx, &new.content.checksums.sha512, new.id).await?;
        assert!(blobs::set_created(tx, new.id).await?);
        Ok(blob_locations::set(tx, new.id, node, CopyState::Complete).await?)
    })
    .unwrap();
}

fn artifact(name: &str, namespace: &str, source_url: &str) -> NewArtifact {
    NewArtifact {
        id: ArtifactId::new(),
        name: name.into(),
        namespace: namespace.into(),
        artifact_type: ArtifactType::Image,
        source_url: source_url.into(),
        shared: false,
        max_versions: 3,
    }
}

on_both_engines! {
    async fn a_blob_is_made_found_held_and_deleted_only_as_it_was_seen(store: Arc<Store>) {
        let (new, node) = (new_blob('a'), NodeId::new());
        make(&store, &new, node).await;
        let row = blobs::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.content(), row.image.clone()), (BlobState::Created, new.content.clone(), new.image.clone()));
        for algorithm in HashAlgorithm::ALL {
            let sum = new.content.checksums.get(*algorithm);
            assert_eq!(blobs::by_checksum(&*store, *algorithm, sum).await.unwrap()[0].id, new.id);
        }
        assert_eq!(blobs::of_content(&*store, &new.content.checksums.sha512).await.unwrap(), Some(new.id));
        let twice = transaction!(store, |tx| {
            Ok(blobs::claim(tx, &new.content.checksums.sha512, BlobId::new()).await.is_err())
        });
        assert!(twice.unwrap(), "a content has one blob");
        assert_eq!(blobs::unused(&*store, now() + 1.0, 10).await.unwrap()[0].id, row.id);
        assert!(blobs::unused(&*store, now() - 10.0, 10).await.unwrap().is_empty());
        // Whoever begins to use it changes the row.
        let user = ObjectRef::new(ObjectType::Artifact, ArtifactId::new());
        transaction!(store, |tx| {
            assert!(blobs::hold(tx, new.id).await?);
            references::insert(tx, &user, "version", Some("1"), &ObjectRef::new(ObjectType::Blob, new.id)).await?;
            Ok(())
        })
        .unwrap();
        assert!(!transaction!(store, |tx| { Ok(blobs::delete(tx, &row).await?) }).unwrap());
        assert!(blobs::unused(&*store, now() + 1.0, 10).await.unwrap().is_empty());
        assert_eq!(blobs::uses(&*store, &[new.id]).await.unwrap()[&new.id], 1);
        transaction!(store, |tx| { Ok(references::remove(tx, &user, "version", "1").await?) }).unwrap();
        let row = blobs::get(&*store, new.id).await.unwrap().unwrap();
        assert!(transaction!(store, |tx| { Ok(blobs::delete(tx, &row).await?) }).unwrap());
        assert_eq!(blobs::of_content(&*store, &new.content.checksums.sha512).await.unwrap(), None);
        assert!(!transaction!(store, |tx| { Ok(blobs::hold(tx, new.id).await?) }).unwrap());
        assert!(blobs::cleanable(&*store, now() + 1.0, 10).await.unwrap().is_empty(), "a node has it");
        transaction!(store, |tx| { Ok(blob_locations::remove(tx, new.id, node).await?) }).unwrap();
        assert_eq!(blobs::cleanable(&*store, now() + 1.0, 10).await.unwrap().len(), 1);
        assert!(transaction!(store, |tx| { Ok(blobs::remove(tx, new.id).await?) }).unwrap());
    }

    async fn copies_are_counted_compared_and_forgotten(store: Arc<Store>) {
        let (first, second) = (NodeId::new(), NodeId::new());
        let (a, b) = (new_blob('a'), new_blob('b'));
        make(&store, &a, first).await;
        make(&store, &b, first).await;
        transaction!(store, |tx| { Ok(blob_locations::set(tx, a.id, second, CopyState::Complete).await?) }).unwrap();
        assert_eq!(blob_locations::scarce(&*store, 2, 10).await.unwrap(), [b.id]);
        assert_eq!(blob_locations::of(&*store, &[a.id, b.id]).await.unwrap()[&a.id].len(), 2);
        let own = blob_locations::of_node(&*store, first).await.unwrap();
        assert_eq!(own[&b.id], (CopyState::Complete, BlobState::Created));
        let due = |state, before| blob_locations::unverified(&*store, first, state, before, 10);
        assert_eq!(due(CopyState::Complete, now() + 1.0).await.unwrap().len(), 2);
        assert!(due(CopyState::Complete, now() - 10.0).await.unwrap().is_empty());
        transaction!(store, |tx| { Ok(blob_locations::set(tx, b.id, first, CopyState::Damaged).await?) }).unwrap();
        assert_eq!(due(CopyState::Damaged, now() + 1.0).await.unwrap(), [b.id]);
        assert_eq!(blobs::page(&*store, Some(second), None, 10).await.unwrap().len(), 1);
        transaction!(store, |tx| { Ok(blob_locations::remove_of_node(tx, second).await?) }).unwrap();
        assert!(blobs::page(&*store, Some(second), None, 10).await.unwrap().is_empty());
        let all = blobs::page(&*store, None, None, 1).await.unwrap();
        assert_eq!(blobs::page(&*store, None, Some(all[0].id), 10).await.unwrap().len(), 1);
    }

    async fn an_artifact_is_one_of_its_source_until_it_is_deleted(store: Arc<Store>) {
        let url = format!("https://a.example/{}", "x".repeat(1900));
        let new = artifact("x", "alpha", &url);
        let row = transaction!(store, |tx| { Ok(artifacts::insert(tx, &new).await?) }).unwrap();
        let find = async |namespace: &str| {
            let found = artifacts::by_source(&*store, namespace, ArtifactType::Image, &url).await.unwrap();
            found.map(|row| row.id)
        };
        assert_eq!((find("alpha").await, find("beta").await), (Some(new.id), None));
        let again = artifact("y", "alpha", &url);
        let twice = transaction!(store, |tx| { Ok(matches!(artifacts::insert(tx, &again).await, Err(StoreError::Duplicate(_)))) });
        assert!(twice.unwrap());
        let said = Validators { etag: Some("\"ü\"".into()), modified: None, length: Some(1 << 40) };
        let numbers = transaction!(store, |tx| {
            artifacts::set_source(tx, row.id, &said).await?;
            artifacts::set_error(tx, row.id, Some("why")).await?;
            Ok((artifacts::next_index(tx, row.id).await?, artifacts::next_index(tx, row.id).await?))
        });
        assert_eq!(numbers.unwrap(), (1, 2));
        let row = artifacts::get(&*store, row.id).await.unwrap().unwrap();
        assert_eq!((row.source, row.error_message.as_deref()), (said, Some("why")));
        assert_eq!(artifacts::by_name(&*store, "x", Some("alpha")).await.unwrap().len(), 1);
        assert!(artifacts::page(&*store, Some("beta"), None, 10).await.unwrap().is_empty());
        assert!(artifacts::by_name_visible(&*store, "x", "beta").await.unwrap().is_empty());
        transaction!(store, |tx| { Ok(artifacts::set_shared(tx, row.id, true).await?) }).unwrap();
        assert_eq!(artifacts::page(&*store, Some("beta"), None, 10).await.unwrap().len(), 1);
        assert_eq!(artifacts::visible(&*store, &[row.id.to_string()], "beta").await.unwrap().len(), 1);
        let gone = transaction!(store, |tx| {
            let (from, to) = (ArtifactState::Initial, ArtifactState::Deleted);
            Ok(artifacts::set_state(tx, row.id, from, to).await? && !artifacts::hold(tx, row.id).await?)
        });
        assert!(gone.unwrap());
        assert_eq!(find("alpha").await, None);
        transaction!(store, |tx| { Ok(artifacts::insert(tx, &again).await?) }).unwrap();
        assert_eq!(find("alpha").await, Some(again.id));
        assert_eq!(artifacts::deleted_before(&*store, now() + 1.0, 10).await.unwrap(), [row.id]);
        assert!(transaction!(store, |tx| { Ok(artifacts::remove(tx, row.id).await?) }).unwrap());
    }

    async fn an_upload_ends_once(store: Arc<Store>) {
        let node = NodeId::new();
        let row = transaction!(store, |tx| { Ok(uploads::insert(tx, "alpha", node).await?) }).unwrap();
        assert_eq!(uploads::get(&*store, row.id).await.unwrap(), Some(row.clone()));
        transaction!(store, |tx| { Ok(uploads::remove(tx, row.id).await?) }).unwrap();
        assert_eq!(uploads::of_node(&*store, node).await.unwrap().len(), 1, "it has not ended");
        assert!(transaction!(store, |tx| { Ok(uploads::end(tx, row.id).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(uploads::end(tx, row.id).await?) }).unwrap());
        transaction!(store, |tx| { Ok(uploads::remove(tx, row.id).await?) }).unwrap();
        assert!(uploads::get(&*store, row.id).await.unwrap().is_none());
    }

    async fn an_operation_of_a_node_is_left_to_it_and_tells_how_far_it_is(store: Arc<Store>) {
        let node = NodeId::new();
        let mut new = operation("alpha", vec![]);
        new.node = Some(node);
        transaction!(store, |tx| { Ok(operations::insert(tx, &new).await?) }).unwrap();
        let able = |nodes| Able { names: vec!["delete_namespace"], nodes };
        assert!(operations::due(&store, &able(vec![NodeId::new()]), 10).await.unwrap().is_empty());
        assert!(operations::next_due(&store, &able(vec![NodeId::new()])).await.unwrap().is_none());
        let due = operations::due(&store, &able(vec![NodeId::new(), node]), 10).await.unwrap().remove(0);
        let claimed = operations::claim(&store, &due, 10.0).await.unwrap().unwrap();
        let progress = Progress { done: 5, total: Some(7), validator: Some("\"x\"".into()), node: Some(node) };
        transaction!(store, |tx| { Ok(operations::set_progress(tx, &claimed, &progress).await?) }).unwrap();
        assert_eq!(operations::get(&*store, claimed.id).await.unwrap().unwrap().progress, Some(progress));
    }
}
