//! `/admin/upgrade`.

use muster_types::cluster_upgrade::ClusterUpgradeRecord;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Returns what the nodes run, and the next step of an upgrade.
    pub async fn cluster_upgrade(&self) -> Result<ApiResponse<ClusterUpgradeRecord>> {
        self.get(path(&["admin", "upgrade"])?).await
    }
}
