//! Fetches images from web servers that nobody trusts: they may stall, break off, lie, redirect to where they should
//! not, and change what they serve between two requests.

pub(crate) mod address;
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
use muster_store::artifacts::Validators;
pub(crate) use names::resolve;

/// Redirects that are followed.
const MOST_REDIRECTS: usize = 5;
/// Tries that bring nothing new before a fetch is given up.
const MOST_VAIN_TRIES: u32 = 4;
/// Pause before the second try; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// What a try must bring to count, in bytes.
const LEAST_PROGRESS: u64 = 64 << 10;
/// Bytes a second below which a server counts as stalled.
const LEAST_RATE: u64 = 1 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Refuses what cannot or must not be fetched, as far as the words tell.
pub(crate) fn check(settings: &Settings, field: &str, source: &str) -> Result<()> {
    let invalid = |reason: &dyn fmt::Display| Error::Invalid(format!("{field}: {reason}"));
    let url = resolve(settings, source).map_err(|reason| invalid(&reason))?;
    guard(settings).check_literal(&url).map_err(|reason| invalid(&reason))
}

/// Which addresses images may be fetched from.
fn guard(settings: &Settings) -> AddressFilter {
    let words = &settings.image_fetch_allowed_networks;
    AddressFilter::new("IMAGE_FETCH_ALLOWED_NETWORKS", words, &settings.http_proxy_server)
}

fn not_allowed(why: &BlockedAddress) -> Error {
    Error::Invalid(format!("url: {why}"))
}

/// What a fetch came to.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The source has what is known.
    Unchanged,
    /// The draft holds it all.
    Fetched(Validators),
}

/// How far a fetch is, for those who watch.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub(crate) done: AtomicU64,
    /// What it will be; 0 while that is not known.
    pub(crate) total: AtomicU64,
}

/// A part that was fetched before: how to ask for the rest of the same.
pub(crate) trait Keep: Sync {
    /// What was kept, if anything.
    fn validator(&self) -> Option<String>;
    /// Keeps it for a later try, maybe of another process.
    fn keep(&self, validator: Option<String>) -> impl Future<Output = Result<()>> + Send;
}

/// One fetch.
pub(crate) struct Fetch<'a> {
    settings: &'a Settings,
    guard: AddressFilter,
    client: reqwest::Client,
    storage: &'a dyn StorageApi,
    draft: Draft,
    most: u64,
    meter: Arc<Meter>,
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(
        settings: &'a Settings,
        storage: &'a dyn StorageApi,
        draft: Draft,
        most: u64,
        meter: Arc<Meter>,
    ) -> Result<Self> {
        let guard = guard(settings);
        let mut builder = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .dns_resolver(Arc::new(guard.clone()))
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")));
        builder = if settings.http_proxy_server.is_empty() {
            builder.no_proxy()
        } else {
            let proxy = reqwest::Proxy::all(&settings.http_proxy_server);
            builder.proxy(proxy.map_err(|error| Error::Internal(format!("HTTP_PROXY_SERVER: {error}")))?)
        };
        let client = builder.build().map_err(|error| Error::Internal(error.to_string()))?;
        Ok(Self { settings, guard, client, storage, draft, most, meter })
    }

    /// Fetches a URL into the draft, unless the source says that it has nothing newer than `known`.
    pub(crate) async fn run(&self, url: &Url, known: &Validators, part: &impl Keep) -> Result<Outcome> {
        let limit = Duration::from_secs(self.settings.max_image_transfer_seconds);
        match tokio::time::timeout(limit, self.tries(url, known, part)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Error::Unavailable(format!("not fetched within {} seconds", limit.as_secs()))),
        }
    }

    async fn tries(&self, url: &Url, known: &Validators, part: &impl Keep) -> Result<Outcome> {
        let mut vain = 0;
        let mut furthest = 0;
        loop {
            let error = match self.attempt(url, known, part).await {
                Ok(outcome) => return Ok(outcome),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(why)) => why,
            };
            let have = self.storage.draft_size(self.draft).await?.unwrap_or(0);
            vain = if have >= furthest + LEAST_PROGRESS { 1 } else { vain + 1 };
            furthest = furthest.max(have);
            if vain > MOST_VAIN_TRIES {
                return Err(Error::Unavailable(error));
            }
            tracing::info!(%url, have, error, "a fetch goes on where it stopped");
            tokio::time::sleep(FIRST_PAUSE * 2u32.pow(vain)).await;
        }
    }

    /// One request, and what comes of it.
    async fn attempt(&self, url: &Url, known: &Validators, part: &impl Keep) -> Result<Outcome, Failure> {
        let mut have = self.storage.draft_size(self.draft).await?.unwrap_or(0);
        let validator = part.validator();
        if have > 0 && validator.is_none() {
            // Nobody can tell whether the rest would belong to it.
            self.storage.truncate(self.draft, 0).await?;
            have = 0;
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if have > 0 {
            insert(&mut headers, header::RANGE, Some(&format!("bytes={have}-")));
            insert(&mut headers, header::IF_RANGE, validator.as_deref());
        } else {
            insert(&mut headers, header::IF_NONE_MATCH, known.etag.as_deref());
            insert(&mut headers, header::IF_MODIFIED_SINCE, known.modified.as_deref());
        }
        let answer = self.follow(url.clone(), &headers).await?;
        let said = validators(answer.headers());
        match answer.status() {
            StatusCode::NOT_MODIFIED if have == 0 => Ok(Outcome::Unchanged),
            StatusCode::OK => {
                if have == 0 && same(known, &said) {
                    return Ok(Outcome::Unchanged);
                }
                if have > 0 {
                    self.storage.truncate(self.draft, 0).await?;
                }
                part.keep(range_validator(&said)).await?;
                let total = answer.content_length();
                self.receive(answer, 0, total).await?;
                Ok(Outcome::Fetched(Validators { length: total.and_then(|n| i64::try_from(n).ok()), ..said }))
            }
            StatusCode::PARTIAL_CONTENT if have > 0 => {
                // Some servers pay no heed to what they were asked for: is it the rest of the same?
                let same = range_validator(&said) == validator;
                let part = content_range(answer.headers()).filter(|(start, _)| same && *start == have);
                let Some((start, total)) = part else {
                    self.storage.truncate(self.draft, 0).await?;
                    return Err(Failure::Passing("the server sent another part than was asked for".into()));
                };
                self.receive(answer, start, total).await?;
                Ok(Outcome::Fetched(Validators { length: total.and_then(|n| i64::try_from(n).ok()), ..said }))
            }
            StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => {
                self.storage.truncate(self.draft, 0).await?;
                Err(Failure::Passing("the server has less than it had".into()))
            }
            status if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) => {
                Err(Failure::Passing(format!("the server answers {status}")))
            }
            status => Err(Failure::Final(Error::Invalid(format!("the server answers {status}")))),
        }
    }

    /// Asks, and asks where the answer points to, for as long as that is allowed.
    async fn follow(&self, mut url: Url, headers: &HeaderMap) -> Result<Response, Failure> {
        for _ in 0..=MOST_REDIRECTS {
            self.guard.check_literal(&url).map_err(|why| not_allowed(&why))?;
            if !self.settings.http_proxy_server.is_empty() {
                self.guard.check_name(&url).await.map_err(|why| not_allowed(&why))?;
            }
            let stall = Duration::from_secs(self.settings.image_stall_timeout);
            let request = self.client.get(url.clone()).headers(headers.clone()).send();
            let answer = match tokio::time::timeout(stall, request).await {
                Ok(answer) => answer.map_err(|error| failure(&error))?,
                Err(_) => return Err(Failure::Passing("the server does not answer".into())),
            };
            if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            let location = answer.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| url.join(location).ok());
            let next = next.ok_or_else(|| refuse("the server redirects to no valid URL"))?;
            names::check_url(&next).map_err(|_| refuse("the server redirects to what is no web address"))?;
            if url.scheme() == "https" && next.scheme() == "http" {
                return Err(refuse("the server redirects from https to http"));
            }
            url = next;
        }
        Err(refuse("the server redirects too often"))
    }

    /// Writes an answer's bytes behind what is there.
    async fn receive(&self, answer: Response, start: u64, total: Option<u64>) -> Result<(), Failure> {
        let too_large = || {
            let limit = self.settings.max_image_size_gb;
            Failure::Final(Error::Invalid(format!(
                "the image is larger than the {limit} GB of MAX_IMAGE_SIZE_GB"
            )))
        };
        if total.is_some_and(|total| total > self.most) {
            return Err(too_large());
        }
        self.meter.total.store(total.unwrap_or(0), Ordering::Relaxed);
        self.meter.done.store(start, Ordering::Relaxed);
        let stall = Duration::from_secs(self.settings.image_stall_timeout);
        let data = watched(answer, stall, Arc::clone(&self.meter));
        let size = match self.storage.append(self.draft, Some(start), self.most, data).await {
            Ok(size) => size,
            Err(Error::TooLarge(_)) => return Err(too_large()),
            Err(Error::Timeout(why) | Error::Unavailable(why)) => return Err(Failure::Passing(why)),
            Err(error) => return Err(Failure::Final(error)),
        };
        match total {
            Some(total) if size != total => {
                Err(Failure::Passing(format!("the server sent {size} of {total} bytes")))
            }
            _ => Ok(()),
        }
    }
}

/// How a try failed.
enum Failure {
    /// Another try may help.
    Passing(String),
    /// None would.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

fn refuse(why: &str) -> Failure {
    Failure::Final(Error::Invalid(why.into()))
}

/// What a failed request means. An address that is not allowed will not be later.
fn failure(error: &reqwest::Error) -> Failure {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(cause) = source {
        if let Some(refused) = cause.downcast_ref::<BlockedAddress>() {
            return Failure::Final(not_allowed(refused));
        }
        source = cause.source();
    }
    tracing::info!(?error, "a request failed");
    let what = if error.is_connect() {
        "cannot connect to the server"
    } else if error.is_timeout() {
        "the server does not answer"
    } else {
        "the request failed"
    };
    Failure::Passing(what.into())
}

/// The bytes of an answer: counted, and given up when none comes for too long.
fn watched(answer: Response, stall: Duration, meter: Arc<Meter>) -> ByteStream {
    let body = Box::pin(answer.bytes_stream());
    // What came in this span of time, and when it ends.
    let span = (0, Instant::now() + stall);
    Box::pin(futures_util::stream::unfold(Some((body, span)), move |state| {
        let meter = Arc::clone(&meter);
        async move {
            let (mut body, (mut came, mut end)) = state?;
            match tokio::time::timeout_at(end, body.next()).await {
                Ok(None) => None,
                Ok(Some(Ok(bytes))) => {
                    meter.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    came += bytes.len() as u64;
                    if came >= LEAST_RATE * stall.as_secs() {
                        (came, end) = (0, Instant::now() + stall);
                    }
                    Some((Ok(bytes), Some((body, (came, end)))))
                }
                Ok(Some(Err(_))) => {
                    Some((Err(Error::Unavailable("the server broke the connection off".into())), None))
                }
                Err(_) => Some((Err(Error::Timeout("the server sends no more, or too slowly".into())), None)),
            }
        }
    }))
}

fn insert(headers: &mut HeaderMap, name: header::HeaderName, value: Option<&str>) {
    if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
        headers.insert(name, value);
    }
}

/// What an answer says of what it carries.
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

/// Whether an answer carries what is known, as far as its head tells: the server did not say so by itself.
fn same(known: &Validators, said: &Validators) -> bool {
    match (&known.etag, &said.etag) {
        (Some(known), Some(said)) => known == said,
        (None, None) => {
            known.modified.is_some() && known.modified == said.modified && known.length == said.length
        }
        _ => false,
    }
}

/// What makes sure that the rest of a content belongs to its beginning: a strong tag, else its time.
fn range_validator(said: &Validators) -> Option<String> {
    let strong = said.etag.clone().filter(|tag| !tag.starts_with("W/"));
    strong.or_else(|| said.modified.clone())
}

/// Where a part begins, and how long the whole is.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    let start = range.split_once('-')?.0.parse().ok()?;
    Some((start, total.parse().ok()))
}
