//! The events calls, which every kind of object has alike.

use muster_types::event::EventRecord;

use super::{Answer, Client, Object, Result, with_query};

/// Which events to answer.
#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// How many at most; the server's own limit when absent.
    pub limit: Option<u32>,
    /// Only those of this type.
    pub event_type: Option<String>,
}

impl Client {
    /// Events of an object, newest first.
    pub async fn events(&self, object: Object<'_>, query: &EventQuery) -> Result<Answer<Vec<EventRecord>>> {
        let limit = query.limit.map(|limit| limit.to_string());
        let pairs = [("limit", limit.as_deref()), ("event_type", query.event_type.as_deref())];
        self.get(with_query(object.path(&["events"])?, &pairs)).await
    }
}
