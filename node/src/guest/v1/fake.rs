//! A machine whose agent is played by a test.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use muster_agent::frame::{FrameDecoder, encode};
use muster_types::guest::{AgentState, CommandKey, GuestApi, GuestCommand, GuestReport};
use muster_types::ids::{AgentOperationId, InstanceId};
use muster_types::instance::SideChannel;
use muster_types::storage::ByteStream;
use muster_types::vm::ChangeStream;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::guest::{Contact, Contacts, LocalGuests};
use crate::vm::socket;

/// Longer than anything here takes, by a clock that runs only when nothing else does.
const PATIENCE: Duration = Duration::from_secs(100_000);

pub(super) struct World {
    _folder: tempfile::TempDir,
    listener: UnixListener,
    changes: ChangeStream,
    pub(super) id: InstanceId,
    pub(super) guests: Arc<LocalGuests>,
    pub(super) contact: Option<Contact>,
}

impl World {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(socket::AGENT)).unwrap();
        let contacts = Arc::new(Contacts::default());
        let guests = Arc::new(LocalGuests::new(contacts.clone()));
        let (id, changes) = (InstanceId::new(), guests.changes());
        let contact = contacts.begin(id, folder.path(), &[SideChannel::Agent], None);
        Self { _folder: folder, listener, changes, id, guests, contact }
    }

    /// Another machine of the same node.
    pub(super) fn begin(&self, channels: &[SideChannel]) -> (InstanceId, Option<Contact>) {
        let id = InstanceId::new();
        (id, self.guests.contacts.begin(id, self._folder.path(), channels, None))
    }

    /// With an agent that is ready.
    pub(super) async fn ready(features: &[&str]) -> (Self, FakeAgent) {
        let mut world = Self::new();
        let mut agent = world.connected().await;
        agent.be_ready(features).await;
        world.wait_for(&AgentState::Ready).await;
        (world, agent)
    }

    /// The next connection.
    pub(super) async fn connected(&self) -> FakeAgent {
        let (stream, _) = timeout(PATIENCE, self.listener.accept()).await.unwrap().unwrap();
        FakeAgent { stream, frames: FrameDecoder::new(1 << 20) }
    }

    pub(super) fn report(&self) -> GuestReport {
        self.guests.report(self.id).unwrap()
    }

    pub(super) async fn wait_for(&mut self, state: &AgentState) {
        while self.report().state != *state {
            let change = std::future::poll_fn(|context| self.changes.as_mut().poll_next(context));
            let waited = timeout(PATIENCE, change).await;
            assert!(waited.is_ok(), "{state:?} does not come, it is {:?}", self.report());
        }
    }
}

pub(super) struct FakeAgent {
    stream: UnixStream,
    frames: FrameDecoder,
}

impl FakeAgent {
    /// What the host says next; nothing at the end of the connection.
    pub(super) async fn hear(&mut self) -> Option<Value> {
        loop {
            if let Some(body) = self.frames.next_frame() {
                assert_eq!(self.frames.skipped(), 0);
                return Some(serde_json::from_slice(&body).unwrap());
            }
            let mut buffer = vec![0; 64 << 10];
            match timeout(PATIENCE, self.stream.read(&mut buffer)).await.unwrap() {
                Ok(size @ 1..) => self.frames.feed(&buffer[..size]),
                _ => return None,
            }
        }
    }

    /// What the host says next, which is this.
    pub(super) async fn expect(&mut self, command: &str) -> Value {
        let heard = self.hear().await.unwrap();
        assert_eq!(heard["command"], command, "{heard}");
        heard
    }

    /// Waits for the host to end the connection.
    pub(super) async fn end(&mut self) {
        while self.hear().await.is_some() {}
    }

    pub(super) async fn say(&mut self, packet: &Value) {
        self.write(&encode(packet.to_string().as_bytes())).await.unwrap();
    }

    pub(super) async fn reply(&mut self, request: &Value, command: &str, mut fields: Value) {
        fields["command"] = command.into();
        fields["unique"] = request["unique"].clone();
        self.say(&fields).await;
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await
    }

    pub(super) async fn be_ready(&mut self, features: &[&str]) {
        let asked = self.expect("is-system-running").await;
        let mut ready = json!({ "result": true, "message": "running", "system_boot_time": 1000.5 });
        if !features.is_empty() {
            ready["features"] = json!(features);
            ready["boot-id"] = "first".into();
        }
        self.reply(&asked, "is-system-running-response", ready).await;
    }
}

pub(super) fn command(line: &str, again: Option<&str>) -> GuestCommand {
    let key = CommandKey { operation: AgentOperationId::new(), index: 0 };
    GuestCommand { key, line: line.into(), again: again.map(str::to_owned) }
}

/// Bytes that come at once.
pub(super) struct Once(Option<Bytes>);

impl Once {
    pub(super) fn stream(bytes: Bytes) -> ByteStream {
        Box::pin(Self(Some(bytes)))
    }
}

impl Stream for Once {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.take().map(Ok))
    }
}
