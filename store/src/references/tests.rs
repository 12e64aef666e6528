use std::sync::Arc;

use muster_types::object::{ObjectRef, ObjectType};

use crate::testing::{on_both_engines, operation};
use crate::*;

on_both_engines! {
    async fn lists_references_from_both_ends(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::new(ObjectType::Node, "b"));
        transaction!(store, |tx| {
            references::insert(tx, &a, "disk", Some("0"), &b).await?;
            references::insert(tx, &a, "disk", Some("1"), &b).await?;
            references::insert(tx, &a, "nvram_template", None, &b).await?;
            Ok(())
        }).unwrap();
        let from = references::of_object(&*store, &a).await.unwrap().from;
        assert_eq!(from.keys().collect::<Vec<_>>(), ["disk", "nvram_template"]);
        assert_eq!(from["disk"].iter().map(|r| r.relationship_value.as_deref()).collect::<Vec<_>>(), [Some("0"), Some("1")]);
        assert_eq!(references::of_object(&*store, &b).await.unwrap().to, from);
        assert!(references::of_object(&*store, &a).await.unwrap().to.is_empty());
        transaction!(store, |tx| { Ok(references::remove_from(tx, &a).await?) }).unwrap();
        assert!(references::of_object(&*store, &b).await.unwrap().to.is_empty());
        // An operation uses its target until it is removed.
        let handle = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("ns", vec![])).await?) }).unwrap();
        let target = ObjectRef::namespace("ns");
        let used = references::of_object(&*store, &target).await.unwrap().to;
        assert_eq!(used["operation_target"][0].source_uuid, handle.op_uuid.to_string());
    }
}
