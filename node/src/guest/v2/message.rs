//! What host and guest say to each other, as protocol buffers.
//!
//! Both send envelopes one after the other, whose only field is a list. An envelope has no length, but everything in a
//! list has one: several envelopes in a row are the same bytes as one with all that is in them. So one item is written
//! after the other here, and read after the other by [`super::inbox`].

use bytes::{Bytes, BytesMut};
use prost::{EncodeError, Message, Oneof};

/// The field of an envelope that everything is in, as it is written.
const ITEM: u8 = 1 << 3 | 2;

/// What a host asks.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Request {
    /// Answers repeat it.
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(oneof = "Question", tags = "10, 30, 40, 41, 42, 43, 44, 45, 47, 48")]
    pub(super) question: Option<Question>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Question {
    #[prost(message, tag = "10")]
    Welcome(HostWelcome),
    #[prost(message, tag = "30")]
    Ping(Nothing),
    #[prost(message, tag = "40")]
    Execute(Execute),
    #[prost(message, tag = "41")]
    IsSystemRunning(Nothing),
    #[prost(message, tag = "42")]
    GatherFacts(Nothing),
    #[prost(message, tag = "43")]
    PutFile(PutFile),
    #[prost(message, tag = "44")]
    FileChunk(FileChunk),
    #[prost(message, tag = "45")]
    ChangeMode(ChangeMode),
    #[prost(message, tag = "47")]
    GetFile(Path),
    #[prost(message, tag = "48")]
    ChunkTaken(ChunkReply),
}

/// What a guest answers. What is in an answer is only read by whoever asked for it, who knows how much that may be.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Reply {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) id: Bytes,
    #[prost(oneof = "Answer", tags = "10, 20, 21, 30, 40, 41, 42, 43, 44, 46, 47")]
    pub(super) answer: Option<Answer>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
pub(super) enum Answer {
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
    /// [`Executed`].
    #[prost(bytes = "bytes", tag = "40")]
    Executed(Bytes),
    /// [`SystemRunning`].
    #[prost(bytes = "bytes", tag = "41")]
    SystemRunning(Bytes),
    /// [`Facts`].
    #[prost(bytes = "bytes", tag = "42")]
    Facts(Bytes),
    /// [`ChunkReply`].
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
pub(super) struct Nothing {}

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

/// The further fields of a command have values that mean nothing special.
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
pub(super) struct Executed {
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
    /// Their values are JSON.
    #[prost(message, repeated, tag = "1")]
    pub(super) distribution: Vec<Fact>,
    #[prost(message, repeated, tag = "2")]
    pub(super) mounts: Vec<Mount>,
    #[prost(message, repeated, tag = "3")]
    pub(super) ssh_host_keys: Vec<Fact>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Fact {
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
    pub(super) place: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) kind: Bytes,
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
    pub(super) first: Option<FileChunk>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct FileChunk {
    #[prost(int64, tag = "1")]
    pub(super) offset: i64,
    /// 0 is base64; there is no other.
    #[prost(int32, tag = "2")]
    pub(super) encoding: i32,
    /// Empty at the end of the file.
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) payload: Bytes,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct ChunkReply {
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
pub(super) struct Path {
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

/// Writes an envelope with one item.
pub(super) fn write(item: &impl Message, to: &mut BytesMut) -> Result<(), EncodeError> {
    to.extend_from_slice(&[ITEM]);
    item.encode_length_delimited(to)
}
