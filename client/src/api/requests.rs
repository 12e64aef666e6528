//! Requests that no other method covers.

use reqwest::{Method, StatusCode};
use serde_json::Value;

use super::client::Client;
use super::error::{Error, Result};
use super::uri::extend_query;

/// A response with its status unchecked.
#[derive(Debug)]
pub struct AnyResponse {
    pub body: Vec<u8>,
    /// Why the server refused the request, if it did.
    pub refusal: Option<Error>,
}

impl Client {
    /// Sends a request with a token and returns the response whatever its status.
    pub async fn request_any(
        &self,
        method: Method,
        path: &str,
        query: &[(String, String)],
        body: Option<Value>,
    ) -> Result<AnyResponse> {
        let query = query.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let raw = self.send_authenticated(method, &extend_query(path.to_owned(), query), body).await?;
        // A success that is not JSON is not a refusal.
        let refusal = match raw.status {
            StatusCode::OK | StatusCode::ACCEPTED => None,
            _ => self.decode::<()>(&raw).err(),
        };
        Ok(AnyResponse { body: raw.body, refusal })
    }
}
