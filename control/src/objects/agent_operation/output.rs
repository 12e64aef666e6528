//! Stores the output of guests: short texts become part of the results, everything else becomes blobs.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use muster_types::event::{Event, EventType};
use muster_types::guest::{CommandKey, CommandOutput, CommandResult, OutputName};
use muster_types::ids::BlobId;
use muster_types::node::NodeApi;
use muster_types::storage::{ByteStream, Draft};
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use super::end::try_end_in;
use super::perform::{AgentOperationRun, Failure};
use super::{AGENT_OUTPUT, audit, object};
use crate::app::App;
use crate::objects::blob::{self, BlobSource, PreparedBlob};
use crate::objects::upload;
use crate::state::BlobInProgress;
use muster_store::agent_operations::{AgentOperationOutcome, AgentOperationRow, CommandResults};
use muster_store::{references, transaction};

/// The size above which output becomes a blob.
const MAX_TEXT_BYTES: usize = 10 << 10;

/// The result of one command.
pub(super) struct CommandOutcome<'a> {
    pub(super) result: Map<String, Value>,
    pub(super) outputs: Vec<StoredOutput<'a>>,
}

/// Content that becomes a blob together with the result that refers to it.
pub(super) struct StoredOutput<'a> {
    name: &'static str,
    prepared: PreparedBlob<'a>,
    draft: Draft,
    /// Marks the draft as being written.
    _mark: Option<BlobInProgress<'a>>,
}

/// Stores data in a draft on the node and prepares its blob.
pub(super) async fn store_output<'a>(
    work: &'a AgentOperationRun,
    name: &'static str,
    max_bytes: u64,
    data: ByteStream,
) -> Result<StoredOutput<'a>> {
    let (app, node): (&App, _) = (&work.app, &work.node);
    let id = BlobId::new();
    let draft = Draft::Vm(id);
    let mark = app.drafts_in_progress.begin(node.identity().id, id);
    let prepared = async {
        node.storage().append(draft, Some(0), max_bytes.min(upload::max_content_bytes(app)), data).await?;
        let namespace = work.row.namespace.clone();
        blob::prepare(app, node, &BlobSource { draft, namespace, is_image: false, modified: None }).await
    };
    match prepared.await {
        Ok(prepared) => Ok(StoredOutput { name, prepared, draft, _mark: mark }),
        Err(error) => {
            remove_draft(node, draft).await;
            Err(error)
        }
    }
}

async fn remove_draft(node: &Arc<dyn NodeApi>, draft: Draft) {
    if let Err(error) = node.storage().remove_draft(draft).await {
        // The storage reconciler removes it later.
        tracing::debug!(?draft, %error, "failed to remove draft");
    }
}

/// Returns the outcome of a finished command.
pub(super) async fn command_outcome<'a>(
    work: &'a AgentOperationRun,
    key: CommandKey,
    line: &str,
    executed: CommandResult,
) -> Result<CommandOutcome<'a>, Failure> {
    let mut result = Map::new();
    result.insert("command-line".into(), json!(line));
    result.insert("result".into(), json!(true));
    result.insert("return-code".into(), json!(executed.return_code));
    let mut outcome = CommandOutcome { result, outputs: vec![] };
    for (name, output) in [(OutputName::Stdout, executed.stdout), (OutputName::Stderr, executed.stderr)] {
        match add_output(work, key, name, output, &mut outcome).await {
            Ok(()) => {}
            Err(failure) => {
                discard_outputs(work, outcome.outputs).await;
                return Err(failure);
            }
        }
    }
    Ok(outcome)
}

/// Stores one output of a command.
async fn add_output<'a>(
    work: &'a AgentOperationRun,
    key: CommandKey,
    name: OutputName,
    output: CommandOutput,
    outcome: &mut CommandOutcome<'a>,
) -> Result<(), Failure> {
    let field = name.as_str();
    let (max_bytes, data) = match output {
        CommandOutput::Inline(bytes) => (bytes.len() as u64, Some(bytes)),
        CommandOutput::Stored { size, truncated } => {
            if truncated {
                // The agent keeps a limited amount of output.
                outcome.result.insert(format!("{field}-cut"), json!(true));
            }
            let short = usize::try_from(size).is_ok_and(|size| size <= MAX_TEXT_BYTES);
            let data = match short {
                true if size == 0 => Some(Bytes::new()),
                true => Some(collect_text(work.guests().output(work.row.instance, key, name).await?).await?),
                false => None,
            };
            (size, data)
        }
    };
    let data = match data {
        Some(bytes) if bytes.len() <= MAX_TEXT_BYTES && std::str::from_utf8(&bytes).is_ok() => {
            outcome.result.insert(field.into(), json!(String::from_utf8_lossy(&bytes)));
            return Ok(());
        }
        Some(bytes) => Box::pin(stream::iter([Ok(bytes)])),
        None => work.guests().output(work.row.instance, key, name).await?,
    };
    let stored = store_output(work, field, max_bytes, data).await.map_err(Failure::from_transfer)?;
    outcome.outputs.push(stored);
    Ok(())
}

/// Collects a short output. Fails if the guest sends more than it announced.
async fn collect_text(mut data: ByteStream) -> Result<Bytes, Failure> {
    let mut bytes = BytesMut::new();
    while let Some(chunk) = data.next().await {
        bytes.extend_from_slice(&chunk.map_err(Failure::from_transfer)?);
        if bytes.len() > MAX_TEXT_BYTES {
            return Err(Failure::Permanent("the guest sent more output than it announced".into()));
        }
    }
    Ok(bytes.freeze())
}

/// Discards the outputs of an operation that was not committed.
pub(super) async fn discard_outputs(work: &AgentOperationRun, outputs: Vec<StoredOutput<'_>>) {
    for output in outputs {
        blob::discard(&work.app, &output.prepared).await;
        remove_draft(&work.node, output.draft).await;
    }
}

/// Ends an operation with the results of its commands and commits its outputs. Returns `false` if it was ended
/// concurrently.
pub(super) async fn finish(
    work: &AgentOperationRun,
    row: &AgentOperationRow,
    outcomes: Vec<CommandOutcome<'_>>,
    error: Option<&str>,
) -> Result<bool> {
    use muster_types::agent_operation::AgentOperationState as State;

    let app = &work.app;
    let to = if error.is_some() { State::Error } else { State::Complete };
    let ended = transaction!(app.store, |tx| {
        let mut results = CommandResults::new();
        let mut blobs = Vec::new();
        for (index, outcome) in outcomes.iter().enumerate() {
            let mut result = outcome.result.clone();
            for output in &outcome.outputs {
                let blob = blob::commit_in(tx, &output.prepared).await?;
                let (source, target) = (object(row.id), blob::object(blob));
                references::insert(tx, &source, AGENT_OUTPUT, Some(output.name), &target).await?;
                result.insert(format!("{}_blob", output.name), json!(blob));
                blobs.push(blob);
            }
            results.insert(index.to_string(), result);
        }
        let end = AgentOperationOutcome { results: Some(&results), error, expiry: None };
        if !try_end_in(tx, row, to, &end).await? {
            // The error rolls everything back.
            return Err(Error::not_found("agent operation").into());
        }
        Ok(blobs)
    });
    let outputs: Vec<StoredOutput<'_>> = outcomes.into_iter().flat_map(|outcome| outcome.outputs).collect();
    let blobs = match ended {
        Ok(blobs) => blobs,
        Err(error) => {
            discard_outputs(work, outputs).await;
            return match error {
                Error::NotFound(_) => Ok(false),
                error => Err(error),
            };
        }
    };
    match error {
        Some(reason) => app.events.record(audit(row, "agent operation failed").with("reason", reason)),
        None => {
            let mut event = Event::new(EventType::Status, object(row.id), "agent operation complete");
            event.request_id.clone_from(&row.request_id);
            app.events.record(event.with("attempts", row.attempts));
        }
    }
    for (output, blob) in outputs.into_iter().zip(blobs) {
        blob::finish_commit(app, &output.prepared, blob).await;
        remove_draft(&work.node, output.draft).await;
    }
    Ok(true)
}
