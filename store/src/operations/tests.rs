use std::sync::Arc;

use muster_types::ids::NodeId;
use muster_types::object::ObjectRef;
use muster_types::operation::{ErrorReport, OperationProgress, OperationState};
use muster_types::time::now;
use serde_json::{Map, json};

use super::ExecutableOperations;
use crate::testing::{on_both_engines, operation};
use crate::*;

fn executable(name: &'static str) -> ExecutableOperations {
    ExecutableOperations { names: vec![name], nodes: vec![NodeId::new()] }
}

on_both_engines! {
    async fn one_worker_leases_an_operation_until_the_lease_expires(store: Arc<Store>) {
        let handle = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("ns", vec![])).await?) }).unwrap();
        let target = ObjectRef::namespace("ns");
        assert!(operations::is_pending(&*store, &target, "delete_namespace").await.unwrap());
        assert!(operations::next_due(&store, &executable("delete_namespace")).await.unwrap().is_some());
        assert!(operations::due(&store, &executable("other"), 10).await.unwrap().is_empty(), "no handler for it");
        assert!(operations::next_due(&store, &executable("other")).await.unwrap().is_none());
        let due = operations::due(&store, &executable("delete_namespace"), 10).await.unwrap().remove(0);
        assert_eq!((due.id, due.arguments.clone(), due.step), (handle.op_uuid, json!({"n": 1}), 0));

        let mut tasks = Vec::new();
        for _ in 0..8 {
            let (store, due) = (Arc::clone(&store), due.clone());
            tasks.push(tokio::spawn(async move { operations::lease(&store, &due, 60.0).await.unwrap() }));
        }
        let mut leased = Vec::new();
        for task in tasks {
            leased.extend(task.await.unwrap());
        }
        assert_eq!(leased.len(), 1, "one worker wins");
        let first = leased.remove(0);
        assert!(operations::due(&store, &executable("delete_namespace"), 10).await.unwrap().is_empty(), "leased");
        assert!(operations::lease(&store, &first, 60.0).await.unwrap().is_none(), "not even by the same daemon");
        assert!(transaction!(store, |tx| { Ok(operations::set_step(tx, &first, 1).await?) }).unwrap());
        let other = operations::OperationRow { lease_owner: "other".into(), ..first.clone() };
        assert!(!transaction!(store, |tx| { Ok(operations::set_step(tx, &other, 2).await?) }).unwrap());
        assert!(operations::renew(&store, &first, -1.0).await.unwrap(), "the lease expires");

        let stale = operations::due(&store, &executable("delete_namespace"), 10).await.unwrap().remove(0);
        assert_eq!((stale.step, stale.attempts), (1, 1));
        let second = operations::lease(&store, &stale, 60.0).await.unwrap().unwrap();
        assert_eq!(second.attempts, 2);
        assert!(!operations::renew(&store, &first, 60.0).await.unwrap(), "the first worker has lost it");
        let report = ErrorReport { code: "x.y".into(), message: "why".into(), details: Map::new() };
        let lost = transaction!(store, |tx| {
            Ok(operations::release(tx, &first, OperationState::Complete, 0.0, None).await?)
        }).unwrap();
        assert!(!lost);
        let ended = transaction!(store, |tx| {
            Ok(operations::release(tx, &second, OperationState::Error, 0.0, Some(&report)).await?)
        }).unwrap();
        assert!(ended);
        let row = operations::get(&*store, due.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.error_report), (OperationState::Error, Some(report)));
        assert!(!operations::is_pending(&*store, &target, "delete_namespace").await.unwrap());
        assert_eq!(operations::of_target(&*store, &target).await.unwrap().len(), 1);
        assert_eq!(operations::finished_before(&*store, now() + 1.0, 10).await.unwrap(), [due.id]);
        assert!(transaction!(store, |tx| { Ok(operations::remove(tx, due.id).await?) }).unwrap());
        assert!(operations::get(&*store, due.id).await.unwrap().is_none());
        // The cleaner removes the references of an operation that was removed.
        assert!(!transaction!(store, |tx| { Ok(operations::remove(tx, due.id).await?) }).unwrap());
    }

    async fn postpones_and_aborts_waiting_operations(store: Arc<Store>) {
        let first = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("a", vec![])).await?) }).unwrap();
        let second = transaction!(store, |tx| {
            Ok(operations::insert(tx, &operation("b", vec![first.clone()])).await?)
        }).unwrap();
        let row = operations::get(&*store, second.op_uuid).await.unwrap().unwrap();
        assert_eq!(row.depends_on, [first]);
        transaction!(store, |tx| { Ok(operations::postpone(tx, &row, now() + 100.0).await?) }).unwrap();
        assert_eq!(operations::due(&store, &executable("delete_namespace"), 10).await.unwrap().len(), 1);
        let report = ErrorReport { code: "dependency.failed".into(), message: "why".into(), details: Map::new() };
        assert!(!transaction!(store, |tx| { Ok(operations::abort(tx, &row, &report).await?) }).unwrap(), "stale");
        let row = operations::get(&*store, second.op_uuid).await.unwrap().unwrap();
        assert!(transaction!(store, |tx| { Ok(operations::abort(tx, &row, &report).await?) }).unwrap());
    }

    async fn only_its_node_leases_an_operation_and_records_progress(store: Arc<Store>) {
        let node = NodeId::new();
        let mut new = operation("alpha", vec![]);
        new.node = Some(node);
        transaction!(store, |tx| { Ok(operations::insert(tx, &new).await?) }).unwrap();
        let executable = |nodes| ExecutableOperations { names: vec!["delete_namespace"], nodes };
        assert!(operations::due(&store, &executable(vec![NodeId::new()]), 10).await.unwrap().is_empty());
        assert!(operations::next_due(&store, &executable(vec![NodeId::new()])).await.unwrap().is_none());
        let due = operations::due(&store, &executable(vec![NodeId::new(), node]), 10).await.unwrap().remove(0);
        let leased = operations::lease(&store, &due, 10.0).await.unwrap().unwrap();
        let progress = OperationProgress { done: 5, total: Some(7), validator: Some("\"x\"".into()), node: Some(node) };
        transaction!(store, |tx| { Ok(operations::set_progress(tx, &leased, &progress).await?) }).unwrap();
        assert_eq!(operations::get(&*store, leased.id).await.unwrap().unwrap().progress, Some(progress));
    }
}
