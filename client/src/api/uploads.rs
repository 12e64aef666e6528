//! `/upload`.

use muster_types::upload::UploadRecord;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE};
use reqwest::{Body, Method};

use super::{Answer, Client, Result, STREAM_TIMEOUT, path, with_query};

impl Client {
    /// Begins an upload.
    pub async fn create_upload(&self) -> Result<Answer<UploadRecord>> {
        self.call(Method::POST, path(&["upload"])?, None).await
    }

    /// One upload, with how much of it has arrived.
    pub async fn upload(&self, upload: &str) -> Result<Answer<UploadRecord>> {
        self.get(path(&["upload", upload])?).await
    }

    /// Adds `length` bytes to an upload that is `offset` long, and answers how long it is then.
    ///
    /// The body can be sent only once, so nothing is tried again here: after a failure, even of a token that has
    /// become too old, [`upload`](Self::upload) says from where to go on. A caller who does not want to wait for a
    /// connection that stands still has to see to that.
    pub async fn append_upload(
        &self,
        upload: &str,
        offset: u64,
        length: u64,
        body: Body,
    ) -> Result<Answer<u64>> {
        let path = with_query(path(&["upload", upload])?, &[("offset", Some(&offset.to_string()))]);
        let (token, _) = self.token(None).await?;
        let request = self.request(Method::POST, &path, Some(&token)).timeout(STREAM_TIMEOUT);
        let request = request
            .header(CONTENT_TYPE, "application/octet-stream")
            .header(CONTENT_LENGTH, length)
            .body(body);
        let reply = self.receive(request).await?;
        self.answer(&reply)
    }
}
