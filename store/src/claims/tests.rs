use std::sync::Arc;

use muster_types::capacity::Capacity;
use muster_types::ids::ClaimId;
use muster_types::time::now;

use super::ClaimRow;
use crate::testing::on_both_engines;
use crate::*;

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
    async fn finds_claims_in_their_namespace_until_removed(store: Arc<Store>) {
        let expired = ClaimRow { updated: 5.25, ..claim("ci", 7.5) };
        let (live, other) = (claim("ci", now() + 1e9), claim("Ci", now() + 1e9));
        for row in [&expired, &live, &other] {
            put(&store, row).await;
        }
        assert_eq!(claims::list(&*store, "ci").await.unwrap(), [expired.clone(), live.clone()]);
        assert_eq!(claims::get(&*store, "ci", live.id).await.unwrap().as_ref(), Some(&live));
        assert_eq!(claims::get(&*store, "Ci", live.id).await.unwrap(), None);
        let mut active = vec![live.clone(), other.clone()];
        active.sort_by_key(|row| row.id.to_string());
        assert_eq!(claims::active(&*store, now()).await.unwrap(), active);
        let locked = transaction!(store, |tx| { Ok(claims::lock_active(tx, now()).await?) }).unwrap();
        assert_eq!(locked, active);
        let changed =
            ClaimRow { limit: amount(1, 2, 3), used: amount(4, 5, 6), expires: 1e10, updated: 9.25, ..live.clone() };
        let (updated, missing) = transaction!(store, |tx| {
            claims::remove(tx, expired.id).await?;
            Ok((claims::set(tx, &changed).await?, claims::set(tx, &expired).await?))
        })
        .unwrap();
        assert!(updated && !missing, "a removed claim is not updated");
        assert_eq!(claims::list(&*store, "ci").await.unwrap(), [changed]);
        transaction!(store, |tx| { Ok(claims::expire_of(tx, "ci").await?) }).unwrap();
        assert!(!claims::list(&*store, "ci").await.unwrap()[0].is_active(now()));
        assert_eq!(claims::active(&*store, now()).await.unwrap(), [other], "names are compared byte by byte");
    }

    async fn releases_use_of_active_claims_down_to_zero(store: Arc<Store>) {
        let (expired, live, other) = (claim("ci", 7.5), claim("ci", now() + 1e9), claim("b", now() + 1e9));
        for row in [&expired, &live, &other] {
            put(&store, row).await;
        }
        for (released, remaining) in [(amount(1, 24, 0), amount(2, 1000, 5)), (amount(5, 1000, 2), amount(0, 0, 3))] {
            transaction!(store, |tx| { Ok(claims::release_use(tx, "ci", &released).await?) }).unwrap();
            assert_eq!(claims::get(&*store, "ci", live.id).await.unwrap().unwrap().used, remaining);
        }
        assert_eq!(claims::get(&*store, "ci", expired.id).await.unwrap(), Some(expired));
        assert_eq!(claims::get(&*store, "b", other.id).await.unwrap(), Some(other));
    }

    async fn concurrent_charges_add_up(store: Arc<Store>) {
        let row = ClaimRow { used: Capacity::default(), ..claim("ci", now() + 1e9) };
        put(&store, &row).await;
        let charges: Vec<_> = (0..20)
            .map(|_| {
                let store = Arc::clone(&store);
                tokio::spawn(async move {
                    transaction!(store, |tx| {
                        let locked = claims::lock_active(tx, now()).await?.remove(0);
                        let row = ClaimRow { used: locked.used.plus(&amount(1, 512, 2)), ..locked };
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
