//! Packets: what a host may ask for, taken from the JSON of a frame and checked, and what is answered.
//!
//! Nothing here does anything: whatever a host sends becomes a [`Request`] or a [`Fault`].

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value, json};

use crate::PIECE;

/// The longest name of a request, of a path, of a user.
const NAME: usize = 4096;
/// The longest `unique`.
const UNIQUE: usize = 256;
/// The longest key of a command.
const KEY: usize = 100;
/// The longest command line that the kernel hands to a shell.
pub const LINE: usize = 128 << 10;

/// What a host asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    Ping,
    Pong,
    IsSystemRunning,
    GatherFacts,
    Execute(Execute),
    ReadOutput { key: String, name: Stream, offset: u64, length: usize },
    Cancel { key: String },
    Forget { key: String },
    PutFile(PutFile),
    GetFile { path: String, window: Option<u64> },
    GetFileMore { offset: u64 },
    Abandon,
    ChangeMode { path: String, mode: String },
    ChangeOwner { path: String, user: Option<String>, group: Option<String> },
}

/// A command line for the shell.
#[derive(Debug, Clone, PartialEq)]
pub struct Execute {
    pub line: String,
    /// Whether the host waits for its end.
    pub is_awaited: bool,
    pub key: Option<String>,
    /// Whether it must not be started now.
    pub again: bool,
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct PutFile {
    pub path: String,
    /// The first packet has it, with the permissions the file shall have.
    pub stat: Option<Stat>,
    /// Whether the host wants to know of each piece that it is written.
    pub pieces: bool,
    pub offset: Option<u64>,
    pub chunk: Option<Chunk>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stat {
    pub mode: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    Bytes(Vec<u8>),
    End,
}

/// Where a command writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// A packet that asks for nothing that can be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    NotJson(String),
    Unknown(String),
    Wrong(String),
}

impl Fault {
    /// The answer to it.
    #[must_use]
    pub fn reply(&self, unique: &Value) -> Value {
        let (command, message) = match self {
            Self::NotJson(message) => ("json-decode-failure", message),
            Self::Unknown(message) => ("unknown-command", message),
            Self::Wrong(message) => ("command-error", message),
        };
        json!({ "command": command, "message": message, "unique": unique })
    }
}

/// The answer when something could not be done.
#[must_use]
pub fn command_error(unique: &Value, message: &str) -> Value {
    json!({ "command": "command-error", "message": message, "unique": unique })
}

/// Bytes as they travel.
#[must_use]
pub fn chunk(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

/// What a packet asks for, with the `unique` that its answers repeat.
///
/// # Errors
/// [`Fault`] with the answer to give, or none if the packet is an answer itself.
pub fn read(body: &[u8]) -> (Value, Result<Request, Option<Fault>>) {
    let packet: Value = match serde_json::from_slice(body) {
        Ok(packet) => packet,
        Err(error) => {
            let fault = Fault::NotJson(format!("failed to JSON decode packet: {error}"));
            return (Value::Null, Err(Some(fault)));
        }
    };
    let Value::Object(packet) = packet else {
        return (Value::Null, Err(Some(Fault::Wrong("a packet must be an object".into()))));
    };
    let unique = match packet.get("unique") {
        Some(Value::String(text)) if text.len() > UNIQUE => Value::Null,
        Some(unique @ (Value::String(_) | Value::Number(_))) => unique.clone(),
        _ => Value::Null,
    };
    let request = request(&Fields(&packet));
    (unique, request)
}

fn request(fields: &Fields) -> Result<Request, Option<Fault>> {
    let command = fields.text("command", NAME)?;
    Ok(match command.as_str() {
        "ping" => Request::Ping,
        "pong" => Request::Pong,
        "is-system-running" => Request::IsSystemRunning,
        "gather-facts" => Request::GatherFacts,
        "execute" => Request::Execute(Execute {
            line: fields.text("command-line", LINE - 1)?,
            is_awaited: fields.flag("block-for-result", true)?,
            key: fields.0.get("key").map(|_| fields.key()).transpose()?,
            again: fields.flag("again", false)?,
        }),
        "read-output" => Request::ReadOutput {
            key: fields.key()?,
            name: match fields.text("name", NAME)?.as_str() {
                "stdout" => Stream::Stdout,
                "stderr" => Stream::Stderr,
                _ => return Err(wrong("name must be stdout or stderr")),
            },
            offset: fields.number("offset")?,
            length: usize::try_from(fields.number("length")?).unwrap_or(PIECE).min(PIECE),
        },
        "cancel" => Request::Cancel { key: fields.key()? },
        "forget" => Request::Forget { key: fields.key()? },
        "put-file" => Request::PutFile(PutFile {
            path: fields.path()?,
            stat: fields.optional("stat_result").map(|stat| Stat { mode: mode(stat) }),
            pieces: fields.flag("pieces", false)?,
            offset: fields.optional("offset").map(|_| fields.number("offset")).transpose()?,
            chunk: fields.0.get("chunk").map(|chunk| read_chunk(fields, chunk)).transpose()?,
        }),
        "get-file" => Request::GetFile {
            path: fields.path()?,
            window: fields.optional("window").map(|_| fields.number("window")).transpose()?,
        },
        "get-file-more" => Request::GetFileMore { offset: fields.number("offset")? },
        "abandon" => Request::Abandon,
        "chmod" => Request::ChangeMode {
            path: fields.path()?,
            mode: match fields.optional("mode") {
                Some(Value::String(words)) if words.len() <= NAME => words.clone(),
                Some(Value::Number(number)) if number.is_u64() => number.to_string(),
                _ => return Err(wrong("mode is not set")),
            },
        },
        "chown" => Request::ChangeOwner {
            path: fields.path()?,
            user: fields.principal("user")?,
            group: fields.principal("group")?,
        },
        // What answers something must not be answered, or two agents would never stop.
        "command-error" | "unknown-command" | "json-decode-failure" => return Err(None),
        other if other.ends_with("-response") => return Err(None),
        other => return Err(Some(Fault::Unknown(format!("{other} is an unknown command")))),
    })
}

fn wrong(message: impl Into<String>) -> Option<Fault> {
    Some(Fault::Wrong(message.into()))
}

fn mode(stat: &Value) -> Option<u32> {
    stat.get("mode").and_then(Value::as_u64).and_then(|mode| u32::try_from(mode).ok())
}

fn read_chunk(fields: &Fields, chunk: &Value) -> Result<Chunk, Option<Fault>> {
    match chunk {
        Value::Null => Ok(Chunk::End),
        Value::String(text) => {
            if fields.optional("encoding").is_some_and(|encoding| encoding != "base64") {
                return Err(wrong("encoding must be base64"));
            }
            let bytes = BASE64.decode(text).map_err(|_| wrong("chunk is not base64"))?;
            if bytes.len() > PIECE { Err(wrong("chunk is too long")) } else { Ok(Chunk::Bytes(bytes)) }
        }
        _ => Err(wrong("chunk must be text or null")),
    }
}

/// The members of a packet.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn optional(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn text(&self, name: &str, most: usize) -> Result<String, Option<Fault>> {
        match self.optional(name) {
            None => Err(wrong(format!("{name} is not set"))),
            Some(Value::String(text)) if text.len() > most => Err(wrong(format!("{name} is too long"))),
            Some(Value::String(text)) if text.contains('\0') => Err(wrong(format!("{name} has a null byte"))),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(wrong(format!("{name} must be text"))),
        }
    }

    fn path(&self) -> Result<String, Option<Fault>> {
        let path = self.text("path", NAME)?;
        if path.is_empty() { Err(wrong("path is not set")) } else { Ok(path) }
    }

    /// It is the name of a folder, too.
    fn key(&self) -> Result<String, Option<Fault>> {
        let key = self.text("key", KEY)?;
        let is_name = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if key.is_empty() || key.starts_with('.') || !is_name {
            return Err(wrong("key must be letters, digits, dots and dashes"));
        }
        Ok(key)
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, Option<Fault>> {
        match self.optional(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(wrong(format!("{name} must be true or false"))),
        }
    }

    fn number(&self, name: &str) -> Result<u64, Option<Fault>> {
        let number = self.optional(name).and_then(Value::as_u64);
        number.ok_or_else(|| wrong(format!("{name} must be a number that is not negative")))
    }

    /// A user or a group, by name or number.
    fn principal(&self, name: &str) -> Result<Option<String>, Option<Fault>> {
        match self.optional(name) {
            None => Ok(None),
            Some(Value::Number(number)) if number.is_u64() => Ok(Some(number.to_string())),
            Some(_) => self.text(name, NAME).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(packet: &Value) -> Result<Request, Option<Fault>> {
        read(packet.to_string().as_bytes()).1
    }

    #[test]
    fn packets_become_requests() {
        assert_eq!(of(&json!({ "command": "ping" })), Ok(Request::Ping));
        assert_eq!(
            of(&json!({ "command": "execute", "command-line": "true" })),
            Ok(Request::Execute(Execute { line: "true".into(), is_awaited: true, key: None, again: false }))
        );
        assert_eq!(
            of(
                &json!({ "command": "put-file", "path": "/x", "offset": 0, "encoding": "base64", "chunk": null })
            ),
            Ok(Request::PutFile(PutFile {
                path: "/x".into(),
                stat: None,
                pieces: false,
                offset: Some(0),
                chunk: Some(Chunk::End)
            }))
        );
        assert_eq!(
            of(&json!({ "command": "chown", "path": "/x", "user": 7, "group": "adm" })),
            Ok(Request::ChangeOwner { path: "/x".into(), user: Some("7".into()), group: Some("adm".into()) })
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (packet, message) in [
            (json!({ "command": "execute" }), "command-line is not set"),
            (json!({ "command": "execute", "command-line": "a\0b" }), "command-line has a null byte"),
            (json!({ "command": "execute", "command-line": "x", "key": "../x" }), "key must be"),
            (json!({ "command": "cancel", "key": ".." }), "key must be"),
            (json!({ "command": "get-file", "path": "" }), "path is not set"),
            (json!({ "command": "put-file", "path": "/x", "offset": -1, "chunk": "" }), "offset must be"),
            (json!({ "command": "put-file", "path": "/x", "chunk": "%" }), "chunk is not base64"),
            (json!({ "unique": 1 }), "command is not set"),
        ] {
            match of(&packet) {
                Err(Some(Fault::Wrong(text))) => assert!(text.starts_with(message), "{packet}: {text}"),
                other => panic!("{packet}: {other:?}"),
            }
        }
        assert_eq!(
            of(&json!({ "command": "x" })),
            Err(Some(Fault::Unknown("x is an unknown command".into())))
        );
        assert_eq!(of(&json!({ "command": "x-response" })), Err(None));
        assert!(matches!(read(b"{").1, Err(Some(Fault::NotJson(_)))));
    }
}
