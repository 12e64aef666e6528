//! `/blobs` and `/blob_checksums`.

use std::time::Duration;

use bytes::Bytes;
use muster_types::blob::BlobRecord;
use reqwest::{Method, Response, StatusCode};
use tokio::time::timeout;

use super::client::{Client, TRANSFER_TIMEOUT};
use super::error::Result;
use super::lists::ListQuery;
use super::response::{ApiResponse, RawResponse};
use super::uri::{path, with_query};

/// The content of a blob as a stream.
#[derive(Debug)]
pub struct BlobData<'a> {
    client: &'a Client,
    response: Response,
}

impl BlobData<'_> {
    /// Returns the next chunk, or `None` at the end. Fails if no data arrives within `stall_timeout`.
    pub async fn next(&mut self, stall_timeout: Duration) -> Result<Option<Bytes>> {
        match timeout(stall_timeout, self.response.chunk()).await {
            Ok(bytes) => bytes.map_err(|error| self.client.unreachable(&error)),
            Err(_) => Err(self.client.stalled(stall_timeout)),
        }
    }
}

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
    pub async fn blob_data(&self, blob: &str, offset: u64) -> Result<BlobData<'_>> {
        let offset = (offset > 0).then(|| offset.to_string());
        let path = with_query(path(&["blobs", blob, "data"])?, &[("offset", offset.as_deref())]);
        let mut refused = None;
        loop {
            let (token, fresh) = self.token(refused.as_ref()).await?;
            let request = self.request(Method::GET, &path, Some(&token)).timeout(TRANSFER_TIMEOUT);
            let response = self.send_request(request).await?;
            match response.status() {
                StatusCode::OK => return Ok(BlobData { client: self, response }),
                // An expired token is replaced once.
                StatusCode::UNAUTHORIZED if !fresh && refused.is_none() => refused = Some(token),
                status => {
                    let body = response.bytes().await.map_err(|error| self.unreachable(&error))?;
                    let refusal = self.decode::<()>(&RawResponse::new(&path, status, body.to_vec()));
                    return Err(refusal.err().unwrap_or_else(|| {
                        self.unexpected_response(&format!("{status} instead of blob content"))
                    }));
                }
            }
        }
    }
}
