//! Waiting for the agent of a guest to become ready and to complete operations.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use muster_types::agent_operation::{AgentOperationRecord, AgentOperationState};
use muster_types::ids::AgentOperationId;
use muster_types::instance::{InstanceRecord, InstanceState, agent_is_ready};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};

use super::agent;
use super::wait::PollTimer;
use crate::api::{self, ApiResponse, Client};
use crate::exit_code::timed_out;
use crate::output::escape_control;

const MIN_POLL_INTERVAL: Duration = Duration::from_millis(20);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long the server may be unreachable while an operation is awaited.
const MAX_OUTAGE: Duration = Duration::from_secs(60);
/// How long an interrupted command waits for each pending response.
const INTERRUPT_GRACE: Duration = Duration::from_secs(3);

/// The exit code of an interrupted program.
pub(super) const EXIT_INTERRUPTED: u8 = 130;

/// Whether to wait until the agent of a guest is ready.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct ReadinessArguments {
    /// Maximum time to wait until the agent in the guest is ready
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(super) wait: u32,
}

/// Parses a timeout in seconds.
pub(super) fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0);
    seconds.ok_or_else(|| "must be a number of seconds, or 0 for unlimited".to_owned())
}

/// Returns whether the agent of an instance accepts operations.
fn is_ready(record: &InstanceRecord) -> bool {
    record.state == InstanceState::Created && agent_is_ready(record.agent_state.as_deref())
}

/// Waits until the agent of an instance is ready. Returns whether it already was.
pub(super) async fn wait_until_ready(
    client: &Client,
    instance: &str,
    timer: &mut PollTimer,
) -> anyhow::Result<bool> {
    let mut was_ready = true;
    loop {
        let record = client.instance(instance).await?.value()?;
        if is_ready(&record) {
            return Ok(was_ready);
        }
        was_ready = false;
        let name = escape_control(&record.name);
        if matches!(record.state, InstanceState::Error | InstanceState::Deleted) {
            bail!("instance {name} is in state {}; see `muster instance why {}`", record.state, record.uuid);
        }
        if !timer.wait_for(&format!("the agent of instance {}", record.name)).await {
            let agent = record.agent_state.unwrap_or_else(|| "not ready (no contact)".to_owned());
            return Err(timed_out(format!(
                "the agent of instance {name} is {}; the instance is {}, its power state {}; give --wait to wait longer",
                escape_control(&agent),
                record.state,
                record.power_state
            )));
        }
    }
}

/// Submits an operation once the agent of the guest is ready.
pub(super) async fn submit(
    client: &Client,
    instance: &str,
    readiness: ReadinessArguments,
    pending: &PendingOperation,
    request: impl AsyncFn() -> api::Result<ApiResponse<AgentOperationRecord>>,
) -> anyhow::Result<ApiResponse<AgentOperationRecord>> {
    let mut timer = PollTimer::new(readiness.wait);
    let mut was_ready = false;
    loop {
        pending.sending.set(true);
        let response = request().await;
        pending.sending.set(false);
        let error = match response {
            Ok(response) => {
                pending.operation.set(Some(response.clone().value()?.uuid));
                return Ok(response);
            }
            Err(error) => error,
        };
        // The server refuses both invalid requests and unready agents with these statuses.
        if was_ready || !matches!(error.status(), Some(400 | 406)) {
            return Err(error.into());
        }
        // If it is ready, then the request is invalid or the agent became ready just now: another attempt decides.
        was_ready = wait_until_ready(client, instance, &mut timer).await?;
        if !was_ready && !timer.wait_for(&format!("the agent of instance {instance}")).await {
            return Err(error.into());
        }
    }
}

/// Waits until an operation has ended. Tolerates a restart of the server.
pub(super) async fn wait_until_final(
    client: &Client,
    id: AgentOperationId,
    on_progress: impl Fn(&AgentOperationRecord),
) -> anyhow::Result<ApiResponse<AgentOperationRecord>> {
    let id = id.to_string();
    let mut interval = MIN_POLL_INTERVAL;
    let mut unreachable_since: Option<Instant> = None;
    loop {
        sleep(interval).await;
        interval = (interval * 3 / 2).min(MAX_POLL_INTERVAL);
        let response = client.agent_operation(&id).await;
        match response.and_then(|response| Ok((response.clone(), response.value()?))) {
            Ok((response, record)) if record.state.is_final() => return Ok(response),
            Ok((_, record)) => {
                unreachable_since = None;
                on_progress(&record);
            }
            Err(error) if error.is_retryable() => {
                if unreachable_since.get_or_insert_with(Instant::now).elapsed() >= MAX_OUTAGE {
                    bail!("{error}; the operation may continue: see `muster agent show {id}`");
                }
            }
            Err(error) => return Err(anyhow!("{error}; the outcome of agent operation {id} is unknown")),
        }
    }
}

/// Why an operation failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AgentFailure {
    /// A timeout expired.
    Expired(String),
    Other(String),
}

impl From<AgentFailure> for anyhow::Error {
    fn from(failure: AgentFailure) -> Self {
        match failure {
            AgentFailure::Expired(text) => timed_out(text),
            AgentFailure::Other(text) => anyhow!(text),
        }
    }
}

/// Fails unless an operation completed successfully.
pub(super) fn check_success(operation: &AgentOperationRecord) -> Result<(), AgentFailure> {
    let reason =
        || escape_control(&agent::failure(operation).unwrap_or_else(|| "the server gives no reason".into()));
    match operation.state {
        AgentOperationState::Complete => Ok(()),
        AgentOperationState::Expired => Err(AgentFailure::Expired(format!("timed out: {}", reason()))),
        AgentOperationState::Deleted => {
            Err(AgentFailure::Other(format!("agent operation {} was deleted", operation.uuid)))
        }
        AgentOperationState::Error
        | AgentOperationState::Preflight
        | AgentOperationState::Queued
        | AgentOperationState::Executing => Err(AgentFailure::Other(reason())),
    }
}

/// The operation that an interrupted command must delete.
#[derive(Debug, Default)]
pub(super) struct PendingOperation {
    /// A request was sent and its response is still missing.
    sending: Cell<bool>,
    operation: Cell<Option<AgentOperationId>>,
}

impl PendingOperation {
    /// Forgets the operation because it has ended.
    pub(super) fn clear(&self) {
        self.operation.set(None);
    }
}

/// Runs `work` until it completes or a signal interrupts it. Then deletes the pending operation and returns `None`.
pub(super) async fn delete_if_interrupted<T>(
    client: &Client,
    pending: &PendingOperation,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<Option<T>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut work = pin!(work);
    tokio::select! {
        result = &mut work => return result.map(Some),
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    if pending.sending.get() {
        // The operation can be deleted only by the id in the response.
        let received = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Pending if pending.sending.get() => Poll::Pending,
            Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
        });
        let _ = timeout(INTERRUPT_GRACE, received).await;
    }
    if let Some(id) = pending.operation.get() {
        match timeout(INTERRUPT_GRACE, client.delete_agent_operation(&id.to_string())).await {
            Ok(Ok(_)) => crate::message!("interrupted; agent operation {id} was deleted"),
            Ok(Err(error)) => crate::message!("interrupted; agent operation {id} continues: {error}"),
            Err(_) => {
                crate::message!(
                    "interrupted; agent operation {id} may continue: the server does not respond"
                );
            }
        }
    } else {
        crate::message!("interrupted");
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
