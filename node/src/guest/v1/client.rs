//! The client for an agent that speaks protocol 1.

use std::sync::Arc;

use muster_types::guest::{
    CommandKey, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture, GuestTerminal,
    OutputName,
};
use muster_types::storage::ByteStream;
use muster_types::terminal::TerminalRequest;
use serde_json::{Map, Value, json};

use super::connection::Connection;
use super::{execute, get, put, terminal};
use crate::guest::channel::AgentClient;

#[derive(Debug)]
pub(super) struct V1Client {
    connection: Arc<Connection>,
}

impl V1Client {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection }
    }
}

impl AgentClient for V1Client {
    fn facts(&self) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(async {
            let mut reply = self.connection.request("gather-facts", json!({})).await?;
            if let Some(failure) = reply.failure() {
                return Err(failure);
            }
            let facts = reply.take_object("result");
            facts.ok_or_else(|| GuestError::Refused("the guest's agent reported no facts".into()))
        })
    }

    fn execute<'a>(&'a self, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(execute::execute(&self.connection, command))
    }

    fn output(&self, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream> {
        Box::pin(execute::output(&self.connection, key, name))
    }

    fn forget(&self, key: CommandKey) -> GuestFuture<'_, ()> {
        if self.connection.features().remembers_commands {
            let (_, unique) = self.connection.new_request_id();
            self.connection
                .send_now(&json!({ "command": "forget", "key": key.to_string(), "unique": unique }));
        }
        Box::pin(async { Ok(()) })
    }

    fn cancel(&self, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async move {
            if !self.connection.features().remembers_commands {
                return Err(GuestError::Refused("the guest's agent cannot cancel commands".into()));
            }
            let reply = self.connection.request("cancel", json!({ "key": key.to_string() })).await?;
            reply.failure().map_or(Ok(()), Err)
        })
    }

    fn put<'a>(
        &'a self,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()> {
        Box::pin(put::put(&self.connection, path, size, mode, data))
    }

    fn change_mode<'a>(&'a self, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(async move {
            let reply = self.connection.request("chmod", json!({ "path": path, "mode": mode })).await?;
            reply.failure().map_or(Ok(()), Err)
        })
    }

    fn get<'a>(&'a self, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(get::get(&self.connection, path))
    }

    fn terminal<'a>(&'a self, request: &'a TerminalRequest) -> GuestFuture<'a, GuestTerminal> {
        Box::pin(terminal::open(&self.connection, request))
    }
}
