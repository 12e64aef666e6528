use futures_core::Stream;
use muster_types::Result as AnyResult;
use muster_types::guest::{AgentState, CommandOutput};
use muster_types::ids::AgentOperationId;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Creates a guest whose agent is ready.
async fn ready_guest() -> (SimulatedGuests, InstanceId) {
    let (guests, id) = (SimulatedGuests::default(), InstanceId::new());
    let script = GuestScript { ready_after: Some(Duration::from_millis(1)), ..GuestScript::default() };
    guests.set_script(script);
    guests.0.state.lock().guests.insert(id, SimulatedGuest::new("apple"));
    let mut changes = guests.changes();
    guests.reboot(id);
    assert_eq!(guests.report(id).unwrap().state, AgentState::NoContact);
    wait_until_ready(&guests, &mut changes, id).await;
    (guests, id)
}

async fn wait_until_ready(guests: &SimulatedGuests, changes: &mut ChangeStream, id: InstanceId) {
    let ready = async {
        while guests.report(id).unwrap().state != AgentState::Ready {
            std::future::poll_fn(|context| changes.as_mut().poll_next(context)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, ready).await.unwrap();
}

fn command(line: &str) -> GuestCommand {
    let key = CommandKey { operation: AgentOperationId::new(), index: 0 };
    GuestCommand { key, line: line.into(), sent_boot_id: None }
}

struct Chunks(Vec<AnyResult<Bytes>>);

impl Stream for Chunks {
    type Item = AnyResult<Bytes>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.pop())
    }
}

fn bytes(size: usize) -> ByteStream {
    Box::pin(Chunks(vec![Ok(vec![7; size].into())]))
}

async fn collect(mut stream: ByteStream) -> AnyResult<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(chunk) = next(&mut stream).await {
        bytes.extend_from_slice(&chunk?);
    }
    Ok(bytes)
}

async fn wait_until_started(guests: &SimulatedGuests, id: InstanceId, line: &str) {
    let started = async {
        while !guests.executions(id).contains_key(line) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, started).await.unwrap();
}

#[tokio::test]
async fn runs_a_command_once_per_key() {
    let (guests, id) = ready_guest().await;
    let command = command("echo hello");
    let boot_id = guests.report(id).unwrap().boot_id;
    let resent = GuestCommand { sent_boot_id: boot_id, ..command.clone() };
    assert_eq!(guests.execute(id, &resent).await, Err(GuestError::UnknownCommand));
    let hello = CommandOutput::Inline("hello\n".into());
    let expected =
        CommandResult { return_code: 0, stdout: hello, stderr: CommandOutput::Inline(Bytes::new()) };
    for command in [&command, &resent, &command] {
        assert_eq!(guests.execute(id, command).await.as_ref(), Ok(&expected));
    }
    assert_eq!(guests.executions(id), BTreeMap::from([("echo hello".into(), 1)]));
    guests.forget(id, command.key).await.unwrap();
    assert_eq!(guests.execute(id, &resent).await, Err(GuestError::UnknownCommand));
}

#[tokio::test]
async fn keeps_output_until_it_is_forgotten() {
    let (guests, id) = ready_guest().await;
    let command = command("bytes 100000; yes 3 >&2");
    let done = guests.execute(id, &command).await.unwrap();
    assert_eq!(done.stdout, CommandOutput::Stored { size: 100_000, truncated: false });
    assert_eq!(done.stderr, CommandOutput::Inline("y\ny\ny\n".into()));
    let stdout = guests.output(id, command.key, OutputName::Stdout).await.unwrap();
    assert_eq!(collect(stdout).await.unwrap().len(), 100_000);
    guests.forget(id, command.key).await.unwrap();
    let forgotten = guests.output(id, command.key, OutputName::Stdout).await;
    assert!(matches!(forgotten, Err(GuestError::UnknownCommand)));
}

#[tokio::test]
async fn restart_of_guest_or_agent_kills_running_commands() {
    let (guests, id) = ready_guest().await;
    let mut changes = guests.changes();
    let boot_id = guests.report(id).unwrap().boot_id;
    let done = command("true");
    guests.execute(id, &done).await.unwrap();
    let long = command("sleep 600");
    let (executing, ()) = tokio::join!(guests.execute(id, &long), async {
        wait_until_started(&guests, id, "sleep 600").await;
        guests.restart_agent(id);
    });
    assert!(matches!(executing, Err(GuestError::Unreachable(_))), "{executing:?}");
    wait_until_ready(&guests, &mut changes, id).await;
    assert_eq!(guests.report(id).unwrap().boot_id, boot_id);
    let resent = GuestCommand { sent_boot_id: boot_id.clone(), ..long };
    let lost = guests.execute(id, &resent).await;
    assert!(matches!(lost, Err(GuestError::Restarted(_))), "{lost:?}");
    guests.execute(id, &GuestCommand { sent_boot_id: boot_id.clone(), ..done.clone() }).await.unwrap();

    let reboot = command("reboot");
    let rebooted = guests.execute(id, &reboot).await;
    assert!(matches!(rebooted, Err(GuestError::Unreachable(_))), "{rebooted:?}");
    wait_until_ready(&guests, &mut changes, id).await;
    assert_ne!(guests.report(id).unwrap().boot_id, boot_id);
    for command in [reboot, done] {
        let lost = guests.execute(id, &GuestCommand { sent_boot_id: boot_id.clone(), ..command }).await;
        assert!(matches!(lost, Err(GuestError::Restarted(_))), "{lost:?}");
    }
}

#[tokio::test]
async fn dropped_call_does_not_cancel_its_command() {
    let (guests, id) = ready_guest().await;
    let long = command("sleep 600");
    let (executing, ()) = tokio::join!(guests.execute(id, &long), async {
        wait_until_started(&guests, id, "sleep 600").await;
        guests.cancel(id, long.key).await.unwrap();
    });
    assert!(executing.is_err());
    let short = command("sleep 0.05; echo done");
    let timed_out = tokio::time::timeout(Duration::from_millis(5), guests.execute(id, &short)).await;
    assert!(timed_out.is_err());
    let resent = GuestCommand { sent_boot_id: guests.report(id).unwrap().boot_id, ..short };
    assert_eq!(guests.execute(id, &resent).await.unwrap().stdout, CommandOutput::Inline("done\n".into()));
    assert_eq!(guests.executions(id)["sleep 0.05; echo done"], 1);
}

#[tokio::test]
async fn transfers_files_atomically() {
    let (guests, id) = ready_guest().await;
    guests.put(id, "/tmp/x", 200_000, None, bytes(200_000)).await.unwrap();
    guests.change_mode(id, "/tmp/x", 0o751).await.unwrap();
    let (info, data) = guests.get(id, "/tmp/x").await.unwrap();
    assert_eq!((info.size, info.mode), (200_000, 0o100_751));
    assert_eq!(collect(data).await.unwrap(), vec![7; 200_000]);
    assert!(matches!(guests.put(id, "/tmp/x", 5, None, bytes(4)).await, Err(GuestError::HostFailed(_))));
    let broken: ByteStream = Box::pin(Chunks(vec![Err(muster_types::Error::not_found("blob"))]));
    assert_eq!(
        guests.put(id, "/tmp/x", 5, None, broken).await,
        Err(GuestError::HostFailed("blob not found".into()))
    );
    assert_eq!(guests.get(id, "/tmp/x").await.unwrap().0.size, 200_000);
    let refused = Some(GuestError::Refused("No such file or directory: /no".into()));
    assert_eq!(guests.get(id, "/no").await.err(), refused);
    assert_eq!(guests.change_mode(id, "/no", 0o600).await.err(), refused);
    let large = guests.put(id, "/big", files::MAX_TOTAL_SIZE + 1, None, bytes(1)).await;
    assert_eq!(large, Err(GuestError::Refused("No space left on device: /big".into())));
}

#[tokio::test]
async fn scripts_change_the_behaviour_of_guests() {
    let (guests, id) = ready_guest().await;
    let mut changes = guests.changes();
    let script = GuestScript { stall_after_bytes: Some(100), ..GuestScript::default() };
    guests.set_script(script.clone());
    guests.put(id, "/small", 100, None, bytes(100)).await.unwrap();
    let (stalled, ()) = tokio::join!(guests.put(id, "/large", 101, None, bytes(101)), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        guests.restart_agent(id);
    });
    assert!(matches!(stalled, Err(GuestError::Unreachable(_))), "{stalled:?}");
    wait_until_ready(&guests, &mut changes, id).await;

    guests.set_script(GuestScript { unresponsive: true, ..GuestScript::default() });
    assert_eq!(guests.report(id).unwrap().state, AgentState::Unresponsive);
    let first = command("echo late");
    let (executed, ()) = tokio::join!(guests.execute(id, &first), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(guests.executions(id).is_empty());
        guests.set_script(GuestScript { stateless_agent: true, ..GuestScript::default() });
    });
    assert_eq!(executed.unwrap().return_code, 0);
    let resent = GuestCommand { sent_boot_id: guests.report(id).unwrap().boot_id, ..first };
    assert_eq!(guests.execute(id, &resent).await, Err(GuestError::StatelessAgent));

    guests.set_script(GuestScript { ready_after: None, ..GuestScript::default() });
    guests.reboot(id);
    let refused = guests.facts(id).await;
    assert_eq!(refused, Err(GuestError::Unreachable("the agent is not ready".into())));
    guests.power_off(id);
    assert_eq!(guests.report(id), None);
}
