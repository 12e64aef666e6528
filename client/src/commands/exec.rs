//! `muster exec`: a command inside a guest, as if it ran here.

use std::io::{self, Write};

use anyhow::{Context as _, anyhow};
use clap::Args;
use serde_json::{Map, Value};

use super::Session;
use super::agent_wait::{
    Asked, Failure, INTERRUPTED, Readiness, ask, ended, seconds, succeeded, unless_interrupted,
};
use crate::api::{Client, io_text};
use crate::output::{print, print_json};
use crate::transfer::{Policy, pour};

/// A budget ran out.
const EXPIRED: u8 = 124;
/// Anything else kept the command from running, or its result from being known.
const FAILED: u8 = 125;

/// Arguments of `muster exec`.
#[derive(Debug, Args)]
#[command(
    after_help = "It ends with the command's return code; with 124 if the deadline is over, with 125 if the command \
                  could not be run or its result is not known, and with 130 after Ctrl-C, which ends the command. \
                  Standard input is not passed on.\n\nSeveral arguments are passed to the command as they are. A \
                  single one is a command line for the guest's shell, as with ssh: `muster exec web -- 'ls | wc -l'`."
)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// How long it may take, with the time that it waits for its turn; 0 is no end
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    deadline: Option<f64>,
    /// Do not wait for it: print the id of the operation, for `muster agent show`
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    readiness: Readiness,
    /// The command and its arguments, or one command line
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs a command, and answers with what this program should end with.
pub(super) async fn run(arguments: Arguments, session: &Session) -> u8 {
    let asked = Asked::default();
    let work = execute(&arguments, session, &asked);
    match unless_interrupted(&session.client, &asked, work).await {
        Ok(Some(code)) => code,
        Ok(None) => INTERRUPTED,
        Err(error) => {
            eprintln!("error: {error:#}");
            FAILED
        }
    }
}

async fn execute(arguments: &Arguments, session: &Session, asked: &Asked) -> anyhow::Result<u8> {
    let (client, instance) = (&session.client, arguments.instance.as_str());
    let line = command_line(&arguments.command);
    let question = async || client.execute(instance, &line, arguments.deadline).await;
    let answer = ask(client, instance, arguments.readiness, asked, question).await?;
    let id = answer.clone().value()?.uuid;
    if arguments.detach {
        if session.json {
            print_json(answer.json())?;
        } else {
            print(&format!("{id}\n"))?;
        }
        return Ok(0);
    }
    let answer = ended(client, id, |_| {}).await?;
    // Nothing runs any more that could be ended.
    asked.forget();
    let record = answer.clone().value()?;
    if session.json {
        print_json(answer.json())?;
    }
    let none = Map::new();
    let result = record.results.get("0").unwrap_or(&none);
    if !session.json {
        show(client, result, "stdout", io::stdout()).await?;
        show(client, result, "stderr", io::stderr()).await?;
    }
    match succeeded(&record) {
        Ok(()) => {
            let code = result.get("return-code").and_then(Value::as_i64);
            let code = code.map(exit_code).context("the server does not say how the command ended")?;
            Ok(if code == 0 && tell_cuts(result) { FAILED } else { code })
        }
        Err(Failure::Expired(text)) => {
            eprintln!("error: {text}");
            Ok(EXPIRED)
        }
        Err(Failure::Other(text)) => Err(anyhow!(text)),
    }
}

/// Says of which outputs the guest did not keep all, if there are any.
fn tell_cuts(result: &Map<String, Value>) -> bool {
    let is_cut = |name: &&str| result.get(&format!("{name}-cut")).is_some_and(|cut| cut == true);
    let cut: Vec<&str> = ["stdout", "stderr"].into_iter().filter(is_cut).collect();
    if cut.is_empty() {
        return false;
    }
    eprintln!(
        "error: the guest kept only the beginning of {}: write it to a file, and copy that",
        cut.join(" and ")
    );
    true
}

/// What this program ends with for a command's return code. The negative of a signal is what shells make of it.
fn exit_code(code: i64) -> u8 {
    match code {
        0..=255 => u8::try_from(code).unwrap_or(FAILED),
        -127..=-1 => u8::try_from(128 - code).unwrap_or(FAILED),
        _ => FAILED,
    }
}

/// Writes what a command wrote, byte for byte.
async fn show(
    client: &Client,
    result: &Map<String, Value>,
    name: &str,
    mut out: impl Write + Send + 'static,
) -> anyhow::Result<()> {
    if let Some(text) = result.get(name).and_then(Value::as_str) {
        return match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // A reader that has seen enough is no error.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(anyhow!("cannot write the output: {}", io_text(&error)))
            }
            Ok(()) | Err(_) => Ok(()),
        };
    }
    let Some(blob) = result.get(&format!("{name}_blob")).and_then(Value::as_str) else { return Ok(()) };
    let blob = client.blob(blob).await?.value()?;
    pour(client, &blob, out, Policy::default()).await
}

/// A command line for a shell. One argument is one already.
fn command_line(arguments: &[String]) -> String {
    match arguments {
        [line] => line.clone(),
        several => several.iter().map(|argument| quoted(argument)).collect::<Vec<_>>().join(" "),
    }
}

/// An argument that a shell takes as it is.
fn quoted(argument: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:,+@%".contains(&byte);
    if !argument.is_empty() && argument.bytes().all(plain) {
        return argument.to_owned();
    }
    format!("'{}'", argument.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::agent::tests::example;
    use super::*;
    use crate::fake::Fake;

    const EXECUTE: &str = "POST /instances/web/agent/execute";
    const LOOK: &str = "GET /agentoperations/7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

    fn arguments(command: &[&str]) -> Arguments {
        Arguments {
            instance: "web".into(),
            deadline: Some(1.5),
            detach: false,
            readiness: Readiness { wait: 0 },
            command: command.iter().map(|argument| (*argument).to_owned()).collect(),
        }
    }

    async fn ends(changes: Value, command: &[&str]) -> (u8, Vec<String>) {
        let queued = (200, json!(example(&json!({ "state": "queued" }))));
        let end = (200, json!(example(&changes)));
        let (client, fake) =
            Fake::serve(vec![(EXECUTE, vec![queued.clone()]), (LOOK, vec![queued, end])]).await;
        let code = run(arguments(command), &Session { client, json: false }).await;
        (code, fake.asked())
    }

    #[test]
    fn output_that_was_cut_is_told_of() {
        let result = |value: Value| value.as_object().cloned().unwrap();
        assert!(!tell_cuts(&result(json!({ "stdout": "all of it", "stderr-cut": false }))));
        assert!(tell_cuts(&result(json!({ "stdout_blob": "x", "stdout-cut": true }))));
    }

    #[tokio::test]
    async fn the_return_code_of_a_command_is_that_of_this_program() {
        let result =
            |code: i64| json!({ "results": { "0": { "return-code": code, "stdout": "", "stderr": "" } } });
        let (code, calls) = ends(result(7), &["grep", "a b", "file"]).await;
        assert_eq!(code, 7);
        let body = r#"{"command_line":"grep 'a b' file","deadline_seconds":1.5}"#;
        assert_eq!(calls[0], format!("{EXECUTE} {body}"));
        assert_eq!(ends(result(-9), &["x"]).await.0, 137);
        assert_eq!(ends(result(70000), &["x"]).await.0, FAILED);
    }

    #[tokio::test]
    async fn a_command_that_was_not_run_to_its_end_has_a_code_of_its_own() {
        let expired = json!({ "state": "expired", "expiry_reason": "deadline", "results": {} });
        assert_eq!(ends(expired, &["x"]).await.0, EXPIRED);
        let failed = json!({ "state": "error", "error_message": "it broke", "results": {} });
        assert_eq!(ends(failed, &["x"]).await.0, FAILED);
        assert_eq!(ends(json!({ "state": "deleted", "results": {} }), &["x"]).await.0, FAILED);
        let (client, _) = Fake::serve(vec![]).await;
        assert_eq!(run(arguments(&["x"]), &Session { client, json: false }).await, FAILED);
    }

    #[tokio::test]
    async fn a_command_that_nobody_waits_for_is_not_looked_at() {
        let queued = (200, json!(example(&json!({ "state": "queued" }))));
        let (client, fake) = Fake::serve(vec![(EXECUTE, vec![queued])]).await;
        let detached = Arguments { detach: true, ..arguments(&["sleep 9"]) };
        assert_eq!(run(detached, &Session { client, json: true }).await, 0);
        assert_eq!(fake.asked().len(), 1);
    }

    #[test]
    fn several_arguments_are_quoted_and_one_is_a_command_line() {
        let line = |arguments: &[&str]| {
            command_line(&arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(line(&["ls | wc -l"]), "ls | wc -l");
        assert_eq!(
            line(&["ls", "-l", "/a b", "", "it's", "$HOME", "a=b"]),
            r"ls -l '/a b' '' 'it'\''s' '$HOME' 'a=b'"
        );
    }
}
