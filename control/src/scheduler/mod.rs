//! Where an instance goes: from a wish and the facts about nodes to an ordered list of candidates, or the reasons
//! why there is none.
//!
//! Everything here is pure: no database, no clock, no dice of its own. The candidates are a proposal; what is
//! decided is decided by [`claim`], under the lock of the ledger of one node.
//!
//! ```text
//! every node ─▶ pre_schedule ─▶ is_hypervisor ─▶ cpu_max_per_instance ─▶ sufficient_idle_cpu
//!   ─▶ sufficient_idle_memory ─▶ sufficient_free_disk ─▶ affinity_constraints ─▶ in the order of
//!   (liked neighbours, queue_state and sufficient_idle_disk, load and memory in coarse steps, weighted dice)
//! ```

mod facts;
mod ledger;
mod neighbours;
mod room;
mod shortage;
mod stage;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Deref;

use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;
use muster_types::settings::Settings;
use muster_types::spec::Affinity;

pub use facts::Facts;
pub use ledger::{Denied, claim, release};
pub use room::{Lacking, Room, promise, room, spare};
use shortage::Shortage;
pub use stage::{Outcome, Refusal, Stage, StageReport};

/// A node that said nothing for so long, in seconds, is not counted on.
const OLDEST_FACTS: f64 = 120.0;
/// A node with more jobs waiting comes last among its equals.
const MOST_WAITING: f64 = 20.0;
/// A node whose disks are busy for longer, in milliseconds of a second over all disks, comes last among its equals.
const BUSIEST_DISK_MS: f64 = 1200.0;
/// Nodes whose load and memory differ by less than a step are equals.
const STEP: f64 = 0.25;
/// What is left of the chances of a node without headroom.
const LEAST_HEADROOM: f64 = 0.01;

/// What is looked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    pub cpus: i64,
    pub memory_mb: i64,
    /// The sizes of all disks that have one.
    pub disk_gb: i64,
    /// The only node that will do.
    pub only: Option<NodeId>,
    pub affinity: Affinity,
}

/// How far nodes may be filled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Promised per real one.
    pub cpu_overcommit: f64,
    pub memory_overcommit: f64,
    pub disk_overcommit: f64,
    /// Of a thread.
    pub target_load: f64,
    /// The load that is expected of a new processor, and for how many seconds.
    pub demand_per_vcpu: f64,
    pub demand_decay_seconds: f64,
}

impl From<&Settings> for Policy {
    fn from(settings: &Settings) -> Self {
        Self {
            cpu_overcommit: settings.cpu_overcommit_ratio,
            memory_overcommit: settings.ram_overcommit_ratio,
            disk_overcommit: settings.scheduler_disk_overcommit,
            target_load: settings.scheduler_target_load,
            demand_per_vcpu: settings.scheduler_demand_per_vcpu,
            demand_decay_seconds: settings.scheduler_demand_decay_seconds as f64,
        }
    }
}

/// A node that is still in question.
struct Candidate<'a> {
    facts: &'a Facts,
    committed: &'a CommittedCapacity,
    /// How much it likes its neighbours there.
    score: i64,
    busy: bool,
    bucket: f64,
    /// Lower is better.
    lot: f64,
}

/// The nodes that can take an instance, best first.
///
/// `neighbours` are the tags of each instance of the namespace on each node, and are read only for an instance that
/// cares. `dice` throws a number from 0 to 1, and is thrown at most once.
pub fn candidates<F: Deref<Target = Facts>>(
    wish: &Wish,
    nodes: &[(F, CommittedCapacity)],
    neighbours: &HashMap<NodeId, Vec<Vec<String>>>,
    policy: &Policy,
    now: f64,
    dice: &mut impl FnMut() -> f64,
) -> Outcome {
    let mut left: Vec<Candidate<'_>> = nodes
        .iter()
        .filter(|(facts, _)| wish.only.is_none_or(|only| only == facts.id))
        .map(|(facts, committed)| Candidate {
            facts,
            committed,
            score: 0,
            busy: false,
            bucket: 0.0,
            lot: 0.0,
        })
        .collect();
    let mut stages = Vec::with_capacity(9);
    let result = narrow(wish, &mut left, neighbours, policy, now, &mut stages);
    if let Err(stage) = result {
        return Outcome { stages, result: Err(Refusal::new(stage, &wish.affinity)) };
    }
    if !wish.affinity.prefer_with.is_empty() || !wish.affinity.prefer_without.is_empty() {
        for node in &mut left {
            node.score = neighbours::score(&wish.affinity, of(neighbours, node.facts.id));
        }
    }
    for (stage, check) in [
        (Stage::QueueState, queue_state as fn(&Facts) -> Result<(), Shortage<'_>>),
        (Stage::SufficientIdleDisk, sufficient_idle_disk),
    ] {
        put_last(stage, &mut left, &mut stages, check);
    }
    let mut lots = Lots::new(dice());
    for node in &mut left {
        (node.bucket, node.lot) = rank(node, policy, lots.draw());
    }
    left.sort_unstable_by(|a, b| {
        let order = |node: &Candidate<'_>| (Reverse(node.score), node.busy);
        order(a).cmp(&order(b)).then(a.bucket.total_cmp(&b.bucket)).then(a.lot.total_cmp(&b.lot))
    });
    Outcome { stages, result: Ok(left.iter().map(|node| node.facts.id).collect()) }
}

/// Drops the nodes that cannot take it, until a stage leaves none.
fn narrow<'a>(
    wish: &'a Wish,
    left: &mut Vec<Candidate<'a>>,
    neighbours: &HashMap<NodeId, Vec<Vec<String>>>,
    policy: &Policy,
    now: f64,
    stages: &mut Vec<StageReport>,
) -> Result<(), Stage> {
    keep(Stage::PreSchedule, left, stages, |node| pre_schedule(node.facts, now))?;
    keep(Stage::IsHypervisor, left, stages, |node| is_hypervisor(node.facts))?;
    keep(Stage::CpuMaxPerInstance, left, stages, |node| ledger::cpu_per_instance(wish, node.facts))?;
    keep(Stage::SufficientIdleCpu, left, stages, |node| {
        ledger::cpu(wish, node.facts, node.committed, policy)
    })?;
    keep(Stage::SufficientIdleMemory, left, stages, |node| {
        ledger::memory(wish, node.facts, node.committed, policy)
    })?;
    keep(Stage::SufficientFreeDisk, left, stages, |node| {
        ledger::disk(wish, node.facts, node.committed, policy)
    })?;
    if wish.affinity.has_requirements() {
        keep(Stage::AffinityConstraints, left, stages, |node| {
            neighbours::require(&wish.affinity, of(neighbours, node.facts.id))
        })?;
    }
    Ok(())
}

fn of(neighbours: &HashMap<NodeId, Vec<Vec<String>>>, node: NodeId) -> &[Vec<String>] {
    neighbours.get(&node).map_or(&[], Vec::as_slice)
}

fn keep<'a>(
    stage: Stage,
    left: &mut Vec<Candidate<'a>>,
    stages: &mut Vec<StageReport>,
    check: impl Fn(&Candidate<'a>) -> Result<(), Shortage<'a>>,
) -> Result<(), Stage> {
    let mut report = StageReport::new(stage);
    left.retain(|node| match check(node) {
        Ok(()) => true,
        Err(shortage) => {
            report.drop(&node.facts.name, &shortage);
            false
        }
    });
    report.kept = left.len();
    stages.push(report);
    if left.is_empty() { Err(stage) } else { Ok(()) }
}

/// Marks nodes that have room but are busy. They are the last among those with the same neighbours and not dropped:
/// that a node is busy passes, and no reason to refuse what it could take.
fn put_last(
    stage: Stage,
    left: &mut [Candidate<'_>],
    stages: &mut Vec<StageReport>,
    check: fn(&Facts) -> Result<(), Shortage<'_>>,
) {
    let mut report = StageReport::new(stage);
    for node in left {
        match check(node.facts) {
            Ok(()) => report.kept += 1,
            Err(shortage) => {
                report.drop(&node.facts.name, &shortage);
                node.busy = true;
            }
        }
    }
    stages.push(report);
}

fn pre_schedule(facts: &Facts, now: f64) -> Result<(), Shortage<'_>> {
    if facts.state != muster_types::node::NodeState::Created {
        return Err(Shortage::State(facts.state));
    }
    if facts.cpu_max <= 0.0 {
        return Err(Shortage::NoFacts);
    }
    if now - facts.lastseen > OLDEST_FACTS {
        return Err(Shortage::Silent(now - facts.lastseen));
    }
    Ok(())
}

fn is_hypervisor(facts: &Facts) -> Result<(), Shortage<'_>> {
    if !facts.is_hypervisor {
        return Err(Shortage::NoHypervisor);
    }
    facts.refuses.as_deref().map_or(Ok(()), |reason| Err(Shortage::Refuses(reason)))
}

fn queue_state(facts: &Facts) -> Result<(), Shortage<'_>> {
    if facts.waiting > MOST_WAITING { Err(Shortage::Waiting(facts.waiting)) } else { Ok(()) }
}

fn sufficient_idle_disk(facts: &Facts) -> Result<(), Shortage<'_>> {
    if facts.disk_busy_ms > BUSIEST_DISK_MS { Err(Shortage::DiskBusy(facts.disk_busy_ms)) } else { Ok(()) }
}

/// How full a node is in coarse steps, and its lot among those that are as full: a node with twice the headroom comes
/// first twice as often. Without chance, all requests of a moment would run into the same node.
fn rank(node: &Candidate<'_>, policy: &Policy, drawn: f64) -> (f64, f64) {
    let load = node.facts.load_1 / node.facts.cpu_max.max(1.0);
    let promised = node.committed.memory_mb as f64 / node.facts.memory_max_mb.max(1.0);
    let bucket = (load / STEP).floor().max((promised / STEP).floor());
    let headroom = (policy.target_load - load).max(LEAST_HEADROOM) * (1.0 - promised).max(LEAST_HEADROOM);
    (bucket, -(1.0 - drawn).max(f64::MIN_POSITIVE).ln() / headroom)
}

/// As many numbers as there are nodes, from one throw: real chance is a system call each time.
struct Lots(u64);

impl Lots {
    fn new(thrown: f64) -> Self {
        Self(thrown.to_bits())
    }

    /// From 0 up to 1.
    fn draw(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }
}
