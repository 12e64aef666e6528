use std::sync::Arc;

use muster_types::Error;
use muster_types::blob::CopyState;
use muster_types::ids::{BlobId, NodeId};
use muster_types::operation::OperationState;

use super::Membership;
use crate::leases::LeaseOwner;
use crate::nodes::tests::{identity, join};
use crate::operations::ExecutableOperations;
use crate::testing::{event, on_both_engines, operation};
use crate::*;

#[test]
fn measures_clock_skew_by_what_the_round_trip_excludes() {
    let membership = Membership::default();
    assert_eq!(membership.observe_clock(100.0, 94.0, 101.0), 6.0);
    let text = membership.require_clock().unwrap_err().to_string();
    assert!(text.contains("6.0 seconds ahead of that of the database"), "{text}");
    assert_eq!(membership.observe_clock(100.0, 106.0, 101.0), -5.0);
    membership.observe_clock(100.0, 106.5, 101.0);
    assert!(membership.require_clock().unwrap_err().to_string().contains("5.5 seconds behind"));
    membership.observe_clock(100.0, 100.0, 100.0);
    assert!(membership.require_clock().is_ok());
}

#[test]
fn long_round_trip_does_not_change_the_clock_skew() {
    let membership = Membership::default();
    assert_eq!(membership.observe_clock(100.0, 99.5, 100.0), 0.5);
    // The database hangs before or after it reads its clock.
    assert_eq!(membership.observe_clock(200.0, 199.5, 230.0), 0.5);
    assert_eq!(membership.observe_clock(300.0, 329.5, 330.0), 0.5);
    // Although it takes long, this one excludes a correct clock.
    assert_eq!(membership.observe_clock(400.0, 100.0, 430.0), 300.0);
    // The clock of this host was set back during the query.
    assert_eq!(membership.observe_clock(500.0, 450.0, 450.0), 50.0);
    assert_eq!(membership.observe_clock(600.0, 600.0, 600.0), 0.0);
}

on_both_engines! {
    async fn rejects_every_write_after_the_last_node_was_fenced(store: Arc<Store>) {
        let (first, second) = (join(&store, &identity("n1")).await, join(&store, &identity("n2")).await);
        let owner = LeaseOwner::new("n1");
        assert!(leases::acquire(&store, "job", &owner, 60.0).await.unwrap());
        transaction!(store, |tx| { Ok(operations::insert(tx, &operation("a", vec![])).await?) }).unwrap();
        let executable = ExecutableOperations { names: vec!["delete_namespace"], nodes: vec![NodeId::new()] };
        let row = operations::due(&store, &executable, Some("a"), 1).await.unwrap().remove(0);
        let leased = operations::lease(&store, &row, 60.0).await.unwrap().unwrap();

        let fence = async |node| {
            transaction!(store.unfenced(), |tx| { Ok(nodes::fence(tx, node).await?) }).unwrap();
        };
        fence(first.node).await;
        assert!(operations::renew(&store, &leased, 60.0).await.unwrap(), "another node is a member");
        assert!(!store.membership.is_member(first.node) && store.membership.is_member(second.node));
        assert!(store.membership.require().is_ok() && store.membership.lost().borrow().is_none());

        fence(second.node).await;
        let stale = |error: Error| matches!(error, Error::StaleEpoch(_));
        assert!(stale(operations::renew(&store, &leased, 60.0).await.unwrap_err()));
        assert!(stale(leases::acquire(&store, "job", &owner, 60.0).await.unwrap_err()));
        assert!(stale(leases::release(&store, "job", &owner).await.unwrap_err()));
        let step = transaction!(store, |tx| { Ok(operations::set_step(tx, &leased, 1).await?) });
        assert!(stale(step.unwrap_err()));
        let released = transaction!(store, |tx| {
            Ok(operations::release(tx, &leased, OperationState::Complete, 0.0, None).await?)
        });
        assert!(stale(released.unwrap_err()));
        let location = transaction!(store, |tx| {
            Ok(blob_locations::set(tx, BlobId::new(), second.node, CopyState::Complete).await?)
        });
        assert!(stale(location.unwrap_err()));
        let ledger = transaction!(store, |tx| { Ok(node_ledgers::lock(tx, second.node).await?) });
        assert!(stale(ledger.unwrap_err()));
        assert!(stale(store.membership.require().unwrap_err()));
        assert!(store.membership.lost().borrow().as_ref().unwrap().contains(&second.node.to_string()));

        // Nothing of it was committed, but its events are.
        let row = operations::get(&*store, leased.id).await.unwrap().unwrap();
        assert_eq!((row.step, row.state), (0, OperationState::Executing));
        assert!(node_ledgers::list(&*store).await.unwrap().is_empty());
        let object = muster_types::object::ObjectRef::namespace("a");
        let stored = event(&object, muster_types::event::EventType::Status, "stopped", 0.0);
        events::insert(&store, &[stored]).await.unwrap();
        assert_eq!(events::list(&*store, &object, None, 10).await.unwrap().len(), 1);
    }
}
