//! The agent in the small guest: commands and files, across a restart of the daemon, a pause and a reboot.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_core::Stream;
use muster_types::guest::{
    AgentState, CommandKey, CommandOutput, CommandResult, GuestApi, GuestCommand, GuestError, GuestReport,
    OutputName,
};
use muster_types::ids::AgentOperationId;
use muster_types::node::NodeApi;
use muster_types::storage::ByteStream;
use muster_types::vm::{ChangeStream, VmPlan, VmPower};
use tokio::time::timeout;

use crate::fixture::{Fixture, GUEST_TIMEOUT, next};

fn guests(fixture: &Fixture) -> &dyn GuestApi {
    fixture.node().guests()
}

/// Waits for a report of a guest, relying on change notifications alone.
async fn wait_for(
    fixture: &Fixture,
    changes: &mut ChangeStream,
    plan: &VmPlan,
    is_expected: impl Fn(&GuestReport) -> bool,
) -> GuestReport {
    let wait = async {
        loop {
            if let Some(report) = guests(fixture).report(plan.id).filter(|report| is_expected(report)) {
                return report;
            }
            next(changes).await.unwrap();
        }
    };
    match timeout(GUEST_TIMEOUT, wait).await {
        Ok(report) => report,
        Err(_) => panic!("still {:?}", guests(fixture).report(plan.id)),
    }
}

async fn wait_until_ready(fixture: &Fixture, changes: &mut ChangeStream, plan: &VmPlan) -> GuestReport {
    wait_for(fixture, changes, plan, |report| report.state == AgentState::Ready).await
}

fn command(line: &str) -> GuestCommand {
    let key = CommandKey { operation: AgentOperationId::new(), index: 0 };
    GuestCommand { key, line: line.into(), sent_boot_id: None }
}

async fn run(fixture: &Fixture, plan: &VmPlan, line: &str) -> CommandResult {
    timeout(GUEST_TIMEOUT, guests(fixture).execute(plan.id, &command(line))).await.unwrap().unwrap()
}

fn text(output: &CommandOutput) -> &str {
    match output {
        CommandOutput::Inline(bytes) => std::str::from_utf8(bytes).unwrap(),
        CommandOutput::Stored { .. } => panic!("{output:?}"),
    }
}

async fn collect(mut stream: ByteStream) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(bytes) = std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await {
        all.extend_from_slice(&bytes.unwrap());
    }
    all
}

/// A stream of bytes in memory.
struct Source(Bytes);

impl Stream for Source {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let len = self.0.len().min(1 << 20);
        Poll::Ready((len > 0).then(|| Ok(self.0.split_to(len))))
    }
}

fn data(size: u32) -> Bytes {
    // Must not repeat with the period of a chunk.
    (0..size).map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

#[tokio::test]
async fn agent_runs_commands_and_transfers_files() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut changes = guests(&fixture).changes();
    let plan = fixture.plan("agent").await;
    assert_eq!(guests(&fixture).report(plan.id), None);
    let began = Instant::now();
    fixture.vms().build(&plan).await.unwrap();
    fixture.vms().start(&plan).await.unwrap();
    let first = guests(&fixture).report(plan.id).unwrap();
    assert_eq!(first.state, AgentState::NoContact);
    let report = wait_until_ready(&fixture, &mut changes, &plan).await;
    println!("ready after {:.1} s", began.elapsed().as_secs_f64());
    assert!(
        report.boot_id.is_some() && report.system_boot_time.is_some() && report.agent_start_time.is_some()
    );

    let ended = run(&fixture, &plan, "echo out; echo err >&2; exit 7").await;
    assert_eq!((ended.return_code, text(&ended.stdout), text(&ended.stderr)), (7, "out\n", "err\n"));
    assert_eq!(run(&fixture, &plan, "no-such-program").await.return_code, 127);
    let facts = guests(&fixture).facts(plan.id).await.unwrap();
    assert!(facts["mounts"].as_array().is_some_and(|mounts| !mounts.is_empty()), "{facts:?}");

    let began = Instant::now();
    for _ in 0..10 {
        run(&fixture, &plan, "true").await;
    }
    println!("`true` takes {:.0} ms", began.elapsed().as_secs_f64() * 100.0);

    // 5 MB of output, which the agent keeps until it is forgotten.
    let request = command("head -c 5000000 /dev/zero | tr '\\0' x");
    let ended = guests(&fixture).execute(plan.id, &request).await.unwrap();
    assert_eq!(ended.stdout, CommandOutput::Stored { size: 5_000_000, truncated: false });
    let began = Instant::now();
    for _ in 0..2 {
        let output = guests(&fixture).output(plan.id, request.key, OutputName::Stdout).await.unwrap();
        let output = collect(output).await;
        assert!(output.len() == 5_000_000 && output.iter().all(|byte| *byte == b'x'));
    }
    println!("output: {:.1} MB/s", 10.0 / began.elapsed().as_secs_f64());
    guests(&fixture).forget(plan.id, request.key).await.unwrap();
    let again = GuestCommand { sent_boot_id: report.boot_id.clone(), ..request };
    assert_eq!(guests(&fixture).execute(plan.id, &again).await, Err(GuestError::UnknownCommand));

    // Write a file and read it back.
    let size = 20_000_000;
    let data = data(size);
    let began = Instant::now();
    let source = Box::pin(Source(data.clone()));
    guests(&fixture).put(plan.id, "/tmp/file", size.into(), None, source).await.unwrap();
    println!("put: {:.1} MB/s", 20.0 / began.elapsed().as_secs_f64());
    guests(&fixture).change_mode(plan.id, "/tmp/file", 0o100_640).await.unwrap();
    let began = Instant::now();
    let (facts, stream) = guests(&fixture).get(plan.id, "/tmp/file").await.unwrap();
    assert_eq!((facts.mode & 0o777, facts.size), (0o640, size.into()));
    assert!(collect(stream).await == data);
    println!("get: {:.1} MB/s", 20.0 / began.elapsed().as_secs_f64());
    let missing = guests(&fixture).get(plan.id, "/tmp/nothing").await.err();
    assert!(matches!(missing, Some(GuestError::Refused(_))), "{missing:?}");
    let no_directory =
        guests(&fixture).put(plan.id, "/no/where", 1, None, Box::pin(Source("x".into()))).await;
    assert!(matches!(no_directory, Err(GuestError::Refused(_))), "{no_directory:?}");

    // An abandoned transfer leaves no file.
    let (_, mut stream) = guests(&fixture).get(plan.id, "/tmp/file").await.unwrap();
    std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await.unwrap().unwrap();
    drop(stream);
    let endless = Box::pin(Source(data.clone()));
    let putting = guests(&fixture).put(plan.id, "/tmp/other", 1 << 40, None, endless);
    assert!(matches!(putting.await, Err(GuestError::HostFailed(_))));
    let listing = run(&fixture, &plan, "ls -A /tmp; rm /tmp/file").await;
    assert!(
        text(&listing.stdout).contains("file") && !text(&listing.stdout).contains("other"),
        "{listing:?}"
    );

    // Cancel a command.
    let request = command("touch /tmp/begun; sleep 1000");
    let running = guests(&fixture).execute(plan.id, &request);
    let cancelling = async {
        run(&fixture, &plan, "until test -e /tmp/begun; do sleep 0.1; done").await;
        guests(&fixture).cancel(plan.id, request.key).await
    };
    let (ended, cancelled) = tokio::join!(running, cancelling);
    cancelled.unwrap();
    assert!(matches!(ended, Err(GuestError::Refused(_))), "{ended:?}");

    fixture.vms().stop(plan.id).await.unwrap();
    assert_eq!(guests(&fixture).report(plan.id), None);
    assert!(matches!(guests(&fixture).facts(plan.id).await, Err(GuestError::Unreachable(_))));
}

#[tokio::test]
async fn command_survives_daemon_restart_and_pause_but_not_reboot() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let mut changes = guests(&fixture).changes();
    let plan = fixture.plan("outlive").await;
    fixture.vms().build(&plan).await.unwrap();
    fixture.vms().start(&plan).await.unwrap();
    let boot = wait_until_ready(&fixture, &mut changes, &plan).await.boot_id;

    let request =
        command("echo once >> /tmp/times; until test -e /tmp/go; do sleep 0.1; done; cat /tmp/times");
    {
        let mut running = guests(&fixture).execute(plan.id, &request);
        let begun = async {
            run(&fixture, &plan, "until test -e /tmp/times; do sleep 0.1; done").await;
        };
        tokio::select! {
            ended = &mut running => panic!("{ended:?}"),
            () = begun => {}
        }
    }
    fixture.restart_daemon();
    let mut changes = guests(&fixture).changes();
    let report = wait_until_ready(&fixture, &mut changes, &plan).await;
    assert_eq!(report.boot_id, boot);
    let again = GuestCommand { sent_boot_id: boot.clone(), ..request };
    let release = async {
        run(&fixture, &plan, "touch /tmp/go").await;
    };
    let (ended, ()) = tokio::join!(guests(&fixture).execute(plan.id, &again), release);
    assert_eq!(text(&ended.unwrap().stdout), "once\n");

    // Pause for longer than the agent timeout.
    fixture.vms().pause(plan.id).await.unwrap();
    let paused = AgentState::NotReady("instance paused".into());
    wait_for(&fixture, &mut changes, &plan, |report| report.state == paused).await;
    let quiet = timeout(Duration::from_secs(17), async {
        while guests(&fixture).report(plan.id).unwrap().state == paused {
            next(&mut changes).await.unwrap();
        }
    });
    assert!(quiet.await.is_err(), "{:?}", guests(&fixture).report(plan.id));
    fixture.vms().resume(plan.id).await.unwrap();
    wait_for(&fixture, &mut changes, &plan, |report| report.state == AgentState::Ready).await;
    assert_eq!(text(&run(&fixture, &plan, "echo on").await.stdout), "on\n");

    let request = command("touch /tmp/begun; sleep 1000");
    let running = guests(&fixture).execute(plan.id, &request);
    let resetting = async {
        run(&fixture, &plan, "until test -e /tmp/begun; do sleep 0.1; done").await;
        fixture.vms().reset(plan.id).await.unwrap();
    };
    let (ended, ()) = tokio::join!(running, resetting);
    assert!(matches!(ended, Err(GuestError::Unreachable(_))), "{ended:?}");
    wait_for(&fixture, &mut changes, &plan, |report| report.state == AgentState::NoContact).await;
    let second = wait_until_ready(&fixture, &mut changes, &plan).await.boot_id;
    assert!(second.is_some() && second != boot, "{second:?}");
    let again = GuestCommand { sent_boot_id: boot, ..request };
    let lost = guests(&fixture).execute(plan.id, &again).await;
    assert!(matches!(lost, Err(GuestError::Restarted(_))), "{lost:?}");

    // The guest reboots on its own.
    run(&fixture, &plan, "(sleep 1; reboot -f) > /dev/null 2>&1 &").await;
    let third = wait_for(&fixture, &mut changes, &plan, |report| {
        report.state == AgentState::Ready && report.boot_id.is_some() && report.boot_id != second
    });
    third.await;
    assert_eq!(fixture.power(&plan).await, VmPower::On);
}
