//! Reports connections to the serial ports of VMs. A client that connects again and again is sampled, so that it cannot
//! flood the events of an instance.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_core::Stream;
use muster_types::ids::InstanceId;
use muster_types::vm::{ConsoleConnection, ConsoleConnectionStream};
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// The number of reports that wait for the subscriber.
const QUEUE_LEN: usize = 256;

/// The number of connections to one VM that are reported at once.
const BURST: u32 = 10;

/// The interval after which another connection to the same VM is reported.
const REFILL_INTERVAL: Duration = Duration::from_secs(60);

/// Reports connections to at most one subscriber.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConsoleConnectionLog(Arc<Mutex<Option<mpsc::Sender<ConsoleConnection>>>>);

struct Subscription(mpsc::Receiver<ConsoleConnection>);

impl ConsoleConnectionLog {
    /// Subscribes to connections from now on. The stream of an earlier subscriber ends.
    pub(crate) fn subscribe(&self) -> ConsoleConnectionStream {
        let (sender, receiver) = mpsc::channel(QUEUE_LEN);
        *self.0.lock() = Some(sender);
        Box::pin(Subscription(receiver))
    }

    /// Reports a connection. Returns false if the subscriber is too slow.
    pub(crate) fn report(&self, connection: ConsoleConnection) -> bool {
        self.0.lock().as_ref().is_none_or(|sender| sender.try_send(connection).is_ok())
    }
}

impl Stream for Subscription {
    type Item = ConsoleConnection;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}

/// Reports a sample of the connections to one VM.
#[derive(Debug)]
pub(crate) struct ConnectionSampler {
    vm: InstanceId,
    log: ConsoleConnectionLog,
    state: Mutex<SamplerState>,
}

#[derive(Debug)]
struct SamplerState {
    tokens: u32,
    refilled: Instant,
    /// The number of connections since the last report.
    unreported: u64,
}

impl ConnectionSampler {
    pub(crate) fn new(vm: InstanceId, log: ConsoleConnectionLog) -> Self {
        let state = SamplerState { tokens: BURST, refilled: Instant::now(), unreported: 0 };
        Self { vm, log, state: Mutex::new(state) }
    }

    pub(crate) fn record(&self, source: SocketAddr) {
        self.record_at(source, Instant::now());
    }

    fn record_at(&self, source: SocketAddr, now: Instant) {
        let mut state = self.state.lock();
        while state.tokens < BURST && now.duration_since(state.refilled) >= REFILL_INTERVAL {
            state.tokens += 1;
            state.refilled += REFILL_INTERVAL;
        }
        if state.tokens == BURST {
            state.refilled = now;
        }
        let connection = ConsoleConnection { vm: self.vm, source, unreported: state.unreported };
        if state.tokens > 0 && self.log.report(connection) {
            state.tokens -= 1;
            state.unreported = 0;
        } else {
            state.unreported += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reports_a_sample_and_the_number_of_omitted_connections() {
        let log = ConsoleConnectionLog::default();
        let mut connections = log.subscribe();
        let mut next =
            async || std::future::poll_fn(|context| connections.as_mut().poll_next(context)).await.unwrap();
        let (vm, start) = (InstanceId::new(), Instant::now());
        let sampler = ConnectionSampler::new(vm, log.clone());
        let source: SocketAddr = "10.0.0.1:4000".parse().unwrap();
        for _ in 0..1000 {
            sampler.record_at(source, start);
        }
        for _ in 0..BURST {
            assert_eq!(next().await, ConsoleConnection { vm, source, unreported: 0 });
        }
        sampler.record_at(source, start + REFILL_INTERVAL);
        sampler.record_at(source, start + REFILL_INTERVAL);
        let omitted = 1000 - u64::from(BURST);
        assert_eq!(next().await, ConsoleConnection { vm, source, unreported: omitted });
        // Another VM has its own sample.
        ConnectionSampler::new(InstanceId::new(), log).record_at(source, start);
        assert_eq!(next().await.unreported, 0);
    }
}
