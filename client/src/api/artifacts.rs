//! `/artifacts`.

use muster_types::artifact::{ArtifactRecord, ArtifactType, VersionRecord};
use muster_types::ids::{ArtifactId, BlobId, UploadId};
use muster_types::operation::OperationRecord;
use reqwest::Method;
use serde_json::json;

use super::{Answer, Client, Result, path, with_query};

/// What becomes a version of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionSource {
    /// An upload, which is used up.
    Upload(UploadId),
    /// A blob that is there.
    Blob(BlobId),
}

/// An artifact that gets a version, and is made if there is none.
#[derive(Debug, Clone)]
pub struct NewVersion {
    pub name: String,
    pub artifact_type: ArtifactType,
    /// Where it is said to come from; the server's own choice when absent.
    pub source_url: Option<String>,
    pub shared: bool,
    /// The caller's own when absent.
    pub namespace: Option<String>,
}

/// An artifact, by name or id, perhaps only if it is in a namespace.
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
    /// The artifacts that can be seen.
    pub async fn artifacts(&self) -> Result<Answer<Vec<ArtifactRecord>>> {
        self.get(path(&["artifacts"])?).await
    }

    /// One artifact.
    pub async fn artifact(&self, artifact: ArtifactRef<'_>) -> Result<Answer<ArtifactRecord>> {
        self.get(artifact.path(&[])?).await
    }

    /// Has an image fetched, or its source looked at for a newer one. An operation does it.
    pub async fn fetch_artifact(
        &self,
        url: &str,
        shared: bool,
        namespace: Option<&str>,
    ) -> Result<Answer<ArtifactRecord>> {
        let body = json!({ "url": url, "shared": shared, "namespace": namespace });
        self.call(Method::POST, path(&["artifacts"])?, Some(body)).await
    }

    /// Makes an upload or a blob the newest version of an artifact.
    pub async fn add_version(
        &self,
        new: &NewVersion,
        source: VersionSource,
    ) -> Result<Answer<ArtifactRecord>> {
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

    /// Deletes an artifact. The answer is nothing if that was done before.
    pub async fn delete_artifact(&self, artifact: ArtifactRef<'_>) -> Result<Answer<Option<ArtifactRecord>>> {
        self.delete(artifact.path(&[])?).await
    }

    /// Deletes every artifact of a namespace.
    pub async fn delete_artifacts(&self, namespace: Option<&str>) -> Result<Answer<Vec<ArtifactId>>> {
        let body = json!({ "confirm": true, "namespace": namespace });
        self.call(Method::DELETE, path(&["artifacts"])?, Some(body)).await
    }

    /// The versions of an artifact, oldest first.
    pub async fn versions(&self, artifact: ArtifactRef<'_>) -> Result<Answer<Vec<VersionRecord>>> {
        self.get(artifact.path(&["versions"])?).await
    }

    /// Deletes one version of an artifact; with the last one the artifact goes.
    pub async fn delete_version(
        &self,
        artifact: ArtifactRef<'_>,
        index: i64,
    ) -> Result<Answer<ArtifactRecord>> {
        self.delete(artifact.path(&["versions", &index.to_string()])?).await
    }

    /// Sets how many versions are kept; 0 is the server's default.
    pub async fn set_max_versions(&self, artifact: ArtifactRef<'_>, most: u32) -> Result<Answer<()>> {
        let body = json!({ "max_versions": most, "namespace": artifact.namespace });
        let path = path(&["artifacts", artifact.artifact, "versions"])?;
        self.call(Method::POST, path, Some(body)).await
    }

    /// Lets everybody read an artifact.
    pub async fn share_artifact(&self, artifact: ArtifactRef<'_>) -> Result<Answer<ArtifactRecord>> {
        self.call(Method::POST, artifact.path(&["share"])?, None).await
    }

    /// Ends that everybody may read an artifact.
    pub async fn unshare_artifact(&self, artifact: ArtifactRef<'_>) -> Result<Answer<ArtifactRecord>> {
        self.call(Method::POST, artifact.path(&["unshare"])?, None).await
    }

    /// The operations on an artifact, newest first: those that have not ended, or all.
    pub async fn artifact_operations(
        &self,
        artifact: &str,
        all: bool,
    ) -> Result<Answer<Vec<OperationRecord>>> {
        let path = path(&["artifacts", artifact, "clusteroperations"])?;
        self.get(with_query(path, &[("all", all.then_some("true"))])).await
    }
}
