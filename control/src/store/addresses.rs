//! Rows of addresses: who holds which address of a network.
//!
//! The row is the claim: its key is the address, so two callers cannot hold one. Counts of taken addresses by
//! block of 256 and of 65 536 change in the same transaction as the claims below them. They lead to a free
//! address in at most three short reads, however large and however full the network is.

use std::net::Ipv4Addr;

use muster_types::address::{AddressType, Netblock};
use muster_types::ids::NetworkId;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, params};

/// Sizes of the counted blocks, in bits, largest first.
const LEVELS: [u32; 2] = [16, 8];
/// Guesses before the counts are asked.
const GUESSES: usize = 4;
/// How often a walk down the counts may end at an address that somebody else just took.
const WALKS: usize = 32;
/// Rows removed in one transaction when a network goes.
pub const BATCH: i64 = 5000;

#[derive(Debug, Clone, PartialEq)]
pub struct AddressRow {
    pub address: Ipv4Addr,
    pub kind: AddressType,
    pub user: Option<ObjectRef>,
    pub comment: String,
    pub reserved_at: f64,
}

/// What an address is wanted for.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    pub kind: AddressType,
    pub user: ObjectRef,
    pub comment: String,
}

impl Claim {
    #[must_use]
    pub fn new(kind: AddressType, user: ObjectRef) -> Self {
        Self { kind, user, comment: String::new() }
    }
}

/// A network's addresses.
#[derive(Debug, Clone, Copy)]
pub struct Pool {
    pub network: NetworkId,
    pub netblock: Netblock,
}

const COLUMNS: &str = "address, kind, user_type, user_id, comment, reserved_at";

impl AddressRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let user = match (row.get::<Option<String>>(2)?, row.get::<Option<String>>(3)?) {
            (Some(_), Some(id)) => Some(ObjectRef { object_type: row.parse::<ObjectType>(2)?, id }),
            _ => None,
        };
        Ok(Self {
            address: address(row.get(0)?)?,
            kind: row.parse(1)?,
            user,
            comment: row.get(4)?,
            reserved_at: row.get(5)?,
        })
    }
}

fn address(number: i64) -> Result<Ipv4Addr, StoreError> {
    u32::try_from(number)
        .map(Ipv4Addr::from)
        .map_err(|_| StoreError::Broken(format!("{number} is not an address")))
}

fn number(address: Ipv4Addr) -> i64 {
    i64::from(u32::from(address))
}

/// A number below `limit`, at random.
fn random(limit: u64) -> u64 {
    let (a, b) = uuid::Uuid::new_v4().as_u64_pair();
    // Six of the bits are fixed; folding hides them.
    (a ^ b.rotate_left(17)) % limit.max(1)
}

pub async fn get(
    mut db: impl Read,
    network: NetworkId,
    address: Ipv4Addr,
) -> Result<Option<AddressRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM addresses WHERE network_uuid = ? AND address = ?");
    let rows = db.rows(&sql, params![network, number(address)]).await?;
    rows.first().map(AddressRow::read).transpose()
}

/// The next addresses after `after` that are not free, in order.
pub async fn page(
    mut db: impl Read,
    network: NetworkId,
    after: Option<Ipv4Addr>,
    limit: i64,
) -> Result<Vec<AddressRow>, StoreError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM addresses WHERE network_uuid = ? AND address > ? ORDER BY address LIMIT ?"
    );
    let rows = db.rows(&sql, params![network, after.map_or(-1, number), limit]).await?;
    rows.iter().map(AddressRow::read).collect()
}

/// Every address of a kind that objects hold on a network, with the object's id.
pub async fn held_as(
    mut db: impl Read,
    network: NetworkId,
    kind: AddressType,
) -> Result<Vec<(Ipv4Addr, String)>, StoreError> {
    let sql = "SELECT address, user_id FROM addresses WHERE network_uuid = ? AND kind = ? ORDER BY address";
    let rows = db.rows(sql, params![network, kind]).await?;
    rows.iter().map(|row| Ok((address(row.get(0)?)?, row.get(1)?))).collect()
}

/// Takes one address. `false`: somebody has it. One that rests may be taken.
pub async fn claim(tx: &mut Tx, pool: Pool, address: Ipv4Addr, claim: &Claim) -> Result<bool, StoreError> {
    if insert(tx, pool, address, claim).await? {
        return Ok(true);
    }
    take_resting(tx, pool.network, address, claim).await
}

/// Takes a free address at random. `None`: all are taken, and none has rested for `rest` seconds.
pub async fn claim_any(
    tx: &mut Tx,
    pool: Pool,
    claim: &Claim,
    rest: f64,
) -> Result<Option<Ipv4Addr>, StoreError> {
    let Pool { netblock, .. } = pool;
    // The first two and the last one are never free.
    let usable = u64::from(netblock.size()) - 3;
    for _ in 0..GUESSES {
        let offset = u32::try_from(2 + random(usable)).unwrap_or(2);
        let guess = Ipv4Addr::from(u32::from(netblock.network()) + offset);
        if insert(tx, pool, guess, claim).await? {
            return Ok(Some(guess));
        }
    }
    for _ in 0..WALKS {
        match walk(tx, pool).await? {
            Some(free) if insert(tx, pool, free, claim).await? => return Ok(Some(free)),
            // Taken by another since the counts were read.
            Some(_) => {}
            None => return reclaim(tx, pool, claim, rest).await,
        }
    }
    Err(StoreError::Conflict("every address was taken by others while it was being claimed".into()))
}

/// Takes the address that has rested longest, if that is long enough.
async fn reclaim(tx: &mut Tx, pool: Pool, claim: &Claim, rest: f64) -> Result<Option<Ipv4Addr>, StoreError> {
    let sql =
        "SELECT address FROM address_halos WHERE network_uuid = ? AND since <= ? ORDER BY since LIMIT 16";
    loop {
        let rows = tx.query(sql, params![pool.network, now() - rest]).await?;
        if rows.is_empty() {
            return Ok(None);
        }
        // Those that others take meanwhile are not found again.
        for row in rows {
            let rested = address(row.get(0)?)?;
            if take_resting(tx, pool.network, rested, claim).await? {
                return Ok(Some(rested));
            }
        }
    }
}

/// Finds a free address by the counts, every free one as likely as any other.
async fn walk(tx: &mut Tx, pool: Pool) -> Result<Option<Ipv4Addr>, StoreError> {
    let Pool { network, netblock } = pool;
    let mut first = number(netblock.network());
    let whole = 32 - u32::from(netblock.prefix());
    let mut bits = whole;
    for level in LEVELS.into_iter().filter(|level| *level < whole) {
        let blocks = 1i64 << (bits - level);
        let capacity = 1i64 << level;
        let mut free = vec![capacity; usize::try_from(blocks).unwrap_or(0)];
        let low = first >> level;
        let rows = tx
            .query(
                "SELECT block, taken FROM address_blocks \
                 WHERE network_uuid = ? AND bits = ? AND block >= ? AND block < ?",
                params![network, i64::from(level), low, low + blocks],
            )
            .await?;
        for row in rows {
            let (block, taken): (i64, i64) = (row.get(0)?, row.get(1)?);
            if let Some(left) = usize::try_from(block - low).ok().and_then(|at| free.get_mut(at)) {
                *left = (capacity - taken).max(0);
            }
        }
        let total: i64 = free.iter().sum();
        if total == 0 {
            return Ok(None);
        }
        let mut left = i64::try_from(random(total.unsigned_abs())).unwrap_or(0);
        let mut chosen = 0;
        for (at, count) in (0i64..).zip(&free) {
            if left < *count {
                chosen = at;
                break;
            }
            left -= count;
        }
        first += chosen << level;
        bits = level;
    }
    let size = 1i64 << bits;
    let rows = tx
        .query(
            "SELECT address FROM addresses WHERE network_uuid = ? AND address >= ? AND address < ?",
            params![network, first, first + size],
        )
        .await?;
    let mut free = vec![true; usize::try_from(size).unwrap_or(0)];
    for row in rows {
        let at = row.get::<i64>(0)? - first;
        if let Some(slot) = usize::try_from(at).ok().and_then(|at| free.get_mut(at)) {
            *slot = false;
        }
    }
    let free: Vec<i64> = (0i64..).zip(&free).filter(|(_, free)| **free).map(|(at, _)| at).collect();
    match free.get(usize::try_from(random(free.len() as u64)).unwrap_or(0)) {
        Some(offset) => address(first + offset).map(Some),
        // The counts of this block were read before another's claim and its addresses after it.
        None if bits < whole => Err(StoreError::Conflict("the block filled up meanwhile".into())),
        None => Ok(None),
    }
}

async fn insert(tx: &mut Tx, pool: Pool, address: Ipv4Addr, claim: &Claim) -> Result<bool, StoreError> {
    let inserted = tx
        .execute(
            "INSERT INTO addresses (network_uuid, address, kind, user_type, user_id, comment, reserved_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?)",
            params![
                pool.network,
                number(address),
                claim.kind,
                claim.user.object_type,
                &claim.user.id,
                &claim.comment,
                now()
            ],
        )
        .await;
    match inserted {
        Ok(_) => {}
        Err(StoreError::Duplicate(_)) => return Ok(false),
        Err(error) => return Err(error),
    }
    count(tx, pool, address, 1).await?;
    Ok(true)
}

/// Counts an address as taken (1) or free (-1) in the blocks around it.
async fn count(tx: &mut Tx, pool: Pool, address: Ipv4Addr, by: i64) -> Result<(), StoreError> {
    let bits = 32 - u32::from(pool.netblock.prefix());
    for level in LEVELS.into_iter().rev().filter(|level| *level < bits) {
        let key = || [i64::from(level), number(address) >> level];
        let update =
            "UPDATE address_blocks SET taken = taken + ? WHERE network_uuid = ? AND bits = ? AND block = ?";
        let values: [Value; 4] = [by.into(), pool.network.into(), key()[0].into(), key()[1].into()];
        if tx.execute(update, &values).await? == 1 {
            continue;
        }
        let inserted = tx
            .execute(
                "INSERT INTO address_blocks (network_uuid, bits, block, taken) VALUES (?, ?, ?, ?)",
                params![pool.network, key()[0], key()[1], by],
            )
            .await;
        match inserted {
            Ok(_) => {}
            // Another transaction was first; its row is there now.
            Err(StoreError::Duplicate(_)) => {
                tx.execute(update, &values).await?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Takes an address out of its rest.
async fn take_resting(
    tx: &mut Tx,
    network: NetworkId,
    address: Ipv4Addr,
    claim: &Claim,
) -> Result<bool, StoreError> {
    let woken = tx
        .execute(
            "DELETE FROM address_halos WHERE network_uuid = ? AND address = ?",
            params![network, number(address)],
        )
        .await?;
    if woken == 0 {
        return Ok(false);
    }
    let met = tx
        .execute(
            "UPDATE addresses SET kind = ?, user_type = ?, user_id = ?, comment = ?, reserved_at = ? \
             WHERE network_uuid = ? AND address = ? AND kind = ?",
            params![
                claim.kind,
                claim.user.object_type,
                &claim.user.id,
                &claim.comment,
                now(),
                network,
                number(address),
                AddressType::Halo
            ],
        )
        .await?;
    if met == 1 {
        return Ok(true);
    }
    Err(StoreError::Broken(format!("{address} of network {network} rested without a row")))
}

/// Gives an address back if it is held like this. It rests, or is free at once if nothing rests here.
pub async fn release(
    tx: &mut Tx,
    pool: Pool,
    address: Ipv4Addr,
    kind: AddressType,
    user: &ObjectRef,
    rests: bool,
) -> Result<bool, StoreError> {
    let held = "network_uuid = ? AND address = ? AND kind = ? AND user_type = ? AND user_id = ?";
    let who: [Value; 5] = [
        pool.network.into(),
        number(address).into(),
        kind.into(),
        user.object_type.into(),
        user.id.as_str().into(),
    ];
    if !rests {
        let met = tx.execute(&format!("DELETE FROM addresses WHERE {held}"), &who).await?;
        if met == 1 {
            count(tx, pool, address, -1).await?;
        }
        return Ok(met == 1);
    }
    let time = now();
    let mut values: Vec<Value> = params![AddressType::Halo, time].to_vec();
    values.extend(who);
    let sql = format!(
        "UPDATE addresses SET kind = ?, user_type = NULL, user_id = NULL, comment = '', reserved_at = ? WHERE {held}"
    );
    if tx.execute(&sql, &values).await? == 0 {
        return Ok(false);
    }
    tx.execute(
        "INSERT INTO address_halos (network_uuid, address, since) VALUES (?, ?, ?)",
        params![pool.network, number(address), time],
    )
    .await?;
    Ok(true)
}

/// Addresses that have rested since before `before`, oldest first.
pub async fn rested(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<(NetworkId, Ipv4Addr)>, StoreError> {
    let sql = "SELECT network_uuid, address FROM address_halos WHERE since <= ? ORDER BY since LIMIT ?";
    let rows = db.rows(sql, params![before, limit]).await?;
    rows.iter().map(|row| Ok((row.parse(0)?, address(row.get(1)?)?))).collect()
}

/// Ends an address's rest: it is free. Says whether it still rested, since before `before`.
pub async fn free_rested(
    tx: &mut Tx,
    pool: Pool,
    address: Ipv4Addr,
    before: f64,
) -> Result<bool, StoreError> {
    let woken = tx
        .execute(
            "DELETE FROM address_halos WHERE network_uuid = ? AND address = ? AND since <= ?",
            params![pool.network, number(address), before],
        )
        .await?;
    if woken == 0 {
        return Ok(false);
    }
    let met = tx
        .execute(
            "DELETE FROM addresses WHERE network_uuid = ? AND address = ? AND kind = ?",
            params![pool.network, number(address), AddressType::Halo],
        )
        .await?;
    if met == 1 {
        count(tx, pool, address, -1).await?;
    }
    Ok(met == 1)
}

/// Removes up to [`BATCH`] addresses of a network that goes. Says whether there were any.
pub async fn remove_some_of(tx: &mut Tx, network: NetworkId) -> Result<bool, StoreError> {
    let rows = tx
        .query(
            "SELECT MAX(address) FROM (SELECT address FROM addresses WHERE network_uuid = ? ORDER BY address LIMIT ?) \
             AS some",
            params![network, BATCH],
        )
        .await?;
    let last: Option<i64> = rows.first().map_or(Ok(None), |row| row.get(0))?;
    let Some(last) = last else {
        for table in ["address_halos", "address_blocks"] {
            tx.execute(&format!("DELETE FROM {table} WHERE network_uuid = ?"), params![network]).await?;
        }
        return Ok(false);
    };
    tx.execute("DELETE FROM addresses WHERE network_uuid = ? AND address <= ?", params![network, last])
        .await?;
    Ok(true)
}
