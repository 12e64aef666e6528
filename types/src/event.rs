//! Events: what happened, to which objects, when, on which node.

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

/// An event on its way to the database.
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
    pub objects: Vec<ObjectRef>,
}

impl Event {
    /// An event about one object, now. Node and request are filled in by who records it.
    #[must_use]
    pub fn new(event_type: EventType, object: ObjectRef, message: impl Into<String>) -> Self {
        Self {
            // Version 7 ids sort by time, so events of one instant keep the order of their recording.
            event_uuid: Uuid::now_v7(),
            timestamp: now(),
            event_type,
            message: message.into(),
            extra: Map::new(),
            node: String::new(),
            request_id: None,
            duration: None,
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

    /// Links the event to one more object.
    #[must_use]
    pub fn with_object(mut self, object: ObjectRef) -> Self {
        self.objects.push(object);
        self
    }
}

/// An event as the API answers it: the union of the field names that released clients read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventRecord {
    pub event_uuid: String,
    /// The API request that caused the event.
    pub request_id: Option<String>,
    /// Unix time.
    pub timestamp: f64,
    pub event_type: String,
    /// The same as `event_type`.
    #[serde(rename = "type")]
    pub kind: String,
    pub message: String,
    #[schema(value_type = Object)]
    pub extra: Map<String, Value>,
    /// Name of the node that emitted the event.
    pub node: String,
    /// The same as `node`.
    pub fqdn: String,
    /// Seconds, where the event has a length.
    pub duration: Option<f64>,
}
