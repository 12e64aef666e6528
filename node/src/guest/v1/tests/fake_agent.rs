//! A VM whose agent is driven by a test.

use std::sync::Arc;
use std::time::Duration;

use muster_agent::frame::{FrameDecoder, encode};
use muster_types::guest::{AgentState, GuestApi, GuestReport};
use muster_types::ids::InstanceId;
use muster_types::instance::SideChannel;
use muster_types::vm::ChangeStream;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::guest::{GuestHandle, GuestRegistry, LocalGuests};
use crate::vm_socket;

/// Longer than any test takes in the paused time of Tokio.
const TIMEOUT: Duration = Duration::from_secs(100_000);

pub(super) struct FakeVm {
    directory: tempfile::TempDir,
    listener: UnixListener,
    changes: ChangeStream,
    pub(super) id: InstanceId,
    pub(super) guests: Arc<LocalGuests>,
    pub(super) handle: Option<GuestHandle>,
}

impl FakeVm {
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join(vm_socket::AGENT)).unwrap();
        let registry = Arc::new(GuestRegistry::default());
        let guests = Arc::new(LocalGuests::new(registry.clone()));
        let (id, changes) = (InstanceId::new(), guests.changes());
        let handle = registry.attach(id, directory.path(), &[SideChannel::Agent], None);
        Self { directory, listener, changes, id, guests, handle }
    }

    /// Attaches another VM of the same host.
    pub(super) fn attach_another(&self, channels: &[SideChannel]) -> (InstanceId, Option<GuestHandle>) {
        let id = InstanceId::new();
        (id, self.guests.registry.attach(id, self.directory.path(), channels, None))
    }

    /// Creates a VM with an agent that is ready.
    pub(super) async fn ready(features: &[&str]) -> (Self, FakeAgent) {
        let mut vm = Self::new();
        let mut agent = vm.accept().await;
        agent.report_ready(features).await;
        vm.wait_for(&AgentState::Ready).await;
        (vm, agent)
    }

    /// Accepts the next connection from the host.
    pub(super) async fn accept(&self) -> FakeAgent {
        let (stream, _) = timeout(TIMEOUT, self.listener.accept()).await.unwrap().unwrap();
        FakeAgent { stream, frames: FrameDecoder::new(1 << 20) }
    }

    pub(super) fn report(&self) -> GuestReport {
        self.guests.report(self.id).unwrap()
    }

    pub(super) async fn wait_for(&mut self, state: &AgentState) {
        while self.report().state != *state {
            let change = std::future::poll_fn(|context| self.changes.as_mut().poll_next(context));
            let waited = timeout(TIMEOUT, change).await;
            assert!(waited.is_ok(), "expected {state:?}, got {:?}", self.report());
        }
    }
}

pub(super) struct FakeAgent {
    stream: UnixStream,
    frames: FrameDecoder,
}

impl FakeAgent {
    /// Receives the next packet from the host, or `None` at the end of the connection.
    pub(super) async fn receive(&mut self) -> Option<Value> {
        loop {
            if let Some(body) = self.frames.next_frame() {
                assert_eq!(self.frames.skipped(), 0);
                return Some(serde_json::from_slice(&body).unwrap());
            }
            let mut buffer = vec![0; 64 << 10];
            match timeout(TIMEOUT, self.stream.read(&mut buffer)).await.unwrap() {
                Ok(size @ 1..) => self.frames.feed(&buffer[..size]),
                _ => return None,
            }
        }
    }

    /// Receives the next packet and asserts its command.
    pub(super) async fn expect(&mut self, command: &str) -> Value {
        let packet = self.receive().await.unwrap();
        assert_eq!(packet["command"], command, "{packet}");
        packet
    }

    /// Waits for the host to close the connection.
    pub(super) async fn wait_for_close(&mut self) {
        while self.receive().await.is_some() {}
    }

    pub(super) async fn send(&mut self, packet: &Value) {
        self.write(&encode(packet.to_string().as_bytes())).await.unwrap();
    }

    pub(super) async fn reply(&mut self, request: &Value, command: &str, mut fields: Value) {
        fields["command"] = command.into();
        fields["unique"] = request["unique"].clone();
        self.send(&fields).await;
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await
    }

    pub(super) async fn report_ready(&mut self, features: &[&str]) {
        let query = self.expect("is-system-running").await;
        let mut ready = json!({ "result": true, "message": "running", "system_boot_time": 1000.5 });
        if !features.is_empty() {
            ready["features"] = json!(features);
            ready["boot-id"] = "first".into();
        }
        self.reply(&query, "is-system-running-response", ready).await;
    }
}
