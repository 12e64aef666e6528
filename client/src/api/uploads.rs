//! `/upload`.

use muster_types::upload::UploadRecord;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE};
use reqwest::{Body, Method};

use super::client::{Client, TRANSFER_TIMEOUT};
use super::error::Result;
use super::response::ApiResponse;
use super::uri::{path, with_query};

impl Client {
    /// Creates an upload.
    pub async fn create_upload(&self) -> Result<ApiResponse<UploadRecord>> {
        self.call(Method::POST, path(&["upload"])?, None).await
    }

    /// Returns an upload with its received size.
    pub async fn upload(&self, upload: &str) -> Result<ApiResponse<UploadRecord>> {
        self.get(path(&["upload", upload])?).await
    }

    /// Appends `length` bytes to an upload of `offset` bytes and returns its new size.
    ///
    /// The body can be sent only once, so this does not retry: after a failure, even of an expired token,
    /// [`upload`](Self::upload) returns the offset to resume from. The caller must detect stalled connections.
    pub async fn append_upload(
        &self,
        upload: &str,
        offset: u64,
        length: u64,
        body: Body,
    ) -> Result<ApiResponse<u64>> {
        let path = with_query(path(&["upload", upload])?, &[("offset", Some(&offset.to_string()))]);
        let (token, _) = self.token(None).await?;
        let request = self.request(Method::POST, &path, Some(&token)).timeout(TRANSFER_TIMEOUT);
        let request = request
            .header(CONTENT_TYPE, "application/octet-stream")
            .header(CONTENT_LENGTH, length)
            .body(body);
        let raw = self.receive(&path, request).await?;
        self.decode(&raw)
    }
}
