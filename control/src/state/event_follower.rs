//! Reads the events of all daemons in the order in which they were stored. See docs/decisions/0080.

use std::collections::HashMap;

use muster_store::event_streams::{self, EventPosition};
use muster_store::{Store, StoreError};

/// The number of seconds by which the order of events may differ from the order in which they become visible: a
/// transaction takes time after it has set the time of its events, and the clocks of database servers differ.
pub(crate) const MAX_COMMIT_DELAY: f64 = 10.0;
/// The number of events that are read at a time.
pub(crate) const PAGE: i64 = 500;

/// What was read so far.
#[derive(Debug)]
pub(crate) struct EventFollower {
    /// The latest time at which an event was stored.
    pub(crate) latest: f64,
    /// The events that were read and are not older than [`MAX_COMMIT_DELAY`], with the time at which they were stored.
    seen: HashMap<String, f64>,
}

impl EventFollower {
    /// Follows the events from a time on, and those that may have become visible after it.
    pub(crate) fn new(latest: f64) -> Self {
        Self { latest, seen: HashMap::new() }
    }

    /// Returns the events that were not returned yet.
    pub(crate) async fn take_new(&mut self, store: &Store) -> Result<Vec<EventPosition>, StoreError> {
        let start = self.latest - MAX_COMMIT_DELAY;
        let mut position = EventPosition { stored: start, event_uuid: String::new() };
        let mut new = Vec::new();
        loop {
            let page = event_streams::page(store, &position, PAGE).await?;
            let Some(last) = page.last() else { break };
            position = last.clone();
            let is_last = page.len() < usize::try_from(PAGE).unwrap_or(usize::MAX);
            new.extend(page.into_iter().filter(|event| !self.seen.contains_key(&event.event_uuid)));
            if is_last {
                break;
            }
        }
        self.seen.extend(new.iter().map(|event| (event.event_uuid.clone(), event.stored)));
        self.latest = new.iter().map(|event| event.stored).fold(self.latest, f64::max);
        let oldest = self.latest - MAX_COMMIT_DELAY;
        self.seen.retain(|_, stored| *stored >= oldest);
        Ok(new)
    }
}
