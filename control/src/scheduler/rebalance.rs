//! Which instances move to which nodes, so that the nodes are equally full. See docs/decisions/0075.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use muster_types::capacity::CommittedCapacity;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::rebalance::PlannedMove;

use super::affinity::{check_required, preference_score};
use super::eligibility::{is_hypervisor, pre_schedule};
use super::ledger::{commit_capacity, limits, release_capacity};
use super::node_facts::NodeFacts;
use super::policy::SchedulerPolicy;
use super::request::PlacementRequest;

/// The difference between the shares of two nodes up to which they are balanced.
pub const MAX_SPREAD: f64 = 0.2;

/// A node that can take instances, with those that it has.
#[derive(Debug, Clone)]
pub struct BalancedNode {
    pub facts: Arc<NodeFacts>,
    pub committed: CommittedCapacity,
    pub instances: Vec<BalancedInstance>,
}

/// An instance of a node.
#[derive(Debug, Clone)]
pub struct BalancedInstance {
    pub id: InstanceId,
    pub namespace: String,
    pub request: PlacementRequest,
    pub tags: Vec<String>,
    /// Whether it can be migrated while it runs.
    pub is_movable: bool,
}

/// A planned move, with the shares of its nodes before it.
#[derive(Debug, Clone, PartialEq)]
pub struct RebalanceStep {
    pub planned: PlannedMove,
    pub source_share: f64,
    pub target_share: f64,
}

/// Returns whether a node takes part: it can take instances.
#[must_use]
pub fn is_balanceable(facts: &NodeFacts, policy: &SchedulerPolicy) -> bool {
    pre_schedule(facts, policy).and_then(|()| is_hypervisor(facts)).is_ok()
}

/// Returns the share of a node that is committed: of its vCPUs or of its memory, whichever is larger.
fn committed_share(facts: &NodeFacts, committed: &CommittedCapacity, policy: &SchedulerPolicy) -> f64 {
    let [cpus, memory, _] = limits(facts, policy);
    // A node without capacity is full.
    let share = |committed: i64, limit: f64| if limit > 0.0 { committed as f64 / limit } else { 1.0 };
    share(committed.cpus, cpus).max(share(committed.memory_mb, memory))
}

/// Returns the difference between the largest and the smallest share.
#[must_use]
pub fn spread(shares: &[f64]) -> f64 {
    let largest = shares.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0);
    let smallest = shares.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0);
    largest - smallest
}

/// The rules by which instances move.
pub struct Rebalancer<'a> {
    pub policy: &'a SchedulerPolicy,
    /// Unix time.
    pub now: f64,
    /// Whether nothing else prevents a move.
    pub is_allowed: &'a (dyn Fn(&PlannedMove) -> bool + Sync),
}

impl fmt::Debug for Rebalancer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rebalancer").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Rebalancer<'_> {
    /// Returns the share of a node that is committed.
    #[must_use]
    pub fn share(&self, node: &BalancedNode) -> f64 {
        committed_share(&node.facts, &node.committed, self.policy)
    }

    /// Plans at most `max_moves` moves, and applies them to `nodes`. An instance moves at most once.
    pub fn plan(&self, nodes: &mut [BalancedNode], max_moves: usize) -> Vec<RebalanceStep> {
        let mut steps = Vec::new();
        while steps.len() < max_moves
            && let Some(next) = self.next_step(nodes)
            && self.apply(nodes, &next.planned)
        {
            steps.push(next);
        }
        steps
    }

    /// Returns whether a move still improves the balance, and keeps the affinity of all instances.
    #[must_use]
    pub fn is_useful(&self, nodes: &[BalancedNode], planned: &PlannedMove) -> bool {
        let find = |id: NodeId| nodes.iter().find(|node| node.facts.id == id);
        let (Some(source), Some(target)) = (find(planned.source), find(planned.target)) else { return false };
        let instance = source.instances.iter().find(|instance| instance.id == planned.instance);
        instance.is_some_and(|instance| self.share_after(instance, source, target).is_some())
    }

    /// Returns the best move from the fullest node to the emptiest one. If no instance can move between them, tries the
    /// next emptiest, then the next fullest.
    fn next_step(&self, nodes: &[BalancedNode]) -> Option<RebalanceStep> {
        let mut sorted: Vec<(f64, &BalancedNode)> =
            nodes.iter().map(|node| (self.share(node), node)).collect();
        sorted.sort_by(|(one, a), (other, b)| {
            other.total_cmp(one).then_with(|| a.facts.name.cmp(&b.facts.name))
        });
        for (full, source) in &sorted {
            for (empty, target) in sorted.iter().rev().take_while(|(empty, _)| is_unbalanced(*full, *empty)) {
                if let Some(planned) = self.best_move(source, target) {
                    return Some(RebalanceStep { planned, source_share: *full, target_share: *empty });
                }
            }
        }
        None
    }

    /// Returns the move between two nodes after which the fuller one is as empty as possible. Of equal ones, that with the least
    /// memory to copy.
    fn best_move(&self, source: &BalancedNode, target: &BalancedNode) -> Option<PlannedMove> {
        let useful = source.instances.iter().filter_map(|instance| {
            let share = self.share_after(instance, source, target)?;
            Some((share, instance.request.memory_mb, instance.id))
        });
        let order = |a: &(f64, i64, InstanceId), b: &(f64, i64, InstanceId)| -> Ordering {
            a.0.total_cmp(&b.0).then_with(|| (a.1, a.2).cmp(&(b.1, b.2)))
        };
        let (_, _, instance) = useful.min_by(order)?;
        Some(PlannedMove { instance, source: source.facts.id, target: target.facts.id })
    }

    /// Returns the share of the fuller one of two nodes after a move, or `None` if the instance must not move or the balance does
    /// not improve.
    fn share_after(
        &self,
        instance: &BalancedInstance,
        source: &BalancedNode,
        target: &BalancedNode,
    ) -> Option<f64> {
        let full = self.share(source);
        let planned = PlannedMove { instance: instance.id, source: source.facts.id, target: target.facts.id };
        if !instance.is_movable || !is_unbalanced(full, self.share(target)) || !(self.is_allowed)(&planned) {
            return None;
        }
        let (left, added) = self.ledgers_after(instance, source, target)?;
        let after = committed_share(&source.facts, &left, self.policy).max(committed_share(
            &target.facts,
            &added,
            self.policy,
        ));
        (after < full && keeps_affinity(instance, source, target)).then_some(after)
    }

    /// Returns the ledgers of both nodes after a move, or `None` if the target has no capacity.
    fn ledgers_after(
        &self,
        instance: &BalancedInstance,
        source: &BalancedNode,
        target: &BalancedNode,
    ) -> Option<(CommittedCapacity, CommittedCapacity)> {
        let request = &instance.request;
        // The measured and the expected load count as well: a node that is busy takes no further instance.
        let added =
            commit_capacity(request, &target.facts, &target.committed, self.policy, self.now, true).ok()?;
        let left =
            release_capacity(&source.committed, request.cpus, request.memory_mb, request.node_disk_gb());
        Some((left, added))
    }

    /// Applies a move. Returns `false` if it is not possible.
    fn apply(&self, nodes: &mut [BalancedNode], planned: &PlannedMove) -> bool {
        let position = |id: NodeId| nodes.iter().position(|node| node.facts.id == id);
        let (Some(source), Some(target)) = (position(planned.source), position(planned.target)) else {
            return false;
        };
        let moved = nodes[source].instances.iter().position(|instance| instance.id == planned.instance);
        let Some(moved) = moved else { return false };
        let ledgers = self.ledgers_after(&nodes[source].instances[moved], &nodes[source], &nodes[target]);
        let Some((left, added)) = ledgers else { return false };
        nodes[source].committed = left;
        nodes[target].committed = added;
        let instance = nodes[source].instances.remove(moved);
        nodes[target].instances.push(BalancedInstance { is_movable: false, ..instance });
        true
    }
}

/// Returns whether two nodes with these shares are not balanced.
fn is_unbalanced(full: f64, empty: f64) -> bool {
    full - empty > MAX_SPREAD
}

/// Returns whether no instance of two nodes is placed worse by a move: the moved one, its old and its new neighbours.
fn keeps_affinity(moved: &BalancedInstance, source: &BalancedNode, target: &BalancedNode) -> bool {
    let others = |node: &BalancedNode, except: &[InstanceId]| -> Vec<Vec<String>> {
        let neighbours = node.instances.iter().filter(|other| other.namespace == moved.namespace);
        neighbours.filter(|other| !except.contains(&other.id)).map(|other| other.tags.clone()).collect()
    };
    let affinity = &moved.request.affinity;
    let (old, new) = (others(source, &[moved.id]), others(target, &[]));
    if check_required(affinity, &new).is_err()
        || preference_score(affinity, &new) < preference_score(affinity, &old)
    {
        return false;
    }
    let is_kept = |node: &BalancedNode, is_source: bool| {
        let mut affected = node.instances.iter().filter(|other| {
            let has_affinity = other.request.affinity != muster_types::spec::Affinity::default();
            has_affinity && other.namespace == moved.namespace && other.id != moved.id
        });
        affected.all(|other| {
            let without = others(node, &[moved.id, other.id]);
            let with = [without.as_slice(), std::slice::from_ref(&moved.tags)].concat();
            let (before, after) = if is_source { (with, without) } else { (without, with) };
            let affinity = &other.request.affinity;
            (check_required(affinity, &after).is_ok() || check_required(affinity, &before).is_err())
                && preference_score(affinity, &after) >= preference_score(affinity, &before)
        })
    };
    is_kept(source, true) && is_kept(target, false)
}
