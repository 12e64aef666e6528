use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::super::keys::AddedKey;
use super::super::lists::ListQuery;
use super::*;

fn credentials(apiurl: &str) -> Credentials {
    Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl: apiurl.into() }
}

/// Starts a server that sends these responses, one per connection. Returns a client of it and the received request
/// lines.
async fn server(responses: Vec<(u16, &'static str)>) -> (Client, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let request_lines = Arc::new(Mutex::new(vec![]));
    let received = Arc::clone(&request_lines);
    tokio::spawn(async move {
        for (status, body) in responses {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !is_complete(&request) {
                let mut bytes = [0; 1024];
                let count = socket.read(&mut bytes).await.unwrap();
                assert!(count > 0, "the request is incomplete");
                request.extend_from_slice(&bytes[..count]);
            }
            let request = String::from_utf8(request).unwrap();
            received.lock().await.push(request.lines().next().unwrap().to_owned());
            let response = format!(
                "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            socket.write_all(response.as_bytes()).await.unwrap();
        }
    });
    (Client::new(credentials(&url)).unwrap(), request_lines)
}

fn is_complete(request: &[u8]) -> bool {
    let request = String::from_utf8_lossy(request);
    let Some((head, body)) = request.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    body.len() == length.map_or(0, |length| length.parse().unwrap())
}

const TOKEN: (u16, &str) = (200, r#"{"access_token": "t0ken"}"#);

#[tokio::test]
async fn first_call_logs_in_and_later_calls_reuse_the_token() {
    let (client, request_lines) = server(vec![TOKEN, (200, r#"["a"]"#), (200, r#"["b"]"#)]).await;
    assert_eq!(client.keys("ci", &ListQuery::default()).await.unwrap().value().unwrap(), ["a"]);
    assert_eq!(client.keys("ci", &ListQuery::default()).await.unwrap().value().unwrap(), ["b"]);
    let keys = "GET /auth/namespaces/ci/keys HTTP/1.1";
    assert_eq!(*request_lines.lock().await, ["POST /auth HTTP/1.1", keys, keys]);
}

#[tokio::test]
async fn replaces_expired_token_once() {
    let expired = (401, r#"{"error": "Signature has expired", "status": 401}"#);
    let (client, request_lines) = server(vec![TOKEN, (200, "[]"), expired, TOKEN, (200, r#"["b"]"#)]).await;
    client.keys("ci", &ListQuery::default()).await.unwrap();
    assert_eq!(client.keys("ci", &ListQuery::default()).await.unwrap().value().unwrap(), ["b"]);
    assert_eq!(request_lines.lock().await.len(), 5);
}

#[tokio::test]
async fn refused_fresh_token_is_not_replaced() {
    let (client, request_lines) = server(vec![TOKEN, (401, r#"{"error": "unauthorized"}"#)]).await;
    let error = client.nodes(&ListQuery::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "namespace ci may not do this: unauthorized");
    assert_eq!((error.status(), request_lines.lock().await.len()), (Some(401), 2));
}

#[tokio::test]
async fn refused_login_names_namespace_and_reason() {
    let (client, _) = server(vec![(404, r#"{"error": "namespace not found"}"#)]).await;
    let error = client.log_in().await.unwrap_err();
    assert!(error.to_string().ends_with(" as namespace ci: namespace not found"), "{error}");
    assert_eq!(error.status(), Some(404));
}

#[tokio::test]
async fn repeats_login_that_is_refused_because_too_many_wait() {
    let busy = (429, r#"{"error": "too many logins are waiting", "status": 429}"#);
    let (client, request_lines) = server(vec![busy, TOKEN]).await;
    client.log_in().await.unwrap();
    assert_eq!(request_lines.lock().await.len(), 2);
}

#[tokio::test]
async fn error_contains_message_and_status_of_the_server() {
    let (client, _) = server(vec![TOKEN, (409, r#"{"error": "not\nnow"}"#)]).await;
    let error = client.delete_namespace("ci").await.unwrap_err();
    assert_eq!((error.to_string().as_str(), error.status()), (r"not\nnow", Some(409)));
}

#[tokio::test]
async fn scheduling_refusal_contains_its_stage() {
    let full = (507, r#"{"error": "no room", "status": 507, "stage": "capacity_guard", "transient": true}"#);
    let (client, _) = server(vec![TOKEN, full]).await;
    let error = client.instance("web").await.unwrap_err();
    assert_eq!((error.to_string().as_str(), error.status()), ("no room", Some(507)));
    assert!(matches!(error, Error::NotPlaced { stage, transient: true, .. } if stage == "capacity_guard"));
}

#[tokio::test]
async fn console_data_is_not_json() {
    let (client, request_lines) = server(vec![TOKEN, (200, "login: "), (404, r#"{"error": "no"}"#)]).await;
    assert_eq!(client.console_data("web", None).await.unwrap(), b"login: ");
    assert_eq!(client.console_data("web", Some(7)).await.unwrap_err().to_string(), "no");
    let request_lines = request_lines.lock().await;
    assert_eq!(request_lines[1], "GET /instances/web/consoledata?length=-1 HTTP/1.1");
    assert_eq!(request_lines[2], "GET /instances/web/consoledata?length=7 HTTP/1.1");
}

#[tokio::test]
async fn reports_responses_that_are_not_json() {
    let (client, _) = server(vec![(200, "<html>hello</html>")]).await;
    let error = client.log_in().await.unwrap_err();
    assert!(error.to_string().contains("does not respond like a muster API"), "{error}");
}

#[tokio::test]
async fn reports_refused_connections() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = Client::new(credentials(&url)).unwrap().log_in().await.unwrap_err();
    let expected = format!("cannot reach {url}: connection refused; is `muster serve` running?");
    assert_eq!(error.to_string(), expected);
}

#[test]
fn rejects_invalid_api_urls() {
    for url in ["localhost:13000", "ftp://host", "http://", "http://me:pass@host", "http://host/?x", ""] {
        assert!(Client::new(credentials(url)).is_err(), "{url}");
    }
    assert_eq!(Client::new(credentials("https://host/api/")).unwrap().base, "https://host/api");
}

#[test]
fn debug_output_contains_no_secret() {
    let client = Client::new(credentials("http://host")).unwrap();
    let response: ApiResponse<AddedKey> = ApiResponse::new(json!({ "key_name": "deploy", "key": "hunter2" }));
    let debug = format!("{client:?} {response:?} {:?}", response.part::<()>("").unwrap());
    assert!(!debug.contains("hunter2"), "{debug}");
    let added = response.value().unwrap();
    assert!(!format!("{added:?}").contains("hunter2"));
    assert!(matches!(added, AddedKey::Generated { key, .. } if key.expose() == "hunter2"));
}

#[test]
fn names_invalid_certificate_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    let error = || Client::with_cacert(credentials("https://host"), &file).unwrap_err().to_string();
    assert!(error().ends_with("ca.pem: no such file or directory"), "{}", error());
    fs::write(&file, "hello").unwrap();
    assert!(error().ends_with("the file contains no PEM certificate"), "{}", error());
}
