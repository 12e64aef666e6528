use muster_types::spec::Affinity;
use proptest::prelude::*;

use super::super::tests::{NOW, node, policy};
use super::*;

/// Returns a node with 18 vCPUs and these instances.
fn with_instances(name: &str, instances: Vec<BalancedInstance>) -> BalancedNode {
    let sum =
        |part: fn(&PlacementRequest) -> i64| instances.iter().map(|instance| part(&instance.request)).sum();
    let committed = CommittedCapacity {
        cpus: sum(|request| request.cpus),
        memory_mb: sum(|request| request.memory_mb),
        disk_gb: sum(|request| request.disk_gb),
        ..CommittedCapacity::default()
    };
    BalancedNode { facts: Arc::new(node(name)), committed, instances }
}

fn instance(cpus: i64) -> BalancedInstance {
    BalancedInstance {
        id: InstanceId::new(),
        namespace: "ci".into(),
        request: PlacementRequest { cpus, memory_mb: 100, disk_gb: 1, ..PlacementRequest::default() },
        tags: vec![],
        is_movable: true,
    }
}

fn instances(cpus: i64, count: usize) -> Vec<BalancedInstance> {
    (0..count).map(|_| instance(cpus)).collect()
}

fn tagged(cpus: i64, tag: &str, affinity: Affinity) -> BalancedInstance {
    let mut instance = instance(cpus);
    instance.tags = vec![tag.into()];
    instance.request.affinity = affinity;
    instance
}

fn tags(tag: &str) -> Vec<String> {
    vec![tag.into()]
}

fn plan(nodes: &mut [BalancedNode], max_moves: usize) -> Vec<PlannedMove> {
    let policy = policy();
    let rebalancer = Rebalancer { policy: &policy, now: NOW, is_allowed: &|_| true };
    rebalancer.plan(nodes, max_moves).into_iter().map(|step| step.planned).collect()
}

fn shares(nodes: &[BalancedNode]) -> Vec<f64> {
    nodes.iter().map(|node| committed_share(&node.facts, &node.committed, &policy())).collect()
}

#[test]
fn moves_the_fewest_instances_that_balance_the_nodes() {
    let mut full = instances(1, 6);
    full.push(instance(6));
    let large = full[6].id;
    let mut nodes = [with_instances("a", full), with_instances("b", vec![])];
    let moves = plan(&mut nodes, 10);
    assert_eq!(
        moves,
        [PlannedMove { instance: large, source: nodes[0].facts.id, target: nodes[1].facts.id }]
    );
    assert_eq!(nodes.each_ref().map(|node| node.committed.cpus), [6, 6]);
    assert!(plan(&mut nodes, 10).is_empty(), "a plan that was executed leaves nothing to do");
}

#[test]
fn fills_all_empty_nodes() {
    let mut nodes =
        [with_instances("a", instances(2, 6)), with_instances("b", vec![]), with_instances("c", vec![])];
    assert_eq!(plan(&mut nodes, 10).len(), 4);
    assert_eq!(nodes.each_ref().map(|node| node.committed.cpus), [4, 4, 4]);
}

#[test]
fn plan_is_bounded() {
    let mut nodes = [with_instances("a", instances(1, 18)), with_instances("b", vec![])];
    assert_eq!(plan(&mut nodes, 3).len(), 3);
    assert_eq!(nodes.each_ref().map(|node| node.committed.cpus), [15, 3]);
}

#[test]
fn nothing_moves_between_nodes_that_differ_little() {
    let mut nodes = [with_instances("a", instances(1, 4)), with_instances("b", instances(1, 1))];
    assert!(plan(&mut nodes, 10).is_empty());
    let mut single = [with_instances("a", instances(1, 18))];
    assert!(plan(&mut single, 10).is_empty());
}

#[test]
fn nothing_moves_that_would_only_exchange_the_nodes() {
    let mut nodes = [with_instances("a", vec![instance(8)]), with_instances("b", vec![])];
    assert!(plan(&mut nodes, 10).is_empty());
}

#[test]
fn memory_counts_like_cpus() {
    let large = || {
        let mut large = instance(1);
        large.request.memory_mb = 10_000;
        large
    };
    let mut nodes = [with_instances("a", vec![large(), large()]), with_instances("b", vec![])];
    assert_eq!(plan(&mut nodes, 10).len(), 1);
}

#[test]
fn instances_that_cannot_move_stay_and_others_move() {
    let mut full = instances(6, 2);
    full[0].is_movable = false;
    let (fixed, free) = (full[0].id, full[1].id);
    let mut nodes = [with_instances("a", full), with_instances("b", vec![])];
    let moved: Vec<InstanceId> = plan(&mut nodes, 10).iter().map(|planned| planned.instance).collect();
    assert_eq!(moved, [free]);
    assert_eq!(nodes[0].instances[0].id, fixed);
}

#[test]
fn busy_node_takes_no_instance() {
    let mut busy = node("b");
    busy.load_1 = 6.0;
    let busy =
        BalancedNode { facts: Arc::new(busy), committed: CommittedCapacity::default(), instances: vec![] };
    let mut nodes = [with_instances("a", instances(6, 2)), busy];
    assert!(plan(&mut nodes, 10).is_empty());
}

#[test]
fn moved_instance_keeps_its_affinity() {
    let require_without = Affinity { require_without: tags("db"), ..Affinity::default() };
    let require_with = Affinity { require_with: tags("db"), ..Affinity::default() };
    let prefer_without = Affinity { prefer_without: tags("db"), ..Affinity::default() };
    let prefer_with = Affinity { prefer_with: tags("db"), ..Affinity::default() };
    // Whether an instance may move to a node with or without another one with the tag, from one without it.
    for (affinity, to_db, to_none) in [
        (Affinity::default(), true, true),
        (require_without, false, true),
        (require_with, true, false),
        (prefer_without, false, true),
        (prefer_with, true, true),
    ] {
        for (neighbour, expected) in [("db", to_db), ("other", to_none)] {
            let full = (0..2).map(|_| tagged(6, "web", affinity.clone())).collect();
            let target = with_instances("b", vec![tagged(1, neighbour, Affinity::default())]);
            let mut nodes = [with_instances("a", full), target];
            assert_eq!(plan(&mut nodes, 10).len() == 1, expected, "{affinity:?} to {neighbour}");
        }
    }
}

#[test]
fn neighbours_keep_their_affinity() {
    // The other instance on the source must stay beside the one that could move.
    for affinity in [
        Affinity { require_with: tags("web"), ..Affinity::default() },
        Affinity { prefer_with: tags("web"), ..Affinity::default() },
    ] {
        let mut fixed = tagged(6, "cache", affinity);
        fixed.is_movable = false;
        let full = vec![fixed, tagged(6, "web", Affinity::default())];
        let mut nodes = [with_instances("a", full.clone()), with_instances("b", vec![])];
        assert!(plan(&mut nodes, 10).is_empty(), "{full:?}");
        let mut others = full;
        others[0].namespace = "other".into();
        let mut nodes = [with_instances("a", others), with_instances("b", vec![])];
        assert_eq!(plan(&mut nodes, 10).len(), 1, "affinity does not concern other namespaces");
    }
    // The instance on the target must not get this neighbour.
    for affinity in [
        Affinity { require_without: tags("web"), ..Affinity::default() },
        Affinity { prefer_without: tags("web"), ..Affinity::default() },
    ] {
        let full = (0..2).map(|_| tagged(6, "web", Affinity::default())).collect();
        let mut nodes = [with_instances("a", full), with_instances("b", vec![tagged(1, "db", affinity)])];
        assert!(plan(&mut nodes, 10).is_empty());
    }
}

#[test]
fn move_that_was_planned_is_useful_until_the_nodes_are_balanced() {
    let before = [with_instances("a", instances(6, 2)), with_instances("b", vec![])];
    let mut after = before.clone();
    let planned = plan(&mut after, 10)[0];
    let policy = policy();
    let rebalancer = Rebalancer { policy: &policy, now: NOW, is_allowed: &|_| true };
    assert!(rebalancer.is_useful(&before, &planned));
    assert!(!rebalancer.is_useful(&after, &planned));
    let refuses = Rebalancer { is_allowed: &|_| false, ..rebalancer };
    assert!(!refuses.is_useful(&before, &planned));
}

proptest! {
    #[test]
    fn plan_improves_the_balance_and_ends(
        sizes in prop::collection::vec(prop::collection::vec((1..7_i64, any::<bool>()), 0..8), 1..6),
        max_moves in 0..20_usize,
    ) {
        let nodes = sizes.into_iter().enumerate().map(|(number, sizes)| {
            let instances = sizes.into_iter().map(|(cpus, is_movable)| {
                BalancedInstance { is_movable, ..instance(cpus) }
            });
            with_instances(&number.to_string(), instances.collect())
        });
        let before: Vec<BalancedNode> = nodes.collect();
        let mut after = before.clone();
        let moves = plan(&mut after, max_moves);
        prop_assert!(moves.len() <= max_moves);
        prop_assert!(spread(&shares(&after)) <= spread(&shares(&before)) + 1e-9);
        let fullest = |nodes: &[BalancedNode]| shares(nodes).into_iter().fold(0.0, f64::max);
        prop_assert!(fullest(&after) <= fullest(&before) + 1e-9);
        let total = |nodes: &[BalancedNode]| nodes.iter().map(|node| node.committed.cpus).sum::<i64>();
        prop_assert_eq!(total(&after), total(&before));
        let mut moved: Vec<InstanceId> = moves.iter().map(|planned| planned.instance).collect();
        moved.sort_unstable();
        moved.dedup();
        prop_assert_eq!(moved.len(), moves.len(), "an instance moves at most once");
    }
}
