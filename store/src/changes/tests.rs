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
    async fn summary_differs_when_one_network_replaces_another(store: Arc<Store>) {
        let network = || networks::NewNetwork {
            id: muster_types::ids::NetworkId::new(),
            name: "lan".into(),
            namespace: None,
            netblock: "10.0.0.0/24".parse().unwrap(),
            provide_dhcp: false,
            provide_nat: false,
            provide_dns: false,
        };
        let first = transaction!(store, |tx| { Ok(networks::insert(tx, &network()).await?) }).unwrap();
        let before = changes::read(&*store, &[NodeId::new()], now()).await.unwrap().networks;
        transaction!(store, |tx| {
            networks::set_unwanted(tx, first.id).await?;
            networks::insert(tx, &network()).await?;
            Ok(())
        })
        .unwrap();
        let after = changes::read(&*store, &[NodeId::new()], now()).await.unwrap().networks;
        assert_ne!(before, after);
        assert_eq!(networks::generation_summary(&*store).await.unwrap(), after);
    }
}
