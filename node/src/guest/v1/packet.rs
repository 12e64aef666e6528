//! Packets as a guest sends them: nothing in them is as it should be until it was looked at.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use muster_agent::frame;
use muster_types::guest::{GuestError, GuestFileInfo};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::guest::text::{ERROR_TEXT, STATE_TEXT, printable};

/// What a guest sent.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Packet(Map<String, Value>);

/// What comes after the bytes before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Chunk {
    Bytes(Bytes),
    /// There is no more.
    End,
}

/// Only a plain agent sends a packet of more than the usual size, with what a command wrote. Nothing else in it is
/// read, which could take up many times the memory that it came in.
#[derive(Debug, Deserialize)]
struct Long {
    command: String,
    unique: String,
    #[serde(rename = "return-code")]
    return_code: Option<i64>,
    stdout: Option<String>,
    stderr: Option<String>,
}

impl Packet {
    /// Nothing if it is none.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        if body.len() > frame::DEFAULT_MAX_LENGTH {
            let long: Long = serde_json::from_slice(body).ok()?;
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

    /// What an answer to it repeats, if it is something that anybody would send.
    pub(super) fn echo(&self) -> Option<&Value> {
        self.0.get("unique").filter(|unique| match unique {
            Value::Number(_) => true,
            Value::String(text) => text.len() <= STATE_TEXT,
            _ => false,
        })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    pub(super) fn flag(&self, name: &str) -> Option<bool> {
        self.0.get(name).and_then(Value::as_bool)
    }

    pub(super) fn whole(&self, name: &str) -> Option<u64> {
        self.0.get(name).and_then(Value::as_u64)
    }

    /// A Unix time that can be one.
    pub(super) fn time(&self, name: &str) -> Option<f64> {
        time(self.0.get(name))
    }

    /// How a command ended, if this tells it.
    pub(super) fn return_code(&self) -> Option<i32> {
        self.0.get("return-code").and_then(Value::as_i64).and_then(|code| code.try_into().ok())
    }

    pub(super) fn lists(&self, name: &str, word: &str) -> bool {
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

    /// Whether it says that something did not work, without saying of what.
    pub(super) fn is_error(&self) -> bool {
        matches!(self.command(), "command-error" | "unknown-command" | "json-decode-failure")
    }

    /// Why what was asked did not work, if this says that it did not.
    pub(super) fn failure(&self) -> Option<GuestError> {
        if !self.is_error() && self.flag("result") != Some(false) {
            return None;
        }
        let reason = printable(self.text("message").unwrap_or_default(), ERROR_TEXT);
        Some(GuestError::Refused(if reason.is_empty() { "the guest gave no reason".into() } else { reason }))
    }

    /// The bytes in it; nothing if it has none.
    pub(super) fn chunk(&self) -> Result<Option<Chunk>, GuestError> {
        let wrong = || GuestError::Refused("the guest sent something that is no part of a file".into());
        match self.0.get("chunk") {
            None => Ok(None),
            Some(Value::Null) => Ok(Some(Chunk::End)),
            Some(Value::String(text)) => {
                let bytes = BASE64.decode(text).map_err(|_| wrong())?;
                Ok(Some(Chunk::Bytes(bytes.into())))
            }
            Some(_) => Err(wrong()),
        }
    }

    /// What it says of a file.
    pub(super) fn file_facts(&self) -> Option<GuestFileInfo> {
        let found = self.0.get("stat_result")?.as_object()?;
        let whole = |name: &str| found.get(name).and_then(Value::as_u64).unwrap_or_default();
        let small = |name: &str| u32::try_from(whole(name)).unwrap_or_default();
        let time = |name: &str| time(found.get(name)).unwrap_or_default();
        Some(GuestFileInfo {
            mode: small("mode"),
            size: whole("size"),
            uid: small("uid"),
            gid: small("gid"),
            atime: time("atime"),
            mtime: time("mtime"),
            ctime: time("ctime"),
        })
    }
}

fn time(value: Option<&Value>) -> Option<f64> {
    value.and_then(Value::as_f64).filter(|time| (0.0..1e11).contains(time))
}

/// Bytes as they travel.
pub(super) fn encode(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn packet(value: &Value) -> Packet {
        Packet::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn what_is_no_packet_is_none() {
        for wrong in ["", "{", "[]", "7", "{}", r#"{"command": 7}"#, "\u{fffd}", &"[".repeat(100_000)] {
            assert_eq!(Packet::parse(wrong.as_bytes()), None, "{wrong:.20}");
        }
    }

    #[test]
    fn of_a_long_packet_only_what_a_command_wrote_is_read() {
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
    fn wrong_types_are_taken_for_nothing() {
        let wrong = packet(&json!({
            "command": "x", "unique": [1], "message": 7, "result": "no", "return-code": 1e300, "chunk": {},
            "system_boot_time": "now", "features": "memory", "stat_result": {"mode": -1, "size": 1.5, "mtime": 1e300},
        }));
        assert_eq!((wrong.unique(), wrong.echo(), wrong.text("message")), (None, None, None));
        assert_eq!(
            (wrong.failure(), wrong.return_code(), wrong.time("system_boot_time")),
            (None, None, None)
        );
        assert!(!wrong.lists("features", "memory"));
        assert_eq!(wrong.file_facts(), Some(GuestFileInfo::default()));
        assert!(wrong.chunk().is_err());
        assert!(packet(&json!({ "command": "x", "chunk": "%" })).chunk().is_err());
        assert_eq!(packet(&json!({ "command": "x", "chunk": null })).chunk(), Ok(Some(Chunk::End)));
        let hello = packet(&json!({ "command": "x", "chunk": "aGVsbG8=" })).chunk();
        assert_eq!(hello, Ok(Some(Chunk::Bytes("hello".into()))));
    }

    #[test]
    fn reasons_are_shown_without_what_terminals_obey() {
        let message = format!("\u{1b}[31mno\n{}", "x".repeat(1000));
        let refused = packet(&json!({ "command": "command-error", "message": message })).failure();
        let Some(GuestError::Refused(reason)) = refused else { panic!("{refused:?}") };
        assert!(reason.starts_with("[31mnox") && reason.len() == ERROR_TEXT, "{reason}");
        let silent = packet(&json!({ "command": "get-file-response", "result": false })).failure();
        assert_eq!(silent, Some(GuestError::Refused("the guest gave no reason".into())));
    }
}
