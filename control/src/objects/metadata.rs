//! Metadata: a key/value store on every object, which the service does not interpret.
//!
//! The module of the object checks access before it calls this one. Blobs have no owner: each namespace has its own
//! metadata of a blob, and `system` sees all, with the keys of the others as `<namespace>/<key>`.

use std::collections::HashMap;

use muster_types::event::Event;
use muster_types::ids::BlobId;
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::object::{ObjectRef, ObjectType, check_path_segment};
use muster_types::{Error, Result, spec};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::network::state::PRESENT;
use muster_store::blob_metadata::BlobMetadataRow;
use muster_store::{
    StoreError, Tx, TxError, agent_operations, artifacts, blob_metadata, blobs, claims, instances,
    interfaces, issuers, keys, metadata, namespaces, networks, operations, rules, transaction, uploads,
};

/// The maximum size of the metadata of an object: its record contains all of it.
const MAX_BYTES: i64 = 256 << 10;
/// The size above which a value is omitted from the event.
const MAX_EVENT_VALUE_BYTES: usize = 1024;

/// The event of an accepted affinity in the older format.
pub(crate) const DEPRECATED_AFFINITY: &str = "deprecated weighted affinity specification accepted";

/// Returns the metadata of an object that the caller may see.
pub async fn get(app: &App, caller: &Caller, object: &ObjectRef) -> Result<Map<String, Value>> {
    match blob_id(object)? {
        Some(id) => {
            let namespace = (!caller.is_system()).then_some(caller.namespace.as_str());
            let rows = blob_metadata::of_blob(&*app.store, id, namespace).await?;
            Ok(by_blob(Some(caller), rows).remove(&id).unwrap_or_default())
        }
        None => Ok(metadata::get(&*app.store, object.object_type, &object.id).await?),
    }
}

/// Returns the id of a blob, `None` for other objects.
fn blob_id(object: &ObjectRef) -> Result<Option<BlobId>> {
    if object.object_type != ObjectType::Blob {
        return Ok(None);
    }
    object.id.parse().map(Some).map_err(|_| Error::not_found("blob"))
}

/// Returns the metadata of blobs by blob, from the rows that the caller may see; `None` sees all.
pub(crate) fn by_blob(
    caller: Option<&Caller>,
    rows: Vec<BlobMetadataRow>,
) -> HashMap<BlobId, Map<String, Value>> {
    let namespace = caller.filter(|caller| !caller.is_system()).map(|caller| caller.namespace.as_str());
    let mut by_blob: HashMap<BlobId, Map<String, Value>> = HashMap::new();
    for row in rows {
        let is_own = row.namespace == namespace.unwrap_or(SYSTEM_NAMESPACE);
        let key = if is_own { row.name } else { format!("{}/{}", row.namespace, row.name) };
        by_blob.entry(row.blob).or_default().insert(key, row.value);
    }
    by_blob
}

/// Writes a key and returns the size of all keys next to it.
async fn set_in(
    tx: &mut Tx,
    caller: &Caller,
    object: &ObjectRef,
    key: &str,
    value: &Value,
) -> Result<i64, TxError> {
    Ok(match blob_id(object)? {
        Some(id) => {
            blob_metadata::set(tx, id, &caller.namespace, key, value).await?;
            blob_metadata::size(&mut *tx, id, &caller.namespace).await?
        }
        None => {
            metadata::set(tx, object.object_type, &object.id, key, value).await?;
            metadata::size(&mut *tx, object.object_type, &object.id).await?
        }
    })
}

async fn remove_in(tx: &mut Tx, caller: &Caller, object: &ObjectRef, key: &str) -> Result<(), TxError> {
    match blob_id(object)? {
        Some(id) => {
            let foreign = key.split_once('/').filter(|_| caller.is_system());
            let (namespace, key) = foreign.unwrap_or((&caller.namespace, key));
            blob_metadata::remove(tx, id, namespace, key).await?;
        }
        None => metadata::remove(tx, object.object_type, &object.id, key).await?,
    }
    Ok(())
}

/// Locks an object against deletion until the transaction ends. Returns whether it exists.
async fn lock(tx: &mut Tx, object: &ObjectRef) -> Result<bool, StoreError> {
    /// Calls a function with the parsed id. An object without a valid id does not exist.
    macro_rules! with_id {
        ($lock:path $(, $argument:expr)?) => {
            match object.id.parse() {
                Ok(id) => $lock(tx, id $(, $argument)?).await,
                Err(_) => Ok(false),
            }
        };
    }
    match object.object_type {
        ObjectType::Namespace => namespaces::lock(tx, &object.id, NamespaceState::Created).await,
        ObjectType::NamespaceKey => with_id!(keys::lock),
        ObjectType::NamespaceClaim => with_id!(claims::lock),
        ObjectType::Rule => with_id!(rules::lock),
        ObjectType::Issuer => with_id!(issuers::lock),
        ObjectType::Network => with_id!(networks::lock, PRESENT),
        ObjectType::Interface => with_id!(interfaces::lock),
        ObjectType::Instance => with_id!(instances::lock_undeleted),
        ObjectType::Artifact => with_id!(artifacts::lock),
        ObjectType::Blob => with_id!(blobs::lock),
        ObjectType::Upload => with_id!(uploads::lock),
        ObjectType::ClusterOperation => with_id!(operations::lock),
        ObjectType::AgentOperation => with_id!(agent_operations::lock),
        // Nodes are never removed, and requests have no metadata.
        ObjectType::Node | ObjectType::ApiRequest => Ok(true),
    }
}

/// Creates or replaces a key.
pub async fn set(
    app: &App,
    caller: &Caller,
    object: &ObjectRef,
    key: Option<&str>,
    value: Option<Value>,
) -> Result<()> {
    let (key, value) = check(key, value.as_ref())?;
    let deprecated = object.object_type == ObjectType::Instance && check_instance_key(key, value)?;
    transaction!(app.store, |tx| {
        // The lock keeps a concurrently deleted object from leaving metadata behind.
        if !lock(tx, object).await? {
            return Err(Error::not_found(object.object_type.as_str()).into());
        }
        if set_in(tx, caller, object, key, value).await? > MAX_BYTES {
            return Err(too_large().into());
        }
        Ok(())
    })?;
    let long = value.to_string().len() > MAX_EVENT_VALUE_BYTES;
    let recorded = if long { "...value not logged as it is too long...".into() } else { value.clone() };
    app.record(
        caller,
        Event::audit(object.clone(), "set metadata key request from REST API")
            .with("key", key)
            .with("value", recorded)
            .with("method", caller.method.to_lowercase()),
    );
    if deprecated {
        app.record(caller, Event::audit(object.clone(), DEPRECATED_AFFINITY));
    }
    Ok(())
}

/// Rejects a value that the scheduler cannot read. Returns whether it uses a deprecated format.
pub(crate) fn check_instance_key(key: &str, value: &Value) -> Result<bool> {
    match key {
        "tags" => spec::parse_tags(value).map(|_| false),
        "affinity" => spec::parse_affinity(value).map(|(_, deprecated)| deprecated),
        _ => Ok(false),
    }
}

/// Rejects an invalid key or value.
pub(crate) fn check<'a>(key: Option<&'a str>, value: Option<&'a Value>) -> Result<(&'a str, &'a Value)> {
    let key = key.filter(|key| !key.is_empty()).ok_or_else(|| Error::Invalid("no key specified".into()))?;
    if key.chars().count() > 255 {
        return Err(Error::Invalid("key: must be at most 255 characters".into()));
    }
    check_path_segment("key", key)?;
    // Released clients send null for an argument that is not given.
    Ok((key, value.ok_or_else(|| Error::Invalid("no value specified".into()))?))
}

/// Rejects metadata that is too large for an object.
pub(crate) fn check_size(map: &Map<String, Value>) -> Result<()> {
    let size: usize = map.iter().map(|(key, value)| key.len() + value.to_string().len()).sum();
    if i64::try_from(size).is_ok_and(|size| size <= MAX_BYTES) { Ok(()) } else { Err(too_large()) }
}

fn too_large() -> Error {
    Error::Invalid(format!("value: the metadata of an object must be at most {MAX_BYTES} bytes"))
}

/// Removes a key, if it exists.
pub async fn remove(app: &App, caller: &Caller, object: &ObjectRef, key: &str) -> Result<()> {
    transaction!(app.store, |tx| { remove_in(tx, caller, object, key).await })?;
    app.record(
        caller,
        Event::audit(object.clone(), "delete metadata key request from REST API").with("key", key),
    );
    Ok(())
}
