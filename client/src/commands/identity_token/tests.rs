//! All sources of a token, and the errors without one.

use std::fs;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const TOKEN: &str = "aGVhZA.Ym9keQ.c2ln-_bg";

/// Locates the token in an environment, with only an audience given.
fn locate_in(variables: &[(&str, &str)], audience: Option<&str>) -> anyhow::Result<TokenSource> {
    let arguments = TokenArguments { audience: audience.map(str::to_owned), ..TokenArguments::default() };
    locate(arguments, &environment(variables))
}

fn environment(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> + Sync {
    move |name| variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
}

fn variable(name: &str, value: &str) -> TokenSource {
    TokenSource::Variable { name: name.into(), value: Secret::new(value) }
}

async fn from_file(path: &Path) -> anyhow::Result<Secret> {
    obtain(TokenArguments { token_file: Some(path.to_owned()), ..TokenArguments::default() }, &|_| None).await
}

#[test]
fn arguments_take_precedence_over_the_environment() {
    let variables = [("MUSTER_ID_TOKEN", "a.b.c"), ("MINE", "d.e.f")];
    let arguments = |token_file: Option<&str>, token_env: Option<&str>| TokenArguments {
        token_file: token_file.map(Into::into),
        token_env: token_env.map(str::to_owned),
        audience: None,
    };
    let environment = environment(&variables);
    let file = locate(arguments(Some("/run/token"), None), &environment).unwrap();
    assert_eq!(file, TokenSource::File("/run/token".into()));
    assert_eq!(locate(arguments(Some("-"), None), &environment).unwrap(), TokenSource::StandardInput);
    assert_eq!(locate(arguments(None, Some("MINE")), &environment).unwrap(), variable("MINE", "d.e.f"));
}

#[test]
fn detects_ci_systems_by_their_variables() {
    let service = |audience: &str| TokenSource::Service {
        url: "https://x/y?z=1".into(),
        bearer: Secret::new("proof"),
        audience: audience.into(),
    };
    let actions = [(REQUEST_URL, "https://x/y?z=1"), (REQUEST_TOKEN, "proof")];
    assert_eq!(locate_in(&actions, Some("cloud")).unwrap(), service("cloud"));
    let program = locate_in(&[("BUILDKITE", "true")], Some("cloud")).unwrap();
    assert_eq!(program, TokenSource::Program { audience: "cloud".into() });
    for name in TOKEN_VARIABLES {
        assert_eq!(locate_in(&[(name, "a.b.c")], None).unwrap(), variable(name, "a.b.c"));
    }
    let file = locate_in(&[("MUSTER_ID_TOKEN_FILE", "/run/token")], None).unwrap();
    assert_eq!(file, TokenSource::File("/run/token".into()));
    let both = [("CIRCLE_OIDC_TOKEN", "old"), ("CIRCLE_OIDC_TOKEN_V2", "new")];
    assert_eq!(locate_in(&both, None).unwrap(), variable("CIRCLE_OIDC_TOKEN_V2", "new"));
    let mine = [actions[0], actions[1], ("MUSTER_ID_TOKEN", "a.b.c")];
    assert_eq!(locate_in(&mine, None).unwrap(), variable("MUSTER_ID_TOKEN", "a.b.c"));
}

#[test]
fn on_demand_tokens_need_an_audience() {
    for variables in [&[(REQUEST_URL, "https://x"), (REQUEST_TOKEN, "proof")][..], &[("BUILDKITE", "true")]] {
        let text = locate_in(variables, None).unwrap_err().to_string();
        assert!(text.contains("with --audience"), "{text}");
    }
}

#[test]
fn error_names_the_sources_and_what_the_job_lacks() {
    let text = locate_in(&[("MUSTER_ID_TOKEN", "")], None).unwrap_err().to_string();
    for part in ["MUSTER_ID_TOKEN", "CIRCLE_OIDC_TOKEN", REQUEST_URL, "--token-file", "--token-env"] {
        assert!(text.contains(part), "{text}");
    }
    for (name, hint) in [
        ("GITHUB_ACTIONS", "id-token: write"),
        ("FORGEJO_ACTIONS", "enable-openid-connect"),
        ("GITLAB_CI", "id_tokens"),
    ] {
        let text = locate_in(&[(name, "true")], None).unwrap_err().to_string();
        assert!(text.contains(hint) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn error_does_not_repeat_a_token_given_as_a_name() {
    let arguments = TokenArguments { token_env: Some(TOKEN.into()), ..TokenArguments::default() };
    let text = locate(arguments, &|_| None).unwrap_err().to_string();
    assert!(text.contains("name of a variable") && !text.contains(TOKEN), "{text}");
    let arguments = TokenArguments { token_env: Some("ABSENT".into()), ..TokenArguments::default() };
    assert_eq!(locate(arguments, &|_| None).unwrap_err().to_string(), "the variable ABSENT is not set");
}

#[tokio::test]
async fn token_file_may_end_with_a_line_break() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    fs::write(&path, format!("{TOKEN}\n")).unwrap();
    assert_eq!(from_file(&path).await.unwrap().expose(), TOKEN);
    for (content, expected) in [
        ("", "is empty"),
        ("\n", "is empty"),
        ("-----BEGIN PRIVATE KEY-----", "is not an identity token"),
        ("a.b", "is not an identity token"),
        ("a.b.", "is not an identity token"),
        ("a.b.c.d.e", "is not an identity token"),
        ("a.b c.d", "is not an identity token"),
    ] {
        fs::write(&path, content).unwrap();
        let text = from_file(&path).await.unwrap_err().to_string();
        assert!(text.contains(expected) && text.contains("/token"), "{text}");
        assert!(content.trim().is_empty() || !text.contains(content), "{text}");
    }
    fs::remove_file(&path).unwrap();
    let text = from_file(&path).await.unwrap_err().to_string();
    assert!(text.ends_with("/token: no such file or directory"), "{text}");
    let text = from_file(Path::new("/dev/zero")).await.unwrap_err().to_string();
    assert!(text.contains("too large"), "{text}");
}

/// Starts a service with one response. Returns its URL and the head of the request.
async fn service(status: u16, response: String) -> (String, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/token?api-version=2.0", listener.local_addr().unwrap());
    let request = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert!(socket.read_buf(&mut head).await.unwrap() > 0, "the request is incomplete");
        }
        let text = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{response}",
            response.len()
        );
        // The client may close the connection early.
        let _ = socket.write_all(text.as_bytes()).await;
        String::from_utf8(head).unwrap()
    });
    (url, request)
}

#[tokio::test]
async fn requests_a_token_with_bearer_and_audience() {
    let (url, request) = service(200, json!({ "count": 9, "value": TOKEN }).to_string()).await;
    let variables = [(REQUEST_URL, url.as_str()), (REQUEST_TOKEN, "proof")];
    let arguments =
        TokenArguments { audience: Some("https://cloud/a b".into()), ..TokenArguments::default() };
    assert_eq!(obtain(arguments, &environment(&variables)).await.unwrap().expose(), TOKEN);
    let head = request.await.unwrap();
    let first = "GET /token?api-version=2.0&audience=https%3A%2F%2Fcloud%2Fa+b HTTP/1.1\r\n";
    assert!(head.starts_with(first) && head.contains("authorization: Bearer proof\r\n"), "{head}");
}

#[tokio::test]
async fn error_names_the_service_but_not_its_response() {
    for (status, response, expected) in [
        (403, "hunter2".to_owned(), "127.0.0.1 responded with 403 Forbidden"),
        (302, "hunter2".to_owned(), "127.0.0.1 responded with 302 Found"),
        (200, "hunter2".to_owned(), "the response of 127.0.0.1 is not JSON"),
        (200, json!({ "other": "hunter2" }).to_string(), "the response of 127.0.0.1 contains no token"),
        (200, "\"hunter2 ".repeat(100_000), "the response of 127.0.0.1 is not JSON"),
    ] {
        let (url, _request) = service(status, response).await;
        let text = request_token(&url, &Secret::new("proof"), "cloud").await.unwrap_err().to_string();
        assert_eq!(text, expected);
    }
}

#[tokio::test]
async fn bearer_token_is_sent_only_over_https_or_loopback() {
    for url in
        ["http://ci.example/token", "http://10.0.0.1/token", "http://127.0.0.1.example/", "ftp://localhost/"]
    {
        let text = request_token(url, &Secret::new("proof"), "cloud").await.unwrap_err().to_string();
        assert!(text.contains("is not https"), "{text}");
    }
    for url in ["http://localhost:1/x", "http://127.0.0.1/", "http://[::1]/"] {
        assert!(is_loopback(&Url::parse(url).unwrap()), "{url}");
    }
}

#[tokio::test]
async fn runs_the_buildkite_agent_with_the_audience() {
    let printed = run_agent(Path::new("echo"), "cloud").await.unwrap();
    assert_eq!(printed, "oidc request-token --audience cloud\n");
    let text = run_agent(Path::new("false"), "cloud").await.unwrap_err().to_string();
    assert_eq!(text, "false issued no identity token: exit status: 1");
    let text = run_agent(Path::new("/nonexistent/agent"), "cloud").await.unwrap_err().to_string();
    assert_eq!(text, "cannot run /nonexistent/agent: no such file or directory");
}
