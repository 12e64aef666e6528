//! `/events/stream`: events as they happen.

use std::time::Duration;

use serde_json::Value;

use super::body_stream::BodyStream;
use super::client::Client;
use super::error::Result;
use super::uri::{path, with_query};

/// The time after which a stream without messages is broken. The server sends something every 15 seconds.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Selects the messages of a stream. The default is everything that the caller may see.
#[derive(Debug, Clone, Default)]
pub struct StreamQuery {
    /// Only messages about the object with this type and id.
    pub object: Option<(String, String)>,
}

/// A message of a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamMessage {
    /// `started`, `event`, `change` or `reset`.
    pub kind: String,
    pub data: Value,
}

/// A connection that delivers events.
#[derive(Debug)]
pub struct EventStream<'a> {
    body: BodyStream<'a>,
    received: Vec<u8>,
    /// The position of the last message.
    pub last_id: Option<String>,
}

impl Client {
    /// Opens a stream of events, after the position `last_id` if there is one.
    pub async fn event_stream(
        &self,
        query: &StreamQuery,
        last_id: Option<String>,
    ) -> Result<EventStream<'_>> {
        let object = query.object.as_ref();
        let parameters = [
            ("object_type", object.map(|(object_type, _)| object_type.as_str())),
            ("object_uuid", object.map(|(_, id)| id.as_str())),
            ("last_event_id", last_id.as_deref()),
        ];
        let path = with_query(path(&["events", "stream"])?, &parameters);
        let body = self.get_stream(&path, "a stream of events").await?;
        Ok(EventStream { body, received: vec![], last_id })
    }
}

impl EventStream<'_> {
    /// Returns the next message, or `None` when the server has ended the stream, which it does when the token expires.
    pub async fn next(&mut self) -> Result<Option<StreamMessage>> {
        loop {
            while let Some(block) = self.take_block() {
                let (message, id) = parse_block(&block);
                self.last_id = id.or(self.last_id.take());
                if message.is_some() {
                    return Ok(message);
                }
            }
            match self.body.next(STALL_TIMEOUT).await? {
                Some(bytes) => self.received.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }

    /// Removes the first complete block, which ends with an empty line, from the received bytes.
    fn take_block(&mut self) -> Option<String> {
        let end = self.received.windows(2).position(|pair| pair == b"\n\n")?;
        let block: Vec<u8> = self.received.drain(..end + 2).collect();
        Some(String::from_utf8_lossy(&block).into_owned())
    }
}

/// Returns the message of a block of lines and its id. A block of comments has no message.
fn parse_block(block: &str) -> (Option<StreamMessage>, Option<String>) {
    let (mut kind, mut data, mut id) = ("message".to_owned(), vec![], None);
    for line in block.lines() {
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => kind = value.to_owned(),
            "data" => data.push(value),
            "id" => id = Some(value.to_owned()),
            _ => {}
        }
    }
    let message = (!data.is_empty()).then(|| StreamMessage {
        kind,
        // A newer server may send data that is not JSON.
        data: serde_json::from_str(&data.join("\n")).unwrap_or_default(),
    });
    (message, id)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parses_messages_and_skips_comments() {
        let (message, id) = parse_block("id: 7.5\nevent: event\ndata: {\"a\":\ndata: 1}\n\n");
        assert_eq!(message, Some(StreamMessage { kind: "event".into(), data: json!({ "a": 1 }) }));
        assert_eq!(id.as_deref(), Some("7.5"));
        assert_eq!(parse_block(": \n\n"), (None, None));
    }
}
