//! Reads new events of all daemons for the streams of this daemon, while there are any. See docs/decisions/0080.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::event_streams::{self, UnfinishedWork};
use muster_store::{database_time, keys};
use muster_types::Result;
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::object::ObjectRef;
use muster_types::time::now;
use tokio::sync::watch;

use crate::app::App;
use crate::objects::event_stream::{change_message, read_messages};
use crate::state::{EVENT_PAGE, EventFollower, StreamKey, StreamMessage};

/// The interval between reads: the delay with which events of other daemons are noticed. Own events are read immediately.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The minimum time between two reads, so that many own events are read together.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
/// The interval between checks of the keys that streams were opened with.
const KEY_INTERVAL: Duration = Duration::from_secs(5);

/// The interval at which clients receive their position, so that one that sees few events does not resume far behind.
const POSITION_INTERVAL: Duration = Duration::from_secs(15);

/// Follows the events until `stop` is set.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut stored = app.events.stored();
    let mut follower = None;
    while !*stop.borrow() {
        if app.event_streams.count() == 0 {
            follower = None;
            tokio::select! {
                () = app.event_streams.opened() => {}
                _ = stop.changed() => {}
            }
            continue;
        }
        if app.health.is_draining() {
            app.event_streams.close();
            continue;
        }
        stored.mark_unchanged();
        let outcome = match &mut follower {
            Some(follower) => Follower::read(follower, &app).await,
            None => Follower::start(&app).await.map(|started| follower = Some(started)),
        };
        if let Err(error) = outcome {
            tracing::warn!(%error, "failed to read events for streams");
        }
        tokio::time::sleep(MIN_INTERVAL).await;
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = app.event_streams.opened() => {}
            _ = stored.changed() => {}
            _ = stop.changed() => {}
        }
    }
    app.event_streams.close();
}

/// What was read so far.
struct Follower {
    events: EventFollower,
    work: HashMap<ObjectRef, UnfinishedWork>,
    keys_checked: Instant,
    position_sent: Instant,
}

impl Follower {
    /// Starts with the current events, which are not sent.
    async fn start(app: &App) -> Result<Self> {
        let latest = database_time(&*app.store).await?;
        let work = unfinished_work(app).await?;
        let now = Instant::now();
        let mut events = EventFollower::new(latest);
        events.take_new(&app.store).await?;
        app.event_streams.start_new(events.latest);
        Ok(Self { events, work, keys_checked: now, position_sent: now })
    }

    /// Sends what has changed since the last call.
    async fn read(&mut self, app: &App) -> Result<()> {
        let new = self.events.take_new(&app.store).await?;
        // After the events: a change that has one needs no other message.
        let mut messages = Vec::new();
        for page in new.chunks(usize::try_from(EVENT_PAGE).unwrap_or(usize::MAX)) {
            messages.extend(read_messages(app, page).await?);
        }
        let announced: HashSet<ObjectRef> = messages.iter().map(|message| message.object.clone()).collect();
        messages.extend(self.changes(app, &announced).await?);
        app.event_streams.publish(&messages);
        if self.position_sent.elapsed() >= POSITION_INTERVAL {
            self.position_sent = Instant::now();
            app.event_streams.publish_position(self.events.latest);
        }
        app.event_streams.start_new(self.events.latest);
        if self.keys_checked.elapsed() >= KEY_INTERVAL {
            self.keys_checked = Instant::now();
            check_keys(app).await?;
        }
        Ok(())
    }

    /// Returns the messages about operations that were queued, have made progress or ended, and about their objects.
    async fn changes(&mut self, app: &App, announced: &HashSet<ObjectRef>) -> Result<Vec<StreamMessage>> {
        let work = unfinished_work(app).await?;
        let before = std::mem::replace(&mut self.work, work);
        let is_changed = |(id, new): &(&ObjectRef, &UnfinishedWork)| before.get(*id) != Some(*new);
        let changed = self.work.iter().filter(is_changed).map(|(_, work)| work);
        let ended = before.iter().filter(|(id, _)| !self.work.contains_key(*id)).map(|(_, work)| work);
        let mut messages = Vec::new();
        let mut sent = HashSet::new();
        for work in changed.chain(ended) {
            for object in [&work.operation, &work.target] {
                if !announced.contains(object) && sent.insert(object) {
                    messages.push(change_message(object.clone(), work.namespace.clone())?);
                }
            }
        }
        Ok(messages)
    }
}

async fn unfinished_work(app: &App) -> Result<HashMap<ObjectRef, UnfinishedWork>> {
    let work = event_streams::unfinished_work(&*app.store).await?;
    Ok(work.into_iter().map(|work| (work.operation.clone(), work)).collect())
}

/// Ends the streams of keys that were deleted, replaced or have expired, and those of namespaces whose trust has ended.
async fn check_keys(app: &App) -> Result<()> {
    for (key, nonce) in app.event_streams.keys() {
        let (namespace, name): &StreamKey = &key;
        let found = keys::credential(&app.store, namespace, name).await?;
        let found = found.filter(|found| found.namespace_state == NamespaceState::Created);
        let is_valid = found.as_ref().and_then(|found| found.key.as_ref()).is_some_and(|key| {
            nonce.as_ref() == Some(&key.nonce) && key.expiry.is_none_or(|expiry| expiry > now())
        });
        if !is_valid {
            app.event_streams.end_all_of_key(&key, nonce.as_deref());
            continue;
        }
        let trusting = found.map(|found| found.trusting).unwrap_or_default();
        let may_see = |other: &str| {
            namespace == SYSTEM_NAMESPACE || namespace == other || trusting.iter().any(|name| name == other)
        };
        app.event_streams.end_of_key(&key, nonce.as_deref(), may_see);
    }
    Ok(())
}
