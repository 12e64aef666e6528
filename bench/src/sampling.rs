//! Helpers to measure requests.

use std::sync::Arc;
use std::time::Duration;

use muster_store::{Retry, Store, Tx, TxError};
use nix::time::{ClockId, clock_gettime};

use crate::load::{Pool, request};
use crate::server::Server;

pub(crate) const CONNECTIONS: usize = 64;
pub(crate) const ROUNDS: usize = 3;
/// The number of interleaved slices of a round.
pub(crate) const SLICES: usize = 10;

/// Sends requests on all connections and measures the CPU time of the server.
pub(crate) struct LoadGenerator<'a> {
    server: &'a Server,
    pool: Pool,
}

impl<'a> LoadGenerator<'a> {
    /// Opens the connections and uses them, so that the server has accepted all of them.
    pub(crate) async fn new(server: &'a Server) -> anyhow::Result<Self> {
        let mut pool = Pool::open(server.address, CONNECTIONS).await?;
        pool.run(CONNECTIONS * 10, None, repeat(&request("GET", "/livez", None, None))).await?;
        Ok(Self { server, pool })
    }

    /// Returns the CPU time of the server for `count` requests.
    pub(crate) async fn cost<R>(&mut self, count: usize, call: R) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let began = self.server.cpu()?;
        self.pool.run(count, None, call).await?;
        Ok(self.server.cpu()? - began)
    }

    /// Like [`Self::cost`], including the CPU time for draining the events.
    pub(crate) async fn cost_with_events<R>(&mut self, count: usize, call: R) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let began = self.server.cpu()?;
        self.pool.run(count, None, call).await?;
        self.server.wait_until_drained().await?;
        Ok(self.server.cpu()? - began)
    }
}

/// Returns the microseconds per request.
pub(crate) fn micros(total: Duration, calls: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let calls = calls as f64;
    total.as_secs_f64() * 1e6 / calls
}

/// Returns a function that repeats one request.
pub(crate) fn repeat(request: &Arc<[u8]>) -> impl Fn(usize) -> Arc<[u8]> + Send + Sync + 'static {
    let request = Arc::clone(request);
    move |_| Arc::clone(&request)
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub(crate) fn progress(what: &str) {
    eprintln!("… {what}");
}

/// Returns the CPU time of this process.
pub(crate) fn process_cpu_time() -> anyhow::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

/// Runs a transaction, with retries as in the control plane.
pub(crate) async fn transaction<T>(
    store: &Store,
    body: impl AsyncFn(&mut Tx) -> Result<T, TxError>,
) -> anyhow::Result<T> {
    let mut retry = Retry::default();
    loop {
        let mut tx = store.begin().await?;
        let outcome = body(&mut tx).await;
        if let Some(end) = tx.finish(outcome, &mut retry).await {
            return Ok(end?);
        }
    }
}
