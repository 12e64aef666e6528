//! The outcome of a placement: candidates or a refusal, with a report for each stage.

use muster_types::Error;
use muster_types::ids::NodeId;
use muster_types::scheduling::SchedulingStage;
use muster_types::spec::Affinity;

use super::reject_reason::RejectReason;

/// The maximum number of dropped nodes that a report names.
const MAX_NAMED_NODES: usize = 50;

/// How many nodes passed a stage, and why others did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageReport {
    pub stage: SchedulingStage,
    /// The number of nodes that passed.
    pub kept: usize,
    /// The names of the first nodes that did not pass, with the reasons. `queue_state` and `sufficient_idle_disk` rank
    /// such nodes last, all other stages drop them.
    pub dropped: Vec<(String, String)>,
    /// The number of nodes that did not pass.
    pub dropped_count: usize,
}

impl StageReport {
    pub(super) fn new(stage: SchedulingStage) -> Self {
        Self { stage, kept: 0, dropped: Vec::new(), dropped_count: 0 }
    }

    pub(super) fn drop(&mut self, name: &str, reason: &RejectReason<'_>) {
        self.dropped_count += 1;
        if self.dropped.len() < MAX_NAMED_NODES {
            self.dropped.push((name.to_owned(), reason.to_string()));
        }
    }
}

/// The outcome of a placement request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementOutcome {
    /// The stages that were reached.
    pub stages: Vec<StageReport>,
    /// The candidates, best first; never empty.
    pub result: Result<Vec<NodeId>, PlacementRefusal>,
}

/// Why no node can take an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementRefusal {
    /// The stage that dropped the last node.
    pub stage: SchedulingStage,
    pub text: String,
    /// Whether a later request may succeed without a change of the cluster's nodes.
    pub transient: bool,
}

impl PlacementRefusal {
    /// Creates the refusal for a request of which `stage` dropped the last node. `fits_empty_node` tells whether a node
    /// of the cluster could take the instance if it had no other.
    pub(super) fn new(
        stage: SchedulingStage,
        affinity: &Affinity,
        fits_empty_node: bool,
        stages: &[StageReport],
    ) -> Self {
        let mut text = format!("No nodes remaining at scheduling stage {stage}");
        let transient = stage.is_transient() && fits_empty_node;
        if stage.is_transient() && !fits_empty_node {
            text.push_str(": no node is large enough for this instance");
        }
        if stage == SchedulingStage::AffinityConstraints {
            let (with, without) = (quoted(&affinity.require_with), quoted(&affinity.require_without));
            text = format!("{text}: require_with_tag=[{with}], require_without_tag=[{without}]");
        }
        if stage == SchedulingStage::SharedStorage
            && let Some((node, reason)) = stages.last().and_then(|report| report.dropped.first())
        {
            // The reasons of the other nodes are in the events of the instance.
            text = format!("{text}: node {node}: {reason}");
        }
        Self { stage, text, transient }
    }

    /// Creates the refusal for a request that the ledgers of all candidates denied.
    #[must_use]
    pub fn no_capacity(candidates: usize) -> Self {
        let stage = SchedulingStage::CapacityGuard;
        let text = format!("no node had capacity for this instance, {candidates} candidates refused it");
        Self { stage, text, transient: stage.is_transient() }
    }
}

impl From<PlacementRefusal> for Error {
    fn from(refusal: PlacementRefusal) -> Self {
        match refusal.stage {
            // Other instances must change first; waiting does not help.
            SchedulingStage::AffinityConstraints => Self::Conflict(refusal.text),
            stage => Self::Unschedulable { text: refusal.text, stage, transient: refusal.transient },
        }
    }
}

fn quoted(tags: &[String]) -> String {
    tags.iter().map(|tag| format!("'{tag}'")).collect::<Vec<_>>().join(", ")
}
