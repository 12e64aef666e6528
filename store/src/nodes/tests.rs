use std::sync::Arc;

use muster_types::ids::NodeId;
use muster_types::node::{NodeIdentity, NodeReport, NodeState};
use muster_types::object::NameOrId;
use serde_json::{Map, json};

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn finds_nodes_by_name_and_id(store: Arc<Store>) {
        let mut identity = NodeIdentity {
            id: NodeId::new(), name: "n1".into(), ip: [127, 0, 0, 1].into(), release: "x".into(), simulated: true,
            is_hypervisor: true, is_network_node: false, is_database_node: true,
        };
        transaction!(store, |tx| { Ok(nodes::insert(tx, &identity).await?) }).unwrap();
        identity.ip = [127, 0, 0, 2].into();
        let report = NodeReport { resources: Map::from_iter([("cpu".into(), json!(2))]), ..NodeReport::default() };
        transaction!(store, |tx| {
            nodes::set_identity(tx, &identity).await?;
            Ok(nodes::set_report(tx, identity.id, &report).await?)
        }).unwrap();
        let by_id = nodes::get(&*store, &NameOrId::Id(identity.id)).await.unwrap().unwrap();
        let by_name = nodes::get(&*store, &NameOrId::Name("n1".into())).await.unwrap().unwrap();
        assert_eq!((&by_id.identity, &by_id.report), (&identity, &report));
        assert_eq!(by_name.identity, identity);
        assert!(transaction!(store, |tx| { Ok(nodes::set_state(tx, &by_id, NodeState::Missing).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(nodes::set_state(tx, &by_id, NodeState::Error).await?) }).unwrap(), "stale");
        assert_eq!(nodes::list(&*store).await.unwrap()[0].state, NodeState::Missing);
        let twin = NodeIdentity { id: NodeId::new(), ..identity };
        assert!(transaction!(store, |tx| { Ok(nodes::insert(tx, &twin).await.is_err()) }).unwrap());
    }
}
