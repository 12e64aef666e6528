//! The metadata calls, which every kind of object has alike.

use reqwest::Method;
use serde_json::{Map, Value, json};

use super::{Answer, Client, Object, Result};

impl Client {
    /// The metadata of an object.
    pub async fn metadata(&self, object: Object<'_>) -> Result<Answer<Map<String, Value>>> {
        self.get(object.path(&["metadata"])?).await
    }

    /// Creates or replaces one metadata key.
    pub async fn set_metadata(&self, object: Object<'_>, key: &str, value: &Value) -> Result<Answer<()>> {
        self.call(Method::PUT, object.path(&["metadata", key])?, Some(json!({ "value": value }))).await
    }

    /// Deletes one metadata key, if it is there.
    pub async fn delete_metadata(&self, object: Object<'_>, key: &str) -> Result<Answer<()>> {
        self.delete(object.path(&["metadata", key])?).await
    }
}
