//! Interactive sessions over upgraded connections, with a real server.

use std::time::Duration;

use axum::http::Request;
use muster_api::{Listener, serve};
use muster_node::GuestScript;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::terminal::{TERMINAL_PROTOCOL, TerminalFrame, TerminalSize, take_frame};
use reqwest::header::{CONNECTION, UPGRADE};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::Fixture;

/// A server for the cluster of a fixture, which ends with it.
struct Server {
    url: String,
    _stop: watch::Sender<bool>,
}

impl Server {
    async fn start(fixture: &Fixture) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        let timeout = Duration::from_secs(30);
        let listener = Listener { socket, tls: None, timeout, max_connections: 10 };
        let (stop, stopped) = watch::channel(false);
        let service = fixture.cluster.service.clone();
        let handler = move |request: Request<_>, peer| {
            let service = service.clone();
            async move { service.call(request, peer).await }
        };
        tokio::spawn(serve(listener, handler, stopped));
        Self { url, _stop: stop }
    }

    async fn open(&self, fixture: &Fixture, body: &Value) -> reqwest::Response {
        let url = format!("{}/instances/{}/agent/terminal", self.url, fixture.instance);
        let request = reqwest::Client::new().post(url).bearer_auth(&fixture.token).json(body);
        request.header(CONNECTION, "Upgrade").header(UPGRADE, TERMINAL_PROTOCOL).send().await.unwrap()
    }
}

struct Session {
    stream: reqwest::Upgraded,
    buffer: bytes::BytesMut,
}

impl Session {
    async fn send(&mut self, frame: &TerminalFrame) {
        let mut bytes = bytes::BytesMut::new();
        frame.encode(&mut bytes);
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// Returns the next frame, or `None` at the end of the connection.
    async fn receive(&mut self) -> Option<TerminalFrame> {
        loop {
            match take_frame(&mut self.buffer).unwrap() {
                Some(frame) => return Some(frame),
                None if self.stream.read_buf(&mut self.buffer).await.unwrap() == 0 => return None,
                None => {}
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_carries_input_sizes_and_the_exit_code() {
    let fixture = Fixture::new(&[]).await;
    let server = Server::start(&fixture).await;
    let body = json!({ "command_line": "top", "term": "vt100", "rows": 40, "columns": 100 });
    let response = server.open(&fixture, &body).await;
    assert_eq!(response.status(), 101);
    let stream = response.upgrade().await.unwrap();
    let mut session = Session { stream, buffer: bytes::BytesMut::new() };
    let data = |text: &'static str| Some(TerminalFrame::Data(text.into()));
    assert_eq!(session.receive().await, data("top in vt100\r\n40 100\r\n"));
    session.send(&TerminalFrame::Data("q".into())).await;
    assert_eq!(session.receive().await, data("q"));
    session.send(&TerminalFrame::Resize(TerminalSize { rows: 50, columns: 120 })).await;
    assert_eq!(session.receive().await, data("50 120\r\n"));
    session.send(&TerminalFrame::Data("\u{3}".into())).await;
    assert_eq!(session.receive().await, Some(TerminalFrame::Exited(130)));
    assert_eq!(session.receive().await, None);
    let messages = fixture.cluster.messages(&ObjectRef::new(ObjectType::Instance, &fixture.instance)).await;
    for message in ["interactive session started", "interactive session ended"] {
        assert!(messages.iter().any(|recorded| recorded == message), "{messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_agents_without_terminals_and_requests_without_upgrade() {
    let fixture = Fixture::new(&[]).await;
    let server = Server::start(&fixture).await;
    let plain = fixture.request("terminal", json!({ "command_line": "top" })).await;
    assert_eq!(plain.status, 400, "{}", plain.text);
    assert!(plain.text.contains("Upgrade: muster-terminal"), "{}", plain.text);
    let odd = server.open(&fixture, &json!({ "command_line": "top", "term": "a b" })).await;
    assert_eq!(odd.status(), 400);
    fixture.set_guest_script(GuestScript { stateless_agent: true, ..GuestScript::default() });
    let response = server.open(&fixture, &json!({ "command_line": "top" })).await;
    assert_eq!(response.status(), 409);
    assert!(response.text().await.unwrap().contains("muster-agent 1.1"));
}
