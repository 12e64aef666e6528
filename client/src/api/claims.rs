//! `/auth/namespaces/{namespace}/claims`.

use muster_types::claim::ClaimRecord;
use reqwest::Method;
use serde::Serialize;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

/// The limits of a claim. A new claim needs all fields; an update keeps absent ones.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ClaimLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_cpus: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_memory_mb: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_disk_gb: Option<u64>,
    /// Seconds from now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<i64>,
}

impl Client {
    /// Lists the claims of a namespace, including expired ones.
    pub async fn claims(&self, namespace: &str, query: &ListQuery) -> Result<ApiResponse<Vec<ClaimRecord>>> {
        self.get_list(path(&["auth", "namespaces", namespace, "claims"])?, query).await
    }

    /// Returns a claim by id.
    pub async fn claim(&self, namespace: &str, claim: &str) -> Result<ApiResponse<ClaimRecord>> {
        self.get(path(&["auth", "namespaces", namespace, "claims", claim])?).await
    }

    /// Reserves capacity of the cluster for a namespace.
    pub async fn create_claim(
        &self,
        namespace: &str,
        limits: &ClaimLimits,
    ) -> Result<ApiResponse<ClaimRecord>> {
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "claims"])?, Some(json!(limits)))
            .await
    }

    /// Updates a claim that has not expired.
    pub async fn update_claim(
        &self,
        namespace: &str,
        claim: &str,
        limits: &ClaimLimits,
    ) -> Result<ApiResponse<ClaimRecord>> {
        let path = path(&["auth", "namespaces", namespace, "claims", claim])?;
        self.call(Method::PUT, path, Some(json!(limits))).await
    }

    /// Deletes a claim and returns its last record.
    pub async fn delete_claim(&self, namespace: &str, claim: &str) -> Result<ApiResponse<ClaimRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "claims", claim])?).await
    }
}
