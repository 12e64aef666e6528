use std::sync::Arc;

use muster_types::capacity::Capacity;
use muster_types::ids::NodeId;
use muster_types::vm::ConsolePorts;

use super::MigrationRow;
use crate::testing::{created_instance, on_both_engines};
use crate::*;

async fn begin(store: &Store, row: &instances::InstanceRow, target: NodeId) -> MigrationRow {
    let generation =
        transaction!(store, |tx| { Ok(instances::reserve_generation(tx, row).await?) }).unwrap().unwrap();
    let reserved = Capacity { cpus: 1, memory_mb: 2, disk_gb: 3 };
    let source = row.node.unwrap();
    let new = MigrationRow {
        instance: row.id,
        source,
        target,
        generation,
        cancelled: false,
        reserved,
        ports: None,
    };
    assert!(transaction!(store, |tx| { Ok(instance_migrations::insert(tx, &new).await?) }).unwrap());
    new
}

on_both_engines! {
    async fn generation_of_a_failed_migration_is_never_used_again(store: Arc<Store>) {
        let (source, target) = (NodeId::new(), NodeId::new());
        let id = created_instance(&store, source).await;
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        let first = begin(&store, &row, target).await;
        assert_eq!(first.generation, row.generation + 1);
        let again = transaction!(store, |tx| { Ok(instance_migrations::insert(tx, &first).await?) });
        assert!(!again.unwrap(), "one at a time");
        let ports = ConsolePorts { console: 31000, vdi: 31001, vdi_tls: None };
        transaction!(store, |tx| {
            assert!(instance_migrations::set_ports(tx, &first, ports).await?);
            assert!(instance_migrations::cancel(tx, id).await?);
            Ok(())
        })
        .unwrap();
        let found = instance_migrations::get(&*store, id).await.unwrap().unwrap();
        assert_eq!(found, MigrationRow { cancelled: true, ports: Some(ports), ..first.clone() });
        assert_eq!(instance_migrations::list(&*store).await.unwrap(), std::slice::from_ref(&found));
        assert_eq!(instance_migrations::without_operation(&*store).await.unwrap(), std::slice::from_ref(&found));
        assert_eq!(instances::ports(&*store, target).await.unwrap(), [31000, 31001]);
        transaction!(store, |tx| {
            assert!(instance_migrations::remove_failed(tx, &found).await?);
            assert!(!instance_migrations::remove_failed(tx, &found).await?);
            assert!(!instance_migrations::cancel(tx, id).await?);
            Ok(())
        })
        .unwrap();
        assert!(instances::ports(&*store, target).await.unwrap().is_empty());
        let second = begin(&store, &row, target).await;
        assert_eq!(second.generation, first.generation + 1);
        let moved = transaction!(store, |tx| { Ok(instances::move_to_target(tx, &first).await?) });
        assert!(!moved.unwrap(), "the first one has ended");
        let placed = transaction!(store, |tx| {
            Ok(instances::place_again(tx, &row, target, &Capacity::default()).await?)
        });
        assert!(placed.unwrap());
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        assert_eq!(row.generation, second.generation + 1);
        let moved = transaction!(store, |tx| { Ok(instances::move_to_target(tx, &second).await?) });
        assert!(!moved.unwrap(), "it was placed again");
    }

    async fn migration_moves_its_instance_once(store: Arc<Store>) {
        let (source, target) = (NodeId::new(), NodeId::new());
        let id = created_instance(&store, source).await;
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        let migration = begin(&store, &row, target).await;
        let move_it = async || {
            transaction!(store, |tx| { Ok(instances::move_to_target(tx, &migration).await?) }).unwrap()
        };
        assert!(move_it().await);
        assert!(!move_it().await);
        let moved = instances::get(&*store, id).await.unwrap().unwrap();
        assert_eq!((moved.node, moved.generation), (Some(target), migration.generation));
        let stale = transaction!(store, |tx| { Ok(instances::reserve_generation(tx, &row).await?) });
        assert_eq!(stale.unwrap(), None);
    }
}
