//! Addresses under every kind of traffic: never given twice, never lost.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use muster_types::address::{AddressType, Netblock};
use muster_types::ids::NetworkId;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use super::addresses::{self, Claim, Pool};
use super::tests::on_both_engines;
use super::*;

fn pool(netblock: &str) -> Pool {
    Pool { network: NetworkId::new(), netblock: netblock.parse::<Netblock>().unwrap() }
}

fn owner(name: &str) -> ObjectRef {
    ObjectRef::new(ObjectType::Instance, name)
}

async fn any(store: &Store, pool: Pool, user: &str, rest: f64) -> Option<Ipv4Addr> {
    let claim = Claim::new(AddressType::Instance, owner(user));
    transaction!(store, |tx| { Ok(addresses::claim_any(tx, pool, &claim, rest).await?) }).unwrap()
}

async fn exactly(store: &Store, pool: Pool, address: Ipv4Addr, user: &str) -> bool {
    let claim = Claim::new(AddressType::Instance, owner(user));
    transaction!(store, |tx| { Ok(addresses::claim(tx, pool, address, &claim).await?) }).unwrap()
}

async fn release(store: &Store, pool: Pool, address: Ipv4Addr, user: &str, rests: bool) -> bool {
    transaction!(store, |tx| {
        Ok(addresses::release(tx, pool, address, AddressType::Instance, &owner(user), rests).await?)
    })
    .unwrap()
}

async fn ends(store: &Store, pool: Pool) {
    for address in [pool.netblock.network(), pool.netblock.router(), pool.netblock.broadcast()] {
        assert!(exactly(store, pool, address, "the network").await);
    }
}

/// Every address that is not free, with its holder.
async fn held(store: &Store, pool: Pool) -> BTreeMap<Ipv4Addr, Option<String>> {
    let rows = addresses::page(store, pool.network, None, 1 << 20).await.unwrap();
    rows.into_iter().map(|row| (row.address, row.user.map(|user| user.id))).collect()
}

/// The counts agree with the claims below them.
async fn assert_counted(store: &Store, pool: Pool) {
    let held = held(store, pool).await;
    let rows = store
        .query("SELECT bits, block, taken FROM address_blocks WHERE network_uuid = ?", params![pool.network])
        .await
        .unwrap();
    for row in rows {
        let (bits, block, taken): (i64, i64, i64) =
            (row.get(0).unwrap(), row.get(1).unwrap(), row.get(2).unwrap());
        let below = held.keys().filter(|a| i64::from(u32::from(**a)) >> bits == block).count();
        assert_eq!(i64::try_from(below).unwrap(), taken, "block {block} of {bits} bits");
    }
    let halos = store
        .query("SELECT address FROM address_halos WHERE network_uuid = ?", params![pool.network])
        .await
        .unwrap();
    assert_eq!(halos.len(), held.values().filter(|user| user.is_none()).count(), "every rest has its row");
}

/// A repeatable stream of numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

on_both_engines! {
    async fn an_address_is_held_by_one(store: Arc<Store>) {
        let pool = pool("10.0.0.0/24");
        let address = "10.0.0.9".parse().unwrap();
        assert!(exactly(&store, pool, address, "a").await);
        assert!(!exactly(&store, pool, address, "b").await);
        assert!(!release(&store, pool, address, "b", true).await, "only the holder gives it back");
        assert!(release(&store, pool, address, "a", true).await);
        let row = addresses::get(&*store, pool.network, address).await.unwrap().unwrap();
        assert_eq!((row.kind, row.user), (AddressType::Halo, None));
        assert!(exactly(&store, pool, address, "b").await, "one that rests may be taken by name");
        assert!(release(&store, pool, address, "b", false).await);
        assert!(held(&store, pool).await.is_empty());
    }

    async fn a_network_is_given_out_to_the_last_address(store: Arc<Store>) {
        for netblock in ["10.0.0.0/29", "10.1.0.0/24", "10.2.0.0/23"] {
            let pool = pool(netblock);
            ends(&store, pool).await;
            let mut given = BTreeSet::new();
            while let Some(address) = any(&store, pool, "a", 30.0).await {
                assert!(given.insert(address), "{address} was given twice");
            }
            assert_eq!(given.len(), usize::try_from(pool.netblock.size()).unwrap() - 3);
            assert_counted(&store, pool).await;
            let one = *given.iter().next().unwrap();
            assert!(release(&store, pool, one, "a", true).await);
            assert_eq!(any(&store, pool, "b", 30.0).await, None, "it has not rested long enough");
            assert_eq!(any(&store, pool, "b", 0.0).await, Some(one));
            assert_counted(&store, pool).await;
        }
    }

    async fn rested_addresses_become_free(store: Arc<Store>) {
        let pool = pool("10.0.0.0/16");
        ends(&store, pool).await;
        let mut mine = Vec::new();
        for _ in 0..10 {
            mine.push(any(&store, pool, "a", 30.0).await.unwrap());
        }
        for address in &mine {
            assert!(release(&store, pool, *address, "a", true).await);
        }
        assert!(addresses::rested(&*store, now() - 60.0, 100).await.unwrap().is_empty());
        let before = now() + 1.0;
        let rested = addresses::rested(&*store, before, 100).await.unwrap();
        let rested: Vec<_> = rested.into_iter().filter(|(network, _)| *network == pool.network).collect();
        assert_eq!(rested.len(), 10);
        for (_, address) in rested {
            let freed = transaction!(store, |tx| { Ok(addresses::free_rested(tx, pool, address, before).await?) });
            assert!(freed.unwrap());
        }
        assert_eq!(held(&store, pool).await.len(), 3);
        assert_counted(&store, pool).await;
    }

    async fn random_traffic_from_several_tasks_never_gives_twice_and_never_loses(store: Arc<Store>) {
        // Small ones fill up all the time; the larger ones have one and two levels of counts.
        for (netblock, rolls) in [("10.0.0.0/28", 250), ("10.1.0.0/23", 250), ("10.2.0.0/15", 150)] {
            let pool = pool(netblock);
            ends(&store, pool).await;
            let taken: Arc<Mutex<HashSet<Ipv4Addr>>> = Arc::default();
            let tasks: Vec<_> = (0..6u64)
                .map(|number| {
                    let (store, taken) = (Arc::clone(&store), Arc::clone(&taken));
                    tokio::spawn(traffic(store, pool, taken, number, rolls))
                })
                .collect();
            let mut expected: BTreeMap<Ipv4Addr, Option<String>> = BTreeMap::new();
            for task in tasks {
                let (user, mine) = task.await.unwrap();
                expected.extend(mine.into_iter().map(|address| (address, Some(user.clone()))));
            }
            let found = held(&store, pool).await;
            let holders: BTreeMap<_, _> = found
                .iter()
                .filter(|(_, user)| user.as_deref().is_some_and(|user| user != "the network"))
                .map(|(address, user)| (*address, user.clone()))
                .collect();
            assert_eq!(holders, expected, "what the tasks hold is what the rows say");
            assert_counted(&store, pool).await;
            // Everything that nobody holds can be had: nothing was lost.
            if netblock == "10.0.0.0/28" {
                let mut left = 0;
                while any(&store, pool, "the last", 0.0).await.is_some() {
                    left += 1;
                }
                assert_eq!(left + expected.len() + 3, 16);
            }
        }
    }

    async fn a_network_goes_with_all_its_addresses(store: Arc<Store>) {
        let pool = pool("10.0.0.0/20");
        ends(&store, pool).await;
        for _ in 0..20 {
            let address = any(&store, pool, "a", 30.0).await.unwrap();
            release(&store, pool, address, "a", address.octets()[3] % 2 == 0).await;
        }
        while transaction!(store, |tx| { Ok(addresses::remove_some_of(tx, pool.network).await?) }).unwrap() {}
        for table in ["addresses", "address_halos", "address_blocks"] {
            let sql = format!("SELECT COUNT(*) FROM {table} WHERE network_uuid = ?");
            let rows = store.query(&sql, params![pool.network]).await.unwrap();
            assert_eq!(rows[0].get::<i64>(0).unwrap(), 0, "{table}");
        }
    }
}

/// One task's random claims and releases. What it holds at the end, and under which name.
async fn traffic(
    store: Arc<Store>,
    pool: Pool,
    taken: Arc<Mutex<HashSet<Ipv4Addr>>>,
    number: u64,
    rolls: usize,
) -> (String, BTreeSet<Ipv4Addr>) {
    let user = format!("task {number}");
    let mut dice = Dice(number * 7919 + u64::from(pool.netblock.prefix()));
    let mut mine = BTreeSet::new();
    let take = |address: Ipv4Addr, mine: &mut BTreeSet<Ipv4Addr>| {
        assert!(taken.lock().unwrap().insert(address), "{address} was given twice");
        mine.insert(address);
    };
    for _ in 0..rolls {
        match dice.roll(10) {
            0..4 => {
                if let Some(address) = any(&store, pool, &user, 0.0).await {
                    take(address, &mut mine);
                }
            }
            4..6 => {
                // All tasks want the same few.
                let offset = 2 + u32::try_from(dice.roll(12)).unwrap();
                let address = Ipv4Addr::from(u32::from(pool.netblock.network()) + offset);
                if exactly(&store, pool, address, &user).await {
                    take(address, &mut mine);
                }
            }
            6..9 => {
                let at = usize::try_from(dice.roll(mine.len().max(1) as u64)).unwrap();
                if let Some(address) = mine.iter().nth(at).copied() {
                    mine.remove(&address);
                    // Out of the model first: from its release on another may have it.
                    assert!(taken.lock().unwrap().remove(&address));
                    assert!(
                        release(&store, pool, address, &user, dice.roll(2) == 0).await,
                        "{address} was lost"
                    );
                }
            }
            _ => {
                let before = now() + 1.0;
                for (network, address) in addresses::rested(&*store, before, 5).await.unwrap() {
                    if network == pool.network {
                        transaction!(store, |tx| {
                            Ok(addresses::free_rested(tx, pool, address, before).await?)
                        })
                        .unwrap();
                    }
                }
            }
        }
    }
    (user, mine)
}
