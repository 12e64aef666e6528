//! Standard input of `muster exec --stdin`. The agent starts commands with empty standard input, so that it is copied to a
//! temporary file in the guest first, which the shell opens and removes before it runs the command.

use std::cell::Cell;
use std::io;

use muster_types::agent_operation::ChmodMode;
use muster_types::ids::ArtifactId;

use super::agent_wait::{PendingOperation, ReadinessArguments, submit, wait_until_ready};
use super::cp::{create_blob, delete_temporary, wait_for_success};
use super::wait::PollTimer;
use crate::api::{AgentTimeouts, Client};
use crate::transfer::{RetryPolicy, send_stdin};

/// Reads standard input to its end and copies it into a guest. Returns the file, or `None` if there was no input.
pub(super) async fn copy(
    client: &Client,
    instance: &str,
    readiness: ReadinessArguments,
    pending: &PendingOperation,
    temporary: &Cell<Option<ArtifactId>>,
) -> anyhow::Result<Option<String>> {
    // Checked before a long upload.
    wait_until_ready(client, instance, &mut PollTimer::new(readiness.wait)).await?;
    let uploaded = send_stdin(client, io::stdin(), RetryPolicy::default()).await?;
    if uploaded.size == 0 {
        return Ok(None);
    }
    let file = format!("/tmp/.muster-stdin-{}", uploaded.upload);
    let blob = create_blob(client, &uploaded, temporary).await?;
    let mode = ChmodMode::Number(0o600);
    let request =
        async || client.put(instance, blob.uuid, &file, Some(&mode), AgentTimeouts::default()).await;
    let response = submit(client, instance, readiness, pending, request).await?;
    // The operation references the content now.
    delete_temporary(client, temporary).await;
    wait_for_success(client, response, "copying standard input").await?;
    pending.clear();
    Ok(Some(file))
}

/// Returns a command line that runs another one with a file as standard input and removes the file.
pub(super) fn redirect(command_line: &str, file: &str) -> String {
    format!("exec <{file}; rm -f {file}; {command_line}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    #[test]
    fn redirected_command_reads_the_file_which_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("input");
        fs::write(&file, "b\na\n").unwrap();
        let line = redirect("sort | tr a x; cat", file.to_str().unwrap());
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"x\nb\n"[..], &b""[..]));
        assert!(!file.exists());
    }
}
