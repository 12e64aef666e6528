//! `/nodes`.

use muster_types::node::NodeRecord;
use reqwest::Method;
use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the nodes.
    pub async fn nodes(&self) -> Result<ApiResponse<Vec<NodeRecord>>> {
        self.get(path(&["nodes"])?).await
    }

    /// Returns a node by name or id.
    pub async fn node(&self, node: &str) -> Result<ApiResponse<NodeRecord>> {
        self.get(path(&["nodes", node])?).await
    }

    /// Deletes a node. One that is alive or has instances is only deleted with `force`.
    pub async fn delete_node(&self, node: &str, force: bool) -> Result<ApiResponse<NodeRecord>> {
        let body = force.then(|| json!({ "force": true }));
        self.call(Method::DELETE, path(&["nodes", node])?, body).await
    }

    /// Returns the CPU usage of a node's daemon.
    pub async fn process_metrics(&self, node: &str) -> Result<ApiResponse<Map<String, Value>>> {
        self.get(path(&["nodes", node, "processmetrics"])?).await
    }
}
