use muster_types::terminal::{DEFAULT_TERMINAL_SIZE, TerminalRequest};
use serde_json::json;

use super::super::agent::tests::example;
use super::*;
use crate::fake_server::FakeServer;
use crate::output::Format;

const EXECUTE: &str = "POST /instances/web/agent/execute";
const SHOW: &str = "GET /agentoperations/7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

fn arguments(command: &[&str]) -> Arguments {
    Arguments {
        instance: "web".into(),
        deadline: Some(1.5),
        detach: false,
        stdin: false,
        tty: false,
        readiness: ReadinessArguments { wait: 0 },
        command: command.iter().map(|argument| (*argument).to_owned()).collect(),
    }
}

async fn run_command(changes: Value, command: &[&str]) -> (u8, Vec<String>) {
    let queued = (200, json!(example(&json!({ "state": "queued" }))));
    let end = (200, json!(example(&changes)));
    let (client, fake) =
        FakeServer::start(vec![(EXECUTE, vec![queued.clone()]), (SHOW, vec![queued, end])]).await;
    let code = run(arguments(command), &Session { client, format: Format::Table }).await;
    // Without the lookup of the name.
    (code, fake.requests().into_iter().filter(|call| call != "GET /instances/web").collect())
}

#[test]
fn reports_truncated_output() {
    let result = |value: Value| value.as_object().cloned().unwrap();
    assert!(!report_truncation(&result(json!({ "stdout": "all of it", "stderr-cut": false }))));
    assert!(report_truncation(&result(json!({ "stdout_blob": "x", "stdout-cut": true }))));
}

#[tokio::test]
async fn exits_with_the_return_code_of_the_command() {
    let result =
        |code: i64| json!({ "results": { "0": { "return-code": code, "stdout": "", "stderr": "" } } });
    let (code, calls) = run_command(result(7), &["grep", "a b", "file"]).await;
    assert_eq!(code, 7);
    let body = r#"{"command_line":"grep 'a b' file","deadline_seconds":1.5}"#;
    assert_eq!(calls[0], format!("{EXECUTE} {body}"));
    assert_eq!(run_command(result(-9), &["x"]).await.0, 137);
    assert_eq!(run_command(result(70000), &["x"]).await.0, EXIT_FAILED);
}

#[tokio::test]
async fn incomplete_commands_have_special_exit_codes() {
    let expired = json!({ "state": "expired", "expiry_reason": "deadline", "results": {} });
    assert_eq!(run_command(expired, &["x"]).await.0, EXIT_TIMEOUT);
    let failed = json!({ "state": "error", "error_message": "it broke", "results": {} });
    assert_eq!(run_command(failed, &["x"]).await.0, EXIT_FAILED);
    assert_eq!(run_command(json!({ "state": "deleted", "results": {} }), &["x"]).await.0, EXIT_FAILED);
    let (client, _) = FakeServer::start(vec![]).await;
    assert_eq!(run(arguments(&["x"]), &Session { client, format: Format::Table }).await, EXIT_FAILED);
}

#[tokio::test]
async fn detached_command_is_not_polled() {
    let queued = (200, json!(example(&json!({ "state": "queued" }))));
    let (client, fake) = FakeServer::start(vec![(EXECUTE, vec![queued])]).await;
    let detached = Arguments { detach: true, ..arguments(&["sleep 9"]) };
    assert_eq!(run(detached, &Session { client, format: Format::Json }).await, 0);
    let calls = fake.requests();
    assert_eq!(calls.len(), 2);
    assert!(calls[0] == "GET /instances/web" && calls[1].starts_with(EXECUTE), "{calls:?}");
}

#[tokio::test]
async fn refusal_of_a_terminal_is_reported() {
    let refusal = (409, json!({ "error": "the guest's agent does not support terminals", "status": 409 }));
    let (client, fake) = FakeServer::start(vec![("POST /instances/web/agent/terminal", vec![refusal])]).await;
    let size = DEFAULT_TERMINAL_SIZE;
    let request = TerminalRequest { command_line: "top".into(), term: "vt100".into(), size };
    let error = client.open_terminal("web", &request).await.unwrap_err();
    assert!(error.to_string().contains("does not support terminals"), "{error}");
    assert!(fake.requests()[0].contains(r#""command_line":"top""#), "{:?}", fake.requests());
}

#[test]
fn quotes_several_arguments_but_not_a_single_command_line() {
    let line = |arguments: &[&str]| {
        command_line(&arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(line(&["ls | wc -l"]), "ls | wc -l");
    assert_eq!(
        line(&["ls", "-l", "/a b", "", "it's", "$HOME", "a=b"]),
        r"ls -l '/a b' '' 'it'\''s' '$HOME' 'a=b'"
    );
}
