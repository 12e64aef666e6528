use super::*;

fn node(name: &str, state: NodeState, release: &str, schema_version: Option<i64>) -> NodeRelease {
    NodeRelease { name: name.into(), state, release: release.into(), schema_version }
}

fn step(held: &[i64], nodes: &[NodeRelease]) -> String {
    record(Schema { version: 20, minimum: 17 }, held, nodes).next_step
}

const UP: NodeState = NodeState::Created;

#[test]
fn names_the_node_to_upgrade_next() {
    let old = |name| node(name, UP, "muster 0.1.0", None);
    let new = |name| node(name, UP, "muster 0.2.0", Some(20));
    assert_eq!(
        step(&[], &[new("a"), old("b"), old("c")]),
        "upgrade node b (muster 0.1.0, unknown schema version) to the release of node a (muster 0.2.0, schema version 20): \
         install it and restart the daemon, guests keep running; then c"
    );
    let text = step(&[], &[new("a"), new("b"), old("c")]);
    assert!(text.starts_with("upgrade node c ") && text.ends_with("guests keep running"), "{text}");
    let all = "all nodes that are up run muster 0.2.0, schema version 20: nothing to do";
    assert_eq!(step(&[], &[new("a"), new("b"), new("c")]), all);
    assert_eq!(step(&[], &[]), "start a node");
}

#[test]
fn compares_releases_of_the_same_schema_by_number() {
    let of = |name, release| node(name, UP, release, Some(20));
    let record = record(
        Schema { version: 20, minimum: 17 },
        &[],
        &[of("a", "muster 0.9.1"), of("b", "muster 0.10.0 (simulated)"), of("c", "muster 0.10.0")],
    );
    let outdated: Vec<bool> = record.nodes.iter().map(|node| node.is_outdated).collect();
    assert_eq!(outdated, [true, false, false]);
    assert!(record.next_step.starts_with("upgrade node a "), "{}", record.next_step);
}

#[test]
fn shows_what_a_held_migration_waits_for() {
    let nodes = [
        node("a", UP, "muster 0.2.0", Some(20)),
        node("b", NodeState::Missing, "muster 0.1.0", Some(18)),
        node("c", NodeState::Error, "muster 0.1.0", None),
    ];
    let shown = record(Schema { version: 20, minimum: 17 }, &[19, 20], &nodes);
    let held: Vec<_> =
        shown.held_migrations.iter().map(|held| (held.number, held.waits_for.join(" "))).collect();
    assert_eq!(held, [(19, "b".to_owned()), (20, "b".to_owned())]);
    assert_eq!(
        shown.next_step,
        "node b (muster 0.1.0, schema version 18) does not check in: upgrade it to muster 0.2.0, or delete it"
    );
    let text = step(&[20], &nodes[..1]);
    assert_eq!(text, "wait: all nodes support migration 20, which is applied within seconds");
}

#[test]
fn names_stopped_nodes_that_could_not_start() {
    let nodes = [
        node("a", UP, "muster 0.2.0", Some(20)),
        node("b", NodeState::Stopped, "muster 0.1.0", Some(16)),
        node("c", NodeState::Stopped, "muster 0.1.0", Some(17)),
    ];
    let text = step(&[], &nodes);
    assert!(text.ends_with("nothing to do, but upgrade these nodes before you start them: b"), "{text}");
}
