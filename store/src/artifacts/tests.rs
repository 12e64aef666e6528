use std::sync::Arc;

use muster_types::artifact::{ArtifactState, ArtifactType};
use muster_types::ids::ArtifactId;
use muster_types::time::now;

use super::{NewArtifact, Validators};
use crate::testing::on_both_engines;
use crate::*;

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
    async fn source_is_unique_among_undeleted_artifacts(store: Arc<Store>) {
        let url = format!("https://a.example/{}", "x".repeat(1900));
        let new = artifact("x", "alpha", &url);
        let row = transaction!(store, |tx| { Ok(artifacts::insert(tx, &new).await?) }).unwrap();
        let find = async |namespace: &str| {
            let found = artifacts::by_source(&*store, namespace, ArtifactType::Image, &url).await.unwrap();
            found.map(|row| row.id)
        };
        assert_eq!((find("alpha").await, find("beta").await), (Some(new.id), None));
        let again = artifact("y", "alpha", &url);
        let is_duplicate = transaction!(store, |tx| { Ok(matches!(artifacts::insert(tx, &again).await, Err(StoreError::Duplicate(_)))) });
        assert!(is_duplicate.unwrap());
        let validators = Validators { etag: Some("\"ü\"".into()), modified: None, length: Some(1 << 40) };
        let numbers = transaction!(store, |tx| {
            artifacts::set_fetched(tx, row.id, &validators).await?;
            artifacts::set_error(tx, row.id, Some("why")).await?;
            Ok((artifacts::next_index(tx, row.id).await?, artifacts::next_index(tx, row.id).await?))
        });
        assert_eq!(numbers.unwrap(), (1, 2));
        let row = artifacts::get(&*store, row.id).await.unwrap().unwrap();
        assert_eq!((row.fetched, row.source, row.error_message.as_deref()), (true, validators, Some("why")));
        transaction!(store, |tx| { Ok(artifacts::clear_fetched(tx, row.id).await?) }).unwrap();
        let cleared = artifacts::get(&*store, row.id).await.unwrap().unwrap();
        assert_eq!((cleared.fetched, cleared.source), (false, Validators::default()));
        assert_eq!(artifacts::by_name(&*store, "x", Some("alpha")).await.unwrap().len(), 1);
        assert!(artifacts::page(&*store, Some("beta"), None, 10).await.unwrap().is_empty());
        transaction!(store, |tx| { Ok(artifacts::set_shared(tx, row.id, true).await?) }).unwrap();
        assert_eq!(artifacts::page(&*store, Some("beta"), None, 10).await.unwrap().len(), 1);
        assert!(artifacts::by_name_shared(&*store, "x").await.unwrap().is_empty(), "only those of system");
        let deleted = transaction!(store, |tx| {
            let (from, to) = (ArtifactState::Initial, ArtifactState::Deleted);
            Ok(artifacts::set_state(tx, row.id, from, to).await? && !artifacts::lock(tx, row.id).await?)
        });
        assert!(deleted.unwrap());
        assert_eq!(find("alpha").await, None);
        transaction!(store, |tx| { Ok(artifacts::insert(tx, &again).await?) }).unwrap();
        assert_eq!(find("alpha").await, Some(again.id));
        assert_eq!(artifacts::deleted_before(&*store, now() + 1.0, 10).await.unwrap(), [row.id]);
        assert!(transaction!(store, |tx| { Ok(artifacts::remove(tx, row.id).await?) }).unwrap());
    }
}
