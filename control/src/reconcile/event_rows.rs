//! Samples the number of stored events for the metrics.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::app::App;

pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_secs(60);

/// Samples until told to stop, starting right away.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        if let Ok(rows) = app.store.estimate_rows("events").await {
            app.events.metrics().rows.set(rows);
        }
        tokio::select! {
            () = tokio::time::sleep(SAMPLE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
}
