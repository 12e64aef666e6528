use std::sync::Arc;

use muster_types::object::ObjectType;
use serde_json::{Map, json};

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn stores_any_json(store: Arc<Store>) {
        let values = [("a", json!({"deep": [1, 2.5, null]})), ("b", json!("ünïcode \u{1f600}")), ("c", json!(true))];
        transaction!(store, |tx| {
            for (name, value) in &values {
                metadata::set(tx, ObjectType::Namespace, "ns", name, value).await?;
            }
            metadata::set(tx, ObjectType::Node, "ns", "a", &json!("a node's")).await?;
            Ok(())
        }).unwrap();
        let expected: Map<_, _> = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        assert_eq!(metadata::get(&*store, ObjectType::Namespace, "ns").await.unwrap(), expected);
        let bytes: usize = expected.iter().map(|(name, value)| name.len() + value.to_string().len()).sum();
        let size = metadata::size(&*store, ObjectType::Namespace, "ns").await.unwrap();
        assert_eq!(size, i64::try_from(bytes).unwrap(), "bytes, not characters");
        transaction!(store, |tx| {
            metadata::set(tx, ObjectType::Namespace, "ns", "a", &json!(1)).await?;
            metadata::remove(tx, ObjectType::Namespace, "ns", "b").await?;
            Ok(metadata::remove(tx, ObjectType::Namespace, "ns", "absent").await?)
        }).unwrap();
        assert_eq!(metadata::get(&*store, ObjectType::Namespace, "ns").await.unwrap().len(), 2);
        transaction!(store, |tx| { Ok(metadata::remove_of(tx, ObjectType::Namespace, "ns").await?) }).unwrap();
        assert!(metadata::get(&*store, ObjectType::Namespace, "ns").await.unwrap().is_empty());
        assert_eq!(metadata::get(&*store, ObjectType::Node, "ns").await.unwrap().len(), 1);
    }
}
