//! `/artifacts`.

use muster_types::artifact::{ArtifactRecord, ArtifactType, VersionRecord};
use muster_types::ids::{ArtifactId, BlobId, UploadId};
use muster_types::operation::OperationRecord;
use reqwest::Method;
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::{path, with_query};

/// The content of a new artifact version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionSource {
    /// An upload, which is consumed.
    Upload(UploadId),
    /// An existing blob.
    Blob(BlobId),
}

/// A new version of an artifact, which is created if it does not exist.
#[derive(Debug, Clone)]
pub struct NewVersion {
    pub name: String,
    pub artifact_type: ArtifactType,
    /// The recorded origin; the server chooses one if absent.
    pub source_url: Option<String>,
    pub shared: bool,
    /// The caller's own namespace if absent.
    pub namespace: Option<String>,
}

/// An artifact by name or id, optionally restricted to a namespace.
#[derive(Debug, Clone, Copy)]
pub struct ArtifactRef<'a> {
    pub artifact: &'a str,
    pub namespace: Option<&'a str>,
}

impl ArtifactRef<'_> {
    fn path(self, rest: &[&str]) -> Result<String> {
        let mut segments = vec!["artifacts", self.artifact];
        segments.extend(rest);
        Ok(with_query(path(&segments)?, &[("namespace", self.namespace)]))
    }
}

impl<'a> From<&'a str> for ArtifactRef<'a> {
    fn from(artifact: &'a str) -> Self {
        Self { artifact, namespace: None }
    }
}

impl Client {
    /// Lists the visible artifacts.
    pub async fn artifacts(&self, query: &ListQuery) -> Result<ApiResponse<Vec<ArtifactRecord>>> {
        self.get_list(path(&["artifacts"])?, query).await
    }

    /// Returns an artifact.
    pub async fn artifact(&self, artifact: ArtifactRef<'_>) -> Result<ApiResponse<ArtifactRecord>> {
        self.get(artifact.path(&[])?).await
    }

    /// Starts an operation that fetches an image, or checks its source for a newer version; with `dry_run` only checks the
    /// request.
    pub async fn fetch_artifact(
        &self,
        url: &str,
        shared: bool,
        namespace: Option<&str>,
        dry_run: bool,
    ) -> Result<ApiResponse<ArtifactRecord>> {
        let mut body = json!({ "url": url, "shared": shared, "namespace": namespace });
        if dry_run {
            body["dry_run"] = true.into();
        }
        self.call(Method::POST, path(&["artifacts"])?, Some(body)).await
    }

    /// Adds an upload or a blob as the newest version of an artifact.
    pub async fn add_version(
        &self,
        new: &NewVersion,
        source: VersionSource,
    ) -> Result<ApiResponse<ArtifactRecord>> {
        let mut body = json!({
            "artifact_type": new.artifact_type, "source_url": new.source_url, "shared": new.shared,
            "namespace": new.namespace,
        });
        match source {
            VersionSource::Upload(upload) => body["upload_uuid"] = json!(upload),
            VersionSource::Blob(blob) => body["blob_uuid"] = json!(blob),
        }
        self.call(Method::POST, path(&["artifacts", "upload", &new.name])?, Some(body)).await
    }

    /// Deletes an artifact. The response is null if it was already deleted.
    pub async fn delete_artifact(
        &self,
        artifact: ArtifactRef<'_>,
    ) -> Result<ApiResponse<Option<ArtifactRecord>>> {
        self.delete(artifact.path(&[])?).await
    }

    /// Deletes all artifacts of a namespace.
    pub async fn delete_artifacts(&self, namespace: Option<&str>) -> Result<ApiResponse<Vec<ArtifactId>>> {
        let body = json!({ "confirm": true, "namespace": namespace });
        self.call(Method::DELETE, path(&["artifacts"])?, Some(body)).await
    }

    /// Lists the versions of an artifact, oldest first.
    pub async fn versions(
        &self,
        artifact: ArtifactRef<'_>,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<VersionRecord>>> {
        self.get_list(artifact.path(&["versions"])?, query).await
    }

    /// Deletes a version of an artifact. Deleting the last version deletes the artifact.
    pub async fn delete_version(
        &self,
        artifact: ArtifactRef<'_>,
        index: i64,
    ) -> Result<ApiResponse<ArtifactRecord>> {
        self.delete(artifact.path(&["versions", &index.to_string()])?).await
    }

    /// Sets how many versions are kept; 0 selects the server's default.
    pub async fn set_max_versions(
        &self,
        artifact: ArtifactRef<'_>,
        max_versions: u32,
    ) -> Result<ApiResponse<()>> {
        let body = json!({ "max_versions": max_versions, "namespace": artifact.namespace });
        let path = path(&["artifacts", artifact.artifact, "versions"])?;
        self.call(Method::POST, path, Some(body)).await
    }

    /// Makes an artifact readable by all namespaces.
    pub async fn share_artifact(&self, artifact: ArtifactRef<'_>) -> Result<ApiResponse<ArtifactRecord>> {
        self.call(Method::POST, artifact.path(&["share"])?, None).await
    }

    /// Makes an artifact private again.
    pub async fn unshare_artifact(&self, artifact: ArtifactRef<'_>) -> Result<ApiResponse<ArtifactRecord>> {
        self.call(Method::POST, artifact.path(&["unshare"])?, None).await
    }

    /// Lists the unfinished operations on an artifact, or all of them, newest first.
    pub async fn artifact_operations(
        &self,
        artifact: &str,
        all: bool,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<OperationRecord>>> {
        let path = path(&["artifacts", artifact, "clusteroperations"])?;
        self.get_list(with_query(path, &[("all", Some(if all { "true" } else { "false" }))]), query).await
    }
}
