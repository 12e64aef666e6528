//! The life of one machine: what is known of it, and who looks after it while it runs.
//!
//! How it is comes from QEMU's events and from the end of its process, never from asking again and again:
//!
//! ```text
//! RESUME ─▶ on    STOP ─▶ paused    SHUTDOWN by the guest ─▶ reset if it shall restart, otherwise off
//! an error of the processor or a panic ─▶ crashed    the end of the process ─▶ what was wanted, otherwise crashed
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_types::ids::InstanceId;
use muster_types::instance::SideChannel;
use muster_types::vm::VmPower;
use muster_types::{Error, Result};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use super::folder::{Ended, Folder, Record};
use super::process::Process;
use super::qmp::{Event, Qmp};
use super::{cgroup, snapshot, socket};
use crate::changes::Teller;
use crate::guest::{GuestHandle, GuestRegistry};

/// How long QEMU may take to write what it has not written yet.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long the kernel may take to end a process.
pub(super) const DEATH: Duration = Duration::from_secs(20);

/// How long a QEMU that was found may take to answer before it counts as one that cannot be driven.
const GREETING: Duration = Duration::from_secs(5);

/// The longest time between two attempts to reach a QEMU that does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A machine that the node has something of.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) id: InstanceId,
    pub(super) folder: Folder,
    /// Held by whoever switches it on or off.
    pub(super) turn: tokio::sync::Mutex<()>,
    /// Held by whoever copies its disks.
    pub(super) copying: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    teller: Teller,
    contacts: Arc<GuestRegistry>,
}

#[derive(Debug)]
struct State {
    power: VmPower,
    live: Option<Arc<Live>>,
}

/// A machine's process.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) process: Process,
    record: Mutex<Record>,
    qmp: Mutex<Option<Arc<Qmp>>>,
    /// How it shall end, if it shall.
    wanted: Mutex<Option<Ended>>,
    /// True when its end is known to all.
    over: watch::Sender<bool>,
    watcher: Mutex<Option<AbortHandle>>,
    /// The contact with its guest, if there is a way.
    contact: Mutex<Option<GuestHandle>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    pub(super) fn new(process: Process, record: Record, qmp: Option<Qmp>) -> Self {
        Self {
            process,
            record: Mutex::new(record),
            qmp: Mutex::new(qmp.map(Arc::new)),
            wanted: Mutex::default(),
            over: watch::Sender::new(false),
            watcher: Mutex::default(),
            contact: Mutex::default(),
        }
    }

    pub(super) fn record(&self) -> Record {
        lock(&self.record).clone()
    }

    pub(super) fn set_record(&self, record: Record) {
        *lock(&self.record) = record;
    }

    /// The way to tell it something.
    pub(super) fn qmp(&self) -> Result<Arc<Qmp>> {
        let reason = || {
            let pid = self.process.pid;
            Error::Unavailable(format!("the machine runs, but its QEMU (process {pid}) does not answer"))
        };
        lock(&self.qmp).clone().ok_or_else(reason)
    }

    /// The ways for an agent. A daemon that knew nothing of agents did not write them down.
    fn side_channels(&self, folder: &Folder) -> Vec<SideChannel> {
        let channels = lock(&self.record).side_channels.clone();
        match channels.is_empty() && folder.file(socket::AGENT).exists() {
            true => vec![SideChannel::Agent],
            false => channels,
        }
    }

    fn set_paused(&self, paused: bool) {
        if let Some(contact) = &*lock(&self.contact) {
            contact.set_paused(paused);
        }
    }

    fn tell_reset(&self) {
        if let Some(contact) = &*lock(&self.contact) {
            contact.notify_reset();
        }
    }

    /// Says how it shall end, unless that was said before; answers what holds.
    fn want(&self, end: Ended) -> Ended {
        lock(&self.wanted).get_or_insert(end).clone()
    }

    /// Waits until its end is known to all.
    async fn over(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }
}

impl Machine {
    pub(super) fn new(
        id: InstanceId,
        folder: Folder,
        power: VmPower,
        teller: Teller,
        contacts: Arc<GuestRegistry>,
    ) -> Self {
        let state = Mutex::new(State { power, live: None });
        let (turn, copying) = Default::default();
        Self { id, folder, turn, copying, state, teller, contacts }
    }

    pub(super) fn power(&self) -> VmPower {
        lock(&self.state).power.clone()
    }

    pub(super) fn live(&self) -> Option<Arc<Live>> {
        lock(&self.state).live.clone()
    }

    /// The process of a machine that is on or paused.
    pub(super) fn require_live(&self) -> Result<Arc<Live>> {
        self.live().ok_or_else(|| Error::Conflict("the machine is not on".into()))
    }

    pub(super) fn set_power(&self, power: VmPower) {
        {
            let mut state = lock(&self.state);
            if state.power == power {
                return;
            }
            tracing::info!(machine = %self.id, ?power, "a machine's power changed");
            if let Some(live) = &state.live {
                live.set_paused(power == VmPower::Paused);
            }
            state.power = power;
        }
        self.teller.tell(self.id);
    }

    /// Writes down how it ended, or ends presently. Where that is not possible, such as on a full disk, it ends all the
    /// same.
    pub(super) fn note_end(&self, end: &Ended) {
        if let Err(error) = self.folder.put_end(end) {
            tracing::warn!(machine = %self.id, %error, "the end of a machine is not written down");
        }
    }

    /// Has somebody look after its process from now on. `events` is nothing if QEMU did not answer yet.
    pub(super) fn look_after(self: &Arc<Self>, live: &Arc<Live>, events: Option<mpsc::Receiver<Event>>) {
        *lock(&live.contact) = self.begin_contact(live);
        lock(&self.state).live = Some(live.clone());
        let watcher = Watcher { machine: self.clone(), live: live.clone(), restarting: false };
        *lock(&live.watcher) = Some(tokio::spawn(watcher.watch(events)).abort_handle());
    }

    fn begin_contact(&self, live: &Live) -> Option<GuestHandle> {
        let (channels, vsock) = (live.side_channels(&self.folder), lock(&live.record).vsock);
        self.contacts.attach(self.id, self.folder.path(), &channels, vsock)
    }

    /// Takes over a process that another daemon started.
    pub(super) async fn adopt(self: &Arc<Self>, process: Process, record: Record) {
        // Whoever wrote this did not get to it.
        let cleared = self.folder.clear_end();
        let live = Arc::new(Live::new(process, record, None));
        let watcher = Watcher { machine: self.clone(), live: live.clone(), restarting: false };
        let connected = watcher.connect().await;
        let pid = live.process.pid;
        if let Err(error) = &cleared {
            tracing::warn!(machine = %self.id, pid, %error, "the former end of a machine is not forgotten");
        }
        if let Err(error) = &connected {
            tracing::warn!(machine = %self.id, pid, %error, "a machine runs, but cannot be driven");
        }
        // Nobody waits any more for what it was copying.
        if let Ok(qmp) = live.qmp()
            && let Err(error) = snapshot::clear(&qmp, self).await
        {
            tracing::warn!(machine = %self.id, %error, "what a copy left is not cleared away");
        }
        lock(&self.state).power = VmPower::On;
        self.look_after(&live, connected.ok());
        if !self.folder.was_started() {
            let interrupted = Ended { crashed: true, reason: "its start was interrupted".into() };
            let _ = self.end(&live, interrupted, false).await;
        } else if let Err(error) = self.refresh(&live).await {
            tracing::warn!(machine = %self.id, %error, "a machine was not asked how it is");
        }
    }

    /// Ends its process, and returns when everybody knows.
    pub(super) async fn end(&self, live: &Live, end: Ended, orderly: bool) -> Result<()> {
        self.note_end(&live.want(end));
        if orderly && let Ok(qmp) = live.qmp() {
            // It writes what it has not written yet, which a guest that trusts its disk may not have asked for.
            let quit = tokio::time::timeout(FAREWELL, qmp.execute("quit", json!({})));
            if !matches!(quit.await, Ok(Ok(_))) || !live.process.ends_within(FAREWELL).await {
                live.process.kill();
            }
        } else {
            live.process.kill();
        }
        match tokio::time::timeout(DEATH, live.over()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(Error::Unavailable(format!(
                "process {} was killed and does not end: it waits for a disk or a device",
                live.process.pid
            ))),
        }
    }

    /// Asks QEMU how the machine is.
    pub(super) async fn refresh(&self, live: &Live) -> Result<()> {
        Watcher::look(self, live).await.map(drop)
    }

    /// Stops looking after it; it goes on.
    pub(super) fn leave(&self) {
        if let Some(live) = lock(&self.state).live.take() {
            let _ = lock(&live.watcher).take().map(|watcher| watcher.abort());
            let _ = lock(&live.qmp).take().map(|qmp| qmp.close());
            lock(&live.contact).take();
        }
    }
}

/// What a state of QEMU means.
#[derive(Debug, PartialEq)]
enum Meaning {
    VmPower(VmPower),
    /// The guest switched itself off.
    SwitchedOff,
    /// It will not go on.
    Broken(&'static str),
    /// Somebody ends QEMU; the end of its process tells the rest.
    Ending,
}

fn meaning(status: &str) -> Meaning {
    match status {
        "running" | "suspended" => Meaning::VmPower(VmPower::On),
        "shutdown" => Meaning::SwitchedOff,
        "internal-error" => Meaning::Broken(
            "the processor met something that KVM cannot run: the host's virtualisation is broken or nested",
        ),
        "guest-panicked" => Meaning::Broken("the guest's kernel panicked"),
        // Also after an error of a disk, such as a full one: it goes on when it is resumed.
        _ => Meaning::VmPower(VmPower::Paused),
    }
}

/// Looks after one process until its end.
struct Watcher {
    machine: Arc<Machine>,
    live: Arc<Live>,
    /// Whether it was reset after the guest switched it off, and is switched on when that is done.
    restarting: bool,
}

impl Watcher {
    async fn watch(mut self, mut events: Option<mpsc::Receiver<Event>>) {
        let live = self.live.clone();
        let mut signalled = false;
        if events.is_some() {
            self.follow(Self::look(&self.machine, &live).await).await;
        }
        let mut pause = Duration::from_millis(50);
        loop {
            let Some(heard) = &mut events else {
                tokio::select! {
                    () = live.process.ended() => break,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                tokio::select! {
                    () = live.process.ended() => break,
                    connected = self.connect() => events = connected.ok(),
                }
                if events.is_some() {
                    tracing::info!(machine = %self.machine.id, "QEMU answers again");
                    self.follow(Self::look(&self.machine, &live).await).await;
                    pause = Duration::from_millis(50);
                }
                continue;
            };
            let event = tokio::select! {
                () = live.process.ended() => break,
                event = heard.recv() => event,
            };
            match event {
                Some(event) => self.hear(event, &mut signalled).await,
                None => {
                    lock(&live.qmp).take();
                    events = None;
                }
            }
        }
        if let Some(mut events) = events {
            while let Ok(event) = events.try_recv() {
                signalled |= event.is_signal();
            }
        }
        self.finish(signalled).await;
    }

    /// Reaches QEMU on its socket.
    async fn connect(&self) -> Result<mpsc::Receiver<Event>> {
        let lost =
            |error: &dyn std::fmt::Display| Error::Unavailable(format!("QEMU cannot be reached: {error}"));
        let connecting = socket::connect(self.machine.folder.path(), socket::CONTROL);
        let stream = tokio::time::timeout(GREETING, connecting).await.map_err(|late| lost(&late))?;
        let stream = stream.map_err(|error| lost(&error))?;
        let (qmp, events) = Qmp::greet(stream, GREETING).await?;
        let found = qmp.execute("query-uuid", json!({})).await?;
        if found["UUID"].as_str() != Some(self.machine.id.to_string().as_str()) {
            return Err(lost(&"another machine answers"));
        }
        *lock(&self.live.qmp) = Some(Arc::new(qmp));
        Ok(events)
    }

    async fn hear(&mut self, event: Event, signalled: &mut bool) {
        *signalled |= event.is_signal();
        let reset = event.name == "RESET";
        if event.name == "SHUTDOWN" && event.data["guest"] != json!(true) {
            // Ended from outside, which the end of the process tells.
            return;
        }
        if reset {
            self.live.tell_reset();
        }
        if reset && self.restarting {
            self.restarting = false;
            self.go_on().await;
        }
        let meaning = Self::look(&self.machine, &self.live).await;
        if reset && matches!(meaning, Ok(Meaning::VmPower(VmPower::On))) {
            // It restarted in its own way.
            self.machine.folder.forget_reboot();
        }
        self.follow(meaning).await;
    }

    /// Asks QEMU how it is, and tells everybody if that is plain.
    async fn look(machine: &Machine, live: &Live) -> Result<Meaning> {
        let qmp = live.qmp()?;
        let status = qmp.execute("query-status", json!({})).await?;
        let status = status["status"].as_str().unwrap_or_default();
        if status == "shutdown" && qmp.is_signalled() {
            return Ok(Meaning::Ending);
        }
        if status == "io-error" {
            tracing::warn!(machine = %machine.id, "a machine is paused: the file of a disk failed, or the node's disk is full");
        }
        let meaning = meaning(status);
        if let Meaning::VmPower(power) = &meaning
            && lock(&live.wanted).is_none()
        {
            machine.set_power(power.clone());
        }
        Ok(meaning)
    }

    /// Does what follows from how it is.
    async fn follow(&mut self, meaning: Result<Meaning>) {
        let end = match meaning {
            Ok(Meaning::SwitchedOff) if self.restarting => return,
            Ok(Meaning::SwitchedOff) if self.machine.folder.wishes_reboot() => {
                self.restarting = true;
                let reset = match self.live.qmp() {
                    Ok(qmp) => qmp.execute("system_reset", json!({})).await.map(drop),
                    Err(error) => Err(error),
                };
                if let Err(error) = reset {
                    tracing::warn!(machine = %self.machine.id, %error, "a machine does not restart");
                }
                return;
            }
            Ok(Meaning::SwitchedOff) => Ended::off("the guest switched itself off"),
            Ok(Meaning::Broken(why)) => Ended { crashed: true, reason: why.into() },
            Ok(Meaning::VmPower(VmPower::Paused)) if self.machine.folder.wishes_reboot() => {
                // A daemon that went in between had reset it already, or somebody else pauses it: both are told apart
                // by the state after a reset.
                return self.go_on_after_reset().await;
            }
            Ok(Meaning::VmPower(_) | Meaning::Ending) => return,
            Err(error) => {
                return tracing::debug!(machine = %self.machine.id, %error, "a machine was not asked how it is");
            }
        };
        self.machine.note_end(&self.live.want(end));
        if let Ok(qmp) = self.live.qmp() {
            let _ = tokio::time::timeout(FAREWELL, qmp.execute("quit", json!({}))).await;
        }
        if !self.live.process.ends_within(FAREWELL).await {
            self.live.process.kill();
        }
    }

    async fn go_on_after_reset(&mut self) {
        let status = match self.live.qmp() {
            Ok(qmp) => qmp.execute("query-status", json!({})).await,
            Err(_) => return,
        };
        if status.is_ok_and(|status| status["status"] == json!("prelaunch")) {
            self.go_on().await;
        }
    }

    async fn go_on(&mut self) {
        let went = match self.live.qmp() {
            Ok(qmp) => qmp.execute("cont", json!({})).await.map(drop),
            Err(error) => Err(error),
        };
        match went {
            Ok(()) => self.machine.folder.forget_reboot(),
            Err(error) => tracing::warn!(machine = %self.machine.id, %error, "a machine does not go on"),
        }
    }

    /// The process is gone: says why, and clears away what was for it.
    async fn finish(self, signalled: bool) {
        let (machine, live) = (self.machine, self.live);
        let end = live.process.end();
        let wanted = lock(&live.wanted).take();
        lock(&live.qmp).take();
        lock(&live.contact).take();
        let told = machine.clone();
        let cleared = move || {
            if let Err(error) = cgroup::remove(told.id) {
                tracing::warn!(machine = %told.id, %error, "the resource group of a machine is not removed");
            }
            told.folder.last_words()
        };
        let words = tokio::task::spawn_blocking(cleared).await.ok().flatten();
        let ended = wanted.unwrap_or_else(|| {
            let reason = if signalled { "QEMU was told to end by somebody".into() } else { end.reason() };
            let reason = words.map(|words| format!("{reason}: {words}")).unwrap_or(reason);
            let ended = Ended { crashed: true, reason };
            // The end that comes with a signal may be that of the host, after which it shall run again.
            if !signalled {
                machine.note_end(&ended);
            }
            ended
        });
        lock(&machine.state).live = None;
        machine.set_power(ended.power());
        live.over.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_qemu_have_a_meaning() {
        assert_eq!(meaning("running"), Meaning::VmPower(VmPower::On));
        for paused in ["paused", "prelaunch", "io-error", "anything new"] {
            assert_eq!(meaning(paused), Meaning::VmPower(VmPower::Paused), "{paused}");
        }
        assert_eq!(meaning("shutdown"), Meaning::SwitchedOff);
        assert!(matches!(meaning("internal-error"), Meaning::Broken(why) if why.contains("KVM")));
        assert!(matches!(meaning("guest-panicked"), Meaning::Broken(why) if why.contains("panicked")));
    }
}
