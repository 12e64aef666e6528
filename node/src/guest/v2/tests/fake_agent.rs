//! An agent of protocol 2 on a Unix socket that behaves like the released ones: it reads until all received bytes decode
//! as one envelope, and handles requests in sequence.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Bytes, BytesMut};
use muster_types::guest::{AgentState, GuestReport};
use muster_types::ids::InstanceId;
use muster_types::vm::ChangeStream;
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Command;
use tokio::task::AbortHandle;

use super::super::message::{
    self, ChunkAcknowledgement, CommandError, Empty, ExecuteReply, Facts, FileChunk, GuestWelcome,
    NamedValue, Reply, ReplyBody, Request, RequestBody, Stat, SystemRunning,
};
use super::super::{AgentAddress, run_sessions};
use crate::change_notifier::ChangeNotifier;
use crate::guest::channel::{AgentChannel, AgentClient};

/// Returns the bytes to send in place of the regular reply, if any.
type ReplyOverride = Box<dyn Fn(&Request) -> Option<Vec<u8>> + Send>;

#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(message, repeated, tag = "1")]
    requests: Vec<Request>,
}

/// The state and the behaviour of a fake agent.
pub(super) struct FakeAgent {
    pub(super) boot_time: Mutex<f64>,
    /// The replies to readiness queries; the last one repeats.
    pub(super) system_states: Mutex<Vec<&'static str>>,
    pub(super) files: Mutex<HashMap<String, Vec<u8>>>,
    pub(super) modes: Mutex<HashMap<String, i32>>,
    pub(super) reply_override: Mutex<Option<ReplyOverride>>,
    pub(super) open_connections: AtomicUsize,
    /// The number of file bytes written to sockets.
    pub(super) bytes_sent: AtomicUsize,
}

impl Default for FakeAgent {
    fn default() -> Self {
        Self {
            boot_time: Mutex::new(1_700_000_000.0),
            system_states: Mutex::new(vec!["running"]),
            files: Mutex::default(),
            modes: Mutex::default(),
            reply_override: Mutex::default(),
            open_connections: AtomicUsize::default(),
            bytes_sent: AtomicUsize::default(),
        }
    }
}

/// A fake agent with its channel and sessions.
pub(super) struct TestGuest {
    pub(super) agent: Arc<FakeAgent>,
    pub(super) channel: Arc<AgentChannel>,
    changes: ChangeStream,
    directory: tempfile::TempDir,
    listener: AbortHandle,
    sessions: AbortHandle,
}

impl Drop for TestGuest {
    fn drop(&mut self) {
        self.listener.abort();
        self.sessions.abort();
    }
}

impl TestGuest {
    /// Creates a guest whose agent listens.
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        let agent = Arc::new(FakeAgent::default());
        let listener = listen(&agent, path.clone());
        let change_notifier = ChangeNotifier::default();
        let changes = change_notifier.subscribe();
        let channel = Arc::new(AgentChannel::new(InstanceId::new(), change_notifier));
        let sessions = tokio::spawn(run_sessions(channel.clone(), AgentAddress::Unix(path))).abort_handle();
        Self { agent, channel, changes, directory, listener, sessions }
    }

    /// Stops the agent and closes all its connections.
    pub(super) fn stop_agent(&self) {
        self.listener.abort();
        std::fs::remove_file(self.directory.path().join("agent")).unwrap();
    }

    pub(super) fn start_agent(&mut self) {
        self.listener = listen(&self.agent, self.directory.path().join("agent"));
    }

    pub(super) fn override_replies(&self, reply: impl Fn(&Request) -> Option<Vec<u8>> + Send + 'static) {
        *self.agent.reply_override.lock() = Some(Box::new(reply));
    }

    /// Waits until the report meets a condition.
    pub(super) async fn wait_for(&mut self, condition: impl Fn(&GuestReport) -> bool) -> GuestReport {
        loop {
            let report = self.channel.report();
            if condition(&report) {
                return report;
            }
            std::future::poll_fn(|context| self.changes.as_mut().poll_next(context)).await.unwrap();
        }
    }

    pub(super) async fn ready_client(&mut self) -> Arc<dyn AgentClient> {
        self.wait_for(|report| report.state == AgentState::Ready).await;
        self.channel.client().unwrap()
    }
}

/// Polls until a condition is met.
pub(super) async fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn listen(agent: &Arc<FakeAgent>, path: PathBuf) -> AbortHandle {
    let listener = UnixListener::bind(path).unwrap();
    let agent = agent.clone();
    let listening = async move {
        // Dropped, and with it the connections, when the listener is aborted.
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let agent = agent.clone();
            connections.spawn(async move {
                agent.open_connections.fetch_add(1, Ordering::Relaxed);
                let _guard = ConnectionGuard(agent.clone());
                let _ = serve(&agent, stream).await;
            });
        }
    };
    tokio::spawn(listening).abort_handle()
}

struct ConnectionGuard(Arc<FakeAgent>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn reply(id: &str, body: ReplyBody) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    message::write(&Reply { id: id.to_owned().into(), body: Some(body) }, &mut bytes).unwrap();
    bytes.to_vec()
}

pub(super) fn error(id: &str, text: &str) -> Vec<u8> {
    reply(id, ReplyBody::CommandError(CommandError { error: text.to_owned().into() }.encode_to_vec().into()))
}

pub(super) fn chunk(id: &str, offset: usize, payload: impl Into<Bytes>) -> Vec<u8> {
    let chunk = FileChunk { offset: offset.try_into().unwrap(), encoding: 0, payload: payload.into() };
    reply(id, ReplyBody::FileChunk(chunk.encode_to_vec().into()))
}

pub(super) fn stat(id: &str, size: usize) -> Vec<u8> {
    let stat =
        Stat { mode: 0o100_600, size: size.try_into().unwrap(), mtime: 5.5, uid: -1, ..Stat::default() };
    reply(id, ReplyBody::Stat(stat.encode_to_vec().into()))
}

async fn serve(agent: &FakeAgent, mut stream: UnixStream) -> std::io::Result<()> {
    let mut buffered = Vec::new();
    let mut upload: Option<(String, Vec<u8>)> = None;
    loop {
        if stream.read_buf(&mut buffered).await? == 0 {
            return Ok(());
        }
        let Ok(envelope) = Envelope::decode(buffered.as_slice()) else { continue };
        buffered.clear();
        for request in envelope.requests {
            let overridden = agent.reply_override.lock().as_ref().and_then(|reply| reply(&request));
            if let Some(bytes) = overridden {
                stream.write_all(&bytes).await?;
                continue;
            }
            let id = request.id.as_str();
            let reply_bytes = match request.body.unwrap() {
                RequestBody::Welcome(_) => {
                    let boot_time = *agent.boot_time.lock();
                    let welcome = GuestWelcome { version: "version 1.0.1".into(), boot_time };
                    reply(id, ReplyBody::Welcome(welcome.encode_to_vec().into()))
                }
                RequestBody::Ping(_) => reply(id, ReplyBody::Ping(Empty {}.encode_to_vec().into())),
                RequestBody::IsSystemRunning(_) => {
                    let mut states = agent.system_states.lock();
                    let state = if states.len() > 1 { states.remove(0) } else { states[0] };
                    let boot_time = *agent.boot_time.lock();
                    let running =
                        SystemRunning { result: state == "running", message: state.into(), boot_time };
                    reply(id, ReplyBody::SystemRunning(running.encode_to_vec().into()))
                }
                RequestBody::GatherFacts(_) => {
                    let distribution = vec![NamedValue { name: "id".into(), value: "\"debian\"".into() }];
                    let facts = Facts { distribution, ..Facts::default() };
                    reply(id, ReplyBody::Facts(facts.encode_to_vec().into()))
                }
                RequestBody::Execute(execute) => run(id, &execute.line).await?,
                RequestBody::ChangeMode(change) => {
                    agent.modes.lock().insert(change.path, change.mode);
                    reply(id, ReplyBody::ModeChanged(Bytes::new()))
                }
                RequestBody::PutFile(put) => {
                    agent.modes.lock().insert(put.path.clone(), put.mode);
                    upload = Some((put.path, Vec::new()));
                    receive_chunk(agent, id, &mut upload, &put.first_chunk.unwrap())
                }
                RequestBody::FileChunk(chunk) => receive_chunk(agent, id, &mut upload, &chunk),
                RequestBody::GetFile(get) => send_file(agent, &mut stream, id, &get.path).await?,
                RequestBody::ChunkReceived(_) => Vec::new(),
            };
            stream.write_all(&reply_bytes).await?;
        }
    }
}

/// Runs a command line and returns the reply.
async fn run(id: &str, line: &str) -> std::io::Result<Vec<u8>> {
    let output = Command::new("/bin/sh").arg("-c").arg(line).output().await?;
    let result = ExecuteReply {
        stdout: output.stdout.into(),
        stderr: output.stderr.into(),
        return_code: output.status.code().unwrap_or(-1),
    };
    Ok(reply(id, ReplyBody::Execute(result.encode_to_vec().into())))
}

/// Sends a file and returns the last reply.
async fn send_file(
    agent: &FakeAgent,
    stream: &mut UnixStream,
    id: &str,
    path: &str,
) -> std::io::Result<Vec<u8>> {
    let Some(file) = agent.files.lock().get(path).cloned() else { return Ok(error(id, "file not found")) };
    stream.write_all(&stat(id, file.len())).await?;
    let mut offset = 0;
    for part in file.chunks(102_400) {
        stream.write_all(&chunk(id, offset, BASE64.encode(part))).await?;
        offset += part.len();
        agent.bytes_sent.fetch_add(part.len(), Ordering::Relaxed);
    }
    Ok(chunk(id, offset, ""))
}

/// Handles a chunk of an upload.
fn receive_chunk(
    agent: &FakeAgent,
    id: &str,
    file: &mut Option<(String, Vec<u8>)>,
    chunk: &FileChunk,
) -> Vec<u8> {
    let Some((path, bytes)) = file else { return error(id, "there is no upload") };
    let path = path.clone();
    if chunk.payload.is_empty() {
        agent.files.lock().extend(file.take());
    } else {
        bytes.extend(BASE64.decode(&chunk.payload).unwrap());
    }
    reply(
        id,
        ReplyBody::ChunkWritten(ChunkAcknowledgement { path, offset: chunk.offset }.encode_to_vec().into()),
    )
}
