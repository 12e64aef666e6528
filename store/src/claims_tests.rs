//! What namespaces were promised, on both engines.

use std::sync::Arc;

use muster_types::ids::{ClaimId, NodeId};
use muster_types::time::now;

use super::claims::ClaimRow;
use super::instances_tests::{add, new};
use super::tests::on_both_engines;
use super::*;
use crate::instances::Claimed;
use muster_types::capacity::{Capacity, CommittedCapacity};

fn amount(cpus: i64, memory_mb: i64, disk_gb: i64) -> Capacity {
    Capacity { cpus, memory_mb, disk_gb }
}

fn claim(namespace: &str, expires: f64) -> ClaimRow {
    ClaimRow {
        id: ClaimId::new(),
        namespace: namespace.into(),
        limit: amount(8, 1 << 40, i64::MAX),
        used: amount(3, 1024, 5),
        expires,
        updated: now(),
    }
}

async fn put(store: &Store, row: &ClaimRow) {
    transaction!(store, |tx| { Ok(claims::insert(tx, row).await?) }).unwrap();
}

on_both_engines! {
    async fn a_claim_is_found_in_its_namespace_until_it_is_removed(store: Arc<Store>) {
        let late = ClaimRow { updated: 5.25, ..claim("ci", 7.5) };
        let (live, other) = (claim("ci", now() + 1e9), claim("Ci", now() + 1e9));
        for row in [&late, &live, &other] {
            put(&store, row).await;
        }
        assert_eq!(claims::list(&*store, "ci").await.unwrap(), [late.clone(), live.clone()]);
        assert_eq!(claims::get(&*store, "ci", live.id).await.unwrap().as_ref(), Some(&live));
        assert_eq!(claims::get(&*store, "Ci", live.id).await.unwrap(), None);
        let mut active = vec![live.clone(), other.clone()];
        active.sort_by_key(|row| row.id.to_string());
        assert_eq!(claims::active(&*store, now()).await.unwrap(), active);
        let held = transaction!(store, |tx| { Ok(claims::hold_active(tx, now()).await?) }).unwrap();
        assert_eq!(held, active);
        let changed =
            ClaimRow { limit: amount(1, 2, 3), used: amount(4, 5, 6), expires: 1e10, updated: 9.25, ..live.clone() };
        let (met, missed) = transaction!(store, |tx| {
            claims::remove(tx, late.id).await?;
            Ok((claims::set(tx, &changed).await?, claims::set(tx, &late).await?))
        })
        .unwrap();
        assert!(met && !missed, "what is gone does not come back");
        assert_eq!(claims::list(&*store, "ci").await.unwrap(), [changed]);
        transaction!(store, |tx| { Ok(claims::end_of(tx, "ci").await?) }).unwrap();
        assert!(!claims::list(&*store, "ci").await.unwrap()[0].is_active(now()));
        assert_eq!(claims::active(&*store, now()).await.unwrap(), [other], "names are compared byte by byte");
    }

    async fn only_an_active_claim_gets_back_what_was_used_and_never_more(store: Arc<Store>) {
        let (late, live, other) = (claim("ci", 7.5), claim("ci", now() + 1e9), claim("b", now() + 1e9));
        for row in [&late, &live, &other] {
            put(&store, row).await;
        }
        for (less, left) in [(amount(1, 24, 0), amount(2, 1000, 5)), (amount(5, 1000, 2), amount(0, 0, 3))] {
            transaction!(store, |tx| { Ok(claims::give_back(tx, "ci", &less).await?) }).unwrap();
            assert_eq!(claims::get(&*store, "ci", live.id).await.unwrap().unwrap().used, left);
        }
        assert_eq!(claims::get(&*store, "ci", late.id).await.unwrap(), Some(late));
        assert_eq!(claims::get(&*store, "b", other.id).await.unwrap(), Some(other));
    }

    async fn what_a_namespace_holds_is_the_sum_of_its_instances(store: Arc<Store>) {
        assert_eq!(instances::claimed_of(&*store, "alpha").await.unwrap(), Claimed::default());
        let node = Some(NodeId::new());
        let ours = [new("one", "alpha", node), new("two", "alpha", node)];
        for one in &ours {
            add(&store, one).await;
        }
        add(&store, &new("one", "beta", node)).await;
        let both = Claimed { cpus: 4, memory_mb: 2 << 20, disk_gb: 16 };
        assert_eq!(instances::claimed_of(&*store, "alpha").await.unwrap(), both);
        transaction!(store, |tx| { Ok(instances::unclaim(tx, ours[0].id).await?) }).unwrap();
        let one = Claimed { cpus: 2, memory_mb: 1 << 20, disk_gb: 8 };
        assert_eq!(instances::claimed_of(&*store, "alpha").await.unwrap(), one);
    }

    async fn the_ledgers_of_all_nodes_are_held_those_without_one_too(store: Arc<Store>) {
        let (old, fresh) = (NodeId::new(), NodeId::new());
        let full = CommittedCapacity { cpus: 7, ..CommittedCapacity::default() };
        transaction!(store, |tx| {
            node_claims::hold(tx, old).await?;
            Ok(node_claims::set(tx, old, &full).await?)
        })
        .unwrap();
        let held = transaction!(store, |tx| { Ok(node_claims::hold_all(tx, &[fresh]).await?) }).unwrap();
        assert_eq!(held, [(old, full), (fresh, CommittedCapacity::default())].into());
        assert_eq!(node_claims::list(&*store).await.unwrap(), held);
    }

    async fn what_is_charged_at_once_adds_up(store: Arc<Store>) {
        let row = ClaimRow { used: Capacity::default(), ..claim("ci", now() + 1e9) };
        put(&store, &row).await;
        let charges: Vec<_> = (0..20)
            .map(|_| {
                let store = Arc::clone(&store);
                tokio::spawn(async move {
                    transaction!(store, |tx| {
                        let held = claims::hold_active(tx, now()).await?.remove(0);
                        let row = ClaimRow { used: held.used.plus(&amount(1, 512, 2)), ..held };
                        Ok(claims::set(tx, &row).await?)
                    })
                })
            })
            .collect();
        for charge in charges {
            assert!(charge.await.unwrap().unwrap());
        }
        let used = claims::get(&*store, "ci", row.id).await.unwrap().unwrap().used;
        assert_eq!(used, amount(20, 20 * 512, 40));
    }
}
