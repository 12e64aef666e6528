//! The scheduler: computes from a placement request and facts about the nodes an ordered list of candidates, or why
//! there are none. See docs/decisions/0019.
//!
//! Everything here is pure: no database, no clock, no random source. The candidates are a proposal. The final decision
//! is [`commit_capacity`], made under the lock of the ledger of one node.
//!
//! ```text
//! all nodes ─▶ pre_schedule ─▶ is_hypervisor ─▶ shared_storage ─▶ cpu_max_per_instance
//!   ─▶ sufficient_idle_cpu ─▶ sufficient_idle_memory ─▶ sufficient_free_disk ─▶ affinity_constraints ─▶ sorted by
//!   (preferred neighbours, queue_state and sufficient_idle_disk, load and memory in coarse steps, weighted random)
//! ```

mod affinity;
mod candidates;
mod cluster_capacity;
mod eligibility;
mod ledger;
mod node_facts;
mod outcome;
mod policy;
mod rebalance;
mod reject_reason;
mod request;

#[cfg(test)]
mod tests;

pub use candidates::candidates;
pub use cluster_capacity::{
    CapacityShortfall, ClusterCapacity, cluster_capacity, require_claimable, require_unclaimed,
};
pub use ledger::{CapacityDenied, commit_capacity, commit_disk, release_capacity};
pub use node_facts::NodeFacts;
pub use outcome::{PlacementOutcome, PlacementRefusal, StageReport};
pub use policy::SchedulerPolicy;
pub use rebalance::{
    BalancedInstance, BalancedNode, MAX_SPREAD, RebalanceStep, Rebalancer, is_balanceable, spread,
};
pub use request::{PlacementRequest, StorageRequest};
