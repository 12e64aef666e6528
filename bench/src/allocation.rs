//! Benchmarks address allocation by size and utilization of the network.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use muster_store::Store;
use muster_store::addresses::{self, AddressPool, Allocation};
use muster_types::address::AddressType;
use muster_types::ids::NetworkId;
use muster_types::object::{ObjectRef, ObjectType};

use crate::sampling::{micros, process_cpu_time, progress, transaction};
use crate::table::{Row, Table};

/// Allocations per row of the table.
const ALLOCATIONS: usize = 500;
/// Database rows per statement when a network is filled.
const FILL_BATCH: u32 = 1 << 20;

/// Allocates from networks of three sizes, empty and nearly full. With `quick`, at most a million addresses are
/// allocated beforehand.
pub(crate) async fn measure(quick: bool, table: &mut Table) -> anyhow::Result<()> {
    table.section("address allocation, SQLite");
    let directory = tempfile::tempdir()?;
    let store = Store::open(&format!("sqlite:{}", directory.path().join("muster.db").display())).await?;
    let mut baseline = None;
    for netblock in ["10.0.0.0/24", "10.0.0.0/16", "10.0.0.0/8"] {
        for is_full in [false, true] {
            let pool = AddressPool { network: NetworkId::new(), netblock: netblock.parse()? };
            let (size, taken) =
                (pool.netblock.size(), if is_full { fill(&store, pool, quick).await? } else { 0 });
            let free = usize::try_from(size - taken)?.saturating_sub(3);
            let (rate, cost) = allocate(&store, pool, ALLOCATIONS.min(free.max(1))).await?;
            let baseline = *baseline.get_or_insert(cost);
            let prefix = pool.netblock.prefix();
            let share = f64::from(taken) / f64::from(size) * 100.0;
            table.add(
                Row::new(
                    format!("allocate from a /{prefix}, {share:.0} % full"),
                    format!("{rate:.0} per second, {cost:.0} µs CPU"),
                )
                .multiple(cost / baseline),
            );
        }
    }
    Ok(())
}

/// Allocates 99 % of the addresses, or of the first million, and returns their number.
async fn fill(store: &Store, pool: AddressPool, quick: bool) -> anyhow::Result<u32> {
    let size = pool.netblock.size();
    let end = if quick { size.min(1_000_000) } else { size };
    progress(&format!("filling {}", pool.netblock));
    let first = i64::from(u32::from(pool.netblock.network()));
    let mut done = 0;
    while done < end {
        let next = (done + FILL_BATCH).min(end);
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

/// Returns the allocations per second and the microseconds of CPU time per allocation.
async fn allocate(store: &Store, pool: AddressPool, count: usize) -> anyhow::Result<(f64, f64)> {
    let owner = ObjectRef::new(ObjectType::Instance, "bench");
    let allocation = Allocation::new(AddressType::Instance, owner.clone());
    let (mut elapsed, mut cost) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..count {
        let (began, cpu) = (Instant::now(), process_cpu_time()?);
        let address =
            transaction(store, async |tx| Ok(addresses::allocate_any(tx, pool, &allocation, 30.0).await?))
                .await?;
        elapsed += began.elapsed();
        cost += process_cpu_time()? - cpu;
        let address = address.context("the network is full")?;
        // Released, so that the utilization stays the same.
        let released = transaction(store, async |tx| {
            Ok(addresses::release(tx, pool, address, AddressType::Instance, &owner, false).await?)
        });
        ensure!(released.await?, "failed to release an address");
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of allocations")]
    let rate = count as f64 / elapsed.as_secs_f64();
    Ok((rate, micros(cost, count)))
}
