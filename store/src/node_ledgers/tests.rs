use std::sync::Arc;

use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn concurrent_commitments_add_up(store: Arc<Store>) {
        let (one, two) = (NodeId::new(), NodeId::new());
        assert!(node_ledgers::list(&*store).await.unwrap().is_empty());
        let tasks: Vec<_> = (0..40)
            .map(|number| {
                let store = Arc::clone(&store);
                let node = if number % 4 == 0 { two } else { one };
                tokio::spawn(async move {
                    let max_cpus = 20;
                    transaction!(store, |tx| {
                        let ledger = node_ledgers::lock(tx, node).await?;
                        if ledger.cpus == max_cpus {
                            return Ok(false);
                        }
                        let more = CommittedCapacity {
                            cpus: ledger.cpus + 1,
                            memory_mb: ledger.memory_mb + 512,
                            disk_gb: ledger.disk_gb + 3,
                            demand: ledger.demand + 0.5,
                            demand_at: 7.25,
                        };
                        node_ledgers::set(tx, node, &more).await?;
                        Ok(true)
                    })
                })
            })
            .collect();
        let mut granted = 0;
        for task in tasks {
            granted += usize::from(task.await.unwrap().unwrap());
        }
        assert_eq!(granted, 30, "twenty of the first node, ten of the second");
        let ledgers = node_ledgers::list(&*store).await.unwrap();
        let full = CommittedCapacity { cpus: 20, memory_mb: 20 * 512, disk_gb: 60, demand: 10.0, demand_at: 7.25 };
        assert_eq!(ledgers[&one], full);
        assert_eq!(ledgers[&two].cpus, 10);
        // A transaction that fails changes nothing.
        let refused: Result<(), muster_types::Error> = transaction!(store, |tx| {
            node_ledgers::lock(tx, one).await?;
            node_ledgers::set(tx, one, &CommittedCapacity::default()).await?;
            Err(muster_types::Error::Conflict("no".into()).into())
        });
        assert!(refused.is_err());
        assert_eq!(node_ledgers::list(&*store).await.unwrap()[&one], full);
    }

    async fn lock_all_creates_missing_ledgers(store: Arc<Store>) {
        let (existing, new) = (NodeId::new(), NodeId::new());
        let full = CommittedCapacity { cpus: 7, ..CommittedCapacity::default() };
        transaction!(store, |tx| {
            node_ledgers::lock(tx, existing).await?;
            Ok(node_ledgers::set(tx, existing, &full).await?)
        })
        .unwrap();
        let ledger = transaction!(store, |tx| { Ok(node_ledgers::lock_all(tx, &[new]).await?) }).unwrap();
        assert_eq!(ledger, [(existing, full), (new, CommittedCapacity::default())].into());
        assert_eq!(node_ledgers::list(&*store).await.unwrap(), ledger);
    }
}
