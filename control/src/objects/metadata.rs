//! Metadata: a key/value store on every object, which the service does not interpret.
//!
//! Who may reach the object is decided by the object's own module before it comes here.

use muster_types::event::Event;
use muster_types::namespace::NamespaceState;
use muster_types::object::{ObjectRef, ObjectType, check_segment};
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::{instance, network};
use muster_store::{
    StoreError, Tx, artifacts, blobs, instances, interfaces, metadata, namespaces, networks, transaction,
};

/// All metadata of an object is part of its record, so it is bounded.
const MOST_BYTES: i64 = 256 << 10;
/// Values longer than this are not repeated in the event.
const LONGEST_TRACE: usize = 1024;

pub async fn get(app: &App, object: &ObjectRef) -> Result<Map<String, Value>> {
    Ok(metadata::get(&*app.store, object.object_type, &object.id).await?)
}

/// Keeps an object from going until this transaction ends. Says whether it is there.
async fn hold(tx: &mut Tx, object: &ObjectRef) -> Result<bool, StoreError> {
    match object.object_type {
        ObjectType::Namespace => namespaces::lock(tx, &object.id, NamespaceState::Created).await,
        ObjectType::Network => match object.id.parse() {
            Ok(id) => networks::lock(tx, id, network::PRESENT).await,
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

/// Creates or replaces one key.
pub async fn set(
    app: &App,
    caller: &Caller,
    object: &ObjectRef,
    key: Option<&str>,
    value: Option<Value>,
) -> Result<()> {
    let (key, value) = check(key, value.as_ref())?;
    let deprecated = object.object_type == ObjectType::Instance && instance::check_metadata(key, value)?;
    transaction!(app.store, |tx| {
        // What is set must not outlive an object that goes at the same moment.
        if !hold(tx, object).await? {
            return Err(Error::not_found(object.object_type.as_str()).into());
        }
        metadata::set(tx, object.object_type, &object.id, key, value).await?;
        if metadata::size(&mut *tx, object.object_type, &object.id).await? > MOST_BYTES {
            return Err(too_much().into());
        }
        Ok(())
    })?;
    let long = value.to_string().len() > LONGEST_TRACE;
    let traced = if long { "...value not logged as it is too long...".into() } else { value.clone() };
    app.record(
        caller,
        Event::audit(object.clone(), "set metadata key request from REST API")
            .with("key", key)
            .with("value", traced)
            .with("method", caller.method.to_lowercase()),
    );
    if deprecated {
        app.record(caller, Event::audit(object.clone(), instance::DEPRECATED_AFFINITY));
    }
    Ok(())
}

/// Refuses a key or a value that no object may carry.
pub(crate) fn check<'a>(key: Option<&'a str>, value: Option<&'a Value>) -> Result<(&'a str, &'a Value)> {
    let key = key.filter(|key| !key.is_empty()).ok_or_else(|| Error::Invalid("no key specified".into()))?;
    if key.chars().count() > 255 {
        return Err(Error::Invalid("key: must be at most 255 characters".into()));
    }
    check_segment("key", key)?;
    let value = value.filter(|value| !is_falsy(value));
    Ok((key, value.ok_or_else(|| Error::Invalid("no value specified".into()))?))
}

/// Refuses more than an object may carry at once.
pub(crate) fn check_size(map: &Map<String, Value>) -> Result<()> {
    let size: usize = map.iter().map(|(key, value)| key.len() + value.to_string().len()).sum();
    if i64::try_from(size).is_ok_and(|size| size <= MOST_BYTES) { Ok(()) } else { Err(too_much()) }
}

fn too_much() -> Error {
    Error::Invalid(format!("value: the metadata of one object may hold {MOST_BYTES} bytes at most"))
}

/// Removes one key, if it is there.
pub async fn remove(app: &App, caller: &Caller, object: &ObjectRef, key: &str) -> Result<()> {
    transaction!(app.store, |tx| { Ok(metadata::remove(tx, object.object_type, &object.id, key).await?) })?;
    app.record(
        caller,
        Event::audit(object.clone(), "delete metadata key request from REST API").with("key", key),
    );
    Ok(())
}

/// Values that mean "nothing" to the existing clients.
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
