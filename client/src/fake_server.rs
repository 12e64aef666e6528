//! A server for tests that answers what it is told to.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use muster_types::key::Secret;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::api::Client;
use crate::credentials::Credentials;

/// Answers that are still to be given to a call such as `GET /instances/web`. The last one is given again and again.
type Route = (&'static str, VecDeque<(u16, Value)>);

/// What the server was asked, and what it still answers.
#[derive(Debug, Clone)]
pub(crate) struct Fake {
    routes: Arc<Mutex<Vec<Route>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    /// A client of a server with these answers; every other call is answered with 404. Queries do not count.
    pub(crate) async fn serve(routes: Vec<(&'static str, Vec<(u16, Value)>)>) -> (Client, Self) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let apiurl = format!("http://{}", listener.local_addr().unwrap());
        let routes = routes.into_iter().map(|(route, answers)| (route, answers.into())).collect();
        let fake = Self { routes: Arc::new(Mutex::new(routes)), asked: Arc::default() };
        let server = fake.clone();
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let server = server.clone();
                tokio::spawn(async move { server.answer(socket).await });
            }
        });
        let credentials = Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl };
        (Client::new(credentials).unwrap(), fake)
    }

    /// The calls so far, each with its body.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    async fn answer(&self, mut socket: TcpStream) -> Option<()> {
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
        let (status, answer) = if call == "POST /auth" {
            (200, serde_json::json!({ "access_token": "t0ken" }))
        } else {
            self.asked.lock().unwrap().push(format!("{call} {body}").trim_end().to_owned());
            self.next(call.split('?').next()?)
        };
        let answer = answer.to_string();
        let head =
            format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", answer.len());
        socket.write_all((head + &answer).as_bytes()).await.ok()
    }

    fn next(&self, call: &str) -> (u16, Value) {
        let mut routes = self.routes.lock().unwrap();
        let route = routes.iter_mut().find(|(route, _)| *route == call);
        let answers = route.map(|(_, answers)| answers).filter(|answers| !answers.is_empty());
        match answers {
            Some(answers) if answers.len() > 1 => answers.pop_front().unwrap(),
            Some(answers) => answers[0].clone(),
            None => (404, serde_json::json!({ "error": "not found", "status": 404 })),
        }
    }
}
