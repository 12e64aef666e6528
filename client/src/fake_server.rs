//! A server for tests with prepared responses.

use std::collections::VecDeque;
use std::sync::Arc;

use muster_types::key::Secret;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::api::Client;
use crate::credentials::Credentials;

/// The remaining responses to a call such as `GET /instances/web`. The last one is repeated.
type Route = (&'static str, VecDeque<(u16, Value)>);

/// A running server: the requests it received and the responses it has left.
#[derive(Debug, Clone)]
pub(crate) struct FakeServer {
    routes: Arc<Mutex<Vec<Route>>>,
    requests: Arc<Mutex<Vec<String>>>,
    /// The cursor that every response returns, if any.
    cursor: Arc<Mutex<Option<&'static str>>>,
}

impl FakeServer {
    /// Starts a server and returns a client of it. Routes ignore the query string; other calls get a 404.
    pub(crate) async fn start(routes: Vec<(&'static str, Vec<(u16, Value)>)>) -> (Client, Self) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let apiurl = format!("http://{}", listener.local_addr().unwrap());
        let routes = routes.into_iter().map(|(route, responses)| (route, responses.into())).collect();
        let fake =
            Self { routes: Arc::new(Mutex::new(routes)), requests: Arc::default(), cursor: Arc::default() };
        let server = fake.clone();
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let server = server.clone();
                tokio::spawn(async move { server.respond(socket).await });
            }
        });
        let credentials = Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl };
        (Client::new(credentials).unwrap(), fake)
    }

    /// Makes all responses those of lists that continue at a cursor.
    pub(crate) fn page(&self, cursor: &'static str) {
        *self.cursor.lock() = Some(cursor);
    }

    /// Returns the calls so far, each with its body.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }

    async fn respond(&self, mut socket: TcpStream) -> Option<()> {
        let mut request = Vec::new();
        let (head, body) = loop {
            let text = String::from_utf8_lossy(&request).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                    break (head.to_owned(), body.to_owned());
                }
            }
            if socket.read_buf(&mut request).await.ok()? == 0 {
                return None;
            }
        };
        let call = head.lines().next()?.strip_suffix(" HTTP/1.1")?;
        let (status, response) = if call == "POST /auth" {
            (200, serde_json::json!({ "access_token": "t0ken" }))
        } else {
            self.requests.lock().push(format!("{call} {body}").trim_end().to_owned());
            self.next_response(call.split('?').next()?)
        };
        let response = response.to_string();
        let length = response.len();
        let cursor = self.cursor.lock().map(|cursor| format!("x-next-cursor: {cursor}\r\n"));
        let cursor = cursor.unwrap_or_default();
        let head =
            format!("HTTP/1.1 {status} x\r\n{cursor}content-length: {length}\r\nconnection: close\r\n\r\n");
        socket.write_all((head + &response).as_bytes()).await.ok()
    }

    fn next_response(&self, call: &str) -> (u16, Value) {
        let mut routes = self.routes.lock();
        let route = routes.iter_mut().find(|(route, _)| *route == call);
        let responses = route.map(|(_, responses)| responses).filter(|responses| !responses.is_empty());
        match responses {
            Some(responses) if responses.len() > 1 => responses.pop_front().unwrap(),
            Some(responses) => responses[0].clone(),
            None => (404, serde_json::json!({ "error": "not found", "status": 404 })),
        }
    }
}
