//! Why an object is in its state, what it waits for and what to do next.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::scheduling::SchedulingStage;

/// Why an object is in its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The type of the object, such as `instance`.
    pub object_type: String,
    /// UUID of the object.
    pub uuid: String,
    /// The name of the object; `null` if it has none.
    pub name: Option<String>,
    /// The state of the object. A created instance has its power state here.
    pub state: String,
    /// Since when it has this state, as Unix time; `null` if the event of the change was pruned.
    pub since: Option<f64>,
    /// The reason in one sentence.
    pub why: String,
    /// What must happen before the state changes.
    pub waits_for: Vec<AwaitedObject>,
    /// What a user can do.
    pub next: Vec<NextStep>,
    /// What the scheduler decided about each node when it last placed the instance; empty for other objects, or if the
    /// events were pruned.
    pub placement: Vec<NodeVerdict>,
}

/// An object that another one waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AwaitedObject {
    /// The type of the object, such as `clusteroperation`.
    pub object_type: String,
    /// UUID of the object, or the name of a node.
    pub uuid: String,
    /// The state of the object.
    pub state: String,
    /// What it does, and how far it is.
    pub text: String,
}

/// Something that a user can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NextStep {
    /// What to do.
    pub text: String,
    /// The command that does it; `null` if no command does it.
    pub command: Option<String>,
}

/// What the scheduler decided about a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeVerdict {
    /// The name of the node.
    pub node: String,
    /// Whether the instance was placed there.
    pub chosen: bool,
    /// The stage at which it was rejected; `null` for a candidate.
    pub stage: Option<SchedulingStage>,
    /// Why it was rejected.
    pub reason: Option<String>,
}

impl NextStep {
    /// Returns a step that a command takes.
    #[must_use]
    pub fn command(text: &str, command: String) -> Self {
        Self { text: text.to_owned(), command: Some(command) }
    }

    /// Returns a step without a command.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self { text: text.to_owned(), command: None }
    }
}
