//! Files on their way into a guest and out of it.

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

use super::agent::{Agent, Call, USUAL};
use super::inbox::Fault;
use super::message::{Answer, ChunkReply, FileChunk, Path, PutFile, Question, Stat};
use crate::guest::contact::stream_error;

/// How much of a file goes at once: so much that an agent gets it with one read.
const PIECE: usize = 72 << 10;

/// How many pieces may be on their way.
const PIECES: usize = 5;

/// Everybody may read it, until somebody says otherwise.
const MODE: i32 = 0o644;

/// How much may wait for an agent that does not listen while it sends.
const UNSAID: usize = 16 << 10;

/// What agents up to 1.0.1 say when there is no such file: they fail to say so.
const STUMBLED: &str = "Parameter to MergeFrom()";

/// A file that is written.
struct Writing {
    data: ByteStream,
    size: u64,
    /// What came of it and was not sent.
    rest: BytesMut,
    sent: u64,
    /// Where the pieces begin that are on their way.
    pieces: VecDeque<u64>,
}

pub(super) async fn put(
    agent: &Agent,
    path: &str,
    size: u64,
    mode: Option<u32>,
    data: ByteStream,
) -> Result<(), GuestError> {
    let mut file = Writing { data, size, rest: BytesMut::new(), sent: 0, pieces: VecDeque::new() };
    let first = file.next_piece().await?;
    let mut ended = first.payload.is_empty();
    let length = i64::try_from(size).map_err(|_| GuestError::Host("the file is too long".into()))?;
    let mode = mode.and_then(|mode| i32::try_from(mode & 0o7777).ok()).unwrap_or(MODE);
    let question = PutFile { path: path.to_owned(), mode, length, first: Some(first) };
    let mut call = agent.call(Question::PutFile(question), USUAL).await?;
    while !ended || !file.pieces.is_empty() {
        tokio::select! {
            piece = file.next_piece(), if !ended && file.pieces.len() < PIECES => {
                let piece = piece?;
                ended = piece.payload.is_empty();
                call.say(Question::FileChunk(piece))?;
            }
            answer = call.next() => match answer? {
                Answer::ChunkWritten(bytes) => {
                    let written = ChunkReply::decode(bytes).map_err(|_| Fault::Garbage)?;
                    let expected = file.pieces.pop_front();
                    if u64::try_from(written.offset).ok() != expected {
                        return Err(GuestError::Refused("the guest wrote something else than was sent".into()));
                    }
                }
                _ => return Err(Fault::Garbage.into()),
            },
        }
    }
    Ok(())
}

impl Writing {
    /// The next piece, the last of which is empty. Whoever drops this loses nothing.
    async fn next_piece(&mut self) -> Result<FileChunk, GuestError> {
        while self.rest.len() < PIECE && self.came() < self.size {
            let Some(bytes) = self.next_bytes().await? else {
                return Err(GuestError::Host("there is less of the file than was said".into()));
            };
            self.rest.extend_from_slice(&bytes);
        }
        while self.rest.is_empty() && self.came() == self.size {
            match self.next_bytes().await? {
                None => break,
                Some(bytes) => self.rest.extend_from_slice(&bytes),
            }
        }
        if self.came() > self.size {
            return Err(GuestError::Host("there is more of the file than was said".into()));
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE));
        let offset = i64::try_from(self.sent).map_err(|_| GuestError::Host("the file is too long".into()))?;
        self.pieces.push_back(self.sent);
        self.sent += piece.len() as u64;
        Ok(FileChunk { offset, encoding: 0, payload: BASE64.encode(piece).into() })
    }

    fn came(&self) -> u64 {
        self.sent + self.rest.len() as u64
    }

    async fn next_bytes(&mut self) -> Result<Option<Bytes>, GuestError> {
        let bytes = poll_fn(|context| self.data.as_mut().poll_next(context)).await;
        bytes.transpose().map_err(|error| GuestError::Host(error.to_string()))
    }
}

pub(super) async fn get(agent: &Agent, path: &str) -> Result<(GuestFileInfo, ByteStream), GuestError> {
    let question = Question::GetFile(Path { path: path.to_owned() });
    let mut call = agent.call(question, USUAL).await?;
    let bytes = match call.next().await {
        Ok(Answer::Stat(bytes)) => bytes,
        Ok(_) => return Err(GuestError::Refused("the guest did not say what the file is".into())),
        Err(GuestError::Refused(why)) if why.starts_with(STUMBLED) => {
            return Err(GuestError::Refused("file not found".into()));
        }
        Err(error) => return Err(error),
    };
    let facts = facts(&Stat::decode(bytes).map_err(|_| Fault::Garbage)?);
    let reading = Reading { call, path: path.to_owned(), size: 0 };
    Ok((facts, Box::pin(Pieces(Some(Box::pin(reading.next()))))))
}

/// Makes of what a guest says what can be.
fn facts(stat: &Stat) -> GuestFileInfo {
    let small = |number: i64| u32::try_from(number).unwrap_or_default();
    let time = |time: f64| if (0.0..1e11).contains(&time) { time } else { 0.0 };
    GuestFileInfo {
        mode: small(stat.mode),
        size: u64::try_from(stat.size).unwrap_or_default(),
        uid: small(stat.uid),
        gid: small(stat.gid),
        atime: time(stat.atime),
        mtime: time(stat.mtime),
        ctime: time(stat.ctime),
    }
}

/// A file that is read.
struct Reading {
    call: Call,
    path: String,
    /// How much of it came.
    size: i64,
}

/// What it gives when the next piece is there: the rest of the file, and the piece or nothing at the end.
type Step = Pin<Box<dyn Future<Output = (Reading, Result<Option<Bytes>, GuestError>)> + Send>>;

impl Reading {
    async fn next(mut self) -> (Self, Result<Option<Bytes>, GuestError>) {
        let piece = self.piece().await;
        (self, piece)
    }

    async fn piece(&mut self) -> Result<Option<Bytes>, GuestError> {
        let Answer::FileChunk(bytes) = self.call.next().await? else { return Err(Fault::Garbage.into()) };
        let chunk = FileChunk::decode(bytes).map_err(|_| Fault::Garbage)?;
        let no_part = || GuestError::Refused("the guest sent something that is no part of the file".into());
        if chunk.offset != self.size || chunk.encoding != 0 {
            return Err(no_part());
        }
        if chunk.payload.is_empty() {
            return Ok(None);
        }
        let bytes = BASE64.decode(&chunk.payload).map_err(|_| no_part())?;
        if self.call.unsaid() < UNSAID {
            self.call.say(Question::ChunkTaken(ChunkReply { path: self.path.clone(), offset: self.size }))?;
        }
        self.size += i64::try_from(bytes.len()).unwrap_or_default();
        Ok(Some(bytes.into()))
    }
}

/// A file as those see it who read it. The guest waits until they take what it sent.
struct Pieces(Option<Step>);

impl Stream for Pieces {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(step) = &mut self.0 else { return Poll::Ready(None) };
        let (reading, piece) = ready!(step.as_mut().poll(context));
        self.0 = match &piece {
            Ok(Some(_)) => Some(Box::pin(reading.next())),
            _ => None,
        };
        Poll::Ready(piece.transpose().map(|piece| piece.map_err(|error| stream_error(&error))))
    }
}
