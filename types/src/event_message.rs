//! Messages of events that clients interpret. The server writes and the client reads them through one type, because
//! released clients fix their texts.

use std::fmt;

use crate::instance::{InstanceState, PowerState};
use crate::network::NetworkState;
use crate::operation::OperationState;
use crate::scheduling::SchedulingStage;

/// The message of an event that clients interpret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventMessage {
    RecordCreated,
    CreationRequested,
    /// The connection file of a screen viewer was requested.
    ViewerFileRequested,
    /// Any other API request.
    Requested(String),
    SchedulingStarted,
    SchedulingInputs,
    SchedulingInitialCandidates,
    SchedulingHighestAffinity,
    SchedulingFinalCandidates,
    SchedulingStage(SchedulingStage),
    /// The last candidate dropped out at this stage.
    SchedulingAborted(SchedulingStage),
    /// The image of an instance is on its node.
    ImageReady,
    DiskCopied,
    InstanceState(InstanceState),
    /// Has the same text as [`InstanceState`](Self::InstanceState), as which it is parsed: the object of the event tells them
    /// apart.
    NetworkState(NetworkState),
    PowerState(PowerState),
    OperationState(OperationState),
}

const REQUEST_SUFFIX: &str = " request from REST API";
const STATE_PREFIX: &str = "state is now ";
const POWER_STATE_PREFIX: &str = "power state is now ";
const STAGE_PREFIX: &str = "schedule at stage ";
const ABORTED_PREFIX: &str = "schedule has no candidates at stage ";
const ABORTED_SUFFIX: &str = ", aborting";

impl EventMessage {
    /// The messages without a parameter.
    const FIXED: &'static [(Self, &'static str)] = &[
        (Self::RecordCreated, "db record created"),
        (Self::CreationRequested, "creation request from REST API"),
        (Self::ViewerFileRequested, "vdi console helper request from REST API"),
        (Self::SchedulingStarted, "started scheduling"),
        (Self::SchedulingInputs, "schedule inputs"),
        (Self::SchedulingInitialCandidates, "schedule initial candidates"),
        (Self::SchedulingHighestAffinity, "schedule have highest affinity"),
        (Self::SchedulingFinalCandidates, "schedule final candidates"),
        (Self::ImageReady, "image is ready on the node"),
        (Self::DiskCopied, "disk was copied"),
        (Self::OperationState(OperationState::Queued), "operation will be tried again"),
        (Self::OperationState(OperationState::Executing), "operation started"),
        (Self::OperationState(OperationState::Complete), "operation complete"),
        (Self::OperationState(OperationState::Error), "operation failed"),
        (Self::OperationState(OperationState::Abort), "operation aborted"),
    ];

    /// Parses a message. Returns `None` for messages that have no meaning for clients.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Some((message, _)) = Self::FIXED.iter().find(|(_, fixed)| *fixed == text) {
            return Some(message.clone());
        }
        if let Some(request) = text.strip_suffix(REQUEST_SUFFIX) {
            return Some(Self::Requested(request.to_owned()));
        }
        if let Some(stage) = text.strip_prefix(STAGE_PREFIX) {
            return stage.parse().ok().map(Self::SchedulingStage);
        }
        if let Some(stage) = text.strip_prefix(ABORTED_PREFIX) {
            return stage.strip_suffix(ABORTED_SUFFIX)?.parse().ok().map(Self::SchedulingAborted);
        }
        if let Some(state) = text.strip_prefix(STATE_PREFIX) {
            return state.parse().ok().map(Self::InstanceState);
        }
        // Older servers wrote the name of the field.
        let state =
            text.strip_prefix(POWER_STATE_PREFIX).or_else(|| text.strip_prefix("power_state is now "))?;
        state.parse().ok().map(Self::PowerState)
    }
}

impl fmt::Display for EventMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested(request) => write!(f, "{request}{REQUEST_SUFFIX}"),
            Self::SchedulingStage(stage) => write!(f, "{STAGE_PREFIX}{stage}"),
            Self::SchedulingAborted(stage) => write!(f, "{ABORTED_PREFIX}{stage}{ABORTED_SUFFIX}"),
            Self::InstanceState(state) => write!(f, "{STATE_PREFIX}{state}"),
            Self::NetworkState(state) => write!(f, "{STATE_PREFIX}{state}"),
            Self::PowerState(state) => write!(f, "{POWER_STATE_PREFIX}{state}"),
            fixed => match Self::FIXED.iter().find(|(message, _)| message == fixed) {
                Some((_, text)) => f.write_str(text),
                None => unreachable!("every message without a parameter has a text"),
            },
        }
    }
}

impl From<EventMessage> for String {
    fn from(message: EventMessage) -> Self {
        message.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_parsed_back() {
        let parameters = [
            EventMessage::Requested("poweroff".into()),
            EventMessage::SchedulingStage(SchedulingStage::QueueState),
            EventMessage::SchedulingAborted(SchedulingStage::PreSchedule),
            EventMessage::InstanceState(InstanceState::CreatingError),
            EventMessage::PowerState(PowerState::Crashed),
        ];
        let states = OperationState::ALL.iter().map(|state| EventMessage::OperationState(*state));
        let fixed = EventMessage::FIXED.iter().map(|(message, _)| message.clone());
        for message in parameters.into_iter().chain(states).chain(fixed) {
            assert_eq!(EventMessage::parse(&message.to_string()), Some(message));
        }
    }

    #[test]
    fn other_messages_have_no_meaning() {
        for text in ["", "interface was plugged in", "state is now odd", "schedule at stage odd"] {
            assert_eq!(EventMessage::parse(text), None, "{text}");
        }
    }
}
