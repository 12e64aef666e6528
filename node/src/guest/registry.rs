//! The agent channels of all running VMs.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use muster_types::guest::{AgentState, GuestError, GuestReport};
use muster_types::ids::InstanceId;
use muster_types::instance::SideChannel;
use muster_types::vm::ChangeStream;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::channel::{AgentChannel, AgentClient};
use super::{v1, v2};
use crate::change_notifier::ChangeNotifier;

/// The agent channels of all VMs that are running and have one.
#[derive(Debug, Default)]
pub(crate) struct GuestRegistry {
    /// One channel per protocol that the VM offers, in order of preference.
    channels: Mutex<HashMap<InstanceId, Vec<Arc<AgentChannel>>>>,
    change_notifier: ChangeNotifier,
}

/// Keeps the agent channels of one VM open until it is dropped.
#[derive(Debug)]
pub(crate) struct GuestHandle {
    registry: Arc<GuestRegistry>,
    id: InstanceId,
    channels: Vec<Arc<AgentChannel>>,
    tasks: Vec<AbortHandle>,
}

impl GuestRegistry {
    /// Connects to the agent of a VM whose sockets are in `vm_dir` and whose vsock context ID is `vsock_cid`. Returns
    /// `None` if the VM has no agent channel.
    pub(crate) fn attach(
        self: &Arc<Self>,
        id: InstanceId,
        vm_dir: &Path,
        side_channels: &[SideChannel],
        vsock_cid: Option<u32>,
    ) -> Option<GuestHandle> {
        if side_channels.is_empty() {
            return None;
        }
        let mut channels = Vec::new();
        let mut tasks = Vec::new();
        for side_channel in SideChannel::ALL.iter().filter(|channel| side_channels.contains(channel)) {
            let channel = Arc::new(AgentChannel::new(id, self.change_notifier.clone()));
            match side_channel {
                SideChannel::Agent => {
                    let sessions = v1::run_sessions(channel.clone(), vm_dir.to_owned());
                    tasks.push(tokio::spawn(sessions).abort_handle());
                }
                // Without a context ID, for example on a host without vhost-vsock, the state stays `NoContact`.
                SideChannel::Agent2 => tasks.extend(vsock_cid.map(|cid| {
                    let sessions = v2::run_sessions(channel.clone(), v2::AgentAddress::Vsock(cid));
                    tokio::spawn(sessions).abort_handle()
                })),
            }
            channels.push(channel);
        }
        self.channels.lock().insert(id, channels.clone());
        self.change_notifier.notify(id);
        Some(GuestHandle { registry: self.clone(), id, channels, tasks })
    }

    pub(super) fn changes(&self) -> ChangeStream {
        self.change_notifier.subscribe()
    }

    pub(super) fn report(&self, id: InstanceId) -> Option<GuestReport> {
        self.preferred_channel(id).map(|channel| channel.report())
    }

    /// Returns the client that is connected to the agent of a guest.
    pub(super) fn client(&self, id: InstanceId) -> Result<Arc<dyn AgentClient>, GuestError> {
        let not_connected = || GuestError::Unreachable("there is no connection to the guest's agent".into());
        self.preferred_channel(id).and_then(|channel| channel.client()).ok_or_else(not_connected)
    }

    /// Returns the first channel whose agent is ready, or else the first one on which an agent has sent data.
    fn preferred_channel(&self, id: InstanceId) -> Option<Arc<AgentChannel>> {
        let channels = self.channels.lock();
        let channels = channels.get(&id)?;
        let ready = channels.iter().find(|channel| channel.report().state.is_ready());
        let contacted = || channels.iter().find(|channel| channel.report().state != AgentState::NoContact);
        ready.or_else(contacted).or(channels.first()).cloned()
    }
}

impl GuestHandle {
    /// Records that the VM was paused or resumed.
    pub(crate) fn set_paused(&self, paused: bool) {
        for channel in &self.channels {
            channel.set_paused(paused);
        }
    }

    /// Records that the VM was reset: its sessions end, and their requests fail.
    pub(crate) fn notify_reset(&self) {
        for channel in &self.channels {
            channel.notify_reset();
        }
    }
}

impl Drop for GuestHandle {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        for channel in &self.channels {
            channel.set_client(None);
        }
        {
            let mut registered = self.registry.channels.lock();
            // The VM may have been started again since, with new channels.
            let is_own = |channels: &Vec<Arc<AgentChannel>>| {
                channels.iter().zip(&self.channels).all(|(registered, own)| Arc::ptr_eq(registered, own))
            };
            if registered.get(&self.id).is_some_and(is_own) {
                registered.remove(&self.id);
            }
        }
        self.registry.change_notifier.notify(self.id);
    }
}
