//! `/auth/namespaces/{namespace}/keys`.

use muster_types::key::Secret;
use reqwest::Method;
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::{Answer, Client, Result, path};

/// The answer to a new key.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum AddedKey {
    /// The server made the secret, and shows it only here.
    Generated {
        key_name: String,
        #[serde(deserialize_with = "secret")]
        key: Secret,
    },
    /// The secret was the caller's; this is the key's name.
    Supplied(String),
}

pub(super) fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Secret, D::Error> {
    String::deserialize(deserializer).map(Secret::new)
}

impl Client {
    /// The names of a namespace's keys.
    pub async fn keys(&self, namespace: &str) -> Result<Answer<Vec<String>>> {
        self.get(path(&["auth", "namespaces", namespace, "keys"])?).await
    }

    /// Adds a key, or replaces the one of that name. Without a secret the server makes one. `expiry` is Unix time.
    pub async fn add_key(
        &self,
        namespace: &str,
        name: &str,
        secret: Option<&Secret>,
        expiry: Option<f64>,
    ) -> Result<Answer<AddedKey>> {
        let body = json!({ "key_name": name, "key": secret.map(Secret::expose), "expiry": expiry });
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "keys"])?, Some(body)).await
    }

    /// Replaces the secret of a key that exists; without `expiry` it never expires. The answer is its name.
    pub async fn update_key(
        &self,
        namespace: &str,
        name: &str,
        secret: &Secret,
        expiry: Option<f64>,
    ) -> Result<Answer<String>> {
        let body = json!({ "key": secret.expose(), "expiry": expiry });
        self.call(Method::PUT, path(&["auth", "namespaces", namespace, "keys", name])?, Some(body)).await
    }

    /// Deletes a key.
    pub async fn delete_key(&self, namespace: &str, name: &str) -> Result<Answer<()>> {
        self.delete(path(&["auth", "namespaces", namespace, "keys", name])?).await
    }
}
