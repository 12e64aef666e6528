//! How an agent is, and what garbage does.

use std::time::Duration;

use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES};
use muster_types::guest::{AgentState, GuestApi, GuestError};
use muster_types::instance::SideChannel;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::fake::{World, command};

fn near(since: Instant, seconds: u64) -> bool {
    let took = since.elapsed();
    took >= Duration::from_secs(seconds) && took < Duration::from_millis(seconds * 1000 + 300)
}

#[tokio::test(start_paused = true)]
async fn a_guest_is_asked_again_and_again_until_it_is_ready() {
    let mut world = World::new();
    assert_eq!(world.report().state, AgentState::NoContact);
    let mut agent = world.connected().await;
    let mut asked = agent.expect("is-system-running").await;
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        let since = Instant::now();
        let rest = "x".repeat(usize::try_from(pause).unwrap() * 10);
        let message = format!("starting\u{1b}\n{rest}");
        let answer = json!({ "result": false, "message": message, "system_boot_time": 1000.5 });
        agent.reply(&asked, "is-system-running-response", answer).await;
        let shown = format!("starting{rest}").chars().take(100).collect();
        world.wait_for(&AgentState::NotReady(shown)).await;
        asked = loop {
            let heard = agent.hear().await.unwrap();
            if heard["command"] != "ping" {
                break heard;
            }
            agent.reply(&heard, "pong", json!({})).await;
        };
        assert_eq!(asked["command"], "is-system-running");
        assert!(near(since, pause), "{pause}: {:?}", since.elapsed());
    }
    let report = world.report();
    assert_eq!((report.system_boot_time, report.boot.as_deref()), (Some(1000.5), Some("1000")));
    assert_eq!((report.agent_start_time, report.version), (None, None));
    let degraded = json!({ "result": false, "message": "degraded", "system_boot_time": 1001 });
    agent.reply(&asked, "is-system-running-response", degraded).await;
    world.wait_for(&AgentState::Degraded).await;
    assert_eq!(world.report().boot.as_deref(), Some("1000"));
    // From now on there are only pings.
    for _ in 0..20 {
        let ping = agent.expect("ping").await;
        agent.reply(&ping, "pong", json!({})).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_says_that_it_starts_and_that_it_ends() {
    let mut world = World::new();
    let mut agent = world.connected().await;
    agent.expect("is-system-running").await;
    sleep(Duration::from_secs(20)).await;
    let start = json!({ "command": "agent-start", "message": "version 0.4.1", "system_boot_time": 1000.5, "unique": "x" });
    agent.say(&start).await;
    world.wait_for(&AgentState::Startup).await;
    let report = world.report();
    assert!(report.agent_start_time.is_some() && report.version.as_deref() == Some("0.4.1"), "{report:?}");
    let since = Instant::now();
    agent.be_ready(&[]).await;
    assert!(since.elapsed() < Duration::from_millis(300));
    world.wait_for(&AgentState::Ready).await;
    let first = world.report().boot;
    let guests = world.guests.clone();
    let (id, order) = (world.id, command("sleep 9", None));
    let running = tokio::spawn(async move { guests.execute(id, &order).await });
    agent.expect("execute").await;
    // Another one, which knows nothing of the command.
    agent.say(&start).await;
    assert!(matches!(running.await.unwrap(), Err(GuestError::Away(_))));
    world.wait_for(&AgentState::Startup).await;
    agent.be_ready(&[]).await;
    world.wait_for(&AgentState::Ready).await;
    assert_ne!(world.report().boot, first);
    agent.say(&json!({ "command": "agent-stop", "system_boot_time": 5.0 })).await;
    world.wait_for(&AgentState::Stopped).await;
    assert!(matches!(world.guests.facts(world.id).await, Err(GuestError::Away(_))));
    // Its silence is no news.
    agent.end().await;
    assert_eq!(world.report().state, AgentState::Stopped);
    let mut agent = world.connected().await;
    agent.say(&json!({ "command": "agent-start", "message": "version 0.3.15" })).await;
    world.wait_for(&AgentState::TooOld).await;
    agent.be_ready(&[]).await;
    agent.say(&json!({ "command": "ping", "unique": 65535 })).await;
    while agent.hear().await.unwrap()["command"] != "pong" {}
    assert_eq!(world.report().state, AgentState::TooOld);
    assert!(matches!(world.guests.facts(world.id).await, Err(GuestError::Away(_))));
}

#[tokio::test(start_paused = true)]
async fn a_silent_agent_is_given_up_after_15_seconds() {
    let (mut world, mut agent) = World::ready(&[]).await;
    let since = Instant::now();
    let ping = agent.expect("ping").await;
    assert!(near(since, 5), "{:?}", since.elapsed());
    agent.reply(&ping, "pong", json!({})).await;
    agent.expect("ping").await;
    assert!(near(since, 10), "{:?}", since.elapsed());
    agent.expect("ping").await;
    world.wait_for(&AgentState::Unresponsive).await;
    assert!(near(since, 20), "{:?}", since.elapsed());
    agent.end().await;
    let mut agent = world.connected().await;
    agent.be_ready(&[]).await;
    world.wait_for(&AgentState::Ready).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_on_which_nothing_was_ever_said_is_made_anew() {
    let world = World::new();
    let since = Instant::now();
    let mut agent = world.connected().await;
    let mut asked = 0;
    while let Some(heard) = agent.hear().await {
        assert_eq!(heard["command"], "is-system-running");
        asked += 1;
    }
    assert!(near(since, 300), "{:?}", since.elapsed());
    assert_eq!((asked, world.report().state), (10, AgentState::NoContact));
    world.connected().await.expect("is-system-running").await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_expected_of_a_machine_that_is_paused() {
    let (mut world, mut agent) = World::ready(&[]).await;
    world.contact.as_ref().unwrap().set_paused(true);
    sleep(Duration::from_secs(5000)).await;
    assert_eq!(world.report().state.to_string(), "not ready (instance paused)");
    world.contact.as_ref().unwrap().set_paused(false);
    assert_eq!(world.report().state, AgentState::Ready);
    let since = Instant::now();
    // The first that it hears: there were no pings.
    agent.expect("ping").await;
    assert!(near(since, 5), "{:?}", since.elapsed());
    world.wait_for(&AgentState::Unresponsive).await;
    assert!(near(since, 15), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_reset_ends_what_is_under_way_and_begins_another_boot() {
    let (mut world, mut agent) = World::ready(&[]).await;
    assert_eq!(world.report().boot.as_deref(), Some("1000"));
    let (guests, id) = (world.guests.clone(), world.id);
    let order = command("sleep 9", None);
    let running = tokio::spawn(async move { guests.execute(id, &order).await });
    agent.expect("execute").await;
    world.contact.as_ref().unwrap().tell_reset();
    let Err(GuestError::Away(why)) = running.await.unwrap() else { panic!("the guest was reset") };
    assert!(why.contains("reset"), "{why}");
    world.wait_for(&AgentState::NoContact).await;
    assert_eq!(world.report().boot, None);
    agent.end().await;
    let mut agent = world.connected().await;
    agent.be_ready(&[]).await;
    world.wait_for(&AgentState::Ready).await;
    assert_eq!(world.report().boot.as_deref(), Some("1000+1"));
}

#[tokio::test(start_paused = true)]
async fn another_boot_id_is_another_boot() {
    let (mut world, mut agent) = World::ready(&[FEATURE_MEMORY, FEATURE_PIECES]).await;
    assert_eq!(world.report().boot.as_deref(), Some("first"));
    let start = json!({ "command": "agent-start", "message": "version 1.0.0", "boot-id": "first", "features": [FEATURE_MEMORY] });
    agent.say(&start).await;
    world.wait_for(&AgentState::Startup).await;
    assert_eq!(world.report().boot.as_deref(), Some("first"));
    let asked = agent.expect("is-system-running").await;
    let answer =
        json!({ "result": true, "message": "running", "boot-id": "second", "features": [FEATURE_MEMORY] });
    agent.reply(&asked, "is-system-running-response", answer).await;
    world.wait_for(&AgentState::Ready).await;
    assert_eq!(world.report().boot.as_deref(), Some("second"));
}

#[tokio::test(start_paused = true)]
async fn an_answer_counts_once_and_an_agent_cannot_start_without_end() {
    let mut world = World::new();
    let mut agent = world.connected().await;
    let asked = agent.expect("is-system-running").await;
    let ready = json!({ "result": true, "message": "running" });
    agent.reply(&asked, "is-system-running-response", ready).await;
    world.wait_for(&AgentState::Ready).await;
    agent.reply(&asked, "is-system-running-response", json!({ "result": false, "message": "no" })).await;
    agent.say(&json!({ "command": "ping", "unique": 1 })).await;
    agent.expect("pong").await;
    assert_eq!(world.report().state, AgentState::Ready);
    let since = Instant::now();
    for _ in 0..51 {
        agent.say(&json!({ "command": "agent-stop" })).await;
        agent.say(&json!({ "command": "agent-start", "message": "version 1.0" })).await;
    }
    world.wait_for(&AgentState::Unresponsive).await;
    world.connected().await;
    assert!(near(since, 10), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_contact_ends_with_its_machine() {
    let (mut world, mut agent) = World::ready(&[]).await;
    let (guests, id) = (world.guests.clone(), world.id);
    let asking = tokio::spawn(async move { guests.facts(id).await });
    agent.expect("gather-facts").await;
    world.contact.take();
    assert!(matches!(asking.await.unwrap(), Err(GuestError::Away(_))));
    agent.end().await;
    assert_eq!(world.guests.report(id), None);
    assert!(matches!(world.guests.facts(id).await, Err(GuestError::Away(_))));
    // Without a way there is nothing to report; what the other protocol says is another matter.
    let (other, contact) = world.begin(&[]);
    assert!(contact.is_none() && world.guests.report(other).is_none());
    let (other, contact) = world.begin(&[SideChannel::Agent2]);
    assert!(contact.is_some());
    assert_eq!(world.guests.report(other).unwrap().state, AgentState::NoContact);
}

#[tokio::test(start_paused = true)]
async fn garbage_is_skipped_and_replies_to_nothing_are_ignored() {
    let (world, mut agent) = World::ready(&[]).await;
    let (guests, id) = (world.guests.clone(), world.id);
    let asking = tokio::spawn(async move { guests.facts(id).await });
    let asked = agent.expect("gather-facts").await;
    for garbage in [
        "*SFv001[99999999]",
        "*SFv001[00000003]{ }",
        "*SFv001[00000000]",
        "*SFv001*[00000002][]",
        "login: *SF",
        "*SFv001[0000001x]",
        "\u{0}\u{1b}*",
    ] {
        agent.write(garbage.as_bytes()).await.unwrap();
    }
    for unique in [json!(null), json!("1"), json!([7]), json!({}), json!("99-99999999999999999999999")] {
        for command in ["gather-facts-response", "execute-response", "pong", "get-file-response", "nonsense"]
        {
            agent.say(&json!({ "command": command, "unique": unique, "result": {} })).await;
        }
    }
    agent.say(&json!({ "command": "is-system-running-response", "unique": "x", "result": false })).await;
    agent.say(&json!({ "command": "command-error", "message": "command put-file raised an error" })).await;
    agent
        .reply(&asked, "gather-facts-response", json!({ "result": { "distribution": { "id": "tiny" } } }))
        .await;
    let facts = asking.await.unwrap().unwrap();
    assert_eq!(facts["distribution"]["id"], "tiny");
    assert_eq!(world.report().state, AgentState::Ready);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_sends_nothing_but_garbage_is_left_alone_for_a_while() {
    let (mut world, mut agent) = World::ready(&[]).await;
    let mut garbage = vec![b'x'; 1 << 20];
    garbage[..4].copy_from_slice(b"*SFv");
    let since = Instant::now();
    let mut sent = 0;
    while agent.write(&garbage).await.is_ok() {
        sent += 1;
        assert!(sent < 100, "nobody minds");
    }
    assert!(sent >= 60, "{sent} MiB were too much");
    world.wait_for(&AgentState::Unresponsive).await;
    let mut agent = world.connected().await;
    assert!(near(since, 10), "{:?}", since.elapsed());
    agent.be_ready(&[]).await;
    world.wait_for(&AgentState::Ready).await;
    // Frames that nobody asked for are no better.
    let frame = muster_agent::frame::encode(
        json!({ "command": "pong", "unique": "x".repeat(9999) }).to_string().as_bytes(),
    );
    let frames = frame.repeat((1 << 20) / frame.len());
    let mut sent = 0;
    while agent.write(&frames).await.is_ok() {
        sent += 1;
        assert!(sent < 200, "nobody minds");
    }
    world.wait_for(&AgentState::Unresponsive).await;
}
