//! `/blobs` and `/blob_checksums`.

use muster_types::blob::BlobRecord;

use super::body_stream::BodyStream;
use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::{path, with_query};

impl Client {
    /// Lists all blobs, or those that have a replica on a node.
    pub async fn blobs(&self, node: Option<&str>, query: &ListQuery) -> Result<ApiResponse<Vec<BlobRecord>>> {
        self.get_list(with_query(path(&["blobs"])?, &[("node", node)]), query).await
    }

    /// Returns a blob.
    pub async fn blob(&self, blob: &str) -> Result<ApiResponse<BlobRecord>> {
        self.get(path(&["blobs", blob])?).await
    }

    /// Deletes a blob that the caller's namespace has sent, unless it is in use.
    pub async fn delete_blob(&self, blob: &str) -> Result<ApiResponse<()>> {
        self.delete(path(&["blobs", blob])?).await
    }

    /// Returns the blob with a checksum, if the caller can read one.
    pub async fn find_blob(&self, algorithm: &str, hash: &str) -> Result<ApiResponse<Option<BlobRecord>>> {
        self.get(path(&["blob_checksums", algorithm, hash])?).await
    }

    /// Returns a checksum of a blob, or null if it has not been computed yet.
    pub async fn checksum(&self, blob: &str, algorithm: &str) -> Result<ApiResponse<Option<String>>> {
        self.get(path(&["blobs", blob, "checksum", algorithm])?).await
    }

    /// Streams the content of a blob from an offset.
    pub async fn blob_data(&self, blob: &str, offset: u64) -> Result<BodyStream<'_>> {
        let offset = (offset > 0).then(|| offset.to_string());
        let path = with_query(path(&["blobs", blob, "data"])?, &[("offset", offset.as_deref())]);
        self.get_stream(&path, "blob content").await
    }
}
