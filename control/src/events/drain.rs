//! Moves events from the local queue to the database in batches, without losing any, and hands a copy to Loki.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use muster_types::event::Event;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::watch;

use super::loki::{Loki, LokiQueue};
use super::metrics::Metrics;
use super::recorder::Events;
use super::spool::{self, Batch, Reader};
use muster_store::{Store, events};

const MIN_RETRY_DELAY: Duration = Duration::from_millis(500);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// Drains the queue of this process, and those of dead processes.
#[derive(Debug)]
pub struct Drainer {
    events: Events,
    own: Reader,
    orphans: Vec<Reader>,
    batch_size: usize,
    poll_interval: Duration,
    loki: Option<Loki>,
}

impl Drainer {
    /// Creates a drainer. `directory` contains the queues of all processes of this host.
    pub fn new(events: &Events, directory: &Path, settings: &Settings) -> std::io::Result<Self> {
        let orphans = spool::lock_orphans(directory)?;
        if !orphans.is_empty() {
            tracing::info!(queues = orphans.len(), "recovering event queues of dead processes");
        }
        Ok(Self {
            own: Reader::open(events.spool().directory())?,
            events: events.clone(),
            orphans,
            batch_size: usize::try_from(settings.drain_batch_size).map_err(std::io::Error::other)?,
            poll_interval: Duration::from_secs_f64(settings.drain_poll_interval),
            loki: Loki::new(settings)?,
        })
    }

    /// Drains until `stop` is set and the queue is empty, or the database is unavailable.
    pub async fn run(mut self, store: Arc<Store>, mut stop: watch::Receiver<bool>) {
        let mut retry_delay = MIN_RETRY_DELAY;
        let loki = self.loki.take().map(|loki| loki.start(self.events.metrics()));
        loop {
            let stopping = *stop.borrow();
            let drained = self.drain_batch(&store, loki.as_ref()).await;
            self.events.batch_drained(drained.is_ok());
            self.events.check_storage();
            if matches!(drained, Ok(1..)) {
                self.events.notify_stored();
            }
            let delay = match drained {
                Ok(0) if stopping => break,
                // There may be more events after a full batch, and before the end all of them are drained.
                Ok(count) if count >= self.batch_size || stopping => {
                    retry_delay = MIN_RETRY_DELAY;
                    continue;
                }
                Ok(_) => {
                    retry_delay = MIN_RETRY_DELAY;
                    self.poll_interval
                }
                Err(error) => {
                    tracing::warn!(%error, depth = self.events.depth(), "failed to drain events");
                    if stopping {
                        break;
                    }
                    let delay = retry_delay;
                    retry_delay = (retry_delay * 2).min(MAX_RETRY_DELAY);
                    delay
                }
            };
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                _ = stop.changed() => {}
            }
        }
        if let Some(loki) = loki {
            loki.close().await;
        }
        if self.events.depth() == 0
            && let Err(error) = self.own.remove()
        {
            tracing::warn!(%error, "failed to remove the drained event queue");
        }
    }

    /// Moves one batch to the database. Returns the number of events.
    async fn drain_batch(&mut self, store: &Store, loki: Option<&LokiQueue>) -> Result<usize> {
        let copy = |written| {
            if let Some(loki) = loki {
                loki.send(written);
            }
        };
        while let Some(reader) = self.orphans.last_mut() {
            let batch = reader.read(self.batch_size, None).map_err(|error| queue_error(&error))?;
            if !batch.lines.is_empty() {
                copy(write(store, self.events.metrics(), &batch).await?);
                reader.advance(&batch).map_err(|error| queue_error(&error))?;
                return Ok(self.batch_size);
            }
            if let Some(reader) = self.orphans.pop() {
                reader.remove().map_err(|error| queue_error(&error))?;
            }
        }
        let open = self.events.spool().open_segment();
        let batch = self.own.read(self.batch_size, Some(open)).map_err(|error| queue_error(&error))?;
        if batch.lines.is_empty() {
            return Ok(0);
        }
        copy(write(store, self.events.metrics(), &batch).await?);
        self.own.advance(&batch).map_err(|error| queue_error(&error))?;
        self.events.spool().drained(batch.lines.len());
        Ok(batch.lines.len())
    }
}

fn queue_error(error: &std::io::Error) -> Error {
    Error::Internal(format!("event queue: {error}"))
}

/// Writes a batch, and returns its events. Skips events that the database rejects permanently, so that they do not block
/// later ones.
async fn write(store: &Store, metrics: &Metrics, batch: &Batch) -> Result<Vec<Event>> {
    let mut parsed: Vec<Event> = Vec::with_capacity(batch.lines.len());
    for line in &batch.lines {
        match serde_json::from_slice(line) {
            Ok(event) => parsed.push(event),
            Err(error) => tracing::error!(%error, "skipped a damaged event"),
        }
    }
    match events::insert(store, &parsed).await {
        Ok(()) => {}
        Err(Error::TooLong(_)) => {
            let mut inserted = Vec::with_capacity(parsed.len());
            for event in parsed {
                match events::insert(store, std::slice::from_ref(&event)).await {
                    Ok(()) => inserted.push(event),
                    Err(Error::TooLong(why)) => {
                        metrics.dropped.inc();
                        tracing::error!(event = %event.event_uuid, why, "dropped an event that is too long");
                    }
                    Err(error) => return Err(error),
                }
            }
            parsed = inserted;
        }
        Err(error) => return Err(error),
    }
    for event in &parsed {
        metrics.inserted.get_or_create(&[("event_type", event.event_type.as_str())]).inc();
    }
    Ok(parsed)
}
