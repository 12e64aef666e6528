use futures_core::Stream;
use muster_types::Result as AnyResult;
use muster_types::guest::{AgentState, CommandOutput};
use muster_types::ids::AgentOperationId;

use super::*;

const SOON: Duration = Duration::from_secs(10);

/// A guest that is ready.
async fn guest() -> (SimulatedGuests, InstanceId) {
    let (guests, id) = (SimulatedGuests::default(), InstanceId::new());
    let script = GuestScript { ready_after: Some(Duration::from_millis(1)), ..GuestScript::default() };
    guests.script(script);
    guests.state().guests.insert(id, Guest::new("apple"));
    let mut changes = guests.changes();
    guests.restart(id);
    assert_eq!(guests.report(id).unwrap().state, AgentState::NoContact);
    until_ready(&guests, &mut changes, id).await;
    (guests, id)
}

async fn until_ready(guests: &SimulatedGuests, changes: &mut ChangeStream, id: InstanceId) {
    let ready = async {
        while guests.report(id).unwrap().state != AgentState::Ready {
            std::future::poll_fn(|context| changes.as_mut().poll_next(context)).await;
        }
    };
    tokio::time::timeout(SOON, ready).await.unwrap();
}

fn command(line: &str) -> GuestCommand {
    let key = CommandKey { operation: AgentOperationId::new(), index: 0 };
    GuestCommand { key, line: line.into(), again: None }
}

struct Once(Vec<AnyResult<Bytes>>);

impl Stream for Once {
    type Item = AnyResult<Bytes>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.pop())
    }
}

fn bytes(size: usize) -> ByteStream {
    Box::pin(Once(vec![Ok(vec![7; size].into())]))
}

async fn all(mut stream: ByteStream) -> AnyResult<Vec<u8>> {
    let mut whole = Vec::new();
    while let Some(piece) = next(&mut stream).await {
        whole.extend_from_slice(&piece?);
    }
    Ok(whole)
}

async fn started(guests: &SimulatedGuests, id: InstanceId, line: &str) {
    let started = async {
        while !guests.executions(id).contains_key(line) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, started).await.unwrap();
}

#[tokio::test]
async fn a_command_runs_once_for_its_key() {
    let (guests, id) = guest().await;
    let command = command("echo hello");
    let boot = guests.report(id).unwrap().boot;
    let again = GuestCommand { again: boot, ..command.clone() };
    assert_eq!(guests.execute(id, &again).await, Err(GuestError::Unknown));
    let hello = CommandOutput::Here("hello\n".into());
    let expected = CommandResult { return_code: 0, stdout: hello, stderr: CommandOutput::Here(Bytes::new()) };
    for command in [&command, &again, &command] {
        assert_eq!(guests.execute(id, command).await.as_ref(), Ok(&expected));
    }
    assert_eq!(guests.executions(id), BTreeMap::from([("echo hello".into(), 1)]));
    guests.forget(id, command.key).await.unwrap();
    assert_eq!(guests.execute(id, &again).await, Err(GuestError::Unknown));
}

#[tokio::test]
async fn what_a_command_wrote_is_there_until_it_is_forgotten() {
    let (guests, id) = guest().await;
    let command = command("bytes 100000; yes 3 >&2");
    let done = guests.execute(id, &command).await.unwrap();
    assert_eq!(done.stdout, CommandOutput::There { size: 100_000, cut: false });
    assert_eq!(done.stderr, CommandOutput::Here("y\ny\ny\n".into()));
    let stdout = guests.output(id, command.key, OutputName::Stdout).await.unwrap();
    assert_eq!(all(stdout).await.unwrap().len(), 100_000);
    guests.forget(id, command.key).await.unwrap();
    let gone = guests.output(id, command.key, OutputName::Stdout).await;
    assert!(matches!(gone, Err(GuestError::Unknown)));
}

#[tokio::test]
async fn a_restart_of_the_guest_or_its_agent_loses_what_runs() {
    let (guests, id) = guest().await;
    let mut changes = guests.changes();
    let boot = guests.report(id).unwrap().boot;
    let done = command("true");
    guests.execute(id, &done).await.unwrap();
    let long = command("sleep 600");
    let (executing, ()) = tokio::join!(guests.execute(id, &long), async {
        started(&guests, id, "sleep 600").await;
        guests.restart_agent(id);
    });
    assert!(matches!(executing, Err(GuestError::Away(_))), "{executing:?}");
    until_ready(&guests, &mut changes, id).await;
    assert_eq!(guests.report(id).unwrap().boot, boot);
    let again = GuestCommand { again: boot.clone(), ..long };
    let lost = guests.execute(id, &again).await;
    assert!(matches!(lost, Err(GuestError::Restarted(_))), "{lost:?}");
    guests.execute(id, &GuestCommand { again: boot.clone(), ..done.clone() }).await.unwrap();

    let reboot = command("reboot");
    let rebooted = guests.execute(id, &reboot).await;
    assert!(matches!(rebooted, Err(GuestError::Away(_))), "{rebooted:?}");
    until_ready(&guests, &mut changes, id).await;
    assert_ne!(guests.report(id).unwrap().boot, boot);
    for command in [reboot, done] {
        let lost = guests.execute(id, &GuestCommand { again: boot.clone(), ..command }).await;
        assert!(matches!(lost, Err(GuestError::Restarted(_))), "{lost:?}");
    }
}

#[tokio::test]
async fn a_command_is_cancelled_and_one_that_nobody_waits_for_goes_on() {
    let (guests, id) = guest().await;
    let long = command("sleep 600");
    let (executing, ()) = tokio::join!(guests.execute(id, &long), async {
        started(&guests, id, "sleep 600").await;
        guests.cancel(id, long.key).await.unwrap();
    });
    assert!(executing.is_err());
    let short = command("sleep 0.05; echo done");
    let given_up = tokio::time::timeout(Duration::from_millis(5), guests.execute(id, &short)).await;
    assert!(given_up.is_err());
    let again = GuestCommand { again: guests.report(id).unwrap().boot, ..short };
    assert_eq!(guests.execute(id, &again).await.unwrap().stdout, CommandOutput::Here("done\n".into()));
    assert_eq!(guests.executions(id)["sleep 0.05; echo done"], 1);
}

#[tokio::test]
async fn files_come_and_go_whole() {
    let (guests, id) = guest().await;
    guests.put(id, "/tmp/x", 200_000, None, bytes(200_000)).await.unwrap();
    guests.change_mode(id, "/tmp/x", 0o751).await.unwrap();
    let (facts, data) = guests.get(id, "/tmp/x").await.unwrap();
    assert_eq!((facts.size, facts.mode), (200_000, 0o100_751));
    assert_eq!(all(data).await.unwrap(), vec![7; 200_000]);
    assert!(matches!(guests.put(id, "/tmp/x", 5, None, bytes(4)).await, Err(GuestError::Host(_))));
    let broken: ByteStream = Box::pin(Once(vec![Err(muster_types::Error::not_found("blob"))]));
    assert_eq!(
        guests.put(id, "/tmp/x", 5, None, broken).await,
        Err(GuestError::Host("blob not found".into()))
    );
    assert_eq!(guests.get(id, "/tmp/x").await.unwrap().0.size, 200_000);
    let refused = Some(GuestError::Refused("No such file or directory: /no".into()));
    assert_eq!(guests.get(id, "/no").await.err(), refused);
    assert_eq!(guests.change_mode(id, "/no", 0o600).await.err(), refused);
    let large = guests.put(id, "/big", files::MOST + 1, None, bytes(1)).await;
    assert_eq!(large, Err(GuestError::Refused("No space left on device: /big".into())));
}

#[tokio::test]
async fn scripts_make_guests_misbehave() {
    let (guests, id) = guest().await;
    let mut changes = guests.changes();
    let script = GuestScript { stalls_after: Some(100), ..GuestScript::default() };
    guests.script(script.clone());
    guests.put(id, "/small", 100, None, bytes(100)).await.unwrap();
    let (stalled, ()) = tokio::join!(guests.put(id, "/large", 101, None, bytes(101)), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        guests.restart_agent(id);
    });
    assert!(matches!(stalled, Err(GuestError::Away(_))), "{stalled:?}");
    until_ready(&guests, &mut changes, id).await;

    guests.script(GuestScript { silent: true, ..GuestScript::default() });
    assert_eq!(guests.report(id).unwrap().state, AgentState::Unresponsive);
    let first = command("echo late");
    let (executed, ()) = tokio::join!(guests.execute(id, &first), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(guests.executions(id).is_empty());
        guests.script(GuestScript { forgetful: true, ..GuestScript::default() });
    });
    assert_eq!(executed.unwrap().return_code, 0);
    let again = GuestCommand { again: guests.report(id).unwrap().boot, ..first };
    assert_eq!(guests.execute(id, &again).await, Err(GuestError::Forgetful));

    guests.script(GuestScript { ready_after: None, ..GuestScript::default() });
    guests.restart(id);
    let refused = guests.facts(id).await;
    assert_eq!(refused, Err(GuestError::Away("the agent is not ready".into())));
    guests.switched_off(id);
    assert_eq!(guests.report(id), None);
}
