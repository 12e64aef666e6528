//! What is known of the guest of a machine that runs, and whoever speaks with it.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use muster_types::Error;
use muster_types::guest::{
    AgentState, CommandKey, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture, GuestReport,
    OutputName,
};
use muster_types::ids::InstanceId;
use muster_types::instance::SideChannel;
use muster_types::storage::ByteStream;
use muster_types::vm::ChangeStream;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::{v1, v2};
use crate::changes::ChangeNotifier;

/// Asks the agent of one guest, in whichever protocol it speaks: what [`muster_types::guest::GuestApi`] has for all.
pub(super) trait Speaker: fmt::Debug + Send + Sync {
    fn facts(&self) -> GuestFuture<'_, Map<String, Value>>;

    fn execute<'a>(&'a self, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult>;

    fn output(&self, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream>;

    fn forget(&self, key: CommandKey) -> GuestFuture<'_, ()>;

    fn cancel(&self, key: CommandKey) -> GuestFuture<'_, ()>;

    fn put<'a>(
        &'a self,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()>;

    fn change_mode<'a>(&'a self, path: &'a str, mode: u32) -> GuestFuture<'a, ()>;

    fn get<'a>(&'a self, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)>;
}

/// What a stream says where a call would say this.
pub(super) fn stream_error(error: &GuestError) -> Error {
    let text = error.to_string();
    match error {
        GuestError::Away(_) | GuestError::Host(_) => Error::Unavailable(text),
        GuestError::Restarted(_) | GuestError::Unknown | GuestError::Forgetful | GuestError::Refused(_) => {
            Error::Conflict(text)
        }
    }
}

/// The guests of all machines that are on and have a way for an agent.
#[derive(Debug, Default)]
pub(crate) struct Contacts {
    /// A guest for each protocol that may be spoken with it, the better one first.
    known: Mutex<HashMap<InstanceId, Vec<Arc<Guest>>>>,
    notifier: ChangeNotifier,
}

/// A guest, as it is in one protocol.
#[derive(Debug)]
pub(super) struct Guest {
    id: InstanceId,
    notifier: ChangeNotifier,
    state: Mutex<State>,
    signals: watch::Sender<Signals>,
}

#[derive(Debug, Default)]
struct State {
    report: GuestReport,
    speaker: Option<Arc<dyn Speaker>>,
}

/// What happens to the machine around a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Signals {
    /// Nothing can be expected of it meanwhile.
    pub(super) paused: bool,
    /// How often it was reset.
    pub(super) resets: u64,
}

/// The contact with one guest, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Contact {
    contacts: Arc<Contacts>,
    id: InstanceId,
    guests: Vec<Arc<Guest>>,
    tasks: Vec<AbortHandle>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Contacts {
    /// Begins to speak with the guest of a machine whose sockets are in `folder` and whose virtual
    /// socket has this number; nothing if it has no way for an agent.
    pub(crate) fn begin(
        self: &Arc<Self>,
        id: InstanceId,
        folder: &Path,
        channels: &[SideChannel],
        vsock: Option<u32>,
    ) -> Option<Contact> {
        if channels.is_empty() {
            return None;
        }
        let mut guests = Vec::new();
        let mut tasks = Vec::new();
        for channel in SideChannel::ALL.iter().filter(|channel| channels.contains(channel)) {
            let guest = Arc::new(Guest::new(id, self.notifier.clone()));
            match channel {
                SideChannel::Agent => {
                    let kept = v1::keep(guest.clone(), folder.to_owned());
                    tasks.push(tokio::spawn(kept).abort_handle());
                }
                SideChannel::Agent2 => {
                    // Without one it is not reached.
                    let kept = vsock.map(|number| v2::keep(guest.clone(), v2::Way::Vsock(number)));
                    tasks.extend(kept.map(|kept| tokio::spawn(kept).abort_handle()));
                }
            }
            guests.push(guest);
        }
        lock(&self.known).insert(id, guests.clone());
        self.notifier.notify(id);
        Some(Contact { contacts: self.clone(), id, guests, tasks })
    }

    pub(super) fn changes(&self) -> ChangeStream {
        self.notifier.subscribe()
    }

    pub(super) fn report(&self, id: InstanceId) -> Option<GuestReport> {
        self.best(id).map(|guest| guest.report())
    }

    /// Whoever speaks with a guest now.
    pub(super) fn speaker(&self, id: InstanceId) -> Result<Arc<dyn Speaker>, GuestError> {
        let away = || GuestError::Away("there is no contact with the guest's agent".into());
        self.best(id).and_then(|guest| guest.speaker()).ok_or_else(away)
    }

    /// A guest in the protocol in which it is ready, or else in one in which it said something.
    fn best(&self, id: InstanceId) -> Option<Arc<Guest>> {
        let known = lock(&self.known);
        let guests = known.get(&id)?;
        let ready = guests.iter().find(|guest| guest.report().state.is_ready());
        let heard = || guests.iter().find(|guest| guest.report().state != AgentState::NoContact);
        ready.or_else(heard).or(guests.first()).cloned()
    }
}

impl Guest {
    pub(super) fn new(id: InstanceId, notifier: ChangeNotifier) -> Self {
        Self { id, notifier, state: Mutex::default(), signals: watch::Sender::default() }
    }

    pub(super) fn id(&self) -> InstanceId {
        self.id
    }

    pub(super) fn report(&self) -> GuestReport {
        let mut report = lock(&self.state).report.clone();
        if self.signals.borrow().paused {
            // Nothing is begun in it: it would be done when nobody wants it any more.
            report.state = AgentState::NotReady("instance paused".into());
        }
        report
    }

    /// ChangeStream what is known, and tells it.
    pub(super) fn change(&self, change: impl FnOnce(&mut GuestReport)) {
        {
            let mut state = lock(&self.state);
            let before = state.report.clone();
            change(&mut state.report);
            if state.report == before {
                return;
            }
            if state.report.state != before.state {
                tracing::info!(machine = %self.id, state = %state.report.state, "a guest's agent changed");
            }
        }
        self.notifier.notify(self.id);
    }

    /// Says who speaks with it from now on, if anybody does.
    pub(super) fn set_speaker(&self, speaker: Option<Arc<dyn Speaker>>) {
        lock(&self.state).speaker = speaker;
    }

    pub(super) fn speaker(&self) -> Option<Arc<dyn Speaker>> {
        lock(&self.state).speaker.clone()
    }

    pub(super) fn signals(&self) -> watch::Receiver<Signals> {
        self.signals.subscribe()
    }

    pub(super) fn set_paused(&self, paused: bool) {
        let changed = self.signals.send_if_modified(|signals| {
            let changed = signals.paused != paused;
            signals.paused = paused;
            changed
        });
        if changed {
            self.notifier.notify(self.id);
        }
    }

    pub(super) fn tell_reset(&self) {
        self.signals.send_modify(|signals| signals.resets += 1);
    }
}

impl Contact {
    /// Says that the machine is paused, or goes on.
    pub(crate) fn set_paused(&self, paused: bool) {
        for guest in &self.guests {
            guest.set_paused(paused);
        }
    }

    /// Says that the machine was reset: whatever ran in it is gone.
    pub(crate) fn tell_reset(&self) {
        for guest in &self.guests {
            guest.tell_reset();
        }
    }
}

impl Drop for Contact {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        for guest in &self.guests {
            guest.set_speaker(None);
        }
        {
            let mut known = lock(&self.contacts.known);
            // The machine may have been switched on again since.
            let same = |known: &Vec<Arc<Guest>>| {
                known.iter().zip(&self.guests).all(|(known, own)| Arc::ptr_eq(known, own))
            };
            if known.get(&self.id).is_some_and(same) {
                known.remove(&self.id);
            }
        }
        self.contacts.notifier.notify(self.id);
    }
}
