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

/// Returns the due operations of all namespaces.
async fn due(store: &Store, executable: &ExecutableOperations) -> Vec<operations::OperationRow> {
    let mut rows = Vec::new();
    for (namespace, _) in operations::waiting(store, executable).await.unwrap() {
        rows.extend(operations::due(store, executable, namespace.as_deref(), 10).await.unwrap());
    }
    rows
}

on_both_engines! {
    async fn lists_waiting_operations_by_namespace(store: Arc<Store>) {
        for target in ["a", "a", "b", "c"] {
            let mut new = operation(target, vec![]);
            new.namespace = Some(target).filter(|target| *target != "c").map(str::to_owned);
            transaction!(store, |tx| { Ok(operations::insert(tx, &new).await?) }).unwrap();
        }
        let executable = executable("delete_namespace");
        let mut waiting = operations::waiting(&store, &executable).await.unwrap();
        waiting.sort_by(|a, b| a.0.cmp(&b.0));
        let names: Vec<_> = waiting.iter().map(|(namespace, _)| namespace.as_deref()).collect();
        assert_eq!(names, [None, Some("a"), Some("b")]);
        let rows = operations::due(&store, &executable, Some("a"), 10).await.unwrap();
        assert!(rows.len() == 2 && rows.iter().all(|row| row.namespace.as_deref() == Some("a")));
        assert_eq!(operations::due(&store, &executable, Some("a"), 1).await.unwrap().len(), 1);
        assert_eq!(operations::due(&store, &executable, None, 10).await.unwrap().len(), 1);
        let first = operations::lease(&store, &rows[0], 60.0).await.unwrap().unwrap();
        operations::lease(&store, &rows[1], 60.0).await.unwrap().unwrap();
        assert_eq!(operations::waiting(&store, &executable).await.unwrap().len(), 2, "all of a namespace are leased");
        assert!(operations::renew(&store, &first, -1.0).await.unwrap());
        assert_eq!(operations::waiting(&store, &executable).await.unwrap().len(), 3, "a lease has expired");
    }

    async fn one_worker_leases_an_operation_until_the_lease_expires(store: Arc<Store>) {
        let handle = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("ns", vec![])).await?) }).unwrap();
        let target = ObjectRef::namespace("ns");
        assert!(operations::is_pending(&*store, &target, "delete_namespace").await.unwrap());
        assert_eq!(operations::waiting(&store, &executable("delete_namespace")).await.unwrap().len(), 1);
        assert!(due(&store, &executable("other")).await.is_empty(), "no handler for it");
        assert!(operations::waiting(&store, &executable("other")).await.unwrap().is_empty());
        let queued = due(&store, &executable("delete_namespace")).await.remove(0);
        assert_eq!((queued.id, queued.arguments.clone(), queued.step), (handle.op_uuid, json!({"n": 1}), 0));

        let mut tasks = Vec::new();
        for _ in 0..8 {
            let (store, queued) = (Arc::clone(&store), queued.clone());
            tasks.push(tokio::spawn(async move { operations::lease(&store, &queued, 60.0).await.unwrap() }));
        }
        let mut leased = Vec::new();
        for task in tasks {
            leased.extend(task.await.unwrap());
        }
        assert_eq!(leased.len(), 1, "one worker wins");
        let first = leased.remove(0);
        assert!(due(&store, &executable("delete_namespace")).await.is_empty(), "leased");
        assert!(operations::lease(&store, &first, 60.0).await.unwrap().is_none(), "not even by the same daemon");
        assert!(transaction!(store, |tx| { Ok(operations::set_step(tx, &first, 1).await?) }).unwrap());
        let other = operations::OperationRow { lease_owner: "other".into(), ..first.clone() };
        assert!(!transaction!(store, |tx| { Ok(operations::set_step(tx, &other, 2).await?) }).unwrap());
        assert!(operations::renew(&store, &first, -1.0).await.unwrap(), "the lease expires");

        let stale = due(&store, &executable("delete_namespace")).await.remove(0);
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
        let row = operations::get(&*store, queued.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.error_report), (OperationState::Error, Some(report)));
        assert!(!operations::is_pending(&*store, &target, "delete_namespace").await.unwrap());
        assert_eq!(operations::of_target(&*store, &target).await.unwrap().len(), 1);
        assert_eq!(operations::finished_before(&*store, now() + 1.0, 10).await.unwrap(), [queued.id]);
        assert!(transaction!(store, |tx| { Ok(operations::remove(tx, queued.id).await?) }).unwrap());
        assert!(operations::get(&*store, queued.id).await.unwrap().is_none());
        // The cleaner removes the references of an operation that was removed.
        assert!(!transaction!(store, |tx| { Ok(operations::remove(tx, queued.id).await?) }).unwrap());
    }

    async fn postpones_and_aborts_waiting_operations(store: Arc<Store>) {
        let first = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("a", vec![])).await?) }).unwrap();
        let second = transaction!(store, |tx| {
            Ok(operations::insert(tx, &operation("b", vec![first.clone()])).await?)
        }).unwrap();
        let row = operations::get(&*store, second.op_uuid).await.unwrap().unwrap();
        assert_eq!(row.depends_on, [first]);
        transaction!(store, |tx| { Ok(operations::postpone(tx, &row, 100.0).await?) }).unwrap();
        assert_eq!(due(&store, &executable("delete_namespace")).await.len(), 1);
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
        assert!(due(&store, &executable(vec![NodeId::new()])).await.is_empty());
        let due = due(&store, &executable(vec![NodeId::new(), node])).await.remove(0);
        let leased = operations::lease(&store, &due, 10.0).await.unwrap().unwrap();
        let progress = OperationProgress { done: 5, total: Some(7), validator: Some("\"x\"".into()), node: Some(node) };
        transaction!(store, |tx| { Ok(operations::set_progress(tx, &leased, &progress).await?) }).unwrap();
        assert_eq!(operations::get(&*store, leased.id).await.unwrap().unwrap().progress, Some(progress));
    }
}
