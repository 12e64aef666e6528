//! The state of one simulated guest: its boot, its agent and the commands that the agent remembers.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use muster_types::guest::{AgentState, CommandKey, CommandOutput, CommandResult, GuestError, GuestReport};
use muster_types::time::now;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

use super::files::GuestFiles;
use super::shell::{MAX_OUTPUT, ShellResult};

/// The maximum size of output that is part of a command's result.
const MAX_INLINE_OUTPUT: usize = 32 << 10;

/// The maximum number of different command lines that are counted.
const MAX_COUNTED_LINES: usize = 1000;

/// The state of the connection to an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ConnectionState {
    /// Changes with every connection.
    pub(super) session: u64,
    pub(super) ready: bool,
    /// Requests are delayed until the agent responds again.
    pub(super) unresponsive: bool,
}

/// Waits for the end of a connection.
pub(super) async fn disconnected(connection: &mut watch::Receiver<ConnectionState>, session: u64) {
    // An error means that the guest was removed, which ends the connection as well.
    let _ = connection.wait_for(|connection| connection.session != session).await;
}

/// A command that is running or has exited. Dropping it kills the command.
#[derive(Debug)]
pub(super) struct GuestJob {
    /// The result, once the command has exited.
    pub(super) result: watch::Sender<Option<ShellResult>>,
    pub(super) task: AbortHandle,
}

impl Drop for GuestJob {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
pub(super) struct SimulatedGuest {
    pub(super) connection: watch::Sender<ConnectionState>,
    pub(super) paused: bool,
    /// `None` while the VM is off.
    boot_id: Option<String>,
    boot_time: f64,
    agent_start_time: f64,
    pub(super) files: GuestFiles,
    pub(super) jobs: BTreeMap<CommandKey, GuestJob>,
    /// The commands that were running when the agent was restarted.
    pub(super) lost_jobs: BTreeSet<CommandKey>,
    /// How often each command line was started.
    pub(super) executions: BTreeMap<String, u64>,
    /// The number of transfers so far.
    pub(super) transfers: u64,
}

impl SimulatedGuest {
    pub(super) fn new(name: &str) -> Self {
        Self {
            connection: watch::Sender::default(),
            paused: false,
            boot_id: None,
            boot_time: 0.0,
            agent_start_time: 0.0,
            files: GuestFiles::new(name),
            jobs: BTreeMap::new(),
            lost_jobs: BTreeSet::new(),
            executions: BTreeMap::new(),
            transfers: 0,
        }
    }

    /// Boots the guest, which discards all commands.
    pub(super) fn boot(&mut self) {
        self.jobs.clear();
        self.lost_jobs.clear();
        self.boot_id = Some(Uuid::new_v4().to_string());
        self.boot_time = now();
        self.connect();
    }

    /// Restarts the agent, which kills running commands. An agent that is not stateless keeps the results of finished ones.
    pub(super) fn restart_agent(&mut self, stateless: bool) {
        let Self { jobs, lost_jobs, .. } = self;
        jobs.retain(|key, job| {
            let keep = !stateless && job.result.borrow().is_some();
            if !keep {
                lost_jobs.insert(*key);
            }
            keep
        });
        self.connect();
    }

    fn connect(&mut self) {
        self.agent_start_time = now();
        self.connection.send_modify(|connection| {
            *connection = ConnectionState { session: connection.session + 1, ready: false, ..*connection }
        });
    }

    /// Recomputes whether the agent is unresponsive, by the script or because the VM is paused.
    pub(super) fn update_unresponsive(&self, by_script: bool) {
        let unresponsive = by_script || self.paused;
        self.connection.send_if_modified(|connection| {
            std::mem::replace(&mut connection.unresponsive, unresponsive) != unresponsive
        });
    }

    pub(super) fn is_on(&self) -> bool {
        self.boot_id.is_some()
    }

    /// Powers the guest off. Its files are kept.
    pub(super) fn power_off(&mut self) {
        self.jobs.clear();
        self.boot_id = None;
        self.paused = false;
        self.connection.send_modify(|connection| {
            *connection = ConnectionState { session: connection.session + 1, ..ConnectionState::default() }
        });
    }

    pub(super) fn report(&self, stateless: bool) -> GuestReport {
        let connection = *self.connection.borrow();
        let state = match connection {
            ConnectionState { ready: false, .. } => return GuestReport::default(),
            ConnectionState { unresponsive: true, .. } => AgentState::Unresponsive,
            ConnectionState { .. } => AgentState::Ready,
        };
        GuestReport {
            state,
            agent_start_time: Some(self.agent_start_time),
            system_boot_time: Some(self.boot_time),
            boot_id: self.boot_id.clone(),
            agent_version: Some(if stateless { "0.4.1".into() } else { env!("CARGO_PKG_VERSION").into() }),
        }
    }

    /// Returns an error unless a command that may have been sent during a boot can be resumed.
    pub(super) fn require_resumable(
        &self,
        key: CommandKey,
        sent_boot_id: &str,
        stateless: bool,
    ) -> Result<(), GuestError> {
        if self.boot_id.as_deref() != Some(sent_boot_id) {
            return Err(GuestError::Restarted("the guest was restarted".into()));
        }
        if stateless {
            return Err(GuestError::StatelessAgent);
        }
        if self.lost_jobs.contains(&key) {
            return Err(GuestError::Restarted("the agent was restarted".into()));
        }
        if self.jobs.contains_key(&key) { Ok(()) } else { Err(GuestError::UnknownCommand) }
    }

    pub(super) fn count_execution(&mut self, line: &str) {
        if self.executions.len() < MAX_COUNTED_LINES || self.executions.contains_key(line) {
            *self.executions.entry(line.to_owned()).or_default() += 1;
        }
    }

    /// Sets the result of a command.
    pub(super) fn finish_job(&self, key: CommandKey, result: ShellResult) {
        if let Some(job) = self.jobs.get(&key) {
            job.result.send_replace(Some(result));
        }
    }
}

/// Converts the result of a command to the agent's reply.
pub(super) fn command_result(result: &ShellResult, stateless: bool) -> CommandResult {
    let output = |bytes: &Vec<u8>| {
        let kept = truncated(bytes);
        if stateless || kept.len() <= MAX_INLINE_OUTPUT {
            return CommandOutput::Inline(Bytes::copy_from_slice(kept));
        }
        CommandOutput::Stored { size: kept.len() as u64, truncated: kept.len() < bytes.len() }
    };
    CommandResult { return_code: result.code, stdout: output(&result.stdout), stderr: output(&result.stderr) }
}

/// Returns the part of an output that an agent keeps.
pub(super) fn truncated(output: &[u8]) -> &[u8] {
    &output[..output.len().min(MAX_OUTPUT)]
}
