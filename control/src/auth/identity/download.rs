//! Fetches the keys of an issuer from where the operator says that they are.

use std::error::Error as StdError;
use std::time::Duration;

use futures_util::StreamExt as _;
use reqwest::{Client, Response, StatusCode, Url, header};

use super::signature::KeySet;
use crate::fetch::address::{Guard, Refused};

/// Redirects that are followed.
const MOST_REDIRECTS: usize = 3;
/// Largest answer, in bytes.
const LARGEST: usize = 1 << 20;
/// Longest reason that goes to the log, in characters.
const LONGEST_REASON: usize = 200;

/// How keys are fetched.
#[derive(Debug)]
pub(super) struct Download {
    pub(super) guard: Guard,
    pub(super) is_proxied: bool,
    /// For all of it: looking up, connecting, redirects and the last byte.
    pub(super) time: Duration,
}

impl Download {
    pub(super) async fn keys(&self, client: &Client, uri: &str) -> Result<KeySet, String> {
        let fetch = async {
            let answer = self.follow(client, uri).await?;
            let body = receive(answer).await?;
            KeySet::read(&body).map_err(str::to_owned)
        };
        match tokio::time::timeout(self.time, fetch).await {
            Ok(keys) => keys,
            Err(_) => Err(format!("not fetched within {} seconds", self.time.as_secs())),
        }
    }

    /// Asks, and asks where the answer points to, for as long as that is allowed.
    async fn follow(&self, client: &Client, uri: &str) -> Result<Response, String> {
        let mut url = Url::parse(uri).map_err(|_| "jwks_uri is no URL")?;
        for _ in 0..=MOST_REDIRECTS {
            if url.scheme() != "https" {
                return Err("it is not at an https address".into());
            }
            self.guard.check_literal(&url).map_err(|why| plain(&why.to_string()))?;
            if self.is_proxied {
                self.guard.check_name(&url).await.map_err(|why| plain(&why.to_string()))?;
            }
            let request = client.get(url.clone()).header(header::ACCEPT, "application/json");
            let answer = request.send().await.map_err(|error| reason(&error))?;
            match answer.status() {
                StatusCode::OK => return Ok(answer),
                status if matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) => {}
                status => return Err(format!("the server answers {}", status.as_u16())),
            }
            let location = answer.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| url.join(location).ok());
            url = next.ok_or("the server redirects to no valid URL")?;
        }
        Err("the server redirects too often".into())
    }
}

async fn receive(answer: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    let mut parts = std::pin::pin!(answer.bytes_stream());
    while let Some(part) = parts.next().await {
        let part = part.map_err(|error| reason(&error))?;
        if body.len() + part.len() > LARGEST {
            return Err("the answer is too large".into());
        }
        body.extend_from_slice(&part);
    }
    Ok(body)
}

/// Why a request failed: the innermost cause says it best.
fn reason(error: &reqwest::Error) -> String {
    let mut cause: &dyn StdError = error;
    while let Some(next) = cause.source() {
        if cause.is::<Refused>() {
            break;
        }
        cause = next;
    }
    plain(&cause.to_string())
}

/// A text that others have written, as a short line.
fn plain(text: &str) -> String {
    text.chars().take(LONGEST_REASON).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_write_becomes_a_short_line() {
        assert_eq!(plain("a\nb\u{1b}[1m"), "a b [1m");
        assert_eq!(plain(&"é".repeat(1000)).chars().count(), LONGEST_REASON);
    }
}
