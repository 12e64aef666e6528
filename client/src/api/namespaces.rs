//! `/auth/namespaces`.

use muster_types::key::Secret;
use muster_types::namespace::NamespaceRecord;
use reqwest::Method;
use serde_json::json;

use super::{Answer, Client, Result, path};

impl Client {
    /// The namespaces that can be reached, by name.
    pub async fn namespaces(&self) -> Result<Answer<Vec<NamespaceRecord>>> {
        self.get(path(&["auth", "namespaces"])?).await
    }

    /// One namespace.
    pub async fn namespace(&self, name: &str) -> Result<Answer<NamespaceRecord>> {
        self.get(path(&["auth", "namespaces", name])?).await
    }

    /// Makes a namespace, with a first key if a name and a secret are given.
    pub async fn create_namespace(
        &self,
        name: &str,
        first_key: Option<(&str, &Secret)>,
    ) -> Result<Answer<NamespaceRecord>> {
        let mut body = json!({ "namespace": name });
        if let Some((key_name, key)) = first_key {
            body["key_name"] = key_name.into();
            body["key"] = key.expose().into();
        }
        self.call(Method::POST, path(&["auth", "namespaces"])?, Some(body)).await
    }

    /// Deletes a namespace.
    pub async fn delete_namespace(&self, name: &str) -> Result<Answer<()>> {
        self.delete(path(&["auth", "namespaces", name])?).await
    }
}
