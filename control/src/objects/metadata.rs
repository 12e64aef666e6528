//! Metadata: a key/value store on every object, which the service does not interpret.
//!
//! The module of the object checks access before it calls this one.

use muster_types::event::Event;
use muster_types::namespace::NamespaceState;
use muster_types::object::{ObjectRef, ObjectType, check_path_segment};
use muster_types::{Error, Result, spec};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::network::state::PRESENT;
use muster_store::{
    StoreError, Tx, artifacts, blobs, instances, interfaces, metadata, namespaces, networks, transaction,
};

/// The maximum size of the metadata of an object: its record contains all of it.
const MAX_BYTES: i64 = 256 << 10;
/// The size above which a value is omitted from the event.
const MAX_EVENT_VALUE_BYTES: usize = 1024;

/// The event of an accepted affinity in the older format.
pub(crate) const DEPRECATED_AFFINITY: &str = "deprecated weighted affinity specification accepted";

pub async fn get(app: &App, object: &ObjectRef) -> Result<Map<String, Value>> {
    Ok(metadata::get(&*app.store, object.object_type, &object.id).await?)
}

/// Locks an object against deletion until the transaction ends. Returns whether it exists.
async fn lock(tx: &mut Tx, object: &ObjectRef) -> Result<bool, StoreError> {
    match object.object_type {
        ObjectType::Namespace => namespaces::lock(tx, &object.id, NamespaceState::Created).await,
        ObjectType::Network => match object.id.parse() {
            Ok(id) => networks::lock(tx, id, PRESENT).await,
            Err(_) => Ok(false),
        },
        ObjectType::Interface => match object.id.parse() {
            Ok(id) => interfaces::lock(tx, id).await,
            Err(_) => Ok(false),
        },
        ObjectType::Instance => match object.id.parse() {
            Ok(id) => instances::lock_undeleted(tx, id).await,
            Err(_) => Ok(false),
        },
        ObjectType::Artifact => match object.id.parse() {
            Ok(id) => artifacts::lock(tx, id).await,
            Err(_) => Ok(false),
        },
        ObjectType::Blob => match object.id.parse() {
            Ok(id) => blobs::lock(tx, id).await,
            Err(_) => Ok(false),
        },
        // Nodes are never removed, and the others have no metadata.
        ObjectType::Node
        | ObjectType::ApiRequest
        | ObjectType::NamespaceKey
        | ObjectType::NamespaceClaim
        | ObjectType::Upload
        | ObjectType::ClusterOperation
        | ObjectType::AgentOperation
        | ObjectType::Issuer
        | ObjectType::Rule => Ok(true),
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
        metadata::set(tx, object.object_type, &object.id, key, value).await?;
        if metadata::size(&mut *tx, object.object_type, &object.id).await? > MAX_BYTES {
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
    let value = value.filter(|value| !is_falsy(value));
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
    transaction!(app.store, |tx| { Ok(metadata::remove(tx, object.object_type, &object.id, key).await?) })?;
    app.record(
        caller,
        Event::audit(object.clone(), "delete metadata key request from REST API").with("key", key),
    );
    Ok(())
}

/// Returns whether a value means "no value" to the existing clients.
fn is_falsy(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}
