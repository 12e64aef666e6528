//! Capacity claims: CPUs, memory and disk of the whole cluster that are promised to a namespace until they expire.
//!
//! The used part of an active claim is what the instances of its namespace have allocated. Placement keeps the unused
//! part from all other namespaces, in its own transactions. No task expires claims: their expiry is checked when they
//! are read. See docs/decisions/0023.

use std::collections::HashMap;
use std::time::Duration;

use muster_types::claim::{ClaimRecord, ClaimState, CoverageState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{ClaimId, NodeId};
use muster_types::namespace::NamespaceState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::events::clear_events;
use crate::scheduler::{self, CapacityShortfall, ClusterCapacity, SchedulerPolicy};
use crate::state::NodeCapacity;
use muster_store::claims::{self, ClaimRow};
use muster_store::{StoreError, Tx, TxError, instances, metadata, namespaces, node_ledgers, transaction};
use muster_types::capacity::{Capacity, CommittedCapacity};

/// The version of the record's format.
const VERSION: i64 = 1;

/// A request to create or change a claim, not validated yet.
#[derive(Debug, Clone, Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewClaim)]
#[schema(example = json!({
    "limit_cpus": 8, "limit_memory_mb": 16384, "limit_disk_gb": 200, "expires_in_seconds": 86400
}))]
pub struct ClaimRequest {
    /// The number of virtual CPUs to reserve.
    #[schema(value_type = i64, minimum = 0)]
    pub limit_cpus: Option<Value>,
    /// The memory to reserve, in megabytes.
    #[schema(value_type = i64, minimum = 0)]
    pub limit_memory_mb: Option<Value>,
    /// The disk space to reserve, in gigabytes.
    #[schema(value_type = i64, minimum = 0)]
    pub limit_disk_gb: Option<Value>,
    /// Seconds until the claim expires.
    #[schema(value_type = i64, minimum = 1)]
    pub expires_in_seconds: Option<Value>,
    /// Whether to only check the request, without creating anything; false by default. The response is the record that would
    /// be created; its UUID is an example.
    pub dry_run: Option<bool>,
}

/// A validated request, with limits in the order of [`Capacity::parts`].
struct CheckedRequest {
    limits: [Option<i64>; 3],
    expires_in: Option<i64>,
}

const LIMITS: [&str; 3] = ["limit_cpus", "limit_memory_mb", "limit_disk_gb"];
const EXPIRES_IN: &str = "expires_in_seconds";

impl ClaimRequest {
    /// Validates the fields, in the order in which callers name them.
    fn check(&self, all_required: bool) -> Result<CheckedRequest> {
        let given = [&self.limit_cpus, &self.limit_memory_mb, &self.limit_disk_gb];
        let mut limits = [None; 3];
        for ((limit, name), value) in limits.iter_mut().zip(LIMITS).zip(given) {
            *limit = integer(name, value.as_ref(), all_required)?;
            if limit.is_some_and(|limit| limit < 0) {
                return Err(Error::Invalid(format!("{name} cannot be negative")));
            }
        }
        let expires_in = integer(EXPIRES_IN, self.expires_in_seconds.as_ref(), all_required)?;
        if expires_in.is_some_and(|seconds| seconds < 1) {
            return Err(Error::Invalid(format!("{EXPIRES_IN} must be positive")));
        }
        Ok(CheckedRequest { limits, expires_in })
    }
}

fn integer(name: &str, value: Option<&Value>, required: bool) -> Result<Option<i64>> {
    match value {
        None | Some(Value::Null) if required => Err(Error::Invalid(format!("no {name} specified"))),
        None | Some(Value::Null) => Ok(None),
        // A number beyond `i64` is still an integer.
        Some(value) if value.is_u64() => Ok(Some(value.as_i64().unwrap_or(i64::MAX))),
        Some(value) => {
            let number = value.as_i64().ok_or_else(|| Error::Invalid(format!("{name} is not an integer")))?;
            Ok(Some(number))
        }
    }
}

impl CheckedRequest {
    /// Returns the limits, by default those of `before`.
    fn limit(&self, before: &Capacity) -> Capacity {
        let [cpus, memory_mb, disk_gb] = self.limits;
        Capacity {
            cpus: cpus.unwrap_or(before.cpus),
            memory_mb: memory_mb.unwrap_or(before.memory_mb),
            disk_gb: disk_gb.unwrap_or(before.disk_gb),
        }
    }

    fn end(&self, now: f64) -> Option<f64> {
        self.expires_in.map(|seconds| now + seconds as f64)
    }
}

/// Creates a claim. Existing instances of the namespace count as used.
pub async fn create(
    app: &App,
    caller: &Caller,
    namespace: &str,
    request: &ClaimRequest,
) -> Result<ClaimRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let event = |message: &str| Event::audit(ObjectRef::namespace(namespace), message);
    app.record(caller, event("create namespace claim request from REST API"));
    let requested = request.check(true)?;
    let nodes = app.placement.get(&app.store, Duration::ZERO).await?;
    let row = transaction!(app.store, |tx| {
        // The lock serializes claims and instances of the same namespace.
        if !namespaces::lock(tx, namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        let time = now();
        if claims::list(&mut *tx, namespace).await?.iter().any(|row| row.is_active(time)) {
            return Err(Error::Conflict("this namespace already holds an active claim".into()).into());
        }
        let room = lock_ledgers(app, tx, &nodes).await?;
        let row = ClaimRow {
            id: ClaimId::new(),
            namespace: namespace.to_owned(),
            limit: requested.limit(&Capacity::default()),
            used: used(tx, namespace).await?,
            expires: requested.end(time).unwrap_or(time),
            updated: time,
        };
        require_room(tx, &row, room.as_ref()).await?;
        claims::insert(tx, &row).await?;
        Ok(row)
    })?;
    let created = Event::audit(object(row.id), "db record created").with("namespace", namespace);
    app.record(caller, with_limit(created, &row));
    to_record(app, row).await
}

/// Changes the given fields of an active claim.
pub async fn update(
    app: &App,
    caller: &Caller,
    namespace: &str,
    claim: &str,
    request: &ClaimRequest,
) -> Result<ClaimRecord> {
    let id = find(app, caller, namespace, claim).await?.id;
    app.record(caller, Event::audit(object(id), "update namespace claim request from REST API"));
    let requested = request.check(false)?;
    if requested.limits == [None; 3] && requested.expires_in.is_none() {
        return Err(Error::Invalid("no claim fields to update specified".into()));
    }
    let nodes = app.placement.get(&app.store, Duration::ZERO).await?;
    let written = transaction!(app.store, |tx| {
        if !namespaces::lock(tx, namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        let room = lock_ledgers(app, tx, &nodes).await?;
        let before = claims::get(&mut *tx, namespace, id).await?.ok_or_else(absent)?;
        let time = now();
        if !before.is_active(time) {
            let text = "this claim is no longer active and cannot be changed, delete it and create a new one";
            return Err(Error::Conflict(text.into()).into());
        }
        let row = ClaimRow {
            limit: requested.limit(&before.limit),
            used: used(tx, namespace).await?,
            expires: requested.end(time).unwrap_or(before.expires),
            updated: time,
            ..before.clone()
        };
        require_above_use(&before.limit, &row)?;
        // Capacity that was promised before stays promised, even if the cluster has shrunk.
        if row.limit.minus(&before.limit) != Capacity::default() {
            require_room(tx, &row, room.as_ref()).await?;
        }
        if !claims::set(tx, &row).await? {
            return Err(absent().into());
        }
        Ok(row)
    });
    if matches!(written, Err(Error::Contended)) {
        let text = "this claim was being changed concurrently and the update gave up, please retry";
        return Err(Error::Unavailable(text.into()));
    }
    let row = written?;
    let changed = Event::new(EventType::Mutate, object(id), "updated namespace claim");
    app.record(caller, with_limit(changed, &row));
    to_record(app, row).await
}

/// Deletes a claim. Returns its last record.
pub async fn delete(app: &App, caller: &Caller, namespace: &str, claim: &str) -> Result<ClaimRecord> {
    let id = find(app, caller, namespace, claim).await?.id;
    let event =
        |message: &str| Event::audit(ObjectRef::namespace(namespace), message).with("claim", id.to_string());
    app.record(caller, event("delete namespace claim request from REST API"));
    let (row, metadata) = transaction!(app.store, |tx| {
        // Placement locks all active claims.
        claims::lock_active(tx, now()).await?;
        let row = claims::get(&mut *tx, namespace, id).await?.ok_or_else(absent)?;
        let metadata = metadata::get(&mut *tx, ObjectType::NamespaceClaim, &id.to_string()).await?;
        claims::remove(tx, id).await?;
        Ok((row, metadata))
    })?;
    clear_events(&app.store, &object(id)).await?;
    let returned = if row.is_active(now()) { row.unused() } else { Capacity::default() };
    app.record(
        caller,
        event("namespace claim deleted, capacity returned")
            .with("clamped", false)
            .with("returned_cpus", returned.cpus)
            .with("returned_memory_mb", returned.memory_mb)
            .with("returned_disk_gb", returned.disk_gb),
    );
    Ok(record(row, metadata))
}

pub async fn get(app: &App, caller: &Caller, namespace: &str, claim: &str) -> Result<ClaimRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let id = claim.parse().map_err(|_| absent())?;
    let (row, metadata) = claims::with_metadata(&*app.store, namespace, id).await?.ok_or_else(absent)?;
    Ok(record(row, metadata))
}

/// Returns the claims of a namespace, oldest first, including expired ones.
pub async fn list(app: &App, caller: &Caller, namespace: &str) -> Result<Vec<ClaimRecord>> {
    require_namespace(&*app.store, caller, namespace).await?;
    records(app, claims::list(&*app.store, namespace).await?).await
}

/// Returns the claim as the subject of events and metadata.
pub async fn subject(app: &App, caller: &Caller, namespace: &str, claim: &str) -> Result<ObjectRef> {
    Ok(object(find(app, caller, namespace, claim).await?.id))
}

async fn find(app: &App, caller: &Caller, namespace: &str, claim: &str) -> Result<ClaimRow> {
    require_namespace(&*app.store, caller, namespace).await?;
    let id = claim.parse().map_err(|_| absent())?;
    claims::get(&*app.store, namespace, id).await?.ok_or_else(absent)
}

fn absent() -> Error {
    Error::not_found("namespace claim")
}

pub(crate) fn object(id: ClaimId) -> ObjectRef {
    ObjectRef::new(ObjectType::NamespaceClaim, id)
}

fn with_limit(event: Event, row: &ClaimRow) -> Event {
    LIMITS
        .into_iter()
        .zip(row.limit.parts())
        .fold(event, |event, (name, limit)| event.with(name, limit))
        .with("expires_at", row.expires)
}

/// Returns the record of a row, with its metadata.
async fn to_record(app: &App, row: ClaimRow) -> Result<ClaimRecord> {
    let metadata = metadata::get(&*app.store, ObjectType::NamespaceClaim, &row.id.to_string()).await?;
    Ok(record(row, metadata))
}

/// Returns the records of rows, with their metadata.
async fn records(app: &App, rows: Vec<ClaimRow>) -> Result<Vec<ClaimRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut metadata_of = metadata::of_objects(&*app.store, ObjectType::NamespaceClaim, &ids).await?;
    let records = rows.into_iter().zip(ids);
    Ok(records.map(|(row, id)| record(row, metadata_of.remove(&id).unwrap_or_default())).collect())
}

fn record(row: ClaimRow, metadata: Map<String, Value>) -> ClaimRecord {
    let active = row.is_active(now());
    ClaimRecord {
        uuid: row.id,
        namespace: row.namespace,
        state: ClaimState::Created,
        coverage_state: if active { CoverageState::Active } else { CoverageState::Expired },
        limit_cpus: row.limit.cpus,
        limit_memory_mb: row.limit.memory_mb,
        limit_disk_gb: row.limit.disk_gb,
        used_cpus: row.used.cpus,
        used_memory_mb: row.used.memory_mb,
        used_disk_gb: row.used.disk_gb,
        expires_at: row.expires,
        updated_at: row.updated,
        version: VERSION,
        metadata,
    }
}

/// Returns what the instances of a namespace have allocated. The caller has locked all ledgers.
async fn used(tx: &mut Tx, namespace: &str) -> Result<Capacity, TxError> {
    Ok(instances::committed_of(tx, namespace).await?)
}

/// Locks the ledgers of all nodes against allocations and releases until the transaction ends. Returns the room of the
/// cluster, `None` if no node has reported.
async fn lock_ledgers(
    app: &App,
    tx: &mut Tx,
    nodes: &NodeCapacity,
) -> Result<Option<ClusterCapacity>, StoreError> {
    let all: Vec<NodeId> = nodes.iter().map(|(facts, _)| facts.id).collect();
    let ledgers = node_ledgers::lock_all(tx, &all).await?;
    Ok(room(app, nodes, &ledgers))
}

/// Returns the room of the cluster according to the ledgers.
fn room(
    app: &App,
    nodes: &NodeCapacity,
    ledgers: &HashMap<NodeId, CommittedCapacity>,
) -> Option<ClusterCapacity> {
    let ledger = |node: &NodeId| ledgers.get(node).copied().unwrap_or_default();
    let each = nodes.iter().map(|(facts, _)| (&**facts, ledger(&facts.id)));
    scheduler::cluster_capacity(each, &SchedulerPolicy::from(&app.settings))
}

/// Returns the unused capacity that is promised to other namespaces.
fn promised_to_others(active: &[ClaimRow], namespace: &str) -> Capacity {
    let others = active.iter().filter(|row| row.namespace != namespace);
    others.fold(Capacity::default(), |sum, row| sum.plus(&row.unused()))
}

/// Rejects a claim whose unused part the cluster cannot keep free.
async fn require_room(tx: &mut Tx, row: &ClaimRow, room: Option<&ClusterCapacity>) -> Result<(), TxError> {
    let Some(room) = room else {
        let text = "the cluster capacity accounting is not available yet, please retry";
        return Err(Error::Unavailable(text.into()).into());
    };
    let others = promised_to_others(&claims::active(tx, now()).await?, &row.namespace);
    let Err(lacking) = scheduler::require_claimable(&row.unused(), &others, room) else { return Ok(()) };
    let detail = lacking.into_iter().map(|CapacityShortfall { part, total, taken }| {
        let (name, requested) = (Capacity::NAMES[part], row.limit.parts()[part]);
        // The namespace's own use is part of its request.
        let taken = (taken - row.used.parts()[part] as f64).max(0.0);
        format!("{name} (limit {total:.0}, used {taken:.0}, requested {requested})")
    });
    let detail: Vec<String> = detail.collect();
    let text = "the cluster does not have the capacity to promise this claim";
    Err(Error::InsufficientCapacity(format!("{text}: {}", detail.join(", "))).into())
}

/// Rejects limits below the current use. A limit that is already exceeded may grow towards the use.
fn require_above_use(before: &Capacity, row: &ClaimRow) -> Result<()> {
    let parts = before.parts().into_iter().zip(row.used.parts()).zip(row.limit.parts());
    let below: Vec<String> = Capacity::NAMES
        .into_iter()
        .zip(parts)
        .filter(|(_, ((before, used), limit))| limit < before && limit < used)
        .map(|(name, ((before, used), limit))| {
            format!("{name} (limit {before}, used {used}, requested {limit})")
        })
        .collect();
    if below.is_empty() {
        return Ok(());
    }
    let text = "a claim cannot be shrunk below what it is already using";
    Err(Error::Conflict(format!("{text}: {}", below.join(", "))))
}

/// Charges a new instance to the claim of its namespace, if there is one, as part of the transaction that places it and
/// after a ledger is locked. Returns the reason if the capacity is promised to others.
pub(crate) async fn charge_in(
    app: &App,
    tx: &mut Tx,
    namespace: &str,
    wanted: &Capacity,
    nodes: &NodeCapacity,
) -> Result<Result<(), String>, TxError> {
    let active = claims::lock_active(tx, now()).await?;
    if active.is_empty() {
        return Ok(Ok(()));
    }
    let others = promised_to_others(&active, namespace);
    let own = active.into_iter().find(|row| row.namespace == namespace);
    let unused = own.as_ref().map(ClaimRow::unused).unwrap_or_default();
    let ledgers = node_ledgers::list(&mut *tx).await?;
    let room = room(app, nodes, &ledgers).unwrap_or_default();
    if let Err(denied) = scheduler::require_unclaimed(wanted, &unused, &others, &room) {
        return Ok(Err(denied.reason));
    }
    if let Some(own) = own {
        let row = ClaimRow { used: own.used.plus(wanted), updated: now(), ..own };
        claims::set(tx, &row).await?;
    }
    Ok(Ok(()))
}

/// Refunds the capacity of an instance to the claim of its namespace, as part of the transaction that releases it.
pub(crate) async fn refund_in(tx: &mut Tx, namespace: &str, claimed: &Capacity) -> Result<(), StoreError> {
    claims::release_use(tx, namespace, claimed).await
}
