//! Responses whose body is read while it arrives.

use std::time::Duration;

use bytes::Bytes;
use reqwest::{Method, Response, StatusCode};
use tokio::time::timeout;

use super::client::{Client, TRANSFER_TIMEOUT};
use super::error::Result;
use super::response::RawResponse;

/// The body of a response.
#[derive(Debug)]
pub struct BodyStream<'a> {
    client: &'a Client,
    response: Response,
}

impl BodyStream<'_> {
    /// Returns the next chunk, or `None` at the end. Fails if no data arrives within `stall_timeout`.
    pub async fn next(&mut self, stall_timeout: Duration) -> Result<Option<Bytes>> {
        match timeout(stall_timeout, self.response.chunk()).await {
            Ok(bytes) => bytes.map_err(|error| self.client.unreachable(&error)),
            Err(_) => Err(self.client.stalled(stall_timeout)),
        }
    }
}

impl Client {
    /// Requests a path whose response is a stream. `content` describes it in errors.
    pub(super) async fn get_stream(&self, path: &str, content: &str) -> Result<BodyStream<'_>> {
        let mut refused = None;
        loop {
            let (token, fresh) = self.token(refused.as_ref()).await?;
            let request = self.request(Method::GET, path, Some(&token)).timeout(TRANSFER_TIMEOUT);
            let response = self.send_request(request).await?;
            match response.status() {
                StatusCode::OK => return Ok(BodyStream { client: self, response }),
                // An expired token is replaced once.
                StatusCode::UNAUTHORIZED if !fresh && refused.is_none() => refused = Some(token),
                status => {
                    let body = response.bytes().await.map_err(|error| self.unreachable(&error))?;
                    let refusal = self.decode::<()>(&RawResponse::new(path, status, body.to_vec()));
                    return Err(refusal.err().unwrap_or_else(|| {
                        self.unexpected_response(&format!("{status} instead of {content}"))
                    }));
                }
            }
        }
    }
}
