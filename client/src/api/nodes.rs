//! `/nodes`.

use muster_types::node::NodeRecord;
use serde_json::{Map, Value};

use super::{Answer, Client, Result, path};

impl Client {
    /// Every node.
    pub async fn nodes(&self) -> Result<Answer<Vec<NodeRecord>>> {
        self.get(path(&["nodes"])?).await
    }

    /// One node by name or id.
    pub async fn node(&self, node: &str) -> Result<Answer<NodeRecord>> {
        self.get(path(&["nodes", node])?).await
    }

    /// Deletes a node.
    pub async fn delete_node(&self, node: &str) -> Result<Answer<NodeRecord>> {
        self.delete(path(&["nodes", node])?).await
    }

    /// Processor use of a node's daemon.
    pub async fn process_metrics(&self, node: &str) -> Result<Answer<Map<String, Value>>> {
        self.get(path(&["nodes", node, "processmetrics"])?).await
    }
}
