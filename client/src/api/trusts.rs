//! `/auth/namespaces/{namespace}/trust`.

use muster_types::namespace::NamespaceRecord;
use reqwest::Method;
use serde_json::json;

use super::{Answer, Client, Result, path};

impl Client {
    /// Makes a namespace trust another.
    pub async fn add_trust(&self, namespace: &str, other: &str) -> Result<Answer<NamespaceRecord>> {
        let body = json!({ "external_namespace": other });
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "trust"])?, Some(body)).await
    }

    /// Takes a trust back.
    pub async fn remove_trust(&self, namespace: &str, other: &str) -> Result<Answer<NamespaceRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "trust", other])?).await
    }
}
