//! Events, which all types of objects have.

use muster_types::event::EventRecord;
use muster_types::explanation::Explanation;
use serde_json::Value;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::object_path::ObjectPath;
use super::response::ApiResponse;
use super::uri::with_query;

/// The number of events that the server returns by default.
const DEFAULT_LIMIT: u32 = 100;

/// Selects events.
#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// The maximum number of events; the server's default if absent.
    pub limit: Option<u32>,
    /// Selects only events of this type.
    pub event_type: Option<String>,
    /// Conditions such as `node:sim-1`, all of which must be met.
    pub filter: Vec<String>,
}

impl Client {
    /// Returns any object that has events.
    pub async fn object(&self, object: ObjectPath<'_>) -> Result<ApiResponse<Value>> {
        self.get(object.path(&[])?).await
    }

    /// Lists the events of an object, newest first.
    pub async fn events(
        &self,
        object: ObjectPath<'_>,
        query: &EventQuery,
    ) -> Result<ApiResponse<Vec<EventRecord>>> {
        let path = with_query(object.path(&["events"])?, &[("event_type", query.event_type.as_deref())]);
        // An object may have millions of events: without a limit, the server returns the newest.
        let limit = query.limit.or((!query.filter.is_empty()).then_some(DEFAULT_LIMIT));
        self.get_list(path, &ListQuery { limit, sort: None, filter: query.filter.clone() }).await
    }

    /// Explains why an instance, a network or an operation is in its state.
    pub async fn explain(&self, object: ObjectPath<'_>) -> Result<ApiResponse<Explanation>> {
        self.get(object.path(&["explain"])?).await
    }
}
