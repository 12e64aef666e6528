//! How fast addresses are allocated, whatever the size of the network and however full it is.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use muster_store::Store;
use muster_store::addresses::{self, AddressPool, Allocation};
use muster_types::address::AddressType;
use muster_types::ids::NetworkId;
use muster_types::object::{ObjectRef, ObjectType};

use crate::table::{Row, Table};
use crate::{micros, processor_time, progress, transaction};

/// Addresses allocated for one row of the table.
const ALLOCATIONS: usize = 500;
/// Rows written at once while a network is filled.
const CHUNK: u32 = 1 << 20;

/// Allocates from networks of three sizes, empty and nearly full. `quick` fills the largest only to a million.
pub(crate) async fn measure(quick: bool, table: &mut Table) -> anyhow::Result<()> {
    table.section("addresses, SQLite");
    let folder = tempfile::tempdir()?;
    let store = Store::open(&format!("sqlite:{}", folder.path().join("muster.db").display())).await?;
    let mut first = None;
    for netblock in ["10.0.0.0/24", "10.0.0.0/16", "10.0.0.0/8"] {
        for full in [false, true] {
            let pool = AddressPool { network: NetworkId::new(), netblock: netblock.parse()? };
            let (size, taken) =
                (pool.netblock.size(), if full { fill(&store, pool, quick).await? } else { 0 });
            let free = usize::try_from(size - taken)?.saturating_sub(3);
            let (rate, cost) = allocate(&store, pool, ALLOCATIONS.min(free.max(1))).await?;
            let floor = *first.get_or_insert(cost);
            let name = netblock.rsplit('/').next().unwrap_or_default();
            let share = f64::from(taken) / f64::from(size) * 100.0;
            table.add(
                Row::new(
                    format!("allocate from a /{name}, {share:.0} % full"),
                    format!("{rate:.0} per second, {cost:.0} µs CPU"),
                )
                .times(cost / floor),
            );
        }
    }
    Ok(())
}

/// Takes 99 of 100 addresses, or a million. Says how many.
async fn fill(store: &Store, pool: AddressPool, quick: bool) -> anyhow::Result<u32> {
    let size = pool.netblock.size();
    let upto = if quick { size.min(1_000_000) } else { size };
    progress(&format!("filling {}", pool.netblock));
    let first = i64::from(u32::from(pool.netblock.network()));
    let mut done = 0;
    while done < upto {
        let next = (done + CHUNK).min(upto);
        transaction(store, async |tx| {
            tx.execute(
                "INSERT INTO addresses (network_uuid, address, kind, user_type, user_id, comment, reserved_at) \
                 WITH RECURSIVE n(x) AS (SELECT ? UNION ALL SELECT x + 1 FROM n WHERE x + 1 < ?) \
                 SELECT ?, ? + x, 'instance', 'instance', 'filled', '', 0.0 FROM n WHERE x % 100 <> 50",
                &[i64::from(done).into(), i64::from(next).into(), pool.network.into(), first.into()],
            )
            .await?;
            Ok(())
        })
        .await?;
        done = next;
    }
    let bits = 32 - i64::from(pool.netblock.prefix());
    for level in [8i64, 16].into_iter().filter(|level| *level < bits) {
        transaction(store, async |tx| {
            tx.execute(
                "INSERT INTO address_blocks (network_uuid, bits, block, taken) \
                 SELECT network_uuid, ?, address >> ?, COUNT(*) FROM addresses WHERE network_uuid = ? \
                 GROUP BY network_uuid, address >> ?",
                &[level.into(), level.into(), pool.network.into(), level.into()],
            )
            .await?;
            Ok(())
        })
        .await?;
    }
    let rows =
        store.query("SELECT COUNT(*) FROM addresses WHERE network_uuid = ?", &[pool.network.into()]).await?;
    Ok(u32::try_from(rows.first().context("no count")?.scalar::<i64>()?)?)
}

/// Allocations a second, and microseconds of processor time for each.
async fn allocate(store: &Store, pool: AddressPool, count: usize) -> anyhow::Result<(f64, f64)> {
    let owner = ObjectRef::new(ObjectType::Instance, "bench");
    let allocation = Allocation::new(AddressType::Instance, owner.clone());
    let (mut took, mut cost) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..count {
        let (began, cpu) = (Instant::now(), processor_time()?);
        let address =
            transaction(store, async |tx| Ok(addresses::allocate_any(tx, pool, &allocation, 30.0).await?))
                .await?;
        took += began.elapsed();
        cost += processor_time()? - cpu;
        let address = address.context("the network is full")?;
        // Given back, so that the next one finds it as full.
        let released = transaction(store, async |tx| {
            Ok(addresses::release(tx, pool, address, AddressType::Instance, &owner, false).await?)
        });
        ensure!(released.await?, "an address was lost");
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of allocations")]
    let rate = count as f64 / took.as_secs_f64();
    Ok((rate, micros(cost, count)))
}
