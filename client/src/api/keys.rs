//! `/auth/namespaces/{namespace}/keys`.

use muster_types::key::{KeyRecord, Secret};
use reqwest::Method;
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

/// The response to adding a key.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum AddedKey {
    /// The server generated the secret and returns it only once.
    Generated {
        key_name: String,
        #[serde(deserialize_with = "deserialize_secret")]
        key: Secret,
    },
    /// The caller supplied the secret; this is the key's name.
    Supplied(String),
}

pub(super) fn deserialize_secret<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Secret, D::Error> {
    String::deserialize(deserializer).map(Secret::new)
}

impl Client {
    /// Lists the names of a namespace's keys.
    pub async fn keys(&self, namespace: &str, query: &ListQuery) -> Result<ApiResponse<Vec<String>>> {
        self.get_list(path(&["auth", "namespaces", namespace, "keys"])?, query).await
    }

    /// Lists the keys of a namespace with their expiry and their scopes.
    pub async fn key_records(
        &self,
        namespace: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<KeyRecord>>> {
        let mut records = vec![];
        for name in self.keys(namespace, query).await?.value()? {
            match self.key(namespace, &name).await {
                Ok(key) => records.push(key.json().clone()),
                // It expired or was deleted in the meantime.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(ApiResponse::new(records.into()))
    }

    /// Returns the expiry and the scopes of a key.
    pub async fn key(&self, namespace: &str, name: &str) -> Result<ApiResponse<KeyRecord>> {
        self.get(path(&["auth", "namespaces", namespace, "keys", name])?).await
    }

    /// Adds a key or replaces the one with the same name. Without a secret the server generates one. `expiry` is Unix time.
    pub async fn add_key(
        &self,
        namespace: &str,
        name: &str,
        secret: Option<&Secret>,
        expiry: Option<f64>,
    ) -> Result<ApiResponse<AddedKey>> {
        let body = json!({ "key_name": name, "key": secret.map(Secret::expose), "expiry": expiry });
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "keys"])?, Some(body)).await
    }

    /// Replaces the secret of an existing key and returns its name. Without `expiry` it never expires.
    pub async fn update_key(
        &self,
        namespace: &str,
        name: &str,
        secret: &Secret,
        expiry: Option<f64>,
    ) -> Result<ApiResponse<String>> {
        let body = json!({ "key": secret.expose(), "expiry": expiry });
        self.call(Method::PUT, path(&["auth", "namespaces", namespace, "keys", name])?, Some(body)).await
    }

    /// Deletes a key.
    pub async fn delete_key(&self, namespace: &str, name: &str) -> Result<ApiResponse<()>> {
        self.delete(path(&["auth", "namespaces", namespace, "keys", name])?).await
    }
}
