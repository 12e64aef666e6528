//! Event retention: removes old links, then events without links.

use std::time::{Duration, Instant};

use muster_types::Result;
use muster_types::event::EventType;
use muster_types::object::ObjectRef;
use muster_types::settings::Settings;
use muster_types::time::now;

use super::metrics::Metrics;
use muster_store::{Store, cluster_values, events, transaction};

/// The maximum number of rows that one transaction removes.
pub(super) const BATCH_SIZE: i64 = 500;
/// The key of the stored position of the orphan sweep.
const CURSOR_KEY: &str = "EVENTS_PRUNE_ORPHAN_CURSOR";

/// The result of a prune.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PruneOutcome {
    pub links: u64,
    pub orphans: u64,
    /// Whether the time budget ran out.
    pub cut_short: bool,
}

/// Prunes events for at most `budget`. Stops between batches.
pub async fn prune(
    store: &Store,
    settings: &Settings,
    metrics: &Metrics,
    budget: Duration,
) -> Result<PruneOutcome> {
    let end = Instant::now() + budget;
    let mut outcome = PruneOutcome::default();
    for event_type in EventType::ALL {
        let before = now() - max_age_seconds(settings, *event_type);
        let counter = metrics.pruned.get_or_create_owned(&[("event_type", event_type.as_str())]);
        loop {
            if Instant::now() >= end {
                return Ok(PruneOutcome { cut_short: true, ..outcome });
            }
            let removed = transaction!(store, |tx| {
                Ok(events::prune_links(tx, *event_type, before, BATCH_SIZE).await?)
            })?;
            counter.inc_by(removed);
            outcome.links += removed;
            if removed < BATCH_SIZE.unsigned_abs() {
                break;
            }
        }
    }
    let counter = metrics.pruned.get_or_create_owned(&[("event_type", "api-request")]);
    #[expect(clippy::cast_precision_loss, reason = "ages are far below 2^52 seconds")]
    let before = now() - settings.max_api_request_event_age as f64;
    let mut from = String::new();
    loop {
        if Instant::now() >= end {
            return Ok(PruneOutcome { cut_short: true, ..outcome });
        }
        let (removed, last) = transaction!(store, |tx| {
            Ok(events::prune_request_links(tx, &from, before, BATCH_SIZE).await?)
        })?;
        counter.inc_by(removed);
        outcome.links += removed;
        match last {
            Some(last) if removed == BATCH_SIZE.unsigned_abs() => from = last,
            _ => break,
        }
    }
    let mut cursor = cluster_values::get(store, CURSOR_KEY).await?.unwrap_or_default();
    loop {
        if Instant::now() >= end {
            return Ok(PruneOutcome { cut_short: true, ..outcome });
        }
        let (removed, next) = transaction!(store, |tx| {
            let (removed, next) = events::prune_orphans(tx, &cursor, BATCH_SIZE).await?;
            cluster_values::set(tx, CURSOR_KEY, next.as_deref().unwrap_or_default()).await?;
            Ok((removed, next))
        })?;
        metrics.orphans_pruned.inc_by(removed);
        outcome.orphans += removed;
        match next {
            Some(next) => cursor = next,
            None => return Ok(outcome),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "ages are far below 2^52 seconds")]
fn max_age_seconds(settings: &Settings, event_type: EventType) -> f64 {
    max_age(settings, event_type) as f64
}

/// Returns the retention of a type in seconds.
pub(super) fn max_age(settings: &Settings, event_type: EventType) -> u64 {
    match event_type {
        EventType::Audit => settings.max_audit_event_age,
        EventType::Mutate => settings.max_mutate_event_age,
        EventType::Status => settings.max_status_event_age,
        EventType::Usage => settings.max_usage_event_age,
        EventType::Resources => settings.max_resources_event_age,
        EventType::Prune => settings.max_prune_event_age,
        EventType::Historic => settings.max_historic_event_age,
        EventType::Health => settings.max_health_event_age,
    }
}

/// Unlinks every event of an object. The orphan sweep later removes events without other links.
pub(crate) async fn clear_events(store: &Store, object: &ObjectRef) -> Result<()> {
    loop {
        let removed =
            transaction!(store, |tx| { Ok(events::prune_object_links(tx, object, BATCH_SIZE).await?) })?;
        if removed < BATCH_SIZE.unsigned_abs() {
            return Ok(());
        }
    }
}
