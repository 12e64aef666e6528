//! Fetches images from untrusted web servers, which may stall, close connections, send wrong headers, redirect to
//! internal addresses, and change their content between two requests. See docs/decisions/0017.

pub(crate) mod address;
pub(crate) mod guarded_client;
mod names;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use muster_types::settings::Settings;
use muster_types::storage::{ByteStream, Draft, StorageApi};
use muster_types::{Error, Result};
use reqwest::header::{self, HeaderMap, HeaderValue};
use reqwest::{Response, StatusCode, Url};
use tokio::time::Instant;

use address::{AddressFilter, BlockedAddress};
use guarded_client::{GuardedClient, RequestFailure, host_of};
use muster_store::artifacts::Validators;
pub(crate) use names::{check_url, resolve};

/// The maximum number of redirects that are followed.
const MAX_REDIRECTS: usize = 5;
/// The maximum number of consecutive attempts without progress.
const MAX_FUTILE_ATTEMPTS: u32 = 4;
/// Half of the delay before the first retry. The delay doubles with each retry without progress.
const RETRY_BASE_DELAY: Duration = Duration::from_millis(200);
/// The minimum number of new bytes that count as progress.
const MIN_PROGRESS_BYTES: u64 = 64 << 10;
/// The rate below which a transfer counts as stalled.
const MIN_BYTES_PER_SECOND: u64 = 1 << 10;
/// The time without any response after which a fetch fails.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(29);

/// Rejects a source that cannot or must not be fetched, without network access.
pub(crate) fn check(settings: &Settings, field: &str, source: &str) -> Result<()> {
    let invalid = |reason: &dyn fmt::Display| Error::Invalid(format!("{field}: {reason}"));
    let url = resolve(settings, source).map_err(|reason| invalid(&reason))?;
    address_filter(settings).check_literal(&url).map_err(|reason| invalid(&reason))
}

/// Returns the filter for the addresses that images may be fetched from.
fn address_filter(settings: &Settings) -> AddressFilter {
    let networks = &settings.image_fetch_allowed_networks;
    AddressFilter::new("IMAGE_FETCH_ALLOWED_NETWORKS", networks, &settings.http_proxy_server)
}

fn not_allowed(blocked: &BlockedAddress) -> Error {
    Error::Invalid(format!("url: {blocked}"))
}

/// The result of a fetch.
#[derive(Debug)]
pub(crate) enum FetchOutcome {
    /// The source has nothing new.
    Unchanged,
    /// The draft has the complete content.
    Fetched(Validators),
}

/// The progress of a fetch, in bytes.
#[derive(Debug, Default)]
pub(crate) struct FetchProgress {
    pub(crate) done: AtomicU64,
    /// The size of the content; 0 while it is unknown.
    pub(crate) total: AtomicU64,
}

/// Stores the validator of partially fetched content, with which a fetch is resumed.
pub(crate) trait ResumeState: Sync {
    /// Returns the stored validator.
    fn validator(&self) -> Option<String>;
    /// Stores a validator for later attempts, possibly of another process.
    fn save(&self, validator: Option<String>) -> impl Future<Output = Result<()>> + Send;
}

/// A fetch of one image into a draft.
pub(crate) struct Fetch<'a> {
    settings: &'a Settings,
    client: GuardedClient,
    storage: &'a dyn StorageApi,
    draft: Draft,
    max_bytes: u64,
    progress: Arc<FetchProgress>,
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(
        settings: &'a Settings,
        storage: &'a dyn StorageApi,
        draft: Draft,
        max_bytes: u64,
        progress: Arc<FetchProgress>,
    ) -> Result<Self> {
        let client = GuardedClient::new(settings, address_filter(settings))?;
        Ok(Self { settings, client, storage, draft, max_bytes, progress })
    }

    /// Fetches a URL into the draft, unless the source has the content that `known` describes.
    pub(crate) async fn run(
        &self,
        url: &Url,
        known: &Validators,
        resume: &impl ResumeState,
    ) -> Result<FetchOutcome> {
        let limit = Duration::from_secs(self.settings.max_image_transfer_seconds);
        match tokio::time::timeout(limit, self.retry(url, known, resume)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Error::Unavailable(format!("timed out after {} seconds", limit.as_secs()))),
        }
    }

    async fn retry(&self, url: &Url, known: &Validators, resume: &impl ResumeState) -> Result<FetchOutcome> {
        let mut futile: u32 = 0;
        let mut furthest = 0;
        let mut response_deadline = Instant::now() + RESPONSE_TIMEOUT;
        let mut last_error: Option<String> = None;
        loop {
            let (mut error, answered) = match self.attempt(url, known, resume, response_deadline).await {
                Ok(outcome) => return Ok(outcome),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Transient(why)) => (why, true),
                Err(Failure::NoResponse(why)) => (why, false),
            };
            if !answered && Instant::now() >= response_deadline {
                // The deadline ended this attempt before it could tell whether the name, the host or the server failed.
                error = last_error.unwrap_or(error);
            }
            last_error = Some(error.clone());
            let have = self.storage.draft_size(self.draft).await?.unwrap_or(0);
            futile = if have >= furthest + MIN_PROGRESS_BYTES { 1 } else { futile + 1 };
            furthest = furthest.max(have);
            if answered {
                response_deadline = Instant::now() + RESPONSE_TIMEOUT;
            } else if futile > MAX_FUTILE_ATTEMPTS
                || Instant::now() + retry_delay(futile) >= response_deadline
            {
                // After `Unavailable` the operation is repeated, which is worthwhile only for a partial fetch.
                return Err(if have > 0 { Error::Unavailable(error) } else { Error::Invalid(error) });
            }
            if futile > MAX_FUTILE_ATTEMPTS {
                return Err(Error::Unavailable(error));
            }
            tracing::info!(%url, have, error, "resuming an interrupted fetch");
            tokio::time::sleep(retry_delay(futile)).await;
        }
    }

    /// Makes one request, and resumes at the end of the draft if possible.
    async fn attempt(
        &self,
        url: &Url,
        known: &Validators,
        resume: &impl ResumeState,
        response_deadline: Instant,
    ) -> Result<FetchOutcome, Failure> {
        let mut have = self.storage.draft_size(self.draft).await?.unwrap_or(0);
        let validator = resume.validator();
        if have > 0 && validator.is_none() {
            // The rest may belong to other content.
            self.storage.truncate(self.draft, 0).await?;
            have = 0;
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if have > 0 {
            insert(&mut headers, header::RANGE, Some(&format!("bytes={have}-")))?;
            insert(&mut headers, header::IF_RANGE, validator.as_deref())?;
        } else {
            insert(&mut headers, header::IF_NONE_MATCH, known.etag.as_deref())?;
            insert(&mut headers, header::IF_MODIFIED_SINCE, known.modified.as_deref())?;
        }
        let response = self.request(url.clone(), &headers, response_deadline).await?;
        let host = host_of(response.url());
        let received = validators(response.headers());
        match response.status() {
            StatusCode::NOT_MODIFIED if have == 0 => Ok(FetchOutcome::Unchanged),
            StatusCode::OK => {
                if have == 0 && is_unchanged(known, &received) {
                    return Ok(FetchOutcome::Unchanged);
                }
                if have > 0 {
                    self.storage.truncate(self.draft, 0).await?;
                }
                resume.save(range_validator(&received)).await?;
                let total = response.content_length();
                self.receive(response, 0, total).await?;
                Ok(FetchOutcome::Fetched(Validators { length: self.length(total)?, ..received }))
            }
            StatusCode::PARTIAL_CONTENT if have > 0 => {
                // Some servers ignore the requested range or If-Range.
                let is_same = range_validator(&received) == validator;
                let range = content_range(response.headers());
                let Some((start, total)) = range.filter(|(start, _)| is_same && *start == have) else {
                    self.storage.truncate(self.draft, 0).await?;
                    return Err(Failure::Transient(
                        "the server sent a different range than requested".into(),
                    ));
                };
                self.receive(response, start, total).await?;
                Ok(FetchOutcome::Fetched(Validators { length: self.length(total)?, ..received }))
            }
            StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => {
                self.storage.truncate(self.draft, 0).await?;
                Err(Failure::Transient("the content became shorter".into()))
            }
            status if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) => {
                Err(Failure::Transient(format!("{host} responded with {status}")))
            }
            status => Err(Failure::Final(Error::Invalid(format!("{host} responded with {status}")))),
        }
    }

    /// Sends a request and follows redirects, and checks every address on the way.
    async fn request(
        &self,
        mut url: Url,
        headers: &HeaderMap,
        response_deadline: Instant,
    ) -> Result<Response, Failure> {
        for _ in 0..=MAX_REDIRECTS {
            let check = tokio::time::timeout_at(response_deadline, self.client.check(&url));
            check.await.map_err(|_| no_response(&url))?.map_err(|blocked| not_allowed(&blocked))?;
            let stall = Duration::from_secs(self.settings.image_stall_timeout);
            let deadline = response_deadline.min(Instant::now() + stall);
            let request = self.client.client().get(url.clone()).headers(headers.clone()).send();
            let response = match tokio::time::timeout_at(deadline, request).await {
                Ok(response) => response.map_err(|error| self.classify(&url, &error))?,
                Err(_) => return Err(no_response(&url)),
            };
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| url.join(location).ok());
            let next = next.ok_or_else(|| reject("the server redirected to an invalid URL"))?;
            names::check_url(&next).map_err(|why| {
                reject(&format!("the server redirected to a URL that is not allowed: it {why}"))
            })?;
            if url.scheme() == "https" && next.scheme() == "http" {
                return Err(reject("the server redirected from https to http"));
            }
            url = next;
        }
        Err(reject("too many redirects"))
    }

    /// Appends the body of a response to the draft.
    async fn receive(&self, response: Response, start: u64, total: Option<u64>) -> Result<(), Failure> {
        if total.is_some_and(|total| total > self.max_bytes) {
            return Err(self.too_large());
        }
        self.progress.total.store(total.unwrap_or(0), Ordering::Relaxed);
        self.progress.done.store(start, Ordering::Relaxed);
        let stall = Duration::from_secs(self.settings.image_stall_timeout);
        let data = body_stream(response, stall, Arc::clone(&self.progress));
        let size = match self.storage.append(self.draft, Some(start), self.max_bytes, data).await {
            Ok(size) => size,
            Err(Error::TooLarge(_)) => return Err(self.too_large()),
            Err(Error::Timeout(why) | Error::Unavailable(why)) => return Err(Failure::Transient(why)),
            Err(error) => return Err(Failure::Final(error)),
        };
        match total {
            Some(total) if size != total => {
                Err(Failure::Transient(format!("the server sent {size} of {total} bytes")))
            }
            _ => Ok(()),
        }
    }

    /// Classifies a failed request. A blocked address is final.
    fn classify(&self, url: &Url, error: &reqwest::Error) -> Failure {
        match self.client.classify(url, error) {
            RequestFailure::Blocked(blocked) => Failure::Final(not_allowed(&blocked)),
            RequestFailure::NoResponse(reason) => Failure::NoResponse(reason),
            RequestFailure::Untrusted(reason) => reject(&reason),
            RequestFailure::Interrupted(reason) => {
                tracing::info!(?error, "failed to request an image");
                Failure::Transient(reason)
            }
        }
    }

    fn too_large(&self) -> Failure {
        let limit = self.settings.max_image_size_gb;
        reject(&format!("the image is larger than the {limit} GB of MAX_IMAGE_SIZE_GB"))
    }

    fn length(&self, total: Option<u64>) -> Result<Option<i64>, Failure> {
        total.map(i64::try_from).transpose().map_err(|_| self.too_large())
    }
}

/// Returns the delay before the retry after a number of consecutive attempts without progress.
fn retry_delay(futile: u32) -> Duration {
    RETRY_BASE_DELAY * 2u32.pow(futile)
}

fn no_response(url: &Url) -> Failure {
    Failure::NoResponse(guarded_client::no_response(url))
}

/// Why an attempt failed.
enum Failure {
    /// A retry may succeed.
    Transient(String),
    /// No server responded. A retry may succeed, within [`RESPONSE_TIMEOUT`].
    NoResponse(String),
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

fn reject(why: &str) -> Failure {
    Failure::Final(Error::Invalid(why.into()))
}

/// Returns the body of a response. It updates the progress, and fails if the transfer is too slow for `stall`.
fn body_stream(response: Response, stall: Duration, progress: Arc<FetchProgress>) -> ByteStream {
    let body = Box::pin(response.bytes_stream());
    // The bytes received in the current time window, and its end.
    let window = (0, Instant::now() + stall);
    Box::pin(futures_util::stream::unfold(Some((body, window)), move |state| {
        let progress = Arc::clone(&progress);
        async move {
            let (mut body, (mut received, mut end)) = state?;
            match tokio::time::timeout_at(end, body.next()).await {
                Ok(None) => None,
                Ok(Some(Ok(bytes))) => {
                    progress.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    received += bytes.len() as u64;
                    if received >= MIN_BYTES_PER_SECOND * stall.as_secs() {
                        (received, end) = (0, Instant::now() + stall);
                    }
                    Some((Ok(bytes), Some((body, (received, end)))))
                }
                Ok(Some(Err(_))) => {
                    Some((Err(Error::Unavailable("the server closed the connection early".into())), None))
                }
                Err(_) => Some((Err(Error::Timeout("the server stalled or sends too slowly".into())), None)),
            }
        }
    }))
}

/// Sets a header if there is a value. Stored validators come from headers, so an invalid one is damaged.
fn insert(headers: &mut HeaderMap, name: header::HeaderName, value: Option<&str>) -> Result<()> {
    if let Some(value) = value {
        let value = HeaderValue::from_str(value);
        let value = value.map_err(|_| Error::Internal(format!("invalid value for the header {name}")))?;
        headers.insert(name, value);
    }
    Ok(())
}

/// Returns the validators of a response. Malformed or long ones count as missing.
fn validators(headers: &HeaderMap) -> Validators {
    let text = |name| {
        let value: &HeaderValue = headers.get(name)?;
        value.to_str().ok().filter(|text| text.len() <= 255).map(str::to_owned)
    };
    Validators {
        etag: text(header::ETAG),
        modified: text(header::LAST_MODIFIED),
        length: headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok()),
    }
}

/// Returns whether a response has the known content, for servers that do not support conditional requests.
fn is_unchanged(known: &Validators, received: &Validators) -> bool {
    match (&known.etag, &received.etag) {
        (Some(known), Some(received)) => known == received,
        (None, None) => {
            known.modified.is_some() && known.modified == received.modified && known.length == received.length
        }
        _ => false,
    }
}

/// Returns the validator for If-Range: a strong entity tag, else the modification time.
fn range_validator(received: &Validators) -> Option<String> {
    let strong = received.etag.clone().filter(|tag| !tag.starts_with("W/"));
    strong.or_else(|| received.modified.clone())
}

/// Returns the start of a range, and the total size if the server sent it.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    let start = range.split_once('-')?.0.parse().ok()?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some((start, total))
}
