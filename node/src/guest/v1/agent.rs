//! The agent at the other end of a line, and what it can be asked.

use std::sync::Arc;

use muster_types::guest::{
    CommandKey, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture, OutputName,
};
use muster_types::storage::ByteStream;
use serde_json::{Map, Value, json};

use super::line::Line;
use super::{execute, get, put};
use crate::guest::contact::Speaker;

#[derive(Debug)]
pub(super) struct Agent {
    line: Arc<Line>,
}

impl Agent {
    pub(super) fn new(line: Arc<Line>) -> Self {
        Self { line }
    }
}

impl Speaker for Agent {
    fn facts(&self) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(async {
            let mut reply = self.line.ask("gather-facts", json!({})).await?;
            if let Some(failure) = reply.failure() {
                return Err(failure);
            }
            let facts = reply.take_object("result");
            facts.ok_or_else(|| GuestError::Refused("the guest said nothing of itself".into()))
        })
    }

    fn execute<'a>(&'a self, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(execute::execute(&self.line, command))
    }

    fn output(&self, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream> {
        Box::pin(execute::output(&self.line, key, name))
    }

    fn forget(&self, key: CommandKey) -> GuestFuture<'_, ()> {
        if self.line.features().memory {
            let (_, unique) = self.line.new_name();
            self.line.say(&json!({ "command": "forget", "key": key.to_string(), "unique": unique }));
        }
        Box::pin(async { Ok(()) })
    }

    fn cancel(&self, key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async move {
            if !self.line.features().memory {
                return Err(GuestError::Refused("the guest's agent cannot end commands".into()));
            }
            let reply = self.line.ask("cancel", json!({ "key": key.to_string() })).await?;
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
        Box::pin(put::put(&self.line, path, size, mode, data))
    }

    fn change_mode<'a>(&'a self, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(async move {
            let reply = self.line.ask("chmod", json!({ "path": path, "mode": mode })).await?;
            reply.failure().map_or(Ok(()), Err)
        })
    }

    fn get<'a>(&'a self, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(get::get(&self.line, path))
    }
}
