use std::sync::Arc;

use muster_types::ids::NodeId;
use muster_types::node::{NodeIdentity, NodeReport, NodeState};
use muster_types::object::NameOrId;
use serde_json::{Map, json};

use crate::membership::Member;
use crate::testing::on_both_engines;
use crate::*;

pub(crate) fn identity(name: &str) -> NodeIdentity {
    NodeIdentity {
        id: NodeId::new(),
        name: name.into(),
        ip: [127, 0, 0, 1].into(),
        release: "x".into(),
        simulated: false,
        is_hypervisor: true,
        is_network_node: false,
        is_database_node: true,
    }
}

/// Adds a node and joins it as a member.
pub(crate) async fn join(store: &Store, identity: &NodeIdentity) -> Member {
    let epoch = transaction!(store.unfenced(), |tx| {
        nodes::insert(tx, identity).await?;
        Ok(nodes::begin_epoch(tx, identity.id, "lock file", store.schema_version()).await?)
    });
    let member = Member { node: identity.id, epoch: epoch.unwrap() };
    store.membership.join(member);
    member
}

on_both_engines! {
    async fn finds_nodes_by_name_and_id(store: Arc<Store>) {
        let mut identity = identity("n1");
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

    async fn checks_in_until_the_epoch_changes(store: Arc<Store>) {
        let member = join(&store, &identity("n1")).await;
        let age = |seconds: f64| {
            let store = Arc::clone(&store);
            async move {
                let sql = "UPDATE nodes SET lastseen = lastseen - ?";
                transaction!(store.unfenced(), |tx| { Ok(tx.execute(sql, params![seconds]).await?) }).unwrap();
            }
        };
        age(20.0).await;
        let silent = async || nodes::silent(&*store, &[NodeState::Created], 15.0).await.unwrap();
        let (row, silence) = silent().await.remove(0);
        assert!(silence > 19.0, "{silence}");
        let check_in = nodes::check_in(&store, &[member], 0.5).await.unwrap();
        assert_eq!(check_in.states.get(&member.node), Some(&NodeState::Created));
        assert!((check_in.time - muster_types::time::now()).abs() < 5.0, "{check_in:?}");
        assert!(silent().await.is_empty());
        let marked = transaction!(store, |tx| { Ok(nodes::set_state(tx, &row, NodeState::Missing).await?) });
        assert!(!marked.unwrap(), "it has checked in since");
        let row = nodes::list(&*store).await.unwrap().remove(0);
        assert_eq!((row.epoch, row.clock_skew), (1, 0.5));

        transaction!(store.unfenced(), |tx| { Ok(nodes::fence(tx, member.node).await?) }).unwrap();
        age(20.0).await;
        let check_in = nodes::check_in(&store, &[member], 0.0).await.unwrap();
        assert!(check_in.states.is_empty() && check_in.lost == [member], "{check_in:?}");
        assert_eq!(silent().await.len(), 1, "a fenced daemon does not check in");
    }

    async fn silent_node_is_locked_only_if_it_has_not_returned(store: Arc<Store>) {
        use NodeState as S;
        let member = join(&store, &identity("n1")).await;
        let read = async || nodes::get(&*store, &NameOrId::Id(member.node)).await.unwrap().unwrap();
        let set_state = async |to| {
            let row = read().await;
            assert!(transaction!(store, |tx| { Ok(nodes::set_state(tx, &row, to).await?) }).unwrap());
        };
        let lock = async |row: &nodes::NodeRow| {
            transaction!(store, |tx| { Ok(nodes::lock_silent(tx, row).await?) }).unwrap()
        };
        assert!(!lock(&read().await).await, "it is up");
        set_state(S::Missing).await;
        let missing = read().await;
        assert!(lock(&missing).await && lock(&missing).await);
        set_state(S::Error).await;
        assert!(lock(&missing).await, "it is missing for longer");

        set_state(S::Stopped).await;
        assert!(!lock(&missing).await, "its daemon was stopped on purpose, so that its VMs run");
        assert!(lock(&read().await).await);
        set_state(S::Missing).await;
        for (change, what) in [("lastseen = lastseen + 1", "a check-in"), ("lastseen = lastseen - 100", "one after the clock was set back")] {
            let before = read().await;
            let sql = format!("UPDATE nodes SET {change}");
            transaction!(store, |tx| { Ok(tx.execute(&sql, &[]).await?) }).unwrap();
            assert!(!lock(&before).await, "{what}");
        }
        let before = read().await;
        let sql = "UPDATE nodes SET epoch = epoch + 1";
        transaction!(store.unfenced(), |tx| { Ok(tx.execute(sql, &[]).await?) }).unwrap();
        let locked = transaction!(store.unfenced(), |tx| { Ok(nodes::lock_silent(tx, &before).await?) });
        assert!(!locked.unwrap(), "its daemon was started");
    }

    async fn finds_other_daemons_of_a_node_or_address(store: Arc<Store>) {
        let first = identity("n1");
        join(&store, &first).await;
        let rivals = async |identity: &NodeIdentity, lock_file, seconds| {
            nodes::rivals(&*store, identity, lock_file, seconds).await.unwrap().len()
        };
        assert_eq!(rivals(&first, "copy", 15.0).await, 1);
        assert_eq!(rivals(&first, "lock file", 15.0).await, 0, "it was restarted");
        assert_eq!(rivals(&first, "copy", -1.0).await, 0, "the other one is missing");
        let mut second = identity("n2");
        assert_eq!(rivals(&second, "other", 15.0).await, 1, "same address");
        second.ip = [127, 0, 0, 2].into();
        assert_eq!(rivals(&second, "other", 15.0).await, 0);
        let simulated = NodeIdentity { simulated: true, ip: first.ip, ..second };
        assert_eq!(rivals(&simulated, "other", 15.0).await, 0);
    }
}
