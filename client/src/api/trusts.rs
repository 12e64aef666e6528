//! `/auth/namespaces/{namespace}/trust`.

use muster_types::namespace::NamespaceRecord;
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Makes a namespace trust another.
    pub async fn add_trust(&self, namespace: &str, other: &str) -> Result<ApiResponse<NamespaceRecord>> {
        let body = json!({ "external_namespace": other });
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "trust"])?, Some(body)).await
    }

    /// Makes a namespace stop trusting another.
    pub async fn remove_trust(&self, namespace: &str, other: &str) -> Result<ApiResponse<NamespaceRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "trust", other])?).await
    }
}
