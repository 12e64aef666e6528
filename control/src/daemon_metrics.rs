//! What this daemon has counted and measured since it started: requests, database, periodic tasks, operations, placements
//! and exchanges. Kept in memory, so it can be read while the database is unavailable. See docs/decisions/0096.

use std::sync::atomic::AtomicU64;
use std::time::Instant;

use muster_store::store_metrics::StoreMetrics;
use muster_types::operation::OperationState;
use muster_types::scheduling::SchedulingStage;
use muster_types::time::now;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::exposition::{ExpositionFormat, encode};
use crate::traces::Traces;

/// The limits of the buckets of durations in seconds: of requests, and of work in the background.
const REQUEST_BUCKETS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];
const PASS_BUCKETS: [f64; 8] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0];
const OPERATION_BUCKETS: [f64; 9] = [0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0];

type Labels<const N: usize> = [(&'static str, String); N];
type Label = [(&'static str, &'static str); 1];
type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// The counters and histograms of a daemon.
#[derive(Debug)]
pub struct DaemonMetrics {
    registry: Registry,
    requests: Family<Labels<3>, Counter>,
    request_seconds: Histograms<Labels<2>>,
    pass_seconds: Histograms<Label>,
    pass_failures: Family<Label, Counter>,
    pass_success: Family<Label, Gauge<f64, AtomicU64>>,
    operations: Family<Labels<2>, Counter>,
    operation_seconds: Histograms<Labels<1>>,
    placements: Counter,
    placement_refusals: Family<Label, Counter>,
    exchanges: Family<Label, Counter>,
}

impl DaemonMetrics {
    pub(crate) fn new(store: &StoreMetrics, traces: &Traces) -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            request_seconds: Histograms::new_with_constructor(|| Histogram::new(REQUEST_BUCKETS)),
            pass_seconds: Histograms::new_with_constructor(|| Histogram::new(PASS_BUCKETS)),
            pass_failures: Family::default(),
            pass_success: Family::default(),
            operations: Family::default(),
            operation_seconds: Histograms::new_with_constructor(|| Histogram::new(OPERATION_BUCKETS)),
            placements: Counter::default(),
            placement_refusals: Family::default(),
            exchanges: Family::default(),
        };
        let version = Family::<Label, Gauge>::default();
        version.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        let registry = &mut metrics.registry;
        registry.register("daemon_info", "The version of this daemon", version);
        registry.register("api_requests", "Requests by method, route and status", metrics.requests.clone());
        registry.register(
            "api_request_duration_seconds",
            "Time until the response began, by method and route",
            metrics.request_seconds.clone(),
        );
        registry.register(
            "database_statement_duration_seconds",
            "Duration of statements",
            store.statements.clone(),
        );
        registry.register(
            "database_transaction_duration_seconds",
            "Duration of transactions",
            store.transactions.clone(),
        );
        registry.register("database_errors", "Failed statements and commits by kind", store.errors.clone());
        registry.register(
            "reconcile_pass_duration_seconds",
            "Duration of passes by periodic task",
            metrics.pass_seconds.clone(),
        );
        registry.register("reconcile_failures", "Failed passes by task", metrics.pass_failures.clone());
        registry.register(
            "reconcile_last_success_timestamp_seconds",
            "Unix time of the last pass that succeeded, by periodic task",
            metrics.pass_success.clone(),
        );
        registry.register(
            "operations_finished",
            "Operations that this daemon finished, by operation and state",
            metrics.operations.clone(),
        );
        registry.register(
            "operation_duration_seconds",
            "Time from the request to the end of operations, by operation",
            metrics.operation_seconds.clone(),
        );
        registry.register("placements", "Instances that were placed", metrics.placements.clone());
        registry.register(
            "placement_refusals",
            "Instances that were not placed, by the stage that dropped the last node",
            metrics.placement_refusals.clone(),
        );
        registry.register(
            "federation_exchanges",
            "Exchanges of identity tokens by outcome: minted or refused",
            metrics.exchanges.clone(),
        );
        registry.register(
            "traces_spans_exported",
            "Spans that the collector of traces accepted",
            traces.counts.exported.clone(),
        );
        registry.register(
            "traces_spans_dropped",
            "Spans that the collector of traces did not receive",
            traces.counts.dropped.clone(),
        );
        // Without them, the first failure would not be an increase.
        for stage in SchedulingStage::ALL {
            metrics.placement_refusals.get_or_create(&[("stage", stage.as_str())]).inc_by(0);
        }
        for outcome in ["minted", "refused"] {
            metrics.exchanges.get_or_create(&[("outcome", outcome)]).inc_by(0);
        }
        for kind in [
            "conflict",
            "disk_full",
            "internal",
            "outcome_unknown",
            "read_only",
            "stale_epoch",
            "unavailable",
        ] {
            store.errors.get_or_create(&[("kind", kind)]).inc_by(0);
        }
        metrics
    }

    /// Records a response. `route` is the template of its path, so that there are not more metrics than routes.
    pub fn responded(&self, method: &str, route: &str, status: u16, started: Instant) {
        let (method, route) = (("method", method.to_owned()), ("route", route.to_owned()));
        let status = ("status", status.to_string());
        self.request_seconds
            .get_or_create(&[method.clone(), route.clone()])
            .observe(started.elapsed().as_secs_f64());
        self.requests.get_or_create(&[method, route, status]).inc();
    }

    /// Records a pass of a periodic task.
    pub(crate) fn passed(&self, task: &'static str, started: Instant, is_success: bool) {
        let label = [("task", task)];
        self.pass_seconds.get_or_create(&label).observe(started.elapsed().as_secs_f64());
        if is_success {
            self.pass_success.get_or_create(&label).set(now());
            self.pass_failures.get_or_create(&label).inc_by(0);
        } else {
            self.pass_failures.get_or_create(&label).inc();
        }
    }

    /// Records the new state of an operation that was requested `seconds` ago.
    pub(crate) fn operation_ended(&self, operation: &str, state: OperationState, seconds: f64) {
        if !state.is_final() {
            return;
        }
        let labels = [("operation", operation.to_owned())];
        self.operation_seconds.get_or_create(&labels).observe(seconds);
        let [operation] = labels;
        self.operations.get_or_create(&[operation, ("state", state.to_string())]).inc();
    }

    /// Records that an instance was placed, or the stage that dropped the last node.
    pub(crate) fn placed(&self, refused_at: Option<SchedulingStage>) {
        match refused_at {
            None => {
                self.placements.inc();
            }
            Some(stage) => {
                self.placement_refusals.get_or_create(&[("stage", stage.as_str())]).inc();
            }
        }
    }

    /// Records an exchange of an identity token.
    pub(crate) fn exchanged(&self, is_minted: bool) {
        let outcome = if is_minted { "minted" } else { "refused" };
        self.exchanges.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Returns all metrics as text.
    #[must_use]
    pub fn text(&self, format: ExpositionFormat) -> String {
        encode(&self.registry, format)
    }
}

#[cfg(test)]
mod tests {
    use muster_types::settings::Settings;

    use super::*;

    #[test]
    fn metrics_have_the_labels_of_what_happened() {
        let metrics = DaemonMetrics::new(&StoreMetrics::default(), &Traces::new(&Settings::defaults(), "n1"));
        let started = Instant::now();
        metrics.responded("GET", "/instances/{instance_ref}", 200, started);
        metrics.passed("vms", started, true);
        metrics.passed("vms", started, false);
        metrics.operation_ended("create_instance", OperationState::Queued, 1.0);
        metrics.operation_ended("create_instance", OperationState::Error, 7.0);
        metrics.placed(None);
        metrics.placed(Some(SchedulingStage::SufficientIdleCpu));
        metrics.exchanged(false);
        let text = metrics.text(ExpositionFormat::Prometheus);
        for line in [
            "api_requests_total{method=\"GET\",route=\"/instances/{instance_ref}\",status=\"200\"} 1",
            "api_request_duration_seconds_count{method=\"GET\",route=\"/instances/{instance_ref}\"} 1",
            "reconcile_pass_duration_seconds_count{task=\"vms\"} 2",
            "reconcile_failures_total{task=\"vms\"} 1",
            "operations_finished_total{operation=\"create_instance\",state=\"error\"} 1",
            "operation_duration_seconds_sum{operation=\"create_instance\"} 7.0",
            "placements_total 1",
            "placement_refusals_total{stage=\"sufficient_idle_cpu\"} 1",
            "placement_refusals_total{stage=\"sufficient_idle_memory\"} 0",
            "federation_exchanges_total{outcome=\"refused\"} 1",
            "database_errors_total{kind=\"unavailable\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in {text}");
        }
        assert!(text.contains("\nreconcile_last_success_timestamp_seconds{task=\"vms\"} "), "{text}");
    }
}
