//! `/auth/namespaces`.

use muster_types::key::Secret;
use muster_types::namespace::NamespaceRecord;
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the accessible namespaces by name.
    pub async fn namespaces(&self, query: &ListQuery) -> Result<ApiResponse<Vec<NamespaceRecord>>> {
        self.get_list(path(&["auth", "namespaces"])?, query).await
    }

    /// Returns a namespace.
    pub async fn namespace(&self, name: &str) -> Result<ApiResponse<NamespaceRecord>> {
        self.get(path(&["auth", "namespaces", name])?).await
    }

    /// Creates a namespace, optionally with a first key given by name and secret.
    pub async fn create_namespace(
        &self,
        name: &str,
        first_key: Option<(&str, &Secret)>,
    ) -> Result<ApiResponse<NamespaceRecord>> {
        let mut body = json!({ "namespace": name });
        if let Some((key_name, key)) = first_key {
            body["key_name"] = key_name.into();
            body["key"] = key.expose().into();
        }
        self.call(Method::POST, path(&["auth", "namespaces"])?, Some(body)).await
    }

    /// Deletes a namespace.
    pub async fn delete_namespace(&self, name: &str) -> Result<ApiResponse<()>> {
        self.delete(path(&["auth", "namespaces", name])?).await
    }
}
