//! `muster exec`: runs a command in a guest with its output and exit code.

use std::cell::Cell;
use std::io::{self, Write};

use anyhow::{Context as _, anyhow};
use clap::Args;
use muster_types::ids::ArtifactId;
use serde_json::{Map, Value};

use super::agent_wait::{
    AgentFailure, EXIT_INTERRUPTED, PendingOperation, ReadinessArguments, check_success,
    delete_if_interrupted, parse_seconds, submit, wait_until_final,
};
use super::arguments::shell_quote;
use super::cp::delete_temporary;
use super::exec_stdin::GuestFile;
use super::lookup::{NamedType, resolve};
use super::session::Session;
use super::{exec_stdin, exec_terminal, suggestion};
use crate::api::Client;
use crate::error_text::io_error_text;
use crate::output::print;
use crate::transfer::{RetryPolicy, download_to_stream};

/// The exit code after a timeout.
const EXIT_TIMEOUT: u8 = 124;
/// The exit code if the command did not run or its result is unknown.
const EXIT_FAILED: u8 = 125;

/// Arguments of `muster exec`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exits with the command's exit code; with 124 after the deadline, with 125 if the command could not be run \
                  or its result is unknown, and with 130 after Ctrl-C, which kills the command.\n\nThe \
                  command has empty standard input unless --stdin is given, which copies all of it into the guest before \
                  the command starts: input that depends on the command's output needs a terminal. The cluster deletes its copy of the input once it \
                  is in the guest, or after BLOB_DELETION_DELAY seconds if that fails.\n\nWith -t (or -it) the \
                  command has a terminal, with this one as its input and output: Ctrl-C goes to the guest, and Enter ~ . \
                  leaves the session, which ends the command. The guest needs muster-agent 1.1 or newer.\n\nSeveral arguments are \
                  passed to the command unchanged. A single argument is a command line for the guest's shell, as with ssh: `muster exec web -- 'ls | wc -l'`."
)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// Timeout of the command, including its time in the queue; 0 is unlimited
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    deadline: Option<f64>,
    /// Do not wait: print the id of the operation for `muster agent show`
    #[arg(long)]
    detach: bool,
    /// Pass standard input, up to its end, to the command
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Run the command with a terminal, for interactive work
    #[arg(short = 't', long, conflicts_with_all = ["detach", "deadline"])]
    tty: bool,
    #[command(flatten)]
    readiness: ReadinessArguments,
    /// Command and its arguments, or one command line
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs a command and returns the exit code of this program.
pub(super) async fn run(arguments: Arguments, session: &Session) -> u8 {
    let (pending, temporary, guest_file) = (PendingOperation::default(), Cell::new(None), Cell::new(None));
    let work = execute(arguments, session, &pending, &temporary, &guest_file);
    let done = delete_if_interrupted(&session.client, &pending, work).await;
    // Still exists if standard input was not copied completely.
    delete_temporary(&session.client, &temporary).await;
    // Still exists if the command did not start.
    exec_stdin::remove_guest_file(&session.client, &guest_file).await;
    match done {
        Ok(Some(code)) => code,
        Ok(None) => EXIT_INTERRUPTED,
        Err(error) => {
            let similar = suggestion::similar_name(&session.client, &error).await;
            let hint = similar.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
            crate::message!("error: {error:#}{hint}");
            EXIT_FAILED
        }
    }
}

async fn execute(
    mut arguments: Arguments,
    session: &Session,
    pending: &PendingOperation,
    temporary: &Cell<Option<ArtifactId>>,
    guest_file: &GuestFile,
) -> anyhow::Result<u8> {
    let client = &session.client;
    resolve(client, NamedType::Instance, &mut arguments.instance, None).await?;
    let instance = arguments.instance.as_str();
    let mut line = command_line(&arguments.command);
    if arguments.tty {
        let code = exec_terminal::run(client, instance, line, arguments.stdin, arguments.readiness).await?;
        return Ok(exit_code(code.into()));
    }
    if arguments.stdin
        && let Some(file) =
            exec_stdin::copy(client, instance, arguments.readiness, pending, temporary, guest_file).await?
    {
        line = exec_stdin::redirect(&line, &file);
    }
    let request = async || client.execute(instance, &line, arguments.deadline).await;
    let response = submit(client, instance, arguments.readiness, pending, request).await?;
    let id = response.clone().value()?.uuid;
    if arguments.detach {
        guest_file.take();
        if session.is_structured() {
            session.print_value(response.json())?;
        } else {
            print(&format!("{id}\n"))?;
        }
        return Ok(0);
    }
    let response = wait_until_final(client, id, |_| {}).await?;
    pending.clear();
    let record = response.clone().value()?;
    if session.is_structured() {
        session.print_value(response.json())?;
    }
    let none = Map::new();
    let result = record.results.get("0").unwrap_or(&none);
    if !session.is_structured() {
        write_output(client, result, "stdout", io::stdout()).await?;
        write_output(client, result, "stderr", io::stderr()).await?;
    }
    match check_success(&record) {
        Ok(()) => {
            guest_file.take();
            let code = result.get("return-code").and_then(Value::as_i64);
            let code = code.map(exit_code).context("the server does not return the exit code")?;
            Ok(if code == 0 && report_truncation(result) { EXIT_FAILED } else { code })
        }
        Err(AgentFailure::Expired(text)) => {
            crate::message!("error: {text}");
            Ok(EXIT_TIMEOUT)
        }
        Err(AgentFailure::Other(text)) => Err(anyhow!(text)),
    }
}

/// Reports outputs that the guest truncated. Returns whether there are any.
fn report_truncation(result: &Map<String, Value>) -> bool {
    let is_truncated = |name: &&str| result.get(&format!("{name}-cut")).is_some_and(|cut| cut == true);
    let truncated: Vec<&str> = ["stdout", "stderr"].into_iter().filter(is_truncated).collect();
    if truncated.is_empty() {
        return false;
    }
    crate::message!(
        "error: the guest truncated {}: write it to a file and copy the file with `muster cp`",
        truncated.join(" and ")
    );
    true
}

/// Maps a command's return code to an exit code. A negative signal number becomes the exit code of a shell.
fn exit_code(code: i64) -> u8 {
    match code {
        0..=255 => code as u8,
        -127..=-1 => (128 - code) as u8,
        _ => EXIT_FAILED,
    }
}

/// Writes an output of the command unchanged.
async fn write_output(
    client: &Client,
    result: &Map<String, Value>,
    name: &str,
    mut out: impl Write + Send + 'static,
) -> anyhow::Result<()> {
    if let Some(text) = result.get(name).and_then(Value::as_str) {
        return match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // A closed pipe is not an error.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(anyhow!("cannot write the output: {}", io_error_text(&error)))
            }
            Ok(()) | Err(_) => Ok(()),
        };
    }
    let Some(blob) = result.get(&format!("{name}_blob")).and_then(Value::as_str) else { return Ok(()) };
    let blob = client.blob(blob).await?.value()?;
    download_to_stream(client, &blob, out, RetryPolicy::default()).await
}

/// Returns a command line for a shell. A single argument already is one.
fn command_line(arguments: &[String]) -> String {
    match arguments {
        [line] => line.clone(),
        several => several.iter().map(|argument| quote_if_needed(argument)).collect::<Vec<_>>().join(" "),
    }
}

/// Quotes an argument if a shell would interpret it.
fn quote_if_needed(argument: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:,+@%".contains(&byte);
    if !argument.is_empty() && argument.bytes().all(plain) {
        return argument.to_owned();
    }
    shell_quote(argument)
}

#[cfg(test)]
mod tests;
