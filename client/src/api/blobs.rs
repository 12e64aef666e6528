//! `/blobs` and `/blob_checksums`.

use std::time::Duration;

use bytes::Bytes;
use muster_types::blob::BlobRecord;
use reqwest::{Method, Response, StatusCode};
use tokio::time::timeout;

use super::{Answer, Client, Error, Reply, Result, STREAM_TIMEOUT, path, with_query};

/// The bytes of a blob, as they come.
#[derive(Debug)]
pub struct BlobData<'a> {
    client: &'a Client,
    response: Response,
}

impl BlobData<'_> {
    /// The next bytes; nothing after the last. No byte for as long as `patience` is an error.
    pub async fn next(&mut self, patience: Duration) -> Result<Option<Bytes>> {
        match timeout(patience, self.response.chunk()).await {
            Ok(bytes) => bytes.map_err(|error| self.client.unreachable(&error)),
            Err(_) => Err(self.client.stalled(patience)),
        }
    }
}

impl Client {
    /// All blobs, or those of which a node has a copy.
    pub async fn blobs(&self, node: Option<&str>) -> Result<Answer<Vec<BlobRecord>>> {
        self.get(with_query(path(&["blobs"])?, &[("node", node)])).await
    }

    /// One blob.
    pub async fn blob(&self, blob: &str) -> Result<Answer<BlobRecord>> {
        self.get(path(&["blobs", blob])?).await
    }

    /// The blob of a checksum, if there is one that the caller can read already.
    pub async fn find_blob(&self, algorithm: &str, hash: &str) -> Result<Answer<Option<BlobRecord>>> {
        self.get(path(&["blob_checksums", algorithm, hash])?).await
    }

    /// One checksum of a blob, unless it is not known yet.
    pub async fn checksum(&self, blob: &str, algorithm: &str) -> Result<Answer<Option<String>>> {
        self.get(path(&["blobs", blob, "checksum", algorithm])?).await
    }

    /// The bytes of a blob from an offset to its end.
    pub async fn blob_data(&self, blob: &str, offset: u64) -> Result<BlobData<'_>> {
        let offset = (offset > 0).then(|| offset.to_string());
        let path = with_query(path(&["blobs", blob, "data"])?, &[("offset", offset.as_deref())]);
        let mut refused = None;
        loop {
            let (token, fresh) = self.token(refused.as_ref()).await?;
            let request = self.request(Method::GET, &path, Some(&token)).timeout(STREAM_TIMEOUT);
            let response = self.respond(request).await?;
            match response.status() {
                StatusCode::OK => return Ok(BlobData { client: self, response }),
                // A token that has become too old is replaced, once.
                StatusCode::UNAUTHORIZED if !fresh && refused.is_none() => refused = Some(token),
                status => {
                    let body = response.bytes().await.map_err(|error| self.unreachable(&error))?;
                    let refusal = self.answer::<()>(&Reply { status, body: body.to_vec() });
                    return Err(refusal.err().unwrap_or_else(|| Error::Unreadable {
                        url: self.base.clone(),
                        why: format!("{status} instead of a blob's bytes"),
                    }));
                }
            }
        }
    }
}
