//! The guests of simulated VMs: agents with in-memory files and a minimal shell. They do not survive the process.

mod files;
mod guest;
mod shell;
mod terminal;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use muster_types::guest::{
    CommandKey, CommandResult, GuestApi, GuestCommand, GuestError, GuestFileInfo, GuestFuture, GuestReport,
    GuestTerminal, OutputName,
};
use muster_types::ids::InstanceId;
use muster_types::storage::ByteStream;
use muster_types::terminal::TerminalRequest;
use muster_types::vm::{ChangeStream, VmPlan, VmPower};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::change_notifier::ChangeNotifier;
use crate::guest::terminals_unsupported;
use guest::{ConnectionState, GuestJob, SimulatedGuest, command_result, disconnected, truncated};
use shell::{ShellResult, ShellStep};
use transfer::{Throttle, download, next};

/// The error of requests whose connection ended.
const CONNECTION_LOST: &str = "the connection to the agent was lost";

/// The behaviour of simulated guests.
#[derive(Debug, Clone)]
pub struct GuestScript {
    /// The time that an agent takes to become ready, `None` for never.
    pub ready_after: Option<Duration>,
    /// Whether agents delay all requests until this is reset.
    pub unresponsive: bool,
    /// The rate of transfers, `None` for unlimited.
    pub bytes_per_second: Option<u64>,
    /// The number of bytes after which a transfer stalls.
    pub stall_after_bytes: Option<u64>,
    /// Whether agents do not remember commands.
    pub stateless_agent: bool,
}

impl Default for GuestScript {
    fn default() -> Self {
        Self {
            ready_after: Some(Duration::from_millis(50)),
            unresponsive: false,
            bytes_per_second: None,
            stall_after_bytes: None,
            stateless_agent: false,
        }
    }
}

/// The guests of a simulated node.
#[derive(Debug, Clone, Default)]
pub(super) struct SimulatedGuests(Arc<SharedGuests>);

#[derive(Debug, Default)]
struct SharedGuests {
    change_notifier: ChangeNotifier,
    state: Mutex<GuestsState>,
}

#[derive(Debug, Default)]
struct GuestsState {
    guests: BTreeMap<InstanceId, SimulatedGuest>,
    script: GuestScript,
}

impl SimulatedGuests {
    pub(super) fn set_script(&self, script: GuestScript) {
        let mut state = self.0.state.lock();
        state.guests.values().for_each(|guest| guest.update_unresponsive(script.unresponsive));
        state.script = script;
        let guests: Vec<InstanceId> = state.guests.keys().copied().collect();
        drop(state);
        guests.into_iter().for_each(|id| self.0.change_notifier.notify(id));
    }

    /// Applies a change of the power state of a VM.
    pub(super) fn apply_power(
        &self,
        id: InstanceId,
        before: &VmPower,
        power: &VmPower,
        plan: Option<&VmPlan>,
    ) {
        match (before, power, plan) {
            (VmPower::Paused, VmPower::On, _) => self.set_paused(id, false),
            (_, VmPower::On, Some(plan)) => self.power_on(plan),
            (_, VmPower::Paused, _) => self.set_paused(id, true),
            _ => self.power_off(id),
        }
    }

    /// Boots the guest of a VM. Without a side channel it is not accessible and not simulated.
    fn power_on(&self, plan: &VmPlan) {
        if plan.side_channels.is_empty() {
            return self.remove(plan.id);
        }
        self.0.state.lock().guests.entry(plan.id).or_insert_with(|| SimulatedGuest::new(&plan.name));
        self.reboot(plan.id);
    }

    /// Reboots a guest.
    pub(super) fn reboot(&self, id: InstanceId) {
        self.start_agent(id, |guest, _| guest.boot());
    }

    /// Restarts the agent of a guest.
    pub(super) fn restart_agent(&self, id: InstanceId) {
        self.start_agent(id, |guest, script| guest.restart_agent(script.stateless_agent));
    }

    /// Calls `start`, which boots a guest or restarts its agent, and makes the agent ready after the delay of the script.
    fn start_agent(&self, id: InstanceId, start: impl FnOnce(&mut SimulatedGuest, &GuestScript)) {
        let mut state = self.0.state.lock();
        let GuestsState { guests, script } = &mut *state;
        let Some(guest) = guests.get_mut(&id) else { return };
        start(guest, script);
        guest.update_unresponsive(script.unresponsive);
        let (session, ready_after) = (guest.connection.borrow().session, script.ready_after);
        drop(state);
        self.0.change_notifier.notify(id);
        // Without a Tokio runtime there is no timer, and the agent never becomes ready.
        let (Some(delay), Ok(handle)) = (ready_after, Handle::try_current()) else { return };
        let guests = self.clone();
        handle.spawn(async move {
            tokio::time::sleep(delay).await;
            guests.set_ready(id, session);
        });
    }

    fn set_ready(&self, id: InstanceId, session: u64) {
        if let Some(guest) = self.0.state.lock().guests.get(&id) {
            guest.connection.send_if_modified(|connection| {
                let is_current = connection.session == session;
                connection.ready |= is_current;
                is_current
            });
        }
        self.0.change_notifier.notify(id);
    }

    /// Pauses or resumes a guest.
    fn set_paused(&self, id: InstanceId, paused: bool) {
        let mut state = self.0.state.lock();
        let unresponsive = state.script.unresponsive;
        if let Some(guest) = state.guests.get_mut(&id) {
            guest.paused = paused;
            guest.update_unresponsive(unresponsive);
        }
        drop(state);
        self.0.change_notifier.notify(id);
    }

    /// Powers a guest off.
    pub(super) fn power_off(&self, id: InstanceId) {
        if let Some(guest) = self.0.state.lock().guests.get_mut(&id) {
            guest.power_off();
        }
        self.0.change_notifier.notify(id);
    }

    pub(super) fn remove(&self, id: InstanceId) {
        self.0.state.lock().guests.remove(&id);
        self.0.change_notifier.notify(id);
    }

    /// Returns how often each command line was started in a guest.
    pub(super) fn executions(&self, id: InstanceId) -> BTreeMap<String, u64> {
        self.0.state.lock().guests.get(&id).map(|guest| guest.executions.clone()).unwrap_or_default()
    }

    /// Returns the number of transfers with a guest.
    pub(super) fn transfers(&self, id: InstanceId) -> u64 {
        self.0.state.lock().guests.get(&id).map_or(0, |guest| guest.transfers)
    }

    /// Waits until the agent of a guest is responsive. Returns the connection and its number.
    async fn connect(&self, id: InstanceId) -> Result<(watch::Receiver<ConnectionState>, u64), GuestError> {
        let connection = self.0.state.lock().guests.get(&id).map(|guest| guest.connection.subscribe());
        let mut connection = connection.ok_or_else(|| unreachable("the guest has no agent"))?;
        let found =
            connection.wait_for(|connection| !connection.unresponsive).await.map(|connection| *connection);
        match found {
            Ok(ConnectionState { session, ready: true, .. }) => Ok((connection, session)),
            Ok(_) => Err(unreachable("the agent is not ready")),
            Err(_) => Err(unreachable("the VM was removed")),
        }
    }

    /// Performs a request in a guest once its agent is responsive.
    async fn request<T>(
        &self,
        id: InstanceId,
        perform: impl FnOnce(&mut SimulatedGuest, &GuestScript) -> Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        let (_, session) = self.connect(id).await?;
        let mut state = self.0.state.lock();
        let GuestsState { guests, script } = &mut *state;
        let guest = guests.get_mut(&id).filter(|guest| guest.connection.borrow().session == session);
        perform(guest.ok_or_else(|| unreachable(CONNECTION_LOST))?, script)
    }

    async fn execute_command(
        &self,
        id: InstanceId,
        command: &GuestCommand,
    ) -> Result<CommandResult, GuestError> {
        let (mut connection, session) = self.connect(id).await?;
        let guests = self.clone();
        let mut result = self
            .request(id, |guest, script| {
                let (key, stateless) = (command.key, script.stateless_agent);
                if let Some(boot_id) = &command.sent_boot_id {
                    guest.require_resumable(key, boot_id, stateless)?;
                }
                let job = guest.jobs.get(&key).filter(|job| !stateless || job.result.borrow().is_none());
                if let Some(job) = job {
                    return Ok(job.result.subscribe());
                }
                guest.count_execution(&command.line);
                let (sender, result) = watch::channel(None);
                let task = tokio::spawn(guests.run_line(id, key, command.line.clone())).abort_handle();
                guest.jobs.insert(key, GuestJob { result: sender, task });
                Ok(result)
            })
            .await?;
        let result = tokio::select! {
            result = result.wait_for(Option::is_some) => result.ok().and_then(|result| result.clone()),
            () = disconnected(&mut connection, session) => None,
        };
        let result = result.ok_or_else(|| unreachable(CONNECTION_LOST))?;
        // The reply, too, is delayed while the agent is unresponsive.
        self.request(id, |_, script| Ok(command_result(&result, script.stateless_agent))).await
    }

    /// Runs a command line to its end.
    async fn run_line(self, id: InstanceId, key: CommandKey, line: String) {
        let mut result = ShellResult::default();
        let commands = shell::parse(&line).unwrap_or_else(|error| {
            let stderr = format!("{error}\n").into_bytes();
            result = ShellResult { code: 2, stderr, ..ShellResult::default() };
            Vec::new()
        });
        for command in commands {
            let step = match self.0.state.lock().guests.get_mut(&id) {
                Some(guest) => shell::run(&command, &mut guest.files, &mut result),
                None => return,
            };
            match step {
                ShellStep::Next => {}
                ShellStep::Wait(duration) => tokio::time::sleep(duration).await,
                ShellStep::Reboot => return self.reboot(id),
                ShellStep::Exit => break,
            }
        }
        if let Some(guest) = self.0.state.lock().guests.get(&id) {
            guest.finish_job(key, result);
        }
    }

    async fn put_file(
        &self,
        id: InstanceId,
        path: &str,
        size: u64,
        mode: Option<u32>,
        mut data: ByteStream,
    ) -> Result<(), GuestError> {
        let (mut connection, session) = self.connect(id).await?;
        if size > files::MAX_TOTAL_SIZE {
            return Err(GuestError::Refused(format!("No space left on device: {path}")));
        }
        let mut throttle = self.start_transfer(id);
        let mut content: Vec<u8> = Vec::new();
        let transfer = async {
            while let Some(chunk) = next(&mut data).await {
                let chunk = chunk.map_err(|error| GuestError::HostFailed(error.to_string()))?;
                throttle.transfer(chunk.len()).await;
                content.extend_from_slice(&chunk);
                if content.len() as u64 > size {
                    break;
                }
            }
            match content.len() as u64 == size {
                true => Ok(()),
                false => Err(GuestError::HostFailed(format!(
                    "the file does not have its announced size of {size} bytes"
                ))),
            }
        };
        tokio::select! {
            transferred = transfer => transferred?,
            () = disconnected(&mut connection, session) => return Err(unreachable(CONNECTION_LOST)),
        }
        let write = |files: &mut files::GuestFiles| {
            files.write(path, content.into())?;
            mode.map_or(Ok(()), |mode| files.change_mode(path, mode))
        };
        self.request(id, |guest, _| write(&mut guest.files).map_err(GuestError::Refused)).await
    }

    async fn get_file(&self, id: InstanceId, path: &str) -> Result<(GuestFileInfo, ByteStream), GuestError> {
        let (connection, session) = self.connect(id).await?;
        let found = self.request(id, |guest, _| guest.files.read(path).map_err(GuestError::Refused)).await;
        let (info, data) = found?;
        Ok((info, download(data, self.start_transfer(id), connection, session)))
    }

    /// Counts a transfer and returns its throttle.
    fn start_transfer(&self, id: InstanceId) -> Throttle {
        let mut state = self.0.state.lock();
        if let Some(guest) = state.guests.get_mut(&id) {
            guest.transfers += 1;
        }
        Throttle::new(state.script.bytes_per_second, state.script.stall_after_bytes)
    }
}

fn unreachable(reason: &str) -> GuestError {
    GuestError::Unreachable(reason.to_owned())
}

/// Returns the facts that every simulated guest reports.
fn facts() -> Map<String, Value> {
    let facts = json!({
        "distribution": {"id": "simulated", "name": "Muster simulated guest", "version": "1"},
        "mounts": [{"device": "/dev/vda1", "mount_point": "/", "vfs_type": "ext4"}],
        "ssh-host-keys": {"ssh-ed25519": "AAAAC3NzaC1lZDI1NTE5AAAAIHNpbXVsYXRlZC1zaW11bGF0ZWQtc2ltdWxhdGVk"},
    });
    let Value::Object(facts) = facts else { unreachable!("the literal is an object") };
    facts
}

impl GuestApi for SimulatedGuests {
    fn changes(&self) -> ChangeStream {
        self.0.change_notifier.subscribe()
    }

    fn report(&self, id: InstanceId) -> Option<GuestReport> {
        let state = self.0.state.lock();
        let guest = state.guests.get(&id).filter(|guest| guest.is_on())?;
        Some(guest.report(state.script.stateless_agent))
    }

    fn facts(&self, id: InstanceId) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(self.request(id, |_, _| Ok(facts())))
    }

    fn execute<'a>(&'a self, id: InstanceId, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(self.execute_command(id, command))
    }

    fn output(&self, id: InstanceId, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream> {
        Box::pin(async move {
            let (connection, session) = self.connect(id).await?;
            let output = self.request(id, |guest, _| {
                let result = guest.jobs.get(&key).and_then(|job| job.result.borrow().clone());
                let result = result.ok_or(GuestError::UnknownCommand)?;
                Ok(match name {
                    OutputName::Stdout => result.stdout,
                    OutputName::Stderr => result.stderr,
                })
            });
            let output = Bytes::copy_from_slice(truncated(&output.await?));
            Ok(download(output, self.start_transfer(id), connection, session))
        })
    }

    fn forget(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        self.cancel(id, key)
    }

    fn cancel(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(self.request(id, move |guest, _| {
            guest.jobs.remove(&key);
            guest.lost_jobs.remove(&key);
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
        Box::pin(self.put_file(id, path, size, mode, data))
    }

    fn change_mode<'a>(&'a self, id: InstanceId, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(
            self.request(id, move |guest, _| {
                guest.files.change_mode(path, mode).map_err(GuestError::Refused)
            }),
        )
    }

    fn get<'a>(&'a self, id: InstanceId, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(self.get_file(id, path))
    }

    fn terminal<'a>(
        &'a self,
        id: InstanceId,
        request: &'a TerminalRequest,
    ) -> GuestFuture<'a, GuestTerminal> {
        Box::pin(async move {
            let (connection, session) = self.connect(id).await?;
            let has_terminals = |_: &mut SimulatedGuest, script: &GuestScript| match script.stateless_agent {
                true => Err(terminals_unsupported()),
                false => Ok(()),
            };
            self.request(id, has_terminals).await?;
            Ok(terminal::open(request, connection, session))
        })
    }
}
