//! Sends finished spans to a collector. They wait in a bounded queue; while the collector is unavailable and the queue is
//! full, further spans are dropped and counted.

use std::time::Duration;

use muster_types::settings::Settings;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Client, StatusCode};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::otlp;
use super::span::FinishedSpan;

/// The maximum number of spans that wait to be sent.
const MAX_QUEUED: usize = 4096;
/// The maximum number of spans in one request.
const MAX_BATCH: usize = 512;
/// How long spans wait for others, to be sent together.
const BATCH_DELAY: Duration = Duration::from_secs(1);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
/// How long the remaining spans may take to be sent when the daemon ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// The number of spans that were exported and dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpanCounts {
    pub(crate) exported: Counter,
    pub(crate) dropped: Counter,
}

/// The queue of spans for a collector.
#[derive(Debug)]
pub(super) struct Exporter {
    queue: mpsc::Sender<FinishedSpan>,
    counts: SpanCounts,
    stop: watch::Sender<bool>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Exporter {
    /// Starts to send spans, or returns `None` if the settings name no collector.
    pub(super) fn start(
        settings: &Settings,
        node: &str,
        counts: &SpanCounts,
    ) -> Result<Option<Self>, String> {
        if settings.traces_endpoint.is_empty() {
            return Ok(None);
        }
        let mut headers = HeaderMap::new();
        if !settings.traces_auth_header.expose().is_empty() {
            let mut value = HeaderValue::from_str(settings.traces_auth_header.expose())
                .map_err(|_| "TRACES_AUTH_HEADER is not a header")?;
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
            .map_err(|error| error.to_string())?;
        let url = format!("{}/v1/traces", settings.traces_endpoint.trim_end_matches('/'));
        let (queue, spans) = mpsc::channel(MAX_QUEUED);
        let (stop, stopped) = watch::channel(false);
        let counts = counts.clone();
        let sender = Sender { client, url, node: node.to_owned(), counts: counts.clone(), is_failing: false };
        let task = Mutex::new(Some(tokio::spawn(sender.run(spans, stopped))));
        Ok(Some(Self { queue, counts, stop, task }))
    }

    /// Queues a span. Never waits: without space the span is dropped and counted.
    pub(super) fn send(&self, span: FinishedSpan) {
        if self.queue.try_send(span).is_err() {
            self.counts.dropped.inc();
        }
    }

    /// Waits until the queued spans are sent, within limits.
    pub(super) async fn close(&self) {
        self.stop.send_replace(true);
        let task = self.task.lock().take();
        if let Some(mut task) = task
            && tokio::time::timeout(SHUTDOWN_GRACE, &mut task).await.is_err()
        {
            task.abort();
            tracing::warn!("dropped traces that the collector has not received");
        }
    }
}

/// The task that sends spans.
struct Sender {
    client: Client,
    url: String,
    node: String,
    counts: SpanCounts,
    /// Whether the last request failed. Only changes are logged.
    is_failing: bool,
}

impl Sender {
    async fn run(mut self, mut spans: mpsc::Receiver<FinishedSpan>, mut stop: watch::Receiver<bool>) {
        let mut batch = Vec::new();
        loop {
            let received = tokio::select! {
                received = spans.recv_many(&mut batch, MAX_BATCH) => received,
                () = stopped(&mut stop), if !spans.is_closed() => {
                    spans.close();
                    continue;
                }
            };
            if received == 0 {
                return;
            }
            if batch.len() < MAX_BATCH && !spans.is_closed() {
                let _ = tokio::time::timeout(BATCH_DELAY, stopped(&mut stop)).await;
                while batch.len() < MAX_BATCH
                    && let Ok(span) = spans.try_recv()
                {
                    batch.push(span);
                }
            }
            let count = batch.len() as u64;
            let is_accepted = self.post(&batch, &mut stop).await;
            let counter = if is_accepted { &self.counts.exported } else { &self.counts.dropped };
            counter.inc_by(count);
            batch.clear();
        }
    }

    /// Sends a batch, and retries while the collector is unavailable and the daemon runs. Returns whether the collector
    /// accepted it.
    async fn post(&mut self, batch: &[FinishedSpan], stop: &mut watch::Receiver<bool>) -> bool {
        let body = otlp::body(&self.node, batch);
        let mut delay = MIN_RETRY_DELAY;
        loop {
            let (reason, is_temporary) = match self.client.post(&self.url).json(&body).send().await {
                Ok(response) if response.status().is_success() => {
                    if std::mem::replace(&mut self.is_failing, false) {
                        tracing::info!("the collector accepts traces again");
                    }
                    return true;
                }
                Ok(response) => {
                    let status = response.status();
                    let is_rejected = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
                    (format!("collector responded with {status}"), !is_rejected)
                }
                // The URL may contain a password.
                Err(error) => (error.without_url().to_string(), true),
            };
            if !std::mem::replace(&mut self.is_failing, true) {
                tracing::warn!(reason, "failed to export traces");
            }
            if !is_temporary || tokio::time::timeout(delay, stopped(stop)).await.is_ok() {
                return false;
            }
            delay = (delay * 2).min(MAX_RETRY_DELAY);
        }
    }
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The sender is dropped with the daemon.
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use super::super::{SpanKind, Traces};
    use super::*;

    #[tokio::test]
    async fn drops_and_counts_spans_that_nothing_receives() {
        // Nothing listens there.
        let settings = Settings::from_pairs(&[("TRACES_ENDPOINT", "http://127.0.0.1:1")]).unwrap();
        let traces = Traces::new(&settings, "n1");
        // The task does not run in between, because the runtime has one thread.
        for _ in 0..MAX_QUEUED + 7 {
            traces.end(traces.begin_request(None).unwrap());
        }
        assert_eq!((traces.counts.exported.get(), traces.counts.dropped.get()), (0, 7));
        traces.close().await;
        let dropped = traces.counts.dropped.get();
        assert_eq!(dropped, MAX_QUEUED as u64 + 7);
        // After the end, spans are counted too.
        let current = super::super::TraceContext::new_root();
        let span =
            super::super::within(Some(current), async { traces.begin_child(SpanKind::Internal, "x") }).await;
        traces.end(span.unwrap());
        assert_eq!(traces.counts.dropped.get(), dropped + 1);
    }
}
