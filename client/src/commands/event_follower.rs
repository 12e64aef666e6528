//! Follows a stream of events across interruptions.

use std::collections::VecDeque;
use std::time::Duration;

use muster_types::object::ObjectType;
use serde_json::Value;
use tokio::time::timeout;

use crate::api::{Client, EventStream, StreamMessage, StreamQuery};
use crate::transfer::{Retries, RetryPolicy};

/// How long a burst of messages may last before the list that it is about is read.
const BURST: Duration = Duration::from_millis(200);
/// The number of events that are remembered: a stream that is resumed repeats those of the last seconds.
const MAX_REMEMBERED: usize = 4096;

/// A stream of events that reconnects.
pub(super) struct EventFollower<'a> {
    client: &'a Client,
    query: StreamQuery,
    stream: EventStream<'a>,
    retries: Retries,
    seen: VecDeque<String>,
}

impl<'a> EventFollower<'a> {
    /// Opens a stream. Everything that happens after the return is reported.
    pub(super) async fn open(client: &'a Client, query: StreamQuery) -> anyhow::Result<Self> {
        let stream = client.event_stream(&query, None).await?;
        let retries = Retries::new(RetryPolicy::default());
        let mut follower = Self { client, query, stream, retries, seen: VecDeque::new() };
        while follower.receive().await?.kind != "started" {}
        Ok(follower)
    }

    /// Returns the next message that was not returned before.
    pub(super) async fn next(&mut self) -> anyhow::Result<StreamMessage> {
        loop {
            let message = self.receive().await?;
            match message.data.get("event_uuid").and_then(Value::as_str) {
                Some(id) if !self.remember(id) => {}
                _ => return Ok(message),
            }
        }
    }

    /// Remembers an event. Returns whether it is new.
    pub(super) fn remember(&mut self, id: &str) -> bool {
        if self.seen.iter().rev().any(|seen| seen == id) {
            return false;
        }
        if self.seen.len() == MAX_REMEMBERED {
            self.seen.pop_front();
        }
        self.seen.push_back(id.to_owned());
        true
    }

    /// Waits until objects of these types have changed, and until the burst of messages about it is over.
    pub(super) async fn wait_for_change(&mut self, types: &[ObjectType]) -> anyhow::Result<()> {
        while !concerns(&self.receive().await?, types) {}
        let burst = async {
            loop {
                self.receive().await?;
            }
        };
        let ended: Result<anyhow::Result<()>, _> = timeout(BURST, burst).await;
        ended.unwrap_or(Ok(()))
    }

    /// Returns the next message, and reconnects if the stream has ended.
    async fn receive(&mut self) -> anyhow::Result<StreamMessage> {
        loop {
            match self.stream.next().await {
                Ok(Some(message)) => {
                    self.retries.reset();
                    return Ok(message);
                }
                // The token has expired, or the daemon stops.
                Ok(None) => {}
                Err(error) => self.retries.back_off(error, None).await?,
            }
            let last_id = self.stream.last_id.clone();
            self.stream = loop {
                match self.client.event_stream(&self.query, last_id.clone()).await {
                    Ok(stream) => break stream,
                    Err(error) => self.retries.back_off(error, None).await?,
                }
            };
        }
    }
}

/// Returns whether a message is about an object of one of these types. Without a type, every message is.
fn concerns(message: &StreamMessage, types: &[ObjectType]) -> bool {
    let object_type = message.data.get("object_type").and_then(Value::as_str);
    match message.kind.as_str() {
        // Messages may have been lost.
        "reset" => true,
        "event" | "change" => {
            types.is_empty() || types.iter().any(|watched| Some(watched.as_str()) == object_type)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_about_other_types_do_not_concern_a_list() {
        let message = |kind: &str, object_type: &str| StreamMessage {
            kind: kind.into(),
            data: json!({ "object_type": object_type }),
        };
        let types = [ObjectType::Instance];
        assert!(concerns(&message("event", "instance"), &types));
        assert!(concerns(&message("change", "instance"), &types));
        assert!(concerns(&message("reset", ""), &types));
        assert!(concerns(&message("event", "node"), &[]));
        assert!(!concerns(&message("event", "node"), &types));
        assert!(!concerns(&message("started", "instance"), &types));
    }
}
