//! Packets from a guest. They are untrusted: every accessor checks the type of its field.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use muster_agent::frame;
use muster_types::guest::{GuestError, GuestFileInfo};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::guest::text::{MAX_STATE_CHARS, failure_reason};

/// A packet from a guest.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Packet(Map<String, Value>);

/// A part of a file or of command output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Chunk {
    Bytes(Bytes),
    /// The end of the data.
    End,
}

/// Why an agent has no result for a command, by the `reason` of `execute-response`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum NoResultReason {
    /// The agent never received the command.
    Unknown,
    /// The agent was stopped while the command ran.
    Lost,
    Cancelled,
}

/// The fields that are read from a packet above the usual size, which only a plain agent sends, with the output of a
/// command. Parsing arbitrary JSON of that size could take many times its memory.
#[derive(Debug, Deserialize)]
struct LongPacket {
    command: String,
    unique: String,
    #[serde(rename = "return-code")]
    return_code: Option<i64>,
    stdout: Option<String>,
    stderr: Option<String>,
}

impl Packet {
    /// Parses a packet. Returns `None` if the bytes are not a packet.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        if body.len() > frame::DEFAULT_MAX_LENGTH {
            let long: LongPacket = serde_json::from_slice(body).ok()?;
            let mut fields = Map::new();
            fields.insert("command".into(), long.command.into());
            fields.insert("unique".into(), long.unique.into());
            fields.insert("return-code".into(), long.return_code.into());
            fields.insert("stdout".into(), long.stdout.into());
            fields.insert("stderr".into(), long.stderr.into());
            return Some(Self(fields));
        }
        match serde_json::from_slice(body).ok()? {
            Value::Object(fields) if fields.get("command").is_some_and(Value::is_string) => {
                Some(Self(fields))
            }
            _ => None,
        }
    }

    pub(super) fn command(&self) -> &str {
        self.text("command").unwrap_or_default()
    }

    pub(super) fn unique(&self) -> Option<&str> {
        self.text("unique")
    }

    /// Returns the request ID that a reply has to repeat, unless it has an unreasonable type or length.
    pub(super) fn echoable_unique(&self) -> Option<&Value> {
        self.0.get("unique").filter(|unique| match unique {
            Value::Number(_) => true,
            Value::String(text) => text.len() <= MAX_STATE_CHARS,
            _ => false,
        })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    pub(super) fn boolean(&self, name: &str) -> Option<bool> {
        self.0.get(name).and_then(Value::as_bool)
    }

    pub(super) fn unsigned(&self, name: &str) -> Option<u64> {
        self.0.get(name).and_then(Value::as_u64)
    }

    /// Returns a Unix time within a plausible range.
    pub(super) fn timestamp(&self, name: &str) -> Option<f64> {
        timestamp(self.0.get(name))
    }

    /// Returns the exit status of a command.
    pub(super) fn return_code(&self) -> Option<i32> {
        self.0.get("return-code").and_then(Value::as_i64).and_then(|code| code.try_into().ok())
    }

    pub(super) fn no_result_reason(&self) -> Option<NoResultReason> {
        self.0.get("reason").and_then(|reason| NoResultReason::deserialize(reason).ok())
    }

    pub(super) fn list_contains(&self, name: &str, word: &str) -> bool {
        let list = self.0.get(name).and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|item| item.as_str() == Some(word)))
    }

    pub(super) fn take_text(&mut self, name: &str) -> Option<String> {
        match self.0.remove(name) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    pub(super) fn take_object(&mut self, name: &str) -> Option<Map<String, Value>> {
        match self.0.remove(name) {
            Some(Value::Object(object)) => Some(object),
            _ => None,
        }
    }

    /// Returns whether this is one of the generic error packets.
    pub(super) fn is_error(&self) -> bool {
        matches!(self.command(), "command-error" | "unknown-command" | "json-decode-failure")
    }

    /// Returns the error if this packet reports that a request failed.
    pub(super) fn failure(&self) -> Option<GuestError> {
        if !self.is_error() && self.boolean("result") != Some(false) {
            return None;
        }
        Some(GuestError::Refused(failure_reason(self.text("message").unwrap_or_default())))
    }

    /// Returns the data in this packet, or `None` if it has no `chunk`.
    pub(super) fn chunk(&self) -> Result<Option<Chunk>, GuestError> {
        let invalid = || GuestError::Refused("the guest's agent sent an invalid chunk".into());
        match self.0.get("chunk") {
            None => Ok(None),
            Some(Value::Null) => Ok(Some(Chunk::End)),
            Some(Value::String(text)) => {
                let bytes = BASE64.decode(text).map_err(|_| invalid())?;
                Ok(Some(Chunk::Bytes(bytes.into())))
            }
            Some(_) => Err(invalid()),
        }
    }

    /// Returns the metadata of a file. Invalid fields are zero: the metadata is for display only.
    pub(super) fn file_info(&self) -> Option<GuestFileInfo> {
        let stat = self.0.get("stat_result")?.as_object()?;
        let unsigned = |name: &str| stat.get(name).and_then(Value::as_u64).unwrap_or_default();
        let unsigned_32 = |name: &str| u32::try_from(unsigned(name)).unwrap_or_default();
        let time = |name: &str| timestamp(stat.get(name)).unwrap_or_default();
        Some(GuestFileInfo {
            mode: unsigned_32("mode"),
            size: unsigned("size"),
            uid: unsigned_32("uid"),
            gid: unsigned_32("gid"),
            atime: time("atime"),
            mtime: time("mtime"),
            ctime: time("ctime"),
        })
    }
}

fn timestamp(value: Option<&Value>) -> Option<f64> {
    value.and_then(Value::as_f64).filter(|time| (0.0..1e11).contains(time))
}

/// Encodes a chunk.
pub(super) fn encode_chunk(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::guest::text::MAX_ERROR_CHARS;

    fn packet(value: &Value) -> Packet {
        Packet::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn rejects_bytes_that_are_not_a_packet() {
        for wrong in ["", "{", "[]", "7", "{}", r#"{"command": 7}"#, "\u{fffd}", &"[".repeat(100_000)] {
            assert_eq!(Packet::parse(wrong.as_bytes()), None, "{wrong:.20}");
        }
    }

    #[test]
    fn reads_only_command_results_from_long_packets() {
        let long = "x".repeat(frame::DEFAULT_MAX_LENGTH);
        let mut value =
            json!({ "command": "execute-response", "unique": "1", "stdout": long, "other": [[], 7] });
        value["return-code"] = 3.into();
        let mut read = packet(&value);
        assert_eq!((read.return_code(), read.has("other")), (Some(3), false));
        assert_eq!(read.take_text("stdout").unwrap().len(), long.len());
        let value = json!({ "command": "agent-start", "message": long });
        assert_eq!(Packet::parse(value.to_string().as_bytes()), None);
    }

    #[test]
    fn ignores_fields_of_the_wrong_type() {
        let wrong = packet(&json!({
            "command": "x", "unique": [1], "message": 7, "result": "no", "return-code": 1e300, "chunk": {},
            "system_boot_time": "now", "features": "memory", "stat_result": {"mode": -1, "size": 1.5, "mtime": 1e300},
        }));
        assert_eq!((wrong.unique(), wrong.echoable_unique(), wrong.text("message")), (None, None, None));
        assert_eq!(
            (wrong.failure(), wrong.return_code(), wrong.timestamp("system_boot_time")),
            (None, None, None)
        );
        assert!(!wrong.list_contains("features", "memory"));
        assert_eq!(packet(&json!({ "command": "x", "reason": ["lost"] })).no_result_reason(), None);
        let lost = packet(&json!({ "command": "x", "reason": "lost" }));
        assert_eq!(lost.no_result_reason(), Some(NoResultReason::Lost));
        assert_eq!(wrong.file_info(), Some(GuestFileInfo::default()));
        assert!(wrong.chunk().is_err());
        assert!(packet(&json!({ "command": "x", "chunk": "%" })).chunk().is_err());
        assert_eq!(packet(&json!({ "command": "x", "chunk": null })).chunk(), Ok(Some(Chunk::End)));
        let hello = packet(&json!({ "command": "x", "chunk": "aGVsbG8=" })).chunk();
        assert_eq!(hello, Ok(Some(Chunk::Bytes("hello".into()))));
    }

    #[test]
    fn removes_control_characters_from_reasons() {
        let message = format!("\u{1b}[31mno\n{}", "x".repeat(1000));
        let refused = packet(&json!({ "command": "command-error", "message": message })).failure();
        let Some(GuestError::Refused(reason)) = refused else { panic!("{refused:?}") };
        assert!(reason.starts_with("[31mnox") && reason.len() == MAX_ERROR_CHARS, "{reason}");
        let silent = packet(&json!({ "command": "get-file-response", "result": false })).failure();
        assert_eq!(silent, Some(GuestError::Refused("the guest gave no reason".into())));
    }
}
