//! The body of a request to a collector: OTLP over HTTP, encoded as JSON.

use serde_json::{Value, json};

use super::span::{AttributeValue, FinishedSpan};

/// The status code of a span that failed.
const STATUS_ERROR: u8 = 2;

/// Returns the body of a request with spans of the daemon whose first node is `node`.
pub(super) fn body(node: &str, spans: &[FinishedSpan]) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    let resource = [("service.name", "muster"), ("service.version", version), ("service.instance.id", node)];
    let resource: Vec<Value> =
        resource.into_iter().map(|(key, text)| attribute(key, &AttributeValue::Text(text.into()))).collect();
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{
            "scope": { "name": "muster", "version": version },
            "spans": spans.iter().map(span).collect::<Vec<_>>(),
        }],
    }] })
}

fn span(span: &FinishedSpan) -> Value {
    let attributes: Vec<Value> = span.attributes.iter().map(|(key, value)| attribute(key, value)).collect();
    let mut encoded = json!({
        "traceId": format!("{:032x}", span.context.trace),
        "spanId": format!("{:016x}", span.context.span),
        "name": span.name,
        "kind": span.kind as u8,
        "startTimeUnixNano": span.begun.as_nanos().to_string(),
        "endTimeUnixNano": span.ended.as_nanos().to_string(),
        "attributes": attributes,
    });
    if span.parent != 0 {
        encoded["parentSpanId"] = format!("{:016x}", span.parent).into();
    }
    if let Some(error) = &span.error {
        encoded["status"] = json!({ "code": STATUS_ERROR, "message": error });
    }
    encoded
}

fn attribute(key: &str, value: &AttributeValue) -> Value {
    let value = match value {
        AttributeValue::Text(text) => json!({ "stringValue": text }),
        // 64-bit integers are strings in the JSON encoding of Protocol Buffers.
        AttributeValue::Number(number) => json!({ "intValue": number.to_string() }),
    };
    json!({ "key": key, "value": value })
}

#[cfg(test)]
mod tests {
    use super::super::span::{Span, SpanKind, TraceContext};
    use super::*;

    #[test]
    fn encodes_spans() {
        let context = TraceContext::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
        let mut failed = Span::new(context, 0x1f, SpanKind::Client, "call");
        failed.set_text("muster.node", "n2");
        failed.set_number("http.response.status_code", 503);
        failed.fail("it did not respond");
        let body = body("n1", &[failed.finish_since(1.5, 2.0)]);
        let resource = &body["resourceSpans"][0]["resource"]["attributes"];
        assert_eq!(resource[0], json!({ "key": "service.name", "value": { "stringValue": "muster" } }));
        assert_eq!(resource[2]["value"]["stringValue"], "n1");
        let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(
            *span,
            json!({
                "traceId": "0af7651916cd43dd8448eb211c80319c",
                "spanId": "b7ad6b7169203331",
                "parentSpanId": "000000000000001f",
                "name": "call",
                "kind": 3,
                "startTimeUnixNano": "1500000000",
                "endTimeUnixNano": "2000000000",
                "attributes": [
                    { "key": "muster.node", "value": { "stringValue": "n2" } },
                    { "key": "http.response.status_code", "value": { "intValue": "503" } },
                ],
                "status": { "code": 2, "message": "it did not respond" },
            })
        );
    }
}
