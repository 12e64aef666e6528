//! Spans, and how a trace is named in headers.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use uuid::Uuid;

/// The maximum length of a text in a span, in bytes.
const MAX_TEXT_LENGTH: usize = 1024;
/// The flag of a traceparent whose trace is sampled.
const SAMPLED: u8 = 1;

/// A span, as other daemons and operations refer to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    pub(super) trace: u128,
    pub(super) span: u64,
    /// Whether the spans of the trace are exported.
    pub(super) is_sampled: bool,
}

impl TraceContext {
    /// Returns whether the spans of the trace are exported.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.is_sampled
    }

    /// Parses the value of the header `traceparent`. Later versions may append fields.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let is_hex = |field: &str, length: usize| {
            field.len() == length && field.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let mut fields = text.trim().split('-');
        let (version, trace) = (fields.next()?, fields.next()?);
        let (span, flags) = (fields.next()?, fields.next()?);
        let is_valid = is_hex(version, 2) && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
        if !is_valid || version == "ff" || (version == "00" && fields.next().is_some()) {
            return None;
        }
        let context = Self {
            trace: u128::from_str_radix(trace, 16).ok()?,
            span: u64::from_str_radix(span, 16).ok()?,
            is_sampled: u8::from_str_radix(flags, 16).ok()? & SAMPLED != 0,
        };
        (context.trace != 0 && context.span != 0).then_some(context)
    }

    /// Returns the value of the header `traceparent`.
    #[must_use]
    pub(crate) fn traceparent(&self) -> String {
        format!("00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.is_sampled))
    }

    /// Returns the first span of a new trace.
    pub(super) fn new_root() -> Self {
        Self { trace: Uuid::new_v4().as_u128(), span: new_span_id(), is_sampled: true }
    }

    /// Returns a new span of the same trace.
    pub(super) fn child(&self) -> Self {
        Self { span: new_span_id(), ..*self }
    }
}

/// Returns a random id. It is not zero, because the first half of a UUID contains its version.
fn new_span_id() -> u64 {
    Uuid::new_v4().as_u64_pair().0
}

/// Where the work of a span is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// In this daemon.
    Internal = 1,
    /// In this daemon, for a client that waits.
    Server = 2,
    /// In another daemon, while this one waits.
    Client = 3,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AttributeValue {
    Text(String),
    Number(i64),
}

/// Work that is being traced. It is exported when it ends with [`super::Traces::end`].
#[derive(Debug)]
pub struct Span {
    context: TraceContext,
    /// The id of the span that this one is a part of; 0 without one.
    pub(super) parent: u64,
    kind: SpanKind,
    name: Cow<'static, str>,
    begun: SystemTime,
    clock: Instant,
    attributes: Vec<(&'static str, AttributeValue)>,
    error: Option<String>,
}

impl Span {
    pub(super) fn new(
        context: TraceContext,
        parent: u64,
        kind: SpanKind,
        name: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            context,
            parent,
            kind,
            name: name.into(),
            begun: SystemTime::now(),
            clock: Instant::now(),
            attributes: Vec::new(),
            error: None,
        }
    }

    /// Returns how other daemons and operations refer to the span.
    #[must_use]
    pub fn context(&self) -> TraceContext {
        self.context
    }

    /// Changes the name.
    pub fn rename(&mut self, name: String) {
        self.name = name.into();
    }

    /// Adds an attribute with a text.
    pub fn set_text(&mut self, key: &'static str, text: &str) {
        if self.context.is_sampled {
            self.attributes.push((key, AttributeValue::Text(shortened(text))));
        }
    }

    /// Adds an attribute with a number.
    pub fn set_number(&mut self, key: &'static str, number: i64) {
        if self.context.is_sampled {
            self.attributes.push((key, AttributeValue::Number(number)));
        }
    }

    /// Marks the work as failed.
    pub fn fail(&mut self, reason: &str) {
        if self.context.is_sampled {
            self.error = Some(shortened(reason));
        }
    }

    pub(super) fn finish(self) -> FinishedSpan {
        let begun = self.begun.duration_since(UNIX_EPOCH).unwrap_or_default();
        let ended = begun + self.clock.elapsed();
        self.finish_at(begun, ended)
    }

    /// Ends a span that began at a Unix time, maybe in another process.
    pub(super) fn finish_since(self, begun: f64, ended: f64) -> FinishedSpan {
        let duration = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.finish_at(duration(begun), duration(ended.max(begun)))
    }

    fn finish_at(self, begun: Duration, ended: Duration) -> FinishedSpan {
        let Self { context, parent, kind, name, attributes, error, .. } = self;
        FinishedSpan { context, parent, kind, name, begun, ended, attributes, error }
    }
}

/// A span that waits to be exported.
#[derive(Debug)]
pub(super) struct FinishedSpan {
    pub(super) context: TraceContext,
    pub(super) parent: u64,
    pub(super) kind: SpanKind,
    pub(super) name: Cow<'static, str>,
    /// The Unix times of the beginning and the end.
    pub(super) begun: Duration,
    pub(super) ended: Duration,
    pub(super) attributes: Vec<(&'static str, AttributeValue)>,
    pub(super) error: Option<String>,
}

/// Returns the first part of a text, because the memory of waiting spans is limited.
fn shortened(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT_LENGTH);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_valid_headers_only() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = TraceContext::parse(text).unwrap();
        assert_eq!(context.traceparent(), text);
        assert!(
            TraceContext::parse("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03-more").is_some()
        );
        for invalid in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-ü-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceContext::parse(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn limits_texts() {
        let mut span = Span::new(TraceContext::new_root(), 0, SpanKind::Internal, "x");
        span.set_text("key", &"ü".repeat(MAX_TEXT_LENGTH));
        span.fail(&"x".repeat(MAX_TEXT_LENGTH + 1));
        let finished = span.finish();
        assert_eq!(finished.attributes, [("key", AttributeValue::Text("ü".repeat(MAX_TEXT_LENGTH / 2)))]);
        assert_eq!(finished.error.unwrap().len(), MAX_TEXT_LENGTH);
        assert!(finished.ended >= finished.begun);
    }
}
