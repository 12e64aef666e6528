//! Filters the nodes stage by stage, and sorts the rest.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Deref;

use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;
use muster_types::scheduling::SchedulingStage;

use super::node_facts::NodeFacts;
use super::outcome::{PlacementOutcome, PlacementRefusal, StageReport};
use super::policy::SchedulerPolicy;
use super::reject_reason::RejectReason;
use super::request::{PlacementRequest, StorageRequest};
use super::{affinity, eligibility, ledger};

/// Nodes whose load and memory differ by less than this fraction rank equal.
const RANK_STEP: f64 = 0.25;
/// The minimum headroom in the weighted random order, so that a full node keeps a small chance.
const MIN_HEADROOM: f64 = 0.01;

/// A node that has passed the stages so far.
struct Candidate<'a> {
    facts: &'a NodeFacts,
    committed: &'a CommittedCapacity,
    /// The affinity to its instances.
    score: i64,
    busy: bool,
    /// How full it is, in coarse steps.
    fullness: f64,
    /// Its random rank among equally full nodes. Lower is better.
    random_rank: f64,
}

/// Returns the nodes that can take an instance, best first.
///
/// `neighbours` are the tags of each instance of the namespace on each node. They are only read for a request with an
/// affinity. `random` returns a number in [0, 1) and is called at most once.
pub fn candidates<F: Deref<Target = NodeFacts>>(
    request: &PlacementRequest,
    nodes: &[(F, CommittedCapacity)],
    neighbours: &HashMap<NodeId, Vec<Vec<String>>>,
    policy: &SchedulerPolicy,
    random: &mut impl FnMut() -> f64,
) -> PlacementOutcome {
    let mut left: Vec<Candidate<'_>> = nodes
        .iter()
        .filter(|(facts, _)| request.required_node.is_none_or(|required| required == facts.id))
        .map(|(facts, committed)| Candidate {
            facts,
            committed,
            score: 0,
            busy: false,
            fullness: 0.0,
            random_rank: 0.0,
        })
        .collect();
    let mut stages = Vec::with_capacity(9);
    let result = filter(request, &mut left, neighbours, policy, &mut stages);
    if let Err(stage) = result {
        let fits = nodes.iter().any(|(facts, _)| ledger::fits_empty_node(request, facts, policy));
        let refusal = PlacementRefusal::new(stage, &request.affinity, fits, &stages);
        return PlacementOutcome { stages, result: Err(refusal) };
    }
    if !request.affinity.prefer_with.is_empty() || !request.affinity.prefer_without.is_empty() {
        for node in &mut left {
            node.score = affinity::preference_score(&request.affinity, tags_on(neighbours, node.facts.id));
        }
    }
    mark_busy(SchedulingStage::QueueState, &mut left, &mut stages, eligibility::queue_state);
    mark_busy(SchedulingStage::SufficientIdleDisk, &mut left, &mut stages, eligibility::sufficient_idle_disk);
    let mut numbers = SplitMix64::new(random());
    for node in &mut left {
        (node.fullness, node.random_rank) = rank(node, policy, numbers.next());
    }
    left.sort_unstable_by(|a, b| {
        let order = |node: &Candidate<'_>| (Reverse(node.score), node.busy);
        order(a)
            .cmp(&order(b))
            .then(a.fullness.total_cmp(&b.fullness))
            .then(a.random_rank.total_cmp(&b.random_rank))
    });
    PlacementOutcome { stages, result: Ok(left.iter().map(|node| node.facts.id).collect()) }
}

/// Drops the nodes that cannot take the instance. Fails with the stage that drops the last one.
fn filter<'a>(
    request: &'a PlacementRequest,
    left: &mut Vec<Candidate<'a>>,
    neighbours: &HashMap<NodeId, Vec<Vec<String>>>,
    policy: &SchedulerPolicy,
    stages: &mut Vec<StageReport>,
) -> Result<(), SchedulingStage> {
    use SchedulingStage as Stage;
    apply_stage(Stage::PreSchedule, left, stages, |node| eligibility::pre_schedule(node.facts, policy))?;
    apply_stage(Stage::IsHypervisor, left, stages, |node| eligibility::is_hypervisor(node.facts))?;
    if matches!(request.storage, StorageRequest::AnyShared | StorageRequest::Shared(_)) {
        apply_stage(Stage::SharedStorage, left, stages, |node| {
            eligibility::shared_storage(request, node.facts)
        })?;
    }
    apply_stage(Stage::CpuMaxPerInstance, left, stages, |node| {
        ledger::check_cpu_per_instance(request, node.facts)
    })?;
    apply_stage(Stage::SufficientIdleCpu, left, stages, |node| {
        ledger::check_cpu(request, node.facts, node.committed, policy)
    })?;
    apply_stage(Stage::SufficientIdleMemory, left, stages, |node| {
        ledger::check_memory(request, node.facts, node.committed, policy)
    })?;
    apply_stage(Stage::SufficientFreeDisk, left, stages, |node| {
        ledger::check_disk(request, node.facts, node.committed, policy)
    })?;
    if request.affinity.has_requirements() {
        apply_stage(Stage::AffinityConstraints, left, stages, |node| {
            affinity::check_required(&request.affinity, tags_on(neighbours, node.facts.id))
        })?;
    }
    Ok(())
}

fn tags_on(neighbours: &HashMap<NodeId, Vec<Vec<String>>>, node: NodeId) -> &[Vec<String>] {
    neighbours.get(&node).map_or(&[], Vec::as_slice)
}

/// Drops the nodes that fail a check. Fails if none is left.
fn apply_stage<'a>(
    stage: SchedulingStage,
    left: &mut Vec<Candidate<'a>>,
    stages: &mut Vec<StageReport>,
    check: impl Fn(&Candidate<'a>) -> Result<(), RejectReason<'a>>,
) -> Result<(), SchedulingStage> {
    let mut report = StageReport::new(stage);
    left.retain(|node| match check(node) {
        Ok(()) => true,
        Err(reason) => {
            report.drop(&node.facts.name, &reason);
            false
        }
    });
    report.kept = left.len();
    stages.push(report);
    if left.is_empty() { Err(stage) } else { Ok(()) }
}

/// Marks the nodes that fail a check as busy. They rank last among nodes with the same score and are not dropped,
/// because being busy is temporary.
fn mark_busy(
    stage: SchedulingStage,
    left: &mut [Candidate<'_>],
    stages: &mut Vec<StageReport>,
    check: fn(&NodeFacts) -> Result<(), RejectReason<'_>>,
) {
    let mut report = StageReport::new(stage);
    for node in left {
        match check(node.facts) {
            Ok(()) => report.kept += 1,
            Err(reason) => {
                report.drop(&node.facts.name, &reason);
                node.busy = true;
            }
        }
    }
    stages.push(report);
}

/// Returns how full a node is, and its random rank: a node with twice the headroom comes first twice as often. Without
/// randomness, concurrent requests would all choose the same node.
fn rank(node: &Candidate<'_>, policy: &SchedulerPolicy, random: f64) -> (f64, f64) {
    let load = node.facts.load_1 / node.facts.cpu_max.max(1.0);
    let memory = node.committed.memory_mb as f64 / node.facts.memory_max_mb.max(1.0);
    let fullness = (load / RANK_STEP).floor().max((memory / RANK_STEP).floor());
    let headroom = (policy.target_load - load).max(MIN_HEADROOM) * (1.0 - memory).max(MIN_HEADROOM);
    (fullness, -(1.0 - random).max(f64::MIN_POSITIVE).ln() / headroom)
}

/// The `SplitMix64` generator. It makes a random number for each node from a single one, because each real random
/// number costs a system call.
struct SplitMix64(u64);

impl SplitMix64 {
    fn new(seed: f64) -> Self {
        Self(seed.to_bits())
    }

    /// Returns a number in [0, 1).
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }
}
