//! `/label`.

use muster_types::artifact::ArtifactRecord;
use reqwest::Method;
use serde_json::json;

use super::{Answer, Client, Result, path};

/// The path of `<label>` or `<namespace>/<label>`.
fn label_path(label: &str) -> Result<String> {
    match label.split_once('/') {
        Some((namespace, label)) => path(&["label", namespace, label]),
        None => path(&["label", label]),
    }
}

impl Client {
    /// Makes a label point at a blob: a new label, or its next version.
    pub async fn set_label(
        &self,
        label: &str,
        blob: &str,
        max_versions: Option<u32>,
    ) -> Result<Answer<ArtifactRecord>> {
        let body = json!({ "blob_uuid": blob, "max_versions": max_versions.unwrap_or(0) });
        self.call(Method::POST, label_path(label)?, Some(body)).await
    }

    /// One label.
    pub async fn label(&self, label: &str) -> Result<Answer<ArtifactRecord>> {
        self.get(label_path(label)?).await
    }

    /// Deletes a label; what it points at stays.
    pub async fn delete_label(&self, label: &str) -> Result<Answer<ArtifactRecord>> {
        self.delete(label_path(label)?).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_may_name_its_namespace() {
        assert_eq!(label_path("tiny").unwrap(), "/label/tiny");
        assert_eq!(label_path("ci/tiny").unwrap(), "/label/ci/tiny");
        assert_eq!(label_path("ci/a/b").unwrap(), "/label/ci/a%2Fb");
        assert!(label_path("/tiny").is_err() && label_path("ci/").is_err());
    }
}
