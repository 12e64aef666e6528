use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use muster_types::address::{AddressType, Netblock};
use muster_types::ids::NetworkId;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use super::{AddressPool, Allocation};
use crate::testing::on_both_engines;
use crate::*;

fn pool(netblock: &str) -> AddressPool {
    AddressPool { network: NetworkId::new(), netblock: netblock.parse::<Netblock>().unwrap() }
}

fn owner(name: &str) -> ObjectRef {
    ObjectRef::new(ObjectType::Instance, name)
}

async fn allocate_any(store: &Store, pool: AddressPool, user: &str, quarantine: f64) -> Option<Ipv4Addr> {
    let allocation = Allocation::new(AddressType::Instance, owner(user));
    transaction!(store, |tx| { Ok(addresses::allocate_any(tx, pool, &allocation, quarantine).await?) })
        .unwrap()
}

async fn allocate(store: &Store, pool: AddressPool, address: Ipv4Addr, user: &str) -> bool {
    let allocation = Allocation::new(AddressType::Instance, owner(user));
    transaction!(store, |tx| { Ok(addresses::allocate(tx, pool, address, &allocation).await?) }).unwrap()
}

async fn release(store: &Store, pool: AddressPool, address: Ipv4Addr, user: &str, quarantine: bool) -> bool {
    transaction!(store, |tx| {
        Ok(addresses::release(tx, pool, address, AddressType::Instance, &owner(user), quarantine).await?)
    })
    .unwrap()
}

/// Allocates the addresses that every network reserves.
async fn allocate_reserved(store: &Store, pool: AddressPool) {
    for address in [pool.netblock.network(), pool.netblock.router(), pool.netblock.broadcast()] {
        assert!(allocate(store, pool, address, "the network").await);
    }
}

/// Returns the addresses that are not free, with their users.
async fn allocated(store: &Store, pool: AddressPool) -> BTreeMap<Ipv4Addr, Option<String>> {
    let rows = addresses::page(store, pool.network, None, 1 << 20).await.unwrap();
    rows.into_iter().map(|row| (row.address, row.user.map(|user| user.id))).collect()
}

/// Asserts that the block counts agree with the addresses.
async fn assert_counted(store: &Store, pool: AddressPool) {
    let allocated = allocated(store, pool).await;
    let rows = store
        .query("SELECT bits, block, taken FROM address_blocks WHERE network_uuid = ?", params![pool.network])
        .await
        .unwrap();
    for row in rows {
        let (bits, block, count) = row.read::<(i64, i64, i64)>().unwrap();
        let in_block = allocated.keys().filter(|a| i64::from(u32::from(**a)) >> bits == block).count();
        assert_eq!(i64::try_from(in_block).unwrap(), count, "block {block} of {bits} bits");
    }
    let halos = store
        .query("SELECT address FROM address_halos WHERE network_uuid = ?", params![pool.network])
        .await
        .unwrap();
    assert_eq!(
        halos.len(),
        allocated.values().filter(|user| user.is_none()).count(),
        "each quarantined address has a row"
    );
}

/// A reproducible stream of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

on_both_engines! {
    async fn address_has_one_user(store: Arc<Store>) {
        let pool = pool("10.0.0.0/24");
        let address = "10.0.0.9".parse().unwrap();
        assert!(allocate(&store, pool, address, "a").await);
        assert!(!allocate(&store, pool, address, "b").await);
        assert!(!release(&store, pool, address, "b", true).await, "only the user can release it");
        assert!(release(&store, pool, address, "a", true).await);
        let row = addresses::get(&*store, pool.network, address).await.unwrap().unwrap();
        assert_eq!((row.kind, row.user), (AddressType::Halo, None));
        assert!(allocate(&store, pool, address, "b").await, "a quarantined address can be requested");
        assert!(release(&store, pool, address, "b", false).await);
        assert!(allocated(&store, pool).await.is_empty());
    }

    async fn allocation_of_an_address_changes_only_from_its_user(store: Arc<Store>) {
        let pool = pool("10.0.0.0/24");
        let address = Ipv4Addr::new(10, 0, 0, 9);
        assert!(allocate(&store, pool, address, "one").await);
        let node = ObjectRef::new(ObjectType::Node, "n");
        let reserved =
            Allocation { kind: AddressType::Manual, user: node.clone(), comment: "it may run".into() };
        let change = async |user: &str| {
            let from = (AddressType::Instance, &owner(user));
            transaction!(store, |tx| {
                Ok(addresses::reallocate(tx, pool.network, address, from, &reserved).await?)
            })
            .unwrap()
        };
        assert!(!change("two").await && change("one").await && !change("one").await);
        let row = addresses::get(&*store, pool.network, address).await.unwrap().unwrap();
        assert_eq!((row.kind, row.user, row.comment.as_str()), (AddressType::Manual, Some(node.clone()), "it may run"));
        let of_user = async |user| addresses::of_user(&*store, AddressType::Manual, &user).await.unwrap();
        assert_eq!(of_user(node).await, [(pool.network, address)]);
        assert!(of_user(ObjectRef::new(ObjectType::Node, "m")).await.is_empty());
        assert!(!release(&store, pool, address, "one", false).await);
        assert_counted(&store, pool).await;
    }

    async fn allocates_all_addresses_of_a_network(store: Arc<Store>) {
        for netblock in ["10.0.0.0/29", "10.1.0.0/24", "10.2.0.0/23"] {
            let pool = pool(netblock);
            allocate_reserved(&store, pool).await;
            let mut seen = BTreeSet::new();
            while let Some(address) = allocate_any(&store, pool, "a", 30.0).await {
                assert!(seen.insert(address), "{address} was allocated twice");
            }
            assert_eq!(seen.len(), usize::try_from(pool.netblock.size()).unwrap() - 3);
            assert_counted(&store, pool).await;
            let one = *seen.iter().next().unwrap();
            assert!(release(&store, pool, one, "a", true).await);
            assert_eq!(allocate_any(&store, pool, "b", 30.0).await, None, "its quarantine has not ended");
            assert_eq!(allocate_any(&store, pool, "b", 0.0).await, Some(one));
            assert_counted(&store, pool).await;
        }
    }

    async fn quarantined_addresses_become_free(store: Arc<Store>) {
        let pool = pool("10.0.0.0/16");
        allocate_reserved(&store, pool).await;
        let mut own = Vec::new();
        for _ in 0..10 {
            own.push(allocate_any(&store, pool, "a", 30.0).await.unwrap());
        }
        for address in &own {
            assert!(release(&store, pool, *address, "a", true).await);
        }
        assert!(addresses::quarantined_before(&*store, now() - 60.0, 100).await.unwrap().is_empty());
        let before = now() + 1.0;
        let quarantined = addresses::quarantined_before(&*store, before, 100).await.unwrap();
        let quarantined: Vec<_> = quarantined.into_iter().filter(|(network, _)| *network == pool.network).collect();
        assert_eq!(quarantined.len(), 10);
        for (_, address) in quarantined {
            let freed = transaction!(store, |tx| { Ok(addresses::free_quarantined(tx, pool, address, before).await?) });
            assert!(freed.unwrap());
        }
        assert_eq!(allocated(&store, pool).await.len(), 3);
        assert_counted(&store, pool).await;
    }

    async fn concurrent_traffic_neither_duplicates_nor_loses_addresses(store: Arc<Store>) {
        // The small network is often full; the larger ones have one and two levels of block counts.
        for (netblock, steps) in [("10.0.0.0/28", 250), ("10.1.0.0/23", 250), ("10.2.0.0/15", 150)] {
            let pool = pool(netblock);
            allocate_reserved(&store, pool).await;
            let all_allocated: Arc<Mutex<HashSet<Ipv4Addr>>> = Arc::default();
            let tasks: Vec<_> = (0..6u64)
                .map(|number| {
                    let (store, all_allocated) = (Arc::clone(&store), Arc::clone(&all_allocated));
                    tokio::spawn(traffic(store, pool, all_allocated, number, steps))
                })
                .collect();
            let mut expected: BTreeMap<Ipv4Addr, Option<String>> = BTreeMap::new();
            for task in tasks {
                let (user, own) = task.await.unwrap();
                expected.extend(own.into_iter().map(|address| (address, Some(user.clone()))));
            }
            let found = allocated(&store, pool).await;
            let users: BTreeMap<_, _> = found
                .iter()
                .filter(|(_, user)| user.as_deref().is_some_and(|user| user != "the network"))
                .map(|(address, user)| (*address, user.clone()))
                .collect();
            assert_eq!(users, expected, "the rows match the addresses of the tasks");
            assert_counted(&store, pool).await;
            // All other addresses can still be allocated, so none was lost.
            if netblock == "10.0.0.0/28" {
                let mut remaining = 0;
                while allocate_any(&store, pool, "the last", 0.0).await.is_some() {
                    remaining += 1;
                }
                assert_eq!(remaining + expected.len() + 3, 16);
            }
        }
    }

    async fn removes_all_addresses_of_a_network(store: Arc<Store>) {
        let pool = pool("10.0.0.0/20");
        allocate_reserved(&store, pool).await;
        for _ in 0..20 {
            let address = allocate_any(&store, pool, "a", 30.0).await.unwrap();
            release(&store, pool, address, "a", address.octets()[3] % 2 == 0).await;
        }
        while transaction!(store, |tx| { Ok(addresses::remove_batch_of(tx, pool.network).await?) }).unwrap() {}
        for table in ["addresses", "address_halos", "address_blocks"] {
            let sql = format!("SELECT COUNT(*) FROM {table} WHERE network_uuid = ?");
            let rows = store.query(&sql, params![pool.network]).await.unwrap();
            assert_eq!(rows[0].scalar::<i64>().unwrap(), 0, "{table}");
        }
    }
}

/// Allocates and releases random addresses. Returns the user and the addresses that it has in the end.
async fn traffic(
    store: Arc<Store>,
    pool: AddressPool,
    all_allocated: Arc<Mutex<HashSet<Ipv4Addr>>>,
    number: u64,
    steps: usize,
) -> (String, BTreeSet<Ipv4Addr>) {
    let user = format!("task {number}");
    let mut random = Random(number * 7919 + u64::from(pool.netblock.prefix()));
    let mut own = BTreeSet::new();
    let add = |address: Ipv4Addr, own: &mut BTreeSet<Ipv4Addr>| {
        assert!(all_allocated.lock().unwrap().insert(address), "{address} was allocated twice");
        own.insert(address);
    };
    for _ in 0..steps {
        match random.below(10) {
            0..4 => {
                if let Some(address) = allocate_any(&store, pool, &user, 0.0).await {
                    add(address, &mut own);
                }
            }
            4..6 => {
                // All tasks compete for the same addresses.
                let offset = 2 + u32::try_from(random.below(12)).unwrap();
                let address = Ipv4Addr::from(u32::from(pool.netblock.network()) + offset);
                if allocate(&store, pool, address, &user).await {
                    add(address, &mut own);
                }
            }
            6..9 => {
                let at = usize::try_from(random.below(own.len().max(1) as u64)).unwrap();
                if let Some(address) = own.iter().nth(at).copied() {
                    own.remove(&address);
                    // Remove it from the model first: once it is released, another task may allocate it.
                    assert!(all_allocated.lock().unwrap().remove(&address));
                    assert!(
                        release(&store, pool, address, &user, random.below(2) == 0).await,
                        "{address} was lost"
                    );
                }
            }
            _ => {
                let before = now() + 1.0;
                for (network, address) in addresses::quarantined_before(&*store, before, 5).await.unwrap() {
                    if network == pool.network {
                        transaction!(store, |tx| {
                            Ok(addresses::free_quarantined(tx, pool, address, before).await?)
                        })
                        .unwrap();
                    }
                }
            }
        }
    }
    (user, own)
}
