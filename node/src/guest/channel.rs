//! The state of one agent channel: the last report of the guest and the client that talks to its agent.

use std::fmt;
use std::sync::Arc;

use muster_types::Error;
use muster_types::guest::{
    AgentState, CommandKey, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture, GuestReport,
    GuestTerminal, OutputName,
};
use muster_types::ids::InstanceId;
use muster_types::storage::ByteStream;
use muster_types::terminal::TerminalRequest;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::change_notifier::ChangeNotifier;

/// Why a session ended when its VM was stopped or removed.
pub(super) const VM_DETACHED: &str = "the VM is no longer attached";

/// A client for the agent of one guest: [`muster_types::guest::GuestApi`] without the instance ID.
pub(super) trait AgentClient: fmt::Debug + Send + Sync {
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

    fn terminal<'a>(&'a self, request: &'a TerminalRequest) -> GuestFuture<'a, GuestTerminal>;
}

/// Converts an error to the one that a [`ByteStream`] reports in its place.
pub(super) fn stream_error(error: &GuestError) -> Error {
    let message = error.to_string();
    match error {
        GuestError::Unreachable(_) | GuestError::HostFailed(_) => Error::Unavailable(message),
        GuestError::Restarted(_)
        | GuestError::UnknownCommand
        | GuestError::StatelessAgent
        | GuestError::Refused(_) => Error::Conflict(message),
    }
}

/// Returns the error of agents without terminals.
pub(crate) fn terminals_unsupported() -> GuestError {
    GuestError::Refused(
        "the guest's agent does not support terminals: install muster-agent 1.1 or newer in the guest, or use the console"
            .into(),
    )
}

/// A channel to the agent of a guest. A VM has one for each agent protocol that it offers.
#[derive(Debug)]
pub(super) struct AgentChannel {
    id: InstanceId,
    change_notifier: ChangeNotifier,
    state: Mutex<ChannelState>,
    vm_status: watch::Sender<VmStatus>,
}

#[derive(Debug, Default)]
struct ChannelState {
    report: GuestReport,
    client: Option<Arc<dyn AgentClient>>,
}

/// The parts of a VM's state that its agent sessions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct VmStatus {
    /// A paused guest cannot answer, so no timeouts apply to it.
    pub(super) paused: bool,
    pub(super) reset_count: u64,
}

impl AgentChannel {
    pub(super) fn new(id: InstanceId, change_notifier: ChangeNotifier) -> Self {
        Self { id, change_notifier, state: Mutex::default(), vm_status: watch::Sender::default() }
    }

    pub(super) fn id(&self) -> InstanceId {
        self.id
    }

    pub(super) fn report(&self) -> GuestReport {
        let mut report = self.state.lock().report.clone();
        if self.vm_status.borrow().paused {
            // A request would be executed only after the VM resumes, when its caller may have timed out.
            report.state = AgentState::NotReady("instance paused".into());
        }
        report
    }

    /// Updates the report, and notifies the subscriber if it changed.
    pub(super) fn update_report(&self, update: impl FnOnce(&mut GuestReport)) {
        {
            let mut state = self.state.lock();
            let before = state.report.clone();
            update(&mut state.report);
            if state.report == before {
                return;
            }
            if state.report.state != before.state {
                tracing::info!(instance = %self.id, state = %state.report.state, "guest agent state changed");
            }
        }
        self.change_notifier.notify(self.id);
    }

    pub(super) fn set_client(&self, client: Option<Arc<dyn AgentClient>>) {
        self.state.lock().client = client;
    }

    pub(super) fn client(&self) -> Option<Arc<dyn AgentClient>> {
        self.state.lock().client.clone()
    }

    pub(super) fn vm_status(&self) -> watch::Receiver<VmStatus> {
        self.vm_status.subscribe()
    }

    pub(super) fn set_paused(&self, paused: bool) {
        let changed = self.vm_status.send_if_modified(|status| {
            let changed = status.paused != paused;
            status.paused = paused;
            changed
        });
        if changed {
            self.change_notifier.notify(self.id);
        }
    }

    pub(super) fn notify_reset(&self) {
        self.vm_status.send_modify(|status| status.reset_count += 1);
    }
}
