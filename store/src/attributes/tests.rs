use std::sync::Arc;

use muster_types::object::{ObjectRef, ObjectType};
use serde_json::json;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn attributes_equal_metadata_and_references(store: Arc<Store>) {
        let [a, b, c] = ["a", "b", "c"].map(|id| ObjectRef { object_type: ObjectType::Network, id: id.into() });
        transaction!(store, |tx| {
            references::insert(tx, &a, "uses", Some("1"), &b).await?;
            references::insert(tx, &a, "uses", None, &c).await?;
            references::insert(tx, &c, "knows", Some("ü"), &a).await?;
            metadata::set(tx, ObjectType::Network, "a", "tags", &json!(["x", {"y": 1.5}])).await?;
            metadata::set(tx, ObjectType::Network, "c", "note", &json!("ü")).await?;
            Ok(())
        }).unwrap();
        let ids: Vec<String> = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let found = attributes::of_objects(&*store, ObjectType::Network, &ids).await.unwrap();
        let references = references::of_objects(&*store, ObjectType::Network, &ids).await.unwrap();
        let metadata = metadata::of_objects(&*store, ObjectType::Network, &ids).await.unwrap();
        for id in &ids {
            let attributes = found.get(id).cloned().unwrap_or_default();
            assert_eq!(attributes.references, references.get(id).cloned().unwrap_or_default(), "{id}");
            assert_eq!(attributes.metadata, metadata.get(id).cloned().unwrap_or_default(), "{id}");
        }
        assert!(attributes::of_objects(&*store, ObjectType::Node, &ids).await.unwrap().is_empty());
    }
}
