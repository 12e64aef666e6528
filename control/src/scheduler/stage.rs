//! What became of the nodes at each stage of a placement.

use muster_types::Error;
use muster_types::ids::NodeId;
pub use muster_types::scheduling::SchedulingStage as Stage;
use muster_types::spec::Affinity;

use super::shortage::Shortage;

/// How many dropped nodes of a stage are named.
const MOST_NAMED: usize = 50;

/// What a stage did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageReport {
    pub stage: Stage,
    /// How many nodes passed.
    pub kept: usize,
    /// Name and reason of the first of those that did not pass. They are out, except after `queue_state` and
    /// `sufficient_idle_disk`: there they are put last.
    pub dropped: Vec<(String, String)>,
    /// How many did not pass, named or not.
    pub dropped_count: usize,
}

impl StageReport {
    pub(super) fn new(stage: Stage) -> Self {
        Self { stage, kept: 0, dropped: Vec::new(), dropped_count: 0 }
    }

    pub(super) fn drop(&mut self, name: &str, shortage: &Shortage<'_>) {
        self.dropped_count += 1;
        if self.dropped.len() < MOST_NAMED {
            self.dropped.push((name.to_owned(), shortage.to_string()));
        }
    }
}

/// What became of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Those that were reached.
    pub stages: Vec<StageReport>,
    /// Candidates, best first; never an empty list.
    pub result: Result<Vec<NodeId>, Refusal>,
}

/// Why there is no node for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Where the last node dropped out.
    pub stage: Stage,
    pub text: String,
}

impl Refusal {
    pub(super) fn new(stage: Stage, affinity: &Affinity) -> Self {
        let mut text = format!("No nodes remaining at scheduling stage {stage}");
        if stage == Stage::AffinityConstraints {
            let (with, without) = (quoted(&affinity.require_with), quoted(&affinity.require_without));
            text = format!("{text}: require_with_tag=[{with}], require_without_tag=[{without}]");
        }
        Self { stage, text }
    }

    /// After each of `candidates` refused the claim.
    #[must_use]
    pub fn full(candidates: usize) -> Self {
        let stage = Stage::CapacityGuard;
        let text = format!("no node had capacity for this instance, {candidates} candidates refused it");
        Self { stage, text }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal.stage {
            // Waiting does not help, other neighbours do.
            Stage::AffinityConstraints => Self::Conflict(refusal.text),
            stage => Self::Unschedulable { text: refusal.text, stage },
        }
    }
}

fn quoted(tags: &[String]) -> String {
    tags.iter().map(|tag| format!("'{tag}'")).collect::<Vec<_>>().join(", ")
}
