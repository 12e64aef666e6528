//! Parses and validates packets of a host, and builds error replies. Every packet becomes a [`Request`] or a
//! [`PacketError`].

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value, json};

/// The maximum number of bytes in one chunk of a file or of output.
pub const MAX_CHUNK_SIZE: usize = 64 << 10;
/// The maximum length of command names, paths and user names.
const MAX_NAME_LENGTH: usize = 4096;
/// The maximum length of `unique`.
const MAX_UNIQUE_LENGTH: usize = 256;
/// The maximum length of a command's key.
const MAX_KEY_LENGTH: usize = 100;
/// The maximum length of a terminal type.
const MAX_TERM_LENGTH: usize = 64;
/// The kernel's limit for a single argument, including its null byte. Command lines must be shorter.
pub const MAX_COMMAND_LINE: usize = 128 << 10;

/// A valid request of a host.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    Ping,
    Pong,
    IsSystemRunning,
    GatherFacts,
    Execute(Execute),
    ReadOutput { key: String, stream: Stream, offset: u64, length: usize },
    Cancel { key: String },
    Forget { key: String },
    PutFile(PutFile),
    GetFile { path: String, window: Option<u64> },
    GetFileMore { offset: u64 },
    Abandon,
    Terminal(OpenTerminal),
    TerminalInput { bytes: Vec<u8> },
    TerminalMore { offset: u64 },
    TerminalResize { rows: u16, columns: u16 },
    ChangeMode { path: String, mode: String },
    ChangeOwner { path: String, user: Option<String>, group: Option<String> },
}

/// A command line for the shell.
#[derive(Debug, Clone, PartialEq)]
pub struct Execute {
    pub command_line: String,
    /// Whether the reply is sent when the command has ended, rather than when it has started.
    pub block_for_result: bool,
    pub key: Option<String>,
    /// Return the result of an earlier `execute` with the same key, and never start the command.
    pub again: bool,
}

/// A command line for the shell, and the terminal that it runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenTerminal {
    pub command_line: String,
    /// The terminal type.
    pub term: String,
    pub rows: u16,
    pub columns: u16,
    /// The number of bytes of output that the host accepts ahead of its acknowledgements.
    pub window: u64,
}

/// One packet of a file transfer to the guest.
#[derive(Debug, Clone, PartialEq)]
pub struct PutFile {
    pub path: String,
    /// Set in the first packet.
    pub stat: Option<Stat>,
    /// Whether the host wants an acknowledgement of every chunk.
    pub pieces: bool,
    pub offset: Option<u64>,
    pub chunk: Option<Chunk>,
}

/// The attributes that the transferred file shall have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stat {
    pub mode: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    Bytes(Vec<u8>),
    End,
}

/// An output stream of a command.
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

/// Why a packet is not a valid request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PacketError {
    NotJson(String),
    UnknownCommand(String),
    Invalid(String),
}

impl PacketError {
    /// Returns the reply to send.
    #[must_use]
    pub fn to_reply(&self, unique: &Value) -> Value {
        let (command, message) = match self {
            Self::NotJson(message) => ("json-decode-failure", message),
            Self::UnknownCommand(message) => ("unknown-command", message),
            Self::Invalid(message) => ("command-error", message),
        };
        json!({ "command": command, "message": message, "unique": unique })
    }
}

/// Returns the reply to a request that failed.
#[must_use]
pub fn command_error(unique: &Value, message: &str) -> Value {
    json!({ "command": "command-error", "message": message, "unique": unique })
}

/// Encodes bytes for a packet.
#[must_use]
pub fn encode_chunk(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

/// Parses a packet. Returns the `unique` that its replies must repeat, and the request.
///
/// # Errors
/// Returns a [`PacketError`] if the packet is not a valid request, or `None` if it is itself a reply and must not be
/// answered.
pub fn parse(body: &[u8]) -> (Value, Result<Request, Option<PacketError>>) {
    let packet: Value = match serde_json::from_slice(body) {
        Ok(packet) => packet,
        Err(error) => {
            let error = PacketError::NotJson(format!("failed to JSON decode packet: {error}"));
            return (Value::Null, Err(Some(error)));
        }
    };
    let Value::Object(packet) = packet else {
        return (Value::Null, Err(invalid("a packet must be an object")));
    };
    let unique = match packet.get("unique") {
        Some(Value::String(text)) if text.len() > MAX_UNIQUE_LENGTH => Value::Null,
        Some(unique @ (Value::String(_) | Value::Number(_))) => unique.clone(),
        _ => Value::Null,
    };
    let request = parse_request(&Fields(&packet));
    (unique, request)
}

fn parse_request(fields: &Fields) -> Result<Request, Option<PacketError>> {
    let command = fields.text("command", MAX_NAME_LENGTH)?;
    Ok(match command.as_str() {
        "ping" => Request::Ping,
        "pong" => Request::Pong,
        "is-system-running" => Request::IsSystemRunning,
        "gather-facts" => Request::GatherFacts,
        "execute" => Request::Execute(Execute {
            command_line: fields.text("command-line", MAX_COMMAND_LINE - 1)?,
            block_for_result: fields.flag("block-for-result", true)?,
            key: fields.0.get("key").map(|_| fields.key()).transpose()?,
            again: fields.flag("again", false)?,
        }),
        "read-output" => Request::ReadOutput {
            key: fields.key()?,
            stream: match fields.text("name", MAX_NAME_LENGTH)?.as_str() {
                "stdout" => Stream::Stdout,
                "stderr" => Stream::Stderr,
                _ => return Err(invalid("name must be stdout or stderr")),
            },
            offset: fields.number("offset")?,
            length: fields.number("length")?.min(MAX_CHUNK_SIZE as u64) as usize,
        },
        "cancel" => Request::Cancel { key: fields.key()? },
        "forget" => Request::Forget { key: fields.key()? },
        "put-file" => Request::PutFile(PutFile {
            path: fields.path()?,
            stat: fields.optional("stat_result").map(|stat| Stat { mode: parse_mode(stat) }),
            pieces: fields.flag("pieces", false)?,
            offset: fields.optional("offset").map(|_| fields.number("offset")).transpose()?,
            chunk: fields.0.get("chunk").map(|chunk| parse_chunk(fields, chunk)).transpose()?,
        }),
        "get-file" => Request::GetFile {
            path: fields.path()?,
            window: fields.optional("window").map(|_| fields.number("window")).transpose()?,
        },
        "get-file-more" => Request::GetFileMore { offset: fields.number("offset")? },
        "abandon" => Request::Abandon,
        "terminal" => Request::Terminal(OpenTerminal {
            command_line: fields.text("command-line", MAX_COMMAND_LINE - 1)?,
            term: fields.text("term", MAX_TERM_LENGTH)?,
            rows: fields.dimension("rows")?,
            columns: fields.dimension("columns")?,
            window: fields.number("window")?,
        }),
        "terminal-input" => {
            match fields.0.get("chunk").map(|chunk| parse_chunk(fields, chunk)).transpose()? {
                Some(Chunk::Bytes(bytes)) => Request::TerminalInput { bytes },
                Some(Chunk::End) | None => return Err(invalid("chunk is not set")),
            }
        }
        "terminal-more" => Request::TerminalMore { offset: fields.number("offset")? },
        "terminal-resize" => {
            Request::TerminalResize { rows: fields.dimension("rows")?, columns: fields.dimension("columns")? }
        }
        "chmod" => Request::ChangeMode {
            path: fields.path()?,
            mode: match fields.optional("mode") {
                Some(Value::String(text)) if text.len() <= MAX_NAME_LENGTH => text.clone(),
                Some(Value::Number(number)) if number.is_u64() => number.to_string(),
                _ => return Err(invalid("mode is not set")),
            },
        },
        "chown" => Request::ChangeOwner {
            path: fields.path()?,
            user: fields.principal("user")?,
            group: fields.principal("group")?,
        },
        // A reply must not be answered: two agents that are connected to each other would never stop.
        "command-error" | "unknown-command" | "json-decode-failure" => return Err(None),
        other if other.ends_with("-response") => return Err(None),
        other => return Err(Some(PacketError::UnknownCommand(format!("{other} is an unknown command")))),
    })
}

fn invalid(message: impl Into<String>) -> Option<PacketError> {
    Some(PacketError::Invalid(message.into()))
}

fn parse_mode(stat: &Value) -> Option<u32> {
    stat.get("mode").and_then(Value::as_u64).and_then(|mode| u32::try_from(mode).ok())
}

fn parse_chunk(fields: &Fields, chunk: &Value) -> Result<Chunk, Option<PacketError>> {
    match chunk {
        Value::Null => Ok(Chunk::End),
        Value::String(text) => {
            if fields.optional("encoding").is_some_and(|encoding| encoding != "base64") {
                return Err(invalid("encoding must be base64"));
            }
            let bytes = BASE64.decode(text).map_err(|_| invalid("chunk is not base64"))?;
            if bytes.len() > MAX_CHUNK_SIZE {
                Err(invalid("chunk is too long"))
            } else {
                Ok(Chunk::Bytes(bytes))
            }
        }
        _ => Err(invalid("chunk must be text or null")),
    }
}

/// The fields of a packet.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn optional(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn text(&self, name: &str, max_length: usize) -> Result<String, Option<PacketError>> {
        match self.optional(name) {
            None => Err(invalid(format!("{name} is not set"))),
            Some(Value::String(text)) if text.len() > max_length => {
                Err(invalid(format!("{name} is too long")))
            }
            Some(Value::String(text)) if text.contains('\0') => {
                Err(invalid(format!("{name} has a null byte")))
            }
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(invalid(format!("{name} must be text"))),
        }
    }

    fn path(&self) -> Result<String, Option<PacketError>> {
        let path = self.text("path", MAX_NAME_LENGTH)?;
        if path.is_empty() { Err(invalid("path is not set")) } else { Ok(path) }
    }

    /// Returns the key, which is also a directory name in the spool.
    fn key(&self) -> Result<String, Option<PacketError>> {
        let key = self.text("key", MAX_KEY_LENGTH)?;
        let is_name = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if key.is_empty() || key.starts_with('.') || !is_name {
            return Err(invalid("key must be letters, digits, dots and dashes"));
        }
        Ok(key)
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, Option<PacketError>> {
        match self.optional(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(invalid(format!("{name} must be true or false"))),
        }
    }

    fn number(&self, name: &str) -> Result<u64, Option<PacketError>> {
        let number = self.optional(name).and_then(Value::as_u64);
        number.ok_or_else(|| invalid(format!("{name} must be a number that is not negative")))
    }

    /// Returns a number of rows or columns.
    fn dimension(&self, name: &str) -> Result<u16, Option<PacketError>> {
        let number = self.number(name)?;
        u16::try_from(number).map_err(|_| invalid(format!("{name} must be at most {}", u16::MAX)))
    }

    /// Returns a user or a group, given by name or ID.
    fn principal(&self, name: &str) -> Result<Option<String>, Option<PacketError>> {
        match self.optional(name) {
            None => Ok(None),
            Some(Value::Number(number)) if number.is_u64() => Ok(Some(number.to_string())),
            Some(_) => self.text(name, MAX_NAME_LENGTH).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_value(packet: &Value) -> Result<Request, Option<PacketError>> {
        parse(packet.to_string().as_bytes()).1
    }

    #[test]
    fn parses_valid_requests() {
        assert_eq!(parse_value(&json!({ "command": "ping" })), Ok(Request::Ping));
        assert_eq!(
            parse_value(&json!({ "command": "execute", "command-line": "true" })),
            Ok(Request::Execute(Execute {
                command_line: "true".into(),
                block_for_result: true,
                key: None,
                again: false
            }))
        );
        assert_eq!(
            parse_value(
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
            parse_value(&json!({ "command": "chown", "path": "/x", "user": 7, "group": "adm" })),
            Ok(Request::ChangeOwner { path: "/x".into(), user: Some("7".into()), group: Some("adm".into()) })
        );
    }

    #[test]
    fn names_the_invalid_field() {
        for (packet, message) in [
            (json!({ "command": "execute" }), "command-line is not set"),
            (json!({ "command": "execute", "command-line": "a\0b" }), "command-line has a null byte"),
            (json!({ "command": "execute", "command-line": "x", "key": "../x" }), "key must be"),
            (json!({ "command": "cancel", "key": ".." }), "key must be"),
            (json!({ "command": "get-file", "path": "" }), "path is not set"),
            (json!({ "command": "put-file", "path": "/x", "offset": -1, "chunk": "" }), "offset must be"),
            (json!({ "command": "put-file", "path": "/x", "chunk": "%" }), "chunk is not base64"),
            (json!({ "command": "terminal", "command-line": "sh" }), "term is not set"),
            (json!({ "command": "terminal-resize", "rows": 70_000, "columns": 1 }), "rows must be at most"),
            (json!({ "command": "terminal-input", "chunk": null }), "chunk is not set"),
            (json!({ "unique": 1 }), "command is not set"),
        ] {
            match parse_value(&packet) {
                Err(Some(PacketError::Invalid(text))) => {
                    assert!(text.starts_with(message), "{packet}: {text}");
                }
                other => panic!("{packet}: {other:?}"),
            }
        }
        assert_eq!(
            parse_value(&json!({ "command": "x" })),
            Err(Some(PacketError::UnknownCommand("x is an unknown command".into())))
        );
        assert_eq!(parse_value(&json!({ "command": "x-response" })), Err(None));
        assert!(matches!(parse(b"{").1, Err(Some(PacketError::NotJson(_)))));
    }
}
