//! Properties of placements of random requests on random nodes.

use proptest::prelude::*;

use super::*;

fn some_tags() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(str::to_owned), 0..3)
}

/// Generates a node, its ledger and the tags of its instances.
fn some_node() -> impl Strategy<Value = (NodeFacts, CommittedCapacity, Vec<Vec<String>>)> {
    let host = (
        prop::sample::select(vec![0.0, 2.0, 8.0, 64.0]),
        0.0..70.0,
        prop::sample::select(vec![1024.0, 8192.0, 65536.0]),
        0.0..70000.0,
        0.0..500.0,
        0.0..40.0,
        0.0..3000.0,
    );
    let flags = (0..20_u8, 0.0..130.0);
    let ledger = (0..100_i64, 0..100_000_i64, 0..1000_i64, 0.0..10.0);
    let neighbours = prop::collection::vec(some_tags(), 0..3);
    (host, flags, ledger, neighbours).prop_map(|(host, (flag, age), ledger, neighbours)| {
        let (threads, vcpus, memory, available, disk, queued_operations, busy) = host;
        let facts = NodeFacts {
            state: if flag == 0 { NodeState::Stopped } else { NodeState::Created },
            is_hypervisor: flag != 1,
            vms_unavailable: (flag == 2).then(|| "broken".into()),
            cpu_max: threads,
            cpu_max_per_instance: threads,
            cpu_schedulable: threads,
            load_1: vcpus / 4.0,
            measured_vcpus: vcpus,
            memory_max_mb: memory,
            memory_available_mb: available,
            memory_actual_mb: available / 3.0,
            disk_total_gb: disk * 2.0,
            disk_free_gb: disk,
            queued_operations,
            disk_busy_ms: busy,
            silence: age / 16.0,
            ..node("n")
        };
        let (cpus, memory_mb, disk_gb, demand) = ledger;
        (facts, CommittedCapacity { cpus, memory_mb, disk_gb, demand, demand_at: NOW - age }, neighbours)
    })
}

fn some_request() -> impl Strategy<Value = PlacementRequest> {
    let affinity = prop::option::of((some_tags(), some_tags(), some_tags(), some_tags()));
    (0..12_i64, 0..9000_i64, 0..100_i64, affinity).prop_map(|(cpus, memory_mb, disk_gb, affinity)| {
        let (require_with, require_without, prefer_with, prefer_without) = affinity.unwrap_or_default();
        let affinity = Affinity { require_with, require_without, prefer_with, prefer_without };
        PlacementRequest { cpus, memory_mb, disk_gb, affinity, ..PlacementRequest::default() }
    })
}

/// Returns whether the ledger is within the limits of the node, by an independent computation.
fn within_limits(committed: &CommittedCapacity, facts: &NodeFacts) -> bool {
    let memory = (facts.memory_max_mb - facts.memory_reserved_mb).max(0.0) * 3.0;
    let disk = (facts.disk_total_gb - facts.disk_reserved_gb).max(0.0) * 5.0;
    committed.cpus as f64 <= facts.cpu_schedulable * 3.0
        && committed.memory_mb as f64 <= memory
        && committed.disk_gb as f64 <= disk
}

/// Returns whether a node can take the instance, by an independent implementation of the stages.
fn can_take(
    request: &PlacementRequest,
    facts: &NodeFacts,
    committed: &CommittedCapacity,
    neighbours: &[Vec<String>],
) -> bool {
    let after = CommittedCapacity {
        cpus: committed.cpus + request.cpus,
        memory_mb: committed.memory_mb + request.memory_mb,
        disk_gb: committed.disk_gb + request.disk_gb,
        ..*committed
    };
    let memory = request.memory_mb as f64;
    let tags = neighbours.concat();
    facts.state == NodeState::Created
        && facts.silence <= 7.5
        && facts.cpu_max > 0.0
        && facts.is_hypervisor
        && facts.vms_unavailable.is_none()
        && request.cpus as f64 <= facts.cpu_max_per_instance
        && facts.measured_vcpus + request.cpus as f64 <= facts.cpu_schedulable * 3.0
        && facts.memory_available_mb - facts.memory_reserved_mb >= memory
        && facts.memory_actual_mb + memory <= facts.memory_max_mb * 3.0
        && facts.disk_free_gb - facts.disk_reserved_gb >= request.disk_gb as f64
        && within_limits(&after, facts)
        && request.affinity.require_with.iter().all(|tag| tags.contains(tag))
        && !request.affinity.require_without.iter().any(|tag| tags.contains(tag))
}

fn affinity_score(request: &PlacementRequest, neighbours: &[Vec<String>]) -> i64 {
    let mut score = 0;
    for tag in neighbours.iter().flatten() {
        score += i64::from(request.affinity.prefer_with.contains(tag));
        score -= i64::from(request.affinity.prefer_without.contains(tag));
    }
    score
}

proptest! {
    #[test]
    fn committed_capacity_stays_within_the_limits(
        (facts, committed, _) in some_node(), request in some_request(), include_demand in any::<bool>(),
    ) {
        if let Ok(after) = commit_capacity(&request, &facts, &committed, &policy(), NOW, include_demand) {
            prop_assert!(within_limits(&after, &facts));
            let back = release_capacity(&after, request.cpus, request.memory_mb, request.disk_gb);
            let amounts = |ledger: &CommittedCapacity| (ledger.cpus, ledger.memory_mb, ledger.disk_gb);
            prop_assert_eq!(amounts(&back), amounts(&committed));
        }
    }

    #[test]
    fn candidates_are_exactly_the_suitable_nodes_sorted_by_affinity(
        cluster in prop::collection::vec(some_node(), 0..12), request in some_request(), required in 0..40_usize,
    ) {
        let request = PlacementRequest { required_node: cluster.get(required).map(|(facts, ..)| facts.id), ..request };
        let nodes: Vec<_> = cluster.iter().map(|(facts, committed, _)| (facts, *committed)).collect();
        let neighbours: Neighbours =
            cluster.iter().map(|(facts, _, tags)| (facts.id, tags.clone())).collect();
        let outcome = place(&request, &nodes, &neighbours);

        let considered = nodes.iter().filter(|(facts, _)| request.required_node.is_none_or(|required| required == facts.id));
        let mut expected: Vec<NodeId> = considered
            .clone()
            .filter(|(facts, committed)| can_take(&request, facts, committed, &neighbours[&facts.id]))
            .map(|(facts, _)| facts.id)
            .collect();
        let found = outcome.result.clone().unwrap_or_default();
        let mut sorted = found.clone();
        sorted.sort();
        expected.sort();
        prop_assert_eq!(&sorted, &expected);
        prop_assert_eq!(outcome.result.is_err(), expected.is_empty());

        for id in &found {
            let (facts, committed) = nodes.iter().find(|(facts, _)| facts.id == *id).unwrap();
            prop_assert!(commit_capacity(&request, facts, committed, &policy(), NOW, false).is_ok());
        }
        let scores: Vec<i64> = found.iter().map(|id| affinity_score(&request, &neighbours[id])).collect();
        prop_assert!(scores.is_sorted_by(|a, b| a >= b), "{:?}", scores);

        // Each report accounts for every node that reached its stage.
        let mut left = considered.count();
        for report in &outcome.stages {
            prop_assert_eq!(report.kept + report.dropped_count, left, "{}", report.stage);
            if !matches!(report.stage, Stage::QueueState | Stage::SufficientIdleDisk) {
                left = report.kept;
            }
        }
    }
}
