//! Every place that a token may be found at, and what is said when it is not there.

use std::fs;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const TOKEN: &str = "aGVhZA.Ym9keQ.c2ln-_bg";

/// Where a token is found in this environment, with nothing but an audience given.
fn found(variables: &[(&str, &str)], audience: Option<&str>) -> anyhow::Result<Source> {
    let arguments = TokenPlace { audience: audience.map(str::to_owned), ..TokenPlace::default() };
    find(arguments, &environment(variables))
}

fn environment(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> + Sync {
    move |name| variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
}

fn variable(name: &str, value: &str) -> Source {
    Source::Variable { name: name.into(), value: Secret::new(value) }
}

async fn from_file(path: &Path) -> anyhow::Result<Secret> {
    get(TokenPlace { token_file: Some(path.to_owned()), ..TokenPlace::default() }, &|_| None).await
}

#[test]
fn what_is_said_wins_over_what_is_found() {
    let variables = [("MUSTER_ID_TOKEN", "a.b.c"), ("MINE", "d.e.f")];
    let arguments = |token_file: Option<&str>, token_env: Option<&str>| TokenPlace {
        token_file: token_file.map(Into::into),
        token_env: token_env.map(str::to_owned),
        audience: None,
    };
    let environment = environment(&variables);
    let file = find(arguments(Some("/run/token"), None), &environment).unwrap();
    assert_eq!(file, Source::File("/run/token".into()));
    assert_eq!(find(arguments(Some("-"), None), &environment).unwrap(), Source::StandardInput);
    assert_eq!(find(arguments(None, Some("MINE")), &environment).unwrap(), variable("MINE", "d.e.f"));
}

#[test]
fn every_ci_system_is_known_by_its_variables() {
    let service = |audience: &str| Source::Service {
        url: "https://x/y?z=1".into(),
        bearer: Secret::new("proof"),
        audience: audience.into(),
    };
    let actions = [(REQUEST_URL, "https://x/y?z=1"), (REQUEST_TOKEN, "proof")];
    assert_eq!(found(&actions, Some("cloud")).unwrap(), service("cloud"));
    let program = found(&[("BUILDKITE", "true")], Some("cloud")).unwrap();
    assert_eq!(program, Source::Program { audience: "cloud".into() });
    for name in VARIABLES {
        assert_eq!(found(&[(name, "a.b.c")], None).unwrap(), variable(name, "a.b.c"));
    }
    let file = found(&[("MUSTER_ID_TOKEN_FILE", "/run/token")], None).unwrap();
    assert_eq!(file, Source::File("/run/token".into()));
    let both = [("CIRCLE_OIDC_TOKEN", "old"), ("CIRCLE_OIDC_TOKEN_V2", "new")];
    assert_eq!(found(&both, None).unwrap(), variable("CIRCLE_OIDC_TOKEN_V2", "new"));
    let mine = [actions[0], actions[1], ("MUSTER_ID_TOKEN", "a.b.c")];
    assert_eq!(found(&mine, None).unwrap(), variable("MUSTER_ID_TOKEN", "a.b.c"));
}

#[test]
fn a_system_that_makes_tokens_on_demand_needs_an_audience() {
    for variables in [&[(REQUEST_URL, "https://x"), (REQUEST_TOKEN, "proof")][..], &[("BUILDKITE", "true")]] {
        let text = found(variables, None).unwrap_err().to_string();
        assert!(text.contains("give --audience"), "{text}");
    }
}

#[test]
fn what_was_looked_for_is_said_and_what_the_job_lacks() {
    let text = found(&[("MUSTER_ID_TOKEN", "")], None).unwrap_err().to_string();
    for part in ["MUSTER_ID_TOKEN", "CIRCLE_OIDC_TOKEN", REQUEST_URL, "--token-file", "--token-env"] {
        assert!(text.contains(part), "{text}");
    }
    for (name, hint) in [
        ("GITHUB_ACTIONS", "id-token: write"),
        ("FORGEJO_ACTIONS", "enable-openid-connect"),
        ("GITLAB_CI", "id_tokens"),
    ] {
        let text = found(&[(name, "true")], None).unwrap_err().to_string();
        assert!(text.contains(hint) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn a_token_in_place_of_a_name_is_not_repeated() {
    let arguments = TokenPlace { token_env: Some(TOKEN.into()), ..TokenPlace::default() };
    let text = find(arguments, &|_| None).unwrap_err().to_string();
    assert!(text.contains("name of a variable") && !text.contains(TOKEN), "{text}");
    let arguments = TokenPlace { token_env: Some("ABSENT".into()), ..TokenPlace::default() };
    assert_eq!(find(arguments, &|_| None).unwrap_err().to_string(), "the variable ABSENT is not set");
}

#[tokio::test]
async fn a_file_holds_a_token_and_perhaps_a_line_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs::write(&path, format!("{TOKEN}\n")).unwrap();
    assert_eq!(from_file(&path).await.unwrap().expose(), TOKEN);
    for (content, says) in [
        ("", "is empty"),
        ("\n", "is empty"),
        ("-----BEGIN PRIVATE KEY-----", "is no identity token"),
        ("a.b", "is no identity token"),
        ("a.b.", "is no identity token"),
        ("a.b.c.d.e", "is no identity token"),
        ("a.b c.d", "is no identity token"),
    ] {
        fs::write(&path, content).unwrap();
        let text = from_file(&path).await.unwrap_err().to_string();
        assert!(text.contains(says) && text.contains("/token"), "{text}");
        assert!(content.trim().is_empty() || !text.contains(content), "{text}");
    }
    fs::remove_file(&path).unwrap();
    let text = from_file(&path).await.unwrap_err().to_string();
    assert!(text.ends_with("/token: no such file or directory"), "{text}");
    let text = from_file(Path::new("/dev/zero")).await.unwrap_err().to_string();
    assert!(text.contains("too large"), "{text}");
}

/// A service that gives one answer, and the head of the request that it got.
async fn service(status: u16, answer: String) -> (String, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/token?api-version=2.0", listener.local_addr().unwrap());
    let asked = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert!(socket.read_buf(&mut head).await.unwrap() > 0, "the request ended early");
        }
        let text = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
            answer.len()
        );
        // One who has heard enough may be gone.
        let _ = socket.write_all(text.as_bytes()).await;
        String::from_utf8(head).unwrap()
    });
    (url, asked)
}

#[tokio::test]
async fn a_service_is_asked_with_its_proof_for_the_audience() {
    let (url, asked) = service(200, json!({ "count": 9, "value": TOKEN }).to_string()).await;
    let variables = [(REQUEST_URL, url.as_str()), (REQUEST_TOKEN, "proof")];
    let arguments = TokenPlace { audience: Some("https://cloud/a b".into()), ..TokenPlace::default() };
    assert_eq!(get(arguments, &environment(&variables)).await.unwrap().expose(), TOKEN);
    let head = asked.await.unwrap();
    let first = "GET /token?api-version=2.0&audience=https%3A%2F%2Fcloud%2Fa+b HTTP/1.1\r\n";
    assert!(head.starts_with(first) && head.contains("authorization: Bearer proof\r\n"), "{head}");
}

#[tokio::test]
async fn a_service_that_gives_no_token_is_named_without_its_answer() {
    for (status, answer, says) in [
        (403, "hunter2".to_owned(), "127.0.0.1 answered 403 Forbidden"),
        (302, "hunter2".to_owned(), "127.0.0.1 answered 302 Found"),
        (200, "hunter2".to_owned(), "127.0.0.1 did not answer with JSON"),
        (200, json!({ "other": "hunter2" }).to_string(), "the answer of 127.0.0.1 has no token in it"),
        (200, "\"hunter2 ".repeat(100_000), "127.0.0.1 did not answer with JSON"),
    ] {
        let (url, _asked) = service(status, answer).await;
        let text = ask(&url, &Secret::new("proof"), "cloud").await.unwrap_err().to_string();
        assert_eq!(text, says);
    }
}

#[tokio::test]
async fn the_proof_goes_only_where_nobody_sees_it() {
    for url in
        ["http://ci.example/token", "http://10.0.0.1/token", "http://127.0.0.1.example/", "ftp://localhost/"]
    {
        let text = ask(url, &Secret::new("proof"), "cloud").await.unwrap_err().to_string();
        assert!(text.contains("is not https"), "{text}");
    }
    for url in ["http://localhost:1/x", "http://127.0.0.1/", "http://[::1]/"] {
        assert!(is_loopback(&Url::parse(url).unwrap()), "{url}");
    }
}

#[tokio::test]
async fn the_agent_of_buildkite_prints_a_token_for_the_audience() {
    let printed = print(Path::new("echo"), "cloud").await.unwrap();
    assert_eq!(printed, "oidc request-token --audience cloud\n");
    let text = print(Path::new("false"), "cloud").await.unwrap_err().to_string();
    assert_eq!(text, "false made no identity token: exit status: 1");
    let text = print(Path::new("/nonexistent/agent"), "cloud").await.unwrap_err().to_string();
    assert_eq!(text, "cannot run /nonexistent/agent: no such file or directory");
}
