use std::sync::Arc;

use muster_types::ids::NodeId;
use muster_types::replica::ReplicaState;

use super::ReplicaRow;
use crate::instances::InstanceSpec;
use crate::testing::{created_instance, on_both_engines};
use crate::*;

on_both_engines! {
    async fn replica_only_advances_and_is_restored_once(store: Arc<Store>) {
        let (source, target) = (NodeId::new(), NodeId::new());
        let id = created_instance(&store, source).await;
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        let replicated = async |nodes: &[NodeId]| instance_replicas::of_nodes(&*store, nodes).await.unwrap().0;
        assert!(replicated(&[source]).await.is_empty());
        let spec = InstanceSpec { replicas: 1, ..row.spec.clone() };
        transaction!(store, |tx| { Ok(instances::set_spec(tx, id, &spec, &row.disks).await?) }).unwrap();
        let found = replicated(&[source, target]).await;
        assert_eq!(found.iter().map(|row| row.id).collect::<Vec<_>>(), [id]);
        assert!(replicated(&[target]).await.is_empty());
        let new = ReplicaRow {
            instance: id,
            node: target,
            state: ReplicaState::Initial,
            reserved_disk_gb: 3,
            generation: 1,
            last_complete: None,
            bytes_behind: None,
            error: None,
        };
        transaction!(store, |tx| {
            assert!(instance_replicas::insert(tx, &new).await?);
            assert!(!instance_replicas::begin_restore(tx, &new).await?, "it has no copy");
            Ok(())
        })
        .unwrap();
        let again = transaction!(store, |tx| { Ok(instance_replicas::insert(tx, &new).await?) });
        assert!(!again.unwrap(), "one on each node");
        transaction!(store, |tx| {
            instance_replicas::set_error(tx, &new, "the node is full").await?;
            assert!(instance_replicas::set_complete(tx, &new, 2, 7.5, Some(0)).await?);
            assert!(!instance_replicas::set_complete(tx, &new, 2, 7.0, None).await?, "an earlier point in time");
            Ok(())
        })
        .unwrap();
        let copied = ReplicaRow {
            state: ReplicaState::Complete,
            generation: 2,
            last_complete: Some(7.5),
            bytes_behind: Some(0),
            ..new.clone()
        };
        let complete = ReplicaRow { bytes_behind: Some(1 << 40), ..copied.clone() };
        transaction!(store, |tx| {
            instance_replicas::set_bytes_behind(tx, &copied, complete.bytes_behind).await?;
            // Measured before the last copy.
            instance_replicas::set_bytes_behind(tx, &new, Some(5)).await?;
            Ok(())
        })
        .unwrap();
        for nodes in [[source].as_slice(), &[source, target]] {
            assert_eq!(instance_replicas::of_nodes(&*store, nodes).await.unwrap().1, std::slice::from_ref(&complete));
        }
        assert!(instance_replicas::of_nodes(&*store, &[target]).await.unwrap().1.is_empty(), "nothing to remove");
        let details = instances::details(&*store, &[id]).await.unwrap();
        assert_eq!(details.replicas, [(complete.clone(), None)]);
        transaction!(store, |tx| {
            instance_replicas::delete_others(tx, id, Some(target)).await?;
            assert!(!instance_replicas::remove(tx, &new).await?, "it is in use");
            assert!(instance_replicas::begin_restore(tx, &new).await?);
            assert!(!instance_replicas::begin_restore(tx, &new).await?);
            assert!(!instance_replicas::set_complete(tx, &new, 2, 9.0, None).await?);
            instance_replicas::delete_others(tx, id, None).await?;
            Ok(())
        })
        .unwrap();
        let deleting = instance_replicas::of_nodes(&*store, &[target]).await.unwrap().1;
        assert_eq!((deleting[0].state, deleting[0].reserved_disk_gb), (ReplicaState::Deleting, 0));
        transaction!(store, |tx| {
            assert!(instance_replicas::remove(tx, &new).await?);
            instance_replicas::remove_of_node(tx, target).await?;
            Ok(())
        })
        .unwrap();
        assert!(instance_replicas::of_instance(&*store, id).await.unwrap().is_empty());
    }
}
