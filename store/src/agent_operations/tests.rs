use std::collections::BTreeSet;
use std::sync::Arc;

use muster_types::agent_operation::{AgentCommand, AgentOperationState, ExpiryReason};
use muster_types::ids::{AgentOperationId, BlobId, InstanceId, NodeId};
use muster_types::instance::InstanceState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use serde_json::json;

use AgentOperationState as S;

use super::{AgentOperationOutcome, AgentOperationRow, CommandResults, NewAgentOperation, QueueLimits};
use crate::testing::{created_instance, on_both_engines, set_instance_state};
use crate::*;

fn new(instance: InstanceId, state: S) -> NewAgentOperation {
    NewAgentOperation {
        id: AgentOperationId::new(),
        instance,
        namespace: "alpha".into(),
        state,
        commands: vec![AgentCommand::Execute { commandline: "echo ü".into(), block_for_result: true }],
        deadline: 0.0,
        progress_timeout: 0.0,
        request_id: Some("a request".into()),
    }
}

async fn insert(store: &Store, new: &NewAgentOperation) -> bool {
    let row = transaction!(store, |tx| {
        Ok(agent_operations::insert(tx, new, QueueLimits { operations: 100, bytes: 1 << 20 }).await?)
    })
    .unwrap();
    assert_eq!(row, agent_operations::get(store, new.id).await.unwrap(), "returns the stored row");
    row.is_some()
}

async fn get(store: &Store, id: AgentOperationId) -> AgentOperationRow {
    agent_operations::get(store, id).await.unwrap().unwrap()
}

async fn set_state(
    store: &Store,
    id: AgentOperationId,
    from: S,
    to: S,
    outcome: &AgentOperationOutcome<'_>,
) -> bool {
    transaction!(store, |tx| { Ok(agent_operations::set_state(tx, id, from, to, outcome).await?) }).unwrap()
}

async fn begin(store: &Store, id: AgentOperationId, from: S, boot: Option<&str>) -> bool {
    transaction!(store, |tx| { Ok(agent_operations::begin(tx, id, from, boot).await?) }).unwrap()
}

on_both_engines! {
    async fn stores_commands_and_results(store: Arc<Store>) {
        let mut new = new(InstanceId::new(), S::Queued);
        new.deadline = 1_700_000_000.25;
        new.progress_timeout = 0.5;
        assert!(insert(&store, &new).await);
        let row = get(&store, new.id).await;
        assert_eq!((row.sequence, row.state, row.attempts), (1, S::Queued, 0));
        assert_eq!((&row.commands, &row.request_id), (&new.commands, &new.request_id));
        assert_eq!((row.deadline, row.progress_timeout, row.last_progress), (1_700_000_000.25, 0.5, None));
        assert!(begin(&store, new.id, S::Queued, Some("boot 1")).await);
        assert!(!begin(&store, new.id, S::Queued, Some("boot 2")).await, "already begun");
        let row = get(&store, new.id).await;
        assert_eq!((row.state, row.attempts, row.sent_boot.as_deref()), (S::Executing, 1, Some("boot 1")));
        assert!(row.last_progress.is_some());
        transaction!(store, |tx| { Ok(agent_operations::set_progress(tx, new.id, 12.5).await?) }).unwrap();
        let changed = row.updated;
        assert!(begin(&store, new.id, S::Executing, None).await);
        let row = get(&store, new.id).await;
        assert!(row.attempts == 2 && row.last_progress > Some(12.5));
        assert!((row.updated - changed).abs() < 1e-6, "its state did not change");
        let stdout = "ü".repeat(1 << 20);
        let results = CommandResults::from([("0".into(), json!({ "stdout": stdout }).as_object().unwrap().clone())]);
        let outcome = AgentOperationOutcome { results: Some(&results), error: Some("why"), expiry: None };
        assert!(set_state(&store, new.id, S::Executing, S::Error, &outcome).await);
        let row = get(&store, new.id).await;
        assert_eq!((row.results, row.error_message.as_deref(), row.sent_boot), (results, Some("why"), None));
    }

    async fn only_the_first_outcome_counts(store: Arc<Store>) {
        let new = new(InstanceId::new(), S::Preflight);
        assert!(insert(&store, &new).await);
        assert!(set_state(&store, new.id, S::Preflight, S::Queued, &AgentOperationOutcome::default()).await);
        assert!(begin(&store, new.id, S::Queued, Some("boot 1")).await);
        let expiry = AgentOperationOutcome { expiry: Some(ExpiryReason::Progress), ..AgentOperationOutcome::default() };
        assert!(set_state(&store, new.id, S::Executing, S::Expired, &expiry).await);
        assert!(!set_state(&store, new.id, S::Executing, S::Complete, &AgentOperationOutcome::default()).await, "already expired");
        assert!(!begin(&store, new.id, S::Executing, None).await);
        let wrong = transaction!(store, |tx| {
            Ok(agent_operations::set_state(tx, new.id, S::Expired, S::Queued, &AgentOperationOutcome::default()).await?)
        });
        assert!(wrong.is_err(), "invalid transition");
        assert!(set_state(&store, new.id, S::Expired, S::Deleted, &AgentOperationOutcome::default()).await);
        let row = get(&store, new.id).await;
        assert_eq!((row.state, row.expiry_reason), (S::Deleted, Some(ExpiryReason::Progress)));
        assert_eq!(row.sent_boot.as_deref(), Some("boot 1"), "its command must still be stopped");
    }

    async fn queues_operations_per_instance(store: Arc<Store>) {
        let node = NodeId::new();
        let (instance, other) = (created_instance(&store, node).await, created_instance(&store, NodeId::new()).await);
        assert_eq!(agent_operations::queue_of(&*store, instance).await.unwrap().rows, vec![]);
        let mut ids = Vec::new();
        for state in [S::Preflight, S::Queued, S::Queued] {
            let new = new(instance, state);
            assert!(insert(&store, &new).await);
            ids.push(new.id);
        }
        assert!(insert(&store, &new(other, S::Queued)).await);
        let queue = agent_operations::queue_of(&*store, instance).await.unwrap();
        assert_eq!(queue.rows.iter().map(|row| row.id).collect::<Vec<_>>(), ids);
        assert_eq!((queue.node, queue.is_created), (Some(node), true));
        assert_eq!(agent_operations::instances_with_unfinished(&*store, &[node, NodeId::new()]).await.unwrap(), [instance]);
        assert!(set_state(&store, ids[1], S::Queued, S::Deleted, &AgentOperationOutcome::default()).await);
        let unfinished = agent_operations::unfinished(&*store, &[instance, other]).await.unwrap();
        assert_eq!(unfinished.len(), 3);
        let page = |all, after| agent_operations::page(&*store, instance, all, after, 2);
        assert_eq!(page(false, None).await.unwrap().iter().map(|row| row.id).collect::<Vec<_>>(), [ids[0], ids[2]]);
        let first = page(true, None).await.unwrap();
        assert_eq!(first.iter().map(|row| row.sequence).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(page(true, Some(2)).await.unwrap().iter().map(|row| row.id).collect::<Vec<_>>(), [ids[2]]);
        assert!(set_instance_state(&store, instance, InstanceState::Created, InstanceState::DeleteWait).await);
        assert!(!agent_operations::queue_of(&*store, instance).await.unwrap().is_created);
    }

    async fn rejects_operations_beyond_the_size_limit(store: Arc<Store>) {
        let instance = InstanceId::new();
        let bytes = serde_json::to_string(&new(instance, S::Queued).commands).unwrap().len();
        let room = QueueLimits { operations: 100, bytes: i64::try_from(2 * bytes + 1).unwrap() };
        for fits in [true, true, false] {
            let new = new(instance, S::Queued);
            let row = transaction!(store, |tx| { Ok(agent_operations::insert(tx, &new, room).await?) }).unwrap();
            assert_eq!(row.is_some(), fits);
        }
        // An empty queue accepts commands of any size.
        let (alone, none) = (new(InstanceId::new(), S::Queued), QueueLimits { operations: 1, bytes: 0 });
        assert!(transaction!(store, |tx| { Ok(agent_operations::insert(tx, &alone, none).await?) }).unwrap().is_some());
    }

    async fn rejects_operations_beyond_the_count_limit(store: Arc<Store>) {
        let instance = InstanceId::new();
        let insert_limited = |new: NewAgentOperation| {
            let store = Arc::clone(&store);
            async move { transaction!(store, |tx| { Ok(agent_operations::insert(tx, &new, QueueLimits { operations: 2, bytes: 1 << 20 }).await?.is_some()) }).unwrap() }
        };
        let first = new(instance, S::Queued);
        assert!(insert_limited(first.clone()).await && insert_limited(new(instance, S::Preflight)).await);
        assert!(!insert_limited(new(instance, S::Queued)).await);
        assert!(insert_limited(new(InstanceId::new(), S::Queued)).await, "each instance has its own queue");
        assert!(begin(&store, first.id, S::Queued, None).await);
        assert!(!insert_limited(new(instance, S::Queued)).await, "a running operation counts");
        assert!(set_state(&store, first.id, S::Executing, S::Complete, &AgentOperationOutcome::default()).await);
        let last = new(instance, S::Queued);
        assert!(insert_limited(last.clone()).await);
        assert_eq!(get(&store, last.id).await.sequence, 3, "rejected operations leave no gap");
    }

    async fn finds_overdue_operations(store: Arc<Store>) {
        let time = now();
        let with = |deadline: f64, progress_timeout: f64| NewAgentOperation {
            deadline,
            progress_timeout,
            ..new(InstanceId::new(), S::Queued)
        };
        let (expired, later) = (with(time - 10.0, 30.0), with(time + 100.0, 0.0));
        let (without_limit, progress_only) = (with(0.0, 0.0), with(0.0, 30.0));
        for new in [&expired, &later, &without_limit, &progress_only] {
            assert!(insert(&store, new).await);
        }
        let found = |time: f64, max_age: f64| {
            let store = Arc::clone(&store);
            async move {
                let rows = agent_operations::overdue(&*store, time, max_age, 100).await.unwrap();
                rows.into_iter().map(|row| row.id).collect::<Vec<_>>()
            }
        };
        assert_eq!(found(time, 60.0).await, [expired.id]);
        let overdue = found(time + 90.0, 60.0).await;
        assert!(overdue.len() == 2 && overdue.contains(&expired.id) && overdue.contains(&without_limit.id), "{overdue:?}");
        assert!(set_state(&store, expired.id, S::Queued, S::Expired, &AgentOperationOutcome::default()).await);
        assert_eq!(found(time, 60.0).await, []);
    }

    async fn finds_cancelled_commands_until_they_are_stopped(store: Arc<Store>) {
        let node = NodeId::new();
        let instance = created_instance(&store, node).await;
        let (cancelled, done) = (new(instance, S::Queued), new(instance, S::Queued));
        for new in [&cancelled, &done] {
            assert!(insert(&store, new).await);
            assert!(begin(&store, new.id, S::Queued, Some("boot 1")).await);
        }
        assert!(set_state(&store, cancelled.id, S::Executing, S::Deleted, &AgentOperationOutcome::default()).await);
        assert!(set_state(&store, done.id, S::Executing, S::Complete, &AgentOperationOutcome::default()).await);
        assert!(set_state(&store, done.id, S::Complete, S::Deleted, &AgentOperationOutcome::default()).await);
        let found = agent_operations::cancelled_in_flight(&*store, &[node], None).await.unwrap();
        assert_eq!(found.iter().map(|(row, node)| (row.id, *node)).collect::<Vec<_>>(), [(cancelled.id, node)]);
        transaction!(store, |tx| { Ok(agent_operations::clear_sent(tx, cancelled.id).await?) }).unwrap();
        let elsewhere = agent_operations::cancelled_in_flight(&*store, &[node], Some(InstanceId::new())).await.unwrap();
        assert_eq!(elsewhere, []);
        assert_eq!(agent_operations::cancelled_in_flight(&*store, &[node], Some(instance)).await.unwrap(), []);
    }

    async fn removes_only_finished_operations(store: Arc<Store>) {
        let new = new(InstanceId::new(), S::Queued);
        assert!(insert(&store, &new).await);
        let remove = || async { transaction!(store, |tx| { Ok(agent_operations::remove(tx, new.id).await?) }).unwrap() };
        let later = now() + 10.0;
        assert!(!remove().await);
        assert_eq!(agent_operations::finished_before(&*store, later, 10).await.unwrap(), []);
        assert!(set_state(&store, new.id, S::Queued, S::Deleted, &AgentOperationOutcome::default()).await);
        assert_eq!(agent_operations::finished_before(&*store, now() - 10.0, 10).await.unwrap(), []);
        assert_eq!(agent_operations::finished_before(&*store, later, 10).await.unwrap(), [new.id]);
        assert!(remove().await);
        assert_eq!(agent_operations::get(&*store, new.id).await.unwrap(), None);
    }

    async fn fails_and_deletes_all_operations_of_an_instance(store: Arc<Store>) {
        let (instance, other) = (InstanceId::new(), new(InstanceId::new(), S::Queued));
        let (waiting, done) = (new(instance, S::Preflight), new(instance, S::Queued));
        let blob = ObjectRef::new(ObjectType::Blob, BlobId::new());
        for new in [&other, &waiting, &done] {
            assert!(insert(&store, new).await);
            let source = ObjectRef::new(ObjectType::AgentOperation, new.id);
            transaction!(store, |tx| { Ok(references::insert(tx, &source, "agent_input", None, &blob).await?) }).unwrap();
        }
        assert!(begin(&store, done.id, S::Queued, None).await);
        assert!(set_state(&store, done.id, S::Executing, S::Complete, &AgentOperationOutcome::default()).await);
        let sources = || async {
            let references = references::of_object(&*store, &blob).await.unwrap();
            references.to.values().flatten().map(|found| found.source_uuid.clone()).collect::<BTreeSet<_>>()
        };
        transaction!(store, |tx| { Ok(agent_operations::fail_all(tx, instance, "reason").await?) }).unwrap();
        let row = get(&store, waiting.id).await;
        assert_eq!((row.state, row.error_message.as_deref()), (S::Error, Some("reason")));
        assert_eq!(get(&store, done.id).await.state, S::Complete);
        assert_eq!(sources().await, BTreeSet::from([done.id.to_string(), other.id.to_string()]));
        transaction!(store, |tx| { Ok(agent_operations::delete_all(tx, instance).await?) }).unwrap();
        for id in [waiting.id, done.id] {
            assert_eq!(get(&store, id).await.state, S::Deleted);
        }
        assert_eq!(get(&store, other.id).await.state, S::Queued);
        assert_eq!(sources().await, BTreeSet::from([other.id.to_string()]));
    }
}
