//! Events: the history of objects. See docs/decisions/0002 and 0005.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::object::{ObjectRef, string_enum};
use crate::time::now;

string_enum! {
    /// The category of an event; each has its own retention.
    EventType {
        Audit = "audit",
        Mutate = "mutate",
        Status = "status",
        Usage = "usage",
        Resources = "resources",
        Prune = "prune",
        Historic = "historic",
        Health = "health",
    }
}

/// An event that is to be stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub event_uuid: Uuid,
    pub timestamp: f64,
    pub event_type: EventType,
    pub message: String,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
    pub node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<f64>,
    /// The namespace that caused the event, if it was not the service itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    pub objects: Vec<ObjectRef>,
}

impl Event {
    /// Creates an event about one object with the current time. The recorder fills in node and request.
    #[must_use]
    pub fn new(event_type: EventType, object: ObjectRef, message: impl Into<String>) -> Self {
        Self {
            // Version 7 UUIDs sort by time, so events with the same timestamp keep their order.
            event_uuid: Uuid::now_v7(),
            timestamp: now(),
            event_type,
            message: message.into(),
            extra: Map::new(),
            node: String::new(),
            request_id: None,
            duration: None,
            namespace: None,
            objects: vec![object],
        }
    }

    #[must_use]
    pub fn audit(object: ObjectRef, message: impl Into<String>) -> Self {
        Self::new(EventType::Audit, object, message)
    }

    /// Adds a structured field.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.extra.insert(key.to_owned(), value.into());
        self
    }

    /// Links the event to another object.
    #[must_use]
    pub fn with_object(mut self, object: ObjectRef) -> Self {
        self.objects.push(object);
        self
    }
}

/// An event as the API returns it, with all field names that released clients read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventRecord {
    /// UUID of the event.
    pub event_uuid: String,
    /// The API request that caused the event.
    pub request_id: Option<String>,
    /// Unix time.
    pub timestamp: f64,
    /// The category of the event, such as `audit`.
    pub event_type: String,
    /// The same as `event_type`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What happened.
    pub message: String,
    /// Further details by name.
    #[schema(value_type = Object)]
    pub extra: Map<String, Value>,
    /// The name of the node that emitted the event.
    pub node: String,
    /// The same as `node`.
    pub fqdn: String,
    /// The duration in seconds, if the event has one.
    pub duration: Option<f64>,
}
