//! Agents that send arbitrary replies.

use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES};
use muster_types::guest::{AgentState, GuestApi, OutputName};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Map, Value, json};

use super::fake_agent::FakeVm;
use super::{ALL_FEATURES, OneChunk, collect, command};

const COMMANDS: &[&str] = &[
    "agent-start",
    "agent-stop",
    "ping",
    "pong",
    "is-system-running-response",
    "gather-facts-response",
    "execute-response",
    "read-output-response",
    "put-file-response",
    "get-file-response",
    "chmod-response",
    "command-error",
    "unknown-command",
    "nonsense",
];

const FIELDS: &[&str] = &[
    "result",
    "message",
    "offset",
    "chunk",
    "stat_result",
    "return-code",
    "stdout",
    "stderr",
    "stdout-size",
    "stderr-size",
    "stdout-cut",
    "reason",
    "path",
    "features",
    "boot-id",
    "system_boot_time",
    "key",
];

fn values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(-1),
        json!(5),
        json!(65536),
        json!(u64::MAX),
        json!(1e308),
        json!(""),
        json!("running"),
        json!("%"),
        json!("aGVsbG8="),
        json!("version 0.0.1"),
        json!("unknown"),
        json!("command put-file raised an error"),
        json!([]),
        json!([FEATURE_MEMORY, FEATURE_PIECES]),
        json!({}),
        json!({ "mode": 33188, "size": 5 }),
        json!("x".repeat(70_000)),
    ]
}

/// Generates packets, each with the index of the request that it replies to.
fn packets() -> impl Strategy<Value = Vec<(Value, Option<Index>)>> {
    let fields = prop::collection::btree_map(select(FIELDS), select(values()), 0..6);
    let unique = prop::option::weighted(0.9, any::<Index>());
    let packet = (select(COMMANDS), fields, unique).prop_map(|(command, fields, unique)| {
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value));
        let mut packet: Map<String, Value> = fields.collect();
        packet.insert("command".into(), command.into());
        (Value::Object(packet), unique)
    });
    prop::collection::vec(packet, 0..40)
}

async fn send_packets(packets: Vec<(Value, Option<Index>)>, features: &[&str]) {
    let (mut vm, mut agent) = FakeVm::ready(features).await;
    let (guests, id) = (vm.guests.clone(), vm.id);
    let requesting = tokio::spawn(async move {
        let sent_command = command("true");
        let get = async {
            if let Ok((_, stream)) = guests.get(id, "/x").await {
                let _ = collect(stream).await;
            }
        };
        let output = async {
            if let Ok(stream) = guests.output(id, sent_command.key, OutputName::Stdout).await {
                let _ = collect(stream).await;
            }
        };
        let put = guests.put(id, "/x", 5, None, OneChunk::stream("hello".into()));
        let mode = guests.change_mode(id, "/x", 0o644);
        let _ = tokio::join!(guests.execute(id, &sent_command), put, mode, guests.facts(id), get, output);
    });
    let mut requests = vec![agent.receive().await.unwrap()];
    for (mut packet, unique) in packets {
        while let Ok(Some(request)) =
            tokio::time::timeout(std::time::Duration::from_millis(1), agent.receive()).await
        {
            requests.push(request);
        }
        if let Some(unique) = unique {
            packet["unique"] = unique.get(&requests)["unique"].clone();
        }
        let bytes = muster_agent::frame::encode(packet.to_string().as_bytes());
        if agent.write(&bytes).await.is_err() {
            break;
        }
    }
    drop(agent);
    // Pending requests fail with the connection, and the next session starts as usual.
    let next = async {
        let mut agent = vm.accept().await;
        agent.report_ready(features).await;
        agent
    };
    let (_agent, requested) = tokio::join!(next, requesting);
    requested.unwrap();
    vm.wait_for(&AgentState::Ready).await;
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn arbitrary_replies_fail_only_the_requests_of_their_connection(packets in packets(), plain in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let features: &[&str] = if plain { &[] } else { ALL_FEATURES };
        runtime.block_on(send_packets(packets, features));
    }
}
