//! An agent of protocol 2 on a socket of this host, as the released ones are: it reads until everything that came can be
//! read as one envelope, and does one thing after the other.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Bytes, BytesMut};
use muster_types::guest::{AgentState, GuestReport};
use muster_types::ids::InstanceId;
use muster_types::vm::ChangeStream;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Command;
use tokio::task::AbortHandle;

use super::message::{
    self, Answer, ChunkReply, CommandError, Executed, Fact, Facts, FileChunk, GuestWelcome, Nothing,
    Question, Reply, Request, Stat, SystemRunning,
};
use super::{Way, keep};
use crate::changes::ChangeNotifier;
use crate::guest::contact::{Guest, Speaker};

/// The bytes to send in place of what the agent would, if any.
type Trick = Box<dyn Fn(&Request) -> Option<Vec<u8>> + Send>;

#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(message, repeated, tag = "1")]
    requests: Vec<Request>,
}

/// What an agent is like.
pub(super) struct Behaviour {
    pub(super) boot_time: Mutex<f64>,
    /// What it answers when it is asked whether the guest is up, one after the other and the last for ever.
    pub(super) running: Mutex<Vec<&'static str>>,
    pub(super) files: Mutex<HashMap<String, Vec<u8>>>,
    pub(super) modes: Mutex<HashMap<String, i32>>,
    pub(super) trick: Mutex<Option<Trick>>,
    /// How many connections are open.
    pub(super) open: AtomicUsize,
    /// How many bytes of files it could send.
    pub(super) sent: AtomicUsize,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            boot_time: Mutex::new(1_700_000_000.0),
            running: Mutex::new(vec!["running"]),
            files: Mutex::default(),
            modes: Mutex::default(),
            trick: Mutex::default(),
            open: AtomicUsize::default(),
            sent: AtomicUsize::default(),
        }
    }
}

/// A guest with such an agent, and those who keep in contact with it.
pub(super) struct Host {
    pub(super) agent: Arc<Behaviour>,
    pub(super) guest: Arc<Guest>,
    changes: ChangeStream,
    folder: tempfile::TempDir,
    listener: AbortHandle,
    keeper: AbortHandle,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.listener.abort();
        self.keeper.abort();
    }
}

impl Host {
    /// With an agent that listens.
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let agent = Arc::new(Behaviour::default());
        let listener = listen(&agent, path.clone());
        let notifier = ChangeNotifier::default();
        let changes = notifier.subscribe();
        let guest = Arc::new(Guest::new(InstanceId::new(), notifier));
        let keeper = tokio::spawn(keep(guest.clone(), Way::Socket(path))).abort_handle();
        Self { agent, guest, changes, folder, listener, keeper }
    }

    /// Ends the agent with all its connections.
    pub(super) fn stop_agent(&self) {
        self.listener.abort();
        std::fs::remove_file(self.folder.path().join("agent")).unwrap();
    }

    pub(super) fn start_agent(&mut self) {
        self.listener = listen(&self.agent, self.folder.path().join("agent"));
    }

    pub(super) fn play(&self, trick: impl Fn(&Request) -> Option<Vec<u8>> + Send + 'static) {
        *self.agent.trick.lock().unwrap() = Some(Box::new(trick));
    }

    /// Waits until the report is like that.
    pub(super) async fn wait_for(&mut self, is_so: impl Fn(&GuestReport) -> bool) -> GuestReport {
        loop {
            let report = self.guest.report();
            if is_so(&report) {
                return report;
            }
            std::future::poll_fn(|context| self.changes.as_mut().poll_next(context)).await.unwrap();
        }
    }

    pub(super) async fn ready(&mut self) -> Arc<dyn Speaker> {
        self.wait_for(|report| report.state == AgentState::Ready).await;
        self.guest.speaker().unwrap()
    }
}

/// Waits until something is so that nobody tells.
pub(super) async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn listen(agent: &Arc<Behaviour>, path: PathBuf) -> AbortHandle {
    let listener = UnixListener::bind(path).unwrap();
    let agent = agent.clone();
    let listening = async move {
        // Ends with the listener.
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let agent = agent.clone();
            connections.spawn(async move {
                agent.open.fetch_add(1, Ordering::Relaxed);
                let _open = Open(agent.clone());
                let _ = serve(&agent, stream).await;
            });
        }
    };
    tokio::spawn(listening).abort_handle()
}

struct Open(Arc<Behaviour>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn item(id: &str, answer: Answer) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    message::write(&Reply { id: id.to_owned().into(), answer: Some(answer) }, &mut bytes).unwrap();
    bytes.to_vec()
}

pub(super) fn error(id: &str, text: &str) -> Vec<u8> {
    item(id, Answer::CommandError(CommandError { error: text.to_owned().into() }.encode_to_vec().into()))
}

pub(super) fn chunk(id: &str, offset: usize, payload: impl Into<Bytes>) -> Vec<u8> {
    let chunk = FileChunk { offset: offset.try_into().unwrap(), encoding: 0, payload: payload.into() };
    item(id, Answer::FileChunk(chunk.encode_to_vec().into()))
}

pub(super) fn stat(id: &str, size: usize) -> Vec<u8> {
    let stat =
        Stat { mode: 0o100_600, size: size.try_into().unwrap(), mtime: 5.5, uid: -1, ..Stat::default() };
    item(id, Answer::Stat(stat.encode_to_vec().into()))
}

async fn serve(agent: &Behaviour, mut stream: UnixStream) -> std::io::Result<()> {
    let mut buffered = Vec::new();
    // The file that is written.
    let mut written: Option<(String, Vec<u8>)> = None;
    loop {
        if stream.read_buf(&mut buffered).await? == 0 {
            return Ok(());
        }
        let Ok(envelope) = Envelope::decode(buffered.as_slice()) else { continue };
        buffered.clear();
        for request in envelope.requests {
            let trick = agent.trick.lock().unwrap().as_ref().and_then(|trick| trick(&request));
            if let Some(bytes) = trick {
                stream.write_all(&bytes).await?;
                continue;
            }
            let id = request.id.as_str();
            let answer = match request.question.unwrap() {
                Question::Welcome(_) => {
                    let boot_time = *agent.boot_time.lock().unwrap();
                    let welcome = GuestWelcome { version: "version 1.0.1".into(), boot_time };
                    item(id, Answer::Welcome(welcome.encode_to_vec().into()))
                }
                Question::Ping(_) => item(id, Answer::Ping(Nothing {}.encode_to_vec().into())),
                Question::IsSystemRunning(_) => {
                    let mut running = agent.running.lock().unwrap();
                    let state = if running.len() > 1 { running.remove(0) } else { running[0] };
                    let boot_time = *agent.boot_time.lock().unwrap();
                    let running =
                        SystemRunning { result: state == "running", message: state.into(), boot_time };
                    item(id, Answer::SystemRunning(running.encode_to_vec().into()))
                }
                Question::GatherFacts(_) => {
                    let distribution = vec![Fact { name: "id".into(), value: "\"debian\"".into() }];
                    let facts = Facts { distribution, ..Facts::default() };
                    item(id, Answer::Facts(facts.encode_to_vec().into()))
                }
                Question::Execute(execute) => {
                    let ended = Command::new("/bin/sh").arg("-c").arg(execute.line).output().await?;
                    let executed = Executed {
                        stdout: ended.stdout.into(),
                        stderr: ended.stderr.into(),
                        return_code: ended.status.code().unwrap_or(-1),
                    };
                    item(id, Answer::Executed(executed.encode_to_vec().into()))
                }
                Question::ChangeMode(change) => {
                    agent.modes.lock().unwrap().insert(change.path, change.mode);
                    item(id, Answer::ModeChanged(Bytes::new()))
                }
                Question::PutFile(put) => {
                    agent.modes.lock().unwrap().insert(put.path.clone(), put.mode);
                    written = Some((put.path, Vec::new()));
                    take(agent, id, &mut written, &put.first.unwrap())
                }
                Question::FileChunk(chunk) => take(agent, id, &mut written, &chunk),
                Question::GetFile(wanted) => {
                    let file = agent.files.lock().unwrap().get(&wanted.path).cloned();
                    match file {
                        None => error(id, "file not found"),
                        Some(file) => {
                            stream.write_all(&stat(id, file.len())).await?;
                            let mut offset = 0;
                            for piece in file.chunks(102_400) {
                                stream.write_all(&chunk(id, offset, BASE64.encode(piece))).await?;
                                offset += piece.len();
                                agent.sent.fetch_add(piece.len(), Ordering::Relaxed);
                            }
                            chunk(id, offset, "")
                        }
                    }
                }
                Question::ChunkTaken(_) => Vec::new(),
            };
            stream.write_all(&answer).await?;
        }
    }
}

/// Takes a piece of a file.
fn take(agent: &Behaviour, id: &str, file: &mut Option<(String, Vec<u8>)>, chunk: &FileChunk) -> Vec<u8> {
    let Some((path, bytes)) = file else { return error(id, "there is no file") };
    let path = path.clone();
    if chunk.payload.is_empty() {
        agent.files.lock().unwrap().extend(file.take());
    } else {
        bytes.extend(BASE64.decode(&chunk.payload).unwrap());
    }
    item(id, Answer::ChunkWritten(ChunkReply { path, offset: chunk.offset }.encode_to_vec().into()))
}
