//! Removes the rows of objects that were deleted or finished `CLEANER_DELAY` seconds ago.

use muster_store::{
    Store, StoreError, Tx, agent_operations, artifacts, blobs, exchanges, idempotency_keys, instances,
    interfaces, issuers, keys, metadata, namespaces, networks, operations, references, rules, tickets,
    transaction,
};
use muster_types::Result;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use super::task::TaskFuture;
use crate::app::App;
use crate::events::clear_events;
use crate::queue::{CleanNamespace, CleanNetwork, NewOperation, Operation};

/// The maximum number of objects of one type that a pass handles.
const BATCH: i64 = 500;

/// The number of seconds by which the clocks of two daemons may differ: a token that has expired here may still be valid
/// there.
const MAX_CLOCK_SKEW: f64 = 300.0;

type FindExpired = for<'a> fn(&'a Store, f64) -> TaskFuture<'a, Result<Vec<String>, StoreError>>;
type RemoveExpired = for<'a> fn(&'a mut Tx, &'a str) -> TaskFuture<'a, Result<bool, StoreError>>;

/// An object type whose expired rows are removed in one transaction each.
struct ExpiredType {
    object_type: ObjectType,
    /// Returns the ids of objects that expired before a time.
    find: FindExpired,
    /// Removes the row of an object. Returns whether it was still there and expired.
    remove: RemoveExpired,
}

macro_rules! expired_types {
    ($($object_type:ident: $find:path, |$row:ident| $id:expr, $remove:path;)+) => {
        &[$(ExpiredType {
            object_type: ObjectType::$object_type,
            find: |store, before| {
                Box::pin(async move {
                    let rows = $find(store, before, BATCH).await?;
                    Ok(rows.into_iter().map(|$row| $id.to_string()).collect())
                })
            },
            remove: |tx, id| {
                Box::pin(async move {
                    let id = id.parse().map_err(|_| StoreError::Internal(format!("{id:?} is not an id")))?;
                    $remove(tx, id).await
                })
            },
        }),+]
    };
}

/// Namespaces and networks need more than one transaction: they are removed by operations.
const EXPIRED_TYPES: &[ExpiredType] = expired_types! {
    Interface: interfaces::deleted_before, |id| id, interfaces::remove;
    Instance: instances::deleted_before, |id| id, instances::remove;
    AgentOperation: agent_operations::finished_before, |id| id, agent_operations::remove;
    Artifact: artifacts::deleted_before, |id| id, artifacts::remove;
    Blob: blobs::cleanable, |row| row.id, blobs::remove;
    NamespaceKey: keys::deleted_before, |key| key.id, keys::remove_deleted;
    Issuer: issuers::deleted_before, |id| id, issuers::remove_deleted;
    Rule: rules::deleted_before, |id| id, rules::remove_deleted;
    ClusterOperation: operations::finished_before, |id| id, operations::remove;
};

/// Runs one pass. Returns whether there is more to do right away.
pub async fn run(app: &App) -> Result<bool> {
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let before = now() - app.settings.cleaner_delay as f64;
    let mut counts = vec![enqueue_operations(app, before).await?];
    for expired in EXPIRED_TYPES {
        let ids = (expired.find)(&app.store, before).await?;
        if !ids.is_empty() {
            tracing::debug!(object_type = %expired.object_type, count = ids.len(), "removing expired objects");
        }
        counts.push(ids.len());
        for id in ids {
            remove(app, expired, ObjectRef { object_type: expired.object_type, id }).await?;
        }
    }
    counts.push(remove_exchanges(app).await?);
    Ok(counts.into_iter().any(|count| i64::try_from(count).expect("batches are small") >= BATCH))
}

async fn remove(app: &App, expired: &ExpiredType, object: ObjectRef) -> Result<()> {
    clear_events(&app.store, &object).await?;
    transaction!(app.store, |tx| {
        if (expired.remove)(tx, &object.id).await? {
            references::remove_from(tx, &object).await?;
            metadata::remove_of(tx, object.object_type, &object.id).await?;
        }
        Ok(())
    })
}

/// Queues the removal of namespaces and networks. Returns the number of expired ones.
async fn enqueue_operations(app: &App, before: f64) -> Result<usize> {
    let expired_namespaces = namespaces::deleted_before(&*app.store, before, BATCH).await?;
    let expired_networks = networks::cleanable(&*app.store, before, BATCH).await?;
    let count = expired_namespaces.len() + expired_networks.len();
    let mut queued = false;
    for row in expired_namespaces {
        let target = ObjectRef::namespace(&row.name);
        queued |= enqueue(app, NewOperation::new(target, Some(row.name), CleanNamespace {})).await?;
    }
    for row in expired_networks {
        let target = ObjectRef::new(ObjectType::Network, row.id);
        queued |= enqueue(app, NewOperation::new(target, row.namespace, CleanNetwork {})).await?;
    }
    if queued {
        app.queue.wake();
    }
    Ok(count)
}

/// Queues an operation unless it is pending. Returns whether it was not.
async fn enqueue<P: Operation + Clone>(app: &App, operation: NewOperation<P>) -> Result<bool> {
    transaction!(app.store, |tx| {
        if operations::is_pending(&mut *tx, &operation.target, P::KIND.name).await? {
            return Ok(false);
        }
        operation.clone().enqueue(tx).await?;
        Ok(true)
    })
}

/// Removes the counts of past minutes, used tokens that have expired, and expired tickets and idempotency keys. Returns the
/// largest number of these.
async fn remove_exchanges(app: &App) -> Result<usize> {
    let before = now() - MAX_CLOCK_SKEW;
    #[expect(clippy::cast_possible_truncation, reason = "Unix time is small")]
    let minute = (before / 60.0).floor() as i64;
    transaction!(app.store, |tx| {
        let tokens = exchanges::remove_tokens(tx, before, BATCH).await?;
        let tickets = tickets::remove_expired(tx, before, BATCH).await?;
        let responses = idempotency_keys::remove_expired(tx, BATCH).await?;
        Ok(tokens.max(tickets).max(responses).max(exchanges::remove_attempts(tx, minute, BATCH).await?))
    })
}
