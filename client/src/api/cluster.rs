//! `/admin`, for the cluster as a whole.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

/// The capacity of the cluster.
#[derive(Debug, Clone, Deserialize)]
pub struct ClusterResources {
    pub total: TotalResources,
    pub per_node: BTreeMap<String, NodeResources>,
}

/// The capacity of all nodes together.
#[derive(Debug, Clone, Deserialize)]
pub struct TotalResources {
    pub cpu_available: f64,
    /// In megabytes.
    pub ram_available: f64,
}

/// The capacity of a node; 0 until it has reported.
#[derive(Debug, Clone, Deserialize)]
pub struct NodeResources {
    pub cpu_max: f64,
    pub cpu_available: f64,
    pub cpu_load_1: f64,
    pub cpu_load_5: f64,
    pub cpu_load_15: f64,
    /// In megabytes.
    pub ram_max: f64,
    /// In megabytes.
    pub ram_available: f64,
    /// In bytes.
    pub disk_available: f64,
}

/// The owner of a lease.
#[derive(Debug, Clone, Deserialize)]
pub struct LeaseOwner {
    pub node: String,
    pub pid: i64,
    /// Unix time.
    pub expires: f64,
}

impl Client {
    /// Returns the capacity of the cluster and of each node.
    pub async fn cluster_resources(&self) -> Result<ApiResponse<ClusterResources>> {
        self.get(path(&["admin", "resources"])?).await
    }

    /// Returns the cluster-wide leases and their owners.
    pub async fn leases(&self) -> Result<ApiResponse<BTreeMap<String, LeaseOwner>>> {
        self.get(path(&["admin", "locks"])?).await
    }

    /// Returns the certificate authorities of the nodes' displays, in PEM.
    pub async fn display_authorities(&self) -> Result<String> {
        let pem = self.get_bytes(path(&["admin", "cacert"])?).await?;
        Ok(String::from_utf8_lossy(&pem).into_owned())
    }
}
