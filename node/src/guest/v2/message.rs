//! The messages between host and guest, as protocol buffers.
//!
//! Both sides send a sequence of envelopes, whose only field is a list. An envelope has no length prefix, but its items
//! have one, and consecutive envelopes are byte for byte one envelope with all their items. So items are written one by
//! one here, and read one by one by [`super::reader`].

use bytes::{Bytes, BytesMut};
use prost::{EncodeError, Message, Oneof};

use crate::guest::text::failure_reason;

/// The encoded key of the envelope's list.
const ITEM_KEY: u8 = 1 << 3 | 2;

/// A request from the host.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Request {
    /// Repeated by the replies.
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(oneof = "RequestBody", tags = "10, 30, 40, 41, 42, 43, 44, 45, 47, 48")]
    pub(super) body: Option<RequestBody>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum RequestBody {
    #[prost(message, tag = "10")]
    Welcome(HostWelcome),
    #[prost(message, tag = "30")]
    Ping(Empty),
    #[prost(message, tag = "40")]
    Execute(Execute),
    #[prost(message, tag = "41")]
    IsSystemRunning(Empty),
    #[prost(message, tag = "42")]
    GatherFacts(Empty),
    #[prost(message, tag = "43")]
    PutFile(PutFile),
    #[prost(message, tag = "44")]
    FileChunk(FileChunk),
    #[prost(message, tag = "45")]
    ChangeMode(ChangeMode),
    #[prost(message, tag = "47")]
    GetFile(GetFile),
    #[prost(message, tag = "48")]
    ChunkReceived(ChunkAcknowledgement),
}

/// A reply from the guest. Its body is decoded by the caller, which knows how large it may be.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Reply {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) id: Bytes,
    #[prost(oneof = "ReplyBody", tags = "10, 20, 21, 30, 40, 41, 42, 43, 44, 46, 47")]
    pub(super) body: Option<ReplyBody>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
pub(super) enum ReplyBody {
    /// [`GuestWelcome`].
    #[prost(bytes = "bytes", tag = "10")]
    Welcome(Bytes),
    /// [`CommandError`].
    #[prost(bytes = "bytes", tag = "20")]
    CommandError(Bytes),
    #[prost(bytes = "bytes", tag = "21")]
    UnknownCommand(Bytes),
    #[prost(bytes = "bytes", tag = "30")]
    Ping(Bytes),
    /// [`ExecuteReply`].
    #[prost(bytes = "bytes", tag = "40")]
    Execute(Bytes),
    /// [`SystemRunning`].
    #[prost(bytes = "bytes", tag = "41")]
    SystemRunning(Bytes),
    /// [`Facts`].
    #[prost(bytes = "bytes", tag = "42")]
    Facts(Bytes),
    /// [`ChunkAcknowledgement`].
    #[prost(bytes = "bytes", tag = "43")]
    ChunkWritten(Bytes),
    #[prost(bytes = "bytes", tag = "44")]
    ModeChanged(Bytes),
    /// [`FileChunk`].
    #[prost(bytes = "bytes", tag = "46")]
    FileChunk(Bytes),
    /// [`Stat`].
    #[prost(bytes = "bytes", tag = "47")]
    Stat(Bytes),
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct Empty {}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct HostWelcome {
    #[prost(string, tag = "1")]
    pub(super) version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GuestWelcome {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) version: Bytes,
    #[prost(double, tag = "2")]
    pub(super) boot_time: f64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct CommandError {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) error: Bytes,
}

/// The kind of a [`CommandError`]. The protocol transmits only a text, so some kinds are recognized by the texts of
/// released agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CommandErrorKind {
    /// The program of a command line does not exist. Agents up to 1.0.1 report this instead of running the shell.
    ProgramNotFound(String),
    /// In reply to `GetFile`: the file does not exist, which agents up to 1.0.1 fail to encode.
    FileNotFound(String),
    Other(String),
}

impl CommandError {
    const PROGRAM_NOT_FOUND: &str = "No such command";
    const FILE_NOT_FOUND: &str = "Parameter to MergeFrom()";

    pub(super) fn kind(&self) -> CommandErrorKind {
        let reason = failure_reason(&String::from_utf8_lossy(&self.error));
        if reason.starts_with(Self::PROGRAM_NOT_FOUND) {
            CommandErrorKind::ProgramNotFound(reason)
        } else if reason.starts_with(Self::FILE_NOT_FOUND) {
            CommandErrorKind::FileNotFound(reason)
        } else {
            CommandErrorKind::Other(reason)
        }
    }
}

/// The other fields of the message keep their defaults.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Execute {
    #[prost(string, tag = "1")]
    pub(super) line: String,
    #[prost(string, tag = "6")]
    pub(super) request: String,
    #[prost(string, tag = "7")]
    pub(super) execution: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct ExecuteReply {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) stdout: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) stderr: Bytes,
    #[prost(int32, tag = "3")]
    pub(super) return_code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SystemRunning {
    #[prost(bool, tag = "1")]
    pub(super) result: bool,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) message: Bytes,
    #[prost(double, tag = "3")]
    pub(super) boot_time: f64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Facts {
    /// The values are JSON.
    #[prost(message, repeated, tag = "1")]
    pub(super) distribution: Vec<NamedValue>,
    #[prost(message, repeated, tag = "2")]
    pub(super) mounts: Vec<Mount>,
    #[prost(message, repeated, tag = "3")]
    pub(super) ssh_host_keys: Vec<NamedValue>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct NamedValue {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Mount {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) device: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) mount_point: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) fs_type: Bytes,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct PutFile {
    #[prost(string, tag = "1")]
    pub(super) path: String,
    #[prost(int32, tag = "2")]
    pub(super) mode: i32,
    #[prost(int64, tag = "3")]
    pub(super) length: i64,
    #[prost(message, optional, tag = "4")]
    pub(super) first_chunk: Option<FileChunk>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct FileChunk {
    #[prost(int64, tag = "1")]
    pub(super) offset: i64,
    /// Always 0, which is base64.
    #[prost(int32, tag = "2")]
    pub(super) encoding: i32,
    /// Empty at the end of the file.
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) payload: Bytes,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct ChunkAcknowledgement {
    #[prost(string, tag = "1")]
    pub(super) path: String,
    #[prost(int64, tag = "2")]
    pub(super) offset: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct ChangeMode {
    #[prost(string, tag = "1")]
    pub(super) path: String,
    #[prost(int32, tag = "2")]
    pub(super) mode: i32,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct GetFile {
    #[prost(string, tag = "1")]
    pub(super) path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Stat {
    #[prost(int64, tag = "2")]
    pub(super) mode: i64,
    #[prost(int64, tag = "3")]
    pub(super) size: i64,
    #[prost(int64, tag = "4")]
    pub(super) uid: i64,
    #[prost(int64, tag = "5")]
    pub(super) gid: i64,
    #[prost(double, tag = "6")]
    pub(super) atime: f64,
    #[prost(double, tag = "7")]
    pub(super) mtime: f64,
    #[prost(double, tag = "8")]
    pub(super) ctime: f64,
}

/// Appends an envelope with one item to a buffer.
pub(super) fn write(item: &impl Message, buffer: &mut BytesMut) -> Result<(), EncodeError> {
    buffer.extend_from_slice(&[ITEM_KEY]);
    item.encode_length_delimited(buffer)
}
