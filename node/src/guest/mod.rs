//! The agents inside the machines of this node.
//!
//! `contact` is what is known of one guest and of whoever speaks with it; `v1` speaks the protocol of the serial port,
//! `v2` that of the virtual socket.
//! Whatever a guest sends harms nothing but what was asked of it, and takes a bounded amount of memory.

mod boot;
mod contact;
mod text;
mod v1;
mod v2;

use std::sync::Arc;

use muster_types::guest::{
    CommandKey, CommandResult, GuestApi, GuestCommand, GuestFileInfo, GuestFuture, GuestReport, OutputName,
};
use muster_types::ids::InstanceId;
use muster_types::storage::ByteStream;
use muster_types::vm::ChangeStream;
use serde_json::{Map, Value};

pub(crate) use self::contact::{Contact, Contacts};

/// The guests of this node.
#[derive(Debug)]
pub(crate) struct LocalGuests {
    contacts: Arc<Contacts>,
}

impl LocalGuests {
    pub(crate) fn new(contacts: Arc<Contacts>) -> Self {
        Self { contacts }
    }
}

impl GuestApi for LocalGuests {
    fn changes(&self) -> ChangeStream {
        self.contacts.changes()
    }

    fn report(&self, id: InstanceId) -> Option<GuestReport> {
        self.contacts.report(id)
    }

    fn facts(&self, id: InstanceId) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(async move { self.contacts.speaker(id)?.facts().await })
    }

    fn execute<'a>(&'a self, id: InstanceId, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(async move { self.contacts.speaker(id)?.execute(command).await })
    }

    fn output(&self, id: InstanceId, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream> {
        Box::pin(async move { self.contacts.speaker(id)?.output(key, name).await })
    }

    fn forget(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async move { self.contacts.speaker(id)?.forget(key).await })
    }

    fn cancel(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async move { self.contacts.speaker(id)?.cancel(key).await })
    }

    fn put<'a>(
        &'a self,
        id: InstanceId,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()> {
        Box::pin(async move { self.contacts.speaker(id)?.put(path, size, mode, data).await })
    }

    fn change_mode<'a>(&'a self, id: InstanceId, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(async move { self.contacts.speaker(id)?.change_mode(path, mode).await })
    }

    fn get<'a>(&'a self, id: InstanceId, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(async move { self.contacts.speaker(id)?.get(path).await })
    }
}
