//! Waiting for guests: until their agents can be asked, and until they have done what they were asked.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use muster_types::agent_operation::{AgentOperationRecord, AgentOperationState};
use muster_types::ids::AgentOperationId;
use muster_types::instance::InstanceState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};

use super::agent;
use super::wait::Patience;
use crate::api::{self, Answer, Client, Error};
use crate::output::visible;
use crate::transfer::may_pass;

/// Between the first two questions, and between the last ones.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long a server may be away while something is waited for.
const AWAY: Duration = Duration::from_secs(60);
/// How long the answer to what was just asked is waited for when all is to end.
const LAST_ANSWER: Duration = Duration::from_secs(3);

/// What this program ends with when the user ended it.
pub(super) const INTERRUPTED: u8 = 130;

/// Whether to wait until a guest can be asked.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct Readiness {
    /// How long to wait for the agent in the guest to be ready
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(super) wait: u32,
}

/// Seconds of a budget.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0);
    seconds.ok_or_else(|| "must be a number of seconds, 0 for no end".to_owned())
}

/// Waits until the agent of an instance can be asked.
pub(super) async fn ready(client: &Client, instance: &str, patience: &mut Patience) -> anyhow::Result<()> {
    loop {
        let record = client.instance(instance).await?.value()?;
        let name = visible(&record.name);
        if matches!(record.state, InstanceState::Error | InstanceState::Deleted) {
            bail!("instance {name} is {}; `muster instance why {}` tells more", record.state, record.uuid);
        }
        let state = record.agent_state.unwrap_or_else(|| "not ready (no contact)".to_owned());
        if record.state == InstanceState::Created && state.starts_with("ready") {
            return Ok(());
        }
        if !patience.lasts().await {
            let power = record.power_state;
            bail!(
                "the agent of instance {name} is {}; the instance is {}, its power {power}; --wait waits longer",
                visible(&state),
                record.state
            );
        }
    }
}

/// Whether a guest cannot be asked yet.
fn not_ready(error: &Error) -> bool {
    match error.status() {
        Some(400) => error.to_string() == "instance agent not ready",
        Some(406) => error.to_string().contains("is not ready"),
        _ => false,
    }
}

/// Asks something of a guest, once that is possible.
pub(super) async fn ask(
    client: &Client,
    instance: &str,
    readiness: Readiness,
    asked: &Asked,
    question: impl AsyncFn() -> api::Result<Answer<AgentOperationRecord>>,
) -> anyhow::Result<Answer<AgentOperationRecord>> {
    let mut patience = Patience::of(readiness.wait);
    loop {
        asked.sending.set(true);
        let answer = question().await;
        asked.sending.set(false);
        match answer {
            Ok(answer) => {
                asked.operation.set(Some(answer.clone().value()?.uuid));
                return Ok(answer);
            }
            Err(error) if not_ready(&error) => {
                ready(client, instance, &mut patience).await?;
                if !patience.lasts().await {
                    return Err(error.into());
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits for the end of an operation. A server that is started again meanwhile is waited for.
pub(super) async fn ended(
    client: &Client,
    id: AgentOperationId,
    seen: impl Fn(&AgentOperationRecord),
) -> anyhow::Result<Answer<AgentOperationRecord>> {
    let id = id.to_string();
    let mut pause = SHORTEST_PAUSE;
    let mut away: Option<Instant> = None;
    loop {
        sleep(pause).await;
        pause = (pause * 3 / 2).min(LONGEST_PAUSE);
        let look = client.agent_operation(&id).await;
        match look.and_then(|answer| Ok((answer.clone(), answer.value()?))) {
            Ok((answer, record)) if record.state.is_final() => return Ok(answer),
            Ok((_, record)) => {
                away = None;
                seen(&record);
            }
            Err(error) if may_pass(&error) => {
                if away.get_or_insert_with(Instant::now).elapsed() >= AWAY {
                    bail!("{error}; the cluster may go on: `muster agent show {id}` tells how far");
                }
            }
            Err(error) => return Err(anyhow!("{error}; how agent operation {id} ended is not known")),
        }
    }
}

/// How an operation ended that did not do what was wanted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// A budget ran out.
    Expired(String),
    Other(String),
}

impl From<Failure> for anyhow::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Expired(text) | Failure::Other(text) => anyhow!(text),
        }
    }
}

/// Whether an operation that ended did what was wanted.
pub(super) fn succeeded(operation: &AgentOperationRecord) -> Result<(), Failure> {
    let why = || visible(&agent::failure(operation).unwrap_or_else(|| "the server does not say why".into()));
    match operation.state {
        AgentOperationState::Complete => Ok(()),
        AgentOperationState::Expired => Err(Failure::Expired(format!("not done in time: {}", why()))),
        AgentOperationState::Deleted => {
            Err(Failure::Other(format!("agent operation {} was deleted meanwhile", operation.uuid)))
        }
        AgentOperationState::Error
        | AgentOperationState::Preflight
        | AgentOperationState::Queued
        | AgentOperationState::Executing => Err(Failure::Other(why())),
    }
}

/// What was asked of a guest so far.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Something is being asked, and there is no answer yet.
    sending: Cell<bool>,
    operation: Cell<Option<AgentOperationId>>,
}

impl Asked {
    /// Nothing has to be ended any more.
    pub(super) fn forget(&self) {
        self.operation.set(None);
    }
}

/// Does something unless the user or the system ends it. Then what was asked of the guest is deleted, too, and the
/// answer is nothing.
pub(super) async fn unless_interrupted<T>(
    client: &Client,
    asked: &Asked,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<Option<T>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut work = pin!(work);
    tokio::select! {
        result = &mut work => return result.map(Some),
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    if asked.sending.get() {
        // What was asked for can only be ended by its id.
        let answered = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Pending if asked.sending.get() => Poll::Pending,
            Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
        });
        let _ = timeout(LAST_ANSWER, answered).await;
    }
    if let Some(id) = asked.operation.get() {
        match timeout(LAST_ANSWER, client.delete_agent_operation(&id.to_string())).await {
            Ok(Ok(_)) => eprintln!("interrupted; agent operation {id} was ended"),
            Ok(Err(error)) => eprintln!("interrupted; agent operation {id} goes on: {error}"),
            Err(_) => eprintln!("interrupted; agent operation {id} may go on: the server does not answer"),
        }
    } else {
        eprintln!("interrupted");
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::agent::tests::example;
    use super::super::instance_tables::tests::example as instance;
    use super::*;
    use crate::fake::Fake;

    const EXECUTE: &str = "POST /instances/web/agent/execute";

    fn refused() -> (u16, Value) {
        (400, json!({ "error": "instance agent not ready", "status": 400 }))
    }

    fn agent_is(state: &str) -> (u16, Value) {
        (200, json!(instance(&json!({ "agent_state": state }))))
    }

    async fn asked(
        answers: Vec<(u16, Value)>,
        instances: Vec<(u16, Value)>,
        wait: u32,
    ) -> (anyhow::Result<()>, Vec<String>) {
        let (client, fake) = Fake::serve(vec![(EXECUTE, answers), ("GET /instances/web", instances)]).await;
        let question = async || client.execute("web", "uptime", None).await;
        let asked = Asked::default();
        let answer = ask(&client, "web", Readiness { wait }, &asked, question).await.map(drop);
        assert_eq!(answer.is_ok(), asked.operation.get().is_some());
        (answer, fake.asked())
    }

    #[tokio::test]
    async fn a_guest_that_is_not_ready_is_waited_for_if_that_is_wanted() {
        let done = (200, json!(example(&json!({ "state": "queued" }))));
        let starting = agent_is("not ready (agent startup)");
        let states = vec![starting.clone(), agent_is("ready (degraded)")];
        let (answer, calls) = asked(vec![refused(), done], states, 9).await;
        answer.unwrap();
        assert_eq!(calls.iter().filter(|call| call.starts_with(EXECUTE)).count(), 2);
        let (answer, calls) = asked(vec![refused()], vec![starting], 0).await;
        let error = answer.unwrap_err().to_string();
        assert!(
            error.starts_with("the agent of instance web is not ready (agent startup); the instance"),
            "{error}"
        );
        assert_eq!(calls.len(), 2);
    }

    #[tokio::test]
    async fn an_instance_that_failed_is_not_waited_for() {
        let error = (406, json!({ "error": "instance x is not ready (error)" }));
        let failed = (200, json!(instance(&json!({ "state": "error" }))));
        let (answer, _) = asked(vec![error], vec![failed], 600).await;
        assert!(answer.unwrap_err().to_string().starts_with("instance web is error; "));
        let mode = (406, json!({ "error": "invalid mode: x" }));
        assert_eq!(asked(vec![mode], vec![], 600).await.0.unwrap_err().to_string(), "invalid mode: x");
    }

    #[tokio::test]
    async fn a_server_that_is_away_for_a_moment_is_asked_again() {
        let record = example(&json!({}));
        let under_way = (200, json!(example(&json!({ "state": "executing" }))));
        let away = (503, json!({ "error": "draining" }));
        let (client, _) = Fake::serve(vec![(
            "GET /agentoperations/7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
            vec![under_way, away.clone(), away, (200, json!(record))],
        )])
        .await;
        let seen = Cell::new(0);
        let answer = ended(&client, record.uuid, |_| seen.set(seen.get() + 1)).await.unwrap();
        assert_eq!((answer.value().unwrap(), seen.get()), (record, 1));
    }

    #[tokio::test]
    async fn an_operation_that_is_gone_is_not_waited_for() {
        let (client, _) = Fake::serve(vec![]).await;
        let record = example(&json!({}));
        let error = ended(&client, record.uuid, |_| {}).await.unwrap_err().to_string();
        assert!(error.starts_with("not found; how agent operation 7d5e1b5a"), "{error}");
    }

    #[test]
    fn an_operation_that_ran_out_of_time_differs_from_one_that_failed() {
        succeeded(&example(&json!({}))).unwrap();
        let expired = example(&json!({ "state": "expired", "expiry_reason": "deadline" }));
        let text = "not done in time: its deadline budget ran out".to_owned();
        assert_eq!(succeeded(&expired), Err(Failure::Expired(text)));
        let failed = example(&json!({ "state": "error", "error_message": "a\nb" }));
        assert_eq!(succeeded(&failed), Err(Failure::Other("a\\nb".to_owned())));
    }

    #[test]
    fn budgets_are_numbers_of_seconds() {
        assert_eq!((seconds("0"), seconds("1.5")), (Ok(0.0), Ok(1.5)));
        for text in ["-1", "inf", "NaN", "1m", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
