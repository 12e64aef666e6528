//! Rows of addresses: the allocated and quarantined addresses of networks.
//!
//! The address is part of the primary key, so an address cannot be allocated twice. The numbers of rows per block of
//! 256 and of 65 536 addresses change in the same transaction. With them, a free address is found in at most three
//! short reads, regardless of the size and use of the network. See docs/decisions/0012.

#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;

use muster_types::address::{AddressType, Netblock};
use muster_types::ids::NetworkId;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, columns, params};

/// The sizes of the counted blocks, in bits, largest first.
const BLOCK_BITS: [u32; 2] = [16, 8];
/// The number of random addresses that are tried before the counts are read.
const RANDOM_ATTEMPTS: usize = 4;
/// The number of searches that may find an address that another transaction allocates at the same time.
const SEARCH_ATTEMPTS: usize = 32;
/// The number of rows that are removed per transaction when a network is deleted.
pub const REMOVE_BATCH: i64 = 5000;

#[derive(Debug, Clone, PartialEq)]
pub struct AddressRow {
    pub address: Ipv4Addr,
    pub kind: AddressType,
    pub user: Option<ObjectRef>,
    pub comment: String,
    pub reserved_at: f64,
}

columns! { AddressRow {
    address,
    kind,
    user: address_user(user_type, user_id),
    comment,
    reserved_at,
} }

fn address_user(object_type: Option<ObjectType>, id: Option<String>) -> Option<ObjectRef> {
    Some(ObjectRef { object_type: object_type?, id: id? })
}

/// The purpose of an allocated address.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    pub kind: AddressType,
    pub user: ObjectRef,
    pub comment: String,
}

impl Allocation {
    #[must_use]
    pub fn new(kind: AddressType, user: ObjectRef) -> Self {
        Self { kind, user, comment: String::new() }
    }
}

/// The addresses of a network.
#[derive(Debug, Clone, Copy)]
pub struct AddressPool {
    pub network: NetworkId,
    pub netblock: Netblock,
}

fn number(address: Ipv4Addr) -> i64 {
    i64::from(u32::from(address))
}

/// Returns a random number less than `limit`, or 0 if that is 0.
fn random_below(limit: u64) -> u64 {
    let (a, b) = uuid::Uuid::new_v4().as_u64_pair();
    // Six of the bits are constant; folding hides them.
    (a ^ b.rotate_left(17)) % limit.max(1)
}

pub async fn get(
    mut db: impl Read,
    network: NetworkId,
    address: Ipv4Addr,
) -> Result<Option<AddressRow>, StoreError> {
    let tail = "FROM addresses WHERE network_uuid = ? AND address = ?";
    db.select_optional(tail, params![network, number(address)]).await
}

/// Returns the next allocated or quarantined addresses after `after`, in order.
pub async fn page(
    mut db: impl Read,
    network: NetworkId,
    after: Option<Ipv4Addr>,
    limit: i64,
) -> Result<Vec<AddressRow>, StoreError> {
    let tail = "FROM addresses WHERE network_uuid = ? AND address > ? ORDER BY address LIMIT ?";
    db.select(tail, params![network, after.map_or(-1, number), limit]).await
}

/// Returns the addresses of a kind on a network, with the ids of the objects that use them.
pub async fn of_kind(
    mut db: impl Read,
    network: NetworkId,
    kind: AddressType,
) -> Result<Vec<(Ipv4Addr, String)>, StoreError> {
    let sql = "SELECT address, user_id FROM addresses WHERE network_uuid = ? AND kind = ? ORDER BY address";
    db.fetch(sql, params![network, kind]).await
}

/// Allocates one address, which may be quarantined. Returns `false` if it is allocated already.
pub async fn allocate(
    tx: &mut Tx,
    pool: AddressPool,
    address: Ipv4Addr,
    allocation: &Allocation,
) -> Result<bool, StoreError> {
    if insert(tx, pool, address, allocation).await? {
        return Ok(true);
    }
    allocate_quarantined(tx, pool.network, address, allocation).await
}

/// Allocates a random free address, or the one that has been quarantined longest, if that is at least `quarantine`
/// seconds. Returns `None` if no address is available.
pub async fn allocate_any(
    tx: &mut Tx,
    pool: AddressPool,
    allocation: &Allocation,
    quarantine: f64,
) -> Result<Option<Ipv4Addr>, StoreError> {
    let AddressPool { netblock, .. } = pool;
    // The first two addresses and the last one are never free.
    let usable = u64::from(netblock.size()) - 3;
    for _ in 0..RANDOM_ATTEMPTS {
        let offset = u32::try_from(2 + random_below(usable)).expect("less than the size of a netblock");
        let candidate = Ipv4Addr::from(u32::from(netblock.network()) + offset);
        if insert(tx, pool, candidate, allocation).await? {
            return Ok(Some(candidate));
        }
    }
    for _ in 0..SEARCH_ATTEMPTS {
        match find_free(tx, pool).await? {
            Some(free) if insert(tx, pool, free, allocation).await? => return Ok(Some(free)),
            // Allocated by another transaction since the counts were read.
            Some(_) => {}
            None => return allocate_oldest_quarantined(tx, pool, allocation, quarantine).await,
        }
    }
    Err(StoreError::Conflict("other transactions allocated every address that was found".into()))
}

/// Allocates the address that has been quarantined longest, if that is at least `quarantine` seconds.
async fn allocate_oldest_quarantined(
    tx: &mut Tx,
    pool: AddressPool,
    allocation: &Allocation,
    quarantine: f64,
) -> Result<Option<Ipv4Addr>, StoreError> {
    let sql =
        "SELECT address FROM address_halos WHERE network_uuid = ? AND since <= ? ORDER BY since LIMIT 16";
    loop {
        let addresses: Vec<Ipv4Addr> = tx.fetch(sql, params![pool.network, now() - quarantine]).await?;
        if addresses.is_empty() {
            return Ok(None);
        }
        // Addresses that other transactions allocate meanwhile are not returned by the next query.
        for address in addresses {
            if allocate_quarantined(tx, pool.network, address, allocation).await? {
                return Ok(Some(address));
            }
        }
    }
}

/// A power of two of consecutive blocks or addresses.
#[derive(Clone, Copy)]
struct Range {
    first: i64,
    bits: u32,
}

impl Range {
    fn len(self) -> usize {
        1 << self.bits
    }

    fn end(self) -> i64 {
        self.first + (1 << self.bits)
    }
}

/// Finds a free address with the block counts, each with the same probability.
async fn find_free(tx: &mut Tx, pool: AddressPool) -> Result<Option<Ipv4Addr>, StoreError> {
    let pool_bits = 32 - u32::from(pool.netblock.prefix());
    let (mut first, mut bits) = (number(pool.netblock.network()), pool_bits);
    for block_bits in BLOCK_BITS.into_iter().filter(|block_bits| *block_bits < pool_bits) {
        let blocks = Range { first: first >> block_bits, bits: bits - block_bits };
        let Some(block) = choose_block(tx, pool.network, block_bits, blocks).await? else { return Ok(None) };
        first = block << block_bits;
        bits = block_bits;
    }
    match choose_address(tx, pool.network, Range { first, bits }).await? {
        // The block was filled between the reads of its count and of its addresses.
        None if bits < pool_bits => Err(StoreError::Conflict("the block was filled meanwhile".into())),
        chosen => Ok(chosen),
    }
}

/// Chooses a block with a probability proportional to the number of its free addresses.
async fn choose_block(
    tx: &mut Tx,
    network: NetworkId,
    block_bits: u32,
    blocks: Range,
) -> Result<Option<i64>, StoreError> {
    let capacity = 1i64 << block_bits;
    let mut free = vec![capacity.unsigned_abs(); blocks.len()];
    let sql = "SELECT block, taken FROM address_blocks \
               WHERE network_uuid = ? AND bits = ? AND block >= ? AND block < ?";
    let rows: Vec<(i64, i64)> =
        tx.fetch(sql, params![network, block_bits, blocks.first, blocks.end()]).await?;
    for (block, taken) in rows {
        let at = usize::try_from(block - blocks.first).expect("the query selects only these blocks");
        free[at] = (capacity - taken).max(0).unsigned_abs();
    }
    let total: u64 = free.iter().sum();
    if total == 0 {
        return Ok(None);
    }
    let mut remaining = random_below(total);
    for (block, free) in (blocks.first..).zip(free) {
        if remaining < free {
            return Ok(Some(block));
        }
        remaining -= free;
    }
    unreachable!("the random number is less than the sum of all blocks")
}

/// Chooses one of the free addresses of a range.
async fn choose_address(
    tx: &mut Tx,
    network: NetworkId,
    range: Range,
) -> Result<Option<Ipv4Addr>, StoreError> {
    let sql = "SELECT address FROM addresses WHERE network_uuid = ? AND address >= ? AND address < ?";
    let mut is_free = vec![true; range.len()];
    for address in tx.fetch::<i64>(sql, params![network, range.first, range.end()]).await? {
        let at = usize::try_from(address - range.first).expect("the query selects only this range");
        is_free[at] = false;
    }
    let free = (range.first..).zip(is_free).filter(|(_, is_free)| *is_free);
    let free: Vec<i64> = free.map(|(address, _)| address).collect();
    let chosen = usize::try_from(random_below(free.len() as u64)).expect("less than a length");
    let address = free.get(chosen).map(|address| u32::try_from(*address).expect("part of a netblock"));
    Ok(address.map(Ipv4Addr::from))
}

/// Adds the row of an allocated address. Returns `false` if the address has a row.
async fn insert(
    tx: &mut Tx,
    pool: AddressPool,
    address: Ipv4Addr,
    allocation: &Allocation,
) -> Result<bool, StoreError> {
    let inserted = tx
        .execute(
            "INSERT INTO addresses (network_uuid, address, kind, user_type, user_id, comment, reserved_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?)",
            params![
                pool.network,
                number(address),
                allocation.kind,
                allocation.user.object_type,
                &allocation.user.id,
                &allocation.comment,
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

/// Adds `change` to the counts of the blocks that contain an address.
async fn count(tx: &mut Tx, pool: AddressPool, address: Ipv4Addr, change: i64) -> Result<(), StoreError> {
    let pool_bits = 32 - u32::from(pool.netblock.prefix());
    for bits in BLOCK_BITS.into_iter().rev().filter(|bits| *bits < pool_bits) {
        let block = number(address) >> bits;
        let update =
            "UPDATE address_blocks SET taken = taken + ? WHERE network_uuid = ? AND bits = ? AND block = ?";
        let values = params![change, pool.network, bits, block];
        if tx.execute(update, values).await? == 1 {
            continue;
        }
        let inserted = tx
            .execute(
                "INSERT INTO address_blocks (network_uuid, bits, block, taken) VALUES (?, ?, ?, ?)",
                params![pool.network, bits, block, change],
            )
            .await;
        match inserted {
            Ok(_) => {}
            // Another transaction has added the row meanwhile.
            Err(StoreError::Duplicate(_)) => {
                tx.execute(update, values).await?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Allocates a quarantined address. Returns `false` if it is not quarantined.
async fn allocate_quarantined(
    tx: &mut Tx,
    network: NetworkId,
    address: Ipv4Addr,
    allocation: &Allocation,
) -> Result<bool, StoreError> {
    let released = tx
        .execute(
            "DELETE FROM address_halos WHERE network_uuid = ? AND address = ?",
            params![network, number(address)],
        )
        .await?;
    if released == 0 {
        return Ok(false);
    }
    let affected = tx
        .execute(
            "UPDATE addresses SET kind = ?, user_type = ?, user_id = ?, comment = ?, reserved_at = ? \
             WHERE network_uuid = ? AND address = ? AND kind = ?",
            params![
                allocation.kind,
                allocation.user.object_type,
                &allocation.user.id,
                &allocation.comment,
                now(),
                network,
                number(address),
                AddressType::Halo
            ],
        )
        .await?;
    if affected == 1 {
        return Ok(true);
    }
    Err(StoreError::Internal(format!("quarantined address {address} of network {network} has no row")))
}

/// Releases an address if it has this kind and user. It is quarantined or becomes free immediately.
pub async fn release(
    tx: &mut Tx,
    pool: AddressPool,
    address: Ipv4Addr,
    kind: AddressType,
    user: &ObjectRef,
    quarantine: bool,
) -> Result<bool, StoreError> {
    let condition = "network_uuid = ? AND address = ? AND kind = ? AND user_type = ? AND user_id = ?";
    let key: [Value; 5] = [
        pool.network.into(),
        number(address).into(),
        kind.into(),
        user.object_type.into(),
        user.id.as_str().into(),
    ];
    if !quarantine {
        let affected = tx.execute(&format!("DELETE FROM addresses WHERE {condition}"), &key).await?;
        if affected == 1 {
            count(tx, pool, address, -1).await?;
        }
        return Ok(affected == 1);
    }
    let time = now();
    let mut values: Vec<Value> = params![AddressType::Halo, time].to_vec();
    values.extend(key);
    let sql = format!(
        "UPDATE addresses SET kind = ?, user_type = NULL, user_id = NULL, comment = '', reserved_at = ? WHERE {condition}"
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

/// Changes the allocation of an address if it has this kind and user.
pub async fn reallocate(
    tx: &mut Tx,
    network: NetworkId,
    address: Ipv4Addr,
    (kind, user): (AddressType, &ObjectRef),
    to: &Allocation,
) -> Result<bool, StoreError> {
    let sql = "UPDATE addresses SET kind = ?, user_type = ?, user_id = ?, comment = ?, reserved_at = ? \
               WHERE network_uuid = ? AND address = ? AND kind = ? AND user_type = ? AND user_id = ?";
    let values = params![
        to.kind,
        to.user.object_type,
        &to.user.id,
        &to.comment,
        now(),
        network,
        number(address),
        kind,
        user.object_type,
        &user.id
    ];
    Ok(tx.execute(sql, values).await? == 1)
}

/// Returns the addresses of a kind that an object uses. Reads all addresses.
pub async fn of_user(
    mut db: impl Read,
    kind: AddressType,
    user: &ObjectRef,
) -> Result<Vec<(NetworkId, Ipv4Addr)>, StoreError> {
    let sql = "SELECT network_uuid, address FROM addresses WHERE kind = ? AND user_type = ? AND user_id = ?";
    db.fetch(sql, params![kind, user.object_type, &user.id]).await
}

/// Returns the addresses that have been quarantined since before `before`, oldest first.
pub async fn quarantined_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<(NetworkId, Ipv4Addr)>, StoreError> {
    let sql = "SELECT network_uuid, address FROM address_halos WHERE since <= ? ORDER BY since LIMIT ?";
    db.fetch(sql, params![before, limit]).await
}

/// Ends the quarantine of an address, which becomes free. Returns `false` if it is not quarantined since `before`.
pub async fn free_quarantined(
    tx: &mut Tx,
    pool: AddressPool,
    address: Ipv4Addr,
    before: f64,
) -> Result<bool, StoreError> {
    let released = tx
        .execute(
            "DELETE FROM address_halos WHERE network_uuid = ? AND address = ? AND since <= ?",
            params![pool.network, number(address), before],
        )
        .await?;
    if released == 0 {
        return Ok(false);
    }
    let affected = tx
        .execute(
            "DELETE FROM addresses WHERE network_uuid = ? AND address = ? AND kind = ?",
            params![pool.network, number(address), AddressType::Halo],
        )
        .await?;
    if affected == 1 {
        count(tx, pool, address, -1).await?;
    }
    Ok(affected == 1)
}

/// Removes up to [`REMOVE_BATCH`] addresses of a deleted network. Returns whether there were any.
pub async fn remove_batch_of(tx: &mut Tx, network: NetworkId) -> Result<bool, StoreError> {
    let last: Option<i64> = tx
        .fetch_one(
            "SELECT MAX(address) FROM (SELECT address FROM addresses WHERE network_uuid = ? ORDER BY address LIMIT ?) \
             AS some",
            params![network, REMOVE_BATCH],
        )
        .await?;
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
