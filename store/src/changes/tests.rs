use std::sync::Arc;

use muster_types::ids::NodeId;
use muster_types::time::now;

use crate::testing::{on_both_engines, operation};
use crate::*;

on_both_engines! {
    async fn summary_shows_operations_of_own_nodes_only(store: Arc<Store>) {
        let (own, other) = (NodeId::new(), NodeId::new());
        let empty = changes::read(&*store, &[own], now()).await.unwrap();
        assert_eq!(empty.next_operation, None);
        assert!(empty.leases.is_empty());
        assert!((empty.time - now()).abs() < 60.0 && empty.queried.0 <= empty.queried.1);
        let mut bound = operation("alpha", vec![]);
        bound.node = Some(other);
        transaction!(store, |tx| { Ok(operations::insert(tx, &bound).await?) }).unwrap();
        assert_eq!(changes::read(&*store, &[own], now()).await.unwrap().next_operation, None);
        let due = changes::read(&*store, &[own, other], now()).await.unwrap().next_operation;
        assert!(due.is_some_and(|due| due <= now()));
    }
}
