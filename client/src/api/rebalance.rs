//! `/admin/rebalance`.

use muster_types::rebalance::RebalanceRecord;
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Migrates instances from full nodes to empty ones; with `dry_run` only returns the plan.
    pub async fn rebalance(
        &self,
        dry_run: bool,
        max_moves: Option<u64>,
    ) -> Result<ApiResponse<RebalanceRecord>> {
        let mut body = json!({ "dry_run": dry_run });
        if let Some(max_moves) = max_moves {
            body["max_moves"] = max_moves.into();
        }
        self.call(Method::POST, path(&["admin", "rebalance"])?, Some(body)).await
    }
}
