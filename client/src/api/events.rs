//! Events, which all types of objects have.

use muster_types::event::EventRecord;
use muster_types::explanation::Explanation;

use super::client::Client;
use super::error::Result;
use super::object_path::ObjectPath;
use super::response::ApiResponse;
use super::uri::with_query;

/// Selects events.
#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// The maximum number of events; the server's default if absent.
    pub limit: Option<u32>,
    /// Selects only events of this type.
    pub event_type: Option<String>,
}

impl Client {
    /// Lists the events of an object, newest first.
    pub async fn events(
        &self,
        object: ObjectPath<'_>,
        query: &EventQuery,
    ) -> Result<ApiResponse<Vec<EventRecord>>> {
        let limit = query.limit.map(|limit| limit.to_string());
        let pairs = [("limit", limit.as_deref()), ("event_type", query.event_type.as_deref())];
        self.get(with_query(object.path(&["events"])?, &pairs)).await
    }

    /// Explains why an instance, a network or an operation is in its state.
    pub async fn explain(&self, object: ObjectPath<'_>) -> Result<ApiResponse<Explanation>> {
        self.get(object.path(&["explain"])?).await
    }
}
