//! `/auth/namespaces/{namespace}/claims`.

use muster_types::claim::ClaimRecord;
use reqwest::Method;
use serde::Serialize;
use serde_json::json;

use super::{Answer, Client, Result, path};

/// What a claim is to be. A new one needs all of it; of one that exists, what is absent stays as it is.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ClaimLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_cpus: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_memory_mb: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_disk_gb: Option<u64>,
    /// From now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<i64>,
}

impl Client {
    /// The claims of a namespace, with those that have expired.
    pub async fn claims(&self, namespace: &str) -> Result<Answer<Vec<ClaimRecord>>> {
        self.get(path(&["auth", "namespaces", namespace, "claims"])?).await
    }

    /// One claim by its id.
    pub async fn claim(&self, namespace: &str, claim: &str) -> Result<Answer<ClaimRecord>> {
        self.get(path(&["auth", "namespaces", namespace, "claims", claim])?).await
    }

    /// Promises a namespace a part of the cluster.
    pub async fn create_claim(&self, namespace: &str, limits: &ClaimLimits) -> Result<Answer<ClaimRecord>> {
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "claims"])?, Some(json!(limits)))
            .await
    }

    /// Changes a claim that has not expired.
    pub async fn update_claim(
        &self,
        namespace: &str,
        claim: &str,
        limits: &ClaimLimits,
    ) -> Result<Answer<ClaimRecord>> {
        let path = path(&["auth", "namespaces", namespace, "claims", claim])?;
        self.call(Method::PUT, path, Some(json!(limits))).await
    }

    /// Takes a promise back. The answer is the claim as it was.
    pub async fn delete_claim(&self, namespace: &str, claim: &str) -> Result<Answer<ClaimRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "claims", claim])?).await
    }
}
