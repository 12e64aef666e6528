//! The capacity of the whole cluster, and how much of it the claims of namespaces reserve. See docs/decisions/0023.

use muster_types::capacity::{Capacity, CommittedCapacity};

use super::eligibility::{is_hypervisor, pre_schedule};
use super::ledger::{CapacityDenied, limits};
use super::node_facts::NodeFacts;
use super::policy::SchedulerPolicy;
use super::reject_reason::RejectReason;

/// The total and the uncommitted capacity of the nodes that can run VMs, in the order of [`Capacity::parts`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ClusterCapacity {
    pub total: [f64; 3],
    pub free: [f64; 3],
}

/// Returns the capacity of a cluster, or `None` if no node that can run VMs has reported recently.
pub fn cluster_capacity<'a>(
    nodes: impl IntoIterator<Item = (&'a NodeFacts, CommittedCapacity)>,
    policy: &SchedulerPolicy,
) -> Option<ClusterCapacity> {
    let mut cluster = None;
    for (facts, committed) in nodes {
        if pre_schedule(facts, policy).and_then(|()| is_hypervisor(facts)).is_err() {
            continue;
        }
        let cluster = cluster.get_or_insert_with(ClusterCapacity::default);
        let taken = [
            (committed.cpus as f64).max(facts.measured_vcpus),
            committed.memory_mb as f64,
            committed.disk_gb as f64,
        ];
        for (part, (limit, taken)) in limits(facts, policy).into_iter().zip(taken).enumerate() {
            // Claims are in whole vCPUs and gigabytes.
            let limit = limit.floor();
            cluster.total[part] += limit;
            // An overcommitted node does not reduce the capacity of the others.
            cluster.free[part] += (limit - taken).max(0.0).floor();
        }
    }
    cluster
}

/// Rejects an instance that needs capacity that other namespaces have claimed and not used. `own` is the unused claim
/// of its own namespace, which is always available to it.
pub fn require_unclaimed(
    requested: &Capacity,
    own: &Capacity,
    others: &Capacity,
    cluster: &ClusterCapacity,
) -> Result<(), CapacityDenied> {
    let each = requested.parts().into_iter().zip(own.parts()).zip(others.parts()).zip(cluster.free);
    for (resource, (((requested, own), claimed), free)) in Capacity::NAMES.into_iter().zip(each) {
        if requested > own && claimed > 0 && free - (requested as f64) < claimed as f64 {
            let reason = RejectReason::ClaimedByOthers { resource, free, claimed, requested };
            return Err(CapacityDenied::new(&reason, false));
        }
    }
    Ok(())
}

/// Rejects a claim whose `unused` part does not fit beside the unused claims of `others` and the committed capacity.
/// Returns the resources that do not fit.
pub fn require_claimable(
    unused: &Capacity,
    others: &Capacity,
    cluster: &ClusterCapacity,
) -> Result<(), Vec<CapacityShortfall>> {
    let available = cluster.total.into_iter().zip(cluster.free);
    let each = unused.parts().into_iter().zip(others.parts()).zip(available);
    let shortfalls: Vec<CapacityShortfall> = each
        .enumerate()
        .filter(|(_, ((unused, others), (_, free)))| *unused > 0 && free - (*others as f64) < *unused as f64)
        .map(|(part, ((_, others), (total, free)))| CapacityShortfall {
            part,
            total,
            taken: total - free + others as f64,
        })
        .collect();
    if shortfalls.is_empty() { Ok(()) } else { Err(shortfalls) }
}

/// A resource of which a cluster has too little.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CapacityShortfall {
    /// The index in [`Capacity::parts`].
    pub part: usize,
    pub total: f64,
    /// The committed and the claimed capacity.
    pub taken: f64,
}

#[cfg(test)]
mod tests {
    use muster_types::node::NodeState;
    use proptest::prelude::*;

    use super::super::tests::{node, policy};
    use super::*;

    fn cpus(cpus: i64) -> Capacity {
        Capacity { cpus, memory_mb: 0, disk_gb: 0 }
    }

    /// Returns a cluster with 20 CPUs, `free` of them free, and plenty of memory and disk.
    fn with_cpus(free: i64) -> ClusterCapacity {
        ClusterCapacity { total: [20.0, 1e9, 1e9], free: [free as f64, 1e9, 1e9] }
    }

    #[test]
    fn counts_only_nodes_that_can_run_vms() {
        let (first, mut second) = (node("a"), node("b"));
        let some = CommittedCapacity { cpus: 4, memory_mb: 1000, disk_gb: 7, ..CommittedCapacity::default() };
        let found =
            cluster_capacity([(&first, some), (&second, CommittedCapacity::default())], &policy()).unwrap();
        assert_eq!(found.total, [36.0, 86016.0, 800.0]);
        assert_eq!(found.free, [32.0, 85016.0, 793.0]);
        second.measured_vcpus = 5.0;
        let too_much = CommittedCapacity { cpus: 40, ..some };
        let found =
            cluster_capacity([(&first, too_much), (&second, CommittedCapacity::default())], &policy())
                .unwrap();
        assert_eq!(found.free[0], 13.0, "an overcommitted node does not reduce the capacity of the other");
        for change in [
            (|facts: &mut NodeFacts| facts.state = NodeState::Missing) as fn(&mut NodeFacts),
            |facts| facts.silence = 7.6,
            |facts| facts.is_hypervisor = false,
            |facts| facts.vms_unavailable = Some("no".into()),
            |facts| facts.cpu_max = 0.0,
        ] {
            let mut excluded = node("c");
            change(&mut excluded);
            assert_eq!(cluster_capacity([(&excluded, some)], &policy()), None);
            assert_eq!(
                cluster_capacity([(&first, some), (&excluded, some)], &policy()).unwrap().total[0],
                18.0
            );
        }
    }

    #[test]
    fn capacity_claimed_by_others_is_not_available() {
        let none = Capacity::default();
        assert!(require_unclaimed(&cpus(4), &none, &cpus(6), &with_cpus(10)).is_ok());
        let denied = require_unclaimed(&cpus(5), &none, &cpus(6), &with_cpus(10)).unwrap_err();
        let why =
            "6 of the 10 cpus that are free in the cluster are claimed by other namespaces, 5 are requested";
        assert_eq!((denied.reason.as_str(), denied.only_demand), (why, false));
        assert!(
            require_unclaimed(&cpus(5), &none, &none, &with_cpus(3)).is_ok(),
            "the ledgers of the nodes decide"
        );
        assert!(
            require_unclaimed(&cpus(5), &cpus(4), &cpus(6), &with_cpus(10)).is_err(),
            "exceeds its own claim"
        );
        // Nodes have failed and not all claims can be satisfied: the first request wins.
        assert!(require_unclaimed(&cpus(4), &cpus(4), &cpus(6), &with_cpus(7)).is_ok());
    }

    #[test]
    fn claim_is_rejected_per_resource() {
        let others = Capacity { cpus: 3, memory_mb: 10, disk_gb: 0 };
        let cluster = ClusterCapacity { total: [20.0, 100.0, 50.0], free: [10.0, 20.0, 50.0] };
        let check = |cpus, memory_mb, disk_gb| {
            require_claimable(&Capacity { cpus, memory_mb, disk_gb }, &others, &cluster)
        };
        assert_eq!(check(7, 10, 50), Ok(()));
        assert_eq!(check(0, 0, 0), Ok(()));
        let shortfalls = [
            CapacityShortfall { part: 0, total: 20.0, taken: 13.0 },
            CapacityShortfall { part: 1, total: 100.0, taken: 90.0 },
            CapacityShortfall { part: 2, total: 50.0, taken: 0.0 },
        ];
        assert_eq!(check(8, 11, 51), Err(shortfalls.to_vec()));
        assert_eq!(check(8, i64::MAX, 0).unwrap_err().len(), 2);
    }

    /// A change of a cluster with three namespaces.
    #[derive(Debug, Clone)]
    enum Action {
        Claim(usize, i64),
        Place(usize, i64),
        End(usize),
    }

    fn actions() -> impl Strategy<Value = Vec<Action>> {
        let action = prop_oneof![
            (0..3_usize, 0..12_i64).prop_map(|(namespace, limit)| Action::Claim(namespace, limit)),
            (0..3_usize, 1..6_i64).prop_map(|(namespace, size)| Action::Place(namespace, size)),
            (0..3_usize).prop_map(Action::End),
        ];
        prop::collection::vec(action, 0..60)
    }

    proptest! {
        #[test]
        fn unused_claims_always_fit_into_the_free_capacity(actions in actions()) {
            let (mut limits, mut placed) = ([0_i64; 3], [Vec::<i64>::new(), vec![], vec![]]);
            for action in actions {
                let used = |namespace: usize| -> i64 { placed[namespace].iter().sum() };
                let unused = |namespace: usize, limit: i64| (limit - used(namespace)).max(0);
                let others = |namespace: usize| -> Capacity {
                    cpus((0..3).filter(|one| *one != namespace).map(|one| unused(one, limits[one])).sum())
                };
                let cluster = with_cpus(20 - (0..3).map(used).sum::<i64>());
                match action {
                    Action::Claim(namespace, limit) => {
                        if require_claimable(&cpus(unused(namespace, limit)), &others(namespace), &cluster).is_ok() {
                            limits[namespace] = limit;
                        }
                    }
                    Action::Place(namespace, size) => {
                        let own = cpus(unused(namespace, limits[namespace]));
                        let is_available = require_unclaimed(&cpus(size), &own, &others(namespace), &cluster).is_ok();
                        let within_claim = size <= own.cpus;
                        prop_assert!(!within_claim || (is_available && size as f64 <= cluster.free[0]), "a claim is honoured");
                        if is_available && size as f64 <= cluster.free[0] {
                            placed[namespace].push(size);
                        }
                    }
                    Action::End(namespace) => {
                        placed[namespace].pop();
                    }
                }
                let used: i64 = placed.iter().flatten().sum();
                let claimed: i64 =
                    (0..3).map(|namespace| (limits[namespace] - placed[namespace].iter().sum::<i64>()).max(0)).sum();
                prop_assert!(used + claimed <= 20, "{limits:?} {placed:?}");
            }
        }
    }
}
