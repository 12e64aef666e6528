//! Reads request bodies, each within its limit and all of them within one memory budget.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The maximum size of a body without a valid token, in bytes.
pub(crate) const MAX_UNAUTHENTICATED_BODY: u64 = 8 << 10;
/// The unit in which memory is reserved, in bytes.
const UNIT: usize = 1 << 10;

/// The limits of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimit {
    /// In bytes.
    pub(crate) max: u64,
    /// Whether a content-length is required even without a body.
    pub(crate) length_required: bool,
    /// Whether the caller has a valid token.
    pub(crate) authenticated: bool,
}

/// The memory of all request bodies in flight. Bodies without a token can use half of it, so that they cannot block
/// callers with one.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    all: Arc<Semaphore>,
    unauthenticated: Arc<Semaphore>,
    timeout: Duration,
}

/// A body and the memory that is reserved for it.
struct ReservedBody {
    data: Vec<u8>,
    reservations: Vec<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for ReservedBody {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl BodyMemory {
    pub(crate) fn new(settings: &Settings) -> Self {
        let bytes = usize::try_from(settings.api_max_body_memory_mb << 20).unwrap_or(usize::MAX);
        let units = (bytes / UNIT).min(Semaphore::MAX_PERMITS);
        Self {
            all: Arc::new(Semaphore::new(units)),
            unauthenticated: Arc::new(Semaphore::new(units / 2)),
            timeout: Duration::from_secs(settings.api_timeout),
        }
    }

    /// Reads a body. Its memory is reserved as it arrives, until the last clone of the result is dropped.
    pub(crate) async fn read(&self, limit: BodyLimit, headers: &HeaderMap, body: Body) -> Result<Bytes> {
        if body.is_end_stream() && !limit.length_required {
            return Ok(Bytes::new());
        }
        match headers.get(header::CONTENT_LENGTH) {
            None if limit.length_required => {
                return Err(Error::LengthRequired("a content-length is required".into()));
            }
            None => {}
            Some(length) => {
                let length = length.to_str().ok().and_then(|text| text.parse::<u64>().ok());
                if length.is_none_or(|length| length > limit.max) {
                    return Err(too_large());
                }
            }
        }
        tokio::time::timeout(self.timeout, self.collect(limit, body))
            .await
            .map_err(|_| Error::Timeout("the request body did not arrive in time".into()))?
    }

    async fn collect(&self, limit: BodyLimit, mut body: Body) -> Result<Bytes> {
        let mut received = ReservedBody { data: Vec::new(), reservations: self.reserve(limit, 0)? };
        let mut reserved = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Error::Invalid("the request body ended early".into()))?;
            let Some(data) = frame.data_ref() else { continue };
            let size = received.data.len() + data.len();
            if size as u64 > limit.max {
                return Err(too_large());
            }
            if size > reserved {
                let units = (size - reserved).div_ceil(UNIT);
                received.reservations.extend(self.reserve(limit, units)?);
                reserved += units * UNIT;
            }
            // Copied, because the connection's buffer is larger than the data.
            received.data.extend_from_slice(data);
        }
        Ok(Bytes::from_owner(received))
    }

    fn reserve(&self, limit: BodyLimit, units: usize) -> Result<Vec<OwnedSemaphorePermit>> {
        let exhausted = || Error::Unavailable("too many request bodies in flight, please retry".into());
        let units = u32::try_from(units).map_err(|_| too_large())?;
        let budgets = [Some(&self.all), (!limit.authenticated).then_some(&self.unauthenticated)];
        budgets
            .into_iter()
            .flatten()
            .map(|budget| Arc::clone(budget).try_acquire_many_owned(units).map_err(|_| exhausted()))
            .collect()
    }
}

fn too_large() -> Error {
    Error::TooLarge("request body too large".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> BodyMemory {
        BodyMemory::new(&Settings::from_pairs(&[("API_MAX_BODY_MEMORY_MB", "1")]).unwrap())
    }

    fn limit(authenticated: bool) -> BodyLimit {
        BodyLimit { max: 1 << 20, length_required: false, authenticated }
    }

    async fn read(memory: &BodyMemory, size: usize, authenticated: bool) -> Result<Bytes> {
        memory.read(limit(authenticated), &HeaderMap::new(), Body::from(vec![b'x'; size])).await
    }

    #[tokio::test]
    async fn bodies_in_flight_share_one_budget() {
        let memory = memory();
        let first = read(&memory, 600 << 10, true).await.unwrap();
        assert!(matches!(read(&memory, 600 << 10, true).await, Err(Error::Unavailable(_))));
        let clone = first.clone();
        drop(first);
        assert!(matches!(read(&memory, 600 << 10, true).await, Err(Error::Unavailable(_))));
        drop(clone);
        assert_eq!(read(&memory, 600 << 10, true).await.unwrap().len(), 600 << 10);
        assert_eq!(memory.all.available_permits(), 1 << 10, "everything is returned");
    }

    #[tokio::test]
    async fn bodies_without_token_leave_half_of_the_budget() {
        let memory = memory();
        let held = read(&memory, 512 << 10, false).await.unwrap();
        assert!(matches!(read(&memory, 1, false).await, Err(Error::Unavailable(_))));
        assert_eq!(read(&memory, 512 << 10, true).await.unwrap().len(), 512 << 10);
        drop(held);
        assert_eq!(read(&memory, 1, false).await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn body_without_length_is_limited_while_it_arrives() {
        let memory = memory();
        let small = BodyLimit { max: 4, ..limit(false) };
        let read = async |text: &'static str| memory.read(small, &HeaderMap::new(), Body::from(text)).await;
        assert_eq!(read("four").await.unwrap(), "four");
        assert!(matches!(read("fives").await, Err(Error::TooLarge(_))));
    }
}
