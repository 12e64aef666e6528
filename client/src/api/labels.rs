//! `/label`.

use muster_types::artifact::ArtifactRecord;
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

/// Returns the path of `<label>` or `<namespace>/<label>`.
fn label_path(label: &str) -> Result<String> {
    match label.split_once('/') {
        Some((namespace, label)) => path(&["label", namespace, label]),
        None => path(&["label", label]),
    }
}

impl Client {
    /// Points a label at a blob: creates the label or adds a version.
    pub async fn set_label(
        &self,
        label: &str,
        blob: &str,
        max_versions: Option<u32>,
    ) -> Result<ApiResponse<ArtifactRecord>> {
        let body = json!({ "blob_uuid": blob, "max_versions": max_versions.unwrap_or(0) });
        self.call(Method::POST, label_path(label)?, Some(body)).await
    }

    /// Returns a label.
    pub async fn label(&self, label: &str) -> Result<ApiResponse<ArtifactRecord>> {
        self.get(label_path(label)?).await
    }

    /// Deletes a label but not its blob.
    pub async fn delete_label(&self, label: &str) -> Result<ApiResponse<ArtifactRecord>> {
        self.delete(label_path(label)?).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_path_accepts_a_namespace() {
        assert_eq!(label_path("tiny").unwrap(), "/label/tiny");
        assert_eq!(label_path("ci/tiny").unwrap(), "/label/ci/tiny");
        assert_eq!(label_path("ci/a/b").unwrap(), "/label/ci/a%2Fb");
        assert!(label_path("/tiny").is_err() && label_path("ci/").is_err());
    }
}
