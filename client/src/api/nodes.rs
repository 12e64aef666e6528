//! `/nodes`.

use muster_types::invitation::InvitationRecord;
use muster_types::node::{DrainRecord, EvacuationRecord, NodeRecord};
use reqwest::Method;
use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the nodes.
    pub async fn nodes(&self, query: &ListQuery) -> Result<ApiResponse<Vec<NodeRecord>>> {
        self.get_list(path(&["nodes"])?, query).await
    }

    /// Returns a node by name or id.
    pub async fn node(&self, node: &str) -> Result<ApiResponse<NodeRecord>> {
        self.get(path(&["nodes", node])?).await
    }

    /// Deletes a node. One that does not check in is only deleted with `dead`.
    pub async fn delete_node(&self, node: &str, dead: bool) -> Result<ApiResponse<NodeRecord>> {
        let body = dead.then(|| json!({ "dead": true }));
        self.call(Method::DELETE, path(&["nodes", node])?, body).await
    }

    /// Restarts the instances of a node that does not check in on other nodes. Requires `dead`.
    pub async fn evacuate_node(&self, node: &str, dead: bool) -> Result<ApiResponse<Vec<EvacuationRecord>>> {
        let body = json!({ "dead": dead });
        self.call(Method::POST, path(&["nodes", node, "evacuate"])?, Some(body)).await
    }

    /// Drains a node; with `dry_run` only returns the forecast. With `stop`, instances that cannot be migrated while they run are
    /// powered off, and started on their new nodes.
    pub async fn drain_node(
        &self,
        node: &str,
        stop: bool,
        dry_run: bool,
    ) -> Result<ApiResponse<DrainRecord>> {
        let body = json!({ "stop": stop, "dry_run": dry_run });
        self.call(Method::POST, path(&["nodes", node, "drain"])?, Some(body)).await
    }

    /// Lets a node get new instances again, and cancels its drain.
    pub async fn undrain_node(&self, node: &str) -> Result<ApiResponse<NodeRecord>> {
        self.call(Method::POST, path(&["nodes", node, "undrain"])?, None).await
    }

    /// Keeps new instances from a node.
    pub async fn start_maintenance(&self, node: &str) -> Result<ApiResponse<NodeRecord>> {
        self.call(Method::POST, path(&["nodes", node, "maintenance"])?, None).await
    }

    /// Invites a new host, for the given number of seconds.
    pub async fn invite_node(&self, expires_in: u64) -> Result<ApiResponse<InvitationRecord>> {
        let body = json!({ "expires_in": expires_in });
        self.call(Method::POST, path(&["admin", "invitations"])?, Some(body)).await
    }

    /// Returns the CPU usage of a node's daemon.
    pub async fn process_metrics(&self, node: &str) -> Result<ApiResponse<Map<String, Value>>> {
        self.get(path(&["nodes", node, "processmetrics"])?).await
    }
}
