//! Samples the number of stored events for the metrics.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::app::App;

/// The interval between samples.
pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_secs(60);

/// Samples until `stop` is set, the first time immediately.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        match app.store.estimate_rows("events").await {
            Ok(rows) => {
                app.events.metrics().rows.set(rows);
            }
            Err(error) => tracing::warn!(%error, "failed to estimate the number of events"),
        }
        tokio::select! {
            () = tokio::time::sleep(SAMPLE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
}
