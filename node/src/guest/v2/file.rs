//! File transfers.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Bytes, BytesMut};
use futures_core::Stream;
use muster_types::guest::{GuestError, GuestFileInfo};
use muster_types::storage::ByteStream;
use prost::Message;

use super::call::{Call, CallError, Caller, MAX_REPLY};
use super::message::{
    ChunkAcknowledgement, CommandErrorKind, FileChunk, GetFile, PutFile, ReplyBody, RequestBody, Stat,
};
use super::reader::ConnectionError;
use crate::guest::channel::stream_error;

/// The chunk size of uploads, which an agent receives with one read.
const CHUNK_SIZE: usize = 72 << 10;

/// The maximum number of chunks that the agent has not acknowledged.
const MAX_UNACKNOWLEDGED: usize = 5;

const DEFAULT_MODE: u32 = 0o644;
const PERMISSION_BITS: u32 = 0o7777;

/// The maximum size of buffered acknowledgements: an agent may not read while it sends.
const MAX_BUFFERED_ACKNOWLEDGEMENTS: usize = 16 << 10;

/// The progress of an upload.
struct Upload {
    data: ByteStream,
    size: u64,
    /// Data that was read from the stream and not sent.
    buffered: BytesMut,
    sent: u64,
    /// The offsets of the chunks that the agent has not acknowledged.
    unacknowledged: VecDeque<u64>,
}

pub(super) async fn put(
    caller: &Caller,
    path: &str,
    size: u64,
    mode: Option<u32>,
    data: ByteStream,
) -> Result<(), GuestError> {
    let mut upload =
        Upload { data, size, buffered: BytesMut::new(), sent: 0, unacknowledged: VecDeque::new() };
    let first = upload.next_chunk().await?;
    let mut ended = first.payload.is_empty();
    let length = i64::try_from(size).map_err(|_| too_large())?;
    let mode = (mode.unwrap_or(DEFAULT_MODE) & PERMISSION_BITS).cast_signed();
    let request = PutFile { path: path.to_owned(), mode, length, first_chunk: Some(first) };
    let mut call = caller.call(RequestBody::PutFile(request), MAX_REPLY).await?;
    while !ended || !upload.unacknowledged.is_empty() {
        tokio::select! {
            chunk = upload.next_chunk(), if !ended && upload.unacknowledged.len() < MAX_UNACKNOWLEDGED => {
                let chunk = chunk?;
                ended = chunk.payload.is_empty();
                call.send(RequestBody::FileChunk(chunk))?;
            }
            reply = call.next() => match reply? {
                ReplyBody::ChunkWritten(bytes) => upload.handle_acknowledgement(bytes)?,
                _ => return Err(ConnectionError::InvalidData.into()),
            },
        }
    }
    Ok(())
}

fn too_large() -> GuestError {
    GuestError::HostFailed("the file is too large for the agent's protocol".into())
}

impl Upload {
    /// Returns the next chunk, which is empty at the end. Cancel safe.
    async fn next_chunk(&mut self) -> Result<FileChunk, GuestError> {
        while self.buffered.len() < CHUNK_SIZE && self.received() < self.size {
            let Some(bytes) = self.next_bytes().await? else {
                return Err(GuestError::HostFailed("the file is shorter than its announced size".into()));
            };
            self.buffered.extend_from_slice(&bytes);
        }
        while self.buffered.is_empty() && self.received() == self.size {
            match self.next_bytes().await? {
                None => break,
                Some(bytes) => self.buffered.extend_from_slice(&bytes),
            }
        }
        if self.received() > self.size {
            return Err(GuestError::HostFailed("the file is longer than its announced size".into()));
        }
        let chunk = self.buffered.split_to(self.buffered.len().min(CHUNK_SIZE));
        let offset = i64::try_from(self.sent).map_err(|_| too_large())?;
        self.unacknowledged.push_back(self.sent);
        self.sent += chunk.len() as u64;
        Ok(FileChunk { offset, encoding: 0, payload: BASE64.encode(chunk).into() })
    }

    /// Returns the number of bytes received from the stream.
    fn received(&self) -> u64 {
        self.sent + self.buffered.len() as u64
    }

    async fn next_bytes(&mut self) -> Result<Option<Bytes>, GuestError> {
        let bytes = poll_fn(|context| self.data.as_mut().poll_next(context)).await;
        bytes.transpose().map_err(|error| GuestError::HostFailed(error.to_string()))
    }

    fn handle_acknowledgement(&mut self, bytes: Bytes) -> Result<(), GuestError> {
        let written = ChunkAcknowledgement::decode(bytes).map_err(|_| ConnectionError::InvalidData)?;
        let expected = self.unacknowledged.pop_front();
        match u64::try_from(written.offset).ok() == expected {
            true => Ok(()),
            false => Err(GuestError::Refused("the guest's agent acknowledged the wrong chunk".into())),
        }
    }
}

pub(super) async fn get(caller: &Caller, path: &str) -> Result<(GuestFileInfo, ByteStream), GuestError> {
    let request = RequestBody::GetFile(GetFile { path: path.to_owned() });
    let mut call = caller.call(request, MAX_REPLY).await?;
    let bytes = match call.next().await {
        Ok(ReplyBody::Stat(bytes)) => bytes,
        Ok(_) => return Err(GuestError::Refused("the guest's agent sent no file metadata".into())),
        Err(CallError::Command(CommandErrorKind::FileNotFound(_))) => {
            return Err(GuestError::Refused("file not found".into()));
        }
        Err(error) => return Err(error.into()),
    };
    let info = file_info(&Stat::decode(bytes).map_err(|_| ConnectionError::InvalidData)?);
    let download = Download { call, path: path.to_owned(), received: 0 };
    Ok((info, Box::pin(DownloadStream(Some(Box::pin(download.next()))))))
}

/// Converts file metadata. Invalid fields become zero: the metadata is for display only.
fn file_info(stat: &Stat) -> GuestFileInfo {
    let unsigned_32 = |number: i64| u32::try_from(number).unwrap_or_default();
    let time = |time: f64| if (0.0..1e11).contains(&time) { time } else { 0.0 };
    GuestFileInfo {
        mode: unsigned_32(stat.mode),
        size: u64::try_from(stat.size).unwrap_or_default(),
        uid: unsigned_32(stat.uid),
        gid: unsigned_32(stat.gid),
        atime: time(stat.atime),
        mtime: time(stat.mtime),
        ctime: time(stat.ctime),
    }
}

/// The progress of a download.
struct Download {
    call: Call,
    path: String,
    received: i64,
}

/// A future of the next chunk, or `None` at the end of the file, that also returns the download.
type NextChunk = Pin<Box<dyn Future<Output = (Download, Result<Option<Bytes>, GuestError>)> + Send>>;

impl Download {
    async fn next(mut self) -> (Self, Result<Option<Bytes>, GuestError>) {
        let chunk = self.next_chunk().await;
        (self, chunk)
    }

    async fn next_chunk(&mut self) -> Result<Option<Bytes>, GuestError> {
        let ReplyBody::FileChunk(bytes) = self.call.next().await? else {
            return Err(ConnectionError::InvalidData.into());
        };
        let chunk = FileChunk::decode(bytes).map_err(|_| ConnectionError::InvalidData)?;
        let invalid = || GuestError::Refused("the guest's agent sent an invalid chunk".into());
        if chunk.offset != self.received || chunk.encoding != 0 {
            return Err(invalid());
        }
        if chunk.payload.is_empty() {
            return Ok(None);
        }
        let bytes = BASE64.decode(&chunk.payload).map_err(|_| invalid())?;
        if self.call.unwritten() < MAX_BUFFERED_ACKNOWLEDGEMENTS {
            let acknowledgement = ChunkAcknowledgement { path: self.path.clone(), offset: self.received };
            self.call.send(RequestBody::ChunkReceived(acknowledgement))?;
        }
        self.received += i64::try_from(bytes.len()).expect("at most MAX_REPLY");
        Ok(Some(bytes.into()))
    }
}

/// The data of a download. Nothing is received from the guest before the stream is polled.
struct DownloadStream(Option<NextChunk>);

impl Stream for DownloadStream {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(next) = &mut self.0 else { return Poll::Ready(None) };
        let (download, chunk) = ready!(next.as_mut().poll(context));
        self.0 = match &chunk {
            Ok(Some(_)) => Some(Box::pin(download.next())),
            _ => None,
        };
        Poll::Ready(chunk.transpose().map(|chunk| chunk.map_err(|error| stream_error(&error))))
    }
}
