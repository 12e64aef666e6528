//! Histories of example events.

use serde_json::from_value;

use super::*;
use crate::commands::instance_refusal::MAX_NODES;
use crate::commands::instance_tables::tests::example;

const NOW: f64 = 1_767_225_600.0;

/// Creates an event that happened `age` seconds ago.
fn event(age: f64, kind: &str, message: &str, extra: &Value) -> EventRecord {
    from_value(json!({
        "event_uuid": format!("{message}{age}"), "request_id": null, "timestamp": NOW - age, "event_type": kind, "type": kind,
        "message": message, "extra": extra, "node": "sim-1", "fqdn": "sim-1", "duration": null
    }))
    .unwrap()
}

fn operation(age: f64, kind: &str, state: &str, error: &Value) -> OperationRecord {
    from_value(json!({
        "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "object_type": "clusteroperation", "operation_type": kind,
        "state": state, "tasks": ["instance_start"], "depends_on": [], "error_report": error, "namespace": "ci",
        "target_object_type": "instance", "target_uuid": "x", "attempts": 2, "progress": null,
        "created": NOW - age, "updated": NOW - age, "version": 1
    }))
    .unwrap()
}

/// Renders events that are given oldest first, unlike in API responses.
fn render_oldest_first(
    record: &Value,
    mut events: Vec<EventRecord>,
    operations: &[OperationRecord],
) -> String {
    events.reverse();
    render(&example(record), &events, operations, NOW)
}

#[test]
fn renders_a_complete_history_oldest_first() {
    let by = json!({ "keyname": "deploy", "caller": "ci" });
    let events = vec![
        event(300.0, "audit", "db record created", &json!({ "name": "web" })),
        event(300.0, "audit", "creation request from REST API", &by),
        event(299.9, "status", "started scheduling", &json!({})),
        event(299.9, "status", "schedule inputs", &json!({ "cpus": 2 })),
        event(299.9, "status", "schedule initial candidates", &json!({ "candidates": 3 })),
        event(299.9, "status", "schedule at stage is_hypervisor", &json!({ "remaining": 3, "dropped": {} })),
        event(
            299.9,
            "status",
            "schedule at stage sufficient_idle_cpu",
            &json!({ "remaining": 2, "dropped": { "sim-3": "12 of 12 vCPUs are promised" } }),
        ),
        event(
            299.8,
            "status",
            "schedule final candidates",
            &json!({ "candidates": ["sim-2", "sim-1"], "chosen": "sim-1", "refused": { "sim-2": "just filled" } }),
        ),
        event(299.0, "mutate", "state is now creating", &json!({ "from": "preflight" })),
        event(290.0, "mutate", "state is now created", &json!({ "from": "creating" })),
        event(200.0, "usage", "usage", &json!({ "cpu usage": {} })),
        event(130.0, "status", "disk was copied", &json!({ "device": "vda", "artifact_uuid": "7" })),
        event(130.0, "audit", "operation complete", &json!({ "operation": "snapshot_instance" })),
        event(120.0, "audit", "vdi console helper request from REST API", &json!({})),
        event(100.0, "audit", "poweroff request from REST API", &by),
        event(99.0, "mutate", "power state is now off", &json!({ "reason": "it was switched off" })),
    ];
    let snapshot = operation(150.0, "node_inst_snap_op", "complete", &json!(null));
    let expected = "\
instance web (5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01) of namespace ci

     5 min ago  created by key deploy of namespace ci
                  2 vCPUs, 2.0 GiB
                  disk: 8 GB from label:tiny, virtio, disk
4 min 59 s ago  scheduling started: 3 candidates
4 min 59 s ago  some nodes were rejected
                  not on sim-3: 12 of 12 vCPUs are promised
4 min 59 s ago  placed on sim-1
                  not on sim-2: just filled
4 min 59 s ago  building and starting it on sim-1
4 min 50 s ago  it is ready on sim-1
2 min 10 s ago  disk vda was copied to artifact 7
1 min 40 s ago  requested by key deploy of namespace ci: poweroff
1 min 39 s ago  it is off: it was switched off
";
    assert_eq!(render_oldest_first(&json!({ "power_state": "off" }), events, &[snapshot]), expected);
}

#[test]
fn advises_about_an_instance_that_was_not_placed() {
    let events = vec![
        event(
            5.0,
            "status",
            "schedule at stage sufficient_idle_memory",
            &json!({ "remaining": 0, "dropped": { "sim-1": "1 of 64 GB is free", "sim-2": "0 of 64 GB is free" } }),
        ),
        event(
            5.0,
            "status",
            "schedule has no candidates at stage sufficient_idle_memory, aborting",
            &json!({ "reason": "No nodes remaining" }),
        ),
        event(4.0, "mutate", "state is now initial-error", &json!({ "reason": "scheduling failed" })),
    ];
    let record = json!({
        "state": "error", "power_state": "initial", "error_message": "scheduling failed", "node": null
    });
    let text = render_oldest_first(&record, events, &[]);
    assert!(
        text.contains("\n5 s ago  not placed: no node has enough memory left: No nodes remaining\n"),
        "{text}"
    );
    assert!(text.contains("    not on sim-2: 0 of 64 GB is free\n"), "{text}");
    assert!(text.contains("4 s ago  it could not be scheduled: scheduling failed\n"), "{text}");
    assert!(text.contains("    next: request less, delete unused instances, or try again later\n"), "{text}");
}

#[test]
fn does_not_advise_to_wait_for_an_instance_that_fits_on_no_node() {
    let events = vec![event(
        5.0,
        "status",
        "schedule has no candidates at stage sufficient_idle_memory, aborting",
        &json!({ "reason": "No nodes remaining", "transient": false }),
    )];
    let record = json!({
        "state": "error", "power_state": "initial", "error_message": "scheduling failed", "node": null
    });
    let text = render_oldest_first(&record, events, &[]);
    assert!(text.contains("not placed: no node is large enough: No nodes remaining\n"), "{text}");
    assert!(!text.contains("memory left") && !text.contains("try again"), "{text}");
}

#[test]
fn reports_a_failed_operation_once() {
    let report = json!({ "code": "c", "message": "no such model", "details": {} });
    let failed = operation(3.0, "node_inst_op", "error", &report);
    let record = json!({ "state": "error", "error_message": "no such model" });
    let text = render_oldest_first(&record, vec![], std::slice::from_ref(&failed));
    assert!(text.contains("3 s ago  instance_start failed after 2 attempts: no such model\n"), "{text}");
    let events = vec![
        event(4.0, "status", "operation failed", &json!({ "operation": "create_instance", "error": report })),
        event(3.0, "mutate", "state is now error", &json!({ "reason": "no such model" })),
    ];
    let text = render_oldest_first(&record, events, &[failed]);
    assert!(!text.contains("attempts"), "{text}");
    assert!(text.contains("4 s ago  create_instance failed: no such model\n"), "{text}");
    assert!(text.contains("3 s ago  it failed: no such model\n"), "{text}");
}

#[test]
fn crash_names_the_next_step_and_counts_repetitions() {
    let crash =
        |age| event(age, "mutate", "power state is now crashed", &json!({ "reason": "killed by signal 9" }));
    let text = render_oldest_first(&json!({ "power_state": "crashed" }), vec![crash(9.0), crash(8.0)], &[]);
    assert!(text.contains("8 s ago  it crashed: killed by signal 9 (2 times)\n"), "{text}");
    assert!(text.contains("` shows its last output\n"), "{text}");
}

#[test]
fn explains_an_unknown_power_state() {
    let reason = "node sim-1 has not checked in since 2026-01-01T00:00:00.000Z; the VM may still be running";
    let lost = event(8.0, "mutate", "power state is now unknown", &json!({ "from": "on", "reason": reason }));
    let record = json!({ "power_state": "unknown", "power_state_since": NOW - 8.0 });
    let text = render_oldest_first(&record, vec![lost], &[]);
    assert!(text.contains(&format!("8 s ago  its power state is unknown: {reason}\n")), "{text}");
}

#[test]
fn unknown_events_are_printed_verbatim_and_escaped() {
    let odd = event(1.0, "audit", "odd \u{1b}[31mthing", &json!({ "size": 7, "none": null, "error": "oh" }));
    let text = render_oldest_first(&json!({ "name": "a\u{1b}b" }), vec![odd], &[]);
    assert!(text.contains(r"1 s ago  odd \u{1b}[31mthing: oh (size 7)"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
}

#[test]
fn counts_nodes_beyond_the_limit() {
    let nodes: Map<String, Value> = (0..40).map(|n| (format!("n{n:02}"), json!("full"))).collect();
    let rejected = rejected_nodes(&event(1.0, "status", "schedule at stage x", &json!({ "dropped": nodes })));
    assert_eq!((rejected.len(), rejected.last().unwrap().as_str()), (MAX_NODES + 1, "and 28 more nodes"));
}
