//! Metadata, which all types of objects have.

use reqwest::Method;
use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::Result;
use super::object_path::ObjectPath;
use super::response::ApiResponse;

impl Client {
    /// Returns the metadata of an object.
    pub async fn metadata(&self, object: ObjectPath<'_>) -> Result<ApiResponse<Map<String, Value>>> {
        self.get(object.path(&["metadata"])?).await
    }

    /// Sets a metadata key.
    pub async fn set_metadata(
        &self,
        object: ObjectPath<'_>,
        key: &str,
        value: &Value,
    ) -> Result<ApiResponse<()>> {
        self.call(Method::PUT, object.path(&["metadata", key])?, Some(json!({ "value": value }))).await
    }

    /// Deletes a metadata key if it exists.
    pub async fn delete_metadata(&self, object: ObjectPath<'_>, key: &str) -> Result<ApiResponse<()>> {
        self.delete(object.path(&["metadata", key])?).await
    }
}
