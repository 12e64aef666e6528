//! Downloads the key set of an issuer from its configured URL.

use std::error::Error as StdError;
use std::time::Duration;

use futures_util::StreamExt as _;
use muster_types::server_trust::certificate_problem;
use reqwest::{Response, StatusCode, Url, header};

use super::ca_bundle::KeyClients;
use super::key_set::KeySet;
use crate::fetch::address::{AddressFilter, BlockedAddress};

/// The maximum number of redirects that are followed.
const MAX_REDIRECTS: usize = 3;
/// The maximum size of a response.
const MAX_RESPONSE_BYTES: usize = 1 << 20;
/// The maximum length of a logged error, in characters.
const MAX_ERROR_CHARS: usize = 200;

/// Settings for downloading key sets.
#[derive(Debug)]
pub(super) struct KeyDownload {
    /// The addresses that a redirect may lead to. The URL of the operator may also have a private one.
    pub(super) filter: AddressFilter,
    pub(super) is_proxied: bool,
    /// The total time, including name resolution and redirects.
    pub(super) timeout: Duration,
}

impl KeyDownload {
    pub(super) async fn fetch(&self, clients: &KeyClients, uri: &str) -> Result<KeySet, String> {
        let fetch = async {
            let response = self.request(clients, uri).await?;
            let body = read_body(response).await?;
            KeySet::parse(&body).map_err(str::to_owned)
        };
        match tokio::time::timeout(self.timeout, fetch).await {
            Ok(keys) => keys,
            Err(_) => Err(format!("timed out after {} seconds", self.timeout.as_secs())),
        }
    }

    /// Sends a request and follows redirects, and checks every address on the way.
    async fn request(&self, clients: &KeyClients, uri: &str) -> Result<Response, String> {
        let mut url = Url::parse(uri).map_err(|_| "jwks_uri is not a valid URL")?;
        let (mut client, mut filter) = (&clients.configured, self.filter.allowing_private());
        for _ in 0..=MAX_REDIRECTS {
            if url.scheme() != "https" {
                return Err("URL is not https".into());
            }
            filter.check_literal(&url).map_err(|why| sanitize(&why.to_string()))?;
            if self.is_proxied {
                filter.check_name(&url).await.map_err(|why| sanitize(&why.to_string()))?;
            }
            let request = client.get(url.clone()).header(header::ACCEPT, "application/json");
            let response = request.send().await.map_err(|error| root_cause(&error))?;
            match response.status() {
                StatusCode::OK => return Ok(response),
                status if matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) => {}
                status => return Err(format!("server responded with status {}", status.as_u16())),
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| url.join(location).ok());
            url = next.ok_or("server redirected to an invalid URL")?;
            (client, filter) = (&clients.redirected, self.filter.clone());
        }
        Err("too many redirects".into())
    }
}

async fn read_body(response: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    let mut chunks = std::pin::pin!(response.bytes_stream());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| root_cause(&error))?;
        if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
            return Err("response is too large".into());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Returns the text of the innermost cause, which is the most specific one.
fn root_cause(error: &reqwest::Error) -> String {
    if let Some(problem) = certificate_problem(error) {
        return format!("the certificate of the server {problem}");
    }
    let mut cause: &dyn StdError = error;
    while let Some(next) = cause.source() {
        if cause.is::<BlockedAddress>() {
            break;
        }
        cause = next;
    }
    sanitize(&cause.to_string())
}

/// Shortens untrusted text to one line for the log.
fn sanitize(text: &str) -> String {
    text.chars().take(MAX_ERROR_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sanitizes_untrusted_text_to_one_short_line() {
        assert_eq!(sanitize("a\nb\u{1b}[1m"), "a b [1m");
        assert_eq!(sanitize(&"é".repeat(1000)).chars().count(), MAX_ERROR_CHARS);
    }
}
