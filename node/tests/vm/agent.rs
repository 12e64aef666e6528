//! The agent in the small guest: ready, commands, files; across a new daemon, a pause and a restart.

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

use crate::world::{PATIENCE, World, next};

fn guests(world: &World) -> &dyn GuestApi {
    world.node().guests()
}

/// Waits until the report of a guest is as wanted, told by changes alone.
async fn wait_for(
    world: &World,
    changes: &mut ChangeStream,
    plan: &VmPlan,
    wanted: impl Fn(&GuestReport) -> bool,
) -> GuestReport {
    let wait = async {
        loop {
            if let Some(report) = guests(world).report(plan.id).filter(|report| wanted(report)) {
                return report;
            }
            next(changes).await.unwrap();
        }
    };
    match timeout(PATIENCE, wait).await {
        Ok(report) => report,
        Err(_) => panic!("still {:?}", guests(world).report(plan.id)),
    }
}

async fn wait_until_ready(world: &World, changes: &mut ChangeStream, plan: &VmPlan) -> GuestReport {
    wait_for(world, changes, plan, |report| report.state == AgentState::Ready).await
}

fn command(line: &str) -> GuestCommand {
    let key = CommandKey { operation: AgentOperationId::new(), index: 0 };
    GuestCommand { key, line: line.into(), sent_boot_id: None }
}

async fn run(world: &World, plan: &VmPlan, line: &str) -> CommandResult {
    timeout(PATIENCE, guests(world).execute(plan.id, &command(line))).await.unwrap().unwrap()
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

/// Bytes that are all there.
struct Source(Bytes);

impl Stream for Source {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let most = self.0.len().min(1 << 20);
        Poll::Ready((most > 0).then(|| Ok(self.0.split_to(most))))
    }
}

fn data(size: u32) -> Bytes {
    // Nothing that repeats itself in the size of a piece.
    (0..size).map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

#[tokio::test]
async fn a_guest_runs_commands_and_moves_files() {
    let Some(world) = World::new().await else { return };
    let mut changes = guests(&world).changes();
    let plan = world.plan("agent").await;
    assert_eq!(guests(&world).report(plan.id), None);
    let began = Instant::now();
    world.vms().build(&plan).await.unwrap();
    world.vms().start(&plan).await.unwrap();
    let first = guests(&world).report(plan.id).unwrap();
    assert_eq!(first.state, AgentState::NoContact);
    let report = wait_until_ready(&world, &mut changes, &plan).await;
    println!("ready after {:.1} s", began.elapsed().as_secs_f64());
    assert!(
        report.boot_id.is_some() && report.system_boot_time.is_some() && report.agent_start_time.is_some()
    );

    let ended = run(&world, &plan, "echo out; echo err >&2; exit 7").await;
    assert_eq!((ended.return_code, text(&ended.stdout), text(&ended.stderr)), (7, "out\n", "err\n"));
    assert_eq!(run(&world, &plan, "no-such-program").await.return_code, 127);
    let facts = guests(&world).facts(plan.id).await.unwrap();
    assert!(facts["mounts"].as_array().is_some_and(|mounts| !mounts.is_empty()), "{facts:?}");

    let began = Instant::now();
    for _ in 0..10 {
        run(&world, &plan, "true").await;
    }
    println!("`true` takes {:.0} ms", began.elapsed().as_secs_f64() * 100.0);

    // 5 MB of output, which the guest keeps until it is forgotten.
    let order = command("head -c 5000000 /dev/zero | tr '\\0' x");
    let ended = guests(&world).execute(plan.id, &order).await.unwrap();
    assert_eq!(ended.stdout, CommandOutput::Stored { size: 5_000_000, truncated: false });
    let began = Instant::now();
    for _ in 0..2 {
        let output = guests(&world).output(plan.id, order.key, OutputName::Stdout).await.unwrap();
        let output = collect(output).await;
        assert!(output.len() == 5_000_000 && output.iter().all(|byte| *byte == b'x'));
    }
    println!("output: {:.1} MB/s", 10.0 / began.elapsed().as_secs_f64());
    guests(&world).forget(plan.id, order.key).await.unwrap();
    let resent = GuestCommand { sent_boot_id: report.boot_id.clone(), ..order };
    assert_eq!(guests(&world).execute(plan.id, &resent).await, Err(GuestError::UnknownCommand));

    // A file in, and out again.
    let size = 20_000_000;
    let data = data(size);
    let began = Instant::now();
    let source = Box::pin(Source(data.clone()));
    guests(&world).put(plan.id, "/tmp/file", size.into(), None, source).await.unwrap();
    println!("put: {:.1} MB/s", 20.0 / began.elapsed().as_secs_f64());
    guests(&world).change_mode(plan.id, "/tmp/file", 0o100_640).await.unwrap();
    let began = Instant::now();
    let (facts, stream) = guests(&world).get(plan.id, "/tmp/file").await.unwrap();
    assert_eq!((facts.mode & 0o777, facts.size), (0o640, size.into()));
    assert!(collect(stream).await == data);
    println!("get: {:.1} MB/s", 20.0 / began.elapsed().as_secs_f64());
    let missing = guests(&world).get(plan.id, "/tmp/nothing").await.err();
    assert!(matches!(missing, Some(GuestError::Refused(_))), "{missing:?}");
    let nowhere = guests(&world).put(plan.id, "/no/where", 1, None, Box::pin(Source("x".into()))).await;
    assert!(matches!(nowhere, Err(GuestError::Refused(_))), "{nowhere:?}");

    // What is given up leaves nothing.
    let (_, mut stream) = guests(&world).get(plan.id, "/tmp/file").await.unwrap();
    std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await.unwrap().unwrap();
    drop(stream);
    let endless = Box::pin(Source(data.clone()));
    let putting = guests(&world).put(plan.id, "/tmp/other", 1 << 40, None, endless);
    assert!(matches!(putting.await, Err(GuestError::HostFailed(_))));
    let left = run(&world, &plan, "ls -A /tmp; rm /tmp/file").await;
    assert!(text(&left.stdout).contains("file") && !text(&left.stdout).contains("other"), "{left:?}");

    // A command that is cancelled ends.
    let order = command("touch /tmp/begun; sleep 1000");
    let running = guests(&world).execute(plan.id, &order);
    let cancelling = async {
        run(&world, &plan, "until test -e /tmp/begun; do sleep 0.1; done").await;
        guests(&world).cancel(plan.id, order.key).await
    };
    let (ended, cancelled) = tokio::join!(running, cancelling);
    cancelled.unwrap();
    assert!(matches!(ended, Err(GuestError::Refused(_))), "{ended:?}");

    world.vms().stop(plan.id).await.unwrap();
    assert_eq!(guests(&world).report(plan.id), None);
    assert!(matches!(guests(&world).facts(plan.id).await, Err(GuestError::Unreachable(_))));
}

#[tokio::test]
async fn a_command_outlives_the_daemon_and_a_pause_but_not_a_restart() {
    let Some(mut world) = World::new().await else { return };
    let mut changes = guests(&world).changes();
    let plan = world.plan("outlive").await;
    world.vms().build(&plan).await.unwrap();
    world.vms().start(&plan).await.unwrap();
    let boot = wait_until_ready(&world, &mut changes, &plan).await.boot_id;

    let order = command("echo once >> /tmp/times; until test -e /tmp/go; do sleep 0.1; done; cat /tmp/times");
    {
        let mut running = guests(&world).execute(plan.id, &order);
        let begun = async {
            run(&world, &plan, "until test -e /tmp/times; do sleep 0.1; done").await;
        };
        tokio::select! {
            ended = &mut running => panic!("{ended:?}"),
            () = begun => {}
        }
    }
    world.restart();
    let mut changes = guests(&world).changes();
    let report = wait_until_ready(&world, &mut changes, &plan).await;
    assert_eq!(report.boot_id, boot);
    let resent = GuestCommand { sent_boot_id: boot.clone(), ..order };
    let release = async {
        run(&world, &plan, "touch /tmp/go").await;
    };
    let (ended, ()) = tokio::join!(guests(&world).execute(plan.id, &resent), release);
    assert_eq!(text(&ended.unwrap().stdout), "once\n");

    // Paused for longer than any silence is borne.
    world.vms().pause(plan.id).await.unwrap();
    let paused = AgentState::NotReady("instance paused".into());
    wait_for(&world, &mut changes, &plan, |report| report.state == paused).await;
    let quiet = timeout(Duration::from_secs(17), async {
        while guests(&world).report(plan.id).unwrap().state == paused {
            next(&mut changes).await.unwrap();
        }
    });
    assert!(quiet.await.is_err(), "{:?}", guests(&world).report(plan.id));
    world.vms().resume(plan.id).await.unwrap();
    wait_for(&world, &mut changes, &plan, |report| report.state == AgentState::Ready).await;
    assert_eq!(text(&run(&world, &plan, "echo on").await.stdout), "on\n");

    let order = command("touch /tmp/begun; sleep 1000");
    let running = guests(&world).execute(plan.id, &order);
    let resetting = async {
        run(&world, &plan, "until test -e /tmp/begun; do sleep 0.1; done").await;
        world.vms().reset(plan.id).await.unwrap();
    };
    let (ended, ()) = tokio::join!(running, resetting);
    assert!(matches!(ended, Err(GuestError::Unreachable(_))), "{ended:?}");
    wait_for(&world, &mut changes, &plan, |report| report.state == AgentState::NoContact).await;
    let second = wait_until_ready(&world, &mut changes, &plan).await.boot_id;
    assert!(second.is_some() && second != boot, "{second:?}");
    let resent = GuestCommand { sent_boot_id: boot, ..order };
    let lost = guests(&world).execute(plan.id, &resent).await;
    assert!(matches!(lost, Err(GuestError::Restarted(_))), "{lost:?}");

    // The guest restarts by itself.
    run(&world, &plan, "(sleep 1; reboot -f) > /dev/null 2>&1 &").await;
    let third = wait_for(&world, &mut changes, &plan, |report| {
        report.state == AgentState::Ready && report.boot_id.is_some() && report.boot_id != second
    });
    third.await;
    assert_eq!(world.power(&plan).await, VmPower::On);
}
