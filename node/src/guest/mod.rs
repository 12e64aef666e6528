//! The host side of the agent protocols. See docs/decisions/0022.
//!
//! A VM has an `AgentChannel` for each agent protocol that it offers; the `GuestRegistry` owns the channels and picks the
//! one to use. `v1` implements the protocol over a serial port, `v2` the one over a virtual socket.
//! Guests are not trusted: invalid data fails only the request that it answers, and memory use per guest is bounded.

mod boot;
mod channel;
mod registry;
mod text;
mod v1;
mod v2;

use std::sync::Arc;

use muster_types::guest::{
    CommandKey, CommandResult, GuestApi, GuestCommand, GuestFileInfo, GuestFuture, GuestReport,
    GuestTerminal, OutputName,
};
use muster_types::ids::InstanceId;
use muster_types::storage::ByteStream;
use muster_types::terminal::TerminalRequest;
use muster_types::vm::ChangeStream;
use serde_json::{Map, Value};

pub(crate) use self::channel::terminals_unsupported;
pub(crate) use self::registry::{GuestHandle, GuestRegistry};

/// The guests of the VMs on this host.
#[derive(Debug)]
pub(crate) struct LocalGuests {
    registry: Arc<GuestRegistry>,
}

impl LocalGuests {
    pub(crate) fn new(registry: Arc<GuestRegistry>) -> Self {
        Self { registry }
    }
}

impl GuestApi for LocalGuests {
    fn changes(&self) -> ChangeStream {
        self.registry.changes()
    }

    fn report(&self, id: InstanceId) -> Option<GuestReport> {
        self.registry.report(id)
    }

    fn facts(&self, id: InstanceId) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(async move { self.registry.client(id)?.facts().await })
    }

    fn execute<'a>(&'a self, id: InstanceId, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(async move { self.registry.client(id)?.execute(command).await })
    }

    fn output(&self, id: InstanceId, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream> {
        Box::pin(async move { self.registry.client(id)?.output(key, name).await })
    }

    fn forget(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async move { self.registry.client(id)?.forget(key).await })
    }

    fn cancel(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async move { self.registry.client(id)?.cancel(key).await })
    }

    fn put<'a>(
        &'a self,
        id: InstanceId,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()> {
        Box::pin(async move { self.registry.client(id)?.put(path, size, mode, data).await })
    }

    fn change_mode<'a>(&'a self, id: InstanceId, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(async move { self.registry.client(id)?.change_mode(path, mode).await })
    }

    fn get<'a>(&'a self, id: InstanceId, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(async move { self.registry.client(id)?.get(path).await })
    }

    fn terminal<'a>(
        &'a self,
        id: InstanceId,
        request: &'a TerminalRequest,
    ) -> GuestFuture<'a, GuestTerminal> {
        Box::pin(async move { self.registry.client(id)?.terminal(request).await })
    }
}
