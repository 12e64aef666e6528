//! The size budget of the stored events: removes the oldest API requests first, then the oldest other events.

use muster_types::Result;
use muster_types::event::EventType;
use muster_types::settings::Settings;
use muster_types::time::now;

use super::metrics::Metrics;
use super::prune::{BATCH_SIZE, max_age};
use muster_store::{Store, events, transaction};

/// The number of events that one statement measures.
const MEASURED_BATCH: i64 = 5000;
/// The size of the largest usual event, in bytes. Without more events than the budget has room for at this size, they
/// are not measured.
const LARGE_EVENT: i64 = 8 << 10;

/// Removes events until they use at most nine tenths of `EVENT_STORE_MAX_MB`, if they use more than all of it. Returns the
/// number of removed links.
pub async fn enforce_budget(store: &Store, settings: &Settings, metrics: &Metrics) -> Result<u64> {
    let budget = i64::try_from(settings.event_store_max_mb << 20).unwrap_or(i64::MAX);
    if budget == 0 || store.estimate_rows("events").await?.saturating_mul(LARGE_EVENT) <= budget {
        return Ok(0);
    }
    let size = measure(store).await?;
    if size <= budget {
        return Ok(0);
    }
    let mut reduction = Reduction { store, metrics, excess: size - budget / 10 * 9, links: 0 };
    for age in halved_ages(settings.max_api_request_event_age) {
        reduction.remove_requests(now() - age).await?;
    }
    let oldest = EventType::ALL.iter().map(|event_type| max_age(settings, *event_type)).max();
    for age in halved_ages(oldest.unwrap_or_default()) {
        for event_type in EventType::ALL {
            reduction.remove_older(*event_type, now() - age).await?;
        }
    }
    Ok(reduction.links)
}

/// Returns the approximate size of all events in bytes.
async fn measure(store: &Store) -> Result<i64> {
    let (mut size, mut after) = (0, String::new());
    loop {
        let (bytes, next) = events::size_of_page(store, &after, MEASURED_BATCH).await?;
        size += bytes;
        match next {
            Some(next) => after = next,
            None => return Ok(size),
        }
    }
}

/// Returns ages in seconds down to zero, each half of the one before.
#[expect(clippy::cast_precision_loss, reason = "ages are far below 2^52 seconds")]
fn halved_ages(max: u64) -> impl Iterator<Item = f64> {
    std::iter::successors(Some(max), |age| (*age > 0).then_some(age / 2)).map(|age| age as f64)
}

/// Removes events until their size no longer exceeds the budget.
struct Reduction<'a> {
    store: &'a Store,
    metrics: &'a Metrics,
    /// In bytes.
    excess: i64,
    links: u64,
}

impl Reduction<'_> {
    async fn remove_requests(&mut self, before: f64) -> Result<()> {
        let mut from = String::new();
        while self.excess > 0 {
            let removed = transaction!(self.store, |tx| {
                Ok(events::remove_requests(tx, &from, before, BATCH_SIZE).await?)
            })?;
            self.count("api-request", &removed);
            match removed.last {
                Some(last) if removed.links == BATCH_SIZE.unsigned_abs() => from = last,
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    async fn remove_older(&mut self, event_type: EventType, before: f64) -> Result<()> {
        while self.excess > 0 {
            let removed = transaction!(self.store, |tx| {
                Ok(events::remove_older(tx, event_type, before, BATCH_SIZE).await?)
            })?;
            self.count(event_type.as_str(), &removed);
            if removed.links < BATCH_SIZE.unsigned_abs() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn count(&mut self, label: &'static str, removed: &events::RemovedEvents) {
        self.metrics.pruned.get_or_create(&[("event_type", label)]).inc_by(removed.links);
        self.excess -= removed.bytes;
        self.links += removed.links;
    }
}
