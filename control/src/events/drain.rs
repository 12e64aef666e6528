//! Moves events from the local queue to the database, in batches, without ever losing one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use muster_types::event::Event;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::watch;

use super::spool::{self, Batch, Reader};
use super::{Events, Metrics};
use muster_store::{Store, events};

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Drains one process's queue and what dead processes left.
#[derive(Debug)]
pub struct Drainer {
    events: Events,
    own: Reader,
    leftovers: Vec<Reader>,
    batch: usize,
    poll: Duration,
}

impl Drainer {
    /// `directory` is where the queues of all processes of this machine live.
    pub fn new(events: &Events, directory: &Path, settings: &Settings) -> std::io::Result<Self> {
        let leftovers = spool::leftovers(directory)?;
        if !leftovers.is_empty() {
            tracing::info!(queues = leftovers.len(), "recovering events of dead processes");
        }
        Ok(Self {
            own: Reader::open(events.inner.spool.folder())?,
            events: events.clone(),
            leftovers,
            batch: usize::try_from(settings.drain_batch_size).unwrap_or(100),
            poll: Duration::from_secs_f64(settings.drain_poll_interval),
        })
    }

    /// Drains until `stop` says so and everything recorded before is in the database, or cannot get there.
    pub async fn run(mut self, store: Arc<Store>, mut stop: watch::Receiver<bool>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let stopping = *stop.borrow();
            let wait = match self.step(&store).await {
                Ok(0) if stopping => break,
                // More is waiting behind a full batch, and at the end everything goes.
                Ok(count) if count >= self.batch || stopping => {
                    pause = FIRST_PAUSE;
                    continue;
                }
                Ok(_) => {
                    pause = FIRST_PAUSE;
                    self.poll
                }
                Err(error) => {
                    tracing::warn!(%error, depth = self.events.depth(), "events wait for the database");
                    if stopping {
                        break;
                    }
                    let wait = pause;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    wait
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = stop.changed() => {}
            }
        }
        if self.events.depth() == 0
            && let Err(error) = self.own.remove()
        {
            tracing::warn!(%error, "removing the drained event queue");
        }
    }

    /// Moves one batch. Says how many events it held.
    async fn step(&mut self, store: &Store) -> Result<usize> {
        while let Some(reader) = self.leftovers.last_mut() {
            let batch = reader.read(self.batch, None).map_err(|error| broken(&error))?;
            if !batch.lines.is_empty() {
                write(store, self.events.metrics(), &batch).await?;
                reader.advance(&batch).map_err(|error| broken(&error))?;
                return Ok(self.batch);
            }
            if let Some(reader) = self.leftovers.pop() {
                reader.remove().map_err(|error| broken(&error))?;
            }
        }
        let open = self.events.inner.spool.open_segment();
        let batch = self.own.read(self.batch, Some(open)).map_err(|error| broken(&error))?;
        if batch.lines.is_empty() {
            return Ok(0);
        }
        write(store, self.events.metrics(), &batch).await?;
        self.own.advance(&batch).map_err(|error| broken(&error))?;
        self.events.inner.spool.drained(batch.lines.len());
        Ok(batch.lines.len())
    }
}

fn broken(error: &std::io::Error) -> Error {
    Error::Internal(format!("event queue: {error}"))
}

/// Writes a batch. An event that the database will never take must not block those behind it.
async fn write(store: &Store, metrics: &Metrics, batch: &Batch) -> Result<()> {
    let mut parsed: Vec<Event> = Vec::with_capacity(batch.lines.len());
    for line in &batch.lines {
        match serde_json::from_slice(line) {
            Ok(event) => parsed.push(event),
            Err(error) => tracing::error!(%error, "a damaged event is left out"),
        }
    }
    match events::insert(store, &parsed).await {
        Ok(()) => {}
        Err(Error::TooLong(_)) => {
            let mut kept = Vec::with_capacity(parsed.len());
            for event in parsed {
                match events::insert(store, std::slice::from_ref(&event)).await {
                    Ok(()) => kept.push(event),
                    Err(Error::TooLong(why)) => {
                        metrics.dropped.inc();
                        tracing::error!(event = %event.event_uuid, why, "an event does not fit the database");
                    }
                    Err(error) => return Err(error),
                }
            }
            parsed = kept;
        }
        Err(error) => return Err(error),
    }
    for event in &parsed {
        metrics.inserted.get_or_create(&[("event_type", event.event_type.as_str())]).inc();
    }
    Ok(())
}
