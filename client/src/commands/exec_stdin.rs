//! Standard input of `muster exec --stdin`. The agent starts commands with empty standard input, so that it is copied to a
//! temporary file in the guest first, which the shell opens and removes before it runs the command.

use std::cell::Cell;
use std::io::{self, BufRead as _};
use std::thread;

use anyhow::anyhow;
use muster_types::agent_operation::ChmodMode;
use muster_types::ids::ArtifactId;
use tokio::sync::oneshot;

use super::agent_wait::{PendingOperation, ReadinessArguments, submit, wait_until_ready};
use super::cp::{create_blob, delete_temporary, wait_for_success};
use super::wait::PollTimer;
use crate::api::{AgentTimeouts, Client};
use crate::error_text::io_error_text;
use crate::transfer::{RetryPolicy, send_stdin};

/// An instance and the file in its guest that must be removed.
pub(super) type GuestFile = Cell<Option<(String, String)>>;

/// Removes the file, if there is one. This is best effort and does not wait.
pub(super) async fn remove_guest_file(client: &Client, file: &GuestFile) {
    if let Some((instance, file)) = file.take() {
        let _ = client.execute(&instance, &format!("rm -f {file}"), None).await;
    }
}

/// Returns whether standard input has ended without any data, which stays unread. The thread is never joined: a read may
/// block forever.
async fn is_stdin_empty() -> anyhow::Result<bool> {
    let (sender, receiver) = oneshot::channel();
    thread::spawn(move || sender.send(io::stdin().lock().fill_buf().map(<[u8]>::is_empty)));
    receiver.await?.map_err(|error| anyhow!("cannot read standard input: {}", io_error_text(&error)))
}

/// Reads standard input to its end and copies it into a guest. Returns the file, or `None` if there was no input.
pub(super) async fn copy(
    client: &Client,
    instance: &str,
    readiness: ReadinessArguments,
    pending: &PendingOperation,
    temporary: &Cell<Option<ArtifactId>>,
    guest_file: &GuestFile,
) -> anyhow::Result<Option<String>> {
    // Checked before a long upload.
    wait_until_ready(client, instance, &mut PollTimer::new(readiness.wait)).await?;
    if is_stdin_empty().await? {
        return Ok(None);
    }
    let uploaded = send_stdin(client, io::stdin(), RetryPolicy::default()).await?;
    let file = format!("/tmp/.muster-stdin-{}", uploaded.upload);
    let blob = create_blob(client, &uploaded, temporary).await?;
    let mode = ChmodMode::Number(0o600);
    let request =
        async || client.put(instance, blob.uuid, &file, Some(&mode), AgentTimeouts::default()).await;
    guest_file.set(Some((instance.to_owned(), file.clone())));
    let response = submit(client, instance, readiness, pending, request).await?;
    // The operation references the content now.
    delete_temporary(client, temporary).await;
    wait_for_success(client, response, "copying standard input").await?;
    pending.clear();
    // Best effort: servers of earlier releases delete it later.
    let _ = client.delete_blob(&blob.uuid.to_string()).await;
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
