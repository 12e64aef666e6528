//! Traces cost nothing unless they are enabled.

use std::pin::pin;
use std::task::{Context, Waker};

use muster_control::traces::{self, TRACEPARENT, Traces};
use muster_types::settings::Settings;

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Does what each request does for its trace, with a future that is immediately ready.
fn handle_request(traces: &Traces) {
    let span = traces.begin_request(Some(CALLER));
    let mut response = pin!(traces::within(span.as_ref().map(traces::Span::context), async {
        std::hint::black_box(traces::current());
    }));
    assert!(response.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    if let Some(mut span) = span {
        span.set_text(TRACEPARENT, CALLER);
        traces.end(span);
    }
}

#[tokio::test]
async fn disabled_traces_allocate_nothing() {
    let disabled = Traces::new(&Settings::defaults(), "n1");
    let count = |traces: &Traces| allocation_counter::measure(|| handle_request(traces)).count_total;
    assert_eq!(count(&disabled), 0);
    // Nothing listens there.
    let settings =
        Settings::from_pairs(&[("TRACES_ENDPOINT", "http://127.0.0.1:1")]).expect("valid settings");
    assert!(count(&Traces::new(&settings, "n1")) > 0, "the measurement counts");
}
