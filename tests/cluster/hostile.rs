//! Hostile clients over real sockets: every request is rejected or its connection closed.

use std::time::Duration;

use muster_testing::Daemon;
use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{setup, wait_for};

/// Sends bytes and returns the status, or `None` if the connection was closed without a response.
async fn send(daemon: &Daemon, bytes: &[u8], close: bool) -> Option<u16> {
    let mut stream = connect(daemon).await;
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    if close {
        let _ = stream.shutdown().await;
    }
    read_status(&mut stream).await
}

async fn connect(daemon: &Daemon) -> TcpStream {
    TcpStream::connect(daemon.url.trim_start_matches("http://")).await.unwrap()
}

async fn read_status(stream: &mut TcpStream) -> Option<u16> {
    let mut response = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match tokio::time::timeout(Duration::from_secs(20), stream.read(&mut buffer))
            .await
            .expect("the connection is closed")
        {
            Ok(0) | Err(_) => break,
            Ok(count) => response.extend_from_slice(&buffer[..count]),
        }
        if response.windows(4).any(|window| window == b"\r\n\r\n") {
            break;
        }
    }
    let text = String::from_utf8_lossy(&response);
    text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).and_then(|code| code.parse().ok())
}

fn resident_megabytes(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("POST {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn with_length(path: &str, body: &[u8]) -> Vec<u8> {
    post(path, &format!("Content-Length: {}\r\n", body.len()), body)
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_malformed_requests_without_memory_growth() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("API_TIMEOUT", "2").start();
    let many_headers: String = (0..10_000).map(|n| format!("X-H{n}: v\r\n")).collect();
    let huge_header = format!("X-Huge: {}\r\n", "x".repeat(1 << 20));
    let nested = format!("{}1{}", "{\"namespace\":".repeat(10_000), "}".repeat(10_000));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("binary", b"\x00\xff\x16\x03\x01 not http at all\r\n\r\n".to_vec()),
        ("no path", b"GET\r\n\r\n".to_vec()),
        ("ten thousand headers", post("/auth", &many_headers, b"")),
        ("a huge header", post("/auth", &huge_header, b"")),
        ("a huge path", format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(1 << 20)).into_bytes()),
        ("a negative length", post("/auth", "Content-Length: -1\r\n", b"{}")),
        ("two lengths", post("/auth", "Content-Length: 2\r\nContent-Length: 3\r\n", b"{}x")),
        (
            "a length and chunks",
            post("/auth", "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
        ),
        ("chunks", post("/auth", "Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n")),
        ("a huge length", post("/auth", "Content-Length: 99999999999\r\n", b"{}")),
        ("not UTF-8", with_length("/auth", b"{\"namespace\": \"\xff\xfe\"}")),
        ("deeply nested", with_length("/auth", nested.as_bytes())),
        ("not JSON", with_length("/auth", b"namespace=system&key=x")),
        ("a list", with_length("/auth", b"[1,2,3]")),
        ("a path that is not UTF-8", b"GET /nodes/%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        (
            "a token that is not ASCII",
            b"GET /nodes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n".to_vec(),
        ),
        (
            "a huge token",
            format!("GET /nodes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n", "a".repeat(30_000))
                .into_bytes(),
        ),
    ];
    send(&daemon, &with_length("/auth", b"{}"), false).await;
    let before = resident_megabytes(&daemon);
    for _ in 0..10 {
        for (name, bytes) in &cases {
            let status = send(&daemon, bytes, false).await;
            assert!(status.is_none_or(|status| (400..500).contains(&status)), "{name}: {status:?}");
        }
    }
    for (name, bytes) in &cases {
        for end in [1, bytes.len() / 2, bytes.len() - 1] {
            let status = send(&daemon, &bytes[..end], true).await;
            assert!(
                status.is_none_or(|status| (400..500).contains(&status)),
                "{name} cut at {end}: {status:?}"
            );
        }
    }
    let after = resident_megabytes(&daemon);
    assert!(after < before + 20, "memory grew from {before} to {after} MB");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    assert_eq!(daemon.call("", Method::GET, "/livez", None).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnects_slow_senders_without_delaying_others() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("API_TIMEOUT", "1").start();
    let mut slow = Vec::new();
    for n in 0..200 {
        let mut stream = connect(&daemon).await;
        let start: &[u8] = if n % 2 == 0 {
            b"POST /auth HTT"
        } else {
            b"POST /auth HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
        };
        stream.write_all(start).await.unwrap();
        slow.push(stream);
    }
    let key = daemon.system_key();
    daemon.log_in("system", &key).await;
    for mut stream in slow {
        let status = read_status(&mut stream).await;
        assert!(status.is_none() || status == Some(408), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnects_clients_that_never_read() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("API_TIMEOUT", "1").set("API_MAX_CONNECTIONS", "4").start();
    let address = daemon.url.trim_start_matches("http://").parse().unwrap();
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        let request = b"GET /apidocs/swagger-ui-bundle.js HTTP/1.1\r\nHost: x\r\n\r\n";
        stream.write_all(&request.repeat(8)).await.unwrap();
        stalled.push(stream);
    }
    let response = daemon.call("", Method::GET, "/livez", None);
    let (status, _) =
        tokio::time::timeout(Duration::from_secs(30), response).await.expect("a free connection");
    assert_eq!(status, 200);
    drop(stalled);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_limit_wait_for_free_slot() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("API_TIMEOUT", "2").set("API_MAX_CONNECTIONS", "4").start();
    let idle: Vec<_> = repeat(8, async || connect(&daemon).await).await;
    // The four connections that occupy the slots are idle and time out; then the next ones are served.
    let status = wait_for("a response", async || {
        daemon.try_call("", Method::GET, "/livez", None).await.ok().map(|(status, _)| status)
    })
    .await;
    assert_eq!(status, 200);
    drop(idle);
    let (status, _) = daemon.call("", Method::POST, "/auth", Some(json!({}))).await;
    assert_eq!(status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_bodies_without_token_use_little_memory() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    send(&daemon, &with_length("/auth", b"{}"), false).await;
    let before = resident_megabytes(&daemon);
    let body = vec![b'x'; (1 << 20) - 1];
    let mut stalled = Vec::new();
    for n in 0..400 {
        let path = ["/instances", "/auth", "/auth/federated", "/nosuch"][n % 4];
        let mut stream = connect(&daemon).await;
        let head = post(path, "Content-Length: 1048576\r\n", b"");
        stream.write_all(&head).await.unwrap();
        // The server may close the connection before it has read everything.
        let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(&body)).await;
        stalled.push(stream);
    }
    let during = resident_megabytes(&daemon);
    assert!(during < before + 90, "memory grew from {before} to {during} MB");
    for mut stream in stalled {
        let status = read_status(&mut stream).await;
        assert!(matches!(status, None | Some(401 | 404 | 413)), "{status:?}");
    }
    // What threads have in use at the end of their arenas is not released.
    wait_for("the memory to be released", async || (resident_megabytes(&daemon) < before + 60).then_some(()))
        .await;
    assert_eq!(daemon.call("", Method::GET, "/livez", None).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn flood_of_wrong_logins_does_not_delay_other_namespaces() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    for namespace in ["flooded", "honest"] {
        let body = json!({"namespace": namespace, "key_name": "mine", "key": "hunter2"});
        let (status, text) = daemon.call(&token, Method::POST, "/auth/namespaces", Some(body)).await;
        assert_eq!(status, 200, "{text}");
    }
    let login = |namespace: &str, key: &str| {
        with_length("/auth", json!({"namespace": namespace, "key": key}).to_string().as_bytes())
    };
    let mut flood = Vec::new();
    for _ in 0..200 {
        let mut stream = connect(&daemon).await;
        stream.write_all(&login("flooded", "wrong")).await.unwrap();
        flood.push(stream);
    }
    let honest = login("honest", "hunter2");
    let honest = send(&daemon, &honest, false);
    let status = tokio::time::timeout(Duration::from_secs(20), honest).await.expect("a prompt login");
    assert_eq!(status, Some(200));
    let mut rejected = 0;
    for mut stream in flood {
        match read_status(&mut stream).await {
            Some(429) => rejected += 1,
            status => assert_eq!(status, Some(401)),
        }
    }
    assert!(rejected > 0, "the queue of a namespace is limited");
}

async fn repeat<T>(count: usize, mut make: impl AsyncFnMut() -> T) -> Vec<T> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        all.push(make().await);
    }
    all
}
