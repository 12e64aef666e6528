//! Traces in the format of OpenTelemetry: a request, the operations that it queued with their attempts and steps, and the
//! calls to other daemons.
//!
//! Without `TRACES_ENDPOINT`, nothing is allocated and no clock is read. See docs/decisions/0100.

mod exporter;
mod otlp;
mod span;

use muster_types::settings::Settings;
use muster_types::time::now;
use tokio::task::futures::TaskLocalFuture;

use exporter::{Exporter, SpanCounts};
use span::FinishedSpan;
pub use span::{Span, SpanKind, TraceContext};

/// The header that carries the trace of a request. See <https://www.w3.org/TR/trace-context/>.
pub const TRACEPARENT: &str = "traceparent";
/// The bits of a trace id that are random in every implementation, and decide whether the trace is sampled.
const SAMPLED_BITS: u32 = 56;

tokio::task_local! {
    static CURRENT: Option<TraceContext>;
}

/// Returns the span that the current task works for.
#[must_use]
pub fn current() -> Option<TraceContext> {
    CURRENT.try_with(|context| *context).ok().flatten()
}

/// Runs a future that works for a span.
pub fn within<F: Future>(
    context: Option<TraceContext>,
    future: F,
) -> TaskLocalFuture<Option<TraceContext>, F> {
    CURRENT.scope(context, future)
}

/// Returns the text that ties a new operation to the current span, for [`Traces::begin_attempt`] and
/// [`Traces::end_operation`] of the daemons that run it.
pub(crate) fn of_new_operation() -> Option<String> {
    let parent = current().filter(|context| context.is_sampled)?;
    Some(format!("{:016x}{}", parent.span, parent.child().traceparent()))
}

/// Returns the span of an operation and its parent.
fn operation_context(text: &str) -> Option<(TraceContext, u64)> {
    let (parent, traceparent) = text.split_at_checked(16)?;
    Some((TraceContext::parse(traceparent)?, u64::from_str_radix(parent, 16).ok()?))
}

/// Creates spans and exports them, if the settings name a collector.
#[derive(Debug)]
pub struct Traces {
    exporter: Option<Exporter>,
    /// The part of traces that is sampled, of those that begin here.
    ratio: f64,
    pub(crate) counts: SpanCounts,
}

impl Traces {
    /// Creates the traces of the daemon whose first node has the name `node`, and starts to export spans if the settings
    /// name a collector.
    #[must_use]
    pub fn new(settings: &Settings, node: &str) -> Self {
        let counts = SpanCounts::default();
        let exporter = Exporter::start(settings, node, &counts).unwrap_or_else(|error| {
            tracing::error!(error, "failed to start the export of traces");
            None
        });
        Self { exporter, ratio: settings.traces_sample_ratio, counts }
    }

    /// Begins the span of a request with the given header. A caller decides whether its own trace is sampled.
    #[must_use]
    pub fn begin_request(&self, traceparent: Option<&str>) -> Option<Span> {
        self.exporter.as_ref()?;
        let span = match traceparent.and_then(TraceContext::parse) {
            Some(caller) => Span::new(caller.child(), caller.span, SpanKind::Server, "request"),
            None => {
                let mut context = TraceContext::new_root();
                context.is_sampled = self.samples(context.trace);
                Span::new(context, 0, SpanKind::Server, "request")
            }
        };
        Some(span)
    }

    /// Begins a part of the current span.
    #[must_use]
    pub(crate) fn begin_child(&self, kind: SpanKind, name: &'static str) -> Option<Span> {
        self.exporter.as_ref()?;
        let parent = current()?;
        Some(Span::new(parent.child(), parent.span, kind, name))
    }

    /// Begins an attempt of an operation that was queued with the text `trace`.
    pub(crate) fn begin_attempt(&self, trace: Option<&str>) -> Option<Span> {
        self.exporter.as_ref()?;
        let (operation, _) = operation_context(trace?)?;
        Some(Span::new(operation.child(), operation.span, SpanKind::Internal, "attempt"))
    }

    /// Exports the span of an operation that was queued with the text `trace` at the Unix time `created`, and has ended. Calls
    /// `describe` to add its attributes if the operation is traced.
    pub(crate) fn end_operation(
        &self,
        trace: Option<&str>,
        name: &str,
        created: f64,
        describe: impl FnOnce(&mut Span),
    ) {
        let operation = self.exporter.as_ref().and_then(|_| operation_context(trace?));
        if let Some((context, parent)) = operation {
            let mut span = Span::new(context, parent, SpanKind::Internal, name.to_owned());
            describe(&mut span);
            self.export(span.finish_since(created, now()));
        }
    }

    /// Ends a span, and exports it if its trace is sampled.
    pub fn end(&self, span: Span) {
        if span.context().is_sampled {
            self.export(span.finish());
        }
    }

    fn export(&self, span: FinishedSpan) {
        if let Some(exporter) = &self.exporter {
            exporter.send(span);
        }
    }

    /// Exports the remaining spans, within limits. Later ones are dropped.
    pub async fn close(&self) {
        if let Some(exporter) = &self.exporter {
            exporter.close().await;
        }
    }

    /// Returns whether a trace that begins here is sampled. Depends only on its id.
    #[expect(clippy::cast_precision_loss, reason = "the ratio is approximate")]
    fn samples(&self, trace: u128) -> bool {
        let bits = trace & ((1 << SAMPLED_BITS) - 1);
        (bits as f64) < self.ratio * (1u64 << SAMPLED_BITS) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces(ratio: &str) -> Traces {
        // Nothing listens there.
        let settings = [("TRACES_ENDPOINT", "http://127.0.0.1:1"), ("TRACES_SAMPLE_RATIO", ratio)];
        Traces::new(&Settings::from_pairs(&settings).unwrap(), "n1")
    }

    #[tokio::test]
    async fn samples_the_configured_part_of_new_traces() {
        for (ratio, expected) in [("0", 0..=0), ("0.25", 180..=320), ("1", 1000..=1000)] {
            let traces = traces(ratio);
            let spans = (0..1000).map(|_| traces.begin_request(None).unwrap());
            let sampled = spans.filter(|span| span.context().is_sampled).count();
            assert!(expected.contains(&sampled), "{ratio}: {sampled}");
        }
    }

    #[tokio::test]
    async fn continues_the_trace_of_the_caller() {
        let traces = traces("0");
        let caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let span = traces.begin_request(Some(caller)).unwrap();
        assert!(span.context().is_sampled);
        let parent =
            within(Some(span.context()), async { traces.begin_child(SpanKind::Client, "call") }).await;
        let text = parent.unwrap().context().traceparent();
        assert!(text.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && text.ends_with("-01"), "{text}");
        let unsampled = caller.replace("-01", "-00");
        assert!(!traces.begin_request(Some(&unsampled)).unwrap().context().is_sampled);
        // An invalid header begins a new trace.
        let other = traces.begin_request(Some("00-0af7-b7-01")).unwrap();
        assert_ne!(other.context().trace, span.context().trace);
    }

    #[tokio::test]
    async fn operations_belong_to_the_span_that_queued_them() {
        let traces = traces("1");
        let request = traces.begin_request(None).unwrap();
        let queued = within(Some(request.context()), async { of_new_operation() }).await;
        let (operation, parent) = operation_context(queued.as_deref().unwrap()).unwrap();
        assert_eq!((operation.trace, parent), (request.context().trace, request.context().span));
        let attempt = traces.begin_attempt(queued.as_deref()).unwrap();
        assert_eq!(attempt.parent, operation.span);
        assert_eq!(of_new_operation(), None);
        for invalid in [None, Some(""), Some("text of a later version with more than sixteen characters")] {
            assert!(traces.begin_attempt(invalid).is_none(), "{invalid:?}");
        }
    }
}
