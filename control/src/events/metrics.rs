//! The event metrics, in Prometheus format.

use muster_types::event::EventType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::exposition::{ExpositionFormat, encode};

/// The label of the counters by event type or kind.
pub type Labels = [(&'static str, &'static str); 1];

/// Counters and gauges of the event log.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub rows: Gauge,
    pub inserted: Family<Labels, Counter>,
    pub pruned: Family<Labels, Counter>,
    pub orphans_pruned: Counter,
    pub depth: Gauge,
    pub dropped: Counter,
    pub loki_sent: Counter,
    pub loki_dropped: Counter,
    pub refusals: Family<Labels, Counter>,
}

impl Metrics {
    pub(super) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            rows: Gauge::default(),
            inserted: Family::default(),
            pruned: Family::default(),
            orphans_pruned: Counter::default(),
            depth: Gauge::default(),
            dropped: Counter::default(),
            loki_sent: Counter::default(),
            loki_dropped: Counter::default(),
            refusals: Family::default(),
        };
        let registry = &mut metrics.registry;
        registry.register("database_events_rows", "Estimated rows of the events table", metrics.rows.clone());
        registry.register("database_events_inserted", "Events inserted", metrics.inserted.clone());
        registry.register("database_events_pruned", "Event links pruned", metrics.pruned.clone());
        registry.register(
            "database_orphan_events_pruned",
            "Event rows removed by the orphan sweep",
            metrics.orphans_pruned.clone(),
        );
        registry.register("eventlog_spool_depth", "Events pending in the local queue", metrics.depth.clone());
        registry.register(
            "eventlog_spool_dropped",
            "Events dropped at the queue's cap",
            metrics.dropped.clone(),
        );
        registry.register("eventlog_loki_sent", "Events sent to Loki", metrics.loki_sent.clone());
        registry.register(
            "eventlog_loki_dropped",
            "Events that Loki did not receive",
            metrics.loki_dropped.clone(),
        );
        registry.register(
            "api_unauthenticated_refusals",
            "Refused requests without a valid token (request), and those of them with a wrong secret (login), a token of a \
             changed key (token) or a refused exchange (exchange); only a sample is recorded as events",
            metrics.refusals.clone(),
        );
        // Without them, the first event of a kind would not be an increase.
        for event_type in EventType::ALL {
            metrics.inserted.get_or_create(&[("event_type", event_type.as_str())]).inc_by(0);
            metrics.pruned.get_or_create(&[("event_type", event_type.as_str())]).inc_by(0);
        }
        for kind in ["request", "login", "token", "exchange"] {
            metrics.refusals.get_or_create(&[("kind", kind)]).inc_by(0);
        }
        metrics
    }

    /// Returns all metrics as text.
    #[must_use]
    pub fn text(&self, format: ExpositionFormat) -> String {
        encode(&self.registry, format)
    }
}
