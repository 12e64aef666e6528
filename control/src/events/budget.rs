//! The size budget of the stored events: removes the oldest API requests first, then the oldest other events.

use std::time::{Duration, Instant};

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

/// The time after which all events are measured again. Until then, those that were removed by age or arrived late are
/// not accounted for.
const MEASURE_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Keeps the stored events within their budget. Remembers their size, so that a check reads only new events.
#[derive(Debug, Default)]
pub struct EventBudget {
    total: tokio::sync::Mutex<Option<RunningTotal>>,
}

/// The size of the events up to one of them.
#[derive(Debug)]
struct RunningTotal {
    /// In bytes.
    bytes: i64,
    /// The last event that is included. Ids of events are ordered by time.
    last: String,
    /// When it was started.
    since: Instant,
}

impl RunningTotal {
    fn new() -> Self {
        Self { bytes: 0, last: String::new(), since: Instant::now() }
    }

    /// Adds the events after the last one.
    async fn add_new(&mut self, store: &Store) -> Result<()> {
        loop {
            let page = events::size_of_page(store, &self.last, MEASURED_BATCH).await?;
            self.bytes += page.bytes;
            if let Some(last) = page.last {
                self.last = last;
            }
            if !page.is_full {
                return Ok(());
            }
        }
    }
}

impl EventBudget {
    /// Removes events until they use at most nine tenths of `EVENT_STORE_MAX_MB`, if they may use more than all of it.
    /// Returns the number of removed links.
    pub async fn enforce(&self, store: &Store, settings: &Settings, metrics: &Metrics) -> Result<u64> {
        let budget = i64::try_from(settings.event_store_max_mb << 20).unwrap_or(i64::MAX);
        if budget == 0 || store.estimate_rows("events").await?.saturating_mul(LARGE_EVENT) <= budget {
            return Ok(0);
        }
        let mut total = self.total.lock().await;
        let current = total.take().filter(|total| total.since.elapsed() < MEASURE_INTERVAL);
        let is_measured = current.is_none();
        let mut current = current.unwrap_or_else(RunningTotal::new);
        current.add_new(store).await?;
        if current.bytes > budget && !is_measured {
            // Some of these events may be removed already.
            current = RunningTotal::new();
            current.add_new(store).await?;
        } else if current.bytes <= budget {
            *total = Some(current);
            return Ok(0);
        }
        let excess = current.bytes - budget / 10 * 9;
        let mut reduction = Reduction { store, metrics, excess, links: 0 };
        reduction.run(settings).await?;
        current.bytes += reduction.excess - excess;
        *total = Some(current);
        Ok(reduction.links)
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
    async fn run(&mut self, settings: &Settings) -> Result<()> {
        for age in halved_ages(settings.max_api_request_event_age) {
            self.remove_requests(now() - age).await?;
        }
        let oldest = EventType::ALL.iter().map(|event_type| max_age(settings, *event_type)).max();
        for age in halved_ages(oldest.unwrap_or_default()) {
            for event_type in EventType::ALL {
                self.remove_older(*event_type, now() - age).await?;
            }
        }
        Ok(())
    }

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
