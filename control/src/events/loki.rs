//! Sends events to a Loki server, after they are in the database.
//!
//! The database is the event log; Loki receives a copy. Events wait in a bounded queue in memory while the server is
//! unavailable. When the queue is full, or when the daemon ends first, they are dropped and counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use muster_types::event::Event;
use muster_types::settings::Settings;
use prometheus_client::metrics::counter::Counter;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::metrics::Metrics;

/// The maximum number of events that wait to be sent.
const MAX_QUEUED: usize = 10_000;
/// The maximum number of events in one request.
const MAX_BATCH: usize = 500;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// How long queued events may take to be sent when the daemon ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);
/// The header that names the tenant.
const TENANT: HeaderName = HeaderName::from_static("x-scope-orgid");

/// A Loki server, and the headers that it requires.
#[derive(Debug, Clone)]
pub(super) struct Loki {
    client: Client,
    url: String,
}

impl Loki {
    /// Creates the client, or returns `None` if the settings name no server.
    pub(super) fn new(settings: &Settings) -> std::io::Result<Option<Self>> {
        if settings.loki_base_url.is_empty() || !settings.log_events_to_loki {
            return Ok(None);
        }
        let mut headers = HeaderMap::new();
        let header = |name: &str, value: &str| {
            HeaderValue::from_str(value).map_err(|_| std::io::Error::other(format!("{name} is not a header")))
        };
        if !settings.loki_tenant.is_empty() {
            headers.insert(TENANT, header("LOKI_TENANT", &settings.loki_tenant)?);
        }
        if !settings.loki_auth_header.expose().is_empty() {
            let mut value = header("LOKI_AUTH_HEADER", settings.loki_auth_header.expose())?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let client = Client::builder()
            .timeout(REQUEST_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .default_headers(headers)
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(std::io::Error::other)?;
        let url = format!("{}/loki/api/v1/push", settings.loki_base_url.trim_end_matches('/'));
        Ok(Some(Self { client, url }))
    }

    /// Starts to send events.
    pub(super) fn start(self, metrics: &Metrics) -> LokiQueue {
        let (queue, events) = mpsc::channel(MAX_QUEUED);
        let counts = QueueCounts {
            pending: Arc::default(),
            sent: metrics.loki_sent.clone(),
            dropped: metrics.loki_dropped.clone(),
        };
        let task = tokio::spawn(self.run(events, counts.clone()));
        LokiQueue { queue, counts, task }
    }

    async fn run(self, mut events: mpsc::Receiver<Event>, counts: QueueCounts) {
        let mut batch = Vec::with_capacity(MAX_BATCH);
        while events.recv_many(&mut batch, MAX_BATCH).await > 0 {
            let count = batch.len() as u64;
            let outcome = if self.push(&batch).await { &counts.sent } else { &counts.dropped };
            outcome.inc_by(count);
            counts.pending.fetch_sub(count, Ordering::Relaxed);
            batch.clear();
        }
    }

    /// Sends a batch, and retries while the server is unavailable. Returns whether the server accepted it.
    async fn push(&self, batch: &[Event]) -> bool {
        let body = streams(batch);
        let mut delay = MIN_RETRY_DELAY;
        loop {
            let reason = match self.client.post(&self.url).json(&body).send().await {
                Ok(response) if response.status().is_success() => return true,
                Ok(response) => {
                    let status = response.status();
                    if status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS {
                        tracing::error!(%status, events = batch.len(), "Loki rejected events");
                        return false;
                    }
                    format!("server responded with {status}")
                }
                // The URL may contain a password.
                Err(error) => error.without_url().to_string(),
            };
            tracing::warn!(reason, "failed to send events to Loki");
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_RETRY_DELAY);
        }
    }
}

/// The number of queued, sent and dropped events.
#[derive(Debug, Clone)]
struct QueueCounts {
    /// Queued, and neither sent nor dropped yet.
    pending: Arc<AtomicU64>,
    sent: Counter,
    dropped: Counter,
}

/// The queue of events for a Loki server.
#[derive(Debug)]
pub(super) struct LokiQueue {
    queue: mpsc::Sender<Event>,
    counts: QueueCounts,
    task: JoinHandle<()>,
}

impl LokiQueue {
    /// Queues events. Drops and counts those that exceed the capacity of the queue.
    pub(super) fn send(&self, events: Vec<Event>) {
        for event in events {
            self.counts.pending.fetch_add(1, Ordering::Relaxed);
            if self.queue.try_send(event).is_err() {
                self.counts.pending.fetch_sub(1, Ordering::Relaxed);
                self.counts.dropped.inc();
            }
        }
    }

    /// Waits until the queued events are sent, within limits. Drops and counts the others.
    pub(super) async fn close(self) {
        self.close_within(SHUTDOWN_GRACE).await;
    }

    async fn close_within(self, grace: Duration) {
        let Self { queue, counts, mut task } = self;
        drop(queue);
        if tokio::time::timeout(grace, &mut task).await.is_err() {
            task.abort();
            // The task no longer changes the counts once it has ended.
            let _ = task.await;
            let events = counts.pending.swap(0, Ordering::Relaxed);
            counts.dropped.inc_by(events);
            tracing::warn!(events, "dropped events that Loki has not received");
        }
    }
}

/// Returns the body of a request: a stream for each node and type of event, with the events as JSON lines.
fn streams(batch: &[Event]) -> Value {
    let mut streams: BTreeMap<(&str, &str), Vec<[String; 2]>> = BTreeMap::new();
    for event in batch {
        let line = json!(event).to_string();
        let labels = (event.node.as_str(), event.event_type.as_str());
        streams.entry(labels).or_default().push([nanoseconds(event.timestamp), line]);
    }
    let streams: Vec<Value> = streams
        .into_iter()
        .map(|((node, event_type), values)| {
            json!({"stream": {"job": "muster", "node": node, "event_type": event_type}, "values": values})
        })
        .collect();
    json!({"streams": streams})
}

/// Returns a Unix time in nanoseconds.
fn nanoseconds(time: f64) -> String {
    Duration::try_from_secs_f64(time).unwrap_or_default().as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use muster_types::event::EventType;
    use muster_types::object::ObjectRef;

    use super::*;

    #[test]
    fn groups_events_by_node_and_type() {
        let event = |event_type, node: &str| {
            let mut event = Event::new(event_type, ObjectRef::namespace("ci"), "hello");
            (event.node, event.timestamp) = (node.into(), 1.5);
            event
        };
        let batch =
            [event(EventType::Audit, "a"), event(EventType::Usage, "a"), event(EventType::Audit, "a")];
        let body = streams(&batch);
        assert_eq!(body["streams"].as_array().unwrap().len(), 2);
        let first = &body["streams"][0];
        assert_eq!(first["stream"], json!({"job": "muster", "node": "a", "event_type": "audit"}));
        assert_eq!(first["values"].as_array().unwrap().len(), 2);
        assert_eq!(first["values"][0][0], "1500000000");
        let line: Value = serde_json::from_str(first["values"][0][1].as_str().unwrap()).unwrap();
        assert_eq!(line["message"], "hello");
    }

    #[tokio::test]
    async fn counts_events_that_are_dropped_at_shutdown() {
        // Nothing listens there.
        let settings = Settings::from_pairs(&[("LOKI_BASE_URL", "http://127.0.0.1:1")]).unwrap();
        let metrics = Metrics::new();
        let queue = Loki::new(&settings).unwrap().unwrap().start(&metrics);
        let event = || Event::audit(ObjectRef::namespace("ci"), "hello");
        queue.send((0..MAX_BATCH + 7).map(|_| event()).collect());
        queue.close_within(Duration::ZERO).await;
        assert_eq!((metrics.loki_sent.get(), metrics.loki_dropped.get()), (0, MAX_BATCH as u64 + 7));
    }

    #[test]
    fn sends_nothing_without_a_server_or_if_disabled() {
        let enabled =
            |pairs: &[(&str, &str)]| Loki::new(&Settings::from_pairs(pairs).unwrap()).unwrap().is_some();
        assert!(!enabled(&[]));
        assert!(!enabled(&[("LOKI_BASE_URL", "http://loki:3100"), ("LOG_EVENTS_TO_LOKI", "false")]));
        assert!(enabled(&[("LOKI_BASE_URL", "http://loki:3100")]));
    }
}
