//! The storage that nodes share: which one the cluster knows at a path. See docs/decisions/0073.

use std::fmt::Write as _;
use std::str::FromStr;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use muster_store::instances::InstanceRow;
use muster_store::{StoreError, cluster_values, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::{ClusterId, StorageId};
use muster_types::node::NodeApi;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::shared_storage::SharedStorageRecord;
use muster_types::{Error, Result};

use crate::app::App;
use crate::objects::instance::object;

/// The name of the cluster value with the id of the cluster.
const CLUSTER_ID: &str = "CLUSTER_UUID";

/// Inspects the shared storage of a node for its report; `None` without `SHARED_STORAGE`. The first node that has mounted it
/// registers the storage at this path. The others must see the same one, so that a node on which it is not mounted is noticed.
pub(crate) async fn inspect(app: &App, node: &Arc<dyn NodeApi>) -> Result<Option<SharedStorageRecord>> {
    let path = &app.settings.shared_storage;
    if path.is_empty() {
        return Ok(None);
    }
    let name = registration_name(path);
    let cluster = cluster_id(app).await?;
    let registered = cluster_values::get(&*app.store, &name).await?;
    let registered: Option<StorageId> = registered.as_deref().map(parse_id).transpose()?;
    let found = node.inspect_shared_storage(cluster, registered).await?;
    let Some(found) = found else { return Ok(None) };
    if let (None, Some(uuid)) = (registered, found.uuid) {
        register(app, &name, uuid).await?;
    }
    record_change(app, node, &found);
    Ok(Some(found))
}

/// Parses an id that is stored as a cluster value.
fn parse_id<T: FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| Error::Internal(format!("the cluster value {text:?} is not an id")))
}

/// Returns the id of the cluster, which is created when it is first needed.
async fn cluster_id(app: &App) -> Result<ClusterId> {
    if let Some(id) = cluster_values::get(&*app.store, CLUSTER_ID).await? {
        return parse_id(&id);
    }
    transaction!(app.store, |tx| {
        if let Some(id) = cluster_values::get(&mut *tx, CLUSTER_ID).await? {
            return Ok(parse_id(&id)?);
        }
        let id = ClusterId::new();
        // If two daemons create it, the one that does not insert retries and reads.
        let inserted = cluster_values::insert(tx, CLUSTER_ID, &id.to_string()).await;
        inserted.map_err(StoreError::retry_duplicate)?;
        Ok(id)
    })
}

/// Returns the name of the cluster value with the storage at a path. The length of names is limited.
fn registration_name(path: &str) -> String {
    let hash = digest(&SHA256, path.as_bytes());
    let mut name = "SHARED_STORAGE_".to_owned();
    for byte in &hash.as_ref()[..16] {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// Registers a storage, unless another node has registered one at the same path; the next inspection compares them.
async fn register(app: &App, name: &str, uuid: StorageId) -> Result<()> {
    transaction!(app.store, |tx| {
        if cluster_values::get(&mut *tx, name).await?.is_none() {
            let inserted = cluster_values::insert(tx, name, &uuid.to_string()).await;
            inserted.map_err(StoreError::retry_duplicate)?;
        }
        Ok(())
    })
}

/// Records when the shared storage of a node becomes unusable, and when it recovers.
fn record_change(app: &App, node: &Arc<dyn NodeApi>, found: &SharedStorageRecord) {
    let id = node.identity().id;
    let last = app.storage_problems.lock().insert(id, found.problem.clone()).flatten();
    if last == found.problem {
        return;
    }
    let message = match &found.problem {
        Some(_) => "shared storage cannot be used",
        None => "shared storage can be used again",
    };
    let (node, reason) = (&node.identity().name, found.problem.as_deref().unwrap_or_default());
    tracing::warn!(node, path = found.path, reason, message);
    let event = Event::new(EventType::Health, ObjectRef::new(ObjectType::Node, id), message);
    app.events.record(event.with("path", found.path.clone()).with("reason", reason));
}

/// Records why the VM of an instance cannot use its disks on shared storage yet. Operations repeat the attempt, so the same
/// reason is recorded once.
pub(crate) fn record_wait(app: &App, row: &InstanceRow, outcome: &Result<()>) {
    if row.spec.storage_uuid.is_none() {
        return;
    }
    let Err(Error::NotReady(reason)) = outcome else {
        app.storage_waits.lock().remove(&row.id);
        return;
    };
    if app.storage_waits.lock().insert(row.id, reason.clone()).as_ref() == Some(reason) {
        return;
    }
    let message = "the VM waits for its disks on shared storage";
    tracing::warn!(instance = %row.id, reason, message);
    app.events.record(Event::new(EventType::Status, object(row.id), message).with("reason", reason.clone()));
}
