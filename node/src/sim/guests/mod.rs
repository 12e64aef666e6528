//! The guests of simulated machines: agents that answer, with files in memory and a shell of a few commands.
//!
//! They live with this process: the end of it is that of their machines.

mod files;
mod guest;
mod shell;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use muster_types::guest::{
    CommandKey, CommandResult, GuestApi, GuestCommand, GuestError, GuestFileInfo, GuestFuture, GuestReport,
    OutputName,
};
use muster_types::ids::InstanceId;
use muster_types::storage::ByteStream;
use muster_types::vm::{ChangeStream, VmPlan, VmPower};
use serde_json::{Map, Value, json};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::changes::ChangeNotifier;
use guest::{Guest, Job, Link, broken, executed, kept};
use shell::{Ran, Step};
use transfer::{Pace, next, sent};

/// What happens in the guests of simulated machines, for tests and demonstrations.
#[derive(Debug, Clone)]
pub struct GuestScript {
    /// How long an agent takes to be ready; nothing: it never is.
    pub ready_after: Option<Duration>,
    /// Whether agents answer nothing for now, and do what they were told only afterwards.
    pub silent: bool,
    /// How fast transfers are; nothing: as fast as can be.
    pub bytes_per_second: Option<u64>,
    /// After how many bytes a transfer stands still.
    pub stalls_after: Option<u64>,
    /// Whether agents remember no commands.
    pub forgetful: bool,
}

impl Default for GuestScript {
    fn default() -> Self {
        Self {
            ready_after: Some(Duration::from_millis(50)),
            silent: false,
            bytes_per_second: None,
            stalls_after: None,
            forgetful: false,
        }
    }
}

/// The guests of a simulated node.
#[derive(Debug, Clone, Default)]
pub(super) struct SimulatedGuests(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    notifier: ChangeNotifier,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    guests: BTreeMap<InstanceId, Guest>,
    script: GuestScript,
}

impl SimulatedGuests {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn script(&self, script: GuestScript) {
        let mut state = self.state();
        state.guests.values().for_each(|guest| guest.set_deaf(script.silent));
        state.script = script;
        let guests: Vec<InstanceId> = state.guests.keys().copied().collect();
        drop(state);
        guests.into_iter().for_each(|id| self.0.notifier.notify(id));
    }

    /// The power of a machine changed.
    pub(super) fn follow(&self, id: InstanceId, before: &VmPower, power: &VmPower, plan: Option<&VmPlan>) {
        match (before, power, plan) {
            (VmPower::Paused, VmPower::On, _) => self.set_paused(id, false),
            (_, VmPower::On, Some(plan)) => self.switched_on(plan),
            (_, VmPower::Paused, _) => self.set_paused(id, true),
            _ => self.switched_off(id),
        }
    }

    /// A machine was switched on. Without a way for an agent it has no guest that anybody hears of.
    fn switched_on(&self, plan: &VmPlan) {
        if plan.side_channels.is_empty() {
            return self.removed(plan.id);
        }
        self.state().guests.entry(plan.id).or_insert_with(|| Guest::new(&plan.name));
        self.restart(plan.id);
    }

    /// Starts a guest again.
    pub(super) fn restart(&self, id: InstanceId) {
        self.begin(id, |guest, _| guest.boot());
    }

    /// Starts the agent of a guest again.
    pub(super) fn restart_agent(&self, id: InstanceId) {
        self.begin(id, |guest, script| guest.restart_agent(script.forgetful));
    }

    /// Lets something begin that ends with an agent that is ready.
    fn begin(&self, id: InstanceId, how: impl FnOnce(&mut Guest, &GuestScript)) {
        let mut state = self.state();
        let State { guests, script } = &mut *state;
        let Some(guest) = guests.get_mut(&id) else { return };
        how(guest, script);
        guest.set_deaf(script.silent);
        let (session, ready_after) = (guest.link.borrow().session, script.ready_after);
        drop(state);
        self.0.notifier.notify(id);
        let (Some(time), Ok(handle)) = (ready_after, Handle::try_current()) else { return };
        let own = self.clone();
        handle.spawn(async move {
            tokio::time::sleep(time).await;
            own.set_ready(id, session);
        });
    }

    fn set_ready(&self, id: InstanceId, session: u64) {
        if let Some(guest) = self.state().guests.get(&id) {
            guest.link.send_if_modified(|link| {
                let meant = link.session == session;
                link.ready |= meant;
                meant
            });
        }
        self.0.notifier.notify(id);
    }

    /// A machine was paused or goes on.
    fn set_paused(&self, id: InstanceId, paused: bool) {
        let mut state = self.state();
        let silent = state.script.silent;
        if let Some(guest) = state.guests.get_mut(&id) {
            guest.paused = paused;
            guest.set_deaf(silent);
        }
        drop(state);
        self.0.notifier.notify(id);
    }

    /// A machine is off.
    pub(super) fn switched_off(&self, id: InstanceId) {
        if let Some(guest) = self.state().guests.get_mut(&id) {
            guest.switch_off();
        }
        self.0.notifier.notify(id);
    }

    pub(super) fn removed(&self, id: InstanceId) {
        self.state().guests.remove(&id);
        self.0.notifier.notify(id);
    }

    /// How often each command line was started in a guest.
    pub(super) fn executions(&self, id: InstanceId) -> BTreeMap<String, u64> {
        self.state().guests.get(&id).map(|guest| guest.executions.clone()).unwrap_or_default()
    }

    /// How many transfers were begun with a guest.
    pub(super) fn transfers(&self, id: InstanceId) -> u64 {
        self.state().guests.get(&id).map_or(0, |guest| guest.transfers)
    }

    /// Ends when the guest hears, with its connection.
    async fn reach(&self, id: InstanceId) -> Result<(watch::Receiver<Link>, u64), GuestError> {
        let link = self.state().guests.get(&id).map(|guest| guest.link.subscribe());
        let mut link = link.ok_or_else(|| away("no contact"))?;
        let found = link.wait_for(|link| !link.deaf).await.map(|link| *link);
        match found {
            Ok(Link { session, ready: true, .. }) => Ok((link, session)),
            Ok(_) => Err(away("the agent is not ready")),
            Err(_) => Err(away("the machine is gone")),
        }
    }

    /// Does something in a guest that hears.
    async fn ask<T>(
        &self,
        id: InstanceId,
        what: impl FnOnce(&mut Guest, &GuestScript) -> Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        let (_, session) = self.reach(id).await?;
        let mut state = self.state();
        let State { guests, script } = &mut *state;
        let guest = guests.get_mut(&id).filter(|guest| guest.link.borrow().session == session);
        what(guest.ok_or_else(|| away("the connection broke"))?, script)
    }

    async fn execute_now(&self, id: InstanceId, command: &GuestCommand) -> Result<CommandResult, GuestError> {
        let (mut link, session) = self.reach(id).await?;
        let own = self.clone();
        let mut result = self
            .ask(id, |guest, script| {
                let (key, forgetful) = (command.key, script.forgetful);
                if let Some(boot) = &command.again {
                    guest.require_known(key, boot, forgetful)?;
                }
                let known = guest.jobs.get(&key).filter(|job| !forgetful || job.ran.borrow().is_none());
                if let Some(job) = known {
                    return Ok(job.ran.subscribe());
                }
                guest.count(&command.line);
                let (ran, result) = watch::channel(None);
                let running = tokio::spawn(own.run(id, key, command.line.clone())).abort_handle();
                guest.jobs.insert(key, Job { ran, running: Some(running) });
                Ok(result)
            })
            .await?;
        let ran = tokio::select! {
            ran = result.wait_for(Option::is_some) => ran.ok().and_then(|ran| ran.clone()),
            () = broken(&mut link, session) => None,
        };
        let ran = ran.ok_or_else(|| away("the connection broke"))?;
        // What it says is heard only by then.
        self.ask(id, |_, script| Ok(executed(&ran, script.forgetful))).await
    }

    /// What a command does, until it has ended.
    async fn run(self, id: InstanceId, key: CommandKey, line: String) {
        let mut ran = Ran::default();
        let commands = shell::commands(&line).unwrap_or_else(|why| {
            ran = Ran { code: 2, stderr: format!("{why}\n").into_bytes(), ..Ran::default() };
            Vec::new()
        });
        for command in commands {
            let step = match self.state().guests.get_mut(&id) {
                Some(guest) => shell::step(&command, &mut guest.files, &mut ran),
                None => return,
            };
            match step {
                Step::Next => {}
                Step::Wait(time) => tokio::time::sleep(time).await,
                Step::Reboot => return self.restart(id),
                Step::End => break,
            }
        }
        if let Some(guest) = self.state().guests.get(&id) {
            guest.end(key, ran);
        }
    }

    async fn put_now(
        &self,
        id: InstanceId,
        path: &str,
        size: u64,
        mode: Option<u32>,
        mut data: ByteStream,
    ) -> Result<(), GuestError> {
        let (mut link, session) = self.reach(id).await?;
        if size > files::MOST {
            return Err(GuestError::Refused(format!("No space left on device: {path}")));
        }
        let mut pace = self.pace(id);
        let mut whole: Vec<u8> = Vec::new();
        let taken = async {
            while let Some(piece) = next(&mut data).await {
                let piece = piece.map_err(|error| GuestError::Host(error.to_string()))?;
                pace.pass(piece.len()).await;
                whole.extend_from_slice(&piece);
                if whole.len() as u64 > size {
                    break;
                }
            }
            match whole.len() as u64 == size {
                true => Ok(()),
                false => {
                    Err(GuestError::Host(format!("the file has not the {size} bytes that it should have")))
                }
            }
        };
        tokio::select! {
            taken = taken => taken?,
            () = broken(&mut link, session) => return Err(away("the connection broke")),
        }
        let write = |files: &mut files::Files| {
            files.write(path, whole.into())?;
            mode.map_or(Ok(()), |mode| files.change_mode(path, mode))
        };
        self.ask(id, |guest, _| write(&mut guest.files).map_err(GuestError::Refused)).await
    }

    async fn get_now(&self, id: InstanceId, path: &str) -> Result<(GuestFileInfo, ByteStream), GuestError> {
        let (link, session) = self.reach(id).await?;
        let found = self.ask(id, |guest, _| guest.files.read(path).map_err(GuestError::Refused)).await;
        let (facts, data) = found?;
        Ok((facts, sent(data, self.pace(id), link, session)))
    }

    /// How fast a transfer is that begins now.
    fn pace(&self, id: InstanceId) -> Pace {
        let mut state = self.state();
        if let Some(guest) = state.guests.get_mut(&id) {
            guest.transfers += 1;
        }
        Pace::new(state.script.bytes_per_second, state.script.stalls_after)
    }
}

fn away(why: &str) -> GuestError {
    GuestError::Away(why.to_owned())
}

/// What guests say of themselves.
fn facts() -> Map<String, Value> {
    let facts = json!({
        "distribution": {"id": "simulated", "name": "Muster simulated guest", "version": "1"},
        "mounts": [{"device": "/dev/vda1", "mount_point": "/", "vfs_type": "ext4"}],
        "ssh-host-keys": {"ssh-ed25519": "AAAAC3NzaC1lZDI1NTE5AAAAIHNpbXVsYXRlZC1zaW11bGF0ZWQtc2ltdWxhdGVk"},
    });
    match facts {
        Value::Object(facts) => facts,
        _ => Map::new(),
    }
}

impl GuestApi for SimulatedGuests {
    fn changes(&self) -> ChangeStream {
        self.0.notifier.subscribe()
    }

    fn report(&self, id: InstanceId) -> Option<GuestReport> {
        let state = self.state();
        let guest = state.guests.get(&id).filter(|guest| guest.is_on())?;
        Some(guest.report(state.script.forgetful))
    }

    fn facts(&self, id: InstanceId) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(self.ask(id, |_, _| Ok(facts())))
    }

    fn execute<'a>(&'a self, id: InstanceId, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(self.execute_now(id, command))
    }

    fn output(&self, id: InstanceId, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream> {
        Box::pin(async move {
            let (link, session) = self.reach(id).await?;
            let output = self.ask(id, |guest, _| {
                let ran = guest.jobs.get(&key).and_then(|job| job.ran.borrow().clone());
                let ran = ran.ok_or(GuestError::Unknown)?;
                Ok(match name {
                    OutputName::Stdout => ran.stdout,
                    OutputName::Stderr => ran.stderr,
                })
            });
            let output = Bytes::copy_from_slice(kept(&output.await?));
            Ok(sent(output, self.pace(id), link, session))
        })
    }

    fn forget(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        self.cancel(id, key)
    }

    fn cancel(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(self.ask(id, move |guest, _| {
            guest.jobs.remove(&key);
            guest.lost.remove(&key);
            Ok(())
        }))
    }

    fn put<'a>(
        &'a self,
        id: InstanceId,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()> {
        Box::pin(self.put_now(id, path, size, mode, data))
    }

    fn change_mode<'a>(&'a self, id: InstanceId, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(
            self.ask(id, move |guest, _| guest.files.change_mode(path, mode).map_err(GuestError::Refused)),
        )
    }

    fn get<'a>(&'a self, id: InstanceId, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(self.get_now(id, path))
    }
}
